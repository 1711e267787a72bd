"""The inner optimisers' moments: kept by each worker, or averaged, less often than the weights."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offbeat as ob
from offbeat.method import Grad, Replica, Vec
from offbeat.method.moments import Moments, as_of_the_mean
from offbeat.strategies import STRATEGIES
from offbeat.strategies.desloc import MomentsBeside
from tests.support.formulas import HEAVY, close, final

Optimizer = Callable[[Any], torch.optim.Optimizer]
ADAM: Optimizer = lambda p: torch.optim.AdamW(p, lr=0.05)  # noqa: E731
OPTIMIZERS: dict[str, tuple[Optimizer, str, str | None]] = {
    "AdamW": (ADAM, "exp_avg", "exp_avg_sq"),
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), "momentum_buffer", None),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5), "momentum_buffer", "square_avg"),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.1), "", "sum"),
}


def task(optimizer: Optimizer) -> ob.Task:
    return dataclasses.replace(HEAVY, optimizer=optimizer)


def held(
    strategy: ob.Strategy, optimizer: Optimizer, steps: int | None, workers: int = 3, **how: Any
) -> list[dict[str, Tensor]]:
    """What each worker's optimiser remembers when its method has ended."""
    states: dict[int, dict[str, Tensor]] = {}

    async def body(me: Replica) -> None:
        await strategy.body(me)
        states[me.rank] = {
            name: value.clone()
            for state in me._states().values()
            for name, value in state.items()
            if isinstance(value, Tensor) and value.dim()
        }

    ob.simulate(dataclasses.replace(strategy, body=body), task(optimizer), workers, steps, **how)
    return [states[rank] for rank in range(workers)]


def equal(states: list[dict[str, Tensor]], name: str) -> bool:
    return all(torch.equal(state[name], states[0][name]) for state in states)


def steady(period: int, **how: Any) -> ob.Strategy:
    """Adaptive averaging whose period stays."""
    return ob.adaptive(period, low=0.0, high=math.inf, **how)


every_make = pytest.mark.parametrize("make", [ob.local_sgd, steady])


@every_make
@pytest.mark.parametrize("period", [1, 3])
def test_after_every_average_all_optimisers_remember_the_same(make: Any, period: int) -> None:
    for averages in (1, 2, 3):
        states = held(make(period, moments="1/1"), ADAM, averages * period)
        assert equal(states, "exp_avg")
        assert equal(states, "exp_avg_sq")


IN_STEP: dict[str, Callable[..., ob.Strategy]] = {
    "local_sgd": partial(ob.local_sgd, 1),
    "adaptive": partial(steady, 1),
    "dasgd": partial(ob.dasgd, 1, 0),
    "diloco": partial(ob.diloco, 1),
    "sparseloco": partial(ob.sparseloco, 1),
    "noloco": partial(ob.noloco, 1),
    "dpsgd": ob.dpsgd,
    "matcha": partial(ob.matcha, budget=1.0),
    "sgp": ob.sgp,
}


@pytest.mark.parametrize("name", IN_STEP)
def test_of_two_workers_whose_moments_mix_in_every_step_both_remember_the_same(name: str) -> None:
    """Whatever the graph, of two workers each hears the other; what is mixed is half and half."""
    for moment in ("exp_avg", "exp_avg_sq"):
        apart, together = (held(IN_STEP[name](moments=m), ADAM, 3, workers=2) for m in (None, "1/1"))
        assert not torch.allclose(apart[0][moment], apart[1][moment])
        close(together[0][moment], together[1][moment])


IN_ROUNDS: dict[str, Callable[..., ob.Strategy]] = {
    "wagma": ob.wagma,
    "wagma, correct": partial(ob.wagma, merge="correct"),
    "wagma, late": partial(ob.wagma, late=1),
    "self_clocked": ob.self_clocked,
    "self_clocked, in pairs": partial(ob.self_clocked, group=2),
    "ad_psgd": ob.ad_psgd,
    "decoupled": partial(ob.decoupled, fragments=1),
}
GRADIENTS = {"allreduce", "qsgd", "eager", "msync", "ringmaster", "nonblocking"}
every_round = pytest.mark.parametrize("name", IN_ROUNDS)


