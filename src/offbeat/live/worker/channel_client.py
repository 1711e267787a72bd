"""A worker's side of a channel: it writes what it has made, submits it, waits for results or goes on, and reads them.

What happens to what it submits is decided in the host process (`offbeat.live.host.channel_server`). This worker has no
thread for it: while it computes, what it is told waits in its line, and it looks there when it comes again.

Where results may be late the worker *looks ahead*: it takes the results that it has been told of, submits, and goes on
at once. It says with what it submits how many of the results it has taken, so that what a step was begun with is a
matter of record, and not of when a message came.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch

from offbeat.live.host import protocol as say
from offbeat.live.host.protocol import Answer
from offbeat.live.transport.errors import OffbeatError, PeerFailed
from offbeat.live.worker.board import Board
from offbeat.live.worker.line import Line
from offbeat.live.worker.slots import Slots
from offbeat.method.effects import Channel, Got
from offbeat.rounds.seat import THROUGH, Event
from offbeat.runs.trace import Round, Trace
from offbeat.tensors.stretches import Stretches
from offbeat.tensors.vector import Vec, Way
from offbeat.tensors.wire import all_reduce_bytes, sent_in_phases
from offbeat.topology.hierarchy import Nodes

LOOK_S = 0.1  # how often a waiting worker looks at the board
SHORT_S = 0.002  # the same, where what it waits for is written there
SOON_S = 0.02  # a wait that is over by then is no wait to tell of
LONG_BYTES = 1 << 24  # of a vector: from here on memory is given back when a step is over, and not with the next one
LEAVE_S = 2.0
AHEAD, MORE = 64, 32  # rounds of a schedule that has no period: told at a time, and told again when fewer are left

Apply = Callable[[list[Got]], None]


class Twin(Protocol):
    """A replica as vectors and what is said of them: this worker's, to be laid down, or another's, to be taken over."""

    def lay_into(self, room: Callable[[int], Vec], most: int) -> tuple[int, Any]:
        """How many vectors it is, and what is said of them, in plain values. 0: it cannot be laid down.

        ``room`` gives memory for ``most`` of them, each made when it is asked for.
        """
        ...

    def take_over(self, vectors: Sequence[Vec], said: Any) -> None: ...


class HostClient:
    """What every kind of worker's side does: it holds slots to write to, asks, and is answered."""

    def __init__(self, key: str, line: Line, word: int, slots: Slots, board: Board, patience_s: float) -> None:
        self.key, self.line, self._word, self._slots = key, line, word, slots
        self._board, self._patience_s = board, patience_s
        self._grants: deque[int] = deque()
        self._answered = 0  # the number of the last answer that was read here
        self.hung_up = False

    def open(self, message: say.OpenChannel) -> None:
        self._ask(message)

    def send(self, message: Any) -> None:
        self._board.check()  # else one that needs nobody would go on without the others
        if hasattr(message, "released") and getattr(message, "slot", -1) < 0:
            self._slots.released()
        self.line.send(message)

    def _heard_within(self, seconds: float) -> Answer | None:
        answer: Answer | None = self.line.heard_within(self.key, seconds)
        if answer is not None:
            self._grants += answer.grants
            for slot, handle in answer.handles.items():
                self._open(int(slot), handle)
            self._hear(answer)
        return answer

    def _open(self, slot: int, handle: str) -> None:
        """A slot on a GPU that it has not heard of."""
        try:
            self._slots.memory.open(slot, handle)  # type: ignore[attr-defined]
        except OSError as error:
            raise OffbeatError(
                f"this rank cannot open the host process's memory on the GPU ({error}); set OFFBEAT_CARRIER=shm on all "
                "ranks, and vectors go through memory of the host"
            ) from error

    def _hear(self, answer: Answer) -> None:
        """Whatever it is about."""

    def _wait(self, what: str, look: Callable[[], None] = lambda: None) -> Answer:
        start_s = time.monotonic()
        while (answer := self._heard_within(LOOK_S)) is None:
            self._board.check(what)
            look()
            if time.monotonic() - start_s > self._patience_s:
                raise self._board.gave_up(self._patience_s, what)
        return answer

    def _ask(self, message: Any) -> Answer:
        """What the host process answers at once."""
        self.send(message)
        return self._wait("an answer of the host process")

    def _room(self) -> int:
        """A slot to write to."""
        while not self._grants:
            self._wait("a slot to write to")
        return self._grants.popleft()

    def _write(self, x: Vec) -> int:
        slot = self._room()
        self._slots.write(x, slot)
        return slot

    def hang_up(self) -> None:
        if not self.hung_up:
            self.hung_up = True
            with suppress(PeerFailed):
                self.line.send(say.Close(self.key))
            self.line.part(self.key, self._word)
            self._slots.close()


