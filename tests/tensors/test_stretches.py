"""Coded sums in two phases: who owns what, what is lost, what is kept, and how it compares with gathering."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.tensors import codec, stretches
from offbeat.tensors.stretches import CodedShare, Stretches, coded_mean, nothing_lost, shares
from offbeat.tensors.sums import coded, mean
from offbeat.tensors.vector import Vec
from offbeat.tensors.wire import message_bytes, two_phase_bytes
from tests.support.long import unless_long

CODECS = [
    *(codec.bf16(), codec.fp16(), codec.int8(5), codec.int8(), codec.qsgd(2, 3), codec.qsgd(8, 64)),
    *(codec.qsgd(4, 7, "l2"), codec.topk(3, 16), codec.topk(5, 16, floats=True)),
]


def name(value: object) -> str:
    return value.name if isinstance(value, codec.Codec) else str(value)


def vec(seed: int, *sizes: int, dtype: torch.dtype = torch.float32) -> Vec:
    draws = torch.Generator().manual_seed(seed)
    return Vec([torch.randn(n, generator=draws, dtype=torch.float64).to(dtype) for n in sizes])


def two_phases(
    given: dict[int, Vec], ranks: list[int], c: codec.Codec, seq: int = 0, lost: Any = None, like: Vec | None = None
) -> Vec:
    like = next(iter(given.values())) if like is None else like
    result = coded_mean(shares(given, ranks, Stretches(like, c, len(ranks)), 1, seq, lost), len(given))
    assert result is not None
    return result


def gathered(given: dict[int, Vec], c: codec.Codec) -> Vec:
    """The law: everybody decodes everybody's message."""
    return mean([coded(x, c, (1, rank, 0)) for rank, x in given.items()], len(given))


def equal(a: Vec, b: Vec) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parts, b.parts, strict=True))


@settings(deadline=None)
@given(numel=st.integers(0, 3000), members=st.integers(1, 9), c=st.sampled_from(CODECS), most=st.sampled_from([1, 600]))
def test_every_number_has_one_owner_and_no_bucket_is_cut(numel: int, members: int, c: codec.Codec, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stretches, "PIECE", most)
        cut = Stretches(vec(0, numel, 40), c, members)
    for k, n in enumerate((numel, 40)):
        pieces = [(p.lo, p.hi) for owned in cut.pieces for p in owned if p.k == k]
        assert [lo for lo, _ in pieces] + [n] == [0] + [hi for _, hi in pieces] or n == 0 == len(pieces)
        assert all(lo % getattr(c, "bucket", 512) == 0 for lo, _ in pieces)
    for owned, length in zip(cut.pieces, cut.lengths, strict=True):
        assert [p.start for p in owned] + [length] == [0] + [p.stop for p in owned]
    grains = [sum(p.hi - p.lo for p in owned if p.k == 0) / getattr(c, "bucket", 512) for owned in cut.pieces]
    assert math.ceil(max(grains)) - math.floor(min(grains)) <= 2


@pytest.mark.parametrize("members", [2, 3, 5])
def test_where_nothing_is_lost_it_is_the_gathering_bit_for_bit(members: int) -> None:
    whole = {r: Vec([(p * 4).round() for p in vec(r, 2000, 77).parts]) for r in range(members)}
    for c in (codec.bf16(), codec.fp16(), codec.topk(16, 16, floats=True)):
        assert equal(two_phases(whole, list(range(members)), c), gathered(whole, c))
        assert equal(two_phases(whole, list(range(members)), c), mean(list(whole.values()), members))


