"""Three pages of the reference that are read from the source: errors, environment variables, and the command line.

MkDocs loads this file as a hook and asks it for the pages, which are never written to disk. An error or a variable that
is added to the source is on its page without anything else; a variable that nobody has described stops the build.
"""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

SRC = Path(__file__).parent.parent / "src" / "offbeat"
MUST = ", but must "  # what stands behind it is the way out
HOLE = "…"  # a value that is only known when the error is raised

OURS = {"OffbeatError", "PeerFailed", "ConfigMismatch", "Deadlock", "Mismatch"}
USUAL = {"ValueError", "TypeError", "ImportError"}
# What processes of Offbeat say to each other: no user is told.
AMONG_OURSELVES = ("live/host/", "live/memory/", "rounds/", "tensors/messages", "tensors/bits")
SECTIONS = (
    ("Start, wait, fail", ("live/transport", "live/worker", "live/job", "live/host", "live/memory", "live/partial")),
    ("Attached optimizers", ("live/attached", "live/carriers")),
    ("Shared work", ("live/work",)),
    ("Trainers", ("integrations",)),
    ("Methods and their settings", ("strategies", "method", "rounds", "tensors", "topology")),
    (
        "Simulations, delays, tasks, experiments",
        ("sim", "delays", "tasks", "experiments", "runs", "replaying", "report"),
    ),
    ("The command line, units and numbers", ("cli", "basics")),
)
KINDS = {
    "OffbeatError": (
        "the base of Offbeat's own errors; it is a `RuntimeError`",
        "the sentence says what cannot be; `offbeat status` shows the job",
    ),
    "PeerFailed": (
        "an `OffbeatError`: another worker failed, died or does not answer; the message names its rank",
        "look at the output of that rank; go on from a [checkpoint](../checkpoint.md)",
    ),
    "ConfigMismatch": (
        "an `OffbeatError`: workers do not fit together; nothing was exchanged yet",
        "start all ranks with the same script, arguments and versions",
    ),
    "Deadlock": ("a simulation cannot go on; the message says who waits for whom", "mend the method: all mix alike"),
    "Mismatch": (
        "a record cannot be followed by a replay",
        "replay it with the task and the version that it was recorded with",
    ),
    "ValueError": ("an argument, an option or a file that cannot be used", "the sentence names the value: change it"),
    "TypeError": ("an argument of a wrong kind", "the sentence names the kind that is wanted"),
    "ImportError": ("a trainer is missing or too old", "the sentence has the command that installs it"),
}

VARIABLES = {
    "OFFBEAT_CARRIER": "`shm` keeps vectors in memory of the host, `ipc` puts them into memory of the GPUs where that "
    "can be. Not set: the best there is. The same on all ranks",
    "OFFBEAT_HOST": "another name for this host: ranks with different names behave as on different hosts, to try out "
    "on one machine what several do",
    "OFFBEAT_PORT": "the port at which other hosts reach this one, for a firewall. Not set: any that is free. Two jobs "
    "on one host need two ports",
    "OFFBEAT_GPUS": "to try things out on one GPU: `each` lets ranks behave as if each had a GPU of its own, `peers` "
    "as if these read each other's memory",
    "OFFBEAT_MIN_WORKERS": "`min_workers` of `ob.attach` where the script says nothing; `offbeat launch --min-workers` "
    "sets it",
    "OFFBEAT_RETURNS": "how often this worker was started again; `offbeat launch --restarts` sets it, leave it alone",
    "OFFBEAT_RESUME": "the folder of checkpoints that the script's first `ob.attach` begins with; `offbeat launch "
    "--resume` sets it",
    "OFFBEAT_DATA": "a folder with data for `offbeat reproduce`, looked into before those of system packages",
    "RANK": "this process's number in the job, set by the launcher. Without it the job has one worker",
    "WORLD_SIZE": "how many processes the job has, set by the launcher",
    "LOCAL_RANK": "this process's number on its host, set by the launcher: the GPU of that number is its own",
    "MASTER_ADDR": "where rank 0 is, set by the launcher; the interface that leads there is used between hosts",
    "MASTER_PORT": "the port of the job's store there, set by the launcher",
    "GLOO_SOCKET_IFNAME": "the interface at which other hosts find this one, as for torch. Not set: the one that leads "
    "to `MASTER_ADDR`",
    "OMP_NUM_THREADS": "the threads that torch computes with; `offbeat launch` sets 1 for several workers where "
    "nothing is set",
    "TORCHELASTIC_RESTART_COUNT": "which start of the job this is, set by torchrun",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "passed on by `offbeat launch`, which sets 1 as torchrun does",
}


