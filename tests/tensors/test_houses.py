"""Sums among workers of several hosts: each host's first, in which order, coded on whose behalf."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offbeat.tensors import codec
from offbeat.tensors.houses import mean_of_hosts, numbered, together
from offbeat.tensors.stretches import CodedShare, Stretches, coded_mean, nothing_lost, shares
from offbeat.tensors.sums import mean
from offbeat.tensors.vector import Vec

CODECS = [codec.bf16(), codec.int8(16), codec.qsgd(4, 16)]


def vec(seed: int, dtype: torch.dtype = torch.float32) -> Vec:
    draws = torch.Generator().manual_seed(seed)
    return Vec([torch.randn(n, generator=draws, dtype=torch.float64).to(dtype) for n in (2100, 40)])


def equal(a: Vec | None, b: Vec | None) -> bool:
    assert a is not None
    assert b is not None
    return all(torch.equal(p, q) for p, q in zip(a.parts, b.parts, strict=True))


def test_hosts_are_numbered_in_the_order_of_their_first_ranks() -> None:
    assert numbered(["b", "a", "b", "c"]) == (0, 1, 0, 2)
    assert numbered([]) == ()


def test_members_are_together_by_their_hosts_in_the_order_of_the_first_of_each() -> None:
    assert together((0, 1, 2, 3), (0, 1, 0, 2)) == ((0, 2), (1,), (3,))
    assert together((1, 2, 3), (0, 1, 0, 2)) == ((1,), (2,), (3,))
    assert together((1, 3), ()) == ((1,), (3,)), "where no homes are known"


@pytest.mark.parametrize("c", CODECS, ids=lambda one: one.name)
@pytest.mark.parametrize("loses", [False, True])
@pytest.mark.parametrize("homes", [(), (0, 1, 2, 3)])
def test_of_one_rank_a_host_the_sum_is_coded_among_the_ranks(c: codec.Codec, loses: bool, homes: Any) -> None:
    given, ranks = {r: vec(r) for r in (1, 3)}, (1, 2, 3)
    lost = [{r: vec(10 + r) if loses else None for r in ranks} for _ in range(2)]
    by_rule = mean_of_hosts(given, ranks, homes, 2, c, (7, 5), lost[0])
    assert equal(by_rule, coded_mean(shares(given, ranks, Stretches(vec(0), c, 3), 7, 5, lost[1]), 2))
    for a, b in zip(lost[0].values(), lost[1].values(), strict=True):
        assert (a is b is None) or equal(a, b)


@pytest.mark.parametrize("c", CODECS, ids=lambda one: one.name)
def test_a_host_codes_the_sum_of_its_members_on_behalf_of_the_first(c: codec.Codec) -> None:
    """A block of ranks 1 to 4, of which 1 and 4 are on the host of rank 0, and 2 and 3 on another."""
    given, ranks, homes = {r: vec(r) for r in (1, 2, 3, 4)}, (1, 2, 3, 4), (0, 0, 1, 1, 0)
    lost = {r: vec(10 + r) for r in ranks}
    of_first, of_second = vec(11), vec(12)
    cut = Stretches(vec(0), c, 2)
    first = CodedShare(given[1] + given[4], cut, 0, (7, 1, 5), of_first)
    second = CodedShare(given[2] + given[3], cut, 1, (7, 2, 5), of_second)
    by_hand = coded_mean([first, second], 4)
    assert equal(mean_of_hosts(given, ranks, homes, 4, c, (7, 5), lost), by_hand)
    assert equal(lost[1], of_first)
    assert equal(lost[2], of_second)
    assert not equal(lost[1], vec(11)), "something is lost"
    assert equal(lost[3], vec(13)), "of who does not speak for its host nothing is"
    assert equal(lost[4], vec(14))


@pytest.mark.parametrize("c", CODECS, ids=lambda one: one.name)
def test_a_host_whose_members_give_nothing_gives_nothing(c: codec.Codec) -> None:
    cut, owed = Stretches(vec(0), c, 2), {0: vec(10), 2: vec(12)}
    some = CodedShare(vec(1), cut, 0, (7, 0, 5), owed[0])
    none = CodedShare(None, cut, 1, (7, 2, 5), owed[2])
    lost = {r: vec(10 + r) for r in range(4)}
    of_one = mean_of_hosts({1: vec(1)}, range(4), (0, 0, 1, 1), 3, c, (7, 5), lost)
    assert equal(of_one, coded_mean([some, none], 3))
    assert all(equal(lost[r], owed[r]) for r in owed)
    assert mean_of_hosts({}, range(4), (0, 0, 1, 1), 3, c, (7, 5), lost) is None
    assert all(equal(lost[r], owed[r]) for r in owed), "where there is no sum nothing is lost"


def test_what_leaves_no_host_is_not_coded() -> None:
    given, lost = {r: vec(r) for r in (2, 3)}, {r: nothing_lost(vec(0)) for r in (2, 3)}
    assert equal(mean_of_hosts(given, (2, 3), (0, 0, 1, 1), 2, codec.int8(), (7, 5), lost), mean([vec(2), vec(3)], 2))
    assert equal(lost[2], nothing_lost(vec(0)))


def test_hosts_add_up_what_is_theirs_in_the_order_of_the_hosts() -> None:
    """Of the block of 1 to 4, the host of rank 3 comes first: the run's first rank is there."""
    x = {r: torch.tensor([number]) for r, number in ((1, 0.1), (2, 3.3), (3, 1e8), (4, 2.5))}
    given, homes = {r: Vec([one]) for r, one in x.items()}, (0, 1, 2, 0, 1)
    assert not torch.equal((x[3] + (x[1] + x[4])) + x[2], ((x[1] + x[4]) + x[2]) + x[3]), "in another order"
    assert equal(mean_of_hosts(given, (1, 2, 3, 4), homes, 4), Vec([((x[3] + (x[1] + x[4])) + x[2]) / 4]))
    assert equal(mean_of_hosts(given, (1, 2, 3, 4), (), 4), Vec([(((x[1] + x[2]) + x[3]) + x[4]) / 4]))


def test_narrow_numbers_of_a_host_are_summed_wide() -> None:
    given = {r: Vec([torch.full((600,), x, dtype=torch.bfloat16)]) for r, x in enumerate([256.0, 1.0, 1.0])}
    total = mean_of_hosts(given, range(3), (0, 0, 1), 1)
    assert total is not None
    assert total.parts[0].dtype == torch.float32
    assert bool((total.parts[0] == 258).all())
