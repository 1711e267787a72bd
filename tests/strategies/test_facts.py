"""What runtimes know of a method is what it says in types: facts that follow its settings, and numbers it reports."""

from __future__ import annotations

import ast
import dataclasses
import re
import types
from pathlib import Path
from typing import Any

import pytest

import offbeat as ob
from offbeat.live.attached import state
from offbeat.live.job.steplog import Entry, StepRecord, assemble
from offbeat.method import Batch, Begin, Facts, Finish, GradMix, Mix, Mixing, Next, Open, Replica, Reported, Share, Vec
from offbeat.runs.talking import Talking

ROOT = Path(ob.__file__).parent
TASK = ob.tasks.regression(dimension=5, batch=4)
P = 5

ALL = Facts(meets="everyone", waits_where_it_begins=True)
LATER = Facts(meets="everyone")
OTHERS = Facts()
LATE = Facts(late_gradients=True)

TABLE: list[tuple[ob.Strategy, Facts]] = [
    (ob.allreduce(), ALL),
    (ob.qsgd(), ALL),
    (ob.local_sgd(2), ALL),
    (ob.local_sgd(2, pace="speed"), ALL),
    (ob.adaptive(2), ALL),
    (ob.dasgd(2, 0), ALL),
    (ob.dasgd(3, 2), LATER),
    (ob.diloco(2), ALL),
    (ob.diloco(2, pace="speed"), ALL),
    (ob.sparseloco(2), ALL),
    (ob.diloco(4, fragments=2), ALL),
    (ob.diloco(4, overlap=2), LATER),
    (ob.eager(), OTHERS),
    (ob.eager("everyone", grace=0), OTHERS),
    (ob.eager(sync_every=1, grace=0), OTHERS),
    (ob.eager(grace=0), LATE),
    (ob.eager("50%", grace=0), LATE),
    (ob.eager(late=1), LATE),
    (ob.msync(), OTHERS),
    (ob.ringmaster(), LATE),
    (ob.ringmaster(1), OTHERS),
    (ob.decoupled(), OTHERS),
    (ob.wagma(), OTHERS),
    (ob.self_clocked(), OTHERS),
    (ob.dpsgd(), OTHERS),
    (ob.ad_psgd(), OTHERS),
    (ob.sgp(), OTHERS),
    (ob.matcha(), OTHERS),
    (ob.noloco(2), OTHERS),
    (ob.nonblocking(), dataclasses.replace(ALL, cuts_batches=True)),
    (ob.nonblocking(over="server"), dataclasses.replace(ALL, cuts_batches=True)),
    (ob.nonblocking(over="ring"), dataclasses.replace(OTHERS, cuts_batches=True)),
    (ob.nonblocking(over=[(0, 1), (1, 2), (2, 3), (3, 4)]), dataclasses.replace(OTHERS, cuts_batches=True)),
    (ob.nonblocking(over="matcha"), dataclasses.replace(OTHERS, cuts_batches=True)),
]
table = pytest.mark.parametrize(
    ("strategy", "facts"), TABLE, ids=lambda x: str(x) if isinstance(x, ob.Strategy) else ""
)


def test_the_table_has_a_row_for_every_method() -> None:
    assert {strategy.name for strategy, _ in TABLE} == set(ob.STRATEGIES)


@table
def test_facts_follow_the_settings(strategy: ob.Strategy, facts: Facts) -> None:
    assert strategy.facts == facts


@dataclasses.dataclass
class Seen:
    """What the bodies of a run asked for."""

    partial: bool = False
    among_all: list[bool] = dataclasses.field(default_factory=list)
    out_over_a_step: bool = False
    batches: bool = False


def watched(strategy: ob.Strategy, seen: Seen) -> ob.Strategy:
    @types.coroutine
    def body(me: Replica) -> Any:
        inner: Any = strategy.body(me)
        answer, out = None, 0
        while True:
            try:
                effect = inner.send(answer)
            except StopIteration:
                return
            begun = effect.effect if isinstance(effect, Begin) else effect
            if isinstance(begun, Mix | GradMix):
                seen.among_all.append(everyone_is_in(begun.W))
            out += isinstance(effect, Begin) - isinstance(effect, Finish)
            seen.out_over_a_step |= isinstance(effect, Next) and out > 0
            seen.partial |= isinstance(effect, Open | Share)
            seen.batches |= isinstance(effect, Batch)
            answer = yield effect

    return dataclasses.replace(strategy, body=body)


def everyone_is_in(W: Mixing) -> bool:
    """Somebody hears all the others, or is heard by all of them."""
    return any(P - 1 in (len(W.senders(rank)), len(W.receivers(rank))) for rank in range(P))


@pytest.mark.parametrize("strategy", [strategy for strategy, _ in TABLE], ids=str)
def test_what_a_method_says_of_itself_is_what_it_does(strategy: ob.Strategy) -> None:
    seen = Seen()
    ob.simulate(watched(strategy, seen), TASK, workers=P, steps=9)
    everyone = bool(seen.among_all) and all(seen.among_all) and not seen.partial
    said = strategy.facts
    assert everyone == (said.meets == "everyone")
    assert seen.batches == said.cuts_batches
    if everyone:
        assert said.waits_where_it_begins == (not seen.out_over_a_step)


