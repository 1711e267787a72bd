"""Which worker is slow? The verdict, from the times of steps."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import offbeat as ob
from offbeat.runs.slowness import judge, late_workers

SLOW = [[0.1] * 50, [0.1] * 50, [0.2] * 50]  # late by 5 s, of 20 s in all
IN_TURN = [[0.2 if step % 4 == rank else 0.1 for step in range(40)] for rank in range(4)]


def even(steps: int, seconds: float = 0.1) -> list[float]:
    return [seconds] * steps


def verdict(busy_s: list[list[float]], wait_s: list[float]) -> str:
    said = judge(busy_s, wait_s).verdict
    assert said.endswith(".")
    assert not re.search(r"\.\s", said), "one sentence"
    return said


def test_a_worker_that_is_late_in_every_step_is_chronically_slow() -> None:
    assert verdict(SLOW, [4.0, 5.0, 0.0]) == (
        "Rank 2 is chronically slow (late in 50 of 50 steps, by 100 ms each), "
        "and the others waited 9 s for it, 31% of the time."
    )


def test_of_two_workers_the_slower_one_is_named() -> None:
    (late,) = late_workers([even(20, 0.3), even(20)], [0.0, 4.0])
    assert (late.rank, late.chronic, late.times, late.waited_for_s) == (0, True, 20, 4.0)


def test_workers_that_are_late_in_turn_are_late_now_and_then() -> None:
    assert verdict(IN_TURN, [1.0] * 4) == (
        "Nobody is chronically slow: ranks 0, 1, 2 and 3 were late now and then (in 10 of 40 steps each, by 100 ms), "
        "and the others waited 4 s for them, 17% of the time."
    )


def test_a_worker_that_is_slow_for_a_while_is_named_with_the_steps() -> None:
    busy = [even(100), even(100), [0.3 if 40 <= step < 60 else 0.1 for step in range(100)]]
    said = "Rank 2 is chronically slow (late in 20 of 100 steps, without a break from step 40 to 59, by 200 ms each)"
    assert verdict(busy, [1.0, 1.0, 0.0]).startswith(said)
    assert "from step 240 to 259" in judge(busy, [1.0, 1.0, 0.0], begin=200).verdict


def test_of_several_that_are_chronically_slow_the_one_most_waited_for_is_told_of() -> None:
    busy = [even(50), even(50), even(50), even(50, 0.2), even(50, 0.3)]
    assert verdict(busy, [9.0, 9.0, 9.0, 5.0, 0.0]).startswith(
        "Ranks 3 and 4 are chronically slow, rank 4 most of all (late in 50 of 50 steps, by 200 ms each), and the "
        "others waited 21.3 s for it"
    )


def test_chronic_and_passing_lateness_are_told_apart_in_one_run() -> None:
    busy = [[0.5 if step % 9 == 0 else 0.1 for step in range(90)], even(90), even(90), even(90, 0.2)]
    said = verdict(busy, [0.0, 1.0, 1.0, 0.0])
    assert said.startswith("Rank 3 is chronically slow")
    assert said.endswith("; rank 0 was late now and then.")
    assert "rank 0" not in verdict(busy, [0.0] * 4), "where nobody waits, the chronic one is enough"


def test_nobody_is_slow_where_all_are_alike_or_one_step_was_odd() -> None:
    nobody = "Nobody was noticeably slower than the others, "
    assert verdict([even(9)] * 3, [0.1] * 3) == f"{nobody}but waiting took 10% of the time."
    assert verdict([even(100), even(100), [5.0, *even(99)]], [0.1] * 3) == f"{nobody}and waiting took 1% of the time."
    assert verdict([even(9)] * 3, [0.001] * 3) == f"{nobody}and waiting took less than 1% of the time."
    assert verdict([even(9)] * 3, [0.0] * 3) == f"{nobody}and nobody waited."


def test_a_method_that_waits_for_nobody_still_tells_who_is_late() -> None:
    assert verdict(SLOW, [0.0, 0.0, 0.0]).endswith("by 100 ms each), but nobody waited for it.")


def test_a_trifle_of_waiting_is_not_put_down_to_the_slow_one() -> None:
    assert verdict(SLOW, [0.1, 0.08, 0.0]).endswith("by 100 ms each), but the others hardly waited for it.")
    assert verdict(SLOW, [0.12, 0.1, 0.0]).endswith("and the others waited 220 ms for it, 1% of the time.")
    assert verdict(IN_TURN, [0.01] * 4).endswith("by 100 ms), but the others hardly waited for them.")
    a_little = [even(50), even(50), even(50, 0.1004), [0.125 if step % 9 == 0 else 0.1 for step in range(50)]]
    assert verdict(a_little, [9.0] * 4).endswith(
        "but the others hardly waited for it, though waiting took 64% of the time."
    )


def test_where_the_slow_one_waits_as_long_as_the_others_they_do_not_wait_for_it() -> None:
    alike, longer = "about as long as", "longer than"
    for own_s, as_long, share in ((5.0, alike, "43%"), (4.2, alike, "42%"), (9.0, longer, "49%")):
        assert verdict(SLOW, [5.0, 5.0, own_s]) == (
            "Rank 2 is chronically slow (late in 50 of 50 steps, by 100 ms each), but it waited "
            f"{as_long} the others: the waiting, {share} of the time, was for something else."
        )
    assert verdict(SLOW, [0.3, 0.3, 0.4]).endswith("by 100 ms each), but the others did not wait for it.")
    assert "and the others waited 10 s for it" in verdict(SLOW, [5.0, 5.0, 4.0])


def test_nobody_waits_longer_for_a_late_one_than_it_is_late() -> None:
    assert "and the others waited 11.9 s for it" in verdict(SLOW, [6.0, 5.9, 0.0])
    assert "the others waited at most 10 s for it, of 1.83 min in all." in verdict(SLOW, [40.0, 40.0, 30.0])
    assert verdict(IN_TURN, [9.0] * 4).endswith("the others waited at most 12 s for them, of 36 s in all.")


@pytest.mark.parametrize(
    ("busy_s", "wait_s", "waited_for_s"),
    [
        (SLOW, [4.0, 5.0, 0.0], [9.0]),
        (SLOW, [5.0, 5.0, 5.0], [0.0]),
        (SLOW, [40.0, 40.0, 30.0], [10.0]),
        (SLOW, [0.1, 0.08, 0.0], [0.0]),
        (IN_TURN, [1.0] * 4, [1.0] * 4),
        (IN_TURN, [9.0] * 4, [3.0] * 4),
    ],
)
def test_of_each_late_one_no_more_waiting_is_told_than_the_verdict_says(
    busy_s: list[list[float]], wait_s: list[float], waited_for_s: list[float]
) -> None:
    assert [one.waited_for_s for one in judge(busy_s, wait_s).late] == pytest.approx(waited_for_s)


def test_on_a_thin_network_all_reduce_does_not_wait_for_the_slow_one_alone() -> None:
    late, thin = ob.delays.chronic(rank=3, seconds=0.3), ob.Network(bandwidth_Bps=8e6)
    run = ob.simulate(ob.allreduce(), None, workers=4, steps=50, delays=late, network=thin, spans=True)
    assert sum(run.wait_s) > 100
    assert "the others waited at most 45 s for it, of " in run.summary()  # three of them, fifty times


def test_self_clocked_does_not_say_that_anybody_waited_for_the_slow_one() -> None:
    late = ob.delays.chronic(rank=3, seconds=0.3)
    computing_on, waiting, in_step = (
        ob.simulate(strategy, None, workers=4, steps=50, delays=late, spans=True).summary()
        for strategy in (ob.self_clocked(), ob.self_clocked(late=0, wait="first"), ob.allreduce())
    )
    slow = "Rank 3 is chronically slow (late in 50 of 50 steps, by 300 ms each)"
    assert f"{slow}, but nobody waited for it." in computing_on
    assert f"{slow}, but the others hardly waited for it." in waiting
    assert re.search(r"and the others waited \d+\.?\d* s for it, \d+% of the time\.", in_step)


def test_there_is_an_answer_without_steps_and_without_others() -> None:
    assert verdict([even(5)], [0.0]) == "One worker alone waits for nobody."
    assert verdict([[], []], [0.0, 0.0]) == "No step was recorded on every worker, so nobody can be called slow."


@given(st.lists(st.lists(st.floats(0, 10), min_size=1, max_size=12), min_size=2, max_size=6), st.data())
def test_what_is_waited_for_the_late_ones_is_what_was_waited(rows: list[list[float]], data: st.DataObject) -> None:
    waits = data.draw(st.lists(st.floats(0, 10), min_size=len(rows), max_size=len(rows)))
    late = late_workers(rows, waits)
    assert verdict(rows, waits)
    if late:
        assert abs(sum(one.waited_for_s for one in late) - sum(waits)) < 1e-6 * max(sum(waits), 1)
    told = judge(rows, waits).late
    assert sum(one.waited_for_s for one in told) <= sum(waits) * (1 + 1e-6)
