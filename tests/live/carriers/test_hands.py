"""Threads that lend a hand with long vectors: the same numbers as one alone, and nothing left behind."""

from __future__ import annotations

import threading

import pytest
import torch

from offbeat.live.memory import hands as hands_module
from offbeat.live.memory.adding import add_in_place, add_up
from offbeat.live.memory.hands import LONG, ONE, Hands

LENGTHS = [0, 1, 15, 16, 17, LONG - 1, 2 * LONG + 5, 4 * LONG, 5 * LONG + 33]


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Hands:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(3 * torch.get_num_threads())))
    return Hands(1)


def lent() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("offbeat-hand")]


@pytest.mark.parametrize(
    ("cores", "ranks", "count"), [(2, 4, 1), (16, 4, 4), (8, 4, 2), (64, 2, hands_module.MOST), (7, 3, 2)]
)
def test_the_cores_of_a_host_are_divided_among_its_ranks(
    cores: int, ranks: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert Hands(ranks).count == count


def test_whoever_lets_torch_use_all_cores_gets_no_hands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert Hands(2).count == 1


@pytest.mark.parametrize("length", LENGTHS)
def test_a_sum_by_several_has_the_bits_of_a_sum_by_one(length: int, three: Hands) -> None:
    draw = torch.Generator().manual_seed(length)
    vectors = [torch.randn(length, generator=draw) for _ in range(4)]
    terms = [[(v, 1.0 if k % 2 else 0.7)] for k, v in enumerate(vectors)]
    terms += [[(vectors[0], 0.3), (vectors[1], 1.0)], [(vectors[2], 1.0), (vectors[3], 1.0), (vectors[0], 0.5)]]
    alone, together = torch.full((length,), -1.0), torch.full((length,), -2.0)
    add_up(alone, terms, 3)
    add_up(together, terms, 3, hands=three)
    assert torch.equal(alone, together)
    for others in (vectors[1:], vectors[1:2]):
        mine, one, undivided = (vectors[0].clone() for _ in range(3))
        add_in_place(mine, [mine, *others], 3, 0, length, three)
        add_in_place(one, [one, *others], 3, 0, length, ONE)
        add_in_place(undivided, [undivided, *others], 1, 0, length, ONE)
        assert torch.equal(mine, one)
        assert torch.equal(mine, undivided / 3)
    assert bool(lent()) == (length >= 2 * LONG)
    three.close()


@pytest.mark.parametrize(
    "shapes", [[(0,)], [(7,), (3, 5)], [(LONG * 5 + 3,)], [(600, 700), (9,), (LONG * 2,), (1000, 1)]]
)
def test_a_copy_by_several_is_whole(shapes: list[tuple[int, ...]], three: Hands) -> None:
    sources = [torch.randn(shape) for shape in shapes]
    sources = [
        s.t().contiguous().t() if s.dim() == 2 and k == 0 else s for k, s in enumerate(sources)
    ]  # not all in rows
    pairs = [(torch.full(s.shape, torch.nan), s) for s in sources]
    three.copy(pairs)
    assert all(torch.equal(into, what) for into, what in pairs)
    three.close()


def test_what_fails_in_a_hand_is_raised_by_whoever_asked(three: Hands) -> None:
    def work(a: int, b: int) -> None:
        if a > 0:
            raise ValueError(f"from {a}")

    with pytest.raises(ValueError, match="from"):
        three.over(0, 3 * LONG, work)
    done = list[int]()
    three.over(0, 3 * LONG, lambda a, b: done.append(b - a))
    assert sum(done) == 3 * LONG
    three.close()


def test_threads_come_when_they_are_needed_and_end_with_their_owner(three: Hands) -> None:
    assert not lent()
    three.over(0, LONG, lambda a, b: None)
    assert not lent()
    three.over(0, 3 * LONG, lambda a, b: None)
    assert len(lent()) == 2
    three.close()
    assert not lent()


def test_two_callers_at_once_get_each_its_own(three: Hands) -> None:
    sums = [torch.zeros(4 * LONG) for _ in range(6)]

    def call(k: int) -> None:
        for _ in range(5):
            three.over(0, 4 * LONG, lambda a, b: sums[k][a:b].add_(k + 1))  # type: ignore[arg-type]

    callers = [threading.Thread(target=call, args=(k,)) for k in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(bool((one == 5 * (k + 1)).all()) for k, one in enumerate(sums))
    assert len(lent()) == 2
    three.close()
