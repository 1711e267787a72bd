"""What a command is asked for, in groups of options: each group is one dataclass, and its fields are the options.

A command takes a group as one parameter; ``@grouped`` shows Typer its fields in that place:

    @grouped
    def simulate(*, method: MethodName, ask: SimulatedOptions, files: Files) -> None: ...
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import Any, get_type_hints

from offbeat.cli.options import (
    Algorithm,
    Bandwidth,
    CodecName,
    Compute,
    Delay,
    Faults,
    FixedShares,
    Hosts,
    Json,
    Latency,
    LiveCompute,
    LiveTaskName,
    Parameters,
    ReportFolder,
    Samples,
    Scene,
    Seed,
    Settings,
    Steps,
    TaskName,
    TraceFile,
    VirtualTime,
    Workers,
    read_scene,
)
from offbeat.cli.output import Outputs
from offbeat.method.strategy import Method
from offbeat.strategies import DEFAULT, named


@dataclass(frozen=True)
class SimulatedOptions:
    """The scene of runs in virtual time; live, those that only virtual time has are refused."""

    workers: Workers = None
    steps: Steps = None
    fixed_shares: FixedShares = False
    samples: Samples = None
    seconds: VirtualTime = None
    task: TaskName = "digits"
    delay: Delay = "none"
    compute: Compute = None
    bandwidth: Bandwidth = None
    latency: Latency = None
    algorithm: Algorithm = None
    hosts: Hosts = None
    faults: Faults = None
    parameters: Parameters = None
    seed: Seed = "0"

    def scene(self, live: bool = False) -> Scene:
        return read_scene(**vars(self), live=live, members=members() if live else None)


@dataclass(frozen=True)
class LiveOptions:
    """The scene of live runs."""

    workers: Workers = None
    steps: Steps = None
    fixed_shares: FixedShares = False
    task: LiveTaskName = "digits"
    delay: Delay = "none"
    compute: LiveCompute = None
    seed: Seed = "0"

    def scene(self) -> Scene:
        return read_scene(**vars(self), live=True, members=members())


@dataclass(frozen=True)
class Tuning:
    """Settings of one method, beside those in its name."""

    codec: CodecName = None
    set_: Settings = None

    def method(self, words: str | None) -> Method:
        codec = [] if self.codec is None else [f"codec={self.codec}"]
        return named(DEFAULT if words is None else words, *(self.set_ or ()), *codec)


@dataclass(frozen=True)
class Files(Outputs):
    """Where results go, as options."""

    json: Json = None
    report: ReportFolder = None
    trace: TraceFile = None


def members() -> int | None:
    """The size of the job that torchrun made this process a member of, if it did."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command as Typer is to see it: in place of each parameter that is a dataclass stand its fields.

    All parameters are keyword-only, so that a group may follow a parameter with a default.
    """
    own = signature(command, eval_str=True)
    groups: dict[str, Any] = {p.name: p.annotation for p in own.parameters.values() if is_dataclass(p.annotation)}

    def options(parameter: Parameter) -> list[Parameter]:
        if parameter.name not in groups:
            return [parameter]
        group = groups[parameter.name]
        hints = get_type_hints(group, include_extras=True)
        kind = Parameter.KEYWORD_ONLY
        return [Parameter(f.name, kind, default=f.default, annotation=hints[f.name]) for f in fields(group)]

    @wraps(command)
    def called(**given: Any) -> None:
        asked = {name: group(**{f.name: given.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
        command(**given, **asked)

    shown = [option for parameter in own.parameters.values() for option in options(parameter)]
    called.__signature__ = own.replace(parameters=shown)  # type: ignore[attr-defined]
    return called