@dataclass(frozen=True)
class Said:
    """One error: its kind, the file below ``src/offbeat`` and the sentence, with holes for values."""

    kind: str
    file: str
    sentence: str

    @property
    def cause(self) -> str:
        """What was seen; all of the sentence where it names no way out."""
        cause, _, last = self.sentence.rpartition("; ")
        return cause if cause and last != HOLE else self.sentence.partition(MUST)[0]

    @property
    def way_out(self) -> str:
        return self.sentence[len(self.cause) :].removeprefix("; ").removeprefix(", but ")


def errors(source: Path = SRC) -> list[Said]:
    """All sentences that users may be told by an exception, in the order of the files."""
    found: dict[tuple[str, str], Said] = {}
    for path in sorted(source.rglob("*.py")):
        file = path.relative_to(source).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = _constants(tree)
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args):
            kind = call.func.id if isinstance(call.func, ast.Name) else ""
            if kind not in OURS and (kind not in USUAL or file.startswith(AMONG_OURSELVES)):
                continue
            sentence = _flat(_text(call.args[0], constants))
            if len(re.findall(r"[a-z]{2,}", sentence)) >= 3:  # else it is made elsewhere
                found.setdefault((kind, sentence), Said(kind, file, sentence))
    return list(found.values())


def variables(source: Path = SRC) -> set[str]:
    """The names of environment variables that the source reads: Offbeat's own, and those asked of ``os.environ``."""
    found = set[str]()
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            asked: ast.expr | None = None
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
                asked = node.slice
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "os.environ.get":
                asked = node.args[0]
            elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[-1]) == "os.environ":
                asked = node.left
            elif isinstance(node, ast.Constant) and re.fullmatch(r"OFFBEAT_[A-Z_]+", str(node.value)):
                asked = node
            if isinstance(asked, ast.Constant) and isinstance(asked.value, str):
                found.add(asked.value)
    return found


def errors_page(source: Path = SRC) -> str:
    lines = [
        "# Errors",
        "",
        f"Every sentence that an exception of Offbeat may say, read from the source. `{HOLE}` stands for the values of "
        "the case. The way out stands in the sentence, too; where it names none, that of the exception holds. "
        "[Troubleshooting](../troubleshoot.md) begins with the symptom.",
        "",
        "| exception | what it is | the way out |",
        "| --- | --- | --- |",
        *[f"| `{kind}` | {what} | {way_out} |" for kind, (what, way_out) in KINDS.items()],
        "",
        "Offbeat's own are names of `ob`, such as `ob.PeerFailed`.",
    ]
    said = errors(source)
    for title, places in SECTIONS:
        rows = [one for one in said if one.file.startswith(places)]
        lines += ["", f"## {title}", "", "| what it says | the way out | exception |", "| --- | --- | --- |"]
        lines += [f"| {_cell(one.cause)} | {_cell(one.way_out)} | `{one.kind}` |" for one in rows]
    if homeless := {one.file for one in said if not one.file.startswith(tuple(p for _, ps in SECTIONS for p in ps))}:
        raise ValueError(f"{', '.join(sorted(homeless))}: name a section for its errors in tools/from_code.py")
    return "\n".join(lines) + "\n"


