"""When a run has ended, its memory is given back at once, and the model's tensors have memory of their own again.

Python's cyclic collector is switched off here: it would come round some day, and a GPU's memory would wait for it.
"""

from __future__ import annotations

import gc
import io
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat as ob
from tests.support.in_step import IN_STEP
from tests.support.long import every_or_in_turns
from tests.support.scenarios import Call, Turns, in_turn, over

pytestmark = pytest.mark.live

STEPS, PATIENCE_S, NEVER_S = 4, 120.0, 600.0
CODED = ob.codec.qsgd(8)
OTHERS = (
    ob.eager(),
    ob.eager(late=1),
    ob.eager(stale="drop"),
    ob.eager("everyone", codec=CODED),
    ob.eager(sync="bounded", staleness=2),
    ob.ringmaster(2),
    ob.decoupled(2, 3),
    ob.wagma(),
    ob.wagma(tau=None, wait="everyone"),
    ob.wagma(merge="correct"),
    ob.wagma(late=1),
    ob.wagma(codec=CODED),
    ob.wagma(merge="correct", codec=CODED),
    ob.ad_psgd(),
    ob.wagma(moments=2),
    ob.ad_psgd(moments=2),
    ob.self_clocked(moments=1),
    ob.decoupled(2, 3, moments=1),
    ob.nonblocking(2),
    ob.nonblocking(2, over="server"),
    ob.nonblocking(2, over="ring"),
    ob.nonblocking(2, codec=CODED, stop=NEVER_S),
)
CASES = {**IN_STEP, **{str(s): s for s in OTHERS}}
NODES = {str(s): s for s in (ob.eager(per_node=2), ob.wagma(per_node=2, late=1), ob.wagma(per_node=2, moments=2))}
LONG = {
    str(s): s for s in (ob.eager(), ob.wagma(merge="correct"), ob.wagma(late=1), ob.self_clocked(), ob.wagma(moments=1))
}
WIDE, FEW_BYTES = 96, 2048


class Net(nn.Module):
    """A wide body with statistics of its own, and a small head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(WIDE, WIDE), nn.BatchNorm1d(WIDE), nn.Linear(WIDE, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)))


def storages() -> dict[int, int]:
    """The memory of every tensor there is: where it lies, and how many bytes."""
    tensors = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
    held = [t.untyped_storage() for t in tensors if t.layout == torch.strided and t.device.type == "cpu"]
    return {storage.data_ptr(): storage.nbytes() for storage in held if storage.nbytes()}


def of_the_user(model: nn.Module, inner: torch.optim.Optimizer) -> set[int]:
    mine = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    mine += [v for state in inner.state.values() for v in state.values() if isinstance(v, Tensor)]
    return {t.untyped_storage().data_ptr() for t in mine}


def bytes_in(value: Any) -> int:
    """Of all tensors in nested dicts and lists."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(bytes_in(child) for child in children)


def saved_bytes(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue())


class Stopped(Exception):
    pass


def trained(rank: int, strategy: ob.Strategy, fails: bool) -> dict[str, Any]:
    """One run from attach to its end. What is left then, beyond what belongs to the user."""
    model = Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    before, head_bytes = storages(), saved_bytes(model.head.state_dict())
    facts = [(p.stride(), p.requires_grad, id(p)) for p in model.parameters()]
    optimizer = ob.attach(inner, model, strategy, patience_s=PATIENCE_S)
    try:
        with optimizer:
            for t in range(STEPS):
                x = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(10 * rank + t))
                optimizer.zero_grad()
                if strategy.name == "nonblocking":
                    for piece in optimizer.micro_batches(x):
                        model(piece).square().mean().backward()
                else:
                    model(x).square().mean().backward()
                optimizer.step()
                del x
            optimizer.state_dict()  # nothing that was made for it stays, either
            optimizer.average()
            values = {name: v.clone() for name, v in model.state_dict().items()}
            if fails:
                if dist.is_initialized():
                    dist.barrier()
                raise Stopped
    except Stopped:
        pass
    kept = bytes_in(optimizer.state_dict()["offbeat"])

    def extra() -> int:
        mine = of_the_user(model, inner)
        return sum(n for at, n in storages().items() if at not in before and at not in mine)

    out: dict[str, Any] = {
        "same values": not fails or all(torch.equal(v, values[name]) for name, v in model.state_dict().items()),
        "same facts": facts == [(p.stride(), p.requires_grad, id(p)) for p in model.parameters()],
        "momentum": all("momentum_buffer" in inner.state[p] for p in model.parameters())
        or strategy.name == "nonblocking",
        "grown bytes": saved_bytes(model.head.state_dict()) - head_bytes,
        "grown gradient": max(
            p.grad.untyped_storage().nbytes() - 4 * p.numel() for p in model.parameters() if p.grad is not None
        ),
    }
    del values
    optimizer.zero_grad()
    out["told"] = (
        str(optimizer.summary()),
        optimizer.wait_s >= 0,
        optimizer.wire_bytes > 0,
        optimizer.lost,
        len(optimizer.trace.rounds),
    )
    out["samples used"] = sum(optimizer.samples_used)
    out["extra bytes"] = extra() - kept
    del optimizer
    out["extra bytes without the optimizer"] = extra()
    return out


