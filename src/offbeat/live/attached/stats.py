"""What an attached optimiser knows about its own run: the times of its steps, a log, and who was slow."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from offbeat.basics.units import format_bytes, format_seconds
from offbeat.method.replica import Replica
from offbeat.runs.slowness import in_words
from offbeat.runs.trace import Trace

if TYPE_CHECKING:
    from offbeat.live.carriers.exchanges import Transport

KEPT = 4096  # steps whose times are kept, the last ones
EXCHANGED = 65536  # numbers that are exchanged at the end, over all workers


class Log(Protocol):
    """Takes numbers as they come: ``torch.utils.tensorboard.SummaryWriter``, and anything with its ``add_scalar``.

    ```python
    class WandbLog:  # Weights & Biases
        def add_scalar(self, tag, value, step): wandb.log({tag: value}, step=step)

    class MlflowLog:
        def add_scalar(self, tag, value, step): mlflow.log_metric(tag, value, step=step, synchronous=False)
    ```

    Steps are numbered as the optimiser counts them: a resumed run goes on where the state it loaded was saved.
    """

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object: ...


WAYS = {"shm": "shared memory", "ipc": "the GPU's memory (CUDA IPC)", "gloo": "Gloo", "nccl": "NCCL"}


class Watched(Protocol):
    """An attached optimiser, as far as it is looked at here."""

    @property
    def me(self) -> Replica: ...
    @property
    def wait_s(self) -> float: ...
    @property
    def wire_bytes(self) -> int: ...
    @property
    def carriers(self) -> tuple[str, ...]: ...
    @property
    def trace(self) -> Trace: ...


@dataclass(frozen=True)
class Summary:
    """What ``optimizer.summary()`` returns. Printing it gives the sentences.

    ``steps``, ``busy_s``, ``wait_s``, ``wire_bytes`` and ``carriers`` are this worker's own. ``sentences`` say which
    workers were waited for, for how long in all, and whether they are slow for good: known to every worker after
    ``finish()``.
    """

    rank: int
    workers: int
    steps: int
    busy_s: float
    wait_s: float
    wire_bytes: int
    sentences: tuple[str, ...]
    carriers: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join(self.sentences)


class Stats:
    """Notes each step's own time (all but the waiting), and tells the log."""

    def __init__(self, log: Log | None) -> None:
        if log is not None and not callable(getattr(log, "add_scalar", None)):
            raise ValueError(
                f"log is a {type(log).__name__}, which has no add_scalar; use a SummaryWriter, or an object with "
                "add_scalar(tag, value, step)"
            )
        self._log = log
        self._busy_s: list[float] = []
        self._from = 0  # the number of the first step in it
        self._step_waits_s = 0.0
        self._total_busy_s = 0.0
        self._steps = 0
        self._waited_s = 0.0
        self._sent_bytes = 0
        self._last_s = time.monotonic()
        self._everyone: tuple[list[list[float]], list[float]] | None = None

    def stepped(self, optimizer: Watched) -> None:
        """A step is over."""
        now, waited_s = time.monotonic(), optimizer.wait_s
        step_s, wait_s = now - self._last_s, waited_s - self._waited_s
        self._last_s, self._waited_s = now, waited_s
        self._steps += 1
        self._total_busy_s += step_s - wait_s
        if self._steps > 1:  # the first one holds whatever the user did between attach and the loop
            self._busy_s.append(max(step_s - wait_s, 0.0))
            self._step_waits_s += wait_s
        if len(self._busy_s) >= 2 * KEPT:
            del self._busy_s[:KEPT]
            self._from += KEPT
        if self._log is not None:
            self._write(self._log, optimizer, step_s, wait_s)

    def _write(self, log: Log, optimizer: Watched, step_s: float, wait_s: float) -> None:
        sent, step = optimizer.wire_bytes, optimizer.me.t - 1  # it has moved on
        log.add_scalar("offbeat/step_s", step_s, step)
        log.add_scalar("offbeat/wait_s", wait_s, step)
        log.add_scalar("offbeat/sent_bytes", sent - self._sent_bytes, step)
        self._sent_bytes = sent
        if (period := optimizer.me.reported.period) is not None:
            log.add_scalar("offbeat/period", period, step)
        rounds = optimizer.trace.rounds
        if rounds and (stale := rounds[-1].staleness.get(optimizer.me.rank)) is not None:
            log.add_scalar("offbeat/staleness", stale, step)

    def exchange(self, transport: Transport) -> None:
        """Let everybody know everybody's times. All ranks come here, when they finish."""
        rank, workers = transport.rank, transport.size
        # Workers may have taken and kept different steps; those of the same number are compared.
        ends = torch.tensor([self._from + len(self._busy_s), -self._from])
        end, start = transport.agree_on(ends, dist.ReduceOp.MIN, "the others' times").tolist()
        first = max(-start, end - max(EXCHANGED // workers, 1))
        own = self._busy_s[first - self._from : max(end, first) - self._from]
        table = torch.zeros(workers, len(own) + 1)
        table[rank, 0] = self._step_waits_s
        table[rank, 1:] = torch.tensor(own)
        table = transport.agree_on(table, dist.ReduceOp.SUM, "the others' times")
        self._everyone = (table[:, 1:].tolist(), table[:, 0].tolist())

    def summary(self, optimizer: Watched) -> Summary:
        if self._everyone is not None:
            told = in_words(*self._everyone)
        elif optimizer.me.size == 1:
            told = in_words([self._busy_s], [0.0])
        else:
            told = [
                f"Rank {optimizer.me.rank} took {self._steps} steps: {format_seconds(self._total_busy_s)} of its own, "
                f"{format_seconds(optimizer.wait_s)} waiting, {format_bytes(optimizer.wire_bytes)} sent.",
                "Who was waited for is known after finish().",
            ]
        if optimizer.carriers:
            ways = " and ".join(WAYS[name] for name in optimizer.carriers)
            told = [*told, f"Vectors went through {ways}."]
        return Summary(
            rank=optimizer.me.rank,
            workers=optimizer.me.size,
            steps=self._steps,
            busy_s=self._total_busy_s,
            wait_s=optimizer.wait_s,
            wire_bytes=optimizer.wire_bytes,
            sentences=tuple(told),
            carriers=optimizer.carriers,
        )
