"""Exchanges in virtual time: who must be there, when the result arrives, what it holds, how many bytes were sent."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import simpy

from offbeat.method.effects import GradMix, Mix, Ticket
from offbeat.method.replica import Replica
from offbeat.runs.trace import Round, Trace
from offbeat.sim.costs import sum_cost
from offbeat.sim.network import Network
from offbeat.tensors.codec import Codec, sent_to
from offbeat.tensors.houses import mean_of_hosts
from offbeat.tensors.sums import coded, keep, mean, owing, weighted
from offbeat.tensors.vector import Vec
from offbeat.tensors.wire import message_bytes
from offbeat.topology import Mixing

BUCKET_BYTES = 25 * 2**20  # DDP's, and the live world's
FORWARD = 1 / 3  # of a step's computation; gradients appear during the rest


class Pending(Ticket[Vec]):
    """One worker's stake in an exchange."""

    __slots__ = ("arrived", "asked_s", "rank", "then", "together_s", "value", "waiter")

    def __init__(self, rank: int, asked_s: float) -> None:
        self.rank, self.asked_s = rank, asked_s
        self.arrived = False
        self.value: Vec | None = None
        self.waiter: object = None
        self.then: list[Callable[[], None]] = []  # called, besides, when it has arrived
        self.together_s = asked_s  # when everybody was there: before it is waiting, after it communication

    def known(self) -> Pending:
        """What has come of it, for a twin."""
        assert self.arrived
        made = Pending(self.rank, self.asked_s)
        made.arrived, made.value = True, None if self.value is None else self.value.clone()
        return made


@dataclass
class _Block:
    """A uniform average among some ranks: over when the last one is there."""

    ranks: tuple[int, ...]
    x: dict[int, Vec] = field(default_factory=dict)
    lost: dict[int, Vec | None] = field(default_factory=dict)
    starts: dict[int, tuple[float, float, Callable[[], Vec] | None]] = field(default_factory=dict)
    pending: dict[int, Pending] = field(default_factory=dict)
    asked: tuple[Replica, int, Mix | GradMix] | None = None  # by the last of them: of this exchange

    @property
    def there(self) -> tuple[int, ...]:
        """All of them, but those who have died before."""
        return tuple(r for r in self.ranks if r in self.x or r in self.starts)


@dataclass
class _Gossip:
    """Messages along a graph: each worker goes on when its own neighbours' have come."""

    due: int  # how many take part: whoever averages in a block, or keeps its own, does not come here
    x: dict[int, Vec] = field(default_factory=dict)
    arrival_s: dict[tuple[int, int], float] = field(default_factory=dict)
    pending: dict[int, Pending] = field(default_factory=dict)
    W: dict[int, Mixing] = field(default_factory=dict)
    waited_s: dict[int, float] = field(default_factory=dict)
    collected: set[int] = field(default_factory=set)
    last: int = 0