def environment_page(source: Path = SRC) -> str:
    read = variables(source)
    if strange := read - VARIABLES.keys():
        raise ValueError(f"the source reads {', '.join(sorted(strange))}; describe it in tools/from_code.py")
    ours = [name for name in VARIABLES if name in read and name.startswith("OFFBEAT_")]
    others = [name for name in VARIABLES if name in read and name not in ours]
    head = ["| variable | what it does |", "| --- | --- |"]
    return "\n".join(
        [
            "# Environment variables",
            "",
            "Variables that Offbeat reads. A job needs none of its own; torchrun and `offbeat launch` set the rest.",
            "",
            "## Offbeat's",
            "",
            *head,
            *[f"| `{name}`{{.name}} | {VARIABLES[name]} |" for name in ours],
            "",
            "## The launcher's and torch's",
            "",
            *head,
            *[f"| `{name}`{{.name}} | {VARIABLES[name]} |" for name in others],
            "",
        ]
    )


def command_line_page() -> str:
    """Each command with its arguments, as ``offbeat COMMAND --help`` says it."""
    import click
    import typer.main

    from offbeat.cli import app

    group = typer.main.get_command(app)
    lines = [
        "# The command line",
        "",
        "`offbeat COMMAND --help` says the same. Times, rates, sizes carry units: `320ms`, `50us`, `10Gbps`, `25.6M`. "
        "The exit code is 0 if all went well, 1 if a run failed, 2 for a wrong argument, 130 after Ctrl-C.",
    ]
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        context = click.Context(command, info_name=f"offbeat {name}")
        words = " ".join(command.collect_usage_pieces(context)).replace("*", "")
        lines += ["", f"## offbeat {name}", "", f"`offbeat {name} {words}`", "", command.help or "", ""]
        lines += ["| argument | what it is | default |", "| --- | --- | --- |"]
        for one in command.params:
            if one.name == "help":
                continue
            face = f"`{_face(one)}`{{.name}}"
            default = one.default if isinstance(one.default, (str, int)) and not isinstance(one.default, bool) else ""
            lines.append(
                f"| {face} | {_cell(getattr(one, 'help', '') or '')} | {f'`{default}`' if default != '' else ''} |"
            )
    return "\n".join(lines) + "\n"


def _face(one: object) -> str:
    """An option by its names and what follows them; an argument by its name."""
    names: Sequence[str] = [*getattr(one, "opts", ()), *getattr(one, "secondary_opts", ())]
    metavar = str(getattr(one, "metavar", None) or "")
    if not names[0].startswith("-"):
        return metavar or names[0].upper()
    return ", ".join(names) + (f" {metavar}" if metavar and not getattr(one, "is_flag", False) else "")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """MkDocs asks which files there are: those in docs/, and these three."""
    from mkdocs.structure.files import File

    pages = {"errors": errors_page(), "environment": environment_page(), "command-line": command_line_page()}
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def _constants(tree: ast.Module) -> dict[str, str]:
    """The strings that a module gives a name to."""
    return {
        node.targets[0].id: _text(node.value, {})
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, (ast.Constant, ast.JoinedStr, ast.BinOp))
    }


def _text(node: ast.expr, constants: dict[str, str]) -> str:
    """A sentence as far as the source has it."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, constants) for part in node.values)
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name):
        return constants.get(node.value.id, HOLE)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, constants) + _text(node.right, constants)
    if isinstance(node, ast.Name):
        return constants.get(node.id, HOLE)
    return HOLE


def _flat(text: str) -> str:
    return re.sub(rf"{HOLE}(?:\s*{HOLE})+", HOLE, re.sub(r"\s+", " ", text)).strip()


def _cell(text: str) -> str:
    """Plain words in a cell: Markdown finds nothing to mark up in them."""
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", html.escape(re.sub(r"\s+", " ", text).strip(), quote=False))