def test_every_method_that_averages_weights_has_the_setting() -> None:
    with_it = {name for name, one in STRATEGIES.items() if "moments" in inspect.signature(one.make).parameters}
    assert with_it == {*IN_STEP, *(IN_ROUNDS[name]().name for name in IN_ROUNDS)}
    assert with_it == {*STRATEGIES} - GRADIENTS


@every_round
def test_where_all_come_at_the_same_time_rounds_of_moments_make_all_remember_the_same(name: str) -> None:
    for n, same in ((1, (True, True, True)), (2, (False, True, False)), (None, (False,) * 3)):
        for steps, wanted in zip((1, 2, 3), same, strict=True):
            states = held(IN_ROUNDS[name](moments=n), ADAM, steps, workers=4)
            for moment in ("exp_avg", "exp_avg_sq"):
                assert equal(states, moment) == wanted, (n, steps)


@every_round
def test_the_first_round_of_moments_is_the_mean_of_what_the_workers_held(name: str) -> None:
    apart, together = (held(IN_ROUNDS[name](moments=n), ADAM, 2, workers=4) for n in (None, 2))
    for moment in ("exp_avg", "exp_avg_sq"):
        close(together[0][moment], torch.stack([state[moment] for state in apart]).mean(0))


def one_in_twenty(step: int, rank: int) -> float:
    """Rank 2 is twenty times slower."""
    return 2.0 if rank == 2 else 0.1


@every_round
def test_nobody_waits_for_a_slow_worker_s_moments(name: str) -> None:
    """What it handed in last, nothing at first, answers for it; so all take as many steps as without."""
    how = {"seconds": 4.0, "compute_s": one_in_twenty}
    settings = {"tau": None} if name.startswith("wagma") else {"quorum": 2} if name == "decoupled" else {}
    taken = [
        ob.simulate(IN_ROUNDS[name](moments=n, **settings), task(ADAM), 4, **how).gradients  # type: ignore[arg-type]
        for n in (None, 1)
    ]
    assert taken[0] == taken[1]
    assert taken[0][0] > 10 * taken[0][2]


@every_round
def test_whoever_is_late_moments_come_nearer_to_each_other_and_squares_stay_positive(name: str) -> None:
    late = {"compute_s": lambda step, rank: 0.1 + 0.07 * rank, "seconds": 3.0}
    settings = {"tau": None} if name.startswith("wagma") else {"quorum": 2} if name == "decoupled" else {}
    states = held(IN_ROUNDS[name](moments=1, **settings), ADAM, None, workers=4, **late)
    assert all((state["exp_avg_sq"] >= 0).all() for state in states)
    apart = held(IN_ROUNDS[name](moments=None, **settings), ADAM, None, workers=4, **late)

    def spread(states: list[dict[str, Tensor]]) -> float:
        return float(torch.stack([state["exp_avg_sq"] for state in states]).std(0).mean())

    assert spread(states) < spread(apart) / 2


def test_a_late_worker_blends_the_mean_with_its_own() -> None:
    """(S · mean + own) / (S + 1), by hand: one round of two workers' moments, of which one comes later."""
    seen: dict[int, list[Tensor]] = {0: [], 1: []}

    def squares(me: Replica) -> Tensor:
        return me.moments(2).value.parts[0].clone()

    async def body(me: Replica) -> None:
        beside = MomentsBeside(me, 1)
        await beside.open()
        async for t in me.own_steps():
            me.step(await Grad())
            seen[me.rank].append(squares(me))
            await beside.averaged(t)
            seen[me.rank].append(squares(me))
        await beside.rest()

    strategy = dataclasses.replace(ob.local_sgd(), body=body)
    ob.simulate(strategy, task(ADAM), 2, 1, compute_s=lambda step, rank: 1.0 + rank)
    close(seen[0][1], seen[0][0])  # the other had none, and did not count
    close(seen[1][1], (2 * seen[0][0] + seen[1][0]) / 3)


