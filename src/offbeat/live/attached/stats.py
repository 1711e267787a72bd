"""What an attached optimiser knows about its own run: the times of its steps, a log, and who was slow."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from offbeat.basics.units import format_seconds
from offbeat.live.attached.summary import RankSummary, Summary, compared
from offbeat.live.transport.wait_log import WaitLog
from offbeat.method.replica import Replica
from offbeat.runs import foreign, slowness, talking
from offbeat.runs.foreign import ForeignWait
from offbeat.runs.slowness import judge
from offbeat.runs.talking import Talking
from offbeat.runs.trace import Trace

if TYPE_CHECKING:
    from offbeat.live.carriers.exchanges import Transport
    from offbeat.live.worker.news import Loss

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


WAYS = {
    "shm": "shared memory",
    "ipc": "the GPU's memory (CUDA IPC)",
    "tcp": "the network",
    "gloo": "Gloo",
    "nccl": "NCCL",
}


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
    @property
    def is_over(self) -> bool: ...


@dataclass(frozen=True)
class _Everyone:
    """What all workers told each other at the end. ``busy_s`` and ``waits_s`` are of the steps that were compared, the
    first of which has the number ``begin``."""

    ranks: tuple[RankSummary, ...]
    busy_s: list[list[float]]
    waits_s: list[float]
    begin: int
    talking: list[Talking]
    foreign: list[str]


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
        self._own_s = self._away_s = 0.0  # of its own, and waiting, in all steps but the first
        self._steps = 0
        self._waited_s = 0.0
        self._sent_bytes = 0
        self._last_s = time.monotonic()
        self._everyone: _Everyone | None = None
        self.ledger = WaitLog()
        self._elsewhere_s = 0.0  # what of it belongs to steps that are over
        self._begun_s = self._last_s
        self._ended_s: float | None = None  # when there was no more data, from the beginning on
        self.work: list[str] = []  # what became of shared work, in words
        self.left_out: Callable[[], list[str]] = list  # this worker's gradients that were not finite
        self.losses: Callable[[], Sequence[Loss]] = tuple  # those without whom the others went on

    def begin(self) -> None:
        """Attached: the loop can begin, on all workers."""
        self._begun_s = time.monotonic()

    def end(self) -> None:
        """This worker has no more data."""
        self._ended_s = time.monotonic() - self._begun_s

    def everyones_s(self, workers: int) -> list[list[float]]:
        """Of each worker, the seconds of its own in each step; empty until the others' are known."""
        own = [self._busy_s] if workers == 1 else []
        return self._everyone.busy_s if self._everyone is not None else own

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
            self._own_s, self._away_s = self._own_s + self._busy_s[-1], self._away_s + self._waits_s[-1]
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

    def exchange(self, transport: Transport, waited_s: float, sent_bytes: int, own_talking: Talking | None) -> None:
        """Let everybody know everybody's times. All ranks come here, when they finish: so much was waited, and sent."""
        rank, workers = transport.rank, transport.size
        foreign_ = self._packed(waited_s, max(EXCHANGED // workers, 512))
        # Workers may have taken and kept different steps; those of the same number are compared.
        ends = [self._from + len(self._busy_s), -self._from, -len(foreign_), -int(self.ledger.seconds > 0)]
        end, start, longest, any_ = transport.agree_on(
            torch.tensor(ends), dist.ReduceOp.MIN, "the others' times"
        ).tolist()
        first = max(-start, end - max(EXCHANGED // workers, 1))
        kept = slice(first - self._from, max(end, first) - self._from)
        own = [self._steps, self._own_s, self._away_s, sent_bytes, self._ended_s or 0.0]
        own += [sum(self._waits_s[kept]), *self._busy_s[kept]]
        table = torch.zeros(workers, len(own), dtype=torch.float64)
        table[rank] = torch.tensor(own, dtype=torch.float64)
        rows = transport.agree_on(table, dist.ReduceOp.SUM, "the others' times").tolist()
        talking_, told = [], []
        if own_talking is not None:  # a matter of the strategy, which all have in common
            counts = torch.zeros(workers, len(own_talking.numbers()), dtype=torch.int64)
            counts[rank] = torch.tensor(own_talking.numbers())
            counts = transport.agree_on(counts, dist.ReduceOp.SUM, "the others' times")
            talking_ = [Talking(*row) for row in counts.tolist()]
        if any_:  # somebody has waited elsewhere
            texts = torch.zeros(workers, -longest, dtype=torch.int32)
            texts[rank, : len(foreign_)] = torch.tensor(list(foreign_))
            heard = transport.agree_on(texts, dist.ReduceOp.SUM, "the others' times")
            told = _told([text for row in heard.tolist() if (text := bytes(row).rstrip(b"\0"))])
        self._everyone = _Everyone(
            tuple(RankSummary(i, int(row[0]), row[1], row[2], int(row[3]), row[4]) for i, row in enumerate(rows)),
            [row[6:] for row in rows],
            [row[5] for row in rows],
            first + 1,  # the very first is not among them
            talking_,
            told,
        )

    def _packed(self, waited_s: float, most: int) -> bytes:
        """What the others hear of this worker's waiting, in at most so many bytes: the short waits are left out."""
        waits = [[one.where, one.op, one.calls, one.steps, one.seconds] for one in self.ledger.waits()]
        while True:
            packed = json.dumps([waited_s + self.ledger.seconds, self._steps, waits]).encode()
            if len(packed) <= most or not waits:
                return packed
            waits.pop()

    def _of_loss(self, loss: Loss) -> str:
        after = f"{format_seconds(max(loss.at_s - self._begun_s, 0.0))} after the run had begun"
        if loss.back_s is None:
            return f"Rank {loss.rank} died {after}, and the others went on."
        back = format_seconds(loss.back_s - loss.at_s)
        return f"Rank {loss.rank} died {after}, the others went on, and it was back {back} later."

    def summary(self, optimizer: Watched) -> Summary:
        me, everyone = optimizer.me, self._everyone
        ranks: tuple[RankSummary, ...] = (
            RankSummary(me.rank, self._steps, self._own_s, self._away_s, optimizer.wire_bytes, self._ended_s),
        )
        waits = self.ledger.waits()
        elsewhere = foreign.told(waits, optimizer.wait_s + self.ledger.seconds, self._steps)
        if everyone is not None:
            judged = judge(everyone.busy_s, everyone.waits_s, begin=everyone.begin)
            ranks, told = compared(everyone.ranks, judged), [judged.verdict]
            if 0 < judged.steps < max(row.steps for row in ranks) - 1:
                last = everyone.begin + judged.steps - 1
                told.append(
                    f"That, and who was late, is about steps {everyone.begin} to {last} alone: those that all ranks "
                    "took, and kept the times of."
                )
            told += self.work or slowness.cost_of_shares([(row.steps, row.ended_s or 0.0) for row in ranks])
            told += talking.told(everyone.talking, everyone.busy_s)
            elsewhere = everyone.foreign or elsewhere
        elif me.size == 1:
            told = [judge([self._busy_s], [0.0]).verdict, *self.work]
        elif optimizer.is_over:
            told = ["The run ended before finish() was through, so the other ranks' times are not known."]
        else:
            told = ["The other ranks' rows, and who was waited for, are known after finish()."]
        told += [self._of_loss(loss) for loss in self.losses()] + self.left_out()
        told += elsewhere
        if optimizer.carriers:
            ways = " and ".join(WAYS[name] for name in optimizer.carriers)
            coded = f", coded {me.reported.coded}" if me.reported.coded else ""
            coded += f", uncoded: {me.spared} is for what leaves a host" if me.spared else ""
            told.append(f"Vectors went through {ways}{coded}.")
        return Summary(
            rank=me.rank,
            workers=me.size,
            steps=self._steps,
            busy_s=self._total_busy_s,
            wait_s=optimizer.wait_s,
            wire_bytes=optimizer.wire_bytes,
            sentences=tuple(told),
            carriers=optimizer.carriers,
            foreign=waits,
            ranks=ranks,
        )


def _told(everyones: Sequence[bytes]) -> list[str]:
    """What all workers' waiting in collectives of others comes to, in words."""
    heard = [json.loads(text) for text in everyones if text]  # of the dead there is none
    waits = foreign.together([ForeignWait(*one) for one in waits] for _, _, waits in heard)
    waited_s, steps = sum(one[0] for one in heard), sum(one[1] for one in heard)
    return foreign.told(waits, waited_s, steps, len(heard))
