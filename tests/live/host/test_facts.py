"""Facts and ends between host processes: in whatever order links deliver, all hear first what came first."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any, cast

import pytest

from offbeat.live.host import facts_server, mean
from offbeat.live.host import protocol as say
from offbeat.live.host.facts_server import FactsServer, Membership
from offbeat.live.host.server import Counterparts
from offbeat.live.host.settling import Held
from tests.support.clock import Clock

KEY, HOSTS = "run/facts", 3
NOBODY = Membership(
    lambda run, rank: None,
    lambda run, rank, twin_of: True,
    lambda run, rank, twin_of, page: None,
    lambda key, worker: None,
    lambda run, gone: Held([], []),
    lambda run, gone, counts: None,
    lambda run, gone, words: None,
)


class Arena:
    """Gives places, and counts what it has not got back."""

    def __init__(self) -> None:
        self.out: set[tuple[int, int]] = set()
        self._taken = 0

    def take(self, nbytes: int) -> int:
        self._taken += 1
        self.out.add((self._taken, nbytes))
        return self._taken

    def give_back(self, at: int, nbytes: int) -> None:
        self.out.remove((at, nbytes))


class Hosts:
    """A server on each of three hosts, with one worker each; what they say to each other waits on its link."""

    def __init__(self) -> None:
        self.heard: list[list[Any]] = [[] for _ in range(HOSTS)]
        self.links: dict[tuple[int, int], deque[Any]] = {
            pair: deque() for pair in itertools.permutations(range(HOSTS), 2)
        }
        self.servers = [self._server(host) for host in range(HOSTS)]

    def _server(self, host: int) -> FactsServer:
        def carry(to: str, message: Any, vector: Any, there: Any) -> None:
            self.links[host, int(to)].append(message)

        names = [str(one) for one in range(HOSTS)]
        others = Counterparts(KEY, names, HOSTS, str(host), carry)
        for name in names:
            if name != str(host):
                others.opened(name)
        server = FactsServer(KEY, {"run": "run"}, others, lambda key, worker: "is busy", NOBODY, cast(Any, Arena()))
        server.open(say.OpenChannel(KEY, host, {}, 0, False, False, 0), self.heard[host].append)
        return server

    def deliver(self, sender: int, receiver: int) -> None:
        """All that the one has said to the other by now."""
        self.servers[sender].flush()
        link = self.links[sender, receiver]
        while link:
            self.servers[receiver].hear_host(sender, link.popleft(), None)


@pytest.mark.parametrize("ends", ["gone", "failed"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(HOSTS))))
def test_whoever_ends_because_of_another_is_not_heard_of_before_that_one(order: tuple[int, ...], ends: str) -> None:
    first, second, third = order
    hosts = Hosts()
    if ends == "failed":
        hosts.servers[first].hear(first, say.Fail(KEY, "the disk is full"))
    hosts.servers[first].leave(first, ended=True)
    hosts.deliver(first, second)
    hosts.servers[second].leave(second)
    hosts.deliver(second, third)  # while the link from the first is slow
    hosts.deliver(first, third)
    assert [one.worker for one in hosts.heard[third]] == [first, second]
    assert isinstance(hosts.heard[third][0], say.Failed if ends == "failed" else say.Gone)


def test_a_farewell_is_heard_before_its_host_is_lost_which_then_is_no_loss() -> None:
    hosts = Hosts()
    hosts.servers[2].hear(2, say.Bye(KEY))
    hosts.deliver(2, 1)
    hosts.servers[1].lost(2, "it has ended")
    assert hosts.heard[1] == []


def test_facts_have_one_order_for_all() -> None:
    hosts = Hosts()
    hosts.servers[2].hear(2, say.Post(KEY, "two", "2"))
    hosts.servers[1].hear(1, say.Post(KEY, "one", "1"))
    hosts.deliver(1, 0)
    hosts.deliver(2, 0)
    for host in (1, 2):
        hosts.deliver(0, host)
    told = [[one.name for one in heard] for heard in hosts.heard]
    assert told == [["one", "two"], ["two"], ["one"]], "each hears what the others have posted"


def test_who_leaves_is_answered_when_it_has_been_heard_and_then_all_go_on_without_it() -> None:
    heard: list[list[Any]] = [[], [], []]
    buried = list[tuple[str, int]]()
    membership = NOBODY._replace(bury=lambda run, rank: buried.append((run, rank)))
    plan = {"run": "run", "root": "run", "ranks": [0, 1, 2], "min_workers": 2}
    others = Counterparts(KEY, [], 3, "here", lambda *_: None)
    server = FactsServer(KEY, plan, others, lambda key, worker: "is busy", membership, cast(Any, Arena()))
    for worker in range(3):
        server.open(say.OpenChannel(KEY, worker, {}, 0, False, False, 0), heard[worker].append)
        server.hear(worker, say.Post(KEY, f"{say.ATTACHED}/{worker}", "1"))
    server.hear(1, say.Leave(KEY, "has left"))
    server.leave(1)
    assert buried == [("run", 1)]
    for one in heard:
        assert [message for message in one if not isinstance(message, say.Fact)] == [
            say.Gone(KEY, 1, ended=False, goes_on=True, why="", said="has left")
        ]
    server.hear(2, say.Leave(KEY, "has left"))
    assert (heard[0][-1].goes_on, heard[0][-1].why) == (False, "1 would be left, and min_workers is 2")


def test_nobody_leaves_a_run_that_needs_all() -> None:
    with pytest.raises(ValueError, match="do not know what to do with Leave"):
        Hosts().servers[0].hear(0, say.Leave(KEY, "has left"))


# Coming back.


class Run:
    """Four workers at one host; the last has died, and others may have. What each hears, without facts."""

    def __init__(self, dead: tuple[int, ...] = (3,), frozen_s: float | None = None) -> None:
        self.arena, self.can_revive = Arena(), True
        self.stopped: set[int] = set()
        self.killed: list[int] = []
        self.revived: list[tuple[int, int, int]] = []
        self.heard: dict[int, list[Any]] = {}
        plan = {"run": "run", "root": "run", "ranks": [0, 1, 2, 3], "min_workers": 1, "frozen_s": frozen_s}
        others = Counterparts(KEY, [], 4, "here", lambda *_: None)
        membership = NOBODY._replace(
            bury=self._bury,
            can_revive=lambda run, rank, twin_of: self.can_revive,
            revive=self._revive,
            kill=self._kill,
        )
        arena: Any = self.arena
        doing = lambda key, worker: None if worker in self.stopped else "is busy"  # noqa: E731
        self.server = FactsServer(KEY, plan, others, doing, membership, arena)
        for worker in range(4):
            self.comes(worker)
            self.say(worker, say.Post(KEY, f"{say.ATTACHED}/{worker}", "1"))
        for worker in dead:
            self.dies(worker)

    def _bury(self, run: str, rank: int) -> None:
        self.server.bury(rank)

    def _revive(self, run: str, rank: int, twin_of: int, page: int) -> None:
        self.revived.append((rank, twin_of, page))
        self.server.revive(rank, twin_of)

    def _kill(self, key: str, worker: int) -> None:
        self.killed.append(worker)
        self.server.leave(worker)
        self.server.bury(worker)

    def comes(self, worker: int) -> None:
        self.heard[worker] = []
        self.server.open(say.OpenChannel(KEY, worker, {}, 0, False, False, 0), self.heard[worker].append)

    def dies(self, worker: int) -> None:
        self.server.leave(worker, ended=True)
        self.server.bury(worker)

    def say(self, worker: int, message: Any) -> None:
        self.server.hear(worker, message)

    def returns(self, worker: int) -> None:
        self.comes(worker)
        self.say(worker, say.Returns(KEY))

    def last(self, worker: int) -> Any:
        return [message for message in self.heard[worker] if not isinstance(message, say.Fact)][-1]

    def facts(self, worker: int) -> dict[str, str]:
        self.comes(worker)
        return {one.name: one.value for one in self.heard[worker] if isinstance(one, say.Fact)}


def test_the_first_member_that_can_lays_its_replica_down_and_what_it_had_said_its_twin_has_said() -> None:
    run = Run()
    run.say(1, say.Post(KEY, "reached/1", "7"))
    run.say(3, say.Post(KEY, "reached/3", "9"))
    run.say(3, say.Post(KEY, "average/0/3", "1"))
    run.returns(3)
    assert all(run.last(member) == say.Wanted(KEY, 1) for member in (0, 1, 2))
    run.say(1, say.CanHand(KEY, 100))
    assert run.last(1) == say.HandHere(KEY, 1)
    run.say(2, say.CanHand(KEY, 100))
    assert run.last(2) == say.HandHere(KEY, -1), "one is enough"
    run.say(1, say.Handed(KEY, 80, 5, ""))
    assert run.revived == [(3, 1, 5)]
    assert say.Returned(KEY, 3, 1) in run.heard[0]
    assert say.Returned(KEY, 3, 1) in run.heard[1]
    assert [type(one) for one in run.heard[3] if not isinstance(one, say.Fact)][-3:] == [
        say.Returned,
        say.TakeHere,
        say.Wanted,
    ]
    assert run.arena.out
    run.say(3, say.HasTaken(KEY))
    assert not run.arena.out
    facts = run.facts(2)
    assert facts["reached/3"] == "7"
    assert "average/0/3" not in facts


def test_several_come_back_with_one_replica_and_its_memory_is_there_until_the_last_has_it_or_is_dead() -> None:
    run = Run(dead=(3, 2))
    run.returns(3)
    run.returns(2)
    run.say(0, say.CanHand(KEY, 100))
    run.say(0, say.Handed(KEY, 80, 5, ""))
    assert {rank for rank, _, _ in run.revived} == {2, 3}
    for one, other in ((2, 3), (3, 2)):
        assert say.Returned(KEY, other, 0) in run.heard[one]
    run.say(3, say.HasTaken(KEY))
    assert run.arena.out
    run.dies(2)
    assert not run.arena.out


def test_where_a_channel_cannot_do_it_now_the_member_goes_on_and_is_asked_anew() -> None:
    run = Run()
    run.returns(3)
    run.can_revive = False
    run.say(0, say.CanHand(KEY, 100))
    assert run.last(0) == say.HandHere(KEY, -1)
    run.can_revive = True
    run.say(0, say.CanHand(KEY, 100))
    run.can_revive = False
    run.say(0, say.Handed(KEY, 80, 5, ""))
    assert not run.revived, "another has said something meanwhile"
    run.can_revive = True
    run.say(0, say.CanHand(KEY, 100))
    run.say(0, say.Handed(KEY, 80, 5, ""))
    assert run.revived == [(3, 0, 5)]


def test_a_member_that_dies_while_it_lays_its_replica_down_leaves_no_memory_and_another_does_it() -> None:
    run = Run()
    run.returns(3)
    run.say(0, say.CanHand(KEY, 100))
    run.dies(0)
    assert not run.arena.out
    run.say(1, say.CanHand(KEY, 100))
    run.say(1, say.Handed(KEY, 80, 5, ""))
    assert run.revived == [(3, 1, 5)]


def test_one_that_dies_anew_before_it_has_a_replica_is_not_brought_back() -> None:
    run = Run()
    run.returns(3)
    run.say(0, say.CanHand(KEY, 100))
    run.server.leave(3, ended=True)
    assert run.last(1) == say.Wanted(KEY, 0)
    run.say(0, say.Handed(KEY, 80, 5, ""))
    assert not run.revived
    assert not run.arena.out


@pytest.mark.parametrize("before", [True, False])
def test_when_nobody_takes_a_step_any_more_nobody_comes_back(before: bool) -> None:
    run = Run()
    if not before:
        run.returns(3)
    for member in (0, 1, 2):
        run.say(member, say.Post(KEY, f"done/{member}", "4"))
    if before:
        run.returns(3)
    assert run.last(3) == say.NoReturn(KEY, "the others have taken all their steps")


def test_a_replica_that_cannot_be_laid_down_is_no_harm_to_its_worker() -> None:
    run = Run()
    run.returns(3)
    run.say(0, say.CanHand(KEY, 100))
    run.say(0, say.Handed(KEY, 0, 5, "TypeError: of another kind"))
    assert run.last(3) == say.NoReturn(KEY, "rank 0 cannot lay down its replica: TypeError: of another kind")
    assert not run.arena.out


def test_a_worker_that_is_there_does_not_come_back() -> None:
    run = Run()
    run.say(2, say.Returns(KEY))
    assert run.last(2) == say.NoReturn(KEY, "it is a member")


def test_one_on_its_way_back_hears_of_another_that_is_back_and_whatever_else_is_said() -> None:
    run = Run(dead=(3, 2))
    run.comes(2)
    assert run.last(2).worker in (2, 3)
    run.returns(3)
    run.say(0, say.CanHand(KEY, 100))
    run.say(0, say.Handed(KEY, 80, 5, ""))
    assert say.Returned(KEY, 3, 0) in run.heard[2]
    run.say(1, say.Post(KEY, "done/1", "12"))
    assert say.Fact(KEY, "done/1", "12") in run.heard[2]


def test_nothing_is_said_to_the_dead() -> None:
    run = Run(dead=(3,))
    before = len(run.heard[3])
    run.say(0, say.Post(KEY, "reached/0", "3"))
    run.dies(2)
    assert len(run.heard[3]) == before


# Means of what the script has measured: each is decided once, and is the same on all, whoever dies or comes back.


def says(run: Run, worker: int, number: int, value: float) -> None:
    run.say(worker, say.Post(KEY, mean.said_by(number, worker), mean.words(number, worker, [value])))


def known(run: Run, number: int) -> list[float] | None:
    """To whoever comes now."""
    return mean.known(run.facts(0), number)


def comes_back_as_twin_of(run: Run, member: int, worker: int) -> None:
    run.returns(worker)
    run.say(member, say.CanHand(KEY, 100))
    run.say(member, say.Handed(KEY, 80, 5, ""))


def test_a_mean_waits_for_all_who_live_and_is_then_told_to_all() -> None:
    run = Run(dead=())
    for worker in range(3):
        says(run, worker, 0, float(worker))
        assert known(run, 0) is None
    says(run, 3, 0, 3.0)
    for worker in (1, 2, 3):
        facts = {one.name: one.value for one in run.heard[worker] if isinstance(one, say.Fact)}
        assert mean.known(facts, 0) == [1.5]


def test_a_mean_that_was_decided_stays_when_one_comes_back_who_had_no_part_in_it() -> None:
    run = Run(dead=(3,))
    for worker in range(3):
        says(run, worker, 0, float(worker))
    assert known(run, 0) == [1.0]
    comes_back_as_twin_of(run, 1, 3)
    assert known(run, 0) == [1.0]
    for worker in range(3):
        says(run, worker, 1, float(worker))
    assert known(run, 1) is None, "it waits for the one that is back"
    says(run, 3, 1, 3.0)
    assert known(run, 1) == [1.5]


@pytest.mark.parametrize(("member", "wanted"), [(0, 1.0), (2, 1.5)])
def test_who_comes_back_within_a_mean_has_said_what_its_member_had_and_that_counts_once(
    member: int, wanted: float
) -> None:
    run = Run(dead=(3,))
    says(run, 0, 0, 0.0)
    says(run, 1, 0, 1.0)
    comes_back_as_twin_of(run, member, 3)
    says(run, 2, 0, 2.0)
    if member == 2:  # which had said nothing
        assert known(run, 0) is None
        says(run, 3, 0, 3.0)
    assert known(run, 0) == [wanted]


@pytest.mark.parametrize("ends", ["dies", "has no data left"])
@pytest.mark.parametrize(("had_said", "wanted"), [(True, 1.5), (False, 1.0)])
def test_a_mean_ends_without_who_dies_or_has_no_data_left(ends: str, had_said: bool, wanted: float) -> None:
    run = Run(dead=())
    if had_said:
        says(run, 3, 0, 3.0)
    for worker in (0, 1):
        says(run, worker, 0, float(worker))
    if ends == "dies":
        run.dies(3)
    else:
        run.say(3, say.Post(KEY, "done/3", "7"))
    assert known(run, 0) is None
    says(run, 2, 0, 2.0)
    assert known(run, 0) == [wanted]


def test_the_first_host_decides_a_mean_and_all_hear_it() -> None:
    hosts = Hosts()
    for host in range(HOSTS):
        hosts.servers[host].hear(host, say.Post(KEY, mean.said_by(0, host), mean.words(0, host, [float(host)])))
    for host in (1, 2):
        hosts.deliver(host, 0)
    for host in (1, 2):
        hosts.deliver(0, host)
    for heard in hosts.heard:
        assert mean.known({one.name: one.value for one in heard}, 0) == [1.0]


# Those who are stopped.

LIMIT_S = 4.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(facts_server, "time", found)
    return found


def passes(run: Run, clock: Clock, seconds: float) -> None:
    """The loop calls whenever it was asked to."""
    end_s = clock.now_s + seconds
    while (wakes_s := run.server.wakes_s) is not None and wakes_s <= end_s:
        clock.now_s = max(clock.now_s, wakes_s)
        run.server.silence(clock.now_s)
    clock.now_s = end_s


def test_who_is_stopped_for_too_long_is_killed_and_then_as_one_that_has_died(
    clock: Clock, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Run(dead=(), frozen_s=LIMIT_S)
    run.stopped.add(2)
    passes(run, clock, LIMIT_S - 0.1)
    assert not any(isinstance(one, say.Gone) for one in run.heard[0])
    passes(run, clock, LIMIT_S / 2)
    assert (run.last(0).worker, run.last(0).goes_on) == (2, True)
    assert run.killed == [2]
    assert "offbeat: rank 2 was stopped for 4 s: killed" in capfd.readouterr().err
    passes(run, clock, 10 * LIMIT_S)
    assert sum(isinstance(one, say.Gone) for one in run.heard[0]) == 1


def test_who_goes_on_in_time_is_not_killed_however_often_it_is_stopped(clock: Clock) -> None:
    run = Run(dead=(), frozen_s=LIMIT_S)
    for _ in range(5):
        run.stopped.add(2)
        passes(run, clock, LIMIT_S * 0.8)
        run.stopped.clear()
        passes(run, clock, LIMIT_S / 2)
    assert not any(isinstance(one, say.Gone) for one in run.heard[0])


def test_without_a_limit_nobody_is_looked_for(clock: Clock) -> None:
    run = Run(dead=())
    run.stopped.add(2)
    assert run.server.wakes_s is None
    passes(run, clock, 1e6)
    assert not any(isinstance(one, say.Gone) for one in run.heard[0])
