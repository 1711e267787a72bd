"""A simulated run leaves its ``Run`` behind, and nothing else: no world waits for Python's collector."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import offbeat as ob
from offbeat.method.effects import Grad, Mix
from offbeat.method.replica import Replica
from offbeat.method.strategy import Strategy
from offbeat.sim import Deadlock
from offbeat.topology import Mixing
from tests.support.long import LONG

TASK = ob.tasks.digits(batch=4, hidden=6)
EVERY = [
    *[card.make() for card in ob.STRATEGIES.values()],
    ob.eager(late=1, per_node=2), ob.eager(stale="drop", codec=ob.codec.int8()), ob.wagma(2, merge="correct"),
    ob.wagma(per_node=2, late=1), ob.local_sgd(2, codec=ob.codec.qsgd(4)), ob.dasgd(2, 1), ob.diloco(2, overlap=1),
    ob.nonblocking("auto", over="ring", stop="auto"), ob.nonblocking(over="server"), ob.dpsgd(codec=ob.codec.bf16()),
]  # fmt: skip
HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "spans and watched": {"spans": True, "watch_s": 0.15},
    "by samples": {"steps": None, "samples": 13},
    "time alone": {"task": None},
}


HOMES = ("offbeat.sim", "offbeat.runs.result", "offbeat.method.replica", "simpy")


def alive() -> Counter[str]:
    """Tensors, and objects of the simulator, that were made since ``nobody_collects`` began."""
    found = Counter[str]()
    for thing in gc.get_objects():
        kind, home = type(thing), str(type(thing).__module__)
        if kind in (torch.Tensor, torch.nn.Parameter) or home.startswith(HOMES):
            found[f"{home}.{kind.__qualname__}"] += 1
    return found


@contextmanager
def nobody_collects() -> Iterator[None]:
    gc.disable()
    gc.freeze()  # what is there before is no longer counted
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


def left_by(run: Callable[[], object]) -> Counter[str]:
    """What a second call leaves; the first may fill caches."""
    run()
    with nobody_collects():
        run()
        return alive()


def simulate(strategy: Strategy, **how: Any) -> ob.Run:
    usual: dict[str, Any] = {"task": TASK, "steps": 3, "delays": ob.delays.exponential(0.1)}
    return ob.simulate(strategy, workers=4, **(usual | how))


TABLE = [(s, how) for k, s in enumerate(EVERY) for n, how in enumerate(HOW) if LONG or n == k % len(HOW) or n == 1]


@pytest.mark.parametrize(("strategy", "how"), TABLE, ids=str)
def test_a_run_that_is_let_go_of_leaves_nothing(strategy: ob.Strategy, how: Any) -> None:
    assert left_by(lambda: simulate(strategy, **HOW[how])) == {}


def test_while_the_run_is_kept_its_own_tensors_are_all_there_is() -> None:
    """Weights, final, losses, and the model's parameters; of 64 workers' tables nothing."""
    simulate(ob.eager())
    with nobody_collects():
        run = ob.simulate(ob.eager(), TASK, 64, 3)
        assert run.model is not None
        parameters = len(list(run.model.parameters()))
        assert alive() == {"offbeat.runs.result.Run": 1, "torch.Tensor": 3, "torch.nn.parameter.Parameter": parameters}


# After an error.


async def _forgets_its_partner(me: Replica) -> None:
    async for t in me.steps():
        me.step(await Grad())
        if me.rank or t == 0:
            await Mix(me.x, Mixing.from_rows(4, [dict.fromkeys(range(4), 0.25)] * 4, "all"))


LOCKS = Strategy(ob.STRATEGIES["local_sgd"].paper, ob.local_sgd, {}, _forgets_its_partner)


def broken_at(step: int) -> ob.Task:
    def batch(rank: int, t: int) -> tuple[torch.Tensor, ...]:
        if t == step:
            raise OSError("the disk is gone")
        return TASK.batch(rank, t)

    return ob.Task(TASK.model, TASK.loss, batch, TASK.optimizer)


def failing(strategy: Strategy, error: type[Exception], **how: Any) -> Callable[[], None]:
    def run() -> None:
        try:
            simulate(strategy, **how)
        except error:
            return
        raise AssertionError("it was to fail")

    return run


def test_a_deadlock_leaves_nothing() -> None:
    assert left_by(failing(LOCKS, Deadlock)) == {}


@pytest.mark.parametrize("strategy", EVERY, ids=str)
def test_an_error_in_the_task_leaves_nothing(strategy: ob.Strategy) -> None:
    assert left_by(failing(strategy, OSError, task=broken_at(1))) == {}


@pytest.mark.parametrize("wrong", [{"steps": None}, {"compute_s": -1.0}, {"workers": 0}], ids=str)
def test_refused_arguments_leave_nothing(wrong: Any) -> None:
    def run() -> None:
        with pytest.raises(ValueError, match=r"."):
            ob.simulate(ob.eager(), TASK, **({"workers": 4, "steps": 3} | wrong))

    assert left_by(run) == {}
