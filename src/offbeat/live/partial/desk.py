"""The desk: where all seats of a channel are kept, if their vectors lie in memory that every worker can read.

The hub drives seats and referee as the simulator does, and like there one thread does it: what happens at the seats
happens in one order, the order in which the desk hears of it. Values are stacks of places (see
`offbeat.live.partial.stacks`).
"""

from __future__ import annotations

import marshal
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from offbeat.live.partial.chair import SeatTaken
from offbeat.live.partial.coordinator import NOBODY, Asking, unpack
from offbeat.live.partial.rooms import Rooms
from offbeat.live.partial.stacks import Reply, Slots, Spare, Stack, Sum, home_of, places, taken_by
from offbeat.live.transport.hub import Frame, Letter, Word
from offbeat.rounds.referee import Notice, Referee
from offbeat.rounds.rules import Rules
from offbeat.rounds.seat import Event, Got, Outcome, Seat
from offbeat.rounds.spares import MANY, Spares
from offbeat.rounds.tray import Deposit
from offbeat.topology.hierarchy import Nodes

if TYPE_CHECKING:
    from offbeat.topology.matrix import Mixing


MISSED = 2  # so many averages are worth asking for


class Desk(Asking):
    """One channel."""

    def __init__(
        self,
        rules: Rules,
        whom: Callable[[int], Mixing],
        nodes: Nodes,
        seed: int,
        first_round: int,
        slots: Slots,
    ) -> None:
        super().__init__(Referee(rules, nodes.count, seed, first_round))
        self._rules, self._whom, self._first_round = rules, whom, first_round
        self._nodes, self._slots = nodes, slots
        self._early: list[Frame] = []
        self._chairs: dict[int, SeatTaken] = {}
        self._answers: list[Reply] = []
        self._more: list[Letter] = []
        self._flushing = False
        self._due: list[tuple[int, int]] = []  # rounds that have started and not happened, and who started them
        self._spares = Spares()
        self._seats: dict[int, Seat] = {}
        self._for_spares: dict[int, list[Sum]] = {}  # of those who were asked for a replica: where it is to lie
        self._rooms = Rooms(slots, rules, nodes.count, self._at_work)

    def _to_all(self, frame: Frame) -> list[Letter]:
        """On the line for questions; with the number of results that each one waits for."""
        size = self._referee.size
        return [(size + c.rank, frame._replace(b=c.waits_for)) for c in self._chairs.values()]

    def hear(self, frame: Frame) -> Iterable[Letter]:
        if len(self._chairs) < self._referee.size:  # nothing begins before all have come
            self._early.append(frame)
            if frame.word is Word.OPEN:
                self._open(frame)
            if len(self._chairs) < self._referee.size:
                return []
            early, self._early = [f for f in self._early if f.word is not Word.OPEN], []
            return [letter for f in early for letter in self.hear(f)]
        rank = frame.rank
        self._rooms.hears(rank)
        if frame.word in (Word.READ, Word.GIVE):  # about memory, not about rounds: nobody is answered
            self._take_back(self._chairs[rank], frame)
            return self._letters() if self._rooms.waiting else []
        if frame.word is Word.ELSEWHERE:
            self._begin(self._hear_where(rank, unpack(frame.text)), rank)
        else:
            self._begin(self._is_here(rank), rank)
            self._do(rank, frame)
        if self._referee.all_finished and not self._flushing:
            self._flush()
        return self._letters()

    def _in_time(self, started: list[int]) -> Iterable[Letter]:
        self._begin(started, NOBODY)
        return self._letters()

    @property
    def pause_s(self) -> float | None:  # type: ignore[override]
        found = [pause_s for pause_s in (super().pause_s, self._rooms.pause_s) if pause_s is not None]
        return min(found, default=None)

    def silence(self) -> Iterable[Letter]:
        return self._letters() if self._rooms.pause_s == 0.0 else super().silence()

    def _letters(self) -> list[Letter]:
        self._take_back_from_those_who_came()
        letters = self._slots.letters(self._take_answers())
        for rank in self._rooms.waiting:
            self._room(self._chairs[rank])
            letters += self._slots.letters(self._take_answers())
        more, self._more = self._more, []
        return [*letters, *more, *self._stop_asking()]

    def _take_back_from_those_who_came(self) -> None:
        """Who has come has read all it was given, so it needs no slot that nothing here stands on.

        Not of gradients: one who leaves before it is answered adds up what it has laid down.
        """
        for chair in self._chairs.values() if self._slots.pooled and self._rules.of_weights else ():
            if chair.came and chair.freed:
                for home in chair.freed:
                    self._slots.give_back(home)
                chair.gone += chair.freed
                chair.freed.clear()
        for answer in self._answers:
            if isinstance(answer.chair, SeatTaken) and answer.results:
                answer.chair.came = False

    def _take_answers(self) -> list[Reply]:
        answers, self._answers = self._answers, []
        return answers

    def _open(self, frame: Frame) -> None:
        rank, place, step, logs = frame.rank, frame.a, frame.b, bool(frame.c & 1)
        if self._rules.spares and frame.c & 2:
            self._spares.can(rank)
        log: list[Event] | None = [] if logs else None
        seat = Seat(
            self._rules,
            self._whom,
            self._nodes,
            rank,
            None,
            first_round=self._first_round,
            first_step=step,
            log=log,
        )
        self._seats[rank] = seat
        # (Where results may stand on a worker's own deposits, it alone knows when it has read them.)
        returns = self._slots.pooled and self._rules.replaces
        chair = self._chairs[rank] = SeatTaken(rank, seat, log, self._slots.give_back if returns else None)
        if place >= 0:
            seat.tray.deposit(chair.put(place), Deposit(-1, self._first_round))

    def _comes_again(self, chair: SeatTaken, said: bytes) -> None:
        chair.comes_again(said)
        if self._slots.pooled:  # what it has seen, others need not make any more
            for other in self._chairs.values():
                for loan in other.lent:
                    loan.end_if_made()

    def _take_back(self, chair: SeatTaken, frame: Frame) -> None:
        if frame.word is Word.READ:
            self._comes_again(chair, frame.data)
        else:
            self._slots.give_back(home_of(frame.a))

    def _do(self, rank: int, frame: Frame) -> None:
        chair = self._chairs[rank]
        seat = chair.seat
        if frame.word in (Word.OFFER, Word.NEXT, Word.CATCH_UP):
            self._comes_again(chair, frame.data)
        chair.lays = False
        match frame.word:
            case Word.OFFER:
                if frame.c < 0:
                    self._offer(chair, frame.a, frame.b)
                else:
                    self._hand_in(chair, frame.a, frame.b, frame.c)
            case Word.RENEWED:
                self._tell(rank, seat.renew(chair.put(frame.a)))
                self._answer(chair)
            case Word.NEXT:
                self._call_when(chair, lambda: self._next(chair), seat.place.taken + 1)
            case Word.NOTHING:  # waits no longer; what has been answered is on its way
                if chair.put_off:  # what it has handed in is not forgotten
                    chair.stops = True
                elif chair.wake is not None or chair.looks_ahead:
                    chair.wake, chair.looks_ahead = None, False
                    self._answer(chair, "nothing")
            case Word.NEWEST:
                self._answer(chair, "newest", seat.show())
            case Word.SPARE:
                self._keep(chair, frame.a, frame.b, frame.data)
            case Word.FINISHED:
                self._tell(rank, seat.finish())
                self._answer(chair)
            case Word.STANDS:
                self._tell(rank, seat.stand())
                self._answer(chair)
            case Word.BACK:
                self._tell(rank, seat.back())
                self._answer(chair, "started", about=self._referee.started_with(rank))
            case Word.CATCH_UP:
                taken = seat.catch_up(frame.a)
                self._tell(rank, seat.began())
                self._answer(chair, "taken", taken)
            case Word.MERGE:
                done = chair.merge(chair.tray, frame.a, set(marshal.loads(frame.data)))
                self._answer(chair, "merged" if done else "refused")
            case Word.OWED:
                owed = cast("Stack | None", seat.tray.owed())
                self._answer(chair, "owed", about=None if owed is None else places(owed))
            case Word.ROOM:
                if frame.a:
                    chair.lays = self._rules.absent != "shared"
                    self._answer(chair, "room", about=(self._slots.for_deposit(rank), []))
                else:
                    self._room(chair)

    def _room(self, chair: SeatTaken) -> None:
        """Where can it lay something down? It may have a slot that is free, or will be when a sum is complete."""
        mine = taken_by(chair.waiting, chair.rank, chair.tray)
        if mine or chair.freed:
            self._rooms.waits_no_more(chair.rank)
            self._answer(chair, "room", about=(None, mine))
        elif not self._rooms.puts_off(chair.rank):
            chair.lays = self._rules.absent != "shared"
            self._answer(chair, "room", about=(self._slots.for_deposit(chair.rank), []))

    def _at_work(self) -> list[int]:
        """Those who lay down, add up or read what they have come for. (Of shared weights what is laid down is made in
        its slot, during a step; and whoever looks ahead reads a step later.)"""
        return [rank for rank, chair in self._chairs.items() if chair.lays or chair.is_reading]

    # The worker.

    def _offer(self, chair: SeatTaken, place: int, step: int) -> None:
        rank, seat = chair.rank, chair.seat

        chair.came = True

        def deposit() -> None:
            self._ask_for_spare(chair)
            self._tell(rank, seat.offer(chair.put(place), step))
            self._call_when(chair, take, seat.needs)

        def take() -> None:
            taken = seat.take(step)
            self._tell(rank, seat.began())
            self._answer(chair, "taken", taken)

        self._call_when(chair, deposit, seat.needs_first)

    def _hand_in(self, chair: SeatTaken, place: int, step: int, count: int) -> None:
        """It has taken ``count`` of the results it was told of, and goes on; it is told of others as they come."""
        rank, seat = chair.rank, chair.seat
        upto = seat.shown_upto(count)

        def deposit() -> None:
            stops, chair.put_off, chair.stops = chair.stops, False, False
            if not stops:
                self._ask_for_spare(chair)
            notice = seat.offer(chair.put(place), step, upto)
            seat.take(step, upto)
            self._tell(rank, notice)
            self._tell(rank, seat.began())
            if stops:
                self._answer(chair, "nothing")
            else:
                self._call_when(chair, lambda: self._show(chair, needed=True), seat.needs_first)

        # Put off only after all have stood: else it has seen the result it needs before it comes.
        chair.looks_ahead, chair.put_off = False, True
        self._call_when(chair, deposit, seat.needs_first)

    def _show(self, chair: SeatTaken, needed: bool = False) -> None:
        self._answer(chair, "needed" if needed else "more", chair.seat.show(), adds=needed)
        chair.looks_ahead, results = True, chair.seat.results
        # What it was told of takes memory. Of weights it needs the newest alone; and of whom many wait, it may sleep.
        if self._rules.of_weights:
            self._call_when(chair, lambda: self._answer(chair, "hint"), results + MISSED)
        elif self._rules.spares and chair.seat.untaken >= MANY:
            self._call_when(chair, lambda: self._answer(chair, "hint"), results + 1)
        else:
            self._call_when(chair, lambda: self._show(chair), results + 1)

    def _next(self, chair: SeatTaken) -> None:
        got = chair.seat.next()
        self._answer(chair, "over" if got is None else "taken", [] if got is None else [got])

    def _call_when(self, chair: SeatTaken, go: Callable[[], None], results: int) -> None:
        chair.wanted, chair.wake = results, go
        self._call(chair)
        if chair.waits_for and self._asked is not None:  # as the others were told when they were asked
            self._more.append((self._referee.size + chair.rank, Frame(Word.WANTED, 0, 0, chair.waits_for)))

    def _call(self, chair: SeatTaken) -> None:
        if chair.wake is not None and (chair.seat.results >= chair.wanted or chair.seat.flushed):
            wake, chair.wake = chair.wake, None
            wake()

    def _tell(self, rank: int, notice: Notice | None) -> None:
        if notice is not None:
            self._begin(self._referee.hear(rank, notice, time.monotonic()), rank)

    # Replicas.

    def _ask_for_spare(self, chair: SeatTaken) -> None:
        if not self._rules.spares or not self._spares.asks(chair.rank, self._seats):
            return
        room = self._slots.room(chair.rank, chair.seat.results)
        if room is None:
            self._spares.cannot(chair.rank)
            return
        self._for_spares[chair.rank] = room
        self._answer(chair, "spare", about=[one.home for one in room])

    def _keep(self, chair: SeatTaken, upto: int, vectors: int, said: bytes) -> None:
        """It has laid its replica down, which holds so many results; or says of none that it cannot."""
        room = self._for_spares.pop(chair.rank)[:vectors]
        self._slots.were_written(room)
        if not vectors:
            self._spares.cannot(chair.rank)
        value: Any = Spare(room, said)
        for seat in self._spares.laid(chair.rank, upto, self._seats) if vectors else ():
            seat.replace(Outcome(upto - 1, value, {}, seat.size, False, {}))

    # Rounds.

    def _begin(self, versions: Sequence[int], started_by: int) -> None:
        """Rounds happen in the order of their numbers, also where one lets others start that come after those here."""
        self._due += [(version, started_by) for version in versions]
        if len(self._due) == len(versions):
            while self._due:
                self._round(*self._due[0], flush=False)
                del self._due[0]

    def _flush(self) -> None:
        self._flushing = True
        chairs = list(self._chairs.values())
        if chairs[0].seat.flushes:
            self._round(self._referee.started, -1, flush=True)
        for chair in chairs:
            chair.seat.flushed = True
        for chair in chairs:
            self._call(chair)

    def _round(self, version: int, started_by: int, flush: bool) -> None:
        members = self._referee.members(version)
        called = self._chairs if members is None else members
        blocks = {members or self._chairs[rank].seat.members(version, flush) for rank in called}
        for ranks in sorted(blocks):
            self._block(version, ranks, started_by, flush)
        for rank in called:
            self._call(self._chairs[rank])
        for rank in () if flush else called:
            self._tell(rank, self._chairs[rank].seat.over())

    def _block(self, version: int, ranks: tuple[int, ...], started_by: int, flush: bool) -> None:
        seats = {r: self._chairs[r].seat for r in ranks}
        given = {r: seat.snapshot(version, flush) for r, seat in seats.items()}
        terms = [cast(Stack, one.value) for one in given.values() if one.value is not None]
        total = Sum(version, terms, seats[ranks[0]].divisor(ranks))
        shares = {r: one.share for r, one in given.items() if one.share is not None}
        value: Any = Stack([(total, 1.0)])
        outcome = Outcome.of(self._nodes, version, value, shares, len(ranks), flush)
        now, told = time.monotonic(), {r: tuple(share) for r, share in shares.items()}
        for r, one in given.items():
            if seats[r].deliver(outcome, one):
                self._chairs[r].news.append((version, started_by, told, len(ranks), now))

    def _answer(
        self,
        chair: SeatTaken,
        how: str = "heard",
        taken: Sequence[Got] = (),
        about: object = None,
        adds: bool = True,
    ) -> None:
        seat = chair.seat
        given = [_said(got) for got in taken]
        lost = seat.lost
        lost, chair.told_lost = lost[chair.told_lost :], len(lost)
        self._answers.append(Reply(chair, how, (about, seat.results, lost), given, chair.tray, adds))


def _said(got: Got) -> tuple[Stack, tuple[object, ...]]:
    """A result, or a replica that stands for several, and what is said of it."""
    value: Any = got.value
    if isinstance(value, Spare):
        return value.stack, (got.version, value.said)
    return value, (got.version, got.fresh, got.full, got.count, dict(got.contributors))