def test_moments_in_rounds_travel_only_in_their_turn() -> None:
    def sent(moments: Any) -> int:
        strategy = ob.wagma(group=2, tau=None, moments=moments)
        return ob.simulate(strategy, None, workers=2, steps=6, parameters=1000).wire_bytes

    model = 2 * 4000
    assert sent(None) == 6 * model
    assert sent(1) == pytest.approx(3 * 6 * model, rel=0.01)
    assert sent(3) == pytest.approx((6 + 2 + 2) * model, rel=0.01)


def test_rounds_of_moments_are_not_counted_as_the_run_s() -> None:
    runs = [ob.simulate(ob.wagma(moments=n), task(ADAM), 4, 8) for n in (None, 1)]
    assert len(runs[0].trace.rounds) == len(runs[1].trace.rounds) > 0


def test_of_linear_momentum_the_weights_take_no_notice_when_they_are_averaged_every_step() -> None:
    """The mean of momenta is the momentum of means."""
    runs = [final(s, task=HEAVY).final for s in (ob.allreduce(), ob.local_sgd(1), ob.local_sgd(1, moments="1/1"))]
    close(runs[1], runs[0])
    close(runs[2], runs[0])


@every_make
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_order_is_averaged_when_it_is_its_turn(name: str, make: Any) -> None:
    optimizer, first, second = OPTIMIZERS[name]
    for steps, turns in ((2, {1: False, 2: False}), (4, {1: True, 2: False}), (12, {1: True, 2: True})):
        states = held(make(2, moments="2/3"), optimizer, steps)
        for order, moment in ((1, first), (2, second)):
            if moment:
                assert equal(states, moment) == turns[order], (steps, moment)


@every_make
def test_a_number_means_both_orders_in_the_same_turn(make: Any) -> None:
    for name in ("exp_avg", "exp_avg_sq"):
        assert [equal(held(make(1, moments=3), ADAM, n), name) for n in (1, 2, 3, 6)] == [False, False, True, True]


def test_first_moments_without_the_second_throw_far_away_what_one_worker_has_never_seen() -> None:
    """Why a number means both. Of two features each worker sees one; its own v of the other one is 0."""

    def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
        x = torch.zeros(4, 2)
        x[:, rank % 2] = 1.0
        return x, torch.ones(4, 1)

    def farthest(moments: str) -> float:
        sparse = ob.Task(lambda: nn.Linear(2, 1, bias=False), nn.functional.mse_loss, batch, ADAM)
        return float(ob.simulate(ob.local_sgd(1, moments=moments), sparse, 2, 2).weights.abs().max())

    assert farthest("1/2") > 1000
    assert farthest("1/1") < 10
    assert farthest("2/1") < 10


def test_left_to_themselves_moments_stay_with_their_workers() -> None:
    states = held(ob.local_sgd(2), ADAM, 4)
    assert not equal(states, "exp_avg")
    assert not equal(states, "exp_avg_sq")


def test_the_average_is_the_mean_of_what_the_workers_held() -> None:
    """Up to the first average of moments, all goes as without."""
    apart, together = held(ob.local_sgd(2), ADAM, 4), held(ob.local_sgd(2, moments="2/2"), ADAM, 4)
    for name in ("exp_avg", "exp_avg_sq"):
        close(together[0][name], torch.stack([state[name] for state in apart]).mean(0))


def test_a_worker_that_never_took_a_step_has_no_moments_and_does_not_count() -> None:
    """Two of three workers have data: the mean is theirs, and not two thirds of it."""
    optimizer = task(ADAM)

    def first_moment(strategy: ob.Strategy, workers: int) -> Tensor:
        seen: dict[int, Tensor] = {}

        async def body(me: Replica) -> None:
            await strategy.body(me)
            seen[me.rank] = me.moments(1).value.parts[0].clone()

        made = dataclasses.replace(strategy, body=body)
        ob.simulate(made, optimizer, workers, samples=2, compute_s=lambda step, rank: 1.0)
        return seen[0]

    close(first_moment(ob.local_sgd(1, moments="1/1"), 3), first_moment(ob.local_sgd(1, moments="1/1"), 2))


