"""A worker's side of a channel whose seats are kept at the hub (see `offbeat.live.partial.desk`).

A second line, with a listener, only answers where this worker is. Where results may be late, another thread hears them
(see `offbeat.live.partial.ahead`).
"""

from __future__ import annotations

import marshal
import socket
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from offbeat.live.carriers.shelves import Shelves
from offbeat.live.partial.ahead import SPARE, Ahead
from offbeat.live.partial.coordinator import pack
from offbeat.live.partial.later import Later
from offbeat.live.partial.link import Link
from offbeat.live.partial.reading import LOOK_S, SOON_S, Reader
from offbeat.live.partial.stacks import Home
from offbeat.live.partial.told import Answer, Delivery
from offbeat.live.transport import elsewhere
from offbeat.live.transport.board import Board
from offbeat.live.transport.hub import Frame, Word
from offbeat.method.effects import Channel, Got
from offbeat.rounds.seat import THROUGH, Event
from offbeat.runs.trace import Round, Trace
from offbeat.tensors.vector import Vec, Way
from offbeat.tensors.wire import all_reduce_bytes
from offbeat.topology.hierarchy import Nodes

SHORT_BYTES = 1 << 20  # of a vector: a step of longer ones takes so long that the others should not wait for its end
SHORT_S = 0.002  # how often a worker looks at the board, where what it waits for is written there

Apply = Callable[[list[Got]], None]


class Twin(Protocol):
    """A replica as vectors and what is said of them: this worker's, to be laid down, or another's, to be taken over."""

    def lay_into(self, room: Callable[[int], Vec], most: int) -> tuple[int, Any]:
        """How many vectors it is, and what is said of them, in plain values. 0: it cannot be laid down.

        ``room`` gives memory for ``most`` of them, each made when it is asked for.
        """
        ...

    def take_over(self, vectors: Sequence[Vec], said: Any) -> None: ...