@pytest.mark.parametrize("members", [2, 3, 5])
@pytest.mark.parametrize("bucket", [5, 512])
def test_otherwise_it_is_the_gathering_up_to_one_coding_of_the_sum_and_of_what_did_not_travel(
    members: int, bucket: int
) -> None:
    c, xs = codec.int8(bucket), {r: vec(r, 2001) for r in range(members)}
    two, one = (v.parts[0] for v in (two_phases(xs, list(range(members)), c), gathered(xs, c)))
    assert not torch.equal(two, one)

    def half_a_level(x: torch.Tensor) -> torch.Tensor:
        top = torch.nn.functional.pad(x.abs(), (0, -2001 % bucket)).view(-1, bucket).amax(1) / 127 / 2
        return top.repeat_interleave(bucket)[:2001]

    total = torch.stack([x.parts[0] for x in xs.values()]).sum(0)
    own = torch.stack([half_a_level(x.parts[0]) for x in xs.values()]).amax(0)
    assert bool(((two - one).abs() <= 1.02 * (half_a_level(total) + 2 * own) / members).all())


@settings(deadline=None, max_examples=unless_long(30, 300))
@given(data=st.data(), c=st.sampled_from(CODECS), members=st.integers(2, 5), rounds=st.integers(1, 6))
def test_what_was_sent_and_what_was_lost_add_up_to_what_was_to_be_sent(
    data: st.DataObject, c: codec.Codec, members: int, rounds: int
) -> None:
    like, ranks = vec(0, 97, 31, dtype=torch.float64), list(range(10, 10 + members))
    lost = {r: nothing_lost(like) for r in ranks}
    wanted, sent = nothing_lost(like), nothing_lost(like)
    for seq in range(rounds):
        who = data.draw(st.sets(st.sampled_from(ranks), min_size=1))
        xs = {r: vec(100 * seq + r, 97, 31, dtype=torch.float64) for r in ranks if r in who}
        result = coded_mean(shares(xs, ranks, Stretches(like, c, members), 1, seq, lost), 1)
        assert result is not None
        sent.add_(result)
        for x in xs.values():
            wanted.add_(x)
    for r in ranks:
        sent.add_(lost[r])
    for p, q in zip(sent.parts, wanted.parts, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-9)


@pytest.mark.parametrize("c", [codec.bf16(), codec.int8(), codec.topk(4, 64)], ids=name)
def test_averages_that_are_repeated_come_closer_where_what_was_lost_is_sent_next_time(c: codec.Codec) -> None:
    """Numbers far below a bucket's largest are lost by int8 each time, and all but four of a chunk by topk."""
    xs = {r: Vec([p * torch.logspace(-4, 0, 1000)]) for r, p in enumerate(vec(1, 1000, 1000, 1000).parts)}
    want, errors = mean(list(xs.values()), 3).parts[0], []
    for lost in (None, {r: nothing_lost(x) for r, x in xs.items()}):
        means = [two_phases(xs, [0, 1, 2], c, seq, lost).parts[0] for seq in range(200)]
        errors.append(float((torch.stack(means).mean(0) - want).norm()))
    assert errors[1] < 0.05 * errors[0]


@pytest.mark.parametrize("c", CODECS, ids=name)
def test_who_gives_nothing_adds_nothing_and_keeps_what_it_had(c: codec.Codec) -> None:
    like, some = vec(0, 300), {0: vec(1, 300), 2: vec(2, 300)}
    lost = {r: vec(20 + r, 300) for r in range(3)}
    before = lost[1].clone()
    result = two_phases(some, [0, 1, 2], c, lost=lost, like=like)
    owed = sum((lost[r] for r in (0, 2)), lost[1] - before)
    torch.testing.assert_close(
        (result * 2.0 + owed).parts[0], sum(some[r].parts[0] + vec(20 + r, 300).parts[0] for r in some)
    )
    own = Stretches(like, c, 3).pieces[1]
    for lo, hi in [(p.lo, p.hi) for p in own] or [(0, 0)]:
        outside = torch.ones(300, dtype=torch.bool)
        outside[lo:hi] = False
        assert torch.equal(lost[1].parts[0][outside], before.parts[0][outside])


def test_of_nobody_there_is_no_sum() -> None:
    cut = Stretches(vec(0, 30), codec.int8(), 3)
    assert coded_mean(shares({}, [0, 1, 2], cut, 1, 0), 3) is None


