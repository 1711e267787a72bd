"""Following the order of a recorded run: the same seats and shared weights as ever, but no referee, no clock decides.

Each worker has the list of what happened to it. Whatever is next on a list is done as soon as it can be: a deposit when
its worker has made it, a snapshot at once, a result when everybody of its block has given its snapshot. Lists of a run
that took place can always be followed to their ends; where they cannot, the record is not of this run.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import simpy

from offbeat.method.effects import Batch, Channel, Done
from offbeat.method.replica import Replica
from offbeat.rounds.seat import Given, Got, Seat
from offbeat.rounds.shared import Retired, SharedVec
from offbeat.runs.order import Event, Part
from offbeat.runs.trace import Round, Trace
from offbeat.sim.channels import charge, summed
from offbeat.sim.exchanges import Pending
from offbeat.sim.network import Network
from offbeat.sim.streams import Piece
from offbeat.tensors.vector import Vec
from offbeat.tensors.wire import message_bytes
from offbeat.topology.hierarchy import Nodes


class Mismatch(ValueError):
    """A record that is not of this run."""


def _refuse(rank: int, event: Event, instead: str) -> Mismatch:
    what, number = event
    return Mismatch(
        f"the record cannot be followed: at rank {rank} it says {what!r} of {number}, but {instead}; "
        "it is damaged, or of another task or other settings"
    )


@dataclass
class _Chair:
    """A seat, its list, and what its worker asks for."""

    me: Replica
    seat: Seat
    channel: Channel
    events: deque[Event]
    offers: tuple[int, Vec] | None = None  # step and work that it wants to deposit
    takes: int | None = None  # the step after which it waits for results
    rests: bool = False
    stands: bool = False  # for an average of all
    renews: Vec | None = None
    finishes: bool = False
    answer: Callable[[Any], None] | None = None
    out: tuple[int, tuple[int, ...], bool] | None = None  # the round its snapshot is in: number, block, flush
    stood: Vec | None = None  # the weights it has come to an average with


class ReplayedChannel:
    """One channel, all workers, in the order of a record."""

    def __init__(
        self,
        channel: Channel,
        env: simpy.Environment,
        network: Network,
        trace: Trace,
        nodes: Nodes,
        events: Sequence[Sequence[Event]],
        stood: Callable[[int], None],
    ) -> None:
        self.channel, self.nodes, self._env, self._network, self._trace = channel, nodes, env, network, trace
        self.chairs: dict[int, _Chair] = {}
        self.bytes_sent = 0
        self._events = events
        self._given: dict[tuple[int, tuple[int, ...]], dict[int, Given]] = defaultdict(dict)
        self._means: dict[tuple[int, tuple[int, ...]], Vec] = {}  # of blocks that are through
        self._left: dict[tuple[int, tuple[int, ...]], int] = {}  # how many of a block have not been given its mean
        self._stood = stood
        self._goes_on = False

    def open(self, me: Replica, channel: Channel, x: Vec | None) -> None:
        rank = self.nodes.of(me.rank)
        seat = Seat(channel.rules, channel.whom, self.nodes, rank, x)
        self.chairs[rank] = _Chair(me, seat, channel, deque(self._events[me.rank]))

    # The worker.

    def offer(self, rank: int, x: Vec, step: int, answer: Callable[[list[Got]], None]) -> None:
        chair = self.chairs[rank]
        chair.offers, chair.answer = (step, x), answer
        self._go_on()

    def finished(self, rank: int) -> None:
        self.chairs[rank].finishes = True
        self._go_on()

    def rest(self, rank: int, x: Vec | None, answer: Callable[[Got | None], None]) -> None:
        chair = self.chairs[rank]
        chair.rests, chair.renews, chair.answer = True, x, answer
        self._go_on()

    # The lists.

    def _go_on(self) -> None:
        """Follow all lists as far as they can be followed now. A worker that is answered comes here again."""
        if self._goes_on:
            return
        self._goes_on = True
        while any(self._follow(rank, chair) for rank, chair in list(self.chairs.items())):
            pass
        self._goes_on = False

    def _follow(self, rank: int, chair: _Chair) -> bool:
        moved = False
        while chair.events and self._done(rank, chair, chair.events[0]):
            moved = True
        if not chair.events and chair.rests and chair.finishes:
            chair.rests = False
            chair.seat.flushed = True
            self._answer(chair, None)
        return moved

    def _done(self, rank: int, chair: _Chair, event: Event) -> bool:
        """Do what is next, if it can be done now."""
        (what, number), seat = event, chair.seat
        if chair.stood is not None and what not in ("snapshot", "flush", "result"):
            return False  # its worker stands until all have been made equal; its clerk goes on
        match what:
            case "offer":
                if chair.offers is None:
                    return self._waits(rank, chair, event)
                step, x = chair.offers
                if step != number or seat.results < seat.needs_first:
                    raise _refuse(rank, event, f"step {step} comes next")
                chair.events.popleft()
                seat.offer(x, step)
                chair.offers, chair.takes = None, step
            case "take":
                if chair.takes != number or seat.results < seat.needs:
                    raise _refuse(rank, event, f"{seat.results} results are there and {seat.needs} are needed")
                chair.events.popleft()
                chair.takes = None
                self._answer(chair, seat.take(number))
            case "finish":
                if not chair.finishes:
                    return self._waits(rank, chair, event)
                chair.events.popleft()
                seat.finish()
            case "renew":
                if not (chair.rests or chair.stands or chair.renews is not None):
                    return self._waits(rank, chair, event)
                chair.events.popleft()
                seat.renew(chair.channel.holds() if chair.stands else chair.renews)
                chair.renews = None
            case "next":
                if not (chair.rests or chair.stands):
                    return self._waits(rank, chair, event)
                got = seat.next()
                if got is None or got.version != number:
                    raise _refuse(rank, event, "that result is not the next one")
                chair.events.popleft()
                if chair.stands:
                    chair.channel.apply([got])
                else:
                    chair.rests = False
                    self._answer(chair, got)
            case "stand":
                if not (chair.rests or chair.stands):
                    return self._waits(rank, chair, event)
                chair.events.popleft()
                chair.stands = True
                seat.stand()
            case "catch up":
                if not chair.stands or seat.results < number:
                    return False
                chair.events.popleft()
                chair.channel.apply(seat.catch_up(number))
                chair.stands, chair.stood = False, chair.me.x.clone()
                self._stood(chair.me.rank)
            case "snapshot" | "flush":
                chair.events.popleft()
                self._snapshot(rank, chair, number, what == "flush")
            case "result":
                return self._deliver(rank, chair, event)
            case _:
                raise _refuse(rank, event, "this version knows nothing of that")
        return True

    def _waits(self, rank: int, chair: _Chair, event: Event) -> bool:
        """Whether its worker may still come to that; if it has come to something else, the record is wrong."""
        asks = chair.offers is not None or chair.rests
        if asks:
            raise _refuse(rank, event, "its worker " + ("deposits a step" if chair.offers is not None else "rests"))
        return False

    def _answer(self, chair: _Chair, value: object) -> None:
        answer, chair.answer = chair.answer, None
        assert answer is not None
        answer(value)

    # Rounds.

    def _snapshot(self, rank: int, chair: _Chair, version: int, flush: bool) -> None:
        seat = chair.seat
        block = seat.members(version, flush)
        chair.out = (version, block, flush)
        given = self._given[version, block]
        given[rank] = seat.snapshot(version, flush)
        if len(given) < len(block):
            return
        self._given[version, block] = ordered = {r: given[r] for r in block}
        me = self.chairs[block[0]].me
        value = summed(self.channel, ordered, me, version, seat.divisor(block))
        seconds, sent = charge(self.channel, me, self._network, [self.nodes.leader(r) for r in block])
        self.bytes_sent += sent

        def through(_: object) -> None:
            self._means[version, block] = me.x.zeros_like() if value is None else value
            self._left[version, block] = len(block)
            self._go_on()

        self._env.timeout(seconds).callbacks.append(through)

    def _deliver(self, rank: int, chair: _Chair, event: Event) -> bool:
        if chair.out is None or chair.out[0] != event[1]:
            raise _refuse(rank, event, "no snapshot was taken for it")
        version, block, flush = chair.out
        key = (version, block)
        if key not in self._means:
            return False
        chair.events.popleft()
        chair.out = None
        given = self._given[key]
        shares = {r: one.share for r, one in given.items() if one.share is not None}
        chair.seat.deliver(version, self._means[key], given[rank], shares, len(given), flush)
        self._left[key] -= 1
        if not self._left[key]:
            if self._trace.keep_rounds:
                waited = dict.fromkeys(block, 0.0)
                self._trace.rounds.append(Round.among(self.nodes, version, block[0], shares, waited, self._env.now))
            del self._means[key], self._given[key], self._left[key]
        return True

    # Averages of all, in the middle of a run.

    def stand(self, rank: int) -> None:
        """A worker with data stands between two steps; one that rests stands when its list says so."""
        self.chairs[rank].stands = True
        self._go_on()

    def adopt(self, rank: int) -> None:
        """All have been made equal."""
        chair = self.chairs[rank]
        assert chair.stood is not None
        shared = chair.channel.rules.absent == "shared"  # to these everybody adds differences
        chair.renews = chair.me.x - chair.stood if shared else chair.channel.holds()
        chair.stood = None
        self._go_on()

    @property
    def parts(self) -> list[object]:
        return [*self.chairs.values(), self]

    @property
    def lost(self) -> list[tuple[int, int]]:
        lost = [(node, step) for node, chair in self.chairs.items() for step in chair.seat.lost]
        return sorted((rank, step) for node, step in lost for rank in self.nodes.ranks(node))

    def who_waits(self) -> dict[int, str]:
        """For each worker whose list is not at its end, what it would be next."""
        return {
            chair.me.rank: f"for what the record says next: {chair.events[0][0]} of {chair.events[0][1]}"
            for chair in self.chairs.values()
            if chair.events
        }


class ReplayedShared:
    """The shared weights of all workers, in the order of a record."""

    def __init__(
        self,
        env: simpy.Environment,
        network: Network,
        arrived: Callable[[Pending], None],
        events: Sequence[Sequence[Event]],
        stood: Callable[[int], None],
    ) -> None:
        self._env, self._network, self._arrived, self._stood = env, network, arrived, stood
        self._events = [deque(own) for own in events]
        self._me: dict[int, Replica] = {}
        self._shared: dict[int, SharedVec] = {}
        self._departs: dict[int, tuple[int, Pending]] = {}  # whom a worker wants to visit
        self._on_the_way: dict[tuple[int, int], deque[tuple[Vec, Pending]]] = defaultdict(deque)  # (from, to)
        self._halves: dict[int, deque[tuple[Vec, Pending]]] = defaultdict(deque)  # on their way home
        self._adds: dict[int, tuple[Vec, Callable[[Vec], None]]] = {}
        self._waiting: dict[int, Callable[[Vec], None]] = {}
        self._retired: Retired | None = None
        self._stands = set[int]()
        self._before: dict[int, Vec] = {}
        self._shifts: dict[int, Vec] = {}
        self._goes_on = False
        self.bytes_sent = 0

    @property
    def is_open(self) -> bool:
        return bool(self._shared)

    def share(self, me: Replica, x: Vec) -> None:
        self._me[me.rank], self._shared[me.rank] = me, SharedVec(x)
        self._retired = self._retired or Retired(me.size)

    def add(self, rank: int, delta: Vec, answer: Callable[[Vec], None]) -> None:
        self._adds[rank] = (delta, answer)
        self._go_on()

    def meet(self, i: int, j: int) -> Pending:
        """The visit begins when the list says so; before that nothing can happen that would change what it takes."""
        pending = Pending(i, self._env.now)
        if i == j:
            pending.arrived = True
            return pending
        self._departs[i] = (j, pending)
        self._go_on()
        return pending

    def retire(self, rank: int, answer: Callable[[Vec], None]) -> None:
        self._waiting[rank] = answer
        assert self._retired is not None, "who retires has shared its weights"
        self._retired.one_more()
        self._go_on()

    def stand(self, rank: int) -> None:
        self._stands.add(rank)
        self._go_on()

    def adopt(self, rank: int) -> None:
        self._shifts[rank] = self._me[rank].x - self._before.pop(rank)
        self._go_on()

    def _go_on(self) -> None:
        if self._goes_on:
            return
        self._goes_on = True
        while any(self._follow(rank) for rank in list(self._shared)):
            pass
        self._goes_on = False
        if len(self._waiting) == len(self._shared) and not any(self._events):
            for rank, answer in sorted(self._waiting.items()):
                self._env.timeout(0).callbacks.append(partial(self._let_go, rank, answer))
            self._waiting.clear()

    def _let_go(self, rank: int, go: Callable[[Vec], None], _: object) -> None:
        go(self._shared[rank].now())

    def _follow(self, rank: int) -> bool:
        moved = False
        while self._events[rank] and self._done(rank, self._events[rank][0]):
            moved = True
        return moved

    def _done(self, rank: int, event: Event) -> bool:
        (what, number), mine = event, self._shared[rank]
        match what:
            case "depart":
                if rank not in self._departs:
                    return False
                peer, pending = self._departs.pop(rank)
                self._events[rank].popleft()
                _, sent = mine.depart()
                self._travel(rank, peer, lambda: self._on_the_way[rank, peer].append((sent, pending)))
            case "visited":
                if not self._on_the_way[number, rank]:
                    return False
                self._events[rank].popleft()
                theirs, pending = self._on_the_way[number, rank].popleft()
                half = mine.visited(number, theirs)
                self._travel(rank, number, lambda: self._halves[number].append((half, pending)))
            case "home":
                if not self._halves[rank]:
                    return False
                self._events[rank].popleft()
                half, pending = self._halves[rank].popleft()
                mine.home(number, half)
                pending.arrived = True
                self._arrived(pending)
            case "add":
                if rank not in self._adds:
                    return False
                self._events[rank].popleft()
                delta, answer = self._adds.pop(rank)
                answer(mine.add(delta).clone())  # what is next on the list may change it before it is read
            case "stand":
                if rank not in self._stands and rank not in self._waiting:
                    return False
                self._events[rank].popleft()
                self._stands.discard(rank)
                self._before[rank] = mine.stand()
                self._me[rank].x.copy_(self._before[rank])
                self._stood(rank)
            case "shift":
                if rank not in self._shifts:
                    return False
                self._events[rank].popleft()
                mine.shift(self._shifts.pop(rank))
            case _:
                raise _refuse(rank, event, "this version knows nothing of that")
        return True

    def _travel(self, sender: int, receiver: int, arrive: Callable[[], None]) -> None:
        nbytes = message_bytes(self._shared[sender].empty(), None)
        self.bytes_sent += nbytes

        def there(_: object) -> None:
            arrive()
            self._go_on()

        self._env.timeout(self._network.send_s(sender, receiver, nbytes)).callbacks.append(there)

    def who_waits(self) -> dict[int, str]:
        return {
            rank: f"for what the record says next: {own[0][0]} of {own[0][1]}"
            for rank, own in enumerate(self._events)
            if own
        }


class ReplayedStreams:
    """Micro-batches as they were done: no bell, no deadline."""

    def __init__(
        self,
        env: simpy.Environment,
        compute_s: Callable[[int, int], float],
        parts: Sequence[Sequence[Part]],
        rows: Callable[[int, int], int],
        union: Callable[[int, list[Piece]], Vec],
    ) -> None:
        self._env, self._compute_s, self._rows, self._union = env, compute_s, rows, union
        self._parts = [deque(own) for own in parts]

    def begin(self, rank: int, r: int, effect: Batch, answer: Callable[[Done], None]) -> None:
        if not self._parts[rank]:
            raise Mismatch(f"the record cannot be followed: rank {rank} has no part in round {effect.r}")
        part = self._parts[rank].popleft()
        pieces: list[Piece] = [(batch, lo, hi, r) for batch, lo, hi in part.pieces]
        if not pieces and part.samples == 1:  # a batch that was not cut
            pieces = [(r, 0, self._rows(rank, r), r)]
        seconds = self._compute_s(r, rank) * part.done / part.of if part.of else 0.0

        def over(_: object) -> None:
            total, rows = self._union(rank, pieces), sum(hi - lo for _, lo, hi, _ in pieces)
            if rows and part.samples != rows:
                total = total * (part.samples / rows)
            answer(Done(total, part.samples, part.done, part.of, part.whole_s))

        self._env.timeout(seconds).callbacks.append(over)
