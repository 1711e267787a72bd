"""``offbeat launch``: a script in several processes that outlive each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbeat.basics.units import parse_seconds
from offbeat.cli.options import check_count
from offbeat.live.host import checkpoint
from offbeat.live.job.scripts import JobHost, run_script


def launch(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file.")],
    workers: Annotated[str, typer.Option("-n", "--workers", metavar="N", help="How many processes.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENT", help="Arguments and options of the script.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module's name, as in python -m.")] = False,
    master_port: Annotated[
        str, typer.Option(metavar="PORT", help="The port of the job's store at 127.0.0.1; 0 is any free port.")
    ] = "0",
    min_workers: Annotated[
        str, typer.Option(metavar="N", help="The run goes on as long as so many workers are left.")
    ] = "1",
    grace: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="The time for workers to end after Ctrl-C or SIGTERM, before they are killed."
        ),
    ] = "30s",
    restarts: Annotated[
        str, typer.Option(metavar="N", help="How often a worker that dies is started again, while others live.")
    ] = "0",
    job: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS:PORT", help="Of a job on several hosts: where host 0 can be reached."),
    ] = None,
    hosts: Annotated[str, typer.Option(metavar="N", help="With --job: on how many hosts this is typed.")] = "2",
    host: Annotated[str, typer.Option(metavar="NUMBER", help="With --job: which of them this is, from 0 on.")] = "0",
    resume: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Begin with the newest checkpoint there, if there is one."),
    ] = None,
    prefix: Annotated[
        bool,
        typer.Option("--prefix/--no-prefix", help="Put the rank before each line of output, or leave it as it is."),
    ] = True,
) -> None:
    """Run a script on N processes of this host; when one of them dies, the others go on.

    What runs under torchrun runs here unchanged: the same environment (RANK, WORLD_SIZE, MASTER_ADDR, …), and the
    job's store is in the launcher, so that it survives the death of every rank.

    With --restarts a worker that dies is started again with its rank, and ob.attach gives it another worker's model,
    optimizer state and step (optimizer.begun_at). The others go on meanwhile.

    With --resume the first run that the script attaches begins with the newest checkpoint in DIR that is whole, as
    ob.attach(…, checkpoint=DIR) writes them. The number of workers and the method may be others.

    With --job the job is one of several hosts: type the same line on each, with another --host. Ranks are counted
    through, host by host.

    Ctrl-C, SIGTERM, SIGQUIT, SIGHUP, SIGUSR1 and SIGUSR2 are passed on. If the launcher is killed, the workers end.

    The exit code is 0 if at least one worker ended well. Otherwise it is that of the first that ended: its own, or 128
    plus the number of the signal that killed it. After Ctrl-C it is 130, after SIGTERM 143.

    `offbeat launch -n 4 train.py --epochs 10`

    `offbeat launch -n 4 -m package.train --epochs 10`

    `offbeat launch -n 4 --job node0:29400 --hosts 2 --host 0 train.py`
    """
    count = check_count("-n", workers, 1)
    if not module and not Path(script).exists():
        raise ValueError(
            f"there is no file {script} here; name a script, without python before it, or a module after -m"
        )
    port = check_count("--master-port", master_port, 0)
    least = check_count("--min-workers", min_workers, 1)
    there = None if job is None else _job_host(job, hosts, host)
    if least > count and there is None:
        raise ValueError(f"--min-workers is {least}, and -n starts {count}; ask for at most so many")
    try:
        grace_s = parse_seconds(grace)
    except ValueError as error:
        raise ValueError(f"--grace: {error}") from None
    if resume is not None:
        _say_from_where(resume)
    words = ["-m"] * module + [script, *(arguments or ())]
    again = check_count("--restarts", restarts, 0)
    if again and there is not None:
        raise ValueError("--restarts is for jobs on one host; a worker cannot come back to one of several")
    code = run_script(
        words,
        count,
        port=port,
        host=there,
        grace_s=grace_s,
        prefix=prefix,
        min_workers=least,
        restarts=again,
        resume=resume,
    )
    raise typer.Exit(code)


def _job_host(job: str, hosts: str, host: str) -> JobHost:
    address, _, port = job.rpartition(":")
    if not address or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"--job: {job!r} is no address and port; write node0:29400, say")
    count, number = check_count("--hosts", hosts, 2), check_count("--host", host, 0)
    if number >= count:
        raise ValueError(f"--host is {number}, and --hosts {count}; hosts are numbered from 0 to {count - 1}")
    return JobHost(number, count, address, int(port))


def _say_from_where(folder: str) -> None:
    """Of damaged checkpoints the launcher knows before it starts anybody."""
    found, damaged = checkpoint.newest(Path(folder))
    for one in damaged:
        typer.echo(f"offbeat: {one.damage}", err=True)
    if found is None:
        typer.echo(f"offbeat: there is no checkpoint in {folder} yet; the job begins anew", err=True)
    else:
        typer.echo(f"offbeat: the job is taken up from {found.place}, of step {found.step}", err=True)
