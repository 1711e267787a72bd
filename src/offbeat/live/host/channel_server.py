"""Partial rounds at the host process: it keeps the seats of all workers, and the referee.

It drives them as the simulator does, and like there one thread does it: what happens at the seats happens in one order,
the order in which the host process hears of it. Values are expressions (`offbeat.live.host.ledger`). Nobody's process
is needed for a round: what a worker has to say for itself lies in memory before it is counted.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from offbeat.live.host import protocol as say
from offbeat.live.host.books import Books, ClientRecord, Reply, Send
from offbeat.live.host.ledger import Expression, Sum, Written
from offbeat.rounds.held import NEVER, Elsewhere, held
from offbeat.rounds.referee import Notice, Referee
from offbeat.rounds.rules import Rules
from offbeat.rounds.seat import Event, Got, Outcome, Seat
from offbeat.rounds.spares import MANY, Spares
from offbeat.rounds.tray import Deposit
from offbeat.rounds.waiting import Wait, rule
from offbeat.topology.hierarchy import Nodes

if TYPE_CHECKING:
    from offbeat.topology.matrix import Mixing

MISSED = 2  # so many averages are worth asking for
VECTORS = 6  # at most, that a replica consists of: the weights, and what an optimiser remembers for each of them
ASK_S = 0.02  # a round that has been waited for so long looks where everybody is,
LOOK_S = 0.005  # and from then on every so often
NOBODY = -1  # has started a round that waited for more


class SpareReplica(Expression):
    """What a worker has laid down of its replica: vectors that are not to be added up, and what it says of them."""

    __slots__ = ("said",)

    def __init__(self, slots: Sequence[int], said: Any) -> None:
        super().__init__((Written(slot), 1.0) for slot in slots)
        self.said = said


class OneRound(NamedTuple):
    """One round of a schedule: everybody's block."""

    blocks: list[tuple[int, ...] | None]

    def block(self, rank: int) -> tuple[int, ...] | None:
        return self.blocks[rank]


class Rounds:
    """A schedule that is told in parts, and begins again after ``period`` rounds where it has one."""

    def __init__(self, period: int | None) -> None:
        self._period = period
        self._rounds: dict[int, OneRound] = {}

    def learn(self, first: int, rounds: list[list[list[int] | None]]) -> None:
        for k, blocks in enumerate(rounds):
            self._rounds[first + k] = OneRound([None if b is None else tuple(b) for b in blocks])

    def __call__(self, version: int) -> Any:
        return self._rounds[version if self._period is None else version % self._period]

    def has(self, version: int) -> bool:
        return self._period is not None or version in self._rounds

    def forget(self, before: int) -> None:
        if self._period is None:
            for version in [v for v in self._rounds if v < before]:
                del self._rounds[version]


class Seated(ClientRecord):
    """A worker, its seat, and what it waits for."""

    def __init__(self, key: str, worker: int, send: Send, log: list[Event] | None, seat: Seat) -> None:
        super().__init__(key, worker, send, log)
        self.seat, self.wanted, self.told_lost = seat, 0, 0
        self.wake: Callable[[], None] | None = None
        self.looks_ahead = False  # it computes, and hears of results as they come
        self.put_off = self.stops = False  # its deposit waits for a result; it wants to hear of no more after that
        self.replica: list[int] = []  # slots for the replica it was asked for

    @property
    def waits_for(self) -> int:
        """How many results it needs to go on; 0: it needs none."""
        if self.wake is None or self.looks_ahead:
            return 0
        return self.wanted if self.seat.rules.pool is None else NEVER


