"""The grace window: as long as it pays to wait for others, and no longer; with none, everything is as without it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import offbeat as ob
from offbeat.rounds import waiting
from offbeat.rounds.grace import Grace, Window, worth_waiting_until_s
from offbeat.rounds.referee import Notice, Referee, Say
from offbeat.rounds.rules import Rules


@pytest.mark.parametrize(
    ("usual_s", "until_s"),
    [
        ([], 1.0),
        ([1.9], 2.0),  # two in less than 2 s are more than one in 1 s
        ([2.0], 1.0),  # no more
        ([1.2, 1.4, 9.0], 3.0),  # three in 3 s would be as many in a second
        ([1.9, 2.0, 2.1], 4.0),  # the next alone would pay; all three pay more
        ([0.9], 2.0),  # should have come, and still would pay
    ],
)
def test_it_pays_to_wait_while_more_arrive_in_a_second(usual_s: list[float], until_s: float) -> None:
    for begun_s in (0.0, 7.0):
        others = [(begun_s + s, 99.0) for s in usual_s]
        found = worth_waiting_until_s(begun_s + 1.0, begun_s, [begun_s + 1.0], others)
        assert found == pytest.approx(begun_s + until_s)


def test_who_came_sooner_lets_the_last_be_waited_for_no_longer_than_pays() -> None:
    assert worth_waiting_until_s(1.1, 0.0, [1.0, 1.05, 1.1], [(1.2, 9.0)]) == pytest.approx(4 * 1.1 / 3)
    assert worth_waiting_until_s(1.4, 0.0, [1.0, 1.05, 1.1], [(1.2, 9.0)]) == pytest.approx(4 * 1.1 / 3), "and no more"
    assert worth_waiting_until_s(1.5, 0.0, [1.0, 1.05, 1.1], [(1.2, 9.0)]) == 1.5, "it is over"


def test_nobody_waits_longer_than_would_pay_if_all_the_others_came_at_that_moment() -> None:
    times = (1.01, 1.3, 2.0, 3.0, 3.9, 4.0, 50.0)
    for arrived, usual in itertools.product((1, 2, 3), itertools.combinations_with_replacement(times, 3)):
        most = (arrived + 3) / arrived
        others = [(s, 1.5 * s) for s in usual]
        assert 1.0 <= worth_waiting_until_s(1.0, 0.0, [1.0] * arrived, others) <= most + 1e-9


def test_nobody_is_waited_for_of_whom_nothing_is_known_or_who_should_have_come() -> None:
    grace = Grace(3, "auto")
    grace.started(0.0)
    grace.came(0, 1.0)
    grace.came(1, 0.0)
    assert grace.until_s(1.0, {0}, [1, 2]) == 1.0, "1 has come once: how long it takes is not known"
    grace.came(1, 1.0)
    grace.started(1.0)
    grace.came(0, 1.9)
    assert grace.until_s(1.9, {0}, [1, 2]) == pytest.approx(2.5), "half as long again as usual"
    assert grace.until_s(2.6, {0}, [1, 2]) == 2.6, "it has been given up"


def test_where_results_are_late_waiting_is_free_until_the_first_comes_again() -> None:
    for late, until_s in ((0, 1.5), (1, 2.5)):
        grace = Grace(2, "auto", late)
        for rank, came_s in ((0, 0.5), (0, 1.5), (1, 0.1), (1, 1.1)):
            grace.came(rank, came_s)
        grace.started(1.4)
        assert grace.until_s(1.5, {0}, [1]) == pytest.approx(until_s), (
            "0 comes again after 2.5, 1 is given up after 2.6"
        )


def test_what_it_usually_takes_is_not_what_it_took_once() -> None:
    grace = Grace(2, "auto")
    for came_s in (0.0, 1.0, 2.0, 12.0, 13.0, 14.0):
        grace.came(1, came_s)
    grace.started(14.0)
    grace.came(0, 14.9)
    assert grace.until_s(14.9, {0}, [1]) == pytest.approx(15.5)


def referee(window: Any, size: int = 3) -> Referee:
    return Referee(Rules(waiting.first, "carry", grace=window), size, 0)


def test_a_round_starts_when_its_window_is_over_or_all_are_there() -> None:
    one = referee(0.5)
    assert one.hear(0, Notice(Say.ARRIVED, 0), 10.0) == []
    assert one.deadline_s == 10.5
    assert one.tick(10.4) == []
    assert one.hear(1, Notice(Say.ARRIVED, 0), 10.4) == []
    assert one.deadline_s == 10.5, "another one does not open it again"
    assert one.tick(10.5) == [0]
    assert one.deadline_s is None
    assert one.hear(0, Notice(Say.ARRIVED, 1), 11.0) == one.hear(1, Notice(Say.ARRIVED, 1), 11.1) == []
    assert one.hear(2, Notice(Say.ARRIVED, 1), 11.2) == [1], "all are there"


def test_a_full_round_and_a_worker_that_has_finished_have_no_window() -> None:
    one = Referee(Rules(waiting.first, "carry", full_every=1, grace=0.5), 2, 0)
    assert one.hear(0, Notice(Say.ARRIVED, 0), 1.0) == []
    assert one.deadline_s is None
    assert one.hear(1, Notice(Say.ARRIVED, 0), 9.0) == [0]
    two = referee(0.5, 2)
    assert two.hear(0, Notice(Say.ARRIVED, 0), 1.0) == []
    assert two.hear(1, Notice(Say.FINISHED), 1.1) == [0]


TASK = ob.tasks.regression()
FREE = ob.Network(0.0, float("inf"))


def run(strategy: ob.Strategy, seconds: tuple[float, ...], steps: int = 12) -> ob.Run:
    return ob.simulate(strategy, TASK, len(seconds), steps, network=FREE, compute_s=lambda step, rank: seconds[rank])


def test_where_waiting_pays_all_are_fresh_once_it_is_known_who_comes_when() -> None:
    ran = run(ob.eager(sync_every=None), (1.0, 1.3))
    rounds = [r for r in ran.trace.rounds if 6.0 < r.end_s < 12.0]
    assert [r.end_s for r in rounds] == pytest.approx([6.5, 7.8, 9.1, 10.4, 11.7])
    assert all(r.fresh == (0, 1) for r in rounds)
    without = run(ob.eager(sync_every=None, grace=0), (1.0, 1.3))
    assert not any(len(r.fresh) == 2 for r in without.trace.rounds if r.end_s < 12.0)


def test_where_it_does_not_pay_nobody_waits() -> None:
    windows: tuple[Window, ...] = ("auto", 0.0)
    ran, without = (run(ob.eager(sync_every=None, grace=window), (1.0, 2.5)) for window in windows)
    assert ran.wait_s[0] == without.wait_s[0]
    assert [r.end_s for r in ran.trace.rounds] == [r.end_s for r in without.trace.rounds]


def test_in_virtual_time_a_window_of_so_many_seconds_is_waited_for_to_the_second() -> None:
    ran = run(ob.eager(sync_every=None, grace=0.25), (1.0, 30.0), steps=6)
    alone = [r for r in ran.trace.rounds if r.end_s < 8.0]
    assert [r.end_s for r in alone] == pytest.approx([1.25 * (k + 1) for k in range(len(alone))])
    assert len(alone) == 6


@pytest.mark.parametrize(
    "strategy",
    [ob.wagma(), ob.wagma(wait=0.5, late=1), ob.decoupled(2, 2)],
    ids=str,
)
def test_no_grace_is_no_difference(strategy: ob.Strategy) -> None:
    made = type(strategy)
    again = getattr(ob, strategy.name)(**{**strategy.settings, "grace": 0})
    assert isinstance(again, made)
    how: dict[str, Any] = {"network": ob.Network(1e-3), "compute_s": ob.delays.lognormal(1.0, 0.5)}
    first, second = (ob.simulate(s, TASK, 4, 12, **how) for s in (strategy, again))
    assert first.final.equal(second.final)
    assert [r.end_s for r in first.trace.rounds] == [r.end_s for r in second.trace.rounds]


@pytest.mark.parametrize("window", [-1, float("inf"), float("nan"), "long", True])
def test_a_window_that_means_nothing_is_refused(window: Any) -> None:
    with pytest.raises(ValueError, match="a grace of"):
        ob.eager(grace=window)
