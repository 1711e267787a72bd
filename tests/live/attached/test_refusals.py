"""What cannot be attached, and what cannot be done then, is refused with a sentence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offbeat as ob
from offbeat.live.attached import refusals as where_versions_are_compared
from offbeat.method.effects import Grad
from tests.support.forge import attempt
from tests.support.nets import PATIENCE_S, SIZE, loss, net, sgd
from tests.support.scenarios import Told, scenario

pytestmark = pytest.mark.live


def _complex() -> tuple[torch.optim.Optimizer, nn.Module]:
    model = nn.Linear(2, 2, dtype=torch.complex64)
    return sgd(model), model


@scenario(SIZE)
def refusals(rank: int) -> Any:
    model, other = net(), net()
    attach: Any = ob.attach  # also with what its types forbid
    attached = ob.attach(sgd(other), other, ob.allreduce())
    frozen = net().requires_grad_(False)
    out = {
        "LBFGS": attempt(lambda: ob.attach(torch.optim.LBFGS(model.parameters()), model, ob.allreduce())),
        "nothing to learn": attempt(lambda: ob.attach(sgd(frozen), frozen, ob.allreduce())),
        "swapped": attempt(lambda: attach(model, sgd(model), ob.allreduce())),
        "no method": attempt(lambda: attach(sgd(model), model, 8)),
        "no such method": attempt(lambda: attach(sgd(model), model, "lokal_sgd:period=8")),
        "both names": attempt(lambda: attach(sgd(model), model, "eager", strategy=ob.allreduce())),
        "factory": attempt(lambda: attach(sgd(model), model, ob.local_sgd)),
        "twice": attempt(lambda: ob.attach(attached, other, ob.allreduce())),
        "accumulate": attempt(lambda: ob.attach(sgd(model), model, ob.allreduce(), accumulate=0)),
        "ddp": attempt(lambda: ob.attach(sgd(model), nn.parallel.DistributedDataParallel(model), ob.allreduce())),
        "complex": attempt(lambda: ob.attach(*_complex(), ob.allreduce())),
        "new group": attempt(lambda: attached.add_param_group({"params": []})),
    }
    attached.finish()
    out["step"] = attempt(attached.step)
    out["average"] = attempt(attached.average)
    out["finish"] = attempt(attached.finish)
    loss(other, rank, 0).backward()  # the model is the user's again
    return out


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("LBFGS", "LBFGS needs a closure"),
        ("nothing to learn", "no trainable parameters"),
        ("swapped", "attach takes (optimizer, model, method), but got (Sequential, SGD"),
        ("no method", "8 is not a method; use one such as ob.local_sgd(period=8), in words 'local_sgd:period=8'"),
        ("no such method", "no method is called 'lokal_sgd'; did you mean 'local_sgd'?"),
        ("both names", "method=eager and strategy=allreduce() are two names of one argument; give method alone"),
        ("factory", "TypeError: ob.local_sgd is the function that makes the method; call it: ob.local_sgd()"),
        ("twice", "attached already, with allreduce()"),
        ("accumulate", "accumulate is 0"),
        ("ddp", "DistributedDataParallel"),
        ("complex", "complex64"),
        ("new group", "before it"),
        ("step", "step() came after the run was ended"),
        ("average", "average() came after the run was ended"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(told: Told, case: str, words: str) -> None:
    for out in told(refusals):
        assert words in out[case]


def test_finish_may_be_called_twice(told: Told) -> None:
    assert [out["finish"] for out in told(refusals)] == ["", "", ""]


@scenario(SIZE)
def foreign_effect(rank: int) -> Any:
    class Sleep:
        def __await__(self) -> Any:
            return (yield self)

        def __repr__(self) -> str:
            return "Sleep()"

    async def body(me: Any) -> None:
        async for _ in me.steps():
            await Grad()
            await Sleep()

    base = ob.local_sgd()
    strategy = ob.Strategy(base.paper, base.make, base.settings, body)
    model = net()
    said = []

    def use() -> None:
        with ob.attach(sgd(model), model, strategy, patience_s=PATIENCE_S) as optimizer:
            loss(model, rank, 0).backward()
            dist.barrier()  # a backward that begins when another rank has raised says that, and not what is asked here
            said.append(attempt(optimizer.step))
            raise ValueError("leave")

    attempt(use)
    return said[0]


def test_an_effect_that_is_not_ours_is_named(told: Told) -> None:
    for said in told(foreign_effect):
        assert "a method awaited Sleep(), which is not an Offbeat effect" in said


def _partly_frozen(width: int) -> nn.Module:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, width)])
    model[1].requires_grad_(False)
    return model


@scenario(SIZE)
def mismatches(rank: int) -> Any:
    odd = rank == 2
    cases: dict[str, Callable[[], Any]] = {
        "names": lambda: (nn.ModuleDict({"b" if odd else "a": nn.Linear(2, 2)}), ob.allreduce(), {}),
        "shapes": lambda: (nn.Linear(2, 3 if odd else 2), ob.allreduce(), {}),
        "dtypes": lambda: (nn.Linear(2, 2, dtype=torch.float64 if odd else torch.float32), ob.allreduce(), {}),
        "count": lambda: (nn.Linear(2, 2, bias=not odd), ob.allreduce(), {}),
        "frozen": lambda: (_partly_frozen(3 if odd else 2), ob.allreduce(), {}),
        "buffers": lambda: (nn.BatchNorm1d(2, track_running_stats=not odd), ob.allreduce(), {}),
        "method": lambda: (net(), ob.local_sgd(period=4 if odd else 8), {}),
        "accumulate": lambda: (net(), ob.allreduce(), {"accumulate": 2 if odd else 1}),
        "seed": lambda: (net(), ob.noloco(), {"seed": int(odd)}),
    }
    out = {}
    for name, case in cases.items():
        model, strategy, settings = case()
        out[name] = attempt(partial(ob.attach, sgd(model), model, strategy, **settings))
    return out


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("names", ["rank 0 has a.weight", "rank 2 has b.weight"]),
        ("shapes", ["rank 0 has weight (2, 2)", "rank 2 has weight (3, 2)"]),
        ("dtypes", ["torch.float32", "torch.float64"]),
        ("count", ["rank 0 has 2 ", "rank 2 has 1"]),
        ("frozen", ["(2, 2)", "(3, 2)", "(frozen)"]),
        ("buffers", ["rank 0 has 5 ", "rank 2 has 2"]),
        ("method", ["method: rank 0 has local_sgd(period=8", "local_sgd(period=4"]),
        ("accumulate", ["accumulate: rank 0 has 1, rank 2 has 2"]),
        ("seed", ["seed: rank 0 has 0, rank 2 has 1"]),
    ],
)
def test_ranks_that_differ_are_refused_on_all_ranks(told: Told, case: str, words: list[str]) -> None:
    for out in told(mismatches):
        assert out[case].startswith("ConfigMismatch: ")
        for word in words:
            assert word in out[case]


@scenario(SIZE)
def version(rank: int) -> Any:

    checks: Any = where_versions_are_compared
    kept = checks.__version__
    checks.__version__ = "9.9" if rank == 0 else kept
    said = attempt(lambda: ob.attach(sgd(model), model, ob.allreduce())) if (model := net()) else ""
    checks.__version__ = kept
    return said


def test_versions_that_differ_are_refused_on_all_ranks(told: Told) -> None:
    for said in told(version):
        assert "Offbeat version: rank 0 has 9.9, rank 1 has" in said
