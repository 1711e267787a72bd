"""What leaves a host is coded by the host processes: as in the simulator where each worker has a host of its own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import offbeat as ob
from tests.support.forge import hear, say
from tests.support.in_step import IN_STEP, task
from tests.support.long import LONG as LONG_RUN
from tests.support.nets import flat, loss, net, sgd
from tests.support.scenarios import Told, scenario

pytestmark = pytest.mark.live

STEPS, SIZE = 6, 3
CODED = {name: one for name, one in IN_STEP.items() if one.settings.get("codec") is not None or one.name == "qsgd"}
ROUNDS = {
    "wagma": ob.wagma(3, 1, "everyone", codec=ob.codec.int8(bucket=7)),
    "wagma, correct": ob.wagma(3, 1, "everyone", merge="correct", codec=ob.codec.qsgd(8)),
    "wagma in pairs": ob.wagma(2, 2, "everyone", codec=ob.codec.int8(bucket=7)),
    "eager": ob.eager("everyone", sync_every=1, codec=ob.codec.int8(bucket=7)),
    "eager, one bucket": ob.eager("everyone", sync_every=1, codec=ob.codec.qsgd(4, bucket=100_000)),
    "self_clocked": ob.self_clocked(group=None, wait="everyone", late=0, codec=ob.codec.int8(bucket=7)),
}
METHODS = {**CODED, **ROUNDS}
IN_PAIRS = {name: one for k, (name, one) in enumerate(METHODS.items()) if LONG_RUN or k % 2 == 0}
OF_GRADIENTS, PARAMETERS = ("qsgd", "allreduce"), 4  # with which goes who has one, and of which parameters
# Vectors that the adder's thread codes; and those that are not coded go in two phases, too, as there are three hosts.
LONG = {
    str(one): one
    for one in (
        ob.allreduce(),
        ob.qsgd(),
        ob.local_sgd(2),
        ob.local_sgd(2, codec=ob.codec.int8()),
        ob.dasgd(2, 1, codec=ob.codec.bf16()),
        ob.dpsgd(codec=ob.codec.qsgd(8)),
        ob.eager("everyone"),
        ob.eager("everyone", codec=ob.codec.int8()),
        ob.wagma(3, 2, "everyone"),
        ob.wagma(3, 2, "everyone", codec=ob.codec.int8()),
        ob.self_clocked(group=None, wait="everyone", late=0),
    )
}
Ran = dict[str, tuple[Tensor, int]]


def long_task() -> ob.Task:
    return ob.tasks.regression(dimension=40_000, batch=8, dtype=torch.float64)


def train(rank: int, strategy: ob.Strategy, work: ob.Task, device: str) -> tuple[Tensor, int]:
    """The weights after the last step, and the bytes that were sent until then."""
    model = work.build(0).to(device)
    optimizer = ob.attach(work.optimizer(list(model.parameters())), model, strategy, steps=STEPS, patience_s=60)
    for t in range(STEPS):
        optimizer.zero_grad()
        work.value(model, tuple(part.to(device) for part in work.take(rank, t))).backward()
        optimizer.step()
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach().cpu()
    before = weights.clone(), optimizer.wire_bytes
    optimizer.finish()
    return before


def all_of(rank: int, host: int, methods: dict[str, ob.Strategy], work: ob.Task, device: str = "cpu") -> Ran:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFBEAT_HOST", f"host {host}")
        return {name: train(rank, strategy, work, device) for name, strategy in methods.items()}


@scenario(SIZE)
def each_on_its_own(rank: int) -> Ran:
    return all_of(rank, rank, METHODS, task())


@scenario(SIZE)
def on_a_gpu(rank: int) -> Ran:
    return all_of(rank, rank, METHODS, task(), "cuda")


@scenario(SIZE)
def of_long_vectors(rank: int) -> Ran:
    return all_of(rank, rank, LONG, long_task())


@scenario(4)
def in_pairs(rank: int) -> Ran:
    return all_of(rank, rank // 2, IN_PAIRS, task())


@pytest.mark.parametrize("name", METHODS)
def test_coded_by_hosts_of_one_rank_all_is_as_in_the_simulator(told: Told, name: str) -> None:
    there = ob.simulate(METHODS[name], task(), SIZE, STEPS)
    here = told(each_on_its_own)
    for rank, ran in enumerate(here):
        assert (ran[name][0] - there.weights[rank]).abs().max() < 1e-9
    headers = SIZE * (SIZE - 1) * STEPS * (1 + PARAMETERS) if METHODS[name].name in OF_GRADIENTS else 0
    sent = sum(ran[name][1] for ran in here) - headers
    assert abs(sent - there.wire_bytes) < SIZE * STEPS  # each counts whole bytes of every exchange


OF_WORKERS = ("qsgd", "dpsgd", "sparseloco")  # each codes its own, with the draws of its own device


@pytest.mark.skipif("not torch.cuda.is_available()", reason="there is no GPU here")
@pytest.mark.parametrize("name", [name for name, one in METHODS.items() if one.name not in OF_WORKERS])
def test_on_a_gpu_hosts_code_in_their_own_memory(told: Told, name: str) -> None:
    there = ob.simulate(METHODS[name], task(), SIZE, STEPS)
    for rank, ran in enumerate(told(on_a_gpu)):
        assert (ran[name][0] - there.weights[rank]).abs().max() < 1e-9


@pytest.mark.parametrize("name", LONG)
def test_long_vectors_of_three_hosts_end_as_in_the_simulator(told: Told, name: str) -> None:
    there = ob.simulate(LONG[name], long_task(), SIZE, STEPS)
    for rank, ran in enumerate(told(of_long_vectors)):
        assert (ran[name][0] - there.weights[rank]).abs().max() < 1e-12 * max(1e3, float(there.weights.abs().max()))


@pytest.mark.parametrize("name", IN_PAIRS)
def test_coded_by_hosts_of_two_ranks_all_go_on_near_the_simulator(told: Told, name: str) -> None:
    there = ob.simulate(METHODS[name], task(), 4, STEPS)
    for rank, ran in enumerate(told(in_pairs)):
        assert (ran[name][0] - there.weights[rank]).abs().max() < 0.1


ALONE = {
    "eager": ob.eager(sync_every=None, codec=ob.codec.int8()),
    "wagma": ob.wagma(2, None, merge="correct", codec=ob.codec.int8()),
    "self_clocked": ob.self_clocked(wait="first", codec=ob.codec.int8()),
}


def let_go_on(pid: int) -> None:
    """A worker that is about to stop has not stopped yet; what comes before would be lost."""
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] != "T":
        time.sleep(0.001)
    os.kill(pid, signal.SIGCONT)


@scenario(SIZE)
def while_one_is_stopped(rank: int) -> dict[str, Tensor]:
    """The last rank stops its process; the others take steps, and let it go on only then."""
    out, pids = {}, [0] * SIZE
    dist.all_gather_object(pids, os.getpid())
    for name, strategy in ALONE.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OFFBEAT_HOST", f"host {rank}")
            model = net()
            with ob.attach(sgd(model), model, strategy, patience_s=60) as optimizer:
                for t in range(30 if rank < SIZE - 1 else 12):
                    if t == 6:
                        dist.barrier()
                    if t == 6 and rank == SIZE - 1:
                        os.kill(os.getpid(), signal.SIGSTOP)
                    optimizer.zero_grad()
                    loss(model, rank, t).backward()
                    optimizer.step()
                if rank < SIZE - 1:
                    say(f"{name} {rank}")
                    for other in range(SIZE - 1):
                        hear(f"{name} {other}")
                if rank == 0:
                    let_go_on(pids[-1])
        out[name] = flat(model)
    return out


@pytest.mark.parametrize("name", ALONE)
def test_a_worker_that_is_stopped_delays_no_coded_round_of_other_hosts(told: Told, name: str) -> None:
    everyones = [run[name] for run in told(while_one_is_stopped)]
    assert all(torch.equal(weights, everyones[0]) for weights in everyones)
