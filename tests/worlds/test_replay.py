"""Records of runs: followed to the same bits, and refused in a sentence where they are not what they should be."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import vector_to_parameters

import offbeat as ob
from offbeat.runs import order as orders
from offbeat.sim import Mismatch
from offbeat.tensors.stretches import CodedShare, Stretches, coded_mean
from offbeat.tensors.vector import Vec

STRATEGIES = (
    ob.eager(),
    ob.eager(grace=0),
    ob.eager("majority", sync_every=5),
    ob.eager(0.5, sync="bounded", staleness=3),
    ob.eager(late=1, grace=0),
    ob.eager(stale="drop", grace=0),
    ob.eager(apply="latest"),
    ob.eager(catch_up="every_step", grace=0),
    ob.eager(codec=ob.codec.qsgd(8)),
    ob.eager(per_node=2),
    ob.msync(0.5),
    ob.ringmaster(),
    ob.ringmaster(2),
    ob.ringmaster(per_node=2),
    ob.decoupled(),
    ob.decoupled(2, 2, 1, "direct"),
    ob.decoupled(2, 3, per_node=2),
    ob.self_clocked(),
    ob.self_clocked(1, None, 0.5, per_node=2),
    ob.self_clocked(2, codec=ob.codec.qsgd(8)),
    ob.wagma(),
    ob.wagma(merge="correct"),
    ob.wagma(late=1),
    ob.wagma(catch_up="every_step"),
    ob.wagma(per_node=2),
    ob.ad_psgd(),
    ob.nonblocking(4),
    ob.nonblocking("auto", stop="auto"),
    ob.nonblocking(4, over="server"),
    ob.nonblocking(4, over="ring"),
    ob.local_sgd(3),
    ob.adaptive(low=0.0, high=math.inf),
    ob.local_sgd(4, pace="speed"),
    ob.local_sgd(3, pace="speed", codec=ob.codec.qsgd(8)),
    ob.diloco(4, pace="speed"),
    ob.local_sgd("speed"),
    ob.diloco("speed", codec=ob.codec.int8()),
    ob.matcha(),
)


def task(hidden: int = 6) -> ob.Task:
    return ob.tasks.digits(batch=8, hidden=hidden, momentum=0.9, lr=0.05, dtype=torch.float64)


def odd_times(seed: int) -> Any:
    return lambda step, rank: 0.05 * random.Random(hash((seed, step, rank))).paretovariate(1.1)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize(("workers", "how"), [(2, {"steps": 6}), (4, {"samples": 24}), (6, {"steps": 4})])
def test_a_simulated_run_that_is_replayed_ends_with_the_same_bits(
    strategy: ob.Strategy, workers: int, how: dict[str, int], tmp_path: Path
) -> None:
    times = {"compute_s": odd_times(workers), "network": ob.Network(latency_s=0.01)}
    run = ob.simulate(strategy, task(), workers, **how, **times, record=tmp_path)  # type: ignore[arg-type]
    again = ob.replay(tmp_path, task(), compute_s=0.01)
    assert again.gradients == run.gradients
    assert torch.equal(again.weights, run.weights)
    assert torch.equal(again.final, run.final)


def recorded(folder: Path, strategy: ob.Strategy | None = None, workers: int = 3, steps: int = 6) -> ob.Run:
    times = {"compute_s": odd_times(1), "network": ob.Network(latency_s=0.01)}
    return ob.simulate(strategy or ob.eager(), task(), workers, steps, **times, record=folder)


def rewrite(folder: Path, rank: int, change: Any) -> None:
    """A record that is whole, but not true."""
    order = orders.read(folder)
    change(order.told[rank])
    order.write(folder)


def ends_otherwise(folder: Path, run: ob.Run) -> bool:
    """Whether a replay refuses, or ends with other weights."""
    try:
        return not torch.equal(ob.replay(folder, task()).weights, run.weights)
    except Mismatch:
        return True


@pytest.mark.parametrize("strategy", [ob.eager(), ob.wagma(merge="correct"), ob.ad_psgd()], ids=str)
def test_an_order_that_is_broken_in_one_place_is_noticed(strategy: ob.Strategy, tmp_path: Path) -> None:
    run, noticed, tried = recorded(tmp_path, strategy), 0, 0
    whole = orders.read(tmp_path)
    for rank in range(3):
        events = whole.told[rank].events
        for place in range(len(events) - 1):
            before, after = events[place][0], events[place + 1][0]
            decides = {before, after} in ({"offer", "snapshot"}, {"visited", "add"}, {"visited", "depart"})
            if not decides:  # such as two that do not touch each other: a result comes in while the worker computes
                continue
            events[place], events[place + 1] = events[place + 1], events[place]
            whole.write(tmp_path)
            tried += 1
            noticed += ends_otherwise(tmp_path, run)
            events[place], events[place + 1] = events[place + 1], events[place]
    assert tried >= 3
    # All of it where gradients are summed. Elsewhere a few change nothing: in a group of one, or after the last step.
    assert noticed == tried if strategy.name == "eager" else noticed > 0.7 * tried


def test_an_event_that_is_missing_is_noticed(tmp_path: Path) -> None:
    recorded(tmp_path)
    rewrite(tmp_path, 1, lambda told: told.events.pop(3))
    with pytest.raises(Mismatch, match="the record cannot be followed"):
        ob.replay(tmp_path, task())


def test_a_list_that_ends_too_early_is_noticed(tmp_path: Path) -> None:
    recorded(tmp_path)
    rewrite(tmp_path, 1, lambda told: told.events.__delitem__(slice(5, None)))
    with pytest.raises(Mismatch, match="cannot be followed to its end"):
        ob.replay(tmp_path, task())


def test_a_damaged_file_gets_a_sentence(tmp_path: Path) -> None:
    recorded(tmp_path)
    file = tmp_path / "order-1.json"
    text = file.read_text()
    file.write_text(text.replace("offer", "Offer", 1))
    with pytest.raises(ValueError, match=r"order-1\.json is damaged: it is not as it was written"):
        ob.replay(tmp_path, task())
    file.write_text(text[: len(text) // 2])
    with pytest.raises(ValueError, match=r"order-1\.json is damaged"):
        ob.replay(tmp_path, task())


def test_a_record_of_another_task_strategy_or_version_gets_a_sentence(tmp_path: Path) -> None:
    recorded(tmp_path)
    with pytest.raises(ValueError, match="the record is of another task"):
        ob.replay(tmp_path, task(hidden=7))
    with pytest.raises(ValueError, match="the record is of eager"):
        ob.replay(tmp_path, task(), ob.eager(late=1))
    for file in tmp_path.glob("*.json"):
        whole = json.loads(file.read_text())
        whole["run"]["offbeat"] = "0.0.1"
        whole["digest"] = orders._digest(orders._text(whole["run"]))
        file.write_text(json.dumps(whole))
    with pytest.raises(ValueError, match=r"was written by offbeat 0\.0\.1"):
        ob.replay(tmp_path, task())
    for seen in (1, 99):
        (tmp_path / "order-0.json").write_text(json.dumps({**whole, "format": seen}))
        with pytest.raises(ValueError, match=rf"has format {seen}, and .*; replay it with the version that wrote it"):
            ob.replay(tmp_path, task())


def test_a_folder_without_all_ranks_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no order of a run"):
        ob.replay(tmp_path, task())
    recorded(tmp_path)
    (tmp_path / "order-1.json").unlink()
    with pytest.raises(ValueError, match="rank 0, 2, but the run had 3 workers"):
        ob.replay(tmp_path, task())


def test_files_of_two_runs_in_one_folder_get_a_sentence(tmp_path: Path) -> None:
    recorded(tmp_path / "a")
    recorded(tmp_path / "b", ob.wagma())
    (tmp_path / "b" / "order-1.json").replace(tmp_path / "a" / "order-1.json")
    with pytest.raises(ValueError, match="is of another run"):
        ob.replay(tmp_path / "a", task())


def test_settings_that_have_no_name_are_given_by_hand(tmp_path: Path) -> None:
    class Quiet:
        name = "quiet"

        def satisfied(self, *_: object) -> bool:
            return True

    strategy = ob.eager(Quiet())
    run = recorded(tmp_path, strategy)
    with pytest.raises(ValueError, match="cannot be read back"):
        ob.replay(tmp_path, task())
    assert torch.equal(ob.replay(tmp_path, task(), strategy).final, run.final)


def test_a_run_that_a_replay_could_not_follow_says_so(tmp_path: Path) -> None:
    recorded(tmp_path)
    order = orders.read(tmp_path)
    about = orders.About(**{**vars(order.about), "cannot": "it was taken up from a state"})
    orders.Order(about, order.told, order.final).write(tmp_path)
    with pytest.raises(ValueError, match="this run cannot be replayed: it was taken up from a state"):
        ob.replay(tmp_path, task())
    with pytest.raises(ValueError, match="has no weights that a replay could end with"):
        ob.simulate(ob.eager(), None, 2, 2, record=tmp_path)


def at_homes(folder: Path, homes: tuple[int, ...]) -> Tensor:
    """The final weights of a record whose workers were on these hosts."""
    order = orders.read(folder)
    replace(order, about=replace(order.about, homes=homes, hosts=len(set(homes)) or 4)).write(folder)
    assert orders.read(folder).about.homes == homes
    return ob.replay(folder, task()).final


def sums_by_hand(
    given: list[Tensor], lost: dict[int, Vec], homes: tuple[int, ...], codec: ob.codec.Codec, number: int
) -> Tensor:
    """The mean of what four workers on two hosts give: coded once a host, for the first of its workers."""
    firsts = [homes.index(host) for host in (0, 1)]
    sums = [
        Vec([torch.stack([g for g, home in zip(given, homes, strict=True) if home == host]).sum(0)]) for host in (0, 1)
    ]
    cut = Stretches(sums[0], codec, 2)
    both = [CodedShare(sums[i], cut, i, (0, firsts[i], number), lost.get(firsts[i])) for i in (0, 1)]
    total = coded_mean(both, 4)
    assert total is not None
    return total.parts[0]


@pytest.mark.parametrize("homes", [(0, 0, 1, 1), (0, 1, 1, 0), (0, 1, 1, 1)])
@pytest.mark.parametrize("codec", [ob.codec.int8(), ob.codec.bf16(), ob.codec.qsgd(4)], ids=lambda one: one.name)
@pytest.mark.parametrize("averages", [False, True])
def test_what_hosts_of_several_workers_have_coded_is_coded_in_a_replay(
    homes: tuple[int, ...], codec: ob.codec.Codec, averages: bool, tmp_path: Path
) -> None:
    recorded(tmp_path, ob.local_sgd(1, codec=codec) if averages else ob.eager("everyone", codec=codec), 4, 3)
    work = task()
    models = [work.build(0) for _ in range(4)]
    inner = [work.optimizer(list(model.parameters())) for model in models]
    anchor = flat(models[0].parameters())
    lost = {rank: Vec([torch.zeros_like(anchor)]) for rank in range(4)} if averages else {}
    for t in range(3):
        for rank, model in enumerate(models):
            inner[rank].zero_grad()
            work.value(model, work.take(rank, t)).backward()
            if averages:
                inner[rank].step()
        if averages:
            moved = [flat(model.parameters()) - anchor for model in models]
            anchor = anchor + sums_by_hand(moved, lost, homes, codec, t)
            for model in models:
                vector_to_parameters(anchor.clone(), model.parameters())
            continue
        gradients = [flat(p.grad for p in model.parameters() if p.grad is not None) for model in models]
        mean = sums_by_hand(gradients, lost, homes, codec, t)
        for model, own in zip(models, inner, strict=True):
            for p, part in zip(model.parameters(), mean.split([p.numel() for p in model.parameters()]), strict=True):
                p.grad = part.view_as(p).clone()
            own.step()
    final = at_homes(tmp_path, homes)
    assert (final - flat(models[0].parameters())).abs().max() < 1e-12
    assert (final - at_homes(tmp_path, (0, 1, 2, 3))).abs().max() > 1e-6


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([one.detach().reshape(-1) for one in tensors])


@pytest.mark.parametrize(
    "strategy",
    [
        *(ob.eager(codec=ob.codec.int8()), ob.local_sgd(2, codec=ob.codec.int8()), ob.dpsgd(codec=ob.codec.int8())),
        *(ob.self_clocked(codec=ob.codec.int8()), ob.qsgd(), ob.sparseloco(2, codec=ob.codec.topk(8))),
    ],
    ids=lambda strategy: strategy.name,
)
def test_of_one_worker_a_host_a_replay_is_as_if_no_host_were_known(strategy: ob.Strategy, tmp_path: Path) -> None:
    run = recorded(tmp_path, strategy, 4)
    assert torch.equal(at_homes(tmp_path, ()), run.final)
    assert torch.equal(at_homes(tmp_path, (0, 1, 2, 3)), run.final)
    each_codes_its_own = strategy.name in ("dpsgd", "qsgd", "sparseloco")
    assert ((at_homes(tmp_path, (0, 0, 1, 1)) - run.final).abs().max() < 1e-12) == each_codes_its_own


def test_a_node_is_on_the_host_of_its_first_worker(tmp_path: Path) -> None:
    recorded(tmp_path, ob.eager("everyone", codec=ob.codec.int8(), per_node=2), 4)
    order, finals = orders.read(tmp_path), []
    for homes in ((0, 0, 1, 1), (0, 1, 2, 1), (0, 1, 0, 2)):
        replace(order, about=replace(order.about, homes=homes)).write(tmp_path)
        finals.append(ob.replay(tmp_path, task()).final)
    assert (finals[0] - finals[1]).abs().max() < 1e-12
    assert (finals[0] - finals[2]).abs().max() > 1e-6, "what leaves no host is not coded"


def test_a_worker_that_looks_ahead_goes_on_before_its_deposit_is_heard_of(tmp_path: Path) -> None:
    """Rank 0 went on from its first step, and of that the others heard when two rounds were over. Rank 1 came to the
    second of them only after a round of moments, which rank 0 had begun meanwhile."""
    strategy = ob.wagma(late=1, moments=1)
    recorded(tmp_path, strategy, workers=2, steps=2)
    weights = (
        "snapshot 0, result 0, snapshot 1, result 1, offer 0, upto 0, take 0, show 2, offer 1, upto 2, take 1, show 2, "
        "finish 2",
        "offer 0, upto 0, take 0, snapshot 0, result 0, show 1, offer 1, upto 1, take 1, snapshot 1, result 1, show 2, "
        "finish 1, next 1",
    )
    moments = (
        "offer 0, snapshot 0, result 0, take 0, snapshot 1, result 1, offer 1, take 1, finish 2",
        "snapshot 0, result 0, offer 0, take 0, offer 1, snapshot 1, result 1, take 1, finish 2",
    )
    for rank in range(2):

        def change(told: orders.Told, rank: int = rank) -> None:
            told.events, told.beside["moments"] = events(weights[rank]), events(moments[rank])

        rewrite(tmp_path, rank, change)
    again = ob.replay(tmp_path, task())
    assert again.gradients == (2, 2)
    assert [round.version for round in again.trace.rounds] == [0, 1]


def events(words: str) -> list[orders.Event]:
    return [(what, int(number)) for what, number in (word.rsplit(" ", 1) for word in words.split(", "))]
