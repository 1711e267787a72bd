"""The clerk: one background thread a process that answers for a worker that is still computing.

It drives its worker's seat (see `offbeat.rounds.seat`), which decides everything. What is shared between the worker's
thread and the clerk's, all under ``_lock``: the seat, with its tray, its place and its results. The interleavings the
lock prevents:

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from offbeat.live.carriers.staging import Staging
from offbeat.live.partial.blocks import BlockSums
from offbeat.live.partial.buffers import RoundBuffer
from offbeat.live.partial.coordinator import frame_of, pack
from offbeat.live.partial.link import LOOK_S, Link
from offbeat.live.partial.telling import OVER, PART, Telling
from offbeat.live.transport import elsewhere
from offbeat.live.transport.hub import Frame, Word
from offbeat.live.worker.board import Board
from offbeat.method.effects import Channel, Got
from offbeat.rounds.held import NEVER
from offbeat.rounds.referee import Notice
from offbeat.rounds.seat import THROUGH, Diary, Freshness, Outcome, Seat
from offbeat.runs.trace import Round, Trace
from offbeat.tensors.codec import sent_to
from offbeat.tensors.vector import Vec
from offbeat.topology.hierarchy import Nodes

SHORT_S = 0.002  # how often a worker looks at the board, where what it waits for is written there

Apply = Callable[[list[Got]], None]


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
        log: Diary | None = None,
        telling: Telling | None = None,
        worker_of: Callable[[int], int] | None = None,
    ) -> None:
        self._staging = Staging(like)
        self._channel, self._sums, self._nodes = channel, sums, nodes
        self._board, self._trace, self._seed, self._patience_s = board, trace, seed, patience_s
        self._rank = nodes.of(board.rank)  # a node is one worker here
        self._telling, self._worker_of = telling, worker_of or nodes.of
        self._link = Link("clerk", connection, self._rank, board, patience_s)
        self._lock = self._link.lock
        self._seat = Seat(
            channel.rules,
            channel.whom,
            nodes,
            self._rank,
            None if x is None else self._staging.down(x),
            first_round=first_round,
            first_step=first_step,
            new=partial(RoundBuffer, like, nodes.count, parameters),
            log=log if telling is None else telling,
        )
        if not channel.rules.of_weights and self._divides_early(nodes.count):
            self._seat.tray.scale = 1.0 / nodes.count
        self._waits_since: dict[int, float] = {}
        self._counted: int | None = None
        self._waited_s = 0.0
        self._begin()

    def _begin(self) -> None:
        self._link.listen(self._hear)

    # The worker's thread.

    def offer(self, x: Vec, step: int) -> list[Got]:
        """Deposit, count or go on; the results to apply."""
        start, seat = time.monotonic(), self._seat
        mine = self._staging.down(x)
        with self._lock:
            seat.reclaim()
            self._wait_for(seat.needs_first)
            notice = seat.offer(mine, step)
        self._tell(
            notice
        )  # the deposit is in the tray before anybody is told of it: a round that counts on it finds it
        with self._lock:
            self._wait_for(seat.needs)
            taken, began = self._up(seat.take(step)), seat.began()
        self._tell(began)
        self._waited_s += time.monotonic() - start
        return taken

    def through(self, step: int) -> bool:
        """Whether a deposit now would wait for nothing."""
        self._board.check()  # else one that computes on would do so without the others
        self._link.check()
        with self._lock:
            found = self._seat.is_through(step)
            self._say(THROUGH, found)
            return found

    def finished(self, x: Vec | None) -> None:
        """No data left: never counts again, but goes on answering, from now on with ``x``."""
        self.renew(x)  # before anybody hears that nothing of mine has to be waited for any more
        with self._lock:
            notice = self._seat.finish()
        self._tell(notice)

    def rest(self, x: Vec | None, asked: Callable[[], bool], take_part: Callable[[], None]) -> Got | None:
        """The next result of the others; None when all have finished and nothing is owed.

        Meanwhile the others may have ``asked`` for an average, in which this worker is to ``take_part``.
        """
        self.renew(x)
        since = time.monotonic()
        with self._board.waits_for("the others to finish"):
            while True:
                with self._lock:
                    self._link.check()
                    if (got := self._next()) is not None:
                        return got
                    if self._seat.flushed:
                        self._say(OVER)
                        return None
                    self._lock.wait(LOOK_S)
                since = self._board.bear_with(since, self._patience_s, "the others to finish")
                if asked():
                    self._say(PART)
                    take_part()

    def renew(self, x: Vec | None) -> None:
        """Without a step to take, ``x`` answers for me from now on."""
        mine = None if x is None else self._staging.down(x)
        with self._lock:
            notice = self._seat.renew(mine)
        self._tell(notice)

    def stand(self, all_there: Callable[[], bool], agree_on_largest: Callable[[int], int], apply: Apply) -> None:
        """Stand still between two steps until all do, and apply every round that has been started by then.

        A worker that is behind may need many more rounds until it stands here too.
        """
        with self._lock:
            stands = self._seat.stand()
        self._tell(stands)
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
        # The last of us to be counted was told of every round that the others have started.
        results = agree_on_largest(started := self._back())
        if self._channel.rules.pool is not None:  # of which each has its own number; now nobody can start another
            started = self._back()
        with self._lock:
            self._wait_for(results if self._channel.rules.pool is None else started)
            taken, began = self._up(self._seat.catch_up(results)), self._seat.began()
        apply(taken)
        self._tell(began)

    def _back(self) -> int:
        """Say that I will take steps again; how many rounds have started that I have a part in."""
        self._tell(self._seat.back())
        with self._lock:
            self._wait_until(lambda: self._counted is not None, "the number of rounds")
            assert self._counted is not None
            started, self._counted = self._counted, None
        return started

    def _next(self) -> Got | None:
        got = self._seat.next()
        return None if got is None else self._up([got])[0]

    def _up(self, taken: list[Got]) -> list[Got]:
        """Results where the model lives."""
        up = self._staging.up
        return [Got(g.version, up(g.value), g.fresh, g.full, g.count, g.contributors) for g in taken]

    def _say(self, what: str, number: int = 0) -> None:
        """To the other ranks of an island, where there are some."""
        if self._telling is not None:
            self._telling.say(what, number)

    def _tell(self, notice: Notice | None) -> None:
        if notice is not None:
            self._link.send(frame_of(self._rank, notice))

    def owed(self) -> Vec | None:
        """A copy of the gradients in the tray, for a checkpoint."""
        with self._lock:
            return self._seat.tray.owed()

    @property
    def waited_s(self) -> float:
        return self._waited_s

    @property
    def wire_bytes(self) -> int:
        return self._sums.wire_bytes

    @property
    def lost(self) -> list[int]:
        """The steps whose gradients were dropped."""
        with self._lock:
            return self._seat.lost

    @property
    def rounds(self) -> int:
        """How many are over, as far as this worker knows."""
        with self._lock:
            return self._seat.results

    def close(self) -> None:
        """End the thread and the connection. The flush is over on this rank."""
        self._link.close()
        if self._telling is not None:
            self._telling.close()

    def release(self) -> None:
        self._link.forget_failure()

    def abandon(self) -> None:
        """Hang up without waiting for anybody."""
        if self._telling is not None:
            self._telling.abandon()
        self._link.abandon(self._sums.give_up)

    def _wait_for(self, results: int) -> None:
        """Until so many results are there. Holds the lock on entry and on return, gives it up while waiting."""
        if self._seat.results < results:
            self._waits_since.setdefault(results - 1, time.monotonic())
            with elsewhere.wanting(self._board.name, results if self._channel.rules.pool is None else NEVER):
                self._wait_until(
                    lambda: self._seat.results >= results, f"round {results - 1} of {self._channel.name!r}"
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

    # The clerk's thread.

    def _hear(self, frame: Frame) -> bool:
        if frame.word is Word.GO:
            self._round(frame.a, frame.b, flush=False, members=tuple(map(int, frame.text.split())))
        elif frame.word is Word.WHERE:
            elsewhere.watch(self._board.name, self._say_where if frame.a else None)
        elif frame.word is Word.STARTED:
            with self._lock:
                self._counted = frame.a
                self._lock.notify_all()
        elif frame.word is Word.FLUSH:
            if self._seat.flushes:
                self._round(frame.a, -1, flush=True)
            with self._lock:
                self._seat.flushed = True
                self._lock.notify_all()
        return self._seat.flushed

    def _say_where(self) -> None:
        where = elsewhere.report(self._board.name, self._worker_of)
        self._link.mention(Word.ELSEWHERE, text=pack(where))

    def _round(self, version: int, started_by: int, flush: bool, members: tuple[int, ...] = ()) -> None:
        seat = self._seat
        ranks = members or seat.members(version, flush)
        divisor = seat.divisor(ranks)
        # Powers of two divide exactly, so it does not matter when; on the way into the buffer it costs nothing.
        scale = 1.0 / divisor if seat.rules.of_weights and self._divides_early(divisor) else 1.0
        with self._turn("flush" if flush else "snapshot"):
            if members and self._telling is not None:
                self._telling.say_members(members)
            given = seat.snapshot(version, flush, scale)
            buffer = given.value if given.value is not None else seat.tray.memory().zero_()
        assert isinstance(buffer, RoundBuffer)
        buffer.note(self._rank, given.share)
        codec = sent_to(self._channel.codec, len(ranks) - 1)
        if codec is None:
            self._sums.total(buffer, ranks, version)
        else:
            own = None if given.value is None else buffer
            key, lost = (self._seed, self._rank, version), self._channel.lost
            self._sums.coded_total(buffer, own, ranks, version, codec, key, lost, seat.rules.of_weights, divisor)
        if codec is None and not self._divides_early(divisor):
            for p in buffer.parts:
                p.div_(divisor)
        outcome = Outcome.of(self._nodes, version, buffer, buffer.shares(ranks), len(ranks), flush)
        if outcome.shares or not flush:  # else nobody owed anything
            with self._turn("result"):
                seat.deliver(outcome, given)
                self._record(version, started_by, outcome.shares)
        if not flush:
            self._tell(seat.over())
        elsewhere.saw(self._board.name, seat.results)

    @contextmanager
    def _turn(self, what: str) -> Iterator[None]:
        """Something happens at the seat now, and whoever waits for it looks."""
        with self._lock:
            yield
            self._lock.notify_all()

    def _record(self, version: int, started_by: int, shares: Mapping[int, Freshness]) -> None:
        now = time.monotonic()
        waited = {self._rank: now - self._waits_since.pop(self._seat.results - 1, now)}
        if self._trace.keep_rounds:
            self._trace.rounds.append(Round.among(self._nodes, version, started_by, shares, waited, now))

    def _divides_early(self, divisor: int) -> bool:
        return self._channel.codec is None and divisor & (divisor - 1) == 0
