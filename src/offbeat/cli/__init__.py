"""The command line: ``offbeat``. It reads words, runs things, prints tables; what it calls is the public library."""

from __future__ import annotations

import atexit
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from offbeat.basics.version import __version__
from offbeat.cli.demo import demo
from offbeat.cli.inspecting import inspect
from offbeat.cli.launching import launch
from offbeat.cli.methods import cite, list_methods
from offbeat.cli.output import COMMAND
from offbeat.cli.report import report
from offbeat.cli.reproduce import reproduce
from offbeat.cli.running import compare, simulate, train
from offbeat.cli.status import show_status
from offbeat.live import OffbeatError
from offbeat.sim import Deadlock

__all__ = ["app", "main", "run"]

WRONG_INPUT, FAILED, INTERRUPTED = 2, 1, 130

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo)
app.command("list")(list_methods)
app.command("cite")(cite)
app.command("simulate")(simulate)
app.command("train")(train)
app.command("launch", context_settings={"allow_interspersed_args": False})(launch)
app.command("compare")(compare)
app.command("report")(report)
app.command("reproduce")(reproduce)
app.command("status")(show_status)
app.command("inspect")(inspect)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"offbeat {__version__}")
        raise typer.Exit


@app.callback()
def offbeat(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Train PyTorch models on many workers without marching in step.

    Start with `offbeat demo`: real processes, stragglers, and what each method makes of them. `offbeat compare
    --delay "2 ranks 320ms"` does it in virtual time, with any number of workers; `offbeat list` names the methods.

    Times, rates and sizes carry units: 320ms, 50us, 10Gbps, 25.6M.
    """


def run() -> NoReturn:
    """The command itself: ``main``, and the end of the process.

    Ctrl-C finds threads of torch's launcher anywhere. One that is inside C++ when the interpreter takes itself apart
    cannot get its lock back, and the process aborts instead of ending with 130; so it ends without taking itself apart.
    """
    code = main()
    if code == INTERRUPTED:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; answers its exit code: 0, 1 for a run that failed, 2 for wrong input, 130 after Ctrl-C."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    COMMAND.set(shlex.join(["offbeat", *given]))
    try:
        code = app(given or ["--help"], prog_name="offbeat", standalone_mode=False)
    except ValueError as error:
        return _say(str(error), WRONG_INPUT)
    except (OffbeatError, Deadlock, BrokenPipeError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of our output has left, as `head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return FAILED
        return _say(str(error), FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return _say("interrupted", INTERRUPTED)
    except Exception as error:
        usage = getattr(error, "format_message", None)  # typer's own, whichever click it carries
        if usage is None:
            raise
        words = str(usage()).rstrip(".")
        return _say(f"{words[:1].lower()}{words[1:]}; see offbeat --help, or --help after a command", WRONG_INPUT)
    if code == INTERRUPTED:
        return _say("interrupted", INTERRUPTED)
    return code if isinstance(code, int) else 0


def _say(sentence: str, code: int) -> int:
    print(f"offbeat: {sentence}", file=sys.stderr)
    return code
