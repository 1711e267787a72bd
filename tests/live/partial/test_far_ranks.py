"""Workers whose ranks are not on one host: nodes and islands over two network namespaces."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat as ob
from offbeat.live.worker import start
from tests.support import forge, islands, namespaces
from tests.support.forge import Job, hear, say
from tests.support.leftovers import Held, held, host_pids, left
from tests.support.namespaces import TwoHosts
from tests.support.nets import PATIENCE_S, distance, flat, loss, net, sgd
from tests.support.scenarios import Told, over, scenario

pytestmark = pytest.mark.live

SIZE = 4
# Each rank's host. Of two workers of two ranks each, both lie on two hosts, each with its first rank on another one;
# or only the second does, and one host has no first rank.
HOMES = {"crosswise": (0, 1, 1, 0), "one of two": (0, 0, 0, 1)}
SENT = {"crosswise": (1 + 1, 1 + 1 / 2 + 1 / 2), "one of two": (1, 1 / 2)}  # vectors, by the first host in a round
NODES = {
    "allreduce": ob.allreduce(),
    "eager": ob.eager("everyone", per_node=2),
    "eager, late": ob.eager("everyone", per_node=2, late=1, sync_every=1),
    "wagma": ob.wagma(2, 3, "everyone", per_node=2),
    "wagma, correct": ob.wagma(2, 3, "everyone", per_node=2, merge="correct"),
}
ISLANDS = {
    "allreduce": ob.allreduce(),
    "local_sgd": ob.local_sgd(2),
    "dasgd": ob.dasgd(),
    "eager": ob.eager("everyone"),
    "wagma": ob.wagma(2, 3, "everyone"),
    "self_clocked": ob.self_clocked(wait="everyone", group=None, late=0, codec=None),
    "ad_psgd": ob.ad_psgd(),
}
OF_TIMING = "ad_psgd"
NUMBERS, ROUNDS = 400_000, 4


def node(rank: int, strategy: ob.Strategy) -> Tensor:
    model = net()
    with ob.attach(sgd(model), model, strategy, patience_s=PATIENCE_S) as optimizer:
        for t in range(6):
            if t == 4:
                optimizer.average()
            optimizer.zero_grad()
            loss(model, rank, t).backward()
            optimizer.step()
    return flat(model)


def island(rank: int, strategy: ob.Strategy, record: Path | None = None) -> Tensor:
    work = islands.task()
    model = islands.sharded(work.build(0))
    inner = work.optimizer(list(model.parameters()))
    with ob.attach(inner, model, strategy, patience_s=PATIENCE_S, record=record) as optimizer:
        for t in range(6):
            if t == 4:
                optimizer.average()
            optimizer.zero_grad()
            work.value(model, work.take(rank, t)).backward()
            optimizer.step()
    return islands.weights(model)


def sent_in_a_round(cable: TwoHosts, model: nn.Module, strategy: ob.Strategy) -> float:
    """What leaves the first host in a round of two workers, over the bytes of the whole vector."""
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=0.0), model, strategy, patience_s=PATIENCE_S)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    client, gradient = optimizer._run.endpoints.client, optimizer._run.me.x.clone()
    before = counted_while_all_stand_still(cable)
    for t in range(ROUNDS):
        client.offer(gradient, t + 1)
    sent = counted_while_all_stand_still(cable) - before
    optimizer.finish()
    return sent / ROUNDS / (4 * NUMBERS)


def counted_while_all_stand_still(cable: TwoHosts) -> int:
    """What has left the first host so far: nobody has gone on when it is read."""
    dist.barrier()
    sent = cable.sent_bytes(0)
    dist.barrier()
    return sent


Found = tuple[dict[str, Tensor], dict[str, Tensor], tuple[float, float], Held]


def over_two_hosts(rank: int, cable: TwoHosts, homes: tuple[int, ...], folder: Path) -> Found:
    cable.move_in(homes[rank], 29_500)
    start.spawn = start.spawn_python  # the forge, which would fork it, is on neither host
    dist.init_process_group("gloo")
    model = net()
    keep = ob.attach(sgd(model), model, ob.eager("everyone", per_node=2), patience_s=PATIENCE_S)
    loss(model, rank, 0).backward()
    keep.step()
    holds = held()
    nodes = {name: node(rank, strategy) for name, strategy in NODES.items()}
    sharded = {name: island(rank, one, folder if name == OF_TIMING else None) for name, one in ISLANDS.items()}
    sent = (
        sent_in_a_round(cable, nn.Linear(NUMBERS, 1, bias=False), ob.eager("everyone", per_node=2, sync_every=None)),
        sent_in_a_round(
            cable, islands.sharded(nn.Linear(1, NUMBERS, bias=False)), ob.eager("everyone", sync_every=None)
        ),
    )
    keep.finish()
    return nodes, sharded, sent, holds


@pytest.fixture(scope="module", params=HOMES)
def apart(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, list[Found]]:
    reason = namespaces.why_not()
    if reason is not None:
        pytest.skip(reason)
    folder, homes = tmp_path_factory.mktemp("record"), HOMES[request.param]
    with TwoHosts() as cable:
        job = Job(over_two_hosts, SIZE, (cable, homes, folder), timeout_s=180, rank_0_hosts=True)
        (outcomes,) = forge.run([job])
    assert all(outcome.returned for outcome in outcomes), "\n".join(o.stderr[-1500:] for o in outcomes)
    return request.param, folder, forge.values(outcomes)


@scenario(SIZE)
def on_one_host(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    nodes = {name: node(rank, strategy) for name, strategy in NODES.items()}
    return nodes, {name: island(rank, one) for name, one in ISLANDS.items() if name != OF_TIMING}


@pytest.mark.parametrize("name", NODES)
def test_nodes_over_two_hosts_end_as_on_one(apart: tuple[str, Path, list[Found]], told: Told, name: str) -> None:
    here = [nodes[name] for nodes, _, _, _ in apart[2]]
    assert all(torch.equal(weights, here[0]) for weights in here)
    assert distance(here[0], told(on_one_host)[0][0][name]) < 1e-9


@pytest.mark.parametrize("name", [name for name in ISLANDS if name != OF_TIMING])
def test_islands_over_two_hosts_end_as_on_one(apart: tuple[str, Path, list[Found]], told: Told, name: str) -> None:
    here = [sharded[name] for _, sharded, _, _ in apart[2]]
    assert all(torch.equal(weights, here[0]) for weights in here)
    assert distance(here[0], told(on_one_host)[0][1][name]) < 1e-9


def test_shared_weights_of_islands_over_two_hosts_are_those_of_two_workers_to_whom_the_same_happened(
    apart: tuple[str, Path, list[Found]],
) -> None:
    _, folder, found = apart
    here = [sharded[OF_TIMING] for _, sharded, _, _ in found]
    assert all(torch.equal(weights, here[0]) for weights in here)
    assert distance(ob.replay(folder, islands.joined()).final, here[0]) < 1e-9


def test_between_the_hosts_of_a_worker_go_results_to_a_nodes_ranks_and_shards_to_and_from_an_islands(
    apart: tuple[str, Path, list[Found]],
) -> None:
    where, _, found = apart
    for sent, most in zip(found[0][2], SENT[where], strict=True):
        assert most <= sent < 1.1 * most


def test_nothing_is_left_of_workers_over_two_hosts(apart: tuple[str, Path, list[Found]]) -> None:
    holds = [one for _, _, _, one in apart[2]]
    assert all(one.hosts for one in holds)
    assert left(holds) == []


# Ends, and who stands: rank 3, of a node with rank 2, is alone on its host.

FAR = 3
STANDS = {
    "eager": ob.eager(per_node=2, sync_every=None),
    "eager, late": ob.eager(per_node=2, late=1, sync_every=None),
    "wagma, correct": ob.wagma(per_node=2, tau=None, merge="correct"),
    "wagma, late": ob.wagma(per_node=2, tau=None, late=1),
}
BEFORE, MEANWHILE, AFTER = 4, 25, 4


class Far:
    """A run of two nodes. Every step of SGD with rate 1 adds 1 to every number."""

    def __init__(self, strategy: ob.Strategy, patience_s: float = PATIENCE_S) -> None:
        self.w = nn.Parameter(torch.zeros(100, dtype=torch.float64))
        model = nn.ParameterList([self.w])
        self.optimizer = ob.attach(torch.optim.SGD([self.w], lr=1.0), model, strategy, patience_s=patience_s)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            (-self.w.sum()).backward()
            self.optimizer.step()

    def steps_for_ever(self) -> None:
        while True:
            self.steps(1)


def stands(rank: int, name: str) -> float:
    """Rank 3 is stopped until the other node has taken many steps. What the weights are at the end."""
    run, pids = Far(STANDS[name]), [0] * SIZE
    dist.all_gather_object(pids, os.getpid())
    run.steps(BEFORE)
    dist.barrier()
    if rank == FAR:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank < 2:
        run.steps(MEANWHILE)
        say(f"{name}: {rank} has gone on")
        if rank == 0:
            hear(f"{name}: 1 has gone on")
            os.kill(pids[FAR], signal.SIGCONT)
    run.steps(AFTER)
    run.optimizer.finish()
    return run.w[0].item()


@scenario(SIZE)
def one_stands(rank: int) -> dict[str, float]:
    return {name: over(rank, "split", stands, name) for name in STANDS}


@pytest.mark.parametrize("name", STANDS)
def test_a_rank_that_is_stopped_on_another_host_holds_up_no_other_node_and_every_step_counts_once(
    told: Told, name: str
) -> None:
    assert {one[name] for one in told(one_stands)} == {(2 * (BEFORE + AFTER) + MEANWHILE) / 2}


def ends(rank: int, how: str) -> None:
    """Rank 3 is stopped for good, or its host process is killed."""
    dist.init_process_group("gloo")
    run = Far(ob.eager("everyone", per_node=2), 3.0 if how == "stopped" else PATIENCE_S)
    run.steps(BEFORE)
    dist.barrier()
    if rank == FAR:
        (host_pid,) = host_pids()
        os.kill(*((os.getpid(), signal.SIGSTOP) if how == "stopped" else (host_pid, signal.SIGKILL)))
    run.steps_for_ever()


def test_a_rank_that_is_stopped_on_another_host_for_good_is_named() -> None:
    (outcomes,) = forge.run([Job(over, SIZE, ("split", ends, "stopped"), timeout_s=120, left_behind=FAR)])
    for outcome in outcomes[:FAR]:
        assert "rank 3 does not answer: its process is stopped" in outcome.error


def test_when_the_host_process_of_some_ranks_of_a_node_is_killed_all_end_and_name_them() -> None:
    (outcomes,) = forge.run([Job(over, SIZE, ("split", ends, "killed"), timeout_s=120)])
    *others, far = [outcome.error for outcome in outcomes]
    assert "the host process has ended" in far
    assert all("rank 3" in words for words in others), others


@scenario(SIZE)
def looked_at(rank: int) -> tuple[list[int], list[int], str]:
    return over(rank, "split", look)


def look(rank: int) -> tuple[list[int], list[int], str]:
    """Ranks here and everywhere that status shows, and its text, when all have taken as many steps."""
    run = Far(ob.eager("everyone", per_node=2))
    run.steps(BEFORE)
    dist.barrier()
    status = run.optimizer.status()
    while len(status.everybody) < SIZE:
        status = run.optimizer.status()
    dist.barrier()
    run.optimizer.finish()
    return [one.rank for one in status.workers], sorted(one.rank for one in status.everybody), str(status)


def test_status_shows_a_rank_whose_workers_seat_is_on_another_host(told: Told) -> None:
    for rank, (here, everybody, text) in enumerate(told(looked_at)):
        assert here == ([FAR] if rank == FAR else [0, 1, 2])
        assert everybody == [0, 1, 2, 3]
        (row,) = [line.split() for line in text.splitlines() if line.split()[:1] == [str(FAR)]]
        steps, _, submitted, taken, behind = row[3:8]
        assert (steps, submitted, taken, behind) == (str(BEFORE), str(2 * BEFORE), str(2 * BEFORE), "-")
