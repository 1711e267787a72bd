"""Partial rounds at the host process: it keeps the seats of its workers, and at the first host the referee.

It drives them as the simulator does, and like there one thread does it: what happens at the seats happens in one order,
the order in which the host process hears of it. Values are expressions (`offbeat.live.host.ledger`). Nobody's process
is needed for a round: what a worker has to say for itself lies in memory before it is counted.

With workers on several hosts, a deposit is in round v if its own host process heard it before "go v", which the first
host says to all. A block of workers of several hosts is summed in two steps: each host adds up what its own workers
give, and the hosts sum their parts in the order of their first workers in the block. So all get the same bits. Two
hosts send each other what they have; what is coded, or long and of more hosts, goes in two phases (host_sums.py). What
coding loses for a worker is kept here while the channel is open.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from offbeat.live.host import protocol as say
from offbeat.live.host.books import Books, ClientRecord, Reply, Send, unheard
from offbeat.live.host.host_sums import GivenByHost, Summed
from offbeat.live.host.ledger import Expression, Sum, Written
from offbeat.live.host.server import Counterparts, MeetingServer, Whereabouts
from offbeat.live.host.settling import Name
from offbeat.rounds.held import NEVER, Elsewhere, held
from offbeat.rounds.referee import Notice, Referee, Say
from offbeat.rounds.rules import Rules
from offbeat.rounds.seat import Event, Freshness, Given, Got, Outcome, Seat
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
AGAIN_S = 1.0  # other hosts that have not answered are asked anew
MOST_TRIP_S = 0.005  # that a round waits for news of it to be everywhere
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

    @property
    def told(self) -> list[list[list[int] | None]]:
        """All that is known, from the first round on; nothing of a schedule that begins again, which all know."""
        known = range(len(self._rounds) if self._period is None else 0)
        return [[None if b is None else list(b) for b in self._rounds[v].blocks] for v in known]

    def has(self, version: int) -> bool:
        return self._period is not None or version in self._rounds


class HostPart(NamedTuple):
    """What the members of a block at one host give together. ``absent``: the dead among them, who give nothing."""

    value: Expression | None
    shares: dict[int, Freshness]
    absent: list[int]


@dataclass
class Block:
    """A block of a round that has started: what its members at this host give, and what the other hosts say of theirs.

    ``hosts``: those with members, in the order of their first ones. ``begins_s``: when news of
    the round is everywhere, and not before.
    """

    version: int
    ranks: tuple[int, ...]
    here: list[int]
    hosts: list[int]
    started_by: int
    flush: bool
    begins_s: float | None = None
    given: dict[int, Given] = field(default_factory=dict)
    absent: set[int] = field(default_factory=set)
    parts: dict[int, HostPart] = field(default_factory=dict)

    @property
    def name(self) -> tuple[int, int]:
        return self.version, self.ranks[0]

    @property
    def is_whole(self) -> bool:
        return all(host in self.parts for host in self.hosts)


class Summing(NamedTuple):
    """A block that is summed in two phases, and what this host gives to it."""

    block: Block
    part: HostPart


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


class ChannelServer(MeetingServer):
    """One channel. ``elsewhere``: where a worker is, as far as it shows."""

    what = "partial rounds"
    own = (say.RoundsAhead, say.Nothing, say.Owed, say.Lost)
    own_answers = ("owed", "lost")

    def __init__(
        self,
        key: str,
        plan: dict[str, Any],
        others: Counterparts,
        books: Books,
        elsewhere: Callable[[ChannelServer, int], Elsewhere],
    ) -> None:
        super().__init__(key, plan, others, books)
        self._elsewhere = elsewhere
        wait, *settings = plan["rules"]
        self._rules, self.nodes = Rules(_rule(wait), *settings), Nodes(*plan["nodes"])
        self.worker_of = {rank: number // others.of for number, rank in enumerate(plan["members"])}
        self._first_round, self._seed = int(plan["first_round"]), int(plan["seed"])
        self._referee: Referee | None = None
        if others.decides:
            self._referee = Referee(self._rules, self.nodes.count, int(plan["seed"]), self._first_round)
        self._rounds = Rounds(plan["period"])
        self._rounds.learn(0, plan["rounds"])
        self._whom: Callable[[int], Mixing] = self._rounds
        self._seats: dict[int, Seat] = {}
        self._clients: dict[int, Seated] = {}
        self._announced: list[say.Go] = []  # rounds that have started, whose blocks are not known here yet
        self._due: list[Block] = []  # blocks whose members here are not through with the round before
        self._under_way: dict[tuple[int, int], Block] = {}  # those that wait for other hosts' parts
        self._parts: dict[tuple[int, int], dict[int, HostPart]] = {}  # of blocks that have not begun here
        self._summing: dict[tuple[int, int], Summing] = {}
        self._awaited: set[Name] = set()  # blocks whose totals others pass on
        self._totals: dict[Name, tuple[say.BlockTotal, Expression]] = {}  # passed on before it is settled here
        self._in_round = self._flushing = False
        self._spares = Spares()
        self._watched: int | None = None  # the round for which everybody was looked up
        self._said: dict[int, Elsewhere] = {}
        self._looked_s = 0.0
        self._question, self._answers = 0, dict[int, dict[int, Elsewhere]]()  # of other hosts: where their workers are
        self._lost: dict[int, Expression] = {}  # what coding has lost for a worker
        self._counted: dict[int, Callable[[int], None]] = {}  # who waits to hear how many rounds have started for it

    def values(self) -> list[Expression]:
        parts = [*self._parts.values(), *(block.parts for block in self._under_way.values())]
        every = [*(part for some in parts for part in some.values()), *(one.part for one in self._summing.values())]
        of_hosts = [part.value for part in every if part.value is not None]
        of_hosts += [kept.what[1] for kept in self._kept.values()]
        of_hosts += [total for _, total in self._totals.values()]
        return [
            *of_hosts,
            *self._lost.values(),
            *(cast(Expression, value) for seat in self._seats.values() for value in seat.values),
        ]

    # Those who come and leave.

    def seat(self, worker: int, message: say.OpenChannel, send: Send) -> ClientRecord:
        if message.spares and self._rules.spares:
            self._spares.can(worker)
        if worker in self._returning:
            return self._clients[worker].comes(send)
        return self._seated(worker, send, [] if message.logs else None, message.first_step)

    def _seated(self, worker: int, send: Send, log: list[Event] | None, first_step: int) -> Seated:
        seat = self._seats[worker] = Seat(
            self._rules,
            self._whom,
            self.nodes,
            worker,
            None,
            first_round=self._first_round,
            first_step=first_step,
            log=log,
        )
        client = self._clients[worker] = Seated(self.key, worker, send, log, seat)
        return client

    def greet(self, client: Seated) -> None:
        self._reply(client, "open")

    def bury(self, rank: int) -> None:
        if self.others.is_here(rank) and rank not in self._clients:  # its seat answers for it all the same
            self._books.clients[rank] = self._seated(rank, unheard, None, 0)
        notice = Notice(Say.DIED)
        if (client := self._clients.get(rank)) is not None:
            self._books.aside.difference_update(client.replica)
            self._spares.cannot(rank)
            notice = client.seat.bury()
        super().bury(rank)  # nobody waits for it: rounds may start
        if self._referee is not None:  # which hears of it as the counterparts do, where it is at another host
            self._tell(rank, notice)
        if (home := self.others.host_of[rank]) in self._knowing_no_schedule and (rounds := self._rounds.told):
            self.others.send(home, say.RoundsAhead(self.key, 0, rounds))
        self._end_of_message()
        self._go_on()

    @property
    def _knowing_no_schedule(self) -> list[int]:
        """Hosts whose workers are all dead, so that none of them tells it."""
        living = {self.others.host_of[r] for r in range(len(self.others.host_of)) if r not in self._dead}
        return [host for host in self.others.others if host not in living]

    def can_revive(self, rank: int, twin_of: int) -> bool:
        is_quiet = not (self._announced or self._due or self._under_way or self._flushing)
        dead, client = self._clients.get(rank), self._clients.get(twin_of)
        has_counted = dead is None or (dead.put_by is None and dead.seat.has_counted)
        is_training = client is not None and not client.seat.takes_each
        return is_quiet and has_counted and is_training and super().can_revive(rank, twin_of)

    def revive(self, rank: int, twin_of: int) -> None:
        super().revive(rank, twin_of)
        seat = self._seats[rank] = self._clients[twin_of].seat.twin(rank)
        self._clients[rank] = self._books.clients[rank] = Seated(self.key, rank, unheard, None, seat)
        self._referees.returning(rank, twin_of)

    def has_returned(self, worker: int) -> None:
        self._tell(worker, self._clients[worker].seat.returned())
        self._end_of_message()

    def waits_for(self, rank: int) -> tuple[int, int]:
        """How many results it has heard of, and how many it waits for."""
        client = self._clients.get(rank // self.others.of)
        return (0, 0) if client is None else (client.told, client.waits_for)

    def places(self) -> dict[int, Whereabouts]:
        missing = self.absent
        if self._referee is not None and not missing:
            missing = tuple(sorted(self._referee.missing))
        found = super().places()
        for worker, client in self._clients.items():
            if client.is_dead:
                continue
            waits = client.wake is not None and not client.looks_ahead
            waits = waits and (self._rules.pool is not None or client.wanted > self.rounds)
            waits = (waits or bool(self.absent)) and worker not in missing
            found[worker] = Whereabouts(client.seat.place.taken, client.seat.results, missing if waits else ())
        return found

    # Messages.

    def hear_one(self, rank: int, message: Any) -> None:
        self._looked_s = time.monotonic()
        match message:
            case say.RoundsAhead():
                for host in self._knowing_no_schedule:
                    self.others.send(host, message)
                self._learn(message)
            case say.Nothing():
                self._interrupt(self._clients[rank // self.others.of])
            case say.Owed():
                owed = cast("Expression | None", self._clients[rank // self.others.of].seat.tray.owed())
                self._answer_one(rank, "owed", [] if owed is None else [owed])
            case say.Lost():
                lost = self._lost[rank // self.others.of]
                self._answer_one(rank, "lost", [Expression([(Sum([lost]), 1.0)])])  # a copy: rounds may change it

    def _learn(self, message: say.RoundsAhead) -> None:
        self._rounds.learn(message.first, message.rounds)
        self._go_on()

    def _answer_one(self, rank: int, how: str, vectors: Sequence[Expression]) -> None:
        results = self._clients[rank // self.others.of].seat.results
        self._books.reply_to(rank, Reply(how, rank, results, [], [(one, None) for one in vectors]))

    def begin(self, worker: int, message: say.KeepLost | say.FirstDeposit) -> None:
        client = self._clients[worker]
        if isinstance(message, say.KeepLost):
            self._lost[worker] = client.written(message.slot)
            client.reads_nothing_own()
            self._books.grant(client)
        elif message.slot >= 0:
            brought = client.written(message.slot)
            if worker not in self._returning:  # else something answers for it already, and rounds may have had it
                client.seat.tray.deposit(brought, Deposit(-1, self._first_round))
            self._books.grant(client)
        self._reply(client)

    def hear_host(self, host: int, message: Any, value: Expression | None) -> None:
        match message:
            case say.Noticed(worker=worker):
                self._looked_s = time.monotonic()
                self._begin(self._is_here(worker), worker)
                self._tell(worker, Notice(Say[message.what], message.position, message.base, message.next_base))
                if Say[message.what] is Say.BACK:
                    self.others.send(host, say.StartedWith(self.key, worker, self._referees.started_with(worker)))
                self._end_of_message()
            case say.Go():
                self._announced.append(message)
                self._go_on()
            case say.BlockTotal(version=version, block=block):
                assert value is not None
                self._totals[version, block] = message, value
                self._take_totals()
            case say.BlockPart(version=version, block=block):
                shares = {worker: Freshness(age, fresh) for worker, age, fresh in message.shares}
                self._hear_part((version, block), host, HostPart(value, shares, message.absent))
            case say.RoundsAhead():
                self._learn(message)
            case say.StartedWith(worker=worker, rounds=rounds):
                self._counted.pop(worker)(rounds)
            case say.WhereAre(number=number):
                said = [(w, *self._where(w)) for w in self._clients]
                self.others.send(host, say.TheyAre(self.key, number, said))
            case say.TheyAre(number=number, said=said) if number == self._question:
                self._answers[host] = {
                    worker: Elsewhere(inside, {k: (n, tuple(who)) for k, (n, who) in met.items()}, rounds)
                    for worker, inside, met, rounds in said
                }
                self._judge()
            case say.TheyAre():
                pass  # an answer to an older question
            case _:
                super().hear_host(host, message, value)

    @property
    def _referees(self) -> Referee:
        assert self._referee is not None, "another host has the referee"
        return self._referee

    def hear_in_time(self, worker: int, message: Any) -> None:
        if self._referee is not None:
            self._begin(self._is_here(worker), worker)
        self._do(self._clients[worker], message)
        self._end_of_message()

    def _end_of_message(self) -> None:
        if self._referee is None:
            return
        if self._referee.all_finished and not self._flushing:
            self._flushing = True
            self._announce(self._referee.started, NOBODY, None, flush=True)
        self._stop_watching()

    def _do(self, client: Seated, message: Any) -> None:
        seat, worker = client.seat, client.worker
        match message:
            case say.Submit(slot=slot, step=step, taken=-1):
                self._offer(client, slot, step)
            case say.Submit(slot=slot, step=step, taken=taken):
                self._hand_in(client, slot, step, taken)
            case say.Renew(slot=slot):
                self._tell(worker, seat.renew(client.written(slot)))
                client.reads_nothing_own()
                self._books.grant(client)
                self._reply(client)
            case say.NextResult():
                self._call_when(client, lambda: self._next(client), seat.place.taken + 1)
            case say.NoMore():
                if client.put_off:  # what it has handed in is not forgotten
                    client.stops = True
                else:
                    self._interrupt(client)
            case say.Newest():
                self._reply(client, "newest", seat.show())
            case say.IsThrough():
                is_told = not any(one.replies for one in client.ranks)
                self._reply(client, "through", about=is_told and (client.wake is None or client.looks_ahead))
            case say.Spare():
                self._keep(client, message.upto, message.vectors, message.said)
            case say.Finished():
                self._tell(worker, seat.finish())
                self._reply(client)
            case say.Stands():
                self._tell(worker, seat.stand())
                self._reply(client)
            case say.Back():
                self._count(client, lambda rounds: self._reply(client, "started", about=rounds))
            case say.CatchUp(results=results):
                if self._rules.pool is None:
                    self._call_when(client, lambda: self._catch_up(client, results), results)
                else:  # others may have drawn it since it was told; by now nobody draws any more
                    self._count(
                        client, lambda own: self._call_when(client, lambda: self._catch_up(client, results), own)
                    )
            case _:
                raise ValueError(f"a channel does not know what to do with {message}")

    def _interrupt(self, client: Seated) -> None:
        """It waits no longer. What has been answered is on its way."""
        if client.wake is not None or client.looks_ahead:
            client.wake, client.looks_ahead = None, False
            self._reply(client, "nothing")

    def _count(self, client: Seated, go: Callable[[int], None]) -> None:
        """It is back; ``go`` hears how many rounds have started that it has a part in."""
        worker = client.worker
        if self._referee is None:
            self._counted[worker] = go
        self._tell(worker, client.seat.back())
        if self._referee is not None:
            go(self._referee.started_with(worker))

    def _catch_up(self, client: Seated, results: int) -> None:
        self._reply(client, "taken", client.seat.catch_up(results))
        self._tell(client.worker, client.seat.began())

    def _offer(self, client: Seated, slot: int, step: int) -> None:
        worker, seat, mine = client.worker, client.seat, client.written(slot)
        client.reads_nothing_own()  # it waits

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
        if client.is_dead:
            return
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
        if notice is not None and self._referee is None:
            self.others.send(0, say.Noticed(self.key, worker, notice.what.name, *notice[1:]))
        elif notice is not None:
            self._begin(self._referees.hear(worker, notice, time.monotonic()), worker)

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
        for version in versions:
            self._announce(version, started_by, self._referees.members(version), flush=False)

    def _announce(self, version: int, started_by: int, members: Sequence[int] | None, flush: bool) -> None:
        """Say to all hosts that a round has started."""
        go = say.Go(self.key, version, started_by, None if members is None else list(members), flush)
        self.others.tell_others(go)
        self._announced.append(go)
        self._go_on()

    def _go_on(self) -> None:
        """Let blocks begin whose members here are all through with the round before, each member's in their order.

        Rounds happen in the order of their numbers, also where one lets others start that come after those here. Where
        the schedule is not known so far ahead, a round waits for that: a worker will tell.
        """
        if self._in_round:
            return
        self._in_round = True
        while (block := self._next_block()) is not None:
            self._due.remove(block)
            self._snapshot(block)
        self._in_round = False

    def _next_block(self) -> Block | None:
        while self._announced and self._is_known(self._announced[0]):
            self._due += self._blocks(self._announced.pop(0))
        waiting = set[int]()
        for block in self._due:
            seats = [self._clients[r].seat for r in block.here]
            is_next = waiting.isdisjoint(block.here) and all(seat.is_next(block.version) for seat in seats)
            if is_next and block.begins_s is None:
                return block
            waiting.update(block.here)
        return None

    def _is_known(self, go: say.Go) -> bool:
        needs_no_schedule = go.flush or go.members is not None or self._rules.is_full(go.version) or not self._clients
        return needs_no_schedule or self._rounds.has(go.version)

    def _blocks(self, go: say.Go) -> list[Block]:
        """Those with members at this host."""
        self.rounds = max(self.rounds, go.version + (not go.flush))
        if go.members is not None:
            found = {tuple(go.members)} if set(go.members) & self._clients.keys() else set()
        else:
            found = {client.seat.members(go.version, go.flush) for client in self._clients.values()}
        return [self._block(go, ranks) for ranks in sorted(found)]

    def _block(self, go: say.Go, ranks: tuple[int, ...]) -> Block:
        home_of = self.others.home_of
        here = [r for r in ranks if home_of[r] == self.others.me and r in self._clients]
        hosts = list(dict.fromkeys(home_of[r] for r in ranks))
        block = Block(go.version, ranks, here, hosts, go.started_by, go.flush)
        trip_s = self.others.trip_s(hosts) if self.others.decides and not go.flush else 0.0
        if trip_s > 0.0:  # here the round is news at once, and the deposits of all hosts are to be fresh alike
            block.begins_s = time.monotonic() + min(trip_s, MOST_TRIP_S)
        return block

    def _snapshot(self, block: Block) -> None:
        """Take what the members here give, and tell the other hosts."""
        seats = {r: self._clients[r].seat for r in block.here}
        if block.flush and not next(iter(seats.values())).flushes:
            self._is_flushed()
            return
        block.given = given = {r: seat.snapshot(block.version, block.flush) for r, seat in seats.items()}
        terms = [cast(Expression, one.value) for one in given.values() if one.value is not None]
        shares = {r: one.share for r, one in given.items() if one.share is not None}
        absent = sorted(self._dead.intersection(block.here).difference(shares))
        if len(block.hosts) == 1:
            block.absent = set(absent)
            self._deliver(block, self._divided(block, terms), shares)
            return
        self._give(block, HostPart(self.as_one(terms) if terms else None, shares, absent))

    def _give(self, block: Block, mine: HostPart) -> None:
        """To the other hosts of the block."""
        hosts = self.left(block.hosts)
        if self.sums.takes(hosts):
            self._summing[block.name] = Summing(block, mine)
            self._sum_in_phases(block, hosts, mine)
            return
        gone = {host: self._nothing_of(block, host) for host in block.hosts if host in self.gone}
        block.parts = {self.others.me: mine, **gone, **self._parts.pop(block.name, {})}
        self._under_way[block.name] = block
        told = [(r, share.age, share.fresh) for r, share in mine.shares.items()]
        part = say.BlockPart(self.key, block.version, block.ranks[0], told, mine.absent, mine.value is not None)
        for host in hosts:
            if host != self.others.me:
                if mine.value is None:
                    self.others.send(host, part)
                else:
                    self.send(host, part, mine.value)
        self._deliver_if_whole(block)

    def _nothing_of(self, block: Block, host: int) -> HostPart:
        """The part of a lost host."""
        return HostPart(None, {}, [r for r in block.ranks if self.others.home_of[r] == host])

    def _sum_in_phases(self, block: Block, hosts: Sequence[int], mine: HostPart) -> None:
        """With the other hosts of the block, which hear nothing else of what is given here."""
        first = block.here[0]
        said = [[(r, share.age, share.fresh) for r, share in mine.shares.items()], mine.absent]
        lost = self._lost.get(first) if self.sums.codec is not None else None
        given = GivenByHost(mine.value, said, (self._seed, first, block.version), lost)
        nobody = {r for r in block.ranks if self.others.home_of[r] not in hosts}

        def deliver(summed: Summed) -> None:
            everyones = {r: Freshness(age, fresh) for some, _ in summed.said for r, age, fresh in some}
            block.absent = nobody.union(r for _, absent in summed.said for r in absent)
            del self._summing[block.name]
            total = Expression([(summed.total(self._divisor(block)), 1.0)])
            self._deliver(block, total, dict(sorted(everyones.items())))
            self._go_on()

        self.sums.begin(block.name, hosts, given, deliver)

    def _hear_part(self, name: tuple[int, int], host: int, part: HostPart) -> None:
        block = self._under_way.get(name)
        if block is None:
            self._parts.setdefault(name, {})[host] = part
        else:
            block.parts[host] = part
            self._deliver_if_whole(block)

    def _deliver_if_whole(self, block: Block) -> None:
        if block.is_whole and block.name not in self._awaited and self.asked.isdisjoint(block.hosts):
            parts = [block.parts[host] for host in block.hosts]
            shares = {r: share for part in parts for r, share in part.shares.items()}
            block.absent = {r for part in parts for r in part.absent}
            terms = [part.value for part in parts if part.value is not None]
            self._deliver(block, self._divided(block, terms), dict(sorted(shares.items())))
            del self._under_way[block.name]
            self._go_on()

    def lost(self, host: int, words: str) -> None:
        super().lost(host, words)
        self._under_way = {name: one for name, one in self._under_way.items() if host not in one.hosts}
        self._summing = {name: one for name, one in self._summing.items() if host not in one.block.hosts}
        self._parts = {}

    # A host is lost, and the run goes on.

    def asked_of(self, gone: Set[int]) -> tuple[list[Name], list[Name]]:
        self.asked |= gone - self.gone
        known = [(name, one.parts) for name, one in self._under_way.items()] + list(self._parts.items())
        held: list[Name] = [(host, *name) for name, parts in known for host in parts if host in gone]
        used: list[Name] = [name for name, kept in self._kept.items() if not gone.isdisjoint(kept.what[0].hosts)]
        return held, used

    def settle(self, gone: Set[int], held: Set[Name], used: Mapping[Name, bool]) -> None:
        """A block in which somebody has used a lost host's part comes from there, as a whole. In all others the part
        counts if all hold it; blocks that are summed in two phases begin anew without that host.
        """
        super().settle(gone, held, used)
        if self._referee is not None:
            for rank in (r for r, home in enumerate(self.others.home_of) if home in gone):
                self._referee.lost(rank)
        awaited = self._awaited  # from one that is lost by now
        self._awaited = {name for name in used if name in self._under_way or name in self._summing}
        for name, parts in self._parts.items():
            self._parts[name] = {h: part for h, part in parts.items() if h not in self.gone or (h, *name) in held}
        for block in self._under_way.values():
            for host in self.gone.intersection(block.hosts):
                if block.name not in self._awaited and (host, *block.name) not in held:
                    block.parts[host] = self._nothing_of(block, host)
        over = awaited.union(*(self.sums.lost(host, used.keys()) for host in gone)) - self._awaited
        for name, (block, mine) in list(self._summing.items()):
            if name in over:
                del self._summing[name]
                self._give(block, mine)
        for block in list(self._under_way.values()):
            self._deliver_if_whole(block)
        self._take_totals()

    def pass_on(self, name: Name, what: Any) -> None:
        block, total, shares = what
        told = [(r, share.age, share.fresh) for r, share in shares.items()]
        passed = say.BlockTotal(self.key, block.version, block.ranks[0], told, sorted(block.absent), True)
        for host in self.left(block.hosts):
            if host != self.others.me:
                self.send(host, passed, total)

    def _take_totals(self) -> None:
        """Those that are awaited, and none that are here already."""
        for name in self._awaited.intersection(self._totals):
            message, total = self._totals.pop(name)
            self._awaited.discard(name)
            at = message.version, message.block
            block = self._under_way.pop(at) if at in self._under_way else self._summing.pop(at).block
            block.absent = set(message.absent)
            self._deliver(block, total, {r: Freshness(age, fresh) for r, age, fresh in message.shares})
            self._go_on()
        if not self.asked:
            self._totals.clear()

    def _divided(self, block: Block, terms: Sequence[Expression]) -> Expression:
        return Expression([(Sum(terms, self._divisor(block)), 1.0)])

    def _divisor(self, block: Block) -> int:
        return self._clients[block.here[0]].seat.divisor(block.ranks, block.absent)

    def _deliver(self, block: Block, total: Expression, shares: dict[int, Freshness]) -> None:
        version, members = block.version, [r for r in block.ranks if r not in block.absent]
        self.is_whole_here(block.name, block.hosts, (block, total.clone(), shares))
        value: Any = total
        outcome = Outcome.of(self.nodes, version, value, shares, len(members), block.flush)
        now, told = time.monotonic(), [(r, tuple(share)) for r, share in shares.items()]
        for r, one in block.given.items():
            if self._clients[r].seat.deliver(outcome, one):
                self._clients[r].tell((version, block.started_by, told, len(members), members.index(r), now))
        if block.flush:
            self._is_flushed()
            return
        for r in block.here:
            self._call(self._clients[r])
        for r in block.here:
            self._tell(r, self._clients[r].seat.over())

    def _is_flushed(self) -> None:
        for client in self._clients.values():
            client.seat.flushed = True
        for client in self._clients.values():
            self._call(client)

    # Those who are elsewhere: in a collective of the script's own, or in another optimiser's channel.

    @property
    def _looks_s(self) -> float | None:
        """When it is looked where everybody is: if somebody waits who may wait for one that is elsewhere."""
        if self._referee is None or not (self._referee.waits or self._referee.holds):
            return None
        return self._looked_s + (ASK_S if self._watched is None else LOOK_S if not self._asks else AGAIN_S)

    @property
    def wakes_s(self) -> float | None:  # type: ignore[override]
        if self._referee is None:
            return None
        moments = [self._referee.deadline_s, self._looks_s, *(block.begins_s for block in self._due)]
        return min((moment for moment in moments if moment is not None), default=None)

    def silence(self, now_s: float) -> None:
        referee = self._referees
        for block in self._due:
            if block.begins_s is not None and now_s >= block.begins_s:
                block.begins_s = None
        self._go_on()
        if referee.deadline_s is not None and now_s >= referee.deadline_s:
            self._begin(referee.tick(now_s), NOBODY)
        elif self._looks_s is not None and now_s >= self._looks_s:
            self._looked_s = now_s
            if self._watched is None:
                self._watched = referee.started
            self._question += 1
            here = {worker: self._elsewhere(self, worker) for worker in self._clients}
            self._answers = {self.others.me: here}
            self.others.tell_others(say.WhereAre(self.key, self._question))
            self._judge()
        self._stop_watching()

    @property
    def _asks(self) -> bool:
        """Whether other hosts have still to say where their workers are."""
        return bool(self._answers) and not self._answers.keys() >= set(self.left(range(len(self.others.hosts))))

    def _judge(self) -> None:
        """All have said where they are."""
        if not self._asks and self._watched is not None:
            self._said = {worker: one for some in self._answers.values() for worker, one in some.items()}
            self._begin(self._referees.held(held(self._said)), NOBODY)
            self._stop_watching()

    def _where(self, worker: int) -> tuple[bool, dict[str, Any], dict[str, Any]]:
        found = self._elsewhere(self, worker)
        return found.inside, dict(found.met), dict(found.rounds)

    def _is_here(self, worker: int) -> list[int]:
        """It speaks of a step: so it is inside nothing else."""
        mine = self._said.get(worker)
        if mine is None or not mine.inside:
            return []
        self._said[worker] = Elsewhere(False, mine.met, mine.rounds)
        return self._referees.held(held(self._said))

    def _stop_watching(self) -> None:
        """The round has started, and nobody is held."""
        if self._watched is not None and self._watched != self._referees.started and not self._referees.holds:
            self._watched = None
            self._said, self._answers = {}, {}


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