class Exchanges:
    """All exchanges under way. The n-th mix of a worker belongs to exchange n. ``homes``: the hosts of all workers,
    where they are known."""

    def __init__(
        self,
        env: simpy.Environment,
        network: Network,
        trace: Trace,
        arrived: Callable[[Pending], None],
        homes: Sequence[int] = (),
    ) -> None:
        self._env, self._network, self._trace, self._arrived = env, network, trace, arrived
        self.keeps_rounds, self._homes = trace.keep_rounds, homes
        self._blocks: dict[tuple[int, int], _Block] = {}
        self._gossips: dict[int, _Gossip] = {}
        self._overlapping: list[_Block] = []  # of gradients that are still being made
        self._dead: set[int] = set()
        self._someone_died = False
        self._last: dict[int, int] = {}  # the number of the exchange to which a worker has come last
        self.bytes_sent = 0

    def mix(self, me: Replica, seq: int, effect: Mix, begun: bool) -> Pending:
        """Worker ``me`` posts its share of exchange ``seq``. What goes on changing (``begun``) is copied now."""
        rank, pending = me.rank, Pending(me.rank, self._env.now)
        self._last[rank] = seq
        codec, ranks = sent_to(effect.codec, effect.W.audience(rank)), effect.W.block(rank)
        x = effect.x
        if codec is not None and not (ranks is not None and effect.in_two_phases(rank)):
            wanted = owing(x, effect.lost)
            x = coded(wanted, codec, (me.seed, rank, seq))
            keep(effect.lost, wanted, x)
        if ranks == (rank,):
            pending.value, pending.arrived = (x.clone() if begun else x), True
        elif ranks is not None:
            block = self._block(seq, ranks)
            if rank not in block.x:  # else it had died after that
                block.x[rank], block.lost[rank] = x.clone() if begun and x is effect.x else x, effect.lost
            block.pending[rank] = pending
            block.asked = me, seq, effect
            self._begin_if_all_are_there(block)
        else:
            self._gossip(me, seq, effect, x if x is not effect.x else x.clone(), pending)
        return pending

    def gradient(
        self,
        me: Replica,
        seq: int,
        effect: GradMix,
        start_s: float,
        compute_s: float,
        gradient: Callable[[], Vec] | None,
    ) -> Pending:
        """Worker ``me`` begins to compute a gradient that is averaged while it appears (``None``: it has no data)."""
        ranks = effect.W.block(me.rank)
        if ranks is None:
            row = effect.W.row(me.rank)
            raise ValueError(f"gradients are averaged among whole groups, but rank {me.rank}'s row is {row}")
        pending = Pending(me.rank, start_s + compute_s)
        self._last[me.rank] = seq
        block = self._block(seq, ranks)
        block.pending[me.rank] = pending
        if block.starts.get(me.rank, (0.0, 0.0, None))[2] is None:  # else it had died after that
            block.starts[me.rank] = (start_s, compute_s, gradient)
        block.asked = me, seq, effect
        self._begin_if_all_are_there(block)
        return pending

    def _begin_if_all_are_there(self, block: _Block) -> None:
        assert block.asked is not None
        me, seq, effect = block.asked
        if len(block.pending) < len(block.ranks):
            missing = set(block.ranks) - block.pending.keys() - self._dead
            if any(self._will_come(seq, rank) for rank in missing):
                return
        if isinstance(effect, Mix):
            self._average(me, seq, block, effect)
        else:
            self._overlap(me, seq, block, effect.codec, effect.gathers)

    def died(self, rank: int) -> None:
        """What it has posted counts; a gradient that it was still computing does not."""
        self._dead.add(rank)
        self._someone_died = True
        for block in [*self._blocks.values(), *self._overlapping]:
            start, compute, _ = block.starts.get(rank, (0.0, 0.0, None))
            if rank in block.starts and start + compute > self._env.now:
                block.starts[rank] = (self._env.now, 0.0, None)
        for block in list(self._blocks.values()):
            if block.pending.keys() - self._dead:
                self._begin_if_all_are_there(block)
        for seq, gossip in list(self._gossips.items()):
            self._count_due(seq, gossip)
            for receiver in list(gossip.pending):
                if receiver not in gossip.collected and receiver not in self._dead:
                    self._collect_if_all_are_there(seq, gossip, receiver)
            if len(gossip.waited_s) == gossip.due:
                self._forget(seq, gossip)

    def revive(self, rank: int, seq: int) -> None:
        """One that had died comes again, to exchange ``seq`` and those after it. What it had posted before, to some of
        them too, is the dead one's, and counts as that: no exchange has two parts of a worker.
        """
        self._dead.discard(rank)
        self._last[rank] = seq - 1
        for block in [*self._blocks.values(), *self._overlapping]:
            start_s, compute_s, gradient = block.starts.get(rank, (0.0, 0.0, None))
            if gradient is not None:  # it lies where the other one's will
                block.starts[rank] = start_s, compute_s, functools.partial(_same, gradient().clone())
            if rank in block.x:
                block.x[rank] = block.x[rank].clone()
        for (number, _), block in self._blocks.items():
            if number >= seq:
                block.pending.pop(rank, None)
        for number, gossip in self._gossips.items():
            gossip.pending.pop(rank, None)
            gossip.collected.discard(rank)
            if number >= seq:
                gossip.waited_s.pop(rank, None)
            self._count_due(number, gossip)

    def _will_come(self, seq: int, rank: int) -> bool:
        """The dead never do, nor who has gone past: it was there while others were dead."""
        return rank not in self._dead and self._last.get(rank, -1) < seq

    def _block(self, seq: int, ranks: tuple[int, ...]) -> _Block:
        key = (seq, ranks[0])  # blocks are disjoint, so the first rank names one; hashing a thousand ranks takes long
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = _Block(ranks)
        elif block.ranks is not ranks and block.ranks != ranks:
            raise ValueError(f"workers disagree on exchange {seq}: it is among {block.ranks} and among {ranks}")
        return block

    def _average(self, me: Replica, seq: int, block: _Block, effect: Mix) -> None:
        del self._blocks[seq, block.ranks[0]]
        ranks, codec = block.there, effect.codec
        value: Vec | None
        if codec is not None and effect.gathers:  # every worker has coded its own
            value = mean([block.x[r] for r in ranks], len(ranks))
        else:
            key = (me.seed, seq)
            value = mean_of_hosts(block.x, ranks, self._homes, len(ranks), codec, key, block.lost)
        seconds, sent = sum_cost(self._network, ranks, effect.x, codec, effect.gathers)
        self.bytes_sent += sent
        self._deliver(seq, block, self._env.now, seconds, lambda: value)

    def _overlap(self, me: Replica, seq: int, block: _Block, codec: Codec | None, gathers: bool) -> None:
        del self._blocks[seq, block.ranks[0]]
        ranks, starts = block.there, list(block.starts.values())
        codec = sent_to(codec, len(ranks) - 1)
        nbytes = message_bytes(me.x, codec)
        buckets = 1 if codec else max(1, math.ceil(nbytes / BUCKET_BYTES))
        seconds, sent = sum_cost(self._network, ranks, me.x, codec, gathers)
        if codec is None:
            seconds = self._network.all_reduce_s(ranks, nbytes / buckets)
        ready_s = [
            max(start + compute * (FORWARD + (1 - FORWARD) * (k + 1) / buckets) for start, compute, _ in starts)
            for k in range(buckets)
        ]
        over_s = 0.0
        for ready in ready_s:  # one after the other, each when every worker has its share of it
            over_s = max(over_s, ready) + seconds
        self.bytes_sent += sent
        self._overlapping.append(block)

        def value() -> Vec | None:
            self._overlapping.remove(block)
            gradients = {r: g() for r in ranks if (g := block.starts[r][2]) is not None}
            if codec is None or not gathers:
                return mean_of_hosts(gradients, ranks, self._homes, len(gradients), codec, (me.seed, seq))
            own = [coded(g, codec, (me.seed, r, seq)) for r, g in gradients.items()]
            return mean(own, len(own)) if own else None

        self._deliver(seq, block, ready_s[-1], over_s - self._env.now, value)

    def _deliver(
        self, seq: int, block: _Block, together_s: float, seconds: float, value: Callable[[], Vec | None]
    ) -> None:
        last = next(reversed(block.pending))

        def arrive(_: object) -> None:
            result, now = value(), self._env.now
            ordered = [block.pending[r] for r in block.there if r in block.pending]
            if self.keeps_rounds:
                waited = {p.rank: max(0.0, now - p.asked_s) for p in ordered}
                self._trace.rounds.append(Round(seq, last, block.there, dict.fromkeys(block.there, 0), waited, now))
            for pending in ordered:
                pending.value, pending.arrived, pending.together_s = result, True, together_s
            for pending in ordered:
                self._arrived(pending)

        self._env.timeout(max(0.0, seconds)).callbacks.append(arrive)

    def _gossip(self, me: Replica, seq: int, effect: Mix, x: Vec, pending: Pending) -> None:
        rank, now, W = me.rank, self._env.now, effect.W
        gossip = self._gossips.get(seq)
        if gossip is None:
            gossip = self._gossips[seq] = _Gossip(sum(W.block(r) is None for r in range(W.size)))
            gossip.W[rank] = W
            if self._someone_died:
                self._count_due(seq, gossip)
                gossip.due += 1  # this one, which has come to it
        nbytes = message_bytes(effect.x, effect.codec)
        gossip.x.setdefault(rank, x)
        gossip.W[rank], gossip.pending[rank], gossip.last = W, pending, rank
        leaves_s = now
        for receiver in W.receivers(rank):
            latency = self._network.latency(rank, receiver)
            leaves_s += self._network.send_s(rank, receiver, nbytes) - latency
            gossip.arrival_s[rank, receiver] = leaves_s + latency
            self.bytes_sent += nbytes
        for receiver in (rank, *W.receivers(rank)):
            if receiver in gossip.pending and receiver not in gossip.collected:
                self._collect_if_all_are_there(seq, gossip, receiver)

    def _collect_if_all_are_there(self, seq: int, gossip: _Gossip, rank: int) -> None:
        W, pending = gossip.W[rank], gossip.pending[rank]
        senders = [s for s in W.senders(rank) if s in gossip.x or self._will_come(seq, s)]
        if any(s not in gossip.x for s in senders):
            return
        gossip.collected.add(rank)
        over_s = max((gossip.arrival_s[s, rank] for s in senders), default=self._env.now)
        together_s = self._env.now

        def arrive(_: object) -> None:
            if rank in self._dead or gossip.pending.get(rank) is not pending:
                return
            own = gossip.x[rank]  # has the weight of those who had died before
            pending.value = weighted((w, gossip.x.get(j, own)) for j, w in W.row(rank).items())
            pending.arrived, pending.together_s = True, together_s
            gossip.waited_s[rank] = max(0.0, self._env.now - pending.asked_s)
            if len(gossip.waited_s) == gossip.due:
                self._forget(seq, gossip)
            self._arrived(pending)

        self._env.timeout(max(0.0, over_s - self._env.now)).callbacks.append(arrive)

    def _count_due(self, seq: int, gossip: _Gossip) -> None:
        """How many have been through it, or will be."""
        W = next(iter(gossip.W.values()))
        still = (r for r in range(W.size) if r not in gossip.waited_s and W.block(r) is None)
        waits = sum((r in gossip.pending and r not in self._dead) or self._will_come(seq, r) for r in still)
        gossip.due = len(gossip.waited_s) + waits

    def _forget(self, seq: int, gossip: _Gossip) -> None:
        del self._gossips[seq]
        if self.keeps_rounds:
            ranks = tuple(sorted(gossip.waited_s))
            staleness = dict.fromkeys(ranks, 0)
            self._trace.rounds.append(Round(seq, gossip.last, ranks, staleness, gossip.waited_s, self._env.now))

    def missing(self) -> dict[int, list[int]]:
        """For each rank that waits: the ranks that have not come."""
        out: dict[int, list[int]] = {}
        for block in self._blocks.values():
            for rank in block.pending:
                out[rank] = [r for r in block.ranks if r not in block.pending]
        for gossip in self._gossips.values():
            for rank, pending in gossip.pending.items():
                if not pending.arrived:
                    out[rank] = [s for s in gossip.W[rank].senders(rank) if s not in gossip.x]
        return out


def _same(value: Vec) -> Vec:
    return value
