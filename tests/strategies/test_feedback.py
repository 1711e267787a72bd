"""What a codec loses is kept and sent with the next average; codecs that leave numbers out need it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import offbeat as ob
from offbeat.method import (
    Axes,
    Body,
    Codec,
    Facts,
    Grad,
    GradMix,
    Mix,
    Paper,
    Replica,
    Vec,
    method,
    nothing_lost,
    topology,
)

PAPER = Paper(
    "forgetful", "Forgetful", "None", "Nobody, N.", 2026, "arXiv", Axes("weights", "every step", "everyone"), ()
)
WORKERS, STEPS, SIZE, LR = 4, 60, 200, 0.5
SLOPES = torch.logspace(-4, 0, SIZE) * torch.linspace(0.5, 1, WORKERS)[:, None]
LEVEL = LR / 127
TOPK = ob.codec.topk(4, 16)
REFUSE: dict[str, Callable[[Codec], object]] = {
    "eager": lambda c: ob.eager(codec=c),
    "ringmaster": lambda c: ob.ringmaster(codec=c),
    "wagma": lambda c: ob.wagma(codec=c),
    "nonblocking": lambda c: ob.nonblocking(codec=c),
    "dpsgd": lambda c: ob.dpsgd(codec=c),
    "sgp": lambda c: ob.sgp(codec=c),
    "matcha": lambda c: ob.matcha(codec=c),
    "self_clocked": lambda c: ob.self_clocked(codec=c),
}
KEEP: dict[str, Callable[[Codec | None], ob.Strategy]] = {
    "local_sgd": lambda c: ob.local_sgd(1, codec=c),
    "adaptive": lambda c: ob.adaptive(1, low=0.0, high=9.0, codec=c),
    "dasgd": lambda c: ob.dasgd(1, 0, 0.0, codec=c),
    "dasgd correct": lambda c: ob.dasgd(1, 0, merge="correct", codec=c),
    "diloco": lambda c: ob.diloco(1, 1.0, 0.0, codec=c),
    "sparseloco": lambda c: ob.sparseloco(1, 1.0, codec=c),
    "wagma": lambda c: ob.wagma(4, None, "everyone", codec=c),
    "wagma correct": lambda c: ob.wagma(4, None, "everyone", merge="correct", codec=c),
    "self_clocked": lambda c: ob.self_clocked(1, None, "everyone", late=0, codec=c),
    "self_clocked, late": lambda c: ob.self_clocked(1, None, "everyone", codec=c),
    "self_clocked in pairs": lambda c: ob.self_clocked(1, 2, codec=c),
}
FROM_THE_BEGINNING = tuple(name for name in KEEP if name.startswith(("self_clocked", "wagma")))  # what travels


@method(PAPER, Facts(meets="everyone", waits_where_it_begins=True))
def forgetful(codec: Codec) -> Body:
    """Local SGD of period 1 that keeps nothing of what its codec loses."""

    async def body(me: Replica) -> None:
        anchor, everyone = me.x.clone(), topology.everyone(me.size)
        async for t in me.steps():
            me.step(await Grad())
            me.x.copy_(anchor.add_(await Mix(me.x - anchor, everyone(t), codec)))

    return body


def ramp(jump: float = 0.0) -> ob.Task:
    """A loss with the same slopes everywhere: every step of a worker is the same, and weights add them up. But in the
    first step the last number takes a ``jump``."""
    first = SLOPES + jump * torch.nn.functional.one_hot(torch.tensor(SIZE - 1), SIZE)
    return ob.Task(
        model=lambda: torch.nn.Linear(SIZE, 1, bias=False),
        loss=lambda output, target: (output * target).mean(),
        batch=lambda rank, step: ((SLOPES if step else first)[rank : rank + 1], torch.ones(1, 1)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LR),
    )


def way(strategy: ob.Strategy, jump: float = 0.0) -> torch.Tensor:
    """From the beginning to the end."""
    begin, end = (ob.simulate(strategy, ramp(jump), WORKERS, steps).final for steps in (0, STEPS))
    return end - begin


@pytest.mark.parametrize("name", KEEP)
def test_steps_below_a_level_add_up(name: str) -> None:
    """Some levels are those of all that was learned, which the jump makes large."""
    jump = 1000.0 if name in FROM_THE_BEGINNING else 0.0
    error = (way(KEEP[name](ob.codec.int8()), jump) - way(KEEP[name](None), jump)).abs().max()
    assert 0 < error < 1.5 * LEVEL * (1 + jump)
    assert way(KEEP[name](None), jump)[:-1].abs().max() > 4 * LEVEL * (1 + jump)


def test_of_a_method_that_keeps_nothing_they_are_lost() -> None:
    error = (way(forgetful(ob.codec.int8())) - way(ob.local_sgd(1))).abs()
    assert error.max() > 20 * LEVEL
    assert error[: SIZE // 4].max() == pytest.approx(way(ob.local_sgd(1))[: SIZE // 4].abs().max())


@pytest.mark.parametrize("name", [name for name in KEEP if name not in FROM_THE_BEGINNING])
def test_what_is_left_out_comes_later(name: str) -> None:
    """All but 20 of 200 numbers are left out each time."""
    exact, coded = way(KEEP[name](None)), way(KEEP[name](ob.codec.topk(20)))
    assert (coded - exact).norm() < 0.2 * exact.norm()
    assert int((coded != 0).sum()) > 60


@pytest.mark.parametrize("name", REFUSE)
def test_a_codec_that_leaves_numbers_out_is_refused_where_nothing_sends_them_later(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: nothing sends later what topk4 leaves out; use bf16, .* sparseloco"):
        REFUSE[name](TOPK)


def test_methods_of_ones_own_are_told_so_too() -> None:
    W, x = topology.everyone(3)(0), Vec((torch.zeros(9),))
    asked: list[Callable[[], object]] = [
        lambda: Mix(x, W, TOPK),
        lambda: GradMix(W, TOPK),
        lambda: way(forgetful(TOPK)),
    ]
    for ask in asked:
        with pytest.raises(ValueError, match="topk4 leaves most numbers out, and nothing keeps them"):
            ask()
    assert Mix(x, W, TOPK, nothing_lost(x)).in_two_phases(1)


@pytest.mark.parametrize("gathers", [False, True])
def test_what_was_lost_is_kept_in_whole_groups_alone(gathers: bool) -> None:
    x, ring = Vec((torch.zeros(9),)), topology.graph("ring", 4)(0)
    with pytest.raises(ValueError, match="what a codec lost is kept where a whole group takes its mean"):
        Mix(x, ring, ob.codec.int8(), nothing_lost(x), gathers).in_two_phases(0)
    assert not Mix(x, ring, ob.codec.int8(), gathers=gathers).in_two_phases(0)
    assert Mix(x, topology.everyone(4)(0), ob.codec.int8(), nothing_lost(x), gathers).in_two_phases(0) != gathers
