"""Twins of every method: a live run that is replayed, in the order of its own events, ends with its weights."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import offbeat as ob
from offbeat.cli import main
from offbeat.runs import order as orders
from tests.support import forge
from tests.support.in_step import DEPENDS_ON_TIMING
from tests.support.launching import quick_launches
from tests.support.long import LONG
from tests.support.scenarios import Call, Told, Turns, in_turn, over, scenario
from tests.support.timed import BY_SPEED, IN_NODES, IN_SMALL_BUCKETS, TIMED

pytestmark = pytest.mark.live

STEPS = 10
ON_TWO_HOSTS, ON_THEIR_OWN = "on two hosts", "each on a host of its own"
# How many batches each worker has, whether some of its steps take longer, and whether all average in the middle.
RUNS: dict[str, tuple[tuple[int, ...], bool, bool]] = {
    "two": ((STEPS, STEPS), False, False),
    "three, uneven": ((4, STEPS, 0), False, False),
    "three, late and averaged": ((STEPS,) * 3, True, True),
    "four, late": ((STEPS,) * 4, True, False),
    "four, late, uneven and averaged": ((STEPS, 3, STEPS, 7), True, True),
    "five, late and uneven": ((STEPS, 2, 9, STEPS, 5), True, False),
    f"four, late and uneven, {ON_TWO_HOSTS}": ((STEPS, 6, STEPS, 8), True, False),
    f"three, late, uneven and averaged, {ON_THEIR_OWN}": ((STEPS, 7, STEPS), True, True),
    f"five, late and uneven, {ON_THEIR_OWN}": ((STEPS, 6, STEPS, 8, 9), True, False),
    "four, late, uneven and averaged, long": ((STEPS, 7, STEPS, 4), True, True),
}
WAYS = {ON_TWO_HOSTS: "hosts", "long": "long"}  # which way vectors go, where a run says so


def task() -> ob.Task:
    return ob.tasks.digits(batch=8, hidden=12, momentum=0.9, lr=0.05, dtype=torch.float64)


IN_PAIRS = ("self_clocked", "self_clocked, coded", "self_clocked, drawing, coded", "wagma, coded")
OF_THOSE_IN_STEP = ("three, uneven", "four, late, uneven and averaged", f"four, late and uneven, {ON_TWO_HOSTS}")


def is_shown_elsewhere(name: str, run: str) -> bool:
    if ON_THEIR_OWN in run:  # where nothing is coded, a host more is nothing new; of five, those who meet in groups
        return TIMED[name].settings.get("codec") is None or (len(RUNS[run][0]) == 5 and name not in IN_PAIRS)
    if run.endswith("long"):  # what is in step, and what is coded, other rows show
        coded, kind = TIMED[name].settings.get("codec") not in (None, "auto"), TIMED[name].name
        return coded or kind not in DEPENDS_ON_TIMING or kind == "nonblocking"
    # In step nothing is a matter of time; test_twins has the rest, left to a replay are data that end, and averages.
    return TIMED[name].name not in DEPENDS_ON_TIMING and run not in OF_THOSE_IN_STEP and not LONG


def fits(name: str, run: str) -> bool:
    batches, _, averages = RUNS[run]
    if is_shown_elsewhere(name, run):
        return False
    if name in BY_SPEED:
        return not averages
    return name not in IN_NODES or (len(batches) % 2 == 0 and not averages)


def table() -> list[tuple[str, str]]:
    """At every change a method sees one run of few workers, one of more, and one of hosts or long vectors: that which
    was seen least."""
    few, of_hosts = list(RUNS)[:3], [run for run in RUNS if "host" in run or "long" in run]
    more = [run for run in RUNS if run not in (*few, *of_hosts)]
    out, seen = list[tuple[str, str]](), Counter[str]()
    for name in TIMED:
        for runs in (few, more, of_hosts):
            fitting = [run for run in runs if fits(name, run)]
            out += [(name, run) for run in (fitting if LONG else sorted(fitting, key=seen.__getitem__)[:1])]
            seen[out[-1][1]] += 1
    return out


TABLE = table()


def train(rank: int, name: str, run: str, folder: str) -> Tensor:
    (batches, late, averages), work, strategy = RUNS[run], task(), TIMED[name]
    model = work.build(0)
    inner = work.optimizer(list(model.parameters()))
    optimizer = ob.attach(inner, model, strategy, steps=STEPS, patience_s=120, record=Path(folder, run, name))
    own, cut = [work.take(rank, t) for t in range(batches[rank])], strategy.facts.cuts_batches
    for step, batch in enumerate(optimizer.batches(own) if cut else own):
        if averages and step in (2, 5):
            optimizer.average()
        if late and (rank * 7 + step * 5) % 4 == 0:
            time.sleep(0.004)
        optimizer.zero_grad()
        if cut:
            for piece in optimizer.micro_batches(batch):
                time.sleep(0.002 * (late and rank == 1))
                work.value(model, piece).backward()
        else:
            work.value(model, batch).backward()
        optimizer.step()
    optimizer.finish()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def train_on_a_host(rank: int, name: str, run: str, folder: str) -> Tensor:
    """Where every rank has a host of its own, so that all that is sent is coded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFBEAT_HOST", f"host {rank}")
        return train(rank, name, run, folder)


