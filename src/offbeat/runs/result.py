"""What a run leaves behind, in both worlds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from offbeat.runs.absences import Absence
from offbeat.runs.foreign import ForeignWait
from offbeat.runs.order import Order
from offbeat.runs.slowness import judge
from offbeat.runs.talking import Talking, told
from offbeat.runs.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Result:
    """What every run leaves behind.

    ``seconds``: from a common start until the last worker was through its steps; starting and ending are not counted.
    ``final`` (parameters): what every worker holds after the ending. ``losses``: the training loss of each step,
    averaged over the workers. ``wait_s``, ``finished_s``: per worker, the ending not counted. ``gradients``: how many
    each worker took. ``wire_bytes``: sent by all workers while training. ``metrics``: the task's ``evaluate`` of the
    final model. ``trace``: what happened when. ``talking``: how often each worker talked, where it decides by itself.
    """

    method: str
    workers: int
    seed: int
    seconds: float
    finished_s: tuple[float, ...]
    wait_s: tuple[float, ...]
    gradients: tuple[int, ...]
    wire_bytes: int
    final: Tensor
    losses: Tensor
    metrics: Mapping[str, float] = field(default_factory=dict)
    trace: Trace = field(default_factory=Trace)
    talking: tuple[Talking, ...] = ()

    @property
    def strategy(self) -> str:
        """Another name of ``method``."""
        return self.method

    @property
    def wait_fraction(self) -> float:
        """The share of the workers' time that was spent waiting or communicating in the open."""
        total = sum(self.finished_s)
        return sum(self.wait_s) / total if total else 0.0

    @property
    def steps(self) -> int:
        """The most gradients any worker took."""
        return max(self.gradients)

    def summary(self) -> str:
        """Which workers were waited for, and which are always slow, in sentences; of a run that kept its timeline."""
        if not self.trace.keep_spans:
            raise ValueError("this run kept no timeline to tell who was slow; simulate with spans=True")
        busy_s = self.trace.busy_s(self.workers)
        verdict = judge(busy_s, self.trace.wait_s(self.workers)).verdict
        return " ".join([verdict, *told(self.talking, busy_s)])


@dataclass(frozen=True, kw_only=True)
class Run(Result):
    """A run in virtual time.

    ``weights`` (workers, parameters): the replicas after their last step, nothing flushed or averaged. ``lost``:
    (rank, step) of every gradient that was dropped. ``curve``: what was evaluated on the way. ``absences``: of
    workers that died, in the order of their deaths. With ``task=None`` the tensors of weights and losses are empty.
    """

    weights: Tensor
    model: nn.Module | None = None
    lost: tuple[tuple[int, int], ...] = ()
    curve: tuple[tuple[float, Mapping[str, float]], ...] = ()
    absences: tuple[Absence, ...] = ()

    @property
    def died(self) -> tuple[tuple[int, float], ...]:
        """(rank, second) of every worker that was dead at the end."""
        return tuple(sorted((one.rank, one.died_s) for one in self.absences if one.back_s is None))

    @property
    def hash(self) -> str:
        """A digest of times, bytes and weights: equal for equal runs."""
        digest = hashlib.sha256(repr((self.finished_s, self.wait_s, self.wire_bytes)).encode())
        for tensor in (self.weights, self.final, self.losses):
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class LiveRun(Result):
    """A run of real processes, in real time. ``order``: what decided it, for ``ob.replay``.

    ``carriers``: the ways its vectors went, such as "shm" or "tcp". ``foreign``: waiting in collectives that a task's
    own code has called, of all workers together; ``wait_s`` is without it.
    """

    order: Order | None = None
    carriers: tuple[str, ...] = ()
    foreign: tuple[ForeignWait, ...] = ()