@pytest.mark.parametrize("c", CODECS, ids=name)
def test_a_sum_is_coded_the_same_again_until_what_was_lost_is_kept(c: codec.Codec) -> None:
    x, lost, cut = vec(1, 300), vec(2, 300), Stretches(vec(1, 300), c, 3)
    first = CodedShare(x, cut, 1, (7,), lost)
    others = [CodedShare(vec(r, 300), cut, r, (r,)) for r in range(3)]
    coming = [one.messages[1] if one.messages else None for one in others]
    own_sum = first.own_sum(coming)
    again = CodedShare(x, cut, 1, (7,), lost)
    assert first.sent is not None
    assert again.sent is not None
    assert torch.equal(first.sent, again.sent)
    assert torch.equal(own_sum, again.own_sum(coming))
    assert equal(lost, vec(2, 300))
    again.keep()
    assert not equal(lost, vec(2, 300))


def test_what_changes_afterwards_does_not_travel() -> None:
    xs = {r: vec(r, 1500) for r in range(3)}
    expected = two_phases(xs, [0, 1, 2], codec.int8())
    made = shares(xs, [0, 1, 2], Stretches(xs[0], codec.int8(), 3), 1, 0)
    for x in xs.values():
        x.zero_()
    result = coded_mean(made, 3)
    assert result is not None
    assert equal(result, expected)


def test_members_draw_for_themselves_and_rounds_anew() -> None:
    """Those who shared their draws would share their errors, and averaging would no longer cancel them."""
    same, c = vec(1, 4000), codec.qsgd(2)
    made = shares(dict.fromkeys(range(3), same), [0, 1, 2], Stretches(same, c, 3), 1, 0)
    then = shares(dict.fromkeys(range(3), same), [0, 1, 2], Stretches(same, c, 3), 1, 1)
    to_2 = [one.messages[2] for one in (made[0], made[1], then[0]) if one.messages]
    assert not any(torch.equal(a, b) for a, b in ((to_2[0], to_2[1]), (to_2[0], to_2[2])))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_numbers_are_summed_in_float32(dtype: torch.dtype) -> None:
    xs = {0: Vec([torch.full((600,), 256.0, dtype=dtype)]), 1: Vec([torch.full((600,), 1.0, dtype=dtype)])}
    result = two_phases(xs, [0, 1], codec.topk(600, 600, floats=True)).parts[0]
    assert result.dtype == torch.float32
    assert bool((result == 128.5).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("c", CODECS, ids=name)
def test_a_broken_number_of_one_is_seen_by_all(c: codec.Codec, bad: float) -> None:
    for at in (0, 1000, 1999):
        xs = {r: vec(r, 2000) for r in range(3)}
        xs[1].parts[0][at] = bad
        assert not bool(two_phases(xs, [0, 1, 2], c).parts[0][at].isfinite())


@pytest.mark.parametrize("c", [codec.bf16(), codec.int8(), codec.qsgd(4), codec.topk(64)], ids=name)
@pytest.mark.parametrize("members", [2, 4, 16])
def test_a_worker_sends_less_than_two_messages(c: codec.Codec, members: int) -> None:
    x = vec(0, 1_000_000)
    cut = Stretches(x, c, members)
    made = CodedShare(x, cut, 0, (1,))
    assert made.sent is not None
    together, one = two_phase_bytes(cut.lengths), message_bytes(x, c)
    assert together / members == pytest.approx(2 * (members - 1) / members * one, rel=0.01)
    own_sum = made.own_sum([None] * members)
    assert made.sent.numel() + (members - 1) * own_sum.numel() == pytest.approx(together / members, rel=0.02)


def test_pieces_leave_no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    xs = {r: vec(r, 5000, 300) for r in range(3)}
    lost = [{r: vec(10 + r, 5000, 300) for r in range(3)} for _ in range(2)]
    whole = two_phases(xs, [0, 1, 2], codec.int8(64), lost=lost[0])
    monkeypatch.setattr(stretches, "PIECE", 130)
    assert equal(two_phases(xs, [0, 1, 2], codec.int8(64), lost=lost[1]), whole)
    assert all(equal(a, b) for a, b in zip(lost[0].values(), lost[1].values(), strict=True))