class Rank(NamedTuple):
    """Which rank of a worker this one is, ``of`` so many; it ``writes`` what it brings, or another one does for all.

    ``passed_bytes``: what is counted as passed on inside the worker, for each result.
    """

    number: int = 0
    of: int = 1
    writes: bool = True
    passed_bytes: int = 0


ALONE = Rank()


class ChannelClient(HostClient):
    """A worker's side of one channel. ``twin``: where replicas may stand for results that were missed.

    Where several ranks are one worker, each has a client. All of them say the same, in the same order, and whatever
    depends on a moment the host process decides once, for all of them.
    """

    def __init__(
        self,
        key: str,
        line: Line,
        word: int,
        slots: Slots,
        channel: Channel,
        nodes: Nodes,
        board: Board,
        trace: Trace,
        nbytes: int,
        first_round: int,
        patience_s: float,
        log: list[Event] | None = None,
        twin: Twin | None = None,
        own: Rank = ALONE,
    ) -> None:
        super().__init__(key, line, word, slots, board, patience_s)
        self._own = own
        self._twin, self.holds = twin, first_round  # how many results are in this worker's replica
        self._channel, self._nodes, self._trace, self._nbytes, self._log = channel, nodes, trace, nbytes, log
        self._worker = nodes.of(board.rank)  # a node is one worker here
        self.rounds, self.lost = first_round, list[int]()
        self.waited_s, self.wire_bytes = 0.0, 0
        self._looks_ahead, self._is_long = bool(channel.rules.late), nbytes >= LONG_BYTES
        self._owed: Vec | None = None
        self._submitted_s = 0.0
        self._unread = 0  # the number of the last answer with results that may still be read
        # Looking ahead.
        self._listens = self._waits = self._hinted = False
        self._told: deque[Answer] = deque()
        self._asked: Answer | None = None
        # A copy of the weights in the slot in which the way from it will lie.
        self._kept: tuple[int, Vec] | None = None
        self._own_kept: Vec | None = None  # the same, where no slot was to be had
        self._mine: Vec | None = None  # what this rank has brought last, where another one writes it
        self._tells_schedule, self._schedule_upto = False, first_round
        self._waits_since: float | None = None
        self._stretches: dict[int, Stretches] = {}  # of blocks of so many, where vectors are coded

    def begin(self, message: say.OpenChannel, x: Vec | None) -> None:
        """All workers come here; ``x`` answers for this one until its first step."""
        self.open(message)
        if message.plan["period"] is None and not self._own.number:
            self._tells_schedule = True
            if self._worker:  # else the first is told by all
                self._schedule_upto += AHEAD
            self._tell_schedule()
        if self._channel.lost is not None:
            slot = self._write(self._channel.lost) if self._own.writes else -1
            self._ask(say.KeepLost(self.key, slot, self._slots.due()))
        slot = -1 if x is None else self._put(x)
        self._settle()
        self._ask(say.FirstDeposit(self.key, slot))
        self._slots.released()
        if self._slots.keeps and self._is_long and self._own.writes:
            self._channel.keep.elsewhere = self._keep

    # Steps.

    def offer(self, x: Vec, step: int) -> list[Got]:
        """Deposit, count or go on; the results to apply."""
        start_s = time.monotonic()
        taken = self._hand_in(x, step) if self._looks_ahead else self._exchange(x, step)
        self.waited_s += time.monotonic() - start_s
        return taken

    def _exchange(self, x: Vec, step: int) -> list[Got]:
        slot = self._put(x)
        self._board.handing_over(not self._channel.rules.of_weights)
        self._submitted_s = time.monotonic()
        self.send(say.Submit(self.key, slot, step, -1, self._answered, self._slots.due()))
        self._slots.released()  # who waits reads nothing of its own
        while (answer := self._result()).how == "spare":
            self._lay_spare(answer)
        return self._gots([answer])

    def _result(self) -> Answer:
        if (answer := self._heard_within(SOON_S)) is not None:
            return answer
        what = f"round {self.rounds} of {self._channel.name!r}"
        with self._board.waits_for(what):
            return self._wait(what)

    def _hand_in(self, x: Vec, step: int) -> list[Got]:
        """Take what came while the step was computed; the deposit's own result is for the next time."""
        self._wait_until_through()
        self._lay_spare(self._asked)
        self._asked = None
        released, told = self._answered, self._take()
        slot = self._put(x)
        due = self._slots.due()  # before the results are read: they are applied later, and are not to be given back yet
        shared = self._channel.rules.absent == "shared"
        newest = [one for one in told if one.given][-1:] if shared else told  # the newest knows nothing of this step
        taken = self._gots(newest, plus=None if not shared else self._mine if slot < 0 else slot)
        self._slots.fetch(())  # what came and was overtaken: its slot may hold something else when it is told of again
        count = sum(len(one.given) for one in told)
        self._listens = self._waits = True
        self._board.handing_over(not self._channel.rules.of_weights)
        self._submitted_s = time.monotonic()
        self.send(say.Submit(self.key, slot, step, count, released, due))
        self._answered = max([released, *(one.number for one in told)])
        return taken

    def _take(self) -> list[Answer]:
        """What this worker was told of, in order; where it is several ranks, as far as all of them are to take it."""
        if self._own.of > 1:
            return self._take_together()
        if self._hinted:  # there is more behind all of it
            self._hinted = False
            self._told.append(self._ask_beside(say.Newest(self.key)))
        told = list(self._told)
        self._told.clear()
        return told

    def _take_together(self) -> list[Answer]:
        self.send(say.Newest(self.key))
        while not any(one.how == "newest" for one in self._told):
            self._sort(self._wait("an answer of the host process"))
        self._hinted, told = False, list[Answer]()
        while not told or told[-1].how != "newest":
            told.append(self._told.popleft())
        return told

    def through(self, step: int) -> bool:
        """Whether a deposit now would wait for nothing. (Where results are never late, it has waited already.)"""
        self._board.check()
        if self._own.of > 1 and self._looks_ahead:
            found = bool(self._ask_beside(say.IsThrough(self.key)).about)
        else:
            self._listen()
            found = not self._waits and self._slots.is_fetched
        if found and self._log is not None:
            self._log.append((THROUGH, step))
        return found

    def look(self) -> None:
        """In the middle of a step: let what has come be on its way to where this worker will read it."""
        if self._looks_ahead and not self._slots.keeps:
            self._listen()

    def _wait_until_through(self) -> None:
        self._listen()
        if not self._waits:
            return
        self._listen(SOON_S)
        if self._waits:
            what = f"round {self.rounds} of {self._channel.name!r}"
            start_s = self._waits_since = time.monotonic()
            with self._board.waits_for(what):
                while self._waits:
                    self._board.check(what)
                    if time.monotonic() - start_s > self._patience_s:
                        raise self._board.gave_up(self._patience_s, what)
                    self._listen(LOOK_S)
        self._waits_since = None

    def _listen(self, seconds: float = 0.0) -> None:
        """Hear all that was said while this worker computed; waits no longer than that for what it needs."""
        if not self._listens:
            return
        end_s = time.monotonic() + seconds
        while True:
            answer = self._heard_within(max(0.0, end_s - time.monotonic()) if self._waits else 0.0)
            if answer is None:
                if not self._waits or time.monotonic() >= end_s:
                    return
            else:
                self._sort(answer)

    def _sort(self, answer: Answer) -> None:
        """Something that was said to one that looks ahead."""
        if answer.how in ("needed", "more", "newest"):
            self._told.append(answer)
            self._waits = self._waits and answer.how != "needed"
            newest = -1 if self._channel.rules.of_weights else 0  # of weights no other is taken
            given = [refs for one in self._told for refs, said in one.given[newest:] if len(said) > 2][newest:]
            self._slots.fetch([slot for refs in given for slot, _ in refs])
        elif answer.how == "hint":
            self._hinted = True
        elif answer.how == "spare":
            self._asked = answer
        elif answer.how == "nothing":
            self._listens = self._waits = False

    def _ask_beside(self, message: Any) -> Answer:
        """The answer to a question, behind what is said to one that looks ahead."""
        self.send(message)
        while (answer := self._wait("an answer of the host process")).how in AHEADS:
            self._sort(answer)
        return answer

    def _stop_looking_ahead(self) -> None:
        """Hear of no more. What was not taken is told again to whoever asks for it."""
        if self._listens:
            self.send(say.NoMore(self.key))
            while self._listens:
                self._sort(self._wait("an answer of the host process"))
        self._told.clear()
        self._slots.fetch(())
        self._hinted = self._waits = False
        self._lay_spare(self._asked)
        self._asked = None

    def step_over(self) -> None:
        """The worker goes back to its own loop: where vectors are long, what it has read is free for others."""
        if self._is_long and self._unread:
            self._unread = 0
            self.send(say.Release(self.key, self._answered, self._slots.due()))

    def finished(self, x: Vec | None) -> None:
        """No data left: never counts again; ``x`` answers for me from now on."""
        self._stop_looking_ahead()
        self.renew(x)  # before anybody hears that nothing of mine has to be waited for any more
        self._ask(say.Finished(self.key))

    def renew(self, x: Vec | None) -> None:
        """Without a step to take, ``x`` answers for me from now on."""
        if x is not None:
            slot = self._put(x)
            self._ask(say.Renew(self.key, slot, self._slots.due()))
            self._slots.released()

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
            elif taken := self._gots([answer]):  # else it was a replica, and there is more behind it
                return taken[0]

    def stand(self, all_there: Callable[[], bool], agree_on_largest: Callable[[int], int], apply: Apply) -> None:
        """Stand still between two steps until all do, and apply every round that has been started by then."""
        self._stop_looking_ahead()
        self._ask(say.Stands(self.key))
        holds = self._channel.holds
        self.renew(holds())
        start_s, what = time.monotonic(), "the others to stand still"

        def look() -> bool:
            self._board.check(what)
            if time.monotonic() - start_s > self._patience_s:
                raise self._board.gave_up(self._patience_s, what)
            return all_there()

        with self._board.waits_for(what):
            while (answer := self._next(look, SHORT_S)).how == "taken":
                apply(self._gots([answer]))
                self.renew(holds())
            while not look():
                self._board.pause(SHORT_S, all_there)
        started = self._ask(say.Back(self.key)).about
        # The last of us to be counted was told of every round that the others have started.
        results = agree_on_largest(started)
        apply(self._gots([self._ask(say.CatchUp(self.key, results, self._answered, self._slots.due()))]))

    def _next(self, look: Callable[[], bool], pause_s: float) -> Answer:
        """The next result, "over", or, as soon as ``look`` finds something else to do, "nothing"."""
        self.send(say.NextResult(self.key, self._answered, self._slots.due()))
        while (answer := self._heard_within(pause_s)) is None:
            if look():
                self.send(say.Nothing(self.key))
                return self._wait("an answer of the host process")
        return answer

    def owed(self) -> Vec | None:
        """A copy of the gradients in the tray, for a checkpoint: of one rank, where one writes for all."""
        if not self._own.writes:
            return None
        if self.hung_up:
            return self._owed
        given = self._ask_beside(say.Owed(self.key)).given
        return self._slots.read(given[0][0]).clone() if given else None

    def fetch_lost(self) -> None:
        """Let ``channel.lost`` be what coding has lost by now; the host process keeps it while the channel is open."""
        if self._channel.lost is not None and not self.hung_up:
            self._put_lost(self._ask_beside(say.Lost(self.key)))

    def _put_lost(self, answer: Answer) -> None:
        assert self._channel.lost is not None
        found = self._slots.read(answer.given[0][0])
        for part, now in zip(self._channel.lost.parts, found.parts, strict=True):
            part.copy_(now)

    # What is written and read.

    def _keep(self, x: Vec) -> Vec:
        """A copy of the weights, in the slot in which the way from there will lie; nobody waits for that slot."""
        if self._kept is None:
            self._listen()
            if not self._grants:
                self._own_kept = x.clone() if self._own_kept is None else self._own_kept.copy_(x)
                return self._own_kept
            self._kept = (slot := self._grants.popleft()), self._slots.room(slot)
        return x.put_into(self._kept[1])

    def _room(self) -> int:
        while not self._grants:
            self._sort(self._wait("a slot to write to"))
        return self._grants.popleft()

    def _put(self, x: Vec) -> int:
        """Bring it: where it lies then; −1: another rank writes it."""
        if not self._own.writes:
            if self._looks_ahead and self._channel.rules.absent == "shared":
                self._mine = self._slots.own(x, self._mine)
            return -1
        if self._kept is None or not isinstance(x, Way) or x.start is not self._kept[1]:
            return self._write(x)
        (slot, _), self._kept = self._kept, None
        self._slots.write_way(x, slot)
        return slot

    def _settle(self) -> None:
        """What was written is there, for a message that does not say when it will be."""
        due = self._slots.due()
        if due:
            self.send(say.Release(self.key, 0, due))

    def _hear(self, answer: Answer) -> None:
        self.rounds = answer.results
        self.lost += answer.lost
        if self._log is not None:
            self._log += [(what, number) for what, number in answer.events]
        if not self._looks_ahead or not self._listens:
            self._answered = answer.number
        if self._tells_schedule:
            self._tell_schedule()
        for version, started_by, shares, members, place, end_s in answer.news:
            if members > 1:
                self.wire_bytes += self._sent_in_a_round(members, place)
            if self._trace.keep_rounds and not self._own.number:
                since_s = self._waits_since if self._looks_ahead else self._submitted_s
                waited = {self._worker: 0.0 if since_s is None else max(0.0, end_s - since_s)}
                told = {rank: tuple(share) for rank, share in shares}
                self._trace.rounds.append(Round.among(self._nodes, version, started_by, told, waited, end_s))

    def _sent_in_a_round(self, members: int, place: int) -> int:
        if self._channel.codec is None:
            return all_reduce_bytes(members, self._nbytes) // members
        if members not in self._stretches:
            like = Vec([torch.empty(1, dtype=dtype).expand(n) for dtype, n in self._slots.memory.kinds])
            self._stretches[members] = Stretches(like, self._channel.codec, members)
        return sent_in_phases(self._stretches[members], place)

    def _gots(self, told: Sequence[Answer], plus: int | Vec | None = None) -> list[Got]:
        """The results that were told, to be applied now. A replica among them is taken over, and stands for all that
        come before it."""
        every = [(refs, said) for one in told for refs, said in one.given]
        self._unread = max([self._unread, *(one.number for one in told if one.given)])
        spare = max((k for k, (_, said) in enumerate(every) if len(said) == 2), default=None)
        if spare is not None and self._twin is not None:
            refs, (_, said) = every[spare]
            self._twin.take_over(self._slots.each([slot for slot, _ in refs]), said)
        results = every if spare is None else every[spare + 1 :]
        if every:
            self.holds = every[-1][1][0] + 1
        self.wire_bytes += len(results) * self._own.passed_bytes
        return [
            Got(version, self._slots.read(refs, plus), fresh, full, count, dict(contributors))
            for refs, (version, fresh, full, count, contributors) in results
        ]

    def _lay_spare(self, asked: Answer | None) -> None:
        """Lay my replica down where I was told to, as it is between two steps."""
        if asked is not None and self._twin is not None:
            slots = asked.about
            vectors, said = self._twin.lay_into(lambda k: self._slots.room(slots[k]), len(slots))
            self._slots.wrote(slots[:vectors])
            self.send(say.Spare(self.key, self.holds, vectors, said, self._slots.due()))

    def _tell_schedule(self) -> None:
        """Who averages with whom in the rounds to come, where that does not begin again."""
        if self.rounds + MORE > self._schedule_upto:
            first, workers = max(self._schedule_upto, self.rounds), range(self._nodes.count)
            rounds = [self._channel.whom(version) for version in range(first, first + AHEAD)]
            blocks = [[None if (b := one.block(w)) is None else list(b) for w in workers] for one in rounds]
            self._schedule_upto = first + AHEAD
            self.send(say.RoundsAhead(self.key, first, blocks))

    # The end.

    def close(self) -> None:
        """All have finished, and every result has been taken."""
        self._keep_lost(self._patience_s)
        self.hang_up()

    def release(self) -> None:
        self._channel.keep.elsewhere = None  # else the channel, which this holds, would hold this

    def abandon(self) -> None:
        """Hang up without waiting for anybody. What was in no result that came here is still owed."""
        if not self.hung_up and not self._channel.rules.of_weights and self._own.writes:
            answer = self._last_answer(say.Owed(self.key), "owed", LEAVE_S)
            self._owed = self._slots.read(answer.given[0][0]).clone() if answer is not None and answer.given else None
        self._keep_lost(LEAVE_S)
        self.hang_up()

    def _keep_lost(self, within_s: float) -> None:
        """The same as `fetch_lost`, at the end."""
        if self._channel.lost is not None and not self.hung_up:
            answer = self._last_answer(say.Lost(self.key), "lost", within_s)
            if answer is not None:
                self._put_lost(answer)

    def _last_answer(self, question: Any, how: str, within_s: float) -> Answer | None:
        """To a question before this worker leaves, also where the run has failed."""
        end_s = time.monotonic() + within_s
        with suppress(OffbeatError):
            self.line.send(question)
            while (left_s := end_s - time.monotonic()) > 0:
                answer: Answer | None = self.line.heard_within(self.key, left_s)
                if answer is not None and answer.how == how:
                    return answer
        return None


AHEADS = ("needed", "more", "hint", "spare", "granted")
