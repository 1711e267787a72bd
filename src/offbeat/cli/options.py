"""The options that several commands share: each is declared here once, and read here once."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from offbeat import delays, tasks
from offbeat.basics.units import format_count, format_rate, format_seconds, parse_count, parse_rate, parse_seconds
from offbeat.delays import Seconds
from offbeat.delays.faults import Faults as Deaths
from offbeat.report.folder import recorded
from offbeat.sim import Network
from offbeat.strategies import DEFAULT
from offbeat.tasks.task import Task

T = TypeVar("T")

STEPS = 200
LIVE_WORKERS, SIMULATED_WORKERS = 4, 8

MethodName = Annotated[
    str | None,
    typer.Argument(
        metavar="METHOD",
        help=f"A name, or name:setting=value,… (local_sgd:period=4,codec=qsgd8).  [default: {DEFAULT}]",
    ),
]
Workers = Annotated[str | None, typer.Option(metavar="N", help="How many workers take part.")]
Steps = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help=f"Steps of the job: N gradients for each worker on average, whoever takes them.  [default: {STEPS}]",
    ),
]
FixedShares = Annotated[
    bool,
    typer.Option("--fixed-shares", help="Each worker takes exactly N steps, so the slowest decides when the job ends."),
]
Samples = Annotated[
    str | None, typer.Option(metavar="N", help="Instead of --steps: the number of gradients of all workers together.")
]
VirtualTime = Annotated[
    str | None, typer.Option("--seconds", metavar="TIME", help="Instead of --steps: virtual time, such as 60s.")
]
TaskName = Annotated[
    str, typer.Option("--task", metavar="NAME", help="digits or regression; none simulates time alone.")
]
LiveTaskName = Annotated[str, typer.Option("--task", metavar="NAME", help="What is learned: digits or regression.")]
Delay = Annotated[
    str,
    typer.Option(
        metavar="PHRASE",
        help="Who is late: '2 ranks 320ms', 'rank 3 30ms', '10% 100ms', '50ms..400ms rotating', "
        "'exponential 100ms', 'lognormal 100ms 0.5', 'pareto 100ms 1.8'; join several with +.",
    ),
]
Compute = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="A step's computation: 100ms; or random, as with --delay; or as others have measured it, with or without "
        f"a median of yours, 'bytedance-se 300ms' (one of {', '.join(delays.PROFILES)}); or your own measurements: a "
        "file mine.csv with the columns step, rank, seconds, or a folder of --report.  [default: 100ms]",
    ),
]
LiveCompute = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Sleep so long in each step, which stands for a larger model: the values of simulate --compute.",
    ),
]
Bandwidth = Annotated[
    str | None, typer.Option(metavar="RATE", help="The bandwidth of each worker's link.  [default: 10Gbps]")
]
Latency = Annotated[str | None, typer.Option(metavar="TIME", help="The latency of each message.  [default: 50us]")]
Algorithm = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The algorithm of all-reduce: ring or halving_doubling.  [default: ring]"),
]
Hosts = Annotated[
    str | None,
    typer.Option(metavar="N", help="How many hosts the workers are on.  [default: each on its own]"),
]
Parameters = Annotated[
    str | None, typer.Option(metavar="N", help="Size of the model where --task is none: 25.6M.  [default: 1M]")
]
Faults = Annotated[
    str | None,
    typer.Option(
        metavar="WHO",
        help="Who dies when: 'rank 3 dies at 40s, back at 1min', '2 ranks die at 1min', 'mtbf 5min, back after 30s'.",
    ),
]
Seed = Annotated[str, typer.Option(metavar="N", help="The seed of weights, delays and every random choice.")]
CodecName = Annotated[
    str | None,
    typer.Option("--codec", metavar="NAME", help="What travels: none, bf16, fp16, int8, qsgd2 … qsgd16, topk64."),
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting of the method; may be repeated.")
]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the numbers to this file.")]
ReportFolder = Annotated[
    Path | None,
    typer.Option("--report", metavar="DIR", help="Keep the run in this folder, with an HTML page about it."),
]
SaveFolder = Annotated[
    Path | None,
    typer.Option(
        "--save", metavar="DIR", help="Keep the order of events of the run in this folder, for simulate --replay."
    ),
]
ReplayFolder = Annotated[
    Path | None,
    typer.Option("--replay", metavar="DIR", help="Instead of a method: repeat a run that train --save kept."),
]
TraceFile = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", help="Write the timeline for Perfetto or chrome://tracing.")
]


@dataclass(frozen=True)
class Scene:
    """Everything about runs but their method: what is the same for all that are compared."""

    workers: int
    steps: int | None
    samples: int | None
    seconds: float | None
    task: Task | None
    delays: Seconds | None
    compute_s: Seconds | None
    network: Network
    parameters: int
    seed: int
    delay_text: str
    live: bool
    fixed: bool = False
    record: bool = False
    faults: Deaths | None = None

    @property
    def heading(self) -> str:
        """What the runs have in common, in two lines."""
        length = (
            f"{self.steps} steps{' each' if self.fixed else ''}"
            if self.steps is not None
            else f"{self.samples} samples"
            if self.samples is not None
            else f"{format_seconds(self.seconds or 0.0)} of virtual time"
        )
        what = f"task {self.task.name}" if self.task else f"time alone, {format_count(self.parameters)} parameters"
        first = [f"{self.workers} {'worker' if self.workers == 1 else 'workers'}, {length}", what, f"seed {self.seed}"]
        second = []
        if self.compute_s is not None:
            compute = format_seconds(self.compute_s) if isinstance(self.compute_s, (int, float)) else self.compute_s
            second.append(f"computation: {compute}")
        second.append(f"delay: {self.delay_text}")
        if self.faults is not None:
            second.append(f"faults: {self.faults}")
        latency, rate = self.network.latency_s, self.network.bandwidth_Bps
        if not self.live and not callable(latency) and not callable(rate):
            hosts = self.network.hosts
            among = "" if hosts is None else f", {hosts} {'host' if hosts == 1 else 'hosts'}"
            second.append(f"network: {format_rate(rate)}, {format_seconds(latency)}, {self.network.algorithm}{among}")
        return f"{'live' if self.live else 'simulated'}: {'; '.join(first)}\n{'; '.join(second)}"


def read_scene(
    *,
    workers: str | None,
    steps: str | None,
    fixed_shares: bool = False,
    samples: str | None = None,
    seconds: str | None = None,
    task: str,
    delay: str,
    compute: str | None,
    bandwidth: str | None = None,
    latency: str | None = None,
    algorithm: str | None = None,
    hosts: str | None = None,
    faults: str | None = None,
    parameters: str | None = None,
    seed: str,
    live: bool,
    members: int | None = None,
) -> Scene:
    """Check and read the options; ``members`` is the size of the job this process is a member of, if it is."""
    if live:
        simulated = {
            "--samples": samples,
            "--seconds": seconds,
            "--bandwidth": bandwidth,
            "--latency": latency,
            "--algorithm": algorithm,
            "--hosts": hosts,
            "--faults": faults,
            "--parameters": parameters,
        }
        for name, value in simulated.items():
            if value is not None:
                raise ValueError(f"{name} {value} is for simulated runs, and this one is live; leave it out")
        if task == "none":
            raise ValueError("--task none simulates time alone, and this run is live; use --task digits or regression")
    if task != "none" and parameters is not None:
        raise ValueError(
            f"--parameters {parameters} does not go with --task {task}, whose model has a size of its own; "
            "leave it out, or add --task none"
        )
    count = _workers(workers, live, members)
    chosen = {"--steps": steps, "--samples": samples, "--seconds": seconds}
    given = [f"{name} {value}" for name, value in chosen.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"a run has one end, but {' and '.join(given)} were given; leave all but one out")
    if fixed_shares and given and steps is None:
        raise ValueError(f"--fixed-shares is about --steps, and the run ends by {given[0]}; leave one of them out")
    spread = _delays(delay)
    made = Scene(
        workers=count,
        steps=_read("--steps", parse_count, steps) if steps is not None else None if given else STEPS,
        samples=_read("--samples", parse_count, samples) if samples is not None else None,
        seconds=_read("--seconds", parse_seconds, seconds) if seconds is not None else None,
        task=None if task == "none" else tasks.named(task),
        delays=spread,
        compute_s=_compute(compute) if compute is not None else None if live else 0.1,
        network=Network(
            _read("--latency", parse_seconds, latency or "50us"),
            _read("--bandwidth", parse_rate, bandwidth or "10Gbps"),
            algorithm or "ring",  # type: ignore[arg-type]  # Network checks it, in a sentence
            None if hosts is None else _read("--hosts", parse_count, hosts),
        ),
        parameters=_read("--parameters", parse_count, parameters or "1M"),
        seed=_read("--seed", parse_count, seed),
        delay_text="none" if spread is None else str(spread),
        live=live,
        fixed=fixed_shares,
        faults=None if faults is None else _read("--faults", delays.faults.parse, faults),
    )
    if made.faults is not None:
        made.faults.check(count, made.seed, made.network.hosts)
    for what, spec in (("--delay", made.delays), ("--compute", made.compute_s)):
        delays.bind(spec, seed=made.seed, workers=count, what=what)
    return made


def check_count(option: str, text: str, least: int) -> int:
    """A whole number of at least ``least``."""
    count = _read(option, parse_count, text)
    if count < least:
        raise ValueError(f"{option} {count} is too few; use {least} or more")
    return count


def check_file(option: str, path: Path | None) -> None:
    """Say before the work that its result could not be written."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder; name a file in it")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option} {path} lies in a folder that does not exist; make it first: mkdir -p {path.parent}")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ValueError(f"{option} {path} may not be written; choose another file")


