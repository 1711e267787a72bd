"""Sums where vectors lie: the same bits whoever makes them, wherever a stretch ends and wherever they are put."""

from __future__ import annotations

import pytest
import torch

from offbeat.live.memory import adding
from offbeat.tensors.vector import Vec
from tests.support.sums import SHAPES, N, terms_of


def naive(terms: list[list[tuple[torch.Tensor, float]]], divisor: float) -> torch.Tensor:
    """One member's after the other, each member's own added up first."""
    total = torch.zeros(0)
    for k, term in enumerate(terms):
        own = term[0][0] * term[0][1]
        for tensor, factor in term[1:]:
            own = torch.add(own, tensor, alpha=factor)
        total = own if k == 0 else total + own
    return total / divisor


@pytest.mark.parametrize("name", SHAPES)
def test_a_sum_is_the_members_in_their_order(name: str) -> None:
    terms = terms_of(SHAPES[name])
    out = torch.empty(N)
    adding.add_up(out, terms, len(terms))
    assert torch.equal(out, naive(terms, len(terms)))


@pytest.mark.parametrize("shape", [[1.0, 1.0], [1.0, -1.0], [0.5, 0.5, 1.0], [0.3]], ids=str)
def test_what_is_not_added_up_yet_is_the_same_where_it_is_put_and_where_it_is_read(shape: list[float]) -> None:
    (term,) = terms_of([shape])
    expected = torch.empty(N)
    adding.add_up(expected, [term], 1)
    rooms: list[Vec] = []

    def room() -> Vec:
        rooms.append(Vec([torch.empty(N)]))
        return rooms[-1]

    sums = adding.Unadded([(Vec([tensor]), factor) for tensor, factor in term], None, room)
    put = Vec([torch.empty(N)]).copy_(sums)
    assert not rooms, "what is put elsewhere needs no memory of its own"
    assert torch.equal(put.parts[0], expected)
    assert torch.equal(sums.parts[0], expected)
    assert torch.equal(sums.parts[0], expected)
    assert len(rooms) == 1
    for tensor, _ in term:
        tensor.zero_()
    assert torch.equal(sums.clone().parts[0], expected), "once it was read, it stays what it was"


def test_a_way_is_laid_down_in_one_pass_and_leaves_its_ends_alone() -> None:
    draw = torch.Generator().manual_seed(4)
    start, end, target = (Vec([torch.randn(5 << 20, generator=draw)]) for _ in range(3))
    before, way = start.clone(), start.way_to(end)
    adding.lay(way, target)
    assert torch.equal(target.parts[0], end.parts[0] - start.parts[0])
    assert torch.equal(start.parts[0], before.parts[0])
    assert not way.is_made
