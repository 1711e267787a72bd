"""Small facts of a run at the host process: who is done, who asks for an average, who has failed, who is gone.

All workers of a run hear all facts, in one order: whoever knows a fact knows everything that its author knew. Where the
workers are on several hosts, the first host's server makes that order. A worker's end is told by its own host to all:
they hear of it before that host leaves, which would be a loss without it. What is known before a worker comes, it is
told when it does.

**Coming back.** A worker that comes in place of a dead one says that it returns. All members hear that a replica is
wanted. Each says so when it is between two steps, and the first of them for whom all channels can do it lays its
replica into the arena. When that has been said, the returned one is that worker's *twin*, at one moment for all
channels: whatever includes the one from then on includes the other, and what the one has said, the other has said.

**A host is lost**, and the run goes on if the first host is there. That one decides, also what the others have only
heard of by half: `offbeat.live.host.settling`.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np

from offbeat.basics.units import format_ranks, format_seconds
from offbeat.live.host import mean
from offbeat.live.host import protocol as say
from offbeat.live.host.books import Send
from offbeat.live.host.ledger import Expression
from offbeat.live.host.server import EVERYBODY, Counterparts, Server
from offbeat.live.host.settling import Counts, Held, Inquiry
from offbeat.live.memory.arena import Arena
from offbeat.rounds.bell import Rope

LOSSES = ("failed", "gone", "left")
PROGRESS = ("reached/", "done/", "average/", "meeting/", mean.SAYS)  # facts by which a worker says how far it is
GO_ON = "the others go on"
OUT_OF_REACH = (
    "it decides for all, so the run ends here; it may go on there, if min_workers are left. Begin again from a "
    "checkpoint: offbeat launch --resume DIR"
)
LOOKS = 8  # in the time for which a stopped worker is waited for
ANSWER_S = 1.0  # for other hosts to say what their workers are doing


class Question(NamedTuple):
    """What is everybody doing? Asked by a worker of this host, and answered by so many hosts so far."""

    worker: int
    number: int
    until_s: float
    said: list[tuple[int, str]]
    hosts: set[int]


class Membership(NamedTuple):
    """What all channels of a run do together: ``bury`` a rank, or let one be a worker again as the twin of another.

    ``can_revive``: whether all can now; ``revive`` is told the run, the two, and the page of exchanges in step at which
    the twin goes on. ``kill``: the process of a worker, by the channel where it has that number. Of lost hosts:
    ``ask`` what is held here, ``settle`` what counts and bury their workers, or ``give_up`` what waits for them.
    """

    bury: Callable[[str, int], None]
    can_revive: Callable[[str, int, int], bool]
    revive: Callable[[str, int, int, int], None]
    kill: Callable[[str, int], None]
    ask: Callable[[str, list[str]], Held]
    settle: Callable[[str, list[str], Counts], None]
    give_up: Callable[[str, list[str], str], None]


class LaidDown(NamedTuple):
    """A replica in the arena, for those who have returned and not taken it yet."""

    at: int
    room: int
    takers: set[int]


def with_twin(facts: dict[str, str], of_other: dict[str, str], worker: int) -> dict[str, str]:
    """The facts, when ``worker`` has said how far it is as the other one has."""
    kept = {name: value for name, value in facts.items() if not _is_progress_of(name, worker)}
    said = {f"{name.rpartition('/')[0]}/{worker}": value for name, value in of_other.items()}
    return {**kept, **said}


def progress_of(facts: dict[str, str], worker: int) -> dict[str, str]:
    """What a worker has said of how far it is."""
    return {name: value for name, value in facts.items() if _is_progress_of(name, worker)}


def _is_progress_of(name: str, worker: int) -> bool:
    return name.startswith(PROGRESS) and name.endswith(f"/{worker}")


class FactsServer(Server):
    """One run's. ``doing`` says in words what a worker is doing; None: its process is stopped."""

    def __init__(
        self,
        key: str,
        plan: dict[str, Any],
        others: Counterparts,
        doing: Callable[[str, int], str | None],
        membership: Membership,
        arena: Arena,
    ) -> None:
        super().__init__(key, plan, others)
        self._doing, self._membership, self._arena = doing, membership, arena
        self._returning: list[int] = []  # who want a replica
        self._being_laid: dict[int, tuple[int, int]] = {}  # by whom: where in the arena, and so many bytes
        self._laid: list[LaidDown] = []
        self._facts: dict[str, str] = {}
        self._means = 0  # that have been decided
        self._sends: dict[int, Send] = {}
        self._lost: list[Any] = []  # what is said of those who have failed, or are gone
        self._ended: set[int] = set()  # of whom no more is to be said
        self._first_loss: say.ToldToAll | None = None
        self._lost_hosts: dict[int, str] = {}  # hosts that are lost, and why
        self._inquiry: Inquiry | None = None
        self._inquiries = 0
        self._questions: list[Question] = []
        self._frozen_s: float | None = plan.get("frozen_s")  # for so long a stopped worker is waited for
        self._looks_s = float("inf")  # when it is looked who is stopped
        self._stopped_s: dict[int, float] = {}  # since when
        self._look_again(time.monotonic())

    def open(self, message: say.OpenChannel, send: Send) -> None:
        self._sends[message.worker] = send
        for name, value in self._facts.items():
            send(say.Fact(self.key, name, value))
        for one in self._lost:
            send(one)

    def hear(self, worker: int, message: Any) -> None:
        match message:
            case say.Post(name=name, value=value):
                self._publish(say.ToldToAll(self.key, worker, "fact", name, value))
            case say.Fail(words=words):
                self._publish(say.ToldToAll(self.key, worker, "failed", "", words))
            case say.Bye():
                self._publish(say.ToldToAll(self.key, worker, "bye", "", ""))
            case say.Leave(how=how) if self.least:
                self._publish(say.ToldToAll(self.key, worker, "left", "", how))
                self._sends[worker](self._gone(worker, GO_ON, said=how))  # all that it has handed in has been heard
                self._membership.bury(self.root, self.ranks[worker])
            case say.Returns():
                self._returns(worker)
            case say.CanHand(nbytes=nbytes):
                self._can_hand(worker, nbytes)
            case say.Handed():
                self._handed(worker, message)
            case say.HasTaken():
                self._taken(worker)
            case say.Ask(number=number):
                until_s = time.monotonic() + ANSWER_S
                self._questions.append(Question(worker, number, until_s, self._all_are(), {self.others.me}))
                self.others.tell_others(say.AskHost(self.key, worker, number))
                self._answer(until_s - ANSWER_S)
            case _:
                raise ValueError(f"a run's facts do not know what to do with {message}")

    def hear_host(self, host: int, message: Any, value: Expression | None) -> None:
        match message:
            case say.ToldToAll(what="fact") if self.others.decides:
                self._order(message)
            case say.ToldToAll(what="gone" | "left") if self.least and self.others.decides:
                self._publish(message)
            case say.ToldToAll():
                self._hear_told(message)
            case say.HostLost(host=name, words=words) if self.others.decides:
                self.lost(self.others.hosts.index(name), words)
            case say.WhatOf(number=number, gone=gone):
                self.others.send(0, say.HeldOf(self.key, number, *self._held_of(gone)))
            case say.HeldOf(number=number, held=held, used=used):
                if self._inquiry is not None and self._inquiry.number == number:
                    self._inquiry.hear(self.others.hosts[host], Held(held, used))
                    self._settle_if_all_have_said()
            case say.Settled():
                self._hear_settled(message)
            case say.AskHost(worker=worker, number=number):
                self.others.send(host, say.HostSays(self.key, worker, number, self._all_are()))
            case say.HostSays(worker=worker, number=number, said=said):
                for one in self._questions:
                    if (one.worker, one.number) == (worker, number):
                        one.said.extend((worker, doing) for worker, doing in said)
                        one.hosts.add(host)
                self._answer(time.monotonic())
            case _:
                super().hear_host(host, message, value)

    def _publish(self, told: say.ToldToAll) -> None:
        """What a worker of this host says. The first host says what follows of an end that others may survive."""
        may_go_on = bool(self.least) and told.what in ("gone", "left")
        if not self.others.decides and (told.what == "fact" or may_go_on):
            self.others.send(0, told)
        elif not may_go_on:
            self._order(told)
        elif told.worker not in self._ended:
            self._order(told._replace(name=self._what_then(1)))

    def _order(self, told: say.ToldToAll) -> None:
        """What is said here first, all hear first.

        With a loss goes the first one that was heard of: a worker may end because another has, and whoever is told of
        both by different hosts is to hear of that one first.
        """
        if told.what in LOSSES and self._first_loss is not None:
            self.others.tell_others(self._first_loss)
        self.others.tell_others(told)
        self._hear_told(told)

    def _hear_told(self, told: say.ToldToAll) -> None:
        worker, then = told.worker, told.name
        if told.what == "fact":
            self._facts[told.name] = told.value
            echoes = told.name.startswith(f"{say.ATTACHED}/")  # who has attached may rely on it that all know so
            self._tell(say.Fact(self.key, told.name, told.value), but=EVERYBODY if echoes else worker)
            if told.name.startswith("done/"):
                self._refuse_if_others_end()
            if told.name.startswith(("done/", mean.SAYS)):
                self._decide_mean()
        elif worker not in self._ended:
            self._ended.add(worker)
            if told.what in LOSSES and then != GO_ON and self._first_loss is None:
                self._first_loss = told
            if told.what == "failed":
                self._miss(say.Failed(self.key, worker, told.value), worker)
            elif told.what == "gone":
                self._miss(self._gone(worker, then, ended=told.value == "ended"), worker)
            elif told.what == "left":
                self._miss(self._gone(worker, then, said=told.value), worker)

    def _decide_mean(self) -> None:
        size = len(self.others.home_of)
        found = mean.decided(self._facts, self._means, size, self._dead) if self.others.decides else None
        if found is not None:
            self._means += 1  # the next one's first words come after this
            self._order(say.ToldToAll(self.key, EVERYBODY, "fact", *found))

    def _gone(self, worker: int, then: str, ended: bool = False, said: str = "") -> say.Gone:
        goes_on = then == GO_ON
        return say.Gone(self.key, worker, ended, goes_on, "" if goes_on else then, said)

    def _tell(self, message: Any, but: int) -> None:
        for worker, send in self._sends.items():
            if worker != but:
                send(message)

    def _miss(self, message: Any, worker: int) -> None:
        self._lost.append(message)
        self._tell(message, but=worker)

    def leave(self, worker: int, ended: bool = False) -> None:
        if worker not in self._ended:
            self._publish(say.ToldToAll(self.key, worker, "gone", "", "ended" if ended else ""))
        super().leave(worker, ended)
        self._sends.pop(worker, None)
        if worker in self._returning:  # it has died once more
            self._returning.remove(worker)
            self._say_who_want()

    @property
    def notes(self) -> list[str]:
        """For whoever looks: without whom the run goes on."""
        ranks = sorted(self.ranks[worker] for worker in self._dead)
        return [f"The run goes on without {format_ranks(ranks)}."] if ranks else []

    def _what_then(self, more: int) -> str:
        """Without so many more the others go on, or why they do not."""
        lost = sum(len(one.workers) if isinstance(one, say.HostGone) else 1 for one in self._lost)
        left = len(self.ranks) - lost - more
        if not self.least or any(f"{say.ATTACHED}/{rank}" not in self._facts for rank in range(len(self.ranks))):
            return ""
        if left < self.least:
            return f"{left} would be left, and min_workers is {self.least}"
        return GO_ON

    # Coming back.

    def bury(self, rank: int) -> None:
        super().bury(rank)
        if rank in self._being_laid:
            self._arena.give_back(*self._being_laid.pop(rank))
        self._taken(rank)
        self._refuse_if_others_end()
        self._decide_mean()

    def _returns(self, worker: int) -> None:
        if worker not in self._dead:
            why = "it is a member" if self.least else "the run needs all its workers, and has lost one"
            why = why if len(self._sends) > 1 else "the run that it left is over"
            self._sends[worker](say.NoReturn(self.key, why))
            return
        if self.others.others:
            why = "coming back is not built for a run with workers on several hosts"
            self._sends[worker](say.NoReturn(self.key, why))
            return
        self._returning.append(worker)
        self._refuse_if_others_end()
        self._say_who_want()

    def _say_who_want(self) -> None:
        for worker in self._members:
            self._sends[worker](say.Wanted(self.key, len(self._returning)))

    @property
    def _members(self) -> list[int]:
        return [worker for worker in self._sends if worker not in self._left]

    def _refuse_if_others_end(self) -> None:
        """Nobody comes between two steps any more."""
        if all(f"done/{worker}" in self._facts for worker in self._members):
            returning, self._returning = self._returning, []
            for worker in returning:
                self._sends[worker](say.NoReturn(self.key, "the others have taken all their steps"))

    def _can_hand(self, worker: int, nbytes: int) -> None:
        if worker in self._being_laid:  # it had not waited for the answer
            self._arena.give_back(*self._being_laid.pop(worker))
        can = bool(self._returning) and not self._being_laid and self._can_be_twins_of(worker)
        if can:
            self._being_laid[worker] = self._arena.take(nbytes), nbytes
        self._sends[worker](say.HandHere(self.key, self._being_laid[worker][0] if can else -1))

    def _can_be_twins_of(self, worker: int) -> bool:
        can = self._membership.can_revive
        return all(can(self.root, self.ranks[one], self.ranks[worker]) for one in self._returning)

    def _handed(self, worker: int, handed: say.Handed) -> None:
        if worker not in self._being_laid:
            raise ValueError("a replica for which there was no place")
        at, room = self._being_laid.pop(worker)
        if handed.nbytes and not self._can_be_twins_of(worker):  # no longer; they go on waiting
            self._arena.give_back(at, room)
            return
        returning, self._returning = self._returning, []
        if not handed.nbytes or not returning:
            self._arena.give_back(at, room)
        for one in returning if not handed.nbytes else ():
            self._sends[one](
                say.NoReturn(self.key, f"rank {self.ranks[worker]} cannot lay down its replica: {handed.why}")
            )
        if handed.nbytes and returning:
            self._laid.append(LaidDown(at, room, set(returning)))
            for one in returning:
                self._membership.revive(self.root, self.ranks[one], self.ranks[worker], handed.page)
                self._facts = with_twin(self._facts, progress_of(self._facts, worker), one)
                self._ended.discard(one)
                self._lost = [gone for gone in self._lost if gone.worker != one]
            for one, send in itertools.product(returning, self._sends.values()):  # to those on their way back, too
                send(say.Returned(self.key, one, worker))
            for one in returning:
                self._sends[one](say.TakeHere(self.key, at, handed.nbytes))
        self._say_who_want()

    def _taken(self, worker: int) -> None:
        for one in list(self._laid):
            one.takers.discard(worker)
            if not one.takers:
                self._laid.remove(one)
                self._arena.give_back(one.at, one.room)

    # A host is lost.

    def lost(self, host: int, words: str) -> None:
        """The first host decides what follows. Without it the run ends."""
        if host in self._lost_hosts:
            return
        self._lost_hosts[host] = words
        if not self.least or self._first_loss is not None:
            self._end_without([host], words)
        elif self.others.decides:
            self._ask_or_end(words)
        elif host == 0 or self.others.has_gone(0):
            self._end_without([0], f"{self._lost_hosts.get(0, words)}; {OUT_OF_REACH}")
        else:
            self.others.send(0, say.HostLost(self.key, self.others.hosts[host], words))

    def _at(self, hosts: Collection[int]) -> list[int]:
        """The workers there."""
        return [worker for worker, home in enumerate(self.others.home_of) if home in hosts]

    def _ask_or_end(self, words: str) -> None:
        gone = [self.others.hosts[host] for host in self._lost_hosts]
        missed = [worker for worker in self._at(self._lost_hosts) if worker not in self._ended]
        then = self._what_then(len(missed)) if missed else GO_ON
        if then != GO_ON:
            self._say_settled(say.Settled(self.key, gone, words, then or "not all had attached", [], []))
            return
        self._inquiries += 1
        left = [host for host in range(len(self.others.hosts)) if host not in self._lost_hosts]
        self._inquiry = Inquiry(self._inquiries, [self.others.hosts[host] for host in left])
        self.others.tell_others(say.WhatOf(self.key, self._inquiries, gone))
        self._inquiry.hear(self.others.hosts[self.others.me], self._held_of(gone))
        self._settle_if_all_have_said()

    def _held_of(self, gone: list[str]) -> Held:
        for name in gone:
            self._lost_hosts.setdefault(self.others.hosts.index(name), "")
        return self._membership.ask(self.root, gone)

    def _settle_if_all_have_said(self) -> None:
        others = self.others
        left = {name: number == others.me or not others.has_gone(number) for number, name in enumerate(others.hosts)}
        if self._inquiry is not None and self._inquiry.is_over(left):
            counts, self._inquiry = self._inquiry.decided(), None
            gone = [others.hosts[host] for host in self._lost_hosts]
            self._say_settled(say.Settled(self.key, gone, "", "", *counts))

    def _say_settled(self, settled: say.Settled) -> None:
        self.others.tell_others(settled)
        self._hear_settled(settled)

    def _hear_settled(self, settled: say.Settled) -> None:
        hosts = [self.others.hosts.index(name) for name in settled.gone]
        self._lost_hosts.update(dict.fromkeys(hosts, settled.words))
        if settled.why:
            self._end_without(hosts, f"{settled.words}; {settled.why}")
            return
        missed = [worker for worker in self._at(hosts) if worker not in self._ended]
        self._membership.settle(self.root, settled.gone, Counts(settled.held, settled.used))
        self._ended.update(missed)
        if missed:
            self._miss(say.HostGone(self.key, missed, True, ""), EVERYBODY)

    def _end_without(self, hosts: Collection[int], words: str) -> None:
        """The run ends here, unless all of theirs had left in good order."""
        workers = self._at(hosts)
        if self.least or any(worker not in self._ended for worker in workers):
            self._ended.update(workers)
            self._miss(say.HostGone(self.key, workers, False, words), EVERYBODY)
            if self._first_loss is None and (self.others.decides or not self.least):
                self._first_loss = say.ToldToAll(self.key, workers[0], "gone", "", "")
        if self.least:
            self._membership.give_up(self.root, [self.others.hosts[host] for host in hosts], words)

    def flush(self) -> None:
        self._settle_if_all_have_said()  # one of them may have left in good order
        super().flush()

    # What everybody is doing.

    def _all_are(self) -> list[tuple[int, str]]:
        found = [(one, self._doing(self.key, one)) for one in self._sends]
        return [(one, doing) for one, doing in found if doing is not None]

    def _answer(self, now_s: float) -> None:
        for one in list(self._questions):
            if len(one.hosts | self._lost_hosts.keys()) == len(self.others.hosts) or now_s >= one.until_s:
                self._questions.remove(one)
                if one.worker in self._sends:
                    self._sends[one.worker](say.Doing(self.key, one.number, one.said))
        moments = [self._looks_s, *(one.until_s for one in self._questions)]
        self.wakes_s = min(moments) if min(moments) < float("inf") else None

    def silence(self, now_s: float) -> None:
        self._answer(now_s)
        if now_s >= self._looks_s:
            self._look_for_stopped(now_s)

    # Those who are stopped.

    def _look_again(self, now_s: float) -> None:
        if self.least and self._frozen_s is not None:
            self._looks_s = now_s + self._frozen_s / LOOKS
        self._answer(now_s)

    def _look_for_stopped(self, now_s: float) -> None:
        """Whoever has been stopped for too long is killed. If it went on, it would write where another does by then."""
        assert self._frozen_s is not None
        for worker in self._members:
            if self._doing(self.key, worker) is not None:
                self._stopped_s.pop(worker, None)
            elif now_s - self._stopped_s.setdefault(worker, now_s) >= self._frozen_s:
                self._stopped_s.pop(worker)
                waited = format_seconds(self._frozen_s)
                print(
                    f"offbeat: rank {self.ranks[worker]} was stopped for {waited}: killed", file=sys.stderr, flush=True
                )
                self._membership.kill(self.key, worker)
        self._look_again(now_s)

    def close(self) -> None:
        self._sends = {}
        for at, room in self._being_laid.values():
            self._arena.give_back(at, room)
        for one in self._laid:
            self._arena.give_back(one.at, one.room)


