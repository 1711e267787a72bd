"""A replica that is laid down and taken over: from then on both take the same steps, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn, optim

from offbeat.live.attached.flat import Flat
from offbeat.live.attached.twin import ReplicaTwin
from offbeat.live.host.channel_server import VECTORS
from offbeat.tensors.vector import Vec, wide

Inner = Callable[[Iterable[Tensor]], optim.Optimizer]
TAKEN: dict[str, Inner] = {
    "SGD": lambda ps: optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda ps: optim.Adam(ps, lr=0.1),
    "Adam, capturable": lambda ps: optim.Adam(ps, lr=torch.tensor(0.1), foreach=False),
    "AdamW": lambda ps: optim.AdamW(ps, lr=0.1, amsgrad=True),
    "NAdam": lambda ps: optim.NAdam(ps, lr=0.1),
    "RAdam": lambda ps: optim.RAdam(ps, lr=0.1),
    "Adamax": lambda ps: optim.Adamax(ps, lr=0.1),
    "Adagrad": lambda ps: optim.Adagrad(ps, lr=0.1),
    "Adadelta": lambda ps: optim.Adadelta(ps, lr=0.1),
    "RMSprop": lambda ps: optim.RMSprop(ps, lr=0.1, momentum=0.5, centered=True),
    "ASGD": lambda ps: optim.ASGD(ps, lr=0.1, t0=1),
    "Rprop": lambda ps: optim.Rprop(ps, lr=0.1),
}


class Own(optim.SGD):
    """Somebody's own, which may keep something where nobody looks."""


class Net(nn.Module):
    """Several kinds of numbers, strides, and a parameter that only later steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(5, 3).t())
        self.b = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        self.c = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.later = nn.Parameter(torch.zeros(3))


class Worker:
    def __init__(self, inner: Inner) -> None:
        self.model = Net()
        self.inner = inner(self.model.parameters())
        self.flat = Flat(self.model, self.inner)
        self.twin = ReplicaTwin.of(self.flat, self.inner)

    def step(self, number: int) -> None:
        draw = torch.Generator().manual_seed(number)
        for p in self.model.parameters():
            p.grad = torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p.dtype)
        if number < 4:
            self.model.later.grad = None
        self.inner.step()

    def all_of_it(self) -> list[Tensor]:
        state = [v for p in self.model.parameters() for _, v in sorted(self.inner.state[p].items()) if v is not None]
        return [*(p.detach() for p in self.model.parameters()), *map(torch.as_tensor, state)]


def room(flat: Flat) -> Callable[[int], Vec]:
    made: dict[int, Vec] = {}

    def of(number: int) -> Vec:
        like = [torch.full((p.numel(),), torch.nan, dtype=wide(p.dtype)) for p in flat.parts]
        return made.setdefault(number, Vec(like))

    return of


@pytest.mark.parametrize("steps", [0, 1, 5], ids=["fresh", "behind", "further"])
@pytest.mark.parametrize("name", TAKEN)
def test_who_has_taken_a_replica_over_goes_on_with_its_bits(name: str, steps: int) -> None:
    one, other = Worker(TAKEN[name]), Worker(TAKEN[name])
    for number in range(5):
        one.step(number)
    for number in range(steps):
        other.step(100 + number)
    assert one.twin is not None
    assert other.twin is not None
    memory = room(one.flat)
    vectors, said = one.twin.lay_into(memory, VECTORS)
    assert vectors > 0
    one.step(5)
    with torch.no_grad():
        other.twin.take_over([memory(k) for k in range(vectors)], said)
    other.step(5)
    for number in (6, 7):
        one.step(number)
        other.step(number)
    mine, theirs = one.all_of_it(), other.all_of_it()
    assert [t.dtype for t in mine] == [t.dtype for t in theirs]
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_what_has_another_shape_than_its_parameter_is_not_laid_down() -> None:
    worker = Worker(lambda ps: optim.Adafactor(ps, lr=0.1))
    worker.step(0)
    assert worker.twin is not None
    assert worker.twin.lay_into(room(worker.flat), VECTORS) == (0, [])


def test_somebodys_own_optimiser_and_one_whose_steps_are_counted_are_left_alone() -> None:
    def hooked(ps: Iterable[Tensor]) -> optim.Optimizer:
        inner = optim.SGD(ps, lr=0.1)
        inner.register_step_post_hook(lambda *args: None)
        return inner

    assert Worker(lambda ps: Own(ps, lr=0.1)).twin is None
    assert Worker(hooked).twin is None
