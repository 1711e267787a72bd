"""Facts and ends between host processes: in whatever order links deliver, all hear first what came first."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import pytest

from offbeat.live.host import protocol as say
from offbeat.live.host.facts_server import FactsServer
from offbeat.live.host.server import Counterparts

KEY, HOSTS = "run/facts", 3


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
        server = FactsServer(KEY, {"run": "run"}, others, lambda key, worker: "is busy", lambda run, rank: None)
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
    plan = {"run": "run", "root": "run", "ranks": [0, 1, 2], "min_workers": 2}
    others = Counterparts(KEY, [], 3, "here", lambda *_: None)
    server = FactsServer(KEY, plan, others, lambda key, worker: "is busy", lambda run, rank: buried.append((run, rank)))
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