class ChannelServer:
    """One channel. ``elsewhere``: where a worker is, as far as it shows."""

    def __init__(
        self, key: str, plan: dict[str, Any], books: Books, elsewhere: Callable[[ChannelServer, int], Elsewhere]
    ) -> None:
        self.key, self.run, self._books, self._elsewhere = key, str(plan["run"]), books, elsewhere
        wait, *settings = plan["rules"]
        self._rules, self.nodes = Rules(_rule(wait), *settings), Nodes(*plan["nodes"])
        self._first_round = int(plan["first_round"])
        self._referee = Referee(self._rules, self.nodes.count, int(plan["seed"]), self._first_round)
        self._rounds = Rounds(plan["period"])
        self._rounds.learn(0, plan["rounds"])
        self._whom: Callable[[int], Mixing] = self._rounds
        self._seats: dict[int, Seat] = {}
        self._clients: dict[int, Seated] = {}
        self._there: set[int] = set()
        self._early: list[tuple[int, Any]] = []
        self._due: list[tuple[int, int]] = []  # rounds that have started and not happened, and who started them
        self._in_round = self._flushing = False
        self._spares = Spares()
        self._watched: int | None = None  # the round for which everybody was looked up
        self._said: dict[int, Elsewhere] = {}
        self._looked_s = 0.0
        self._left: set[int] = set()
        books.also = self._values

    def _values(self) -> list[Expression]:
        return [cast(Expression, value) for seat in self._seats.values() for value in seat.values]

    # Those who come and leave.

    def open(self, message: say.OpenChannel, send: Send) -> None:
        worker = message.worker
        if message.spares and self._rules.spares:
            self._spares.can(worker)
        log: list[Event] | None = [] if message.logs else None
        seat = self._seats[worker] = Seat(
            self._rules,
            self._whom,
            self.nodes,
            worker,
            None,
            first_round=self._first_round,
            first_step=message.first_step,
            log=log,
        )
        client = self._clients[worker] = Seated(self.key, worker, send, log, seat)
        self._books.clients[worker] = client
        self._books.grant(client)
        self._reply(client, "open")

    def leave(self, worker: int) -> bool:
        """Whether all have left."""
        self._left.add(worker)
        client = self._clients.get(worker)
        if client is not None:
            client.replies.clear()
        return len(self._left) == self.nodes.count

    def waits_for(self, worker: int) -> tuple[int, int]:
        """How many results it has heard of, and how many it waits for."""
        client = self._clients.get(worker)
        return (0, 0) if client is None else (client.told, client.waits_for)

    # Messages.

    def hear(self, worker: int, message: Any) -> None:
        self._looked_s = time.monotonic()
        if isinstance(message, say.RoundsAhead):
            self._rounds.learn(message.first, message.rounds)
            self._begin((), NOBODY)
            return
        if isinstance(message, say.FirstDeposit):
            client = self._clients[worker]
            if message.slot >= 0:
                client.seat.tray.deposit(client.written(message.slot), Deposit(-1, self._first_round))
                self._books.grant(client)
            self._reply(client)
            self._there.add(worker)
        elif len(self._there) < self.nodes.count:  # nothing begins before all have come
            self._early.append((worker, message))
            return
        else:
            self._hear(worker, message)
        if self._early and len(self._there) == self.nodes.count:
            early, self._early = self._early, []
            for one in early:
                self._hear(*one)

    def _hear(self, worker: int, message: Any) -> None:
        if isinstance(message, say.Release):
            self._clients[worker].release(message.released)
            return
        self._begin(self._is_here(worker), worker)
        self._do(self._clients[worker], message)
        if self._referee.all_finished and not self._flushing:
            self._flush()
        self._stop_watching()

    def _do(self, client: Seated, message: Any) -> None:
        seat, worker = client.seat, client.worker
        match message:
            case say.Submit(slot=slot, step=step, taken=-1):
                client.release(message.released)
                self._offer(client, slot, step)
            case say.Submit(slot=slot, step=step, taken=taken):
                client.release(message.released)
                self._hand_in(client, slot, step, taken)
            case say.Renew(slot=slot):
                self._tell(worker, seat.renew(client.written(slot)))
                client.own = None
                self._books.grant(client)
                self._reply(client)
            case say.NextResult():
                client.release(message.released)
                self._call_when(client, lambda: self._next(client), seat.place.taken + 1)
            case say.Nothing():  # waits no longer; what has been answered is on its way
                if client.put_off:  # what it has handed in is not forgotten
                    client.stops = True
                elif client.wake is not None or client.looks_ahead:
                    client.wake, client.looks_ahead = None, False
                    self._reply(client, "nothing")
            case say.Newest():
                self._reply(client, "newest", seat.show())
            case say.Spare():
                self._keep(client, message.upto, message.vectors, message.said)
            case say.Finished():
                self._tell(worker, seat.finish())
                self._reply(client)
            case say.Stands():
                self._tell(worker, seat.stand())
                self._reply(client)
            case say.Back():
                self._tell(worker, seat.back())
                self._reply(client, "started", about=self._referee.started_with(worker))
            case say.CatchUp():
                client.release(message.released)
                self._reply(client, "taken", seat.catch_up(message.results))
                self._tell(worker, seat.began())
            case say.Owed():
                owed = cast("Expression | None", seat.tray.owed())
                given = [] if owed is None else [(owed, None)]
                self._books.reply(client, Reply("owed", None, seat.results, [], given))
            case _:
                raise ValueError(f"a channel does not know what to do with {message}")

    def _offer(self, client: Seated, slot: int, step: int) -> None:
        worker, seat, mine = client.worker, client.seat, client.written(slot)
        client.own = None  # it waits, and reads nothing

        def deposit() -> None:
            self._ask_for_spare(client)
            notice, client.put_by = seat.offer(mine, step), None
            self._tell(worker, notice)
            self._shorten(seat)
            self._call_when(client, take, seat.needs)

        def take() -> None:
            taken = seat.take(step)
            self._reply(client, "taken", taken)
            self._tell(worker, seat.began())
            self._books.grant(client)

        client.put_by = mine
        self._call_when(client, deposit, seat.needs_first)

    def _hand_in(self, client: Seated, slot: int, step: int, count: int) -> None:
        """It has taken ``count`` of the results it was told of, and goes on; it is told of others as they come."""
        worker, seat, mine = client.worker, client.seat, client.written(slot)
        upto = seat.shown_upto(count)

        def deposit() -> None:
            stops, client.put_off, client.stops = client.stops, False, False
            if not stops:
                self._ask_for_spare(client)
            notice, client.put_by = seat.offer(mine, step, upto), None
            seat.take(step, upto)
            self._shorten(seat)
            self._tell(worker, notice)
            self._tell(worker, seat.began())
            if stops:
                self._reply(client, "nothing")
            else:
                self._call_when(client, lambda: self._show(client, needed=True), seat.needs_first)

        # Put off only after all have stood: else it has seen the result it needs before it comes.
        client.looks_ahead, client.put_off = False, True
        client.put_by = mine
        self._books.grant(client)
        self._reply(client, "granted")  # a slot, for what it may want to write before it hears of a result
        self._call_when(client, deposit, seat.needs_first)

    def _shorten(self, seat: Seat) -> None:
        if seat.tray.value is not None:
            self._books.shorten(cast(Expression, seat.tray.value))

    def _show(self, client: Seated, needed: bool = False) -> None:
        self._reply(client, "needed" if needed else "more", client.seat.show())
        client.looks_ahead, results = True, client.seat.results
        # What it was told of takes memory. Of weights it needs the newest alone; and of whom many wait, it may sleep.
        if self._rules.of_weights:
            self._call_when(client, lambda: self._reply(client, "hint"), results + MISSED)
        elif self._rules.spares and client.seat.untaken >= MANY:
            self._call_when(client, lambda: self._reply(client, "hint"), results + 1)
        else:
            self._call_when(client, lambda: self._show(client), results + 1)

    def _next(self, client: Seated) -> None:
        got = client.seat.next()
        self._reply(client, "over" if got is None else "taken", [] if got is None else [got])

    def _call_when(self, client: Seated, go: Callable[[], None], results: int) -> None:
        client.wanted, client.wake = results, go
        self._call(client)

    def _call(self, client: Seated) -> None:
        if client.wake is not None and (client.seat.results >= client.wanted or client.seat.flushed):
            wake, client.wake = client.wake, None
            wake()

    def _tell(self, worker: int, notice: Notice | None) -> None:
        if notice is not None:
            self._begin(self._referee.hear(worker, notice, time.monotonic()), worker)

    def _reply(self, client: Seated, how: str = "heard", taken: Sequence[Got] = (), about: object = None) -> None:
        seat = client.seat
        lost, client.told_lost = seat.lost[client.told_lost :], len(seat.lost)
        self._books.reply(client, Reply(how, about, seat.results, lost, [_said(got) for got in taken]))

    # Replicas.

    def _ask_for_spare(self, client: Seated) -> None:
        if not self._rules.spares or not self._spares.asks(client.worker, self._seats):
            return
        client.replica = [self._take_aside() for _ in range(VECTORS)]
        self._reply(client, "spare", about=list(client.replica))

    def _take_aside(self) -> int:
        slot = self._books.slots.take()
        self._books.aside.add(slot)
        return slot

    def _keep(self, client: Seated, upto: int, vectors: int, said: Any) -> None:
        """It has laid its replica down, which holds so many results; or says of none that it cannot."""
        slots, client.replica = client.replica, []
        self._books.aside.difference_update(slots)
        if not vectors:
            self._spares.cannot(client.worker)
        value: Any = SpareReplica(slots[:vectors], said)
        for seat in self._spares.laid(client.worker, upto, self._seats) if vectors else ():
            seat.replace(Outcome(upto - 1, value, {}, seat.size, False, {}))

    # Rounds.

    def _begin(self, versions: Sequence[int], started_by: int) -> None:
        """Rounds happen in the order of their numbers, also where one lets others start that come after those here.

        Where the schedule is not known so far ahead, a round waits for that: a worker will tell.
        """
        self._due += [(version, started_by) for version in versions]
        if self._in_round:
            return
        self._in_round = True
        while self._due and (self._rules.pool is not None or self._rounds.has(self._due[0][0])):
            self._round(*self._due.pop(0), flush=False)
        self._in_round = False

    def _flush(self) -> None:
        self._flushing = True
        clients = list(self._clients.values())
        if clients[0].seat.flushes:
            self._round(self._referee.started, NOBODY, flush=True)
        for client in clients:
            client.seat.flushed = True
        for client in clients:
            self._call(client)

    def _round(self, version: int, started_by: int, flush: bool) -> None:
        members = self._referee.members(version)
        called = self._clients if members is None else members
        blocks = {members or self._clients[rank].seat.members(version, flush) for rank in called}
        for ranks in sorted(blocks):
            self._block(version, ranks, started_by, flush)
        for rank in called:
            self._call(self._clients[rank])
        for rank in () if flush else called:
            self._tell(rank, self._clients[rank].seat.over())

    def _block(self, version: int, ranks: tuple[int, ...], started_by: int, flush: bool) -> None:
        seats = {r: self._clients[r].seat for r in ranks}
        given = {r: seat.snapshot(version, flush) for r, seat in seats.items()}
        terms = [cast(Expression, one.value) for one in given.values() if one.value is not None]
        total = Sum(terms, seats[ranks[0]].divisor(ranks))
        shares = {r: one.share for r, one in given.items() if one.share is not None}
        value: Any = Expression([(total, 1.0)])
        outcome = Outcome.of(self.nodes, version, value, shares, len(ranks), flush)
        now, told = time.monotonic(), [(r, tuple(share)) for r, share in shares.items()]
        for r, one in given.items():
            if seats[r].deliver(outcome, one):
                self._clients[r].news.append((version, started_by, told, len(ranks), now))

    # Those who are elsewhere: in a collective of the script's own, or in another optimiser's channel.

    @property
    def wakes_s(self) -> float | None:
        """When it wants to be called, if nothing is heard before."""
        found = self._referee.deadline_s
        if self._referee.waits or self._referee.holds:
            look_s = self._looked_s + (ASK_S if self._watched is None else LOOK_S)
            found = look_s if found is None else min(found, look_s)
        return found

    def silence(self, now_s: float) -> None:
        if self._referee.deadline_s is not None and now_s >= self._referee.deadline_s:
            self._begin(self._referee.tick(now_s), NOBODY)
        elif self._referee.waits or self._referee.holds:
            self._looked_s = now_s
            if self._watched is None:
                self._watched = self._referee.started
            self._said = {worker: self._elsewhere(self, worker) for worker in self._clients}
            self._begin(self._referee.held(held(self._said)), NOBODY)
        self._stop_watching()

    def _is_here(self, worker: int) -> list[int]:
        """It speaks of a step: so it is inside nothing else."""
        mine = self._said.get(worker)
        if mine is None or not mine.inside:
            return []
        self._said[worker] = Elsewhere(False, mine.met, mine.rounds)
        return self._referee.held(held(self._said))

    def _stop_watching(self) -> None:
        """The round has started, and nobody is held."""
        if self._watched is not None and self._watched != self._referee.started and not self._referee.holds:
            self._watched = None
            self._said = {}

    def flush(self) -> None:
        """Send what can be sent."""
        self._books.flush()

    def close(self) -> None:
        self._books.close()


def _said(got: Got) -> tuple[Expression, Any]:
    """A result, or a replica that stands for several, and what is said of it."""
    value: Any = got.value
    if isinstance(value, SpareReplica):
        return value, [got.version, value.said]
    return value, [got.version, got.fresh, got.full, got.count, list(got.contributors.items())]


def _rule(told: Any) -> Wait:
    """How to wait, by a name of ours or as it is imported."""
    if not isinstance(told, dict):
        return rule(told)
    found: Any = importlib.import_module(told["module"])
    for name in told["name"].split("."):
        found = getattr(found, name)
    waits: Wait = found(**told["settings"])
    return waits


def settings_of(rules: Rules) -> list[Any]:
    """All but how to wait, as they are told."""
    return [getattr(rules, one.name) for one in fields(rules)[1:]]