Ran = tuple[Path, Callable[[str], Turns[str]]]
OfHosts = tuple[tuple[int, ...], int, float]  # homes, hosts, how far apart


@pytest.fixture(scope="module")
def live() -> Iterator[Ran]:
    with tempfile.TemporaryDirectory() as folder:

        @cache
        def ran(run: str) -> Turns[str]:
            names = [name for name, its in TABLE if its == run]
            calls = {name: Call(train, (name, run, folder)) for name in names}
            for way in (way for words, way in WAYS.items() if words in run):
                calls = {name: Call(over, (way, train, name, run, folder)) for name in names}
            if ON_THEIR_OWN in run:
                calls = {name: Call(train_on_a_host, (name, run, folder)) for name in names}
            return in_turn(calls, len(RUNS[run][0]), init=False)

        yield Path(folder), ran


@scenario(2)
def what_no_task_tells(rank: int) -> dict[str, str]:
    """What a replay says of runs with something in them that it does not know how to do."""
    out = {}
    runs: dict[str, dict[str, Any]] = {"clips": {"max_norm": 1.0}, "accumulates": {"accumulate": 2}}
    for name, how in {**runs, "resumed": {}, "middle": {}}.items():
        with tempfile.TemporaryDirectory() as place:
            work, folder = task(), Path(broadcast(place))
            model = work.build(0)
            inner = work.optimizer(list(model.parameters()))
            optimizer = ob.attach(inner, model, ob.local_sgd(2), patience_s=120, record=folder, **how)
            if name == "resumed":
                optimizer.load_state_dict(optimizer.state_dict())
            for t in range(how.get("accumulate", 1)):
                work.value(model, work.take(rank, t)).backward()
            if name == "middle":
                optimizer.average()
            optimizer.step()
            optimizer.finish()
            dist.barrier()
            out[name] = forge.attempt(lambda: ob.replay(folder, task()))  # noqa: B023
            dist.barrier()
    return out


OF_HOSTS = (ob.allreduce(), ob.eager(), ob.local_sgd(2))
CODED_OF_HOSTS = tuple(
    make(codec=codec)
    for codec in (ob.codec.int8(), ob.codec.bf16(), ob.codec.qsgd(4))
    for make in (ob.self_clocked, ob.eager, partial(ob.local_sgd, 2))
)


@scenario(4)
def of_hosts_of_two(rank: int) -> dict[str, OfHosts]:
    return said_of_hosts(rank, OF_HOSTS)


@scenario(4)
def coded_of_hosts_of_two(rank: int) -> dict[str, OfHosts]:
    return said_of_hosts(rank, CODED_OF_HOSTS)