class BellServer(Server):
    """The bell of a run: a number in the arena, 1 + the last round whose bell has rung, which all workers can read.

    The rope of all hosts is the first host's.
    """

    what = "bell"

    def __init__(self, key: str, plan: dict[str, Any], others: Counterparts, arena: Arena) -> None:
        super().__init__(key, plan, others)
        self._arena, self._place, self._rope = arena, arena.take(8), Rope(len(others.host_of))
        self._word = arena.bytes_at(self._place, 8)
        self._word[:] = 0
        self._rang: dict[int, int] = {}  # for which round a worker has pulled last

    def open(self, message: say.OpenChannel, send: Send) -> None:
        send(say.Answer(self.key, 1, "open", self._place, 0, [], [], [], {}, [], []))

    def hear(self, worker: int, message: Any) -> None:
        if isinstance(message, say.Ring):
            self._rang[worker] = message.r
        if isinstance(message, say.Ring) and not self.others.decides:
            self.others.send(0, message)
        elif isinstance(message, say.Ring) and self._rope.pull(message.r, message.workers):
            self._ring(message.r)

    def _ring(self, r: int) -> None:
        self.others.tell_others(say.Rung(self.key, r))
        self._has_rung(r)

    def bury(self, rank: int) -> None:
        super().bury(rank)
        for r in self._rope.one_less() if self.others.decides else ():
            self._ring(r)

    def revive(self, rank: int, twin_of: int) -> None:
        super().revive(rank, twin_of)
        self._rope.one_more(self._rang.get(twin_of, -1))

    def hear_host(self, host: int, message: Any, value: Expression | None) -> None:
        if isinstance(message, say.Rung):
            self._has_rung(message.r)
        elif isinstance(message, say.Ring):
            self.hear(-1, message)
        else:
            super().hear_host(host, message, value)

    def _has_rung(self, r: int) -> None:
        self.rounds = max(self.rounds, r + 1)
        self._word[:] = bytearray((r + 1).to_bytes(8, "little"))

    def close(self) -> None:
        self._word = np.empty(0, np.uint8)  # a part of the arena's would keep it
        self._arena.give_back(self._place, 8)
