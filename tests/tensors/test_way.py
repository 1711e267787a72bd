"""The way from one vector to another is made where it is needed, and is the same wherever that is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from offbeat.tensors.vector import Vec, Way, wide

DTYPES = [(torch.float32,), (torch.float64,), (torch.bfloat16, torch.float32)]


def pair(dtypes: tuple[torch.dtype, ...]) -> tuple[Vec, Vec]:
    draw = torch.Generator().manual_seed(1)
    return tuple(Vec([torch.randn(37, generator=draw).to(d) for d in dtypes]) for _ in range(2))  # type: ignore[return-value]


def same(a: Vec, b: Vec) -> bool:
    return all(torch.equal(p.to(q.dtype), q) for p, q in zip(a.parts, b.parts, strict=True))


READS: dict[str, Callable[[Way], Vec]] = {
    "read": lambda way: Vec(way.parts),
    "copied": lambda way: way.clone(),
    "put elsewhere": lambda way: way.put_into(way.start.zeros_like()),
    "put elsewhere, wider": lambda way: way.put_into(Vec([p.to(wide(p.dtype)) for p in way.start.zeros_like().parts])),
    "taken over": lambda way: way.start.zeros_like().copy_(way),
    "added": lambda way: way.start.zeros_like().add_(way),
    "added to": lambda way: way + way.start.zeros_like(),
    "halved and doubled": lambda way: way.put_into(way.start.zeros_like(), 0.5) * 2.0,
}


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("how", READS)
def test_it_is_the_difference_however_it_is_asked_for(how: str, dtypes: tuple[torch.dtype, ...]) -> None:
    start, end = pair(dtypes)
    expected = end - start
    found = READS[how](start.way_to(end))
    assert same(expected, Vec([p.to(q.dtype) for p, q in zip(found.parts, expected.parts, strict=True)]))


def test_put_elsewhere_it_leaves_both_ends_alone_and_can_be_put_again() -> None:
    start, end = pair((torch.float32,))
    before, way = start.clone(), start.way_to(end)
    first = way.put_into(start.zeros_like())
    assert same(start, before)
    assert not way.is_made
    assert same(way.put_into(start.zeros_like()), first)


def test_read_it_lies_where_it_began_and_stays_what_it_was() -> None:
    start, end = pair((torch.float32,))
    expected, way = end - start, start.way_to(end)
    assert way.parts[0].data_ptr() == start.parts[0].data_ptr()
    end.zero_()
    assert same(way.put_into(start.zeros_like()), expected)
    assert same(way, expected)


def test_its_size_is_known_before_it_is_made_also_beside_a_phantom() -> None:
    start, end = pair((torch.bfloat16, torch.float32))
    way, phantom = start.way_to(end), Vec((), 400).way_to(Vec((), 400))
    assert (way.nbytes, way.numel, way.is_made) == (start.nbytes, start.numel, False)
    assert (phantom.nbytes, phantom.numel, phantom.parts) == (400, 100, ())