def said_of_hosts(rank: int, methods: Sequence[ob.Strategy]) -> dict[str, OfHosts]:
    """The homes and the number of hosts in a record of two hosts, and how far its replay ends from the run."""
    out = {}
    for strategy in methods:
        with tempfile.TemporaryDirectory() as place:
            folder, work = Path(broadcast(place)), task()
            model = work.build(0)
            inner = work.optimizer(list(model.parameters()))
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("OFFBEAT_HOST", str(rank // 2))
                optimizer = ob.attach(inner, model, strategy, steps=4, patience_s=120, record=folder)
                for t in range(4):
                    optimizer.zero_grad()
                    work.value(model, work.take(rank, t)).backward()
                    optimizer.step()
                optimizer.finish()
            dist.barrier()
            about, ended = orders.read(folder).about, torch.nn.utils.parameters_to_vector(model.parameters())
            final = torch.empty_like(ended) if rank else ob.replay(folder, task()).final
            dist.broadcast(final, 0)
            apart = (final - ended.detach()).abs().max()
            out[str(strategy)] = about.homes, about.hosts, float(apart)
            dist.barrier()
    return out


def test_what_hosts_of_two_have_coded_is_replayed(told: Told) -> None:
    for of_rank in told(coded_of_hosts_of_two):
        assert {method: apart for method, (_, _, apart) in of_rank.items() if not apart < 1e-9} == {}


def test_a_record_says_where_each_worker_was(told: Told) -> None:
    for of_rank in told(of_hosts_of_two):
        for method, (homes, hosts, apart) in of_rank.items():
            assert (homes, hosts) == ((0, 0, 1, 1), 2), method
            assert apart < 1e-9, method


def broadcast(word: str) -> str:
    """Rank 0's, on all ranks."""
    words = [word]
    dist.broadcast_object_list(words)
    return words[0]


def test_a_run_that_no_task_tells_all_of_says_so_instead_of_ending_elsewhere(told: Told) -> None:
    for said in told(what_no_task_tells):
        assert "attached with max_norm=1.0, which a Task does not know" in said["clips"]
        assert "attached with accumulate=2, which a Task does not know" in said["accumulates"]
        assert "it was taken up from a state" in said["resumed"]
        assert "average() was called between backward() and step()" in said["middle"]


def test_every_method_is_in_the_table() -> None:
    assert {strategy.name for strategy in TIMED.values()} == set(ob.STRATEGIES)


@pytest.mark.parametrize(("name", "run"), TABLE)
def test_a_replayed_run_ends_with_the_weights_of_the_live_one(live: Ran, name: str, run: str) -> None:
    folder, ran = live
    everyone = ran(run)[name]
    strategy = TIMED[name] if IN_SMALL_BUCKETS in name else None
    assert (ob.replay(folder / run / name, task(), strategy=strategy).final - everyone[0]).abs().max() < 1e-9


def test_what_is_replayed_of_hosts_was_coded(live: Ran, tmp_path: Path) -> None:
    """The same order on one host, where nothing is, ends elsewhere."""
    folder, ran = live
    run = next(run for run in RUNS if ON_THEIR_OWN in run)
    name = next(name for name, its in TABLE if its == run and TIMED[name].settings.get("codec") == "auto")
    everyone, order = ran(run)[name], orders.read(folder / run / name)
    assert order.about.homes == tuple(range(len(everyone)))
    assert order.about.hosts == len(everyone)
    replace(order, about=replace(order.about, hosts=1)).write(tmp_path)
    assert (ob.replay(tmp_path, task()).final - everyone[0]).abs().max() > 1e-6


def test_what_train_saves_simulate_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept"
    words = ["--workers", "2", "--steps", "12", "--delay", "1 rank 5ms", "--save", str(kept)]
    with quick_launches():
        assert main(["train", "eager", *words]) == 0
    live = capsys.readouterr()
    assert f"wrote {kept}" in live.err
    assert main(["simulate", "--replay", str(kept)]) == 0
    replayed = capsys.readouterr().out
    assert f"it ended with the weights of the run in {kept}" in replayed
    rows = [line for out in (live.out, replayed) for line in out.splitlines() if line.startswith("eager")]
    assert rows[0].split()[-2:] == rows[1].split()[-2:], "the loss and the accuracy"
