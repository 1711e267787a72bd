"""Models on a GPU. Partial rounds: trays are pinned host memory, and no snapshot of one is ever torn. All methods: also
where several ranks share a GPU, which NCCL refuses, or where the user chose Gloo."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import offbeat as ob
from offbeat.live.transport.staging import Staging
from offbeat.tensors.vector import Vec
from tests.live.attached.attach_jobs import PATIENCE_S, batch, flat, net, sgd
from tests.live.partial.partial_jobs import AT_MOST, Flow, Seen
from tests.support import forge
from tests.support.forge import Job
from tests.worlds.test_twins import CASES

pytestmark = [
    pytest.mark.live,
    # A string, which pytest alone evaluates: once asked, CUDA cannot be used after a fork, and workers are forked from
    # a process that has imported this file.
    pytest.mark.skipif("not torch.cuda.is_available()", reason="there is no GPU here"),
]

SIZE, BATCHES = 3, (9, 0, 12)
EXACT = ("first", "majority", "late", "bounded", "every step, late", "wagma, late", "wagma, correct", "ad_psgd")
NAMES = (*EXACT, "coded", "wagma", "wagma, every step", "wagma, coded", "latest")
FLOWS = ((1_000, 30), (3_000_000, 30))
SHARING, STEPS, NEVER_S = 4, 8, 600.0
IN_STEP = (  # nobody is late, so that the result does not depend on timing
    ob.eager("everyone"),
    ob.eager("everyone", per_node=2),
    ob.eager("everyone", codec=ob.codec.qsgd(8)),
    ob.wagma(2, 3, "everyone"),
    ob.wagma(2, 3, "everyone", merge="correct"),
    ob.wagma(2, 3, "everyone", per_node=2),
    ob.wagma(2, 3, "everyone", codec=ob.codec.qsgd(8)),
    ob.nonblocking(2, stop=NEVER_S),
    ob.nonblocking(2, over="server", stop=NEVER_S),
    ob.nonblocking(2, over="ring", stop=NEVER_S),
    ob.nonblocking(2, codec=ob.codec.qsgd(8), stop=NEVER_S),
)
METHODS = {**CASES, **{str(s): s for s in (*IN_STEP, ob.ad_psgd())}}
CODED = [name for name in METHODS if "qsgd" in name]  # codecs draw other numbers on another device


def all_methods(rank: int, device: str, made_by: str) -> dict[str, torch.Tensor]:
    """What every method ends with, all ranks on one device; the default group is made by the user, or by Offbeat."""
    if made_by == "user":
        dist.init_process_group("gloo")
    else:
        ob.init()
    out, keep = {}, ob.attach(sgd(other := net()), other, ob.allreduce())
    for name, strategy in METHODS.items():
        model = net().to(device)
        with ob.attach(sgd(model, lr=0.05), model, strategy, steps=STEPS, patience_s=PATIENCE_S) as optimizer:
            for t in range(STEPS):
                x, y = (part.to(device) for part in batch(rank, t))
                optimizer.zero_grad()
                if strategy.name == "nonblocking":
                    for a, b in optimizer.micro_batches((x, y)):
                        F.mse_loss(model(a), b).backward()
                else:
                    F.mse_loss(model(x), y).backward()
                optimizer.step()
        out[name] = flat(model).cpu()
    keep.finish()
    return out


PLAN = {
    **{
        (device, made_by): Job(__name__, "all_methods", SHARING, (device, made_by), timeout_s=600)
        for device, made_by in (("cpu", "user"), ("cuda", "user"), ("cuda", "offbeat"))
    },
    "cases": Job("tests.live.partial.partial_jobs", "all_cases", SIZE, (SIZE, NAMES, BATCHES, "cuda"), timeout_s=600),
    "memory": Job(__name__, "memory_left", SHARING, (), timeout_s=600),
    "flows": Job("tests.live.partial.partial_jobs", "stress", SIZE, (FLOWS, "cuda"), timeout_s=600),
}


@pytest.fixture(scope="module")
def told() -> dict[Any, list[Any]]:
    return {name: forge.values(out) for name, out in zip(PLAN, forge.run(list(PLAN.values())), strict=True)}


def slow_ones(numbers: int) -> torch.Tensor:
    """Queues seconds of work, at the end of which all elements become 1; the host is far ahead of it."""
    x, factor = torch.zeros(numbers, device="cuda"), torch.randn(8192, 8192, device="cuda")
    product = factor
    for _ in range(75):  # few enough for the device's queue, which would else make the host wait
        product = (product @ factor).clamp_(-1, 1)
    x += product[0, 0] * 0 + 1
    return x


def test_what_is_staged_is_complete_though_the_device_was_far_behind() -> None:
    slow_ones(10)
    torch.cuda.synchronize()
    for numbers in (1, 1_000, 20_000_000):
        x = slow_ones(numbers)
        assert not torch.cuda.current_stream().query(), "the device is still busy, or this shows nothing"
        host = Staging(Vec([x])).down(Vec([x])).parts[0]
        x.fill_(7.0)
        assert host.is_pinned()
        assert bool((host == 1).all())


def test_half_precision_is_staged_in_a_dtype_that_can_be_summed() -> None:
    x = Vec([torch.full((100,), 1.5, device="cuda", dtype=torch.bfloat16), torch.ones(3, device="cuda").double()])
    down = Staging(x).down(x)
    assert [p.dtype for p in down.parts] == [torch.float32, torch.float64]
    assert [p.device.type for p in Staging(x).up(down).parts] == ["cuda", "cuda"]


def test_a_result_on_its_way_up_keeps_its_values_though_its_host_memory_is_used_again() -> None:
    staging = Staging(Vec([torch.zeros(1, device="cuda")]))
    slow_ones(10)
    host = torch.ones(20_000_000)
    up = staging.up(Vec([host])).parts[0]
    host.fill_(7.0)
    assert bool((up == 1).all())


def memory_left(rank: int) -> dict[str, list[int]]:
    """Bytes on the GPU before each of three runs and after them, without Python's cyclic collector."""
    dist.init_process_group("gloo")
    gc.disable()
    out = {}
    for name, strategy in METHODS.items():
        model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 2)).cuda()
        seen = []
        for _ in range(3):
            optimizer = ob.attach(torch.optim.SGD(model.parameters()), model, strategy, patience_s=PATIENCE_S)
            pieces = [torch.ones(4, 256, device="cuda")]
            for x in optimizer.micro_batches(pieces[0]) if strategy.name == "nonblocking" else pieces:
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.finish()
            del optimizer, pieces, x
            seen.append(torch.cuda.memory_allocated())
        out[name] = seen
        del model
    return out