def run(rank: int, name: str, fails: bool) -> dict[str, Any]:
    gc.collect()
    gc.disable()
    warnings.simplefilter("ignore")  # of samples that nobody reached
    out = trained(rank, {**CASES, **NODES, **LONG}[name], fails)
    gc.enable()
    return out


OF_THREE, OF_FOUR = (3, False), [(4, False), (4, True)]
OTHERWISE = [(1, False), (3, True), (1, True)]
EVERY = [(*group, name) for name, group in every_or_in_turns(CASES, [OF_THREE], OTHERWISE)]
EVERY += [(*group, name) for name in NODES for group in OF_FOUR]
Ran = dict[tuple[int, bool], Turns[str]]
each_run = pytest.mark.parametrize(("size", "fails", "name"), EVERY)


@pytest.fixture(scope="module")
def ran() -> Ran:
    return {
        (size, fails): in_turn({n: Call(run, (n, fails)) for *its, n in EVERY if its == [size, fails]}, size)
        for size, fails in (OF_THREE, *OTHERWISE, *OF_FOUR)
    }


@pytest.fixture(scope="module")
def ran_long() -> Turns[tuple[str, bool]]:
    return in_turn({(n, f): Call(over, ("long", run, n, f)) for n in LONG for f in (False, True)}, 3)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", list(LONG))
def test_where_vectors_are_long_nothing_holds_itself_either(
    ran_long: Turns[tuple[str, bool]], name: str, fails: bool
) -> None:
    for out in ran_long[name, fails]:
        assert out["extra bytes"] < FEW_BYTES, "beyond what state_dict() holds"
        assert out["extra bytes without the optimizer"] < FEW_BYTES


@each_run
def test_the_memory_of_a_run_that_has_ended_is_given_back_at_once(ran: Ran, size: int, fails: bool, name: str) -> None:
    for out in ran[size, fails][name]:
        assert out["extra bytes"] < FEW_BYTES, "beyond what state_dict() holds"
        assert out["extra bytes without the optimizer"] < FEW_BYTES


@each_run
def test_a_part_of_a_model_is_saved_by_itself_after_the_end(ran: Ran, size: int, fails: bool, name: str) -> None:
    for out in ran[size, fails][name]:
        assert out["grown bytes"] < FEW_BYTES
        assert out["grown gradient"] == 0


@each_run
def test_the_tensors_of_a_model_stay_what_they_were(ran: Ran, size: int, fails: bool, name: str) -> None:
    for out in ran[size, fails][name]:
        assert (out["same values"], out["same facts"], out["momentum"]) == (True, True, True)


@each_run
def test_an_optimizer_still_tells_of_its_run_after_the_end(ran: Ran, size: int, fails: bool, name: str) -> None:
    partial = name.startswith(("decoupled", "eager", "ringmaster", "self_clocked", "wagma")) and size != 4
    for out in ran[size, fails][name]:
        said, waited, sent, lost, rounds = out["told"]
        assert said
        assert waited
        assert isinstance(lost, list)
        assert not partial or rounds > 0
        seldom = any(word in name for word in ("loco", "local_sgd", "matcha"))
        assert sent or size == 1 or seldom
        assert out["samples used"] > 0 or not name.startswith("nonblocking")
