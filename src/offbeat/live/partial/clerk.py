"""The clerk: one background thread a process that answers for a worker that is still computing.

What is shared between the worker's thread and the clerk's, all under ``_lock``: the tray, the place, the results. The
interleavings the lock prevents:

- torn tensors: the worker writes its deposit while the clerk copies the tray;
- a lost deposit: the worker reads "round 7 is not over", the clerk takes the snapshot and delivers round 7, the worker
  deposits and waits for round 7, which has been delivered already (here: it deposits and decides in one go, and the
  result is there when it looks);
- a wrong "fresh": the record of what a snapshot holds is made together with the snapshot.

The clerk alone starts operations on the channel's process groups, in the order of the rounds, which is the same on
every rank; no other thread touches these groups. The lock is never held while waiting for the network.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from offbeat.live.partial.blocks import BlockSums
from offbeat.live.partial.buffers import RoundBuffer
from offbeat.live.partial.coordinator import pack
from offbeat.live.partial.link import LOOK_S, Link
from offbeat.live.transport import elsewhere
from offbeat.live.transport.board import Board
from offbeat.live.transport.hub import Frame, Word
from offbeat.live.transport.staging import Staging
from offbeat.method.effects import Channel, Got
from offbeat.rounds.place import Place
from offbeat.rounds.tray import Deposit, Tray
from offbeat.runs.trace import Round, Trace
from offbeat.tensors.codec import sent_to
from offbeat.tensors.vector import Vec
from offbeat.topology.hierarchy import Nodes

SHORT_S = 0.002  # how often a worker looks at the board, where what it waits for is written there

Apply = Callable[[list[Got]], None]


@dataclass(frozen=True)
class _Result:
    value: RoundBuffer
    deposits: int  # of this worker that are in it
    full: bool
    count: int
    contributors: dict[int, int]


class Clerk:
    """A worker's side of one channel."""

    def __init__(
        self,
        channel: Channel,
        x: Vec | None,
        like: Vec,
        parameters: int,
        connection: socket.socket,
        sums: BlockSums,
        nodes: Nodes,
        board: Board,
        trace: Trace,
        seed: int,
        first_step: int,
        first_round: int,
        patience_s: float,
    ) -> None:
        self._staging = Staging(like)
        self._ahead = first_round - first_step  # of a run that was taken up again: its rounds begin with its steps
        self._channel, self._sums = channel, sums
        self._board, self._trace, self._seed, self._patience_s = board, trace, seed, patience_s
        self._nodes, self._rank, self._size = nodes, nodes.of(board.rank), nodes.count  # a node is one worker here
        self._link = Link("clerk", connection, self._rank, board, patience_s)
        self._lock = self._link.lock
        self._tray = Tray(channel.rules.absent, partial(RoundBuffer, like, nodes.count, parameters))
        self.place = Place.beginning(channel.rules, first_round)
        if not channel.rules.of_weights and self._divides_early(self._size):
            self._tray.scale = 1.0 / self._size
        self._results: dict[int, _Result] = {}
        self._lent: list[RoundBuffer] = []  # results that the strategy may still be reading
        self._flushed = self._finished = False
        self._takes_each = False  # it stands or rests, and takes one result after the other
        self._waits_since: dict[int, float] = {}
        self._counted: int | None = None
        self.waited_s = 0.0
        if x is not None:
            self._tray.deposit(self._staging.down(x), Deposit(-1, first_round))
        self._link.listen(self._hear)

    # The worker's thread.

    def offer(self, x: Vec, step: int) -> list[Got]:
        """Deposit, count or go on; the results to apply."""
        start = time.monotonic()
        bounded = self._channel.rules.bound is not None
        mine, step = self._staging.down(x), step + self._ahead
        with self._lock:
            self._reclaim()
            self._wait_for(self.place.outstanding + 1 if self.place.must_wait_first() else 0)
            piece = Deposit(step, self.place.base)
            position = self.place.arrive(step)
            if position is None and self._channel.rules.absent == "drop":
                self._tray.discard(piece)
            else:
                self._tray.deposit(mine, piece, self.place.weight())
            needed = self.place.waits_for(position)
            next_base = max(self.place.takes_at_least(step), needed)
        # The deposit is in the tray before anybody is told of it: a round that counts on it finds it.
        if position is not None:
            self._link.tell(Word.ARRIVED, position, piece.base, next_base)
        elif bounded:
            self._link.tell(Word.PASSED, 0, piece.base, next_base)
        with self._lock:
            self._wait_for(needed)
            got = [self._got(v) for v in self.place.take(step) if v in self._results]
            base = self.place.base
        if bounded:
            self._link.tell(Word.BEGAN, 0, base)
        self.waited_s += time.monotonic() - start
        return got

    def finished(self) -> None:
        """No data left: never counts again, but goes on answering."""
        if not self._finished:
            self._finished = True
            self._link.tell(Word.FINISHED)

    def rest(self, x: Vec | None, asked: Callable[[], bool], take_part: Callable[[], None]) -> Got | None:
        """The next result of the others; None when all have finished and nothing is owed.

        Meanwhile the others may have ``asked`` for an average, in which this worker is to ``take_part``.
        """
        self.renew(x)
        with self._lock:
            self._takes_each = True
        since = time.monotonic()
        with self._board.waits_for("the others to finish"):
            while True:
                with self._lock:
                    self._link.check()
                    if (got := self._next()) is not None:
                        return got
                    if self._flushed:
                        return None
                    self._lock.wait(LOOK_S)
                since = self._board.bear_with(since, self._patience_s, "the others to finish")
                if asked():
                    take_part()

    def renew(self, x: Vec | None) -> None:
        """Without a step to take, ``x`` answers for me from now on."""
        if x is None:
            return
        mine = self._staging.down(x)
        with self._lock:
            self._tray.deposit(mine, Deposit(-1, self.place.taken))
            taken = self.place.taken
        if self._channel.rules.bound is not None:
            self._link.tell(Word.RENEWED, 0, taken)

    def stand(self, all_there: Callable[[], bool], agree_on_largest: Callable[[int], int], apply: Apply) -> None:
        """Stand still between two steps until all do, and apply every round that has been started by then.

        Meanwhile nobody waits for me, and I take every result, as one who has finished: a worker that is behind may
        need many more rounds until it stands here too.
        """
        with self._lock:
            self._takes_each = True
        self._link.tell(Word.STANDS)
        holds = self._channel.holds
        self.renew(holds())
        start, what = time.monotonic(), "the others to stand still"
        with self._board.waits_for(what):
            while not all_there():
                with self._lock:
                    self._link.check()
                    got = self._next()
                    if got is None:
                        self._lock.wait(SHORT_S)
                if got is not None:
                    apply([got])
                    self.renew(holds())
                self._board.check(what)
                if time.monotonic() - start > self._patience_s:
                    raise self._board.gave_up(self._patience_s, what)
        self._link.tell(Word.BACK)
        with self._lock:
            self._wait_until(lambda: self._counted is not None, "the number of rounds")
            assert self._counted is not None
            started, self._counted = self._counted, None
        # The last of us to be counted was told of every round that the others have started.
        results = agree_on_largest(started)
        with self._lock:
            self._wait_for(results)
            taken = [self._got(v) for v in self.place.take(results - 1) if v in self._results] if results else []
            base, self._takes_each = self.place.base, self._finished
        apply(taken)
        if self._channel.rules.bound is not None and not self._finished:
            self._link.tell(Word.BEGAN, 0, base)

    def _next(self) -> Got | None:
        """The oldest result not taken yet, if there is one."""
        self._reclaim()
        version = min(self._results, default=self.place.results)
        if version >= self.place.results:
            return None
        self.place.taken = self.place.base = version + 1
        return self._got(version)

    def _reclaim(self) -> None:
        """What was handed out before has been read when a worker comes again (rule 4): its memory is free."""
        self._tray.spare, self._lent = [*self._tray.spare, *self._lent][-2:], []

    def owed(self) -> Vec | None:
        """A copy of the gradients in the tray, for a checkpoint."""
        with self._lock:
            return self._tray.owed()

    @property
    def wire_bytes(self) -> int:
        return self._sums.wire_bytes

    @property
    def lost(self) -> list[int]:
        """The steps whose gradients were dropped."""
        with self._lock:
            return [piece.step - self._ahead for piece in self._tray.lost if piece.step >= 0]

    @property
    def rounds(self) -> int:
        """How many are over, as far as this worker knows."""
        with self._lock:
            return self.place.results

    def close(self) -> None:
        """End the thread and the connection. The flush is over on this rank."""
        self._link.close()

    def release(self) -> None:
        self._link.forget_failure()

    def abandon(self) -> None:
        """Hang up without waiting for anybody."""
        self._link.abandon(self._sums.give_up)

    def _wait_for(self, results: int) -> None:
        """Until so many results are there. Holds the lock on entry and on return, gives it up while waiting."""
        if self.place.results < results:
            self._waits_since.setdefault(results - 1, time.monotonic())
            with elsewhere.wanting(self._board.name, results):
                self._wait_until(
                    lambda: self.place.results >= results, f"round {results - 1} of {self._channel.name!r}"
                )

    def _wait_until(self, ready: Callable[[], bool], what: str) -> None:
        start = time.monotonic()
        with self._board.waits_for(what):
            while not ready():
                self._link.check()
                if not self._lock.wait(LOOK_S):
                    self._lock.release()
                    try:
                        self._board.check(what)
                        if time.monotonic() - start > self._patience_s:
                            raise self._board.gave_up(self._patience_s, what)
                    finally:
                        self._lock.acquire()

    def _got(self, version: int) -> Got:
        result, late = self._results.pop(version), self._channel.rules.late
        fresh = result.deposits >= self._tray.deposits - late
        self._lent.append(result.value)
        if self._channel.rules.absent == "shared":
            newest = version + 1 == self.place.results and result.deposits == self._tray.deposits
            if not newest:  # else the tray has become just that
                self._tray.show_into(result.value)
        value = self._staging.up(result.value)
        return Got(version, value, fresh, result.full, result.count, result.contributors)

    # The clerk's thread.

    def _hear(self, frame: Frame) -> bool:
        if frame.word is Word.GO:
            self._round(frame.a, frame.b, flush=False)
        elif frame.word is Word.WHERE:
            elsewhere.watch(self._board.name, self._say_where if frame.a else None)
        elif frame.word is Word.STARTED:
            with self._lock:
                self._counted = frame.a
                self._lock.notify_all()
        elif frame.word is Word.FLUSH:
            if not self._channel.rules.of_weights:
                self._round(frame.a, -1, flush=True)
            with self._lock:
                self._flushed = True
                self._lock.notify_all()
        return self._flushed

    def _say_where(self) -> None:
        where = elsewhere.report(self._board.name, self._nodes.of)
        self._link.mention(Word.ELSEWHERE, text=pack(where))

    def _round(self, version: int, started_by: int, flush: bool) -> None:
        rules, everyone = self._channel.rules, tuple(range(self._size))
        full = flush or rules.is_full(version)
        ranks = everyone if full else self._channel.whom(version).block(self._rank)
        if ranks is None:
            raise ValueError(f"partial rounds average within groups, not along {self._channel.whom(version)}")
        divisor = len(ranks) if rules.of_weights else self._size
        # Powers of two divide exactly, so it does not matter when; on the way into the parcel it costs nothing.
        scale = 1.0 / divisor if rules.of_weights and self._divides_early(divisor) else 1.0
        with self._lock:
            pieces = self._tray.pieces
            in_time = bool(pieces) and not flush and self.place.made_for(version, pieces[-1].base)
            shot = self._tray.snapshot(version, in_time, scale)
            given = shot.value if shot.value is not None else self._tray.memory().zero_()
        assert isinstance(given, RoundBuffer)
        entry = 0
        if (age := shot.staleness(version)) is not None:
            entry = 2 * (age + 1) + shot.fresh(version, rules.catch_up)
        given.note(self._rank, entry)
        codec = sent_to(self._channel.codec, len(ranks) - 1)
        if codec is None:
            self._sums.total(given, ranks, version)
        else:
            self._sums.coded_total(given, ranks, version, codec, (self._seed, self._rank, version))
        if not self._divides_early(divisor):
            for p in given.parts:
                p.div_(divisor)
        record = given.entries()
        if flush and not any(record):
            return  # nothing was owed: no result, so that no optimiser moves
        staleness = {r: record[r] // 2 - 1 for r in ranks if record[r]}
        fresh = tuple(r for r in staleness if record[r] % 2)
        result = _Result(given, shot.deposits, full, len(ranks), self._nodes.spread(staleness))
        self._deliver(version, started_by, fresh, staleness, result)

    def _divides_early(self, divisor: int) -> bool:
        return self._channel.codec is None and divisor & (divisor - 1) == 0

    def _deliver(
        self, version: int, started_by: int, fresh: tuple[int, ...], staleness: dict[int, int], result: _Result
    ) -> None:
        with self._lock:
            now = time.monotonic()
            waited = {self._rank: now - self._waits_since.pop(version, now)}
            if self._trace.keep_rounds:
                seen = Round(version, started_by, fresh, staleness, waited, now)
                self._trace.rounds.append(seen.spread_over(self._nodes))
            if self._channel.rules.absent == "shared":
                self._tray.adopt(result.value)
            if self._channel.rules.of_weights and self._channel.rules.catch_up == "current" and not self._takes_each:
                self._forget_older()
            self._results[version] = result
            self.place.results = version + 1
            self._lock.notify_all()
        elsewhere.saw(self._board.name, version + 1)

    def _forget_older(self) -> None:
        """Of averages of weights a late worker takes the newest, so it need not keep one for every round it misses."""
        for version in list(self._results):
            self._tray.spare = [*self._tray.spare, self._results.pop(version).value][-2:]