def check_json(path: Path | None) -> None:
    check_file("--json", path)


def check_save(folder: Path | None) -> None:
    """The folder is to be new, empty, or that of an earlier run, which it then replaces."""
    if folder is None:
        return
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--save {folder} is a file; name a folder")
    if folder.is_dir():
        if any(folder.iterdir()) and not any(folder.glob("order-*.json")):
            raise ValueError(f"--save {folder} holds other things; name a new folder")
        if not os.access(folder, os.W_OK):
            raise ValueError(f"--save {folder} may not be written; name another folder")


def check_report(folder: Path | None) -> None:
    """The folder is to be new, empty, or that of an earlier run, which it then replaces."""
    if folder is None:
        return
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--report {folder} is a file; name a folder")
    if folder.is_dir():
        if any(folder.iterdir()) and not (folder / "run.json").exists() and not any(folder.glob("[0-9]*-*.jsonl")):
            raise ValueError(f"--report {folder} holds other things; name a new folder")
        if not os.access(folder, os.W_OK):
            raise ValueError(f"--report {folder} may not be written; name another folder")


def _workers(text: str | None, live: bool, members: int | None) -> int:
    count = _read("--workers", parse_count, text) if text is not None else None
    if members is not None:
        if count not in (None, members):
            raise ValueError(f"--workers {count} does not fit this job of {members} (WORLD_SIZE); leave it out")
        return members
    if count == 0:
        raise ValueError("--workers 0 cannot train; use 1 or more")
    return count or (LIVE_WORKERS if live else SIMULATED_WORKERS)


def _read(option: str, parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def _delays(text: str) -> Seconds | None:
    return _read("--delay", delays.parse, text)


def _compute(text: str) -> Seconds:
    """A duration, a distribution in the words of ``--delay``, or a run that was kept."""
    if Path(text).is_dir() or text.endswith(".jsonl"):
        return _read("--compute", lambda place: delays.trace(recorded(Path(place))), text)
    if text.strip()[:1].isalpha() or text.endswith(".csv") or "+" in text:
        return _read("--compute", delays.parse, text) or 0.0
    return _read("--compute", parse_seconds, text)
