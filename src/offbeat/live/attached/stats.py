"""What an attached optimiser knows about its own run: the times of its steps, a log, and who was slow."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from offbeat.basics.units import format_bytes, format_seconds
from offbeat.live.transport.ledger import Ledger
from offbeat.method.replica import Replica
from offbeat.runs import foreign, talking
from offbeat.runs.foreign import ForeignWait
from offbeat.runs.slowness import in_words
from offbeat.runs.talking import Talking
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
    ``finish()``. ``foreign``: this worker's waiting in collectives that are not Offbeat's, the longest first; it is
    neither in ``busy_s`` nor in ``wait_s``.
    """

    rank: int
    workers: int
    steps: int
    busy_s: float
    wait_s: float
    wire_bytes: int
    sentences: tuple[str, ...]
    carriers: tuple[str, ...] = ()
    foreign: tuple[ForeignWait, ...] = ()

    def __str__(self) -> str:
        return " ".join(self.sentences)

    def json(self) -> dict[str, object]:
        """As ``json.dumps`` takes it."""
        return asdict(self)


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
        self._waits_s: list[float] = []  # in the same steps
        self._from = 0  # the number of the first of them
        self._total_busy_s = 0.0
        self._steps = 0
        self._waited_s = 0.0
        self._sent_bytes = 0
        self._last_s = time.monotonic()
        self._everyone: tuple[list[list[float]], list[float]] | None = None
        self.ledger = Ledger()
        self._elsewhere_s = 0.0  # what of it belongs to steps that are over
        self._everyones_steps = 0
        self._left_out = ""  # what is not told of, in words
        self._told_of_others: list[str] = []
        self._talking: list[Talking] = []

    def everyones_s(self, workers: int) -> list[list[float]]:
        """Of each worker, the seconds of its own in each step; empty until the others' are known."""
        own = [self._busy_s] if workers == 1 else []
        return self._everyone[0] if self._everyone is not None else own

    def stepped(self, optimizer: Watched) -> None:
        """A step is over."""
        now, waited_s = time.monotonic(), optimizer.wait_s
        step_s, wait_s, elsewhere_s = (
            now - self._last_s,
            waited_s - self._waited_s,
            self.ledger.seconds - self._elsewhere_s,
        )
        self._last_s, self._waited_s, self._elsewhere_s = now, waited_s, self.ledger.seconds
        self._steps += 1
        self.ledger.step = self._steps
        # Whoever waits in a collective of others is not slow.
        busy_s = step_s - wait_s - elsewhere_s
        self._total_busy_s += busy_s
        if self._steps > 1:  # the first one holds whatever the user did between attach and the loop
            self._busy_s.append(max(busy_s, 0.0))
            self._waits_s.append(wait_s + elsewhere_s)
        if len(self._busy_s) >= 2 * KEPT:
            del self._busy_s[:KEPT], self._waits_s[:KEPT]
            self._from += KEPT
        if self._log is not None:
            self._write(self._log, optimizer, step_s, wait_s)
            if self.ledger.seconds:
                self._log.add_scalar("offbeat/elsewhere_s", elsewhere_s, optimizer.me.t - 1)

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

    def exchange(self, transport: Transport, waited_s: float, own_talking: Talking | None) -> None:
        """Let everybody know everybody's times. All ranks come here, when they finish, having waited so long."""
        rank, workers = transport.rank, transport.size
        foreign_ = self._packed(waited_s, max(EXCHANGED // workers, 512))
        # Workers may have taken and kept different steps; those of the same number are compared.
        ends = [self._from + len(self._busy_s), -self._from, -len(foreign_), -int(self.ledger.seconds > 0)]
        end, start, longest, any_ = transport.agree_on(
            torch.tensor(ends), dist.ReduceOp.MIN, "the others' times"
        ).tolist()
        first = max(-start, end - max(EXCHANGED // workers, 1))
        kept = slice(first - self._from, max(end, first) - self._from)
        own = self._busy_s[kept]
        table = torch.zeros(workers, 2 + len(own), dtype=torch.float64)
        table[rank] = torch.tensor([self._steps, sum(self._waits_s[kept]), *own], dtype=torch.float64)
        table = transport.agree_on(table, dist.ReduceOp.SUM, "the others' times")
        self._everyone, self._everyones_steps = (table[:, 2:].tolist(), table[:, 1].tolist()), int(table[:, 0].sum())
        self._left_out = f"Of {end + 1} steps, the last {len(own)} are told of." if first else ""
        if own_talking is not None:  # a matter of the strategy, which all have in common
            counts = torch.zeros(workers, len(own_talking.numbers()), dtype=torch.int64)
            counts[rank] = torch.tensor(own_talking.numbers())
            counts = transport.agree_on(counts, dist.ReduceOp.SUM, "the others' times")
            self._talking = [Talking(*row) for row in counts.tolist()]
        if any_:  # somebody has waited elsewhere
            texts = torch.zeros(workers, -longest, dtype=torch.int32)
            texts[rank, : len(foreign_)] = torch.tensor(list(foreign_))
            heard = transport.agree_on(texts, dist.ReduceOp.SUM, "the others' times")
            self._told_of_others = _told([bytes(row).rstrip(b"\0") for row in heard.tolist()])

    def _packed(self, waited_s: float, most: int) -> bytes:
        """What the others hear of this worker's waiting, in at most so many bytes: the short waits are left out."""
        waits = [[one.where, one.op, one.calls, one.steps, one.seconds] for one in self.ledger.waits()]
        while True:
            packed = json.dumps([waited_s + self.ledger.seconds, self._steps, waits]).encode()
            if len(packed) <= most or not waits:
                return packed
            waits.pop()

    def summary(self, optimizer: Watched) -> Summary:
        if self._everyone is not None:
            told = [self._left_out] if self._left_out else []
            busy_s, waits_s = self._everyone
            told += [*in_words(busy_s, waits_s), *talking.told(self._talking, busy_s, self._everyones_steps)]
        elif optimizer.me.size == 1:
            told = in_words([self._busy_s], [0.0])
        else:
            told = [
                f"Rank {optimizer.me.rank} took {self._steps} steps: {format_seconds(self._total_busy_s)} of its own, "
                f"{format_seconds(optimizer.wait_s)} waiting, {format_bytes(optimizer.wire_bytes)} sent.",
                "Who was waited for is known after finish().",
            ]
        waits, others = self.ledger.waits(), self._told_of_others
        told = [*told, *(others or foreign.told(waits, optimizer.wait_s + self.ledger.seconds, self._steps))]
        if optimizer.carriers:
            ways = " and ".join(WAYS[name] for name in optimizer.carriers)
            me = optimizer.me
            coded = f", coded {me.reported.coded}" if me.reported.coded else ""
            coded += f", uncoded: {me.spared} is for what leaves a host" if me.spared else ""
            told = [*told, f"Vectors went through {ways}{coded}."]
        return Summary(
            rank=optimizer.me.rank,
            workers=optimizer.me.size,
            steps=self._steps,
            busy_s=self._total_busy_s,
            wait_s=optimizer.wait_s,
            wire_bytes=optimizer.wire_bytes,
            sentences=tuple(told),
            carriers=optimizer.carriers,
            foreign=waits,
        )


def _told(everyones: Sequence[bytes]) -> list[str]:
    """What all workers' waiting in collectives of others comes to, in words."""
    heard = [json.loads(text) for text in everyones]
    waits = foreign.together([ForeignWait(*one) for one in waits] for _, _, waits in heard)
    waited_s, steps = sum(one[0] for one in heard), sum(one[1] for one in heard)
    return foreign.told(waits, waited_s, steps, len(heard))