class Taker:
    """A worker's side of one channel. ``twin``: where replicas may stand for results that were missed."""

    def __init__(
        self,
        channel: Channel,
        x: Vec | None,
        shelves: Shelves,
        connections: tuple[socket.socket, socket.socket],
        nodes: Nodes,
        board: Board,
        trace: Trace,
        nbytes: int,
        first_step: int,
        first_round: int,
        patience_s: float,
        log: list[Event] | None = None,
        twin: Twin | None = None,
        pooled: bool = False,
    ) -> None:
        self._twin, self._holds = twin, first_round  # how many results are in this worker's replica
        self._channel, self._nodes, self._nbytes = channel, nodes, nbytes
        self._board, self._trace, self._patience_s = board, trace, patience_s
        self._rank = nodes.of(board.rank)  # a node is one worker here
        line, questions = connections
        self.rounds, self.lost = first_round, list[int]()
        self.waited_s, self.wire_bytes = 0.0, 0
        replaces = channel.rules.replaces
        # On a GPU a step is short beside a question; and what answers for a worker's gradients needs little memory.
        keeps = int(pooled and shelves.on_device and not channel.rules.of_weights)
        self._reader = Reader(shelves, line, self._rank, board, patience_s, self._heard, log, pooled, replaces, keeps)
        self._link = Link("questions", questions, self._rank, board, patience_s)
        self._saves_memory, self._lets_go = pooled, pooled and not shelves.on_device
        self._ahead: Ahead | None = None
        self._later: Later | None = Later(self._reader, shelves) if pooled and shelves.on_device else None
        if channel.rules.late:
            gives_back = pooled and channel.rules.absent == "shared"
            self._ahead = Ahead(self._reader, shelves, line, board, nbytes <= SHORT_BYTES, gives_back)
            self._later = None
        self._kept: Home | None = None  # where a copy of the weights lies, until the way from it does
        if pooled:
            channel.keep.elsewhere = self._keep
        self._waits_since: float | None = None
        self._owed: Vec | None = None
        self._wanted = 0  # how many results this worker waits, or has waited, for; the listener alone writes it
        place = -1 if x is None else self._reader.put(x)
        self._reader.send(Word.OPEN, place, first_step, int(log is not None) + 2 * (twin is not None))
        self._link.listen(self._hear)

    # Steps.

    def offer(self, x: Vec, step: int) -> list[Got]:
        """Deposit, count or go on; the results to apply."""
        start = time.monotonic()
        if self._ahead is not None:
            taken = self._hand_in(self._ahead, x, step)
        else:
            self._hush()
            place = self._put(x)
            if self._saves_memory:
                self._reader.give_back()
            self._reader.come_again(Word.OFFER, place, step)
            taken = self._take(self._answer())
            if self._lets_go:  # of what it has laid down: others may be looking for a slot while it takes its results
                self._reader.give_back()
        self.waited_s += time.monotonic() - start
        return taken

    def through(self, step: int) -> bool:
        """Whether a deposit now would wait for nothing. (Where results are never late, it has waited already.)"""
        self._board.check()
        found = self._ahead is None or self._ahead.ready_within(0.0)
        if found:
            self._reader.note(THROUGH, step)
        return found

    def _hand_in(self, ahead: Ahead, x: Vec, step: int) -> list[Got]:
        """Take what came while the step was computed; the deposit's own result is for the next time."""
        waited = self._wait_for(ahead.ready_within)
        ahead.hush()
        self._lay_spare(ahead.asked())
        told = ahead.take()
        if self._channel.rules.absent == "shared":  # the newest will do, and knows nothing of this step
            newest = [one for one in told if one.answer.results][-1:]
            # It may stand on a deposit of mine whose slot is free by now, and is read only after this.
            place = self._put(x, but_not={mine for one in newest for mine in one.deposits})
            taken = self._gots(newest, plus=self._reader.laid(place))
        else:
            taken = self._gots(told)
            place = self._put(x)
        ahead.hand_in(place, step, told, at_once=waited)
        return taken

    def _keep(self, x: Vec) -> Vec:
        """A copy of the weights, in the slot in which the way from there will lie."""
        if self._kept is None:
            self._kept = self._reader.claim()
        return x.put_into(self._reader.slot(self._kept))

    def _put(self, x: Vec, but_not: Collection[Home] = ()) -> int:
        if self._kept is None or not isinstance(x, Way) or x.start is not self._reader.slot(self._kept):
            return self._reader.put(x, but_not)
        home, self._kept = self._kept, None
        return self._reader.put_there(x, home)

    def step_over(self) -> None:
        """The worker goes back to its own loop: let the others hear of its work, if they have not yet.

        Where memory counts, the hub hears that results are read no longer. (On a GPU they may be until later; there a
        second thread waits for that.)
        """
        if self._ahead is not None:
            self._ahead.wake()
            if self._saves_memory:
                self._ahead.has_read()
        elif self._later is not None:
            self._later.let_go()
        elif self._lets_go:
            self._reader.let_go()

    def _wait_for(self, within: Callable[[float], bool]) -> bool:
        """Until it is so. Whether that took any time."""
        if within(0.0):
            return False
        start = time.monotonic()
        what, self._waits_since = f"round {self.rounds} of {self._channel.name!r}", start
        if not within(SOON_S):
            with self._board.waits_for(what), elsewhere.wanting(self._board.name, max(self.rounds + 1, self._wanted)):
                while not within(LOOK_S):
                    self._board.check(what)
                    self._link.check()
                    if time.monotonic() - start > self._patience_s:
                        raise self._board.gave_up(self._patience_s, what)
        self._waits_since = None
        return True

    def _hush(self) -> None:
        """What is said from now on is about newer results."""
        if self._later is not None:
            self._later.hush()

    def _stop_looking_ahead(self) -> None:
        self._hush()
        if self._ahead is not None:
            self._ahead.stop(self._wait_for)
            self._lay_spare(self._ahead.asked())

    def finished(self, x: Vec | None) -> None:
        """No data left: never counts again; ``x`` answers for me from now on."""
        self._stop_looking_ahead()
        self.renew(x)  # before anybody hears that nothing of mine has to be waited for any more
        self._reader.ask(Word.FINISHED)

    def renew(self, x: Vec | None) -> None:
        """Without a step to take, ``x`` answers for me from now on."""
        if x is not None:
            self._reader.ask(Word.RENEWED, self._put(x))

    def rest(self, x: Vec | None, asked: Callable[[], bool], take_part: Callable[[], None]) -> Got | None:
        """The next result of the others; None when all have finished and nothing is owed.

        Meanwhile the others may have ``asked`` for an average, in which this worker is to ``take_part``.
        """
        self.renew(x)
        since = time.monotonic()

        def look() -> bool:
            nonlocal since
            since = self._board.bear_with(since, self._patience_s, "the others to finish")
            return asked()

        while True:
            with self._board.waits_for("the others to finish"):
                answer = self._next(look, LOOK_S)
            if answer.how == "nothing":
                take_part()
            elif answer.how != "taken":
                return None
            elif taken := self._take(answer):  # else it was a replica, and there is more behind it
                return taken[0]

    def stand(self, all_there: Callable[[], bool], agree_on_largest: Callable[[int], int], apply: Apply) -> None:
        """Stand still between two steps until all do, and apply every round that has been started by then."""
        self._stop_looking_ahead()
        self._reader.ask(Word.STANDS)
        holds = self._channel.holds
        self.renew(holds())
        start, what = time.monotonic(), "the others to stand still"

        def look() -> bool:
            self._board.check(what)
            if time.monotonic() - start > self._patience_s:
                raise self._board.gave_up(self._patience_s, what)
            return all_there()

        with self._board.waits_for(what):
            while (answer := self._next(look, SHORT_S)).how == "taken":
                apply(self._take(answer))
                self.renew(holds())
            while not look():
                self._board.pause(SHORT_S, all_there)
        started = self._reader.ask(Word.BACK).about[0]
        # The last of us to be counted was told of every round that the others have started.
        results = agree_on_largest(started)
        self._reader.come_again(Word.CATCH_UP, results)
        apply(self._take(self._reader.wait("an answer of rank 0")))

    def owed(self) -> Vec | None:
        """A copy of the gradients in the tray, for a checkpoint."""
        if self._reader.hung_up:
            return self._owed
        if self._ahead is not None:
            self._wait_for(self._ahead.said_within)
        places = self._reader.ask(Word.OWED).about[0]
        return self._reader.added_up(places) if places else None

    # The desk.

    def _answer(self) -> Answer:
        """To a step: at once, or when the others are there. Before it, this worker may be asked for a replica."""
        while (answer := self._next_answer()).how == SPARE:
            self._lay_spare(answer)
        return answer

    def _next_answer(self) -> Answer:
        if self._reader.heard_within(SOON_S):
            return self._reader.answer()
        what = f"round {self.rounds} of {self._channel.name!r}"
        with self._board.waits_for(what), elsewhere.wanting(self._board.name, max(self.rounds + 1, self._wanted)):
            return self._reader.wait(what, self._link.check)

    def _next(self, look: Callable[[], bool], pause_s: float) -> Answer:
        """The next result, "over", or, as soon as ``look`` finds something else to do, "nothing"."""
        reader = self._reader
        self._hush()
        reader.come_again(Word.NEXT)
        while not reader.heard_within(pause_s):
            self._link.check()
            if look():
                reader.send(Word.NOTHING)
                break
        return reader.wait("an answer of rank 0")

    def _heard(self, answer: Answer) -> None:
        _, self.rounds, lost = answer.about
        self.lost += lost
        for version, started_by, shares, members, end_s in answer.news:
            if members > 1:
                self.wire_bytes += all_reduce_bytes(members, self._nbytes) // members
            if self._trace.keep_rounds:
                since = self._reader.asked_s if self._ahead is None else self._waits_since
                waited = {self._rank: 0.0 if since is None else max(0.0, end_s - since)}
                self._trace.rounds.append(Round.among(self._nodes, version, started_by, shares, waited, end_s))

    def _take(self, answer: Answer) -> list[Got]:
        return self._gots([self._reader.make(answer)])

    def _gots(self, told: Sequence[Delivery], plus: Vec | None = None) -> list[Got]:
        """The results that were told, to be applied now. A replica among them is taken over, and stands for all that
        come before it."""
        elsewhere.saw(self._board.name, self.rounds)
        every = [(one, refs, said) for one in told for refs, said in one.answer.results]
        spare = max((k for k, (_, _, said) in enumerate(every) if len(said) == 2), default=None)
        if spare is not None and self._twin is not None:
            one, refs, (_, said) = every[spare]
            self._twin.take_over(self._reader.sums.each(refs, one), marshal.loads(said))
        results = every if spare is None else every[spare + 1 :]
        if every:
            self._holds = every[-1][2][0] + 1
        return [
            Got(version, self._reader.sums.value(refs, one, plus), fresh, full, count, contributors)
            for one, refs, (version, fresh, full, count, contributors) in results
        ]

    def _lay_spare(self, asked: Answer | None) -> None:
        """Lay my replica down where I was told to, as it is between two steps."""
        if asked is not None and self._twin is not None:
            homes = asked.about[0]
            vectors, said = self._twin.lay_into(lambda k: self._reader.slot(homes[k]), len(homes))
            self._reader.send(Word.SPARE, self._holds, vectors, data=marshal.dumps(said))

    # The other line.

    def _hear(self, frame: Frame) -> bool:
        if frame.b:
            self._wanted = frame.b
            elsewhere.wants(self._board.name, frame.b)
        if frame.word is Word.WHERE:
            elsewhere.watch(self._board.name, self._say_where if frame.a else None)
        return False

    def _say_where(self) -> None:
        where = elsewhere.report(self._board.name, self._nodes.of)
        self._link.mention(Word.ELSEWHERE, text=pack(where))

    # The end.

    def close(self) -> None:
        """All have finished, and every result has been taken."""
        self._hang_up(together=True)

    def _hang_up(self, together: bool) -> None:
        self._link.abandon()
        ended = self._ahead is None or self._ahead.end()
        if self._later is not None:
            ended = self._later.end() and ended
        if ended:
            self._reader.hang_up(together)

    def release(self) -> None:
        self._channel.keep.elsewhere = None  # else the channel, which this holds, would hold this
        self._link.forget_failure()
        if self._ahead is not None:
            self._ahead.forget_failure()

    def abandon(self) -> None:
        """Hang up without waiting for anybody. What was in no result that came here is still owed."""
        places = self._reader.untaken
        if places and not self._channel.rules.of_weights and not self._reader.hung_up:
            self._owed = self._reader.added_up(places)
        self._hang_up(together=False)
