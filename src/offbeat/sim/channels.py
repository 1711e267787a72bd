"""Partial collectives in virtual time.

A round goes: a worker arrives and the referee lets the round start; the news takes a while to reach the clerks; each
clerk takes a snapshot of its worker's tray; the blocks sum; the results arrive. Workers that arrive while the news is
still on its way are in time.

"Ranks" are those of nodes throughout: where every worker is a node of its own, the workers'.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import simpy

from offbeat.method.effects import Channel, Got
from offbeat.method.replica import Replica
from offbeat.rounds.place import Place
from offbeat.rounds.referee import Referee
from offbeat.rounds.tray import Deposit, Snapshot, Tray
from offbeat.runs.trace import Round, Trace
from offbeat.sim.network import Network, all_gather_bytes, all_reduce_bytes
from offbeat.tensors.codec import sent_to
from offbeat.tensors.sums import coded, mean, wire_bytes
from offbeat.tensors.vector import Vec
from offbeat.topology.hierarchy import Nodes


@dataclass
class _Seat:
    """One worker at the channel."""

    me: Replica
    tray: Tray
    place: Place
    results: dict[int, tuple[Vec, Snapshot, bool, dict[int, int], int]] = field(default_factory=dict)
    resting: bool = False
    wanted: int = 0  # results that must be there before `wake` is called
    wake: Callable[[], None] | None = None
    waits_since: dict[int, float] = field(default_factory=dict)  # round → since when it is waited for


class Partial:
    """One channel, all workers."""

    def __init__(
        self, channel: Channel, env: simpy.Environment, network: Network, trace: Trace, nodes: Nodes, seed: int
    ) -> None:
        self.channel, self.nodes, self._env, self._network, self._trace = channel, nodes, env, network, trace
        self._size = size = nodes.count
        self.referee = Referee(channel.rules, size, seed)
        self.seats: dict[int, _Seat] = {}
        self.bytes_sent = 0
        last = nodes.leader(size - 1)
        self._news_s = math.ceil(math.log2(size)) * network.latency(0, last) if size > 1 else 0.0
        self._started_by = 0
        self._in_flight = 0
        self._notes: dict[int, list[tuple[dict[int, Snapshot], dict[int, float]]]] = {}
        self._known: list[tuple[int, tuple[int, ...], int]] = []  # (round, block, started by) not under way yet
        self._flushing = False  # the last round is under way, or over
        self._flushed = False  # and nothing more can come

    def open(self, me: Replica, x: Vec | None) -> None:
        tray = Tray(self.channel.rules.absent)
        if x is not None:
            tray.deposit(x, Deposit(-1, 0))
        self.seats[self.nodes.of(me.rank)] = _Seat(me, tray, Place(self.channel.rules))

    # A worker with data.

    def offer(self, rank: int, x: Vec, step: int, answer: Callable[[list[Got]], None]) -> None:
        """Deposit, count or go on; ``answer`` is called when the worker may go on (perhaps at once)."""
        seat = self.seats[rank]
        if seat.place.must_wait_first():
            self._when(seat, seat.place.outstanding + 1, lambda: self.offer(rank, x, step, answer))
            return
        place, piece = seat.place, Deposit(step, seat.place.base)
        position = place.arrive(step)
        if position is None and self.channel.rules.absent == "drop":
            seat.tray.discard(piece)
        else:
            seat.tray.deposit(x, piece, place.weight())
        needed = place.waits_for(position)
        if position is None:
            self._start(rank, self.referee.passed(rank, piece.base))
        else:
            self._start(rank, self.referee.arrived(rank, position, piece.base))
        self._when(seat, needed, lambda: self._hand_over(seat, step, answer))

    def _hand_over(self, seat: _Seat, step: int, answer: Callable[[list[Got]], None]) -> None:
        taken = [self._got(seat, v) for v in seat.place.take(step)]
        rank = self.nodes.of(seat.me.rank)
        self._start(rank, self.referee.began(rank, seat.place.base))
        answer(taken)

    def _when(self, seat: _Seat, results: int, go: Callable[[], None]) -> None:
        if seat.place.results >= results:
            go()
        else:
            seat.wanted, seat.wake = results, go
            seat.waits_since.setdefault(results - 1, self._env.now)

    def _got(self, seat: _Seat, version: int) -> Got:
        value, shot, full, contributors, count = seat.results.pop(version)
        rules, tray = self.channel.rules, seat.tray
        fresh = shot.deposits >= tray.deposits - rules.late  # a late result knows nothing of the deposit just made
        if rules.absent == "shared":
            value = tray.show_into(value.clone())
        return Got(version, value, fresh, full, count, contributors)

    # A worker without data.

    def finished(self, rank: int) -> None:
        """It never counts again, so a quorum may be complete now."""
        self._start(rank, self.referee.finished(rank))
        self._maybe_flush()

    def rest(self, rank: int, x: Vec | None, answer: Callable[[Got | None], None]) -> None:
        """The next result, or None when nothing more can come."""
        seat = self.seats[rank]
        if x is not None:
            seat.tray.deposit(x, Deposit(-1, seat.place.taken))
            self._start(rank, self.referee.renewed(rank, seat.place.taken))
        seat.resting = True

        def go() -> None:
            if seat.place.taken < seat.place.results:
                version = seat.place.taken
                seat.place.taken = seat.place.base = version + 1
                answer(self._got(seat, version))
            else:
                answer(None)

        if seat.place.taken < seat.place.results or self._flushed:
            go()
        else:
            seat.wanted, seat.wake = seat.place.taken + 1, go
            self._maybe_flush()

    def _maybe_flush(self) -> None:
        """All have finished and no round is under way: one last round for what is still owed, then the end.

        Who has been given a result may be busy with it for a while, such as the leader of a node, and asks for the
        next one when the last round is under way: there is nothing more to come only when that is over.
        """
        over = self.referee.all_finished and not self._in_flight and not self._flushing
        if not over or not all(s.resting and s.place.taken == s.place.results for s in self.seats.values()):
            return
        self._flushing = True
        owed = {r: s.tray.snapshot(self.referee.started, made_for_it=False) for r, s in self.seats.items()}
        if not self.channel.rules.of_weights and any(s.value is not None for s in owed.values()):
            ranks = tuple(range(self._size))
            self._collect(self.referee.started, ranks, owed, started_by=-1)
        else:
            self._flushed = True
            for seat in self.seats.values():
                self._call(seat)

    # Rounds.

    def _start(self, rank: int, versions: list[int]) -> None:
        for version in versions:
            self._in_flight += 1
            self._after(self._news_s, functools.partial(self._activated, version, rank))

    def _after(self, seconds: float, go: Callable[[], None]) -> None:
        self._env.timeout(seconds).callbacks.append(lambda _: go())

    def _activated(self, version: int, started_by: int) -> None:
        W = self.channel.whom(version)
        if self.channel.rules.is_full(version):
            blocks = {tuple(range(self._size))}
        else:
            blocks = set()
            for rank in range(self._size):
                block = W.block(rank)
                if block is None:
                    raise ValueError(f"partial rounds average within groups, but round {version} mixes along {W}")
                blocks.add(block)
        self._in_flight += len(blocks) - 1
        self._known += [(version, ranks, started_by) for ranks in sorted(blocks)]
        self._go_on()

    def _go_on(self) -> None:
        """Begin what is known and whose clerks are all through with the round before.

        Blocks differ in size, so one may be through with round v while another, whose clerks it needs in round v + 1,
        has not even begun v. A clerk that went by the clock alone could then run the two in the wrong order.
        """
        waiting, self._known = self._known, []
        for version, ranks, started_by in waiting:
            if all(self.seats[r].place.results == version for r in ranks):
                self._snapshot(version, ranks, started_by)
            else:
                self._known.append((version, ranks, started_by))

    def _snapshot(self, version: int, ranks: tuple[int, ...], started_by: int) -> None:
        shots = {}
        for r in ranks:
            seat = self.seats[r]
            pieces = seat.tray.pieces
            made_for_it = bool(pieces) and seat.place.made_for(version, pieces[-1].base)
            shots[r] = seat.tray.snapshot(version, made_for_it)
        self._collect(version, ranks, shots, started_by)

    def _collect(self, version: int, ranks: tuple[int, ...], shots: dict[int, Snapshot], started_by: int) -> None:
        codec, me = sent_to(self.channel.codec, len(ranks) - 1), self.seats[0].me
        like = me.x
        nbytes = wire_bytes(like, codec)
        leaders = [self.nodes.leader(r) for r in ranks]
        if codec is None:
            seconds = self._network.all_reduce_s(leaders, nbytes)
            self.bytes_sent += all_reduce_bytes(len(ranks), nbytes)
        else:
            seconds = self._network.all_gather_s(leaders, nbytes)
            self.bytes_sent += all_gather_bytes(len(ranks), nbytes)
        vecs = [(r, v) for r in ranks if (v := shots[r].value) is not None]
        if codec is not None:
            vecs = [(r, coded(v, codec, (me.seed, r, version))) for r, v in vecs]
        divisor = len(ranks) if self.channel.rules.of_weights else self._size
        value = mean([v for _, v in vecs], divisor) if vecs else like.zeros_like()
        self._after(seconds, lambda: self._deliver(version, ranks, shots, value, started_by))

    def _deliver(
        self, version: int, ranks: tuple[int, ...], shots: dict[int, Snapshot], value: Vec, started_by: int
    ) -> None:
        self._record(version, ranks, shots, started_by)
        full = self.channel.rules.is_full(version) or started_by < 0
        ages = {r: age for r in ranks if (age := shots[r].staleness(version)) is not None}
        contributors = self.nodes.spread(ages)
        for r in ranks:
            seat = self.seats[r]
            if self.channel.rules.absent == "shared":
                seat.tray.adopt(value)
            seat.results[version] = (value, shots[r], full, contributors, len(ranks))
            seat.place.results = version + 1
        if started_by >= 0:
            self._in_flight -= 1
        else:
            self._flushed = True
        for r in ranks:
            self._call(self.seats[r])
        self._go_on()  # after the calls: a worker without data answers with what it holds now
        self._maybe_flush()

    def _call(self, seat: _Seat) -> None:
        if seat.wake is not None and (seat.place.results >= seat.wanted or self._flushed):
            wake, seat.wake = seat.wake, None
            wake()

    def _record(self, version: int, ranks: tuple[int, ...], shots: dict[int, Snapshot], started_by: int) -> None:
        """One record a round, written when the last of its blocks is through (which is in the order of the rounds)."""
        now = self._env.now
        waited = {r: now - self.seats[r].waits_since.pop(version, now) for r in ranks}
        if not self._trace.keep_rounds:
            return
        notes = self._notes.setdefault(version, [])
        notes.append((shots, waited))
        if sum(len(of_block) for of_block, _ in notes) < self._size:
            return
        del self._notes[version]
        every = sorted(((r, shot) for of_block, _ in notes for r, shot in of_block.items()), key=lambda pair: pair[0])
        staleness = {r: s for r, shot in every if (s := shot.staleness(version)) is not None}
        fresh = tuple(r for r, shot in every if shot.fresh(version, self.channel.rules.catch_up))
        waited_s = dict(sorted((r, s) for _, of_block in notes for r, s in of_block.items()))
        record = Round(version, started_by, fresh, staleness, waited_s, now)
        self._trace.rounds.append(record.spread_over(self.nodes))

    @property
    def parts(self) -> list[object]:
        """Everything here that may hold calls of a worker that waits."""
        return [*self.seats.values(), self]

    @property
    def lost(self) -> list[tuple[int, int]]:
        """(rank, step) of every gradient that was dropped; a node's are said of all its ranks, data or not."""
        lost = [(node, p.step) for node, seat in self.seats.items() for p in seat.tray.lost]
        return sorted((rank, step) for node, step in lost for rank in self.nodes.ranks(node))

    def who_waits(self) -> dict[int, str]:
        """For each waiting worker, the round it waits for."""
        name = self.channel.name
        return {
            s.me.rank: f"for round {s.wanted - 1} of {name!r}, of which {self.referee.started} have started"
            for s in self.seats.values()
            if s.wake is not None
        }
