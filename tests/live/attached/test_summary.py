"""The table that ``optimizer.summary()`` is, before and after the end of a run, and what it counts after a resume."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
import torch
from rich.console import Console

import offbeat as ob
from offbeat.live.attached.summary import RankSummary
from tests.support import forge
from tests.support.forge import Job, attempt, hear, say
from tests.support.nets import PATIENCE_S, loss, net, sgd
from tests.support.scenarios import Told, scenario

METHODS = {
    "self_clocked": ob.self_clocked(period=1),
    "self_clocked, all": ob.self_clocked(period=1, group=None),
    "eager": ob.eager(),
    "local_sgd": ob.local_sgd(2),
    "adaptive": ob.adaptive(period=2),
    "ad_psgd": ob.ad_psgd(),
}
BEFORE, AFTER = 12, 3


def steps(rank: int, model: Any, optimizer: ob.Attached, begin: int, end: int) -> None:
    for t in range(begin, end):
        optimizer.zero_grad()
        loss(model, rank, t).backward()
        optimizer.step()


def row(rank: int, **more: Any) -> RankSummary:
    known = {"waited_for_s": 0.0, "late_steps": 0, "compared_steps": 199, "late_by_s": 0.0, **more}
    return RankSummary(rank, 200, 4.0, 1.0, 1_250_000, **known)


def summary(*ranks: RankSummary, sentences: tuple[str, ...] = ("Nobody <was> slow.",)) -> ob.Summary:
    return ob.Summary(0, len(ranks), 200, 4.0, 1.0, 1_250_000, sentences, ranks=ranks)


SLOW = summary(row(0), row(1, waited_for_s=0.9, late_steps=180, late_by_s=0.03), sentences=("So it was.", "And so."))


def test_it_prints_as_a_table_with_the_sentences_below() -> None:
    assert str(SLOW).splitlines() == [
        "rank  steps  own time    waiting  waited for         late in steps     sent",
        "   0    200       4 s  1 s (20%)           -                     -  1.25 MB",
        "   1    200       4 s  1 s (20%)      900 ms  180 of 199, by 30 ms  1.25 MB",
        "So it was.",
        "And so.",
    ]
    assert SLOW.verdict == "So it was."


def test_rich_and_notebooks_show_the_same() -> None:
    console = Console(width=120, file=io.StringIO(), color_system=None)
    console.print(SLOW)
    assert isinstance(console.file, io.StringIO)
    shown = [line.split() for line in console.file.getvalue().splitlines()]
    assert shown == [line.split() for line in str(SLOW).splitlines()]
    html = SLOW._repr_html_()
    assert html.startswith("<table><thead><tr><th>rank</th><th>steps</th>")
    assert "<td>180 of 199, by 30 ms</td>" in html
    assert "<p>Nobody &lt;was&gt; slow.</p>" in summary(row(0))._repr_html_()


def test_as_plain_data_it_has_rows_and_the_verdict() -> None:
    plain = json.loads(json.dumps(SLOW.json()))
    assert plain["verdict"] == "So it was."
    assert plain["ranks"][1]["late_steps"] == 180


def test_of_many_ranks_those_with_the_most_to_tell_are_shown() -> None:
    late = {7: 0.5, 40: 2.0}
    many = summary(*(row(rank, waited_for_s=late.get(rank, 0.0)) for rank in range(64)))
    header, *lines = str(many).splitlines()
    assert header.startswith("rank")
    shown = [int(line.split()[0]) for line in lines[:16]]
    assert shown == sorted(shown)
    assert {7, 40} <= {*shown}
    assert lines[16] == "48 more ranks have less to tell; summary().ranks has them all."


def test_one_worker_alone_has_a_row_of_its_own() -> None:
    model = net()
    with ob.attach(sgd(model), model) as optimizer:
        steps(0, model, optimizer, 0, 3)
    header, line, *below = str(optimizer.summary()).splitlines()
    assert header.split() == ["rank", "steps", "own", "time", "waiting", "sent"]
    assert line.split()[:2] == ["0", "3"]
    assert below == ["One worker alone waits for nobody."]


@scenario(2)
def resumed(rank: int) -> dict[str, tuple[ob.Summary, ob.Summary]]:
    out = {}
    for name, strategy in METHODS.items():
        model = net()
        with ob.attach(sgd(model), model, strategy, patience_s=PATIENCE_S) as optimizer:
            steps(rank, model, optimizer, 0, BEFORE)
            optimizer.average()
            saved = model.state_dict(), optimizer.state_dict()
        model = net()
        with ob.attach(sgd(model), model, strategy, patience_s=PATIENCE_S) as again:
            model.load_state_dict(saved[0])
            again.load_state_dict(saved[1])
            steps(rank, model, again, BEFORE, BEFORE + AFTER)
            before = again.summary()
        out[name] = before, again.summary()
    return out


@pytest.mark.live
@pytest.mark.parametrize("name", METHODS)
def test_a_resumed_run_counts_its_own_steps_and_nothing_of_the_run_before(name: str, told: Told) -> None:
    for _, after in (of_rank[name] for of_rank in told(resumed)):
        assert after.steps == AFTER
        assert [one.steps for one in after.ranks] == [AFTER, AFTER]
        assert [one.compared_steps for one in after.ranks] == [AFTER - 1, AFTER - 1]
        if name.startswith("self_clocked"):
            talked = re.search(r"They talked (?:(\d+) times|once), once in ([\d.]+) steps", str(after))
            assert talked is not None, str(after)
            assert int(talked[1] or 1) <= 2 * AFTER
            assert float(talked[2]) == pytest.approx(2 * AFTER / int(talked[1] or 1), abs=0.05)
        if underway := re.search(r"after (\d+) of (\d+) steps", str(after)):
            assert int(underway[1]) <= int(underway[2]) == 2 * AFTER


@pytest.mark.live
def test_before_finish_there_is_this_ranks_row_alone(told: Told) -> None:
    for rank, of_rank in enumerate(told(resumed)):
        before, _ = of_rank["local_sgd"]
        assert [(one.rank, one.steps, one.late_steps) for one in before.ranks] == [(rank, AFTER, None)]
        assert before.verdict == "The other ranks' rows, and who was waited for, are known after finish()."


@scenario(4)
def uneven_in_a_node(rank: int) -> tuple[str, list[int]]:
    model = net()
    with ob.attach(sgd(model), model, ob.self_clocked(period=1, per_node=2), patience_s=PATIENCE_S) as optimizer:
        steps(rank, model, optimizer, 0, 2 if rank == 1 else 10)
    return str(optimizer.summary()), [one.steps for one in optimizer.summary().ranks]


@pytest.mark.live
def test_steps_for_the_sake_of_a_node_count_where_its_exchanges_do(told: Told) -> None:
    for said, taken in told(uneven_in_a_node):
        assert taken == [10, 2, 10, 10]
        talked = re.search(r"They talked (\d+) times, once in ([\d.]+) steps", said)
        assert talked is not None, said
        assert float(talked[2]) == pytest.approx(40 / int(talked[1]), abs=0.05)
        assert "is about steps 1 to 1 alone: those that all ranks took" in said


def fails(rank: int) -> tuple[str, ob.Summary]:
    torch.distributed.init_process_group("gloo")
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.allreduce(), patience_s=PATIENCE_S)

    def goes_on() -> None:
        with optimizer:
            steps(rank, model, optimizer, 0, 2)
            if rank == 1:
                raise ValueError("no such file")
            steps(rank, model, optimizer, 2, 3)

    error = attempt(goes_on)
    say(f"{rank} is over")
    hear(f"{1 - rank} is over")
    return error, optimizer.summary()


@pytest.mark.live
def test_after_a_failure_there_is_this_ranks_row_and_it_says_why_alone() -> None:
    (outcomes,) = forge.run([Job(fails, 2)])
    for rank, (error, told) in enumerate(forge.values(outcomes)):
        assert "no such file" in error
        assert [one.rank for one in told.ranks] == [rank]
        assert told.verdict == "The run ended before finish() was through, so the other ranks' times are not known."
