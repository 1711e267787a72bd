"""A channel in the order of a record: the same seats as ever, but no referee and no clock decides."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import simpy

from offbeat.method.effects import Channel
from offbeat.method.replica import Replica
from offbeat.rounds.seat import THROUGH, Given, Got, Outcome, Seat
from offbeat.runs.order import Event
from offbeat.runs.trace import Round, Trace
from offbeat.sim.channels import charge, summed
from offbeat.sim.network import Network
from offbeat.sim.replay.mismatch import refuse
from offbeat.tensors.vector import Vec
from offbeat.topology.hierarchy import Nodes

_OF_ITS_OWN = ("offer", THROUGH, "take", "finish", "next", "stand", "catch up")  # what a worker comes to in its turn


@dataclass
class _Chair:
    """A seat, its list, and what its worker asks for."""

    me: Replica
    seat: Seat
    channel: Channel
    events: deque[Event]
    offers: tuple[int, Vec] | None = None  # step and work that it wants to deposit
    heard_of_later: tuple[int, Vec] | None = None  # those it has gone on from before its list has them
    takes: int | None = None  # the step after which it waits for results
    upto: int | None = None  # those that it had heard of, where it looks ahead
    rests: bool = False
    stands: bool = False  # for an average of all
    # What is to answer for it from now on, in the order in which it said so. Its list may come to that later: after an
    # average a worker goes on, and may rest, before the rounds are over that its list has first.
    renews: deque[Vec] = field(default_factory=deque)
    finishes: bool = False
    answer: Callable[[Any], None] | None = None
    out: tuple[int, tuple[int, ...]] | None = None  # the round its snapshot is in, and the block
    stood: Vec | None = None  # the weights it has come to an average with


class ReplayedChannel:
    """One channel, all workers, in the order of a record. ``homes``: the hosts of all nodes, where they are known."""

    def __init__(
        self,
        channel: Channel,
        env: simpy.Environment,
        network: Network,
        trace: Trace,
        nodes: Nodes,
        events: Sequence[Sequence[Event]],
        stood: Callable[[int], None],
        homes: Sequence[int] = (),
    ) -> None:
        self.channel, self.nodes, self._env, self._network, self._trace = channel, nodes, env, network, trace
        self.chairs: dict[int, _Chair] = {}
        self.bytes_sent = 0
        self._events = events
        self._pools = self._found_pools() if channel.rules.pool is not None else None
        self._given: dict[tuple[int, tuple[int, ...]], dict[int, Given]] = defaultdict(dict)
        self._outcomes: dict[tuple[int, tuple[int, ...]], Outcome] = {}  # of blocks that are through
        self._left: dict[tuple[int, tuple[int, ...]], int] = {}  # how many of a block have not been given its mean
        self._stood, self._homes = stood, homes
        self._goes_on = False

    def _found_pools(self) -> dict[int, tuple[int, ...]]:
        """Where a round is made of those who were there, it is made of those on whose lists it is."""
        found: dict[int, list[int]] = defaultdict(list)
        for node in range(self.nodes.count):
            for what, number in self._events[self.nodes.leader(node)]:
                if what == "snapshot":
                    found[number].append(node)
        return {version: tuple(members) for version, members in found.items()}

    def open(self, me: Replica, channel: Channel, x: Vec | None) -> None:
        rank = self.nodes.of(me.rank)
        seat = Seat(channel.rules, channel.whom, self.nodes, rank, x)
        self.chairs[rank] = _Chair(me, seat, channel, deque(self._events[me.rank]))

    # The worker.

    def offer(self, rank: int, x: Vec, step: int, answer: Callable[[list[Got]], None]) -> None:
        chair = self.chairs[rank]
        chair.offers, chair.answer = (step, x), answer
        self._go_on()

    def through(self, rank: int, step: int, answer: Callable[[bool], None]) -> None:
        """Whether it was: then its list says so, before it comes to a deposit, to an average or to its end.

        What stands before that may have to wait for others: a result, and what answers for it after an average.
        """
        chair = self.chairs[rank]
        passed = None if chair.heard_of_later is None else ("offer", chair.heard_of_later[0])
        own = (event for event in chair.events if event[0] in (THROUGH, "offer", "finish", "stand") and event != passed)
        found = next(own, None) == (THROUGH, step)
        if found:
            chair.events.remove((THROUGH, step))
            self._go_on()
        answer(found)

    def finished(self, rank: int) -> None:
        self.chairs[rank].finishes = True
        self._go_on()

    def rest(self, rank: int, x: Vec | None, answer: Callable[[Got | None], None]) -> None:
        chair = self.chairs[rank]
        chair.rests, chair.answer = True, answer
        if x is not None:
            chair.renews.append(x)
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
        while chair.events and (self._went_on(chair) or self._done(rank, chair, chair.events[0])):
            moved = True
        if not chair.events and chair.rests and chair.finishes:
            chair.rests = False
            chair.seat.flushed = True
            self._answer(chair, None)
        return moved

    def _went_on(self, chair: _Chair) -> bool:
        """Let a worker that looks ahead go on with what it was shown, before its list has its deposit.

        It has gone on when it laid its work down, and that was heard of later. Until then it may have come to another
        channel, whose rounds were what let others come to the next round of this one.
        """
        if chair.offers is None or chair.heard_of_later is not None:
            return False
        step, x = chair.offers
        before = list(takewhile(lambda event: event != ("offer", step), chair.events))
        what, upto = chair.events[len(before) + 1] if len(before) + 1 < len(chair.events) else ("", 0)
        to_be_shown = chair.seat.heard_of < upto or any(event == "show" and count <= upto for event, count in before)
        if what != "upto" or to_be_shown or any(event in _OF_ITS_OWN for event, _ in before):
            return False
        chair.offers, chair.heard_of_later = None, (step, x.clone())
        self._answer(chair, chair.seat.as_shown(upto, x))
        return True

    def _done(self, rank: int, chair: _Chair, event: Event) -> bool:
        """Do what is next, if it can be done now."""
        (what, number), seat = event, chair.seat
        if chair.stood is not None and what not in ("snapshot", "flush", "result"):
            return False  # its worker stands until all have been made equal; rounds go on
        match what:
            case "offer":
                deposit = chair.heard_of_later or chair.offers
                if deposit is None:
                    return self._waits(rank, chair, event)
                step, x = deposit
                if step != number or seat.results < seat.needs_first:
                    raise refuse(rank, event, f"step {step} comes next")
                chair.events.popleft()
                chair.upto = chair.events.popleft()[1] if chair.events and chair.events[0][0] == "upto" else None
                seat.offer(x, step, chair.upto)
                chair.takes = step
                if chair.heard_of_later is None:
                    chair.offers = None
            case "through":
                return self._waits(rank, chair, event)  # its worker looks, and strikes it off
            case "show":
                if seat.results != number:
                    raise refuse(rank, event, f"{seat.results} results are there")
                chair.events.popleft()
                seat.show()
            case "take":
                if chair.takes != number or seat.results < seat.needs:
                    raise refuse(rank, event, f"{seat.results} results are there and {seat.needs} are needed")
                chair.events.popleft()
                chair.takes, taken = None, seat.take(number, chair.upto)
                if chair.heard_of_later is not None:
                    chair.heard_of_later = None
                else:
                    self._answer(chair, taken)
            case "finish":
                if not chair.finishes:
                    return self._waits(rank, chair, event)
                chair.events.popleft()
                seat.finish()
            case "renew":
                ends = chair.finishes and not seat.has_finished  # what it has left
                if not (chair.rests or chair.stands or chair.renews or ends):
                    return self._waits(rank, chair, event)
                chair.events.popleft()
                seat.renew(chair.renews.popleft() if chair.renews else chair.channel.holds())
            case "next":
                if not (chair.rests or chair.stands):
                    return self._waits(rank, chair, event)
                got = seat.next()
                if got is None or got.version != number:
                    raise refuse(rank, event, "that result is not the next one")
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
                raise refuse(rank, event, "this version knows nothing of that")
        return True

    def _waits(self, rank: int, chair: _Chair, event: Event) -> bool:
        """Whether its worker may still come to that; if it has come to something else, the record is wrong."""
        asks = chair.offers is not None or chair.rests
        if asks:
            raise refuse(rank, event, "its worker " + ("deposits a step" if chair.offers is not None else "rests"))
        return False

    def _answer(self, chair: _Chair, value: object) -> None:
        answer, chair.answer = chair.answer, None
        assert answer is not None
        answer(value)

    # Rounds.

    def _snapshot(self, rank: int, chair: _Chair, version: int, flush: bool) -> None:
        seat = chair.seat
        block = seat.members(version, flush) if self._pools is None else self._pools[version]
        chair.out = (version, block)
        given = self._given[version, block]
        given[rank] = seat.snapshot(version, flush)
        if len(given) < len(block):
            return
        self._given[version, block] = ordered = {r: given[r] for r in block}
        me = self.chairs[block[0]].me
        lost = {r: self.chairs[r].channel.lost for r in block}
        value = summed(self.channel, ordered, me, version, seat.divisor(block), lost, self._homes)
        seconds, sent = charge(self.channel, me, self._network, [self.nodes.leader(r) for r in block])
        self.bytes_sent += sent

        def through(_: object) -> None:
            total = self.channel.looks(me.x).zeros_like() if value is None else value
            shares = {r: one.share for r, one in ordered.items() if one.share is not None}
            self._outcomes[version, block] = Outcome.of(self.nodes, version, total, shares, len(block), flush)
            self._left[version, block] = len(block)
            self._go_on()

        self._env.timeout(seconds).callbacks.append(through)

    def _deliver(self, rank: int, chair: _Chair, event: Event) -> bool:
        if chair.out is None or chair.out[0] != event[1]:
            raise refuse(rank, event, "no snapshot was taken for it")
        version, block = chair.out
        key = (version, block)
        if key not in self._outcomes:
            return False
        chair.events.popleft()
        chair.out = None
        outcome = self._outcomes[key]
        chair.seat.deliver(outcome, self._given[key][rank])
        self._left[key] -= 1
        if not self._left[key]:
            if self._trace.keep_rounds:
                waited, now = dict.fromkeys(block, 0.0), self._env.now
                self._trace.rounds.append(Round.among(self.nodes, version, block[0], outcome.shares, waited, now))
            del self._outcomes[key], self._given[key], self._left[key]
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
        held = chair.channel.holds()
        # A copy: its list may first have a round in which it answers with what it had before, and the worker goes on.
        if shared:
            chair.renews.append(chair.me.x - chair.stood)
        elif held is not None:
            chair.renews.append(held.clone())
        chair.stood = None
        self._go_on()

    @property
    def parts(self) -> list[object]:
        return [*self.chairs.values(), self]

    @property
    def lost(self) -> list[tuple[int, int]]:
        lost = ((node, step) for node, chair in self.chairs.items() for step in chair.seat.lost)
        return sorted(self.nodes.spread_all(lost))

    def who_waits(self) -> dict[int, str]:
        """For each worker whose list is not at its end, what it would be next."""
        return {
            chair.me.rank: f"for what the record says next: {chair.events[0][0]} of {chair.events[0][1]}"
            for chair in self.chairs.values()
            if chair.events
        }