GRADIENTS = [s for s, _ in TABLE if s.name in ("eager", "msync", "ringmaster")]


@pytest.mark.parametrize("strategy", GRADIENTS, ids=str)
def test_of_late_gradients_it_speaks_where_a_third_or_more_are_late_though_nobody_is_slow(
    strategy: ob.Strategy,
) -> None:
    ran = ob.simulate(strategy, TASK, workers=P, steps=40, compute_s=ob.delays.lognormal(1.0, 0.1))
    ages = [age for r in ran.trace.rounds[P:] for age in r.staleness.values()]
    assert len(ages) > 2 * P
    assert (sum(age > 0 for age in ages) > len(ages) / 3) == strategy.facts.late_gradients


def record(came_s: float) -> StepRecord:
    return StepRecord([Entry(0.0, 0.0, came_s, 3.0, 4, 100, 0)], [1.0], [], [])


@pytest.mark.parametrize(("strategy", "rounds"), [(ob.nonblocking(), 1), (ob.nonblocking(over="ring"), 0)], ids=str)
def test_a_live_run_along_a_ring_is_no_meeting_of_all(strategy: ob.Strategy, rounds: int) -> None:
    trace = assemble([record(1.0), record(2.0)], strategy.facts)
    assert len(trace.rounds) == rounds
    waits = {span.rank: span.end_s - span.start_s for span in trace.spans if span.doing == "wait"}
    assert waits == ({0: 1.0} if rounds else {0: 2.0, 1: 1.0})  # nobody waits any more when the last one has come


# Numbers that change during a run.


def replica(rank: int = 0) -> Replica:
    return Replica(rank, 2, Vec(()), Vec(()), lambda g: None, list)


def test_what_is_not_told_again_stays_as_it_was_told() -> None:
    me = replica()
    assert me.reported == Reported(period=None, micro_batches=1, samples_used=())
    me.report(period=4)
    me.report(micro_batches=8, samples_used=[3, 5])
    me.report(period=5)
    assert me.reported == Reported(5, 8, (3, 5))


def test_adaptive_reports_its_period_and_the_simulator_shows_it() -> None:
    run = ob.simulate(ob.adaptive(3, low=0.0, high=float("inf")), TASK, workers=2, steps=12, spans=True)
    assert {point.value for point in run.trace.series["period"]} == {3}
    assert "period" not in ob.simulate(ob.local_sgd(3), TASK, workers=2, steps=12, spans=True).trace.series


def test_a_checkpoint_keeps_memory_reports_and_what_is_left_over_apart() -> None:
    me, again, strategy = replica(), replica(), ob.nonblocking()
    me.recall(n=16)
    me.report(micro_batches=16, samples_used=[7, 9])
    own = state.saved(strategy, me, state.Left(exchanges=5, rounds=2, owed=None, waiting=3))
    assert own["memory"] == {"n": 16}
    assert state.restore(own, strategy, again) == state.Left(5, 2, None, 3)
    assert vars(again.memory) == {"n": 16}
    assert again.reported == me.reported
    del own["reported"]
    with pytest.raises(ValueError, match="this state has no reported: it was saved by another version of Offbeat"):
        state.restore(own, strategy, again)


def test_how_often_a_worker_talked_is_counted_by_its_run_and_not_taken_over_from_a_state() -> None:
    me, again, strategy = replica(), replica(), ob.self_clocked()
    me.report(talking=Talking(8, 4, steps=20))
    own = state.saved(strategy, me, state.Left())
    assert own["reported"]["talking"] is None
    own["reported"]["talking"] = {"exchanges": 8, "underway": 4, "taken": 0, "ages": 0, "oldest": 0}  # as it once was
    state.restore(own, strategy, again)
    assert again.reported.talking is None
    again.report(talking=Talking(1, steps=2))
    state.restore(own, strategy, again)
    assert again.reported.talking == Talking(1, steps=2)


# Read from the source, nothing is run.

RUNTIMES = sorted(file for room in ("sim", "live") for file in (ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("file", RUNTIMES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_runtime_reads_neither_memory_nor_name_nor_card_of_a_method(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    asked = {
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and re.search(r"\bme$|replicas?(\[\w+\])?$|strategy$", ast.unparse(node.value))
        and node.attr in {"memory", "paper", "card", "settings", "name"}
    }
    assert asked == ({"me.memory"} if file.name == "state.py" else set())  # which saves it, and does not look at it
    compared = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and isinstance(node.ops[0], ast.Eq | ast.NotEq)
        and any(isinstance(side, ast.Attribute) and side.attr == "name" for side in (node.left, *node.comparators))
    ]
    assert not compared
    guessed = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and "memory" in ast.unparse(node.args[0])
    ]
    assert not guessed
