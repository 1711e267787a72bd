"""Models on a GPU. Partial rounds: trays are pinned host memory, and no snapshot of one is ever torn. All methods: also
where several ranks share a GPU, which NCCL refuses, or where the user chose Gloo."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import offbeat as ob
from offbeat.live.memory import adding, kernels
from tests.support import forge
from tests.support.counted import AT_MOST, Seen, one_case
from tests.support.flows import Flow, flow_of
from tests.support.forge import Job
from tests.support.in_step import IN_STEP as SIMPLE
from tests.support.nets import PATIENCE_S, batch, flat, net, sgd
from tests.support.scenarios import Call, Turns, in_turn, over
from tests.support.sums import SHAPES, terms_of

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
METHODS = {**SIMPLE, **{str(s): s for s in (*IN_STEP, ob.ad_psgd())}}
CODED = [name for name in METHODS if "qsgd" in name]  # codecs draw other numbers on another device


def one_method(rank: int, device: str, name: str) -> torch.Tensor:
    """What a method ends with, all ranks on one device."""
    strategy, model = METHODS[name], net().to(device)
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
    return flat(model).cpu()


def call(name: str, function: Callable[..., Any], *args: Any) -> Call:
    """Ranks that read each other's memory code nothing; so what is coded goes as if each had a host of its own."""
    return Call(over, ("each", function, *args)) if "qsgd" in name or "coded" in name else Call(function, args)


Methods = dict[tuple[str, str], Turns[str]]


@pytest.fixture(scope="module")
def methods() -> Methods:
    """By the device and by who makes the default group: the user or Offbeat."""
    return {
        (device, made_by): in_turn(
            {name: call(name, one_method, device, name) for name in METHODS}, SHARING, 600, init=made_by == "user"
        )
        for device, made_by in (("cpu", "user"), ("cuda", "user"), ("cuda", "offbeat"))
    }


@pytest.fixture(scope="module", params=["", "long"])
def cases(request: pytest.FixtureRequest) -> Turns[str]:
    """Each with slots of its own, and as if vectors were long."""
    calls = {name: call(name, one_case, SIZE, name, BATCHES, "cuda") for name in NAMES}
    if request.param:
        calls = {n: c if c.function is over else Call(over, ("long", c.function, *c.args)) for n, c in calls.items()}
    return in_turn(calls, SIZE, 600, init=False)


@pytest.fixture(scope="module")
def memory() -> Turns[str]:
    return in_turn({name: call(name, memory_left, name) for name in METHODS}, SHARING, 600)


@pytest.fixture(scope="module")
def flows() -> Turns[int]:
    return in_turn({k: Call(flow_of, (*each, "cuda")) for k, each in enumerate(FLOWS)}, SIZE, 600, init=False)


def memory_left(rank: int, name: str) -> list[int]:
    """Bytes on the GPU after each of three runs, without Python's cyclic collector."""
    gc.disable()
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 2)).cuda()
    seen = []
    for _ in range(3):
        optimizer = ob.attach(torch.optim.SGD(model.parameters()), model, METHODS[name], patience_s=PATIENCE_S)
        pieces = [torch.ones(4, 256, device="cuda")]
        for x in optimizer.micro_batches(pieces[0]) if METHODS[name].name == "nonblocking" else pieces:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.finish()
        del optimizer, pieces, x
        seen.append(torch.cuda.memory_allocated())
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("first", [0, 1], ids=["at whole words", "beside them"])
@pytest.mark.parametrize("name", [name for name in SHAPES if sum(map(len, SHAPES[name])) > 2])
def test_a_sum_in_one_pass_has_the_bits_of_torchs_passes(
    name: str, first: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = [[(t.to("cuda", dtype)[first:], f) for t, f in term] for term in terms_of(SHAPES[name])]
    numel = terms[0][0][0].numel()
    found, expected = torch.zeros(2, numel, dtype=dtype, device="cuda")
    assert kernels.add_in_one_pass(found, terms, 3, 16, numel - 5), "there is no compiler"
    monkeypatch.setattr(adding, "add_in_one_pass", lambda *_: False)
    adding.add_up(expected[16 : numel - 5], [[(t[16 : numel - 5], f) for t, f in term] for term in terms], 3)
    assert torch.equal(found, expected)
    assert not found[:16].any()
    assert not found[numel - 5 :].any()


@pytest.mark.parametrize("name", METHODS)
def test_runs_one_after_the_other_need_no_more_gpu_memory(memory: Turns[str], name: str) -> None:
    for first, second, third in memory[name]:
        assert second <= first
        assert third <= first


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("made_by", ["user", "offbeat"])
def test_ranks_that_share_a_gpu_end_equal_with_every_method(methods: Methods, made_by: str, name: str) -> None:
    everyones = methods["cuda", made_by][name]
    assert all(torch.equal(one, everyones[0]) for one in everyones)


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].name != "ad_psgd"])
@pytest.mark.parametrize("made_by", ["user", "offbeat"])
def test_ranks_that_share_a_gpu_end_where_those_on_cpus_do(methods: Methods, made_by: str, name: str) -> None:
    apart = (methods["cuda", made_by][name][0] - methods["cpu", "user"][name][0]).abs().max()
    assert apart < (0.1 if name in CODED else 1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_on_a_gpu_ends_with_equal_replicas_and_leaves_nothing_behind(cases: Turns[str], name: str) -> None:
    everyone: list[Seen] = cases[name]
    assert all(torch.equal(one.final, everyone[0].final) for one in everyone)
    assert [(one.threads, one.sockets) for one in everyone] == [([], 0)] * SIZE


@pytest.mark.parametrize("name", EXACT)
def test_every_sample_is_applied_exactly_once_on_a_gpu(cases: Turns[str], name: str) -> None:
    slots = (cases[name][0].final * SIZE).reshape(SIZE, AT_MOST)
    for rank, steps in enumerate(BATCHES):
        assert torch.allclose(slots[rank, :steps], torch.ones(steps, dtype=torch.float64), rtol=0, atol=1e-9)
        assert not slots[rank, steps:].any()


def with_a_nan(rank: int) -> tuple[list[float], list[str]]:
    model = net().to("cuda")
    optimizer = ob.attach(sgd(model), model, ob.eager())
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for t in range(STEPS):
            x, y = (part.to("cuda") for part in batch(rank, t))
            optimizer.zero_grad()
            (F.mse_loss(model(x), y) * (math.nan if (rank, t) == (1, 3) else 1.0)).backward()
            optimizer.step()
        optimizer.finish()
    return flat(model).tolist(), [str(one.message) for one in heard if "not finite" in str(one.message)]


def test_a_gradient_on_a_gpu_that_is_not_finite_is_left_out_without_a_wait_and_named_later() -> None:
    (outcomes,) = forge.run([Job(with_a_nan, SIZE)])
    for rank, (weights, said) in enumerate(forge.values(outcomes)):
        assert torch.tensor(weights).isfinite().all()
        assert [line.partition(" is not finite")[0] for line in said] == ["rank 1: its gradient of step 3"] * (
            rank == 1
        )


@pytest.mark.parametrize("number", range(len(FLOWS)))
def test_no_message_from_a_gpu_is_torn(flows: Turns[int], number: int) -> None:
    seen: list[Flow] = flows[number]
    assert all(flow.torn == 0 and flow.results == seen[0].results for flow in seen)
    given, got = sum(flow.deposited for flow in seen), SIZE * sum(seen[0].results.values())
    assert abs(got - given) < 1e-5 * given
