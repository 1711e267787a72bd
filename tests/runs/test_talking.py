"""How often workers talked, how old what they took was, and what they would have waited for: the sentences."""

from __future__ import annotations

import pytest

import offbeat as ob
from offbeat.runs.slowness import would_have_waited
from offbeat.runs.talking import Talking, told

EVEN = [[0.1] * 20, [0.1] * 20]


def test_the_sentence_says_how_often_they_talked_and_how_old_what_they_took_was() -> None:
    talking = [Talking(8, 0, 4, 2, 1, 20), Talking(2, 0, 4, 6, 3, 20)]
    assert told(talking, EVEN) == [
        "They talked 10 times, once in 4.0 steps, and took what was 1.0 rounds old on average, 3 at most."
    ]


def test_where_times_were_kept_of_the_last_steps_alone_all_steps_count() -> None:
    assert told([Talking(50, steps=100), Talking(50, steps=100)], EVEN) == ["They talked 100 times, once in 2.0 steps."]


def test_steps_that_found_an_exchange_under_way_are_told() -> None:
    assert told([Talking(5, steps=20), Talking(5, 10, steps=20)], EVEN) == [
        "They talked 10 times, once in 4.0 steps; after 10 of 40 steps an exchange was still under way, and they "
        "computed on."
    ]


def test_each_step_counts_once_whatever_came_of_it() -> None:
    assert Talking().handed_in().took([1, 3]).waiting().waiting().stepped() == Talking(1, 2, 2, 4, 3, 4)


def test_who_would_have_been_waited_for_is_named() -> None:
    busy_s = [[0.1, 0.1], [0.3, 0.1], [0.1, 0.2]]
    assert would_have_waited(busy_s) == pytest.approx([0.0, 0.4, 0.2])
    assert told([Talking(1, steps=2)] * 3, busy_s) == [
        "They talked 3 times, once in 2.0 steps; step by step they would have waited 600 ms, 67% of it for rank 1."
    ]


@pytest.mark.parametrize("one", [Talking(), Talking(3, 1, 2, 5, 4)])
def test_it_can_be_sent_as_numbers(one: Talking) -> None:
    assert Talking(*one.numbers()) == one


def test_a_simulated_run_counts_what_really_happened() -> None:
    ran = ob.simulate(ob.self_clocked(period=2), None, 4, 20, compute_s=0.1, spans=True)
    assert [one.exchanges for one in ran.talking] == [10] * 4
    assert [one.underway for one in ran.talking] == [0] * 4
    assert "They talked 40 times, once in 2.0 steps" in ran.summary()


def test_on_a_thin_network_steps_find_their_exchange_under_way() -> None:
    thin = ob.Network(bandwidth_Bps=8e6)  # a copy of the model takes five steps
    ran = ob.simulate(
        ob.self_clocked(period=1, pause=0.0, codec=None), None, 2, 40, compute_s=0.1, network=thin, spans=True
    )
    for one in ran.talking:
        assert one.exchanges + one.underway == one.steps == 40, "after every step it talked, or found that it could not"
        assert one.underway > one.exchanges > 1
    assert "an exchange was still under way, and they computed on" in ran.summary()


def test_methods_that_have_no_choice_say_nothing_of_it() -> None:
    ran = ob.simulate(ob.local_sgd(2), None, 4, 20, spans=True)
    assert ran.talking == ()
    assert "talked" not in ran.summary()
