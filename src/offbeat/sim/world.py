"""Virtual time: one process that runs every worker's method and answers its requests.

SimPy keeps the clock and the queue of events. A worker is its coroutine; it is resumed with ``send`` when the answer to
its request is there. Events of the same instant run in the order they were scheduled, so a run is a pure function of
its arguments.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import simpy

from offbeat.delays.faults import Event
from offbeat.method.effects import (
    Add,
    Batch,
    Begin,
    Channel,
    Effect,
    Finish,
    Grad,
    GradMix,
    Meet,
    Mix,
    Next,
    Offer,
    OnlyOurs,
    Open,
    Rest,
    Retire,
    Share,
    Spent,
    Through,
    Ticket,
    Turn,
    not_ours,
)
from offbeat.method.replica import Replica
from offbeat.runs.absences import Absence
from offbeat.runs.trace import Trace
from offbeat.sim.clock import ChannelOfAll, Decides
from offbeat.sim.exchanges import Exchanges, Pending
from offbeat.sim.leaders import NodesPartial
from offbeat.sim.network import Network
from offbeat.sim.workers import Crowd, Work, Worker
from offbeat.tensors.vector import Vec
from offbeat.topology.hierarchy import Nodes

_LATER = object()  # an answer that comes with a later event


@contextlib.contextmanager
def _only_new_garbage() -> Iterator[None]:
    """Keep Python's collector from walking the million objects that importing torch left, again and again."""
    frozen = gc.get_freeze_count() == 0
    if frozen:
        gc.freeze()
    try:
        yield
    finally:
        if frozen:
            gc.unfreeze()


class Deadlock(RuntimeError):
    """No event is left, and workers still wait."""