@pytest.mark.parametrize("name", METHODS)
def test_runs_one_after_the_other_need_no_more_gpu_memory(told: Any, name: str) -> None:
    for out in told["memory"]:
        first, second, third = out[name]
        assert second <= first
        assert third <= first


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("made_by", ["user", "offbeat"])
def test_ranks_that_share_a_gpu_end_equal_with_every_method(told: Any, made_by: str, name: str) -> None:
    everyones = [out[name] for out in told["cuda", made_by]]
    assert all(torch.equal(one, everyones[0]) for one in everyones)


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].name != "ad_psgd"])
@pytest.mark.parametrize("made_by", ["user", "offbeat"])
def test_ranks_that_share_a_gpu_end_where_those_on_cpus_do(told: Any, made_by: str, name: str) -> None:
    apart = (told["cuda", made_by][0][name] - told["cpu", "user"][0][name]).abs().max()
    assert apart < (0.1 if name in CODED else 1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_on_a_gpu_ends_with_equal_replicas_and_leaves_nothing_behind(told: Any, name: str) -> None:
    everyone: list[Seen] = [out[name] for out in told["cases"]]
    assert all(torch.equal(one.final, everyone[0].final) for one in everyone)
    assert [(one.threads, one.sockets) for one in everyone] == [([], 0)] * SIZE


@pytest.mark.parametrize("name", EXACT)
def test_every_sample_is_applied_exactly_once_on_a_gpu(told: Any, name: str) -> None:
    slots = (told["cases"][0][name].final * SIZE).reshape(SIZE, AT_MOST)
    for rank, steps in enumerate(BATCHES):
        assert torch.allclose(slots[rank, :steps], torch.ones(steps, dtype=torch.float64), rtol=0, atol=1e-9)
        assert not slots[rank, steps:].any()


@pytest.mark.parametrize("number", range(len(FLOWS)))
def test_no_message_from_a_gpu_is_torn(told: Any, number: int) -> None:
    flows: list[Flow] = [out[number] for out in told["flows"]]
    assert all(flow.torn == 0 and flow.results == flows[0].results for flow in flows)
    given, got = sum(flow.deposited for flow in flows), SIZE * sum(flows[0].results.values())
    assert abs(got - given) < 1e-5 * given