def test_moments_travel_only_in_their_turn() -> None:
    def sent(moments: Any) -> int:
        strategy = ob.local_sgd(1, moments=moments)
        run = ob.simulate(strategy, None, workers=2, steps=6, parameters=1000)
        return run.wire_bytes

    model = 2 * 4000  # two workers, each sends the model once: 2(P − 1)/P of it
    assert sent(None) == 6 * model
    assert sent("1/1") == pytest.approx(3 * 6 * model, rel=0.01)
    assert sent(3) == pytest.approx((6 + 2 + 2) * model, rel=0.01)
    assert sent("3/6") == pytest.approx((6 + 2 + 1) * model, rel=0.01)


def test_time_alone_knows_the_size_of_moments() -> None:
    moments = Moments(1, Vec((), 400), [], {})
    assert (moments.value.nbytes, moments.are_there) == (400, False)
    moments.adopt(moments.value)


def test_what_is_taken_is_put_back_where_it_was_taken() -> None:
    a, b = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4, dtype=torch.float64))
    c = nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.Adam([{"params": [a, b]}, {"params": [c]}])
    a.grad, b.grad = torch.ones(2, 3), torch.ones(4, dtype=torch.float64)
    optimizer.step()  # nobody used c
    moments = Moments(1, Vec(()), optimizer.param_groups, optimizer.state)
    assert sorted(part.numel() for part in moments.value.parts) == [4, 11]
    moments.adopt(moments.value * 0.0 + 7.0)
    assert (optimizer.state[a]["exp_avg"] == 7).all()
    assert (optimizer.state[b]["exp_avg"] == 7).all()
    assert not optimizer.state[c]


def test_what_cannot_be_understood_gets_a_sentence() -> None:
    wrong: dict[Any, str] = {
        0: "local_sgd: moments is 0",
        "often": "local_sgd: moments is 'often'; use a number, such as 3, or one for each order, such as '3/6'",
        "3/0": "local_sgd: and of the second is 0",
    }
    for moments, sentence in wrong.items():
        with pytest.raises(ValueError, match=sentence):
            ob.local_sgd(moments=moments)
    with pytest.raises(
        ValueError, match=r"wagma: moments is '3/6', but here those of both .* use one number, such as 6"
    ):
        ob.wagma(moments="3/6")  # type: ignore[arg-type]


def test_for_one_step_adam_divides_by_the_squares_of_the_mean_and_then_remembers_its_own() -> None:
    """Beside a plain Adam with the same gradients: the same moments, and other steps."""
    n, lr, eps = 4, 0.1, 1e-8
    own, other = nn.Parameter(torch.zeros(6).double()), nn.Parameter(torch.zeros(6).double())
    plain, mended = torch.optim.Adam([own], lr=lr), torch.optim.Adam([other], lr=lr)
    for step in range(1, 6):
        own.grad = torch.randn(6, generator=torch.Generator().manual_seed(step)).double()
        other.grad, before = own.grad.clone(), other.detach().clone()
        if step > 1:
            m, v = (plain.state[own][name].clone() for name in ("exp_avg", "exp_avg_sq"))
        plain.step()
        with as_of_the_mean(n, mended.param_groups, mended.state):
            mended.step()
        for name in ("exp_avg", "exp_avg_sq"):
            close(mended.state[other][name], plain.state[own][name])
        if step > 1:
            m_hat, v_hat = m / (1 - 0.9 ** (step - 1)), v / (1 - 0.999 ** (step - 1))
            of_mean = torch.where(v_hat > m_hat**2, m_hat**2 + (v_hat - m_hat**2) / n, v_hat)
            v_used = 0.999 * of_mean * (1 - 0.999 ** (step - 1)) + 0.001 * own.grad**2
            wanted = plain.state[own]["exp_avg"] / (1 - 0.9**step) / ((v_used / (1 - 0.999**step)).sqrt() + eps)
            close(other.detach() - before, -lr * wanted)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_alone_and_optimisers_without_squares_take_no_notice(name: str) -> None:
    optimizer, _, _ = OPTIMIZERS[name]
    for workers in (1, 2) if name != "AdamW" else (1,):
        runs = [final(ob.self_clocked(squares=n), workers, task=task(optimizer)).final for n in (1, 4)]
        assert torch.equal(*runs)