class World:
    """Drives all workers until all have ended."""

    def __init__(
        self,
        replicas: list[Replica],
        body: Callable[[Replica], Coroutine[Effect[Any], Any, None]],
        more: Callable[[int, int, float], bool],
        work: Work,
        network: Network,
        trace: Trace,
        retired: Callable[[int], None],
        decides: Decides,
        twin: Callable[[int, int], tuple[Replica, float]] | None = None,
    ) -> None:
        """``twin``: a rank's replica that is another one's by now, and how long that takes to be there."""
        self.env = simpy.Environment()
        self.workers = [Worker(me, body(me)) for me in replicas]
        self._returned: list[Absence] = []
        self._body, self._twin = body, twin
        self._returning: list[int] = []  # those who wait for a member that is between two steps
        self.trace = trace
        self.wait_s = [0.0] * len(replicas)
        self.exchanges = Exchanges(self.env, network, trace, self._arrived, decides.homes)
        self.partials: dict[str, ChannelOfAll | NodesPartial] = {}
        self.shared = decides.shared(self.env, network, trace, self._arrived)
        self._micro = decides.streams(self.env, network, work, trace, len(replicas))
        self._decides = decides
        self._network = network
        self._more, self._work, self._retired = more, work, retired
        self._done = 0
        self._crowds: dict[tuple[int, ...] | None, Crowd] = {None: Crowd(len(replicas))}
        self._answer: dict[type, Callable[[Worker, Any], object]] = {
            Next: self._next,
            Grad: self._grad,
            GradMix: self._grad_mix,
            Batch: self._batch,
            Spent: self._spent,
            Mix: self._mix,
            Begin: self._begin,
            Finish: self._finish,
            Open: self._open,
            Offer: self._offer,
            Through: self._through,
            Rest: self._rest,
            Share: lambda worker, effect: self.shared.share(worker.me, effect.x),
            Meet: lambda worker, effect: self._finish(worker, Finish(self.shared.meet(worker.rank, effect.peer))),
            Add: self._add,
            Retire: self._retire,
        }

    def run(self) -> None:
        """To the end, or to a sentence that says why there is none."""
        with _only_new_garbage(), OnlyOurs():
            for worker in self.workers:
                self._resume(worker, None)
            self.env.run()
        if any(not w.ended for w in self.workers):
            raise Deadlock(self._who_waits_for_whom())

    def close(self) -> None:
        """Let go of everything, whether the run has ended or failed.

        A world is full of circles: its parts call it back, the clock's queue holds calls that hold the clock, workers
        that wait hold what they wait for. Python's collector would find them some time, and until then every replica
        of every worker stays in memory. So all circles are cut here: nothing is left in any part.
        """
        for worker in self.workers:
            worker.coroutine.close()
            worker.counts_in.clear()
        of_channels = [part for partial in self.partials.values() for part in partial.parts]
        for part in (*of_channels, self._decides, self._micro, self.shared, self.exchanges, self.env, self):
            vars(part).clear()

    @property
    def bytes_sent(self) -> int:
        """By all workers, in all kinds of exchange."""
        return self.exchanges.bytes_sent + self.shared.bytes_sent + sum(p.bytes_sent for p in self.partials.values())

    @property
    def absences(self) -> tuple[Absence, ...]:
        """In the order of the deaths."""
        gone = [Absence(one.rank, one.finished_s, lost=one.lost, cut=one.is_cut) for one in self.workers if one.is_dead]
        return tuple(sorted([*self._returned, *gone], key=lambda one: (one.died_s, one.rank)))

    def every(self, seconds: float, look: Callable[[float], None]) -> None:
        """Call ``look`` every so often while anybody still takes steps; it must change nothing."""
        self.env.timeout(seconds).callbacks.append(lambda _: self._look(seconds, look))

    def befall(self, faults: Iterator[Event], endless: bool) -> None:
        """Let them happen, one after the other, as long as anybody still takes steps. (Where they are ``endless`` and
        nothing else happens any more, they are over.)"""
        if (event := next(faults, None)) is None:
            return

        def happens(_: object) -> None:
            if self._done == len(self.workers):
                return
            if event.is_back:
                self._comes_back(event.rank)
            elif any(not one.is_dead for one in self.workers if one.rank != event.rank):  # the last one never dies
                self.die(event.rank, event.is_cut)
            if not endless or self.env.peek() < math.inf:
                self.befall(faults, endless)

        self.env.timeout(max(0.0, event.at_s - self.env.now)).callbacks.append(happens)

    def _look(self, seconds: float, look: Callable[[float], None]) -> None:
        if self._done < len(self.workers):
            look(self.env.now)
            self.every(seconds, look)

    def die(self, rank: int, is_cut: bool = False) -> None:
        """The worker ends, at whatever it is; the others go on. ``is_cut``: as it cannot hear them."""
        worker = self.workers[rank]
        if rank in self._returning:  # once more
            self._returning.remove(rank)
        if worker.ended:
            return
        worker.coroutine.close()
        worker.ended = worker.is_dead = True
        worker.is_cut = is_cut
        is_on_its_way = worker.away_s is not None
        worker.waits = ""
        self._retired(rank)
        if not worker.done:
            worker.done = True
            worker.finished_s = self.env.now if worker.away_s is None else worker.away_s
            self._done += 1
            for among, crowd in self._crowds.items():
                if among is None or rank in among:
                    self._counts_in(worker, crowd)
        for crowd in self._crowds.values():
            crowd.idlers = [one for one in crowd.idlers if one[0] is not worker]
            if crowd.is_through:
                self._wake_idlers(crowd)
        self.exchanges.died(rank)
        self._decides.died(rank)
        if not worker.idle and not is_on_its_way and worker.handed_in_s > self.env.now:
            worker.lost = worker.taken - 1

    @staticmethod
    def _counts_in(worker: Worker, crowd: Crowd) -> None:
        crowd.done += 1
        worker.counts_in.append(crowd)

    # Coming back. Who comes back is the twin of a member between two steps: whatever includes that one from then on
    # includes it, at one moment for all that is between workers. What the member has begun itself it waits for before.

    def _comes_back(self, rank: int) -> None:
        if self.workers[rank].is_dead and rank not in self._returning:
            self._returning.append(rank)

    def _waits_for_what_is_under_way(self, member: Worker, effect: Next) -> bool:
        def go() -> None:
            if not member.is_dead and (turn := self._next(member, effect, is_settled=True)) is not _LATER:
                self._resume(member, turn)

        for pending in member.in_flight:
            if not pending.arrived:
                pending.then.append(lambda: self._again(member, effect))
                return True
        return not self._decides.settles(member.rank, go)

    def _hand_over(self, member: Worker) -> None:
        for rank in [one for one in self._returning if self._decides.can_revive(one, member.rank)]:
            self._returning.remove(rank)
            self._revive(rank, member)

    def _revive(self, rank: int, member: Worker) -> None:
        assert self._twin is not None
        dead = self.workers[rank]
        self.exchanges.revive(rank, member.seq)
        self._decides.revive(rank, member.rank, max(0, dead.taken - member.taken))
        me, seconds = self._twin(rank, member.rank)
        worker = self.workers[rank] = Worker(me, self._body(me))
        worker.seq = member.seq - len(member.in_flight)
        worker.known.extend(one.known() for one in member.in_flight)
        worker.taken = max(dead.taken, member.taken)
        worker.missed = dead.missed + worker.taken - dead.taken
        worker.away_s, worker.lost = dead.finished_s, dead.lost
        self._done -= 1
        for crowd in dead.counts_in:
            crowd.done -= 1

        def is_there(_: object) -> None:
            if not worker.is_dead:
                worker.away_s = worker.lost = None
                self._returned.append(Absence(rank, dead.finished_s, self.env.now, dead.lost, dead.is_cut))
                self._resume(worker, None)

        self.env.timeout(seconds).callbacks.append(is_there)

    def _resume(self, worker: Worker, answer: object) -> None:
        if worker.is_dead:
            return
        send, answers = worker.coroutine.send, self._answer
        try:
            while True:
                effect = send(answer)
                handler = answers.get(type(effect))
                if handler is None:
                    worker.coroutine.close()
                    raise not_ours(effect)
                answer = handler(worker, effect)
                if answer is _LATER:
                    return
        except StopIteration:
            worker.ended, worker.waits = True, ""

    def _later(self, seconds: float, worker: Worker, answer: Callable[[], object]) -> object:
        event = self.env.timeout(seconds)
        event.callbacks.append(lambda _: None if worker.is_dead else self._resume(worker, answer()))
        return _LATER

    # Steps. A worker without data may take step t idly only when some worker of its crowd takes it with data; when all
    # are without data, the steps end after the last one that anyone took. So all take the same ones, whatever the data.

    def _next(self, worker: Worker, effect: Next, is_settled: bool = False) -> object:
        crowd = self._crowds.get(effect.among)
        if crowd is None:
            assert effect.among is not None
            crowd = self._crowds[effect.among] = Crowd(len(effect.among))
        if not worker.done:
            if self._decides.stands(worker.rank, effect.t, lambda: self._again(worker, effect)):
                worker.waits = "for the others to stand still"
                return _LATER
            if self._returning:
                if not is_settled and self._waits_for_what_is_under_way(worker, effect):
                    worker.waits = "for what it has begun"
                    return _LATER
                self._hand_over(worker)
            if self._more(worker.rank, worker.taken, self.env.now):
                worker.taken += 1
                worker.handed_in_s = math.inf
                if effect.t > crowd.reached:
                    crowd.reached = effect.t
                    self._wake_idlers(crowd)
                return Turn.WORK
            worker.done = worker.idle = True
            worker.finished_s = self.env.now
            self._done += 1
            self._counts_in(worker, crowd)
            if crowd.is_through:
                self._wake_idlers(crowd)
        if effect.t > crowd.reached and not crowd.is_through:
            worker.waits = "for the others to finish"
            crowd.idlers.append((worker, effect.t))
            self._decides.idle({waiting.rank for waiting, _ in self._crowds[None].idlers})
            return _LATER
        return self._turn_without_data(worker, effect.t, crowd)

    def _again(self, worker: Worker, effect: Next) -> None:
        """Ask once more, in an event of its own."""

        def ask(_: object) -> None:
            if worker.is_dead:
                return
            turn = self._next(worker, effect)
            if turn is not _LATER:
                self._resume(worker, turn)

        self.env.timeout(0).callbacks.append(ask)

    def _wake_idlers(self, crowd: Crowd) -> None:
        waiting, crowd.idlers = crowd.idlers, []
        for worker, t in waiting:
            self._later(0.0, worker, functools.partial(self._turn_without_data, worker, t, crowd))

    def _turn_without_data(self, worker: Worker, t: int, crowd: Crowd) -> Turn:
        if t <= crowd.reached:
            return Turn.IDLE
        assert crowd.is_through, "woken without a reason"
        self._retired(worker.rank)
        for partial in self.partials.values():
            partial.finished(worker.rank)
        return Turn.STOP

    # Computing.

    def _busy(self, worker: Worker) -> tuple[float, float]:
        step, rank, now = worker.taken - 1, worker.rank, self.env.now
        delay, compute = self._work.delay_s(step, rank), self._work.compute_s(step, rank)
        self._work.ask(rank, step)
        worker.spent_s += delay + compute
        if self.trace.keep_spans:
            self.trace.span(rank, step, "delay", now, now + delay)
            self.trace.span(rank, step, "compute", now + delay, now + delay + compute)
        return delay, compute

    def _grad(self, worker: Worker, effect: Grad) -> object:
        if worker.idle:
            return None
        delay, compute = self._busy(worker)
        worker.waits = ""
        return self._later(delay + compute, worker, lambda: self._work.gradient(worker.rank))

    def _grad_mix(self, worker: Worker, effect: GradMix) -> object:
        seq = worker.seq
        worker.seq += 1
        now, rank = self.env.now, worker.rank
        delay, compute = (0.0, 0.0) if worker.idle else self._busy(worker)
        worker.asked_s = worker.handed_in_s = now + delay + compute
        worker.waits = f"at step {worker.me.t} for the gradients of {{}}"
        gradient = None if worker.idle else (lambda: self._work.gradient(rank))
        pending = self.exchanges.gradient(worker.me, seq, effect, now + delay, compute, gradient)
        pending.waiter = worker
        return _LATER

    def _batch(self, worker: Worker, effect: Batch) -> object:
        if worker.idle:
            return None
        return self._answered(worker, lambda go: self._micro.begin(worker.rank, worker.taken - 1, effect, go))

    def _spent(self, worker: Worker, effect: Spent) -> float:
        seconds, worker.spent_s = worker.spent_s, 0.0
        return self._decides.spent(worker.rank, seconds)

    # Mixing.

    def _mix(self, worker: Worker, effect: Mix) -> object:
        return self._finish(worker, Finish(self._post(worker, effect, begun=False)))

    def _begin(self, worker: Worker, effect: Begin) -> object:
        if isinstance(effect.effect, Meet):
            return self.shared.meet(worker.rank, effect.effect.peer)
        if not isinstance(effect.effect, Mix):
            raise not_ours(effect)
        worker.in_flight.append(begun := self._post(worker, effect.effect, begun=True))
        return begun

    def _post(self, worker: Worker, effect: Mix, begun: bool) -> Pending:
        seq = worker.seq
        worker.seq += 1
        worker.handed_in_s = self.env.now
        if worker.known:
            return worker.known.popleft()
        return self.exchanges.mix(worker.me, seq, effect, begun)

    def _finish(self, worker: Worker, effect: Finish) -> object:
        pending: Ticket[Vec] = effect.ticket
        assert isinstance(pending, Pending)
        if pending in worker.in_flight:
            worker.in_flight.remove(pending)
        if pending.arrived:
            return pending.value
        pending.waiter = worker
        worker.asked_s = self.env.now
        worker.waits = f"at step {worker.me.t} for the share of {{}}"
        return _LATER

    def _arrived(self, pending: Pending) -> None:
        for go in pending.then:
            go()
        worker = pending.waiter
        if worker is None:
            return
        assert isinstance(worker, Worker)
        if worker.is_dead:
            return
        if not worker.done:
            self.wait_s[worker.rank] += self.env.now - worker.asked_s
            if self.trace.keep_spans:
                together = min(max(pending.together_s, worker.asked_s), self.env.now)
                self.trace.span(worker.rank, worker.taken - 1, "wait", worker.asked_s, together)
                self.trace.span(worker.rank, worker.taken - 1, "communicate", together, self.env.now)
        worker.waits = ""
        self._resume(worker, pending.value)

    # Partial rounds.

    def _partial(self, channel: Channel) -> ChannelOfAll | NodesPartial:
        if channel.name not in self.partials:
            nodes, seed = Nodes(len(self.workers), channel.per_node), self.workers[0].me.seed
            trace = Trace(keep_spans=False, keep_rounds=False) if channel.beside else self.trace
            made = self._decides.channel(channel, self.env, self._network, trace, nodes, seed)
            self.partials[channel.name] = made if nodes.per_node == 1 else NodesPartial(made, self._network, self.env)
        return self.partials[channel.name]

    def _open(self, worker: Worker, effect: Open) -> object:
        self._partial(effect.channel).open(worker.me, effect.channel, effect.x)
        self.exchanges.keeps_rounds = (
            False  # those of the channel are the run's; beside it there is what nodes do inside
        )
        return None

    def _offer(self, worker: Worker, effect: Offer) -> object:
        worker.asked_s = self.env.now
        step = worker.taken - 1
        if not effect.channel.beside:
            worker.handed_in_s = self.env.now

        def answer(got: object) -> object:
            self._waited(worker, step)
            return got

        return self._answered(
            worker,
            lambda go: self._partial(effect.channel).offer(
                worker.rank, effect.x, effect.t, lambda got: go(answer(got))
            ),
        )

    def _through(self, worker: Worker, effect: Through) -> object:
        return self._answered(worker, lambda go: self._partial(effect.channel).through(worker.rank, effect.t, go))

    def _rest(self, worker: Worker, effect: Rest) -> object:
        return self._answered(worker, lambda go: self._partial(effect.channel).rest(worker.rank, effect.x, go))

    def _add(self, worker: Worker, effect: Add) -> object:
        worker.handed_in_s = self.env.now
        return self._answered(worker, lambda go: self.shared.add(worker.rank, effect.delta, go))

    def _retire(self, worker: Worker, effect: Retire) -> object:
        worker.waits = "for the others to retire"
        return self._answered(worker, lambda go: self.shared.retire(worker.rank, go))

    def _answered(self, worker: Worker, ask: Callable[[Callable[[object], None]], None]) -> object:
        """An answer that may come at once or later: at once it is returned, so that answers do not nest."""
        box: list[object] = []
        later = False

        def go(value: object) -> None:
            if later:
                self._resume(worker, value)
            else:
                box.append(value)

        ask(go)
        if box:
            return box[0]
        later = True
        return _LATER

    def _waited(self, worker: Worker, step: int) -> None:
        if not worker.done:
            self.wait_s[worker.rank] += self.env.now - worker.asked_s
            self.trace.span(worker.rank, step, "wait", worker.asked_s, self.env.now)

    def _who_waits_for_whom(self) -> str:
        missing = self.exchanges.missing()
        for place in (*self.partials.values(), self.shared):
            for rank, what in place.who_waits().items():
                self.workers[rank].waits = what
        lines = []
        for worker in self.workers:
            if worker.ended:
                continue
            whom = missing.get(worker.rank)
            names = "nobody" if not whom else "rank " + ", ".join(map(str, whom))
            lines.append(f"rank {worker.rank} waits {worker.waits.format(names) or 'for nothing that can come'}")
        shown = "; ".join(lines[:8]) + (f"; and {len(lines) - 8} more" if len(lines) > 8 else "")
        ended = [w.rank for w in self.workers if w.ended]
        return f"deadlock at {self.env.now:g} s: {shown}" + (f"; ranks {ended} have ended" if ended else "")
