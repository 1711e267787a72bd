"""Partial rounds in virtual time: a driver of the workers' seats (see `offbeat.rounds.seat`).

A round goes: a worker arrives and the referee lets the round start; the news takes a while to reach the seats; a
snapshot of each seat's tray is taken; the blocks sum; the results arrive. Workers that arrive while the news is still
on its way are in time.

"Ranks" are those of nodes throughout: where every worker is a node of its own, the workers'.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import simpy

from offbeat.method.effects import Channel
from offbeat.method.replica import Replica
from offbeat.rounds.referee import Notice, Referee, Say
from offbeat.rounds.seat import Event, Freshness, Given, Got, Outcome, Seat
from offbeat.runs.trace import Round, Trace
from offbeat.sim.costs import sum_cost
from offbeat.sim.network import Network
from offbeat.tensors.houses import mean_of_hosts
from offbeat.tensors.vector import Vec
from offbeat.topology.hierarchy import Nodes

FLUSH = -1  # who starts it


@dataclass
class Chair:
    """A seat, and the worker that waits there."""

    me: Replica
    seat: Seat
    channel: Channel
    wanted: int = 0  # results that must be there before `wake` is called
    wake: Callable[[], None] | None = None
    ahead: int = 0  # batches that the worker has begun before, and of which its steps know nothing
    is_unheard: bool = False  # what it hands in lies before the seat, until the round before is over
    waits_since: dict[int, float] = field(default_factory=dict)  # round → since when it is waited for

    @property
    def lost(self) -> list[int]:
        """The batches whose gradients were dropped."""
        return [step + self.ahead for step in self.seat.lost]


class SimulatedChannel:
    """One channel, all workers."""

    def __init__(
        self,
        channel: Channel,
        env: simpy.Environment,
        network: Network,
        trace: Trace,
        nodes: Nodes,
        seed: int,
        logs: Sequence[list[Event]] | None = None,
    ) -> None:
        self.channel, self.nodes, self._env, self._network, self._trace = channel, nodes, env, network, trace
        self._size = size = nodes.count
        # Whoever comes at the same instant may meet anybody else who does, not the one before it on a list.
        self.referee = Referee(channel.rules, size, seed, in_batches=channel.rules.pool is not None)
        self.chairs: dict[int, Chair] = {}
        self.bytes_sent = 0
        self._logs = logs
        last = nodes.leader(size - 1)
        self._news_s = math.ceil(math.log2(size)) * network.latency(0, last) if size > 1 else 0.0
        self._notes: dict[int, list[tuple[dict[int, Freshness], dict[int, float]]]] = {}
        self._known: list[tuple[int, tuple[int, ...], int]] = []  # (round, block, started by) not under way yet
        self._flushing = False  # the last round is under way, or over
        self._dead: set[int] = set()
        self._returning: set[int] = set()  # workers again, that have not come yet
        self._waits_for_quiet: dict[int, Callable[[], None]] = {}
        self._lost_before: list[tuple[int, int]] = []  # by those who are back, in their lives before

    def open(self, me: Replica, channel: Channel, x: Vec | None) -> None:
        rank, log = self.nodes.of(me.rank), None if self._logs is None else self._logs[me.rank]
        if rank in self._returning:
            self._returning.discard(rank)
            self.chairs[rank].me, self.chairs[rank].channel = me, channel
            self._tell(rank, self.chairs[rank].seat.returned())
            self._go_on()
            return
        seat = Seat(channel.rules, channel.whom, self.nodes, rank, x, log=log)
        self.chairs[rank] = Chair(me, seat, channel)

    # The worker.

    def offer(self, rank: int, x: Vec, step: int, answer: Callable[[list[Got]], None]) -> None:
        """``answer`` is called when the worker may go on (perhaps at once)."""
        chair = self.chairs[rank]
        seat = chair.seat

        def deposit() -> None:
            chair.is_unheard = False
            self._tell(rank, seat.offer(x, step))
            self._when(chair, seat.needs, take)

        def take() -> None:
            taken = seat.take(step)
            self._tell(rank, seat.began())
            answer(taken)

        chair.is_unheard = True
        self._when(chair, seat.needs_first, deposit)

    def through(self, rank: int, step: int, answer: Callable[[bool], None]) -> None:
        """Whether a deposit now would wait for nothing."""
        answer(self.chairs[rank].seat.is_through(step))

    def finished(self, rank: int) -> None:
        """It never counts again, so a quorum may be complete now. What it has left is handed in before that."""
        chair = self.chairs[rank]
        self._tell(rank, chair.seat.renew(chair.channel.holds()))
        self._tell(rank, chair.seat.finish())

    def died(self, rank: int) -> None:
        """The others go on; what it has handed in counts."""
        if self.nodes.per_node > 1:
            raise ValueError("what a node does when one of its ranks dies is not built; leave out per_node, or faults")
        self._dead.add(rank)
        self._returning.discard(rank)
        self._tell(rank, self.chairs[rank].seat.bury() if rank in self.chairs else Notice(Say.DIED))
        self._go_on()

    def settles(self, rank: int, go: Callable[[], None]) -> bool:
        """Whether no round is under way with this seat; else ``go`` is called as soon as none is."""
        if rank not in self.chairs or self._is_quiet(rank):
            return True
        self._waits_for_quiet[rank] = go
        return False

    def _is_quiet(self, rank: int) -> bool:
        """No round has had its part and not given its result; where a round's members are drawn, none has drawn it."""
        place = self.chairs[rank].seat.place
        drawn = self.channel.rules.pool is not None and place.results < self.referee.started_with(rank)
        return place.results == place.begun and not drawn

    def _settle(self, ranks: Iterable[int]) -> None:
        for rank in [one for one in ranks if one in self._waits_for_quiet and self._is_quiet(one)]:
            self._waits_for_quiet.pop(rank)()

    def can_revive(self, rank: int, twin_of: int) -> bool:
        """Whether no round is under way with either, and some round has had in it all that the dead one gave. (Where
        members are drawn, none ever draws the dead.)
        """
        if twin_of not in self.chairs or self._flushing or self.chairs[twin_of].seat.takes_each:
            return False
        if rank in self.chairs:
            dead = self.chairs[rank]
            has_counted = not dead.is_unheard and (dead.seat.has_counted or self.channel.rules.pool is not None)
            return has_counted and self._is_quiet(rank) and self._is_quiet(twin_of)
        return self._is_quiet(twin_of)

    def revive(self, rank: int, twin_of: int, ahead: int) -> None:
        """It has the place of the other one by now, and stands until it opens it."""
        self._dead.discard(rank)
        self._returning.add(rank)
        if rank in self.chairs:
            self._lost_before += [(rank, step) for step in self.chairs[rank].lost]
        member = self.chairs[twin_of]
        self.chairs[rank] = Chair(
            member.me, member.seat.twin(rank), replace(member.channel, lost=None), ahead=member.ahead + ahead
        )
        self.referee.returning(rank, twin_of)

    def rest(self, rank: int, x: Vec | None, answer: Callable[[Got | None], None]) -> None:
        """The next result, or None when nothing more can come."""
        chair = self.chairs[rank]
        self._tell(rank, chair.seat.renew(x))
        self._call_when(chair, chair.seat.place.taken + 1, lambda: answer(chair.seat.next()))

    def _when(self, chair: Chair, results: int, go: Callable[[], None]) -> None:
        """A worker with data waits, which is noted."""
        if chair.seat.place.results >= results:
            go()
            return
        chair.waits_since.setdefault(results - 1, self._env.now)
        self._call_when(chair, results, go)

    def _call_when(self, chair: Chair, results: int, go: Callable[[], None]) -> None:
        chair.wanted, chair.wake = results, go
        self._call(chair)

    def _tell(self, rank: int, notice: Notice | None) -> None:
        if notice is None:
            return
        referee, now = self.referee, self._env.now
        self._begin(referee.hear(rank, notice, now), rank)
        at = now if referee.in_batches else referee.deadline_s
        if at is not None:  # not the clock's time then, which may be a rounding error before it
            self._after(at - now, lambda: self._begin(referee.tick(at), rank))
        if self.referee.all_finished and not self._flushing:
            self._flushing = True
            self._after(self._news_s, functools.partial(self._activated, self.referee.started, FLUSH, None))

    # Rounds.

    def _after(self, seconds: float, go: Callable[[], None]) -> None:
        self._env.timeout(seconds).callbacks.append(lambda _: go())

    def _begin(self, versions: Sequence[int], started_by: int) -> None:
        for version in versions:
            members = self.referee.members(version)
            self._after(self._news_s, functools.partial(self._activated, version, started_by, members))

    def _activated(self, version: int, started_by: int, members: tuple[int, ...] | None) -> None:
        if members is not None:
            self._known.append((version, members, started_by))
            self._go_on()
            return
        flush = started_by == FLUSH
        blocks: dict[int, tuple[int, ...]] = {}  # by their first rank: hashing a thousand ranks takes long
        for rank, chair in self.chairs.items():
            if rank not in blocks:
                block = chair.seat.members(version, flush)
                blocks.update(dict.fromkeys(block, block))
        firsts = sorted({block[0] for block in blocks.values()})
        self._known += [(version, blocks[first], started_by) for first in firsts]
        self._go_on()

    def _go_on(self) -> None:
        """Begin what is known and whose seats are all through with the round before.

        Blocks differ in size, so one may be through with round v while another, whose seats it needs in round v + 1,
        has not even begun v. By the clock alone, a seat could then have the two in the wrong order.
        """
        waiting, self._known = self._known, []
        for version, ranks, started_by in waiting:
            if all(self.chairs[r].seat.is_next(version) for r in ranks if r in self.chairs):
                self._sum(version, ranks, started_by)
            else:
                self._known.append((version, ranks, started_by))

    def _sum(self, version: int, ranks: tuple[int, ...], started_by: int) -> None:
        ranks = tuple(r for r in ranks if r in self.chairs)  # one that has died before it came has no seat
        flush, seats = started_by == FLUSH, {r: self.chairs[r].seat for r in ranks}
        if flush and not seats[ranks[0]].flushes:
            self._over(ranks)
            return
        given = {r: seat.snapshot(version, flush) for r, seat in seats.items()}
        absent = self._dead.difference(r for r, one in given.items() if one.share is not None)
        divisor, lost = seats[ranks[0]].divisor(ranks, absent), {r: self.chairs[r].channel.lost for r in ranks}
        value = summed(self.channel, given, self.chairs[ranks[0]].me, version, divisor, lost)
        seconds = 0.0
        leaders = [self.nodes.leader(r) for r in ranks if r not in absent]
        if leaders and (not flush or value is not None):
            seconds, sent = charge(self.channel, self.chairs[ranks[0]].me, self._network, leaders)
            self.bytes_sent += sent
        self._after(seconds, lambda: self._deliver(version, given, value, started_by))

    def _deliver(self, version: int, given: dict[int, Given], value: Vec | None, started_by: int) -> None:
        flush, shares = started_by == FLUSH, {r: g.share for r, g in given.items() if g.share is not None}
        value = self.channel.looks(self.chairs[next(iter(given))].me.x).zeros_like() if value is None else value
        members = len(given.keys() - self._dead.difference(shares))
        outcome = Outcome.of(self.nodes, version, value, shares, members, flush)
        delivered = {r: self.chairs[r].seat.deliver(outcome, one) for r, one in given.items()}
        if all(delivered[r] for r in delivered.keys() - self._dead):
            self._record(version, given, shares, started_by)
        if flush:
            self._over(given)
            return
        for r in given:
            self._call(self.chairs[r])
        for r in given:
            self._tell(r, self.chairs[r].seat.over())
        if self._waits_for_quiet:
            self._settle(given)  # before the next round begins
        self._go_on()  # after the calls: a worker without data answers with what it holds now

    def _over(self, ranks: Iterable[int]) -> None:
        for go in self._waits_for_quiet.values():
            self._after(0.0, go)
        self._waits_for_quiet.clear()
        for r in ranks:
            self.chairs[r].seat.flushed = True
        for r in ranks:
            self._call(self.chairs[r])

    def _call(self, chair: Chair) -> None:
        if chair.wake is not None and (chair.seat.results >= chair.wanted or chair.seat.flushed):
            wake, chair.wake = chair.wake, None
            wake()

    def _record(self, version: int, given: dict[int, Given], shares: dict[int, Freshness], started_by: int) -> None:
        """One record a round, written when the last of its blocks is through (which is in the order of the rounds)."""
        now = self._env.now
        chairs = {r: self.chairs[r] for r in given}
        waited = {r: now - chair.waits_since.pop(chair.seat.results - 1, now) for r, chair in chairs.items()}
        if not self._trace.keep_rounds:
            return
        notes = self._notes.setdefault(version, [])
        notes.append((shares, waited))
        everyone = self._size if self.channel.rules.pool is None else len(given)
        if sum(len(of_block) for _, of_block in notes) < everyone:
            return
        del self._notes[version]
        every = dict(sorted((r, share) for of_block, _ in notes for r, share in of_block.items()))
        waited_s = dict(sorted((r, s) for _, of_block in notes for r, s in of_block.items()))
        self._trace.rounds.append(Round.among(self.nodes, version, started_by, every, waited_s, now))

    @property
    def parts(self) -> list[object]:
        """Everything here that may hold calls of a worker that waits."""
        return [*self.chairs.values(), self]

    @property
    def lost(self) -> list[tuple[int, int]]:
        """(rank, step) of every gradient that was dropped; a node's are said of all its ranks, data or not."""
        lost = [(node, step) for node, chair in self.chairs.items() for step in chair.lost] + self._lost_before
        return sorted(self.nodes.spread_all(lost))

    def who_waits(self) -> dict[int, str]:
        """For each waiting worker, the round it waits for."""
        name = self.channel.name
        return {
            c.me.rank: f"for round {c.wanted - 1} of {name!r}, of which {self.referee.started} have started"
            for c in self.chairs.values()
            if c.wake is not None
        }


def summed(
    channel: Channel,
    given: dict[int, Given],
    me: Replica,
    version: int,
    divisor: int,
    lost: Mapping[int, Vec | None],
    homes: Sequence[int] = (),
) -> Vec | None:
    """The mean of what the members of a block give; None if nobody gives anything. ``lost``: what each has lost.
    ``homes``: the hosts of all ranks, where they are known."""
    vecs = {r: one.value for r, one in given.items() if one.value is not None}
    return mean_of_hosts(vecs, list(given), homes, divisor, channel.codec, (me.seed, version), lost)


def charge(channel: Channel, me: Replica, network: Network, leaders: list[int]) -> tuple[float, int]:
    """How long a round among these takes, and how many bytes it sends."""
    return sum_cost(network, leaders, channel.looks(me.x), channel.codec)
