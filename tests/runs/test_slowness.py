"""Which worker is slow? The sentences, from the times of steps."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

import offbeat as ob
from offbeat.runs.slowness import in_words, late_workers


def even(steps: int, seconds: float = 0.1) -> list[float]:
    return [seconds] * steps


def test_a_worker_that_is_late_in_every_step_is_chronically_slow() -> None:
    said = in_words([even(50), even(50), even(50, 0.2)], [4.0, 5.0, 0.0])
    assert said == [
        "The 3 workers waited 9 s in all, 31% of their time.",
        "Rank 2 is chronically slow: late in 50 of 50 steps, by 100 ms each; the others waited 9 s for it.",
    ]


def test_of_two_workers_the_slower_one_is_named() -> None:
    (late,) = late_workers([even(20, 0.3), even(20)], [0.0, 4.0])
    assert (late.rank, late.chronic, late.times, late.waited_for_s) == (0, True, 20, 4.0)


def test_workers_that_are_late_in_turn_are_late_now_and_then() -> None:
    busy = [[0.2 if step % 4 == rank else 0.1 for step in range(40)] for rank in range(4)]
    said = in_words(busy, [1.0] * 4)
    assert said[1] == (
        "No worker is chronically slow: ranks 0, 1, 2 and 3 were late now and then, in 10 of 40 steps each, "
        "by 100 ms; the others waited 4 s for them."
    )


def test_a_worker_that_is_slow_for_a_while_is_named_with_the_steps() -> None:
    busy = [even(100), even(100), [0.3 if 40 <= step < 60 else 0.1 for step in range(100)]]
    said = in_words(busy, [1.0, 1.0, 0.0])
    assert "Rank 2 is chronically slow: late in 20 of 100 steps, without a break from step 40 to 59" in said[1]


def test_chronic_and_passing_lateness_are_told_apart_in_one_run() -> None:
    busy = [[0.5 if step % 9 == 0 else 0.1 for step in range(90)], even(90), even(90), even(90, 0.2)]
    said = in_words(busy, [0.0, 1.0, 1.0, 0.0])
    assert said[1].startswith("Rank 3 is chronically slow")
    assert said[2].startswith("Besides, rank 0 was late now and then, in 10 of 90 steps, by 400 ms")


def test_nobody_is_slow_where_all_are_alike_or_one_step_was_odd() -> None:
    busy = [even(100), even(100), [5.0, *even(99)]]
    for rows in ([even(9)] * 3, busy):
        assert in_words(rows, [0.1] * 3)[1] == "No worker was noticeably slower than the others."


def test_a_method_that_waits_for_nobody_still_tells_who_is_late() -> None:
    said = in_words([even(50), even(50), even(50, 0.2)], [0.0, 0.0, 0.0])
    assert said[1].endswith("by 100 ms each; nobody waited for it.")


def test_a_trifle_of_waiting_is_not_put_down_to_the_slow_one() -> None:
    slow = [even(50), even(50), even(50, 0.2)]  # 20 s in all
    assert in_words(slow, [0.1, 0.08, 0.0])[1].endswith("by 100 ms each; the others hardly waited for it.")
    assert in_words(slow, [0.12, 0.1, 0.0])[1].endswith("by 100 ms each; the others waited 220 ms for it.")
    in_turn = [[0.2 if step % 4 == rank else 0.1 for step in range(40)] for rank in range(4)]
    assert in_words(in_turn, [0.01] * 4)[1].endswith("by 100 ms; the others hardly waited for them.")


def test_where_the_slow_one_waits_as_long_as_the_others_they_do_not_wait_for_it() -> None:
    slow = [even(50), even(50), even(50, 0.2)]
    for own_s in (5.0, 4.2, 9.0):
        assert in_words(slow, [5.0, 5.0, own_s])[1] == (
            "Rank 2 is chronically slow: late in 50 of 50 steps, by 100 ms each; "
            "the others waited hardly longer than it did, so for something else."
        )
    assert in_words(slow, [5.0, 5.0, 4.0])[1].endswith("the others waited 10 s for it.")


def test_nobody_waits_longer_for_a_late_one_than_it_is_late() -> None:
    slow = [even(50), even(50), even(50, 0.2)]  # late by 5 s in all
    assert in_words(slow, [6.0, 5.9, 0.0])[1].endswith("the others waited 11.9 s for it.")
    assert in_words(slow, [40.0, 40.0, 30.0])[1].endswith("the others waited at most 10 s for it.")
    in_turn = [[0.2 if step % 4 == rank else 0.1 for step in range(40)] for rank in range(4)]
    assert in_words(in_turn, [9.0] * 4)[1].endswith("by 100 ms; the others waited at most 12 s for them.")


def test_on_a_thin_network_all_reduce_does_not_wait_for_the_slow_one_alone() -> None:
    late, thin = ob.delays.chronic(rank=3, seconds=0.3), ob.Network(bandwidth_Bps=8e6)
    run = ob.simulate(ob.allreduce(), None, workers=4, steps=50, delays=late, network=thin, spans=True)
    assert sum(run.wait_s) > 100
    assert "the others waited at most 45 s for it." in run.summary()  # three of them, fifty times


def test_self_clocked_does_not_say_that_anybody_waited_for_the_slow_one() -> None:
    late = ob.delays.chronic(rank=3, seconds=0.3)
    computing_on, waiting, in_step = (
        ob.simulate(strategy, None, workers=4, steps=50, delays=late, spans=True).summary()
        for strategy in (ob.self_clocked(), ob.self_clocked(late=0, wait="first"), ob.allreduce())
    )
    slow = "Rank 3 is chronically slow: late in 50 of 50 steps, by 300 ms each"
    assert f"{slow}; nobody waited for it." in computing_on
    assert f"{slow}; the others hardly waited for it." in waiting
    assert re.search(r"the others waited \d+\.?\d* s for it\.", in_step)


def test_there_is_an_answer_without_steps_and_without_others() -> None:
    assert in_words([even(5)], [0.0]) == ["One worker alone waits for nobody."]
    assert in_words([[], []], [0.0, 0.0]) == ["No step was recorded on every worker, so nobody can be called slow."]


@given(st.lists(st.lists(st.floats(0, 10), min_size=1, max_size=12), min_size=2, max_size=6), st.data())
def test_what_is_waited_for_the_late_ones_is_what_was_waited(rows: list[list[float]], data: st.DataObject) -> None:
    waits = data.draw(st.lists(st.floats(0, 10), min_size=len(rows), max_size=len(rows)))
    late = late_workers(rows, waits)
    assert in_words(rows, waits)
    if late:
        assert abs(sum(one.waited_for_s for one in late) - sum(waits)) < 1e-6 * max(sum(waits), 1)
