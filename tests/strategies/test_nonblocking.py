"""Non-blocking SGD in virtual time, and the pure functions that say when to stop and where to cut."""

from __future__ import annotations

import dataclasses
import itertools
import math
import socket
import time
import types
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import offbeat as ob
from offbeat.method.effects import Batch, Done, Next
from offbeat.rounds.micro import (
    MOST_PIECES,
    Leftover,
    Stop,
    adapted_micro,
    cuts,
    cuts_by_cost,
    learned_deadline_s,
    pieces,
    quota,
)

TASK = ob.tasks.regression(dimension=7, batch=8, noise=1.0, lr=0.05, momentum=0.5)
LATE = ob.delays.Exponential(0.05)
AT_ONCE = ob.Network(latency_s=0.0, bandwidth_Bps=math.inf)
FORMS = ["allreduce", "server", "ring", "matcha", "exponential"]


def weights(strategy, workers=5, steps=13, task=TASK, **how):
    return ob.simulate(strategy, task, workers=workers, steps=steps, **how).weights


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_a_short_batch_behind_leftovers_may_end_a_round_early():
    """Rank 1 is stopped after three of four samples; the one that is left, and a batch of one, do not make four."""
    rows = lambda rank, step: 1 if (rank, step) == (1, 1) else 4  # noqa: E731
    batch = lambda rank, step: tuple(part[: rows(rank, step)] for part in TASK.batch(rank, step))  # noqa: E731
    seconds = {(0, 0): 0.1, (0, 1): 0.14, (1, 0): 5.0}
    how = {"compute_s": lambda step, rank: seconds.get((step, rank), 0.1), "network": AT_ONCE}
    run = ob.simulate(ob.nonblocking(8), dataclasses.replace(TASK, batch=batch), 2, 2, **how)
    assert torch.isfinite(run.final).all()
    assert run.seconds < 5.0, "rank 1 is through, and rings"


# Where batches are cut.


@given(st.integers(1, 300), st.integers(1, 80))
def test_cuts_cover_all_rows_in_order_as_equally_as_possible(rows, micro):
    runs = cuts(rows, micro)
    assert [row for lo, hi in runs for row in range(lo, hi)] == list(range(rows))
    sizes = [hi - lo for lo, hi in runs]
    assert len(runs) == min(rows, micro)
    assert max(sizes) - min(sizes) <= 1


def test_nothing_is_cut_into_nothing():
    assert cuts(0, 8) == []
    assert cuts_by_cost([], 8) == []


COSTS = st.lists(st.floats(0, 1e6) | st.sampled_from([0.0, 1.0]), min_size=1, max_size=80)


@given(COSTS, st.integers(1, 40))
def test_cuts_by_cost_cover_all_rows_in_order_and_none_is_empty(costs, micro):
    runs = cuts_by_cost(costs, micro)
    assert [row for lo, hi in runs for row in range(lo, hi)] == list(range(len(costs)))
    assert len(runs) == min(len(costs), micro)
    assert all(lo < hi for lo, hi in runs)


@given(st.lists(st.floats(1, 10), min_size=32, max_size=64), st.integers(1, 6))
def test_cuts_by_cost_cost_about_the_same(costs, micro):
    spent = [sum(costs[lo:hi]) for lo, hi in cuts_by_cost(costs, micro)]
    assert max(spent) - sum(costs) / micro <= 1.01 * max(costs)


def test_a_dear_sample_gets_a_micro_batch_of_its_own():
    assert cuts_by_cost([100.0, 1, 1, 1, 1], 2) == [(0, 1), (1, 5)]
    assert cuts_by_cost([1.0, 1, 1, 1, 100], 2) == [(0, 4), (4, 5)]


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_a_cost_that_is_no_cost_is_refused(bad):
    with pytest.raises(ValueError, match="a sample cannot cost"):
        cuts_by_cost([1.0, bad], 2)


@given(st.integers(1, 60), st.lists(st.integers(1, 20), min_size=1, max_size=60), st.booleans())
def test_however_the_number_of_pieces_changes_a_batch_is_handed_out_once_and_in_order(rows, micros, by_cost):
    rest, seen = Leftover(rows, [float(k % 3 + 1) for k in range(rows)] if by_cost else None), []
    for micro in itertools.cycle(micros):
        left = rest.pieces(micro)
        lo, hi = rest.first(micro)
        seen += range(lo, hi)
        rest.lo = hi
        assert rest.pieces(micro) == left - 1
        if not rest.left:
            break
    assert seen == list(range(rows))


def test_a_batch_of_few_samples_makes_a_round_by_itself():
    assert quota([Leftover(3), Leftover(64)], 8) == 3
    assert quota([Leftover(64)], 8) == 8
    assert quota([], 8) == 0
    assert pieces([Leftover(3), Leftover(64)], 8) == 11


# When to stop.


@given(st.integers(0, 10), st.integers(0, 10), st.booleans(), st.floats(0, 2), st.integers(0, 4))
def test_a_worker_goes_on_until_at_least_and_never_beyond_its_batch(done, whole, rung, elapsed_s, at_least):
    over = Stop(1, 1.0, at_least).is_over(done, whole, rung, elapsed_s)
    if done >= whole:
        assert over
    elif done < at_least:
        assert not over
    else:
        assert over == (rung or elapsed_s >= 1.0)


def test_a_deadline_is_learned_only_from_times():
    assert learned_deadline_s([]) is None


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=50))
def test_at_least_half_of_the_workers_keep_a_learned_deadline(times):
    deadline = learned_deadline_s(times)
    assert 2 * sum(t <= deadline for t in times) >= len(times)


@given(st.lists(st.floats(0.9, 1.1), min_size=3, max_size=20), st.floats(2, 1000))
def test_a_minority_that_is_slow_does_not_move_a_learned_deadline_far(usual, slow):
    times = usual + [slow] * (len(usual) // 2 - (len(usual) % 2 == 0))
    assert learned_deadline_s(times) < 2


@given(st.floats(1.2, 40), st.sampled_from([8, 16, 32, 64]))
def test_a_slow_worker_cuts_finer_until_it_does_16_pieces_in_a_round_and_rests_there(factor, start):
    seen = [start]
    for _ in range(12):
        n = seen[-1]
        seen.append(adapted_micro(n, [(max(1, math.floor(n / factor)), n)] * 5))
    assert seen[-1] == seen[-2]
    if math.floor(seen[-1] / factor) <= 0.75 * seen[-1]:
        assert seen[-1] == MOST_PIECES or math.floor(seen[-1] / factor) >= 16


def test_a_worker_that_is_in_time_or_stalls_once_does_not_cut_finer():
    assert adapted_micro(8, [(8, 8)] * 5) == 8
    assert adapted_micro(8, [(7, 8)] * 5) == 8  # the bell rings in its last piece
    assert adapted_micro(8, [(8, 8), (8, 8), (1, 8), (8, 8), (8, 8)]) == 8
    assert adapted_micro(4, [(4, 4)] * 5) == 4
    assert adapted_micro(64, [(64, 64)] * 5) == 32
    assert adapted_micro(16, [(8, 8)] * 5) == 8  # a batch of 8 samples, all of them done


# Laws.


@pytest.mark.parametrize("over", ["allreduce", "server"])
@pytest.mark.parametrize("micro", [1, 3, 8, 20, "auto"])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_with_nobody_late_it_is_large_batch_allreduce(over, micro, workers):
    close(weights(ob.nonblocking(micro=micro, over=over), workers), weights(ob.allreduce(), workers))


@pytest.mark.parametrize("stop", ["first", "auto", 2, 0.01])
def test_one_micro_batch_is_allreduce_whatever_the_delays(stop):
    close(weights(ob.nonblocking(1, stop=stop), delays=LATE), weights(ob.allreduce()))
    close(weights(ob.nonblocking(1, "server", stop=stop), delays=LATE), weights(ob.allreduce()))


@pytest.mark.parametrize("graph", ["ring", "exponential", "torus", ((0, 1), (1, 2), (2, 3), (3, 4))])
def test_one_micro_batch_along_a_graph_is_dpsgd(graph):
    assert torch.equal(weights(ob.nonblocking(1, graph), delays=LATE), weights(ob.dpsgd(graph, order="atc")))


@pytest.mark.parametrize("budget", [0.3, 1.0])
def test_one_micro_batch_along_matchings_is_matcha(budget):
    ours = weights(ob.nonblocking(1, "matcha", budget=budget), delays=LATE, seed=4)
    assert torch.equal(ours, weights(ob.matcha(budget=budget), seed=4))


@pytest.mark.parametrize("over", ["ring", "matcha"])
def test_with_nobody_late_the_forms_along_a_graph_are_dpsgd_and_matcha(over):
    plain = ob.matcha() if over == "matcha" else ob.dpsgd(order="atc")
    close(weights(ob.nonblocking(4, over)), weights(plain))


@dataclass
class Witness:
    """What the workers of one run did: (weights at the beginning, weights at the end, done) of each worker's rounds."""

    rounds: dict[int, list[tuple[Tensor, Done | None, Batch]]] = field(default_factory=lambda: defaultdict(list))
    weights: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    memory: dict[int, object] = field(default_factory=dict)


def witnessed(strategy):
    seen = Witness()

    @types.coroutine
    def body(me):
        inner, answer, begun, effect = strategy.body(me), None, None, None
        try:
            while True:
                if isinstance(effect, Batch):
                    now = torch.cat(list(me.x.parts))
                    assert torch.equal(now, begun), "the weights changed within a round"
                    seen.rounds[me.rank].append((begun, answer, effect))
                effect = inner.send(answer)
                begun = torch.cat([p.clone() for p in me.x.parts]) if isinstance(effect, (Batch, Next)) else begun
                if isinstance(effect, Next):
                    seen.weights[me.rank].append(begun)
                answer = yield effect
        except StopIteration:
            seen.memory[me.rank] = me.memory
        finally:
            inner.close()

    return dataclasses.replace(strategy, body=body), seen


STOPS = [{"stop": "first"}, {"stop": 3}, {"stop": 0.08}, {"stop": "auto"}, {"at_least": 0}, {"at_least": 3}]


@pytest.mark.parametrize("over", FORMS)
@pytest.mark.parametrize("rule", STOPS, ids=str)
def test_the_invariants_of_a_round(over, rule):
    workers, steps, micro = 5, 12, 4
    strategy, seen = witnessed(ob.nonblocking(micro, over, **rule))
    ob.simulate(strategy, TASK, workers=workers, steps=steps, delays=LATE)
    late = 0
    for r in range(steps):
        done = [seen.rounds[rank][r][1] for rank in range(workers)]
        assert all(0 <= d.pieces <= micro for d in done)
        assert all(d.samples == 2 * d.pieces for d in done)
        assert min(d.pieces for d in done) >= min(rule.get("at_least", 1), micro)
        if rule.get("stop", "first") in ("first", 3):
            needed = rule["stop"] if rule.get("stop") == 3 else 1
            assert sum(d.pieces == micro for d in done) >= needed
        late += any(d.pieces < micro for d in done)
    assert late, "nobody was ever late: this test shows nothing"
    if over in ("allreduce", "server"):
        for states in zip(*seen.weights.values(), strict=True):
            assert all(torch.equal(states[0], other) for other in states)
    for rank in range(workers):  # what is told of each worker is what it did, on every worker
        told = seen.memory[rank].used
        assert told == [sum(d.samples for _, d, _ in seen.rounds[k]) for k in range(workers)]


def gradient_sum(w, rows):
    """Σ of least-squares gradients over (x, y) rows, by hand."""
    x, y = torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])
    return 2 * x.T @ (x @ w - y)


def rows_in_order(rank):
    for step in itertools.count():
        x, y = TASK.batch(rank, step)
        yield from zip(x, y[:, 0], strict=True)


@pytest.mark.parametrize("over", ["allreduce", "server"])
@pytest.mark.parametrize("weighting", ["samples", "workers"])
@pytest.mark.parametrize("scale_lr", [False, True])
def test_the_update_is_one_process_s_gradient_on_the_union_of_what_was_finished(over, weighting, scale_lr):
    workers, steps, micro = 4, 10, 4
    task = dataclasses.replace(TASK, optimizer=lambda p: torch.optim.SGD(p, lr=0.05))
    strategy, seen = witnessed(ob.nonblocking(micro, over, weighting=weighting, scale_lr=scale_lr))
    ob.simulate(strategy, task, workers=workers, steps=steps, delays=LATE)
    streams = [rows_in_order(rank) for rank in range(workers)]
    for r in range(steps):
        w = seen.weights[0][r]
        done = [seen.rounds[rank][r][1] for rank in range(workers)]
        taken = [list(itertools.islice(streams[k], d.samples)) for k, d in enumerate(done)]
        if weighting == "samples":
            union = [row for rows in taken for row in rows]
            g = gradient_sum(w, union) / len(union)
        else:
            g = torch.stack([gradient_sum(w, rows) / len(rows) for rows in taken]).mean(0)
        lr = 0.05 * (sum(d.pieces for d in done) / (workers * micro) if scale_lr else 1.0)
        close(seen.weights[0][r + 1], w - lr * g)


@pytest.mark.parametrize("over", ["ring", "matcha"])
def test_mixing_preserves_the_mean(over):
    task = dataclasses.replace(TASK, optimizer=lambda p: torch.optim.SGD(p, lr=0.05))
    strategy, seen = witnessed(ob.nonblocking(4, over))
    ob.simulate(strategy, task, workers=5, steps=10, delays=LATE)
    streams = [rows_in_order(k) for k in range(5)]
    for r in range(10):
        moved = []
        for k in range(5):
            w, done, _ = seen.rounds[k][r]
            rows = list(itertools.islice(streams[k], done.samples))
            moved.append(w - 0.05 * gradient_sum(w, rows) / len(rows))
        after = torch.stack([seen.weights[k][r + 1] for k in range(5)])
        close(after.mean(0), torch.stack(moved).mean(0))


# Counting: slot k of the model belongs to sample k; its gradient is −1 there.


class Slots(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(count, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def counting(workers: int, batch: int, batches: int) -> ob.Task:
    """Sample s of worker k has slot k · batch · batches + s."""
    each = batch * batches
    eye = torch.eye(workers * each, dtype=torch.float64)

    def take(rank: int, step: int) -> tuple[Tensor, Tensor]:
        start = rank * each + (step % batches) * batch
        return eye[start : start + batch], torch.zeros(batch)

    return ob.Task(
        model=lambda: Slots(workers * each),
        loss=lambda output, target: -output.mean(),
        batch=take,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    )


@settings(max_examples=60)
@given(
    st.integers(1, 5),
    st.integers(1, 7),
    st.sampled_from([1, 3, 4, 8, "auto"]),
    st.sampled_from(["first", 1, "auto", 0.07]),
    st.sampled_from([0, 1, 2]),
    st.integers(0, 10**6),
    st.sampled_from(["steps", "samples", "seconds"]),
)
def test_every_sample_is_used_once_and_in_order(workers, batch, micro, stop, at_least, seed, ending):
    strategy, seen = witnessed(ob.nonblocking(micro, stop=stop, at_least=at_least))
    end = {"steps": 9, "samples": 9 * workers - 1, "seconds": 0.9}[ending]
    task = counting(workers, batch, 40)
    run = ob.simulate(strategy, task, workers=workers, **{ending: end}, delays=ob.delays.Exponential(0.1), seed=seed)
    used = [sum(d.samples for _, d, _ in seen.rounds[k] if d is not None) for k in range(workers)]
    assert all(seen.memory[k].used == used for k in range(workers))
    slots = run.final.view(workers, -1)
    for k in range(workers):
        assert torch.equal(slots[k] > 0, torch.arange(slots.shape[1]) < used[k])
    total = sum(  # Σ over rounds of what was learnt: each round's mean has the weight 1, shared by its samples alike
        1.0 for r in range(len(seen.rounds[0])) if any(d is not None and d.samples for _, d, _ in column(seen, r))
    )
    assert slots.sum().item() == pytest.approx(total)
    assert len({len(rounds) for rounds in seen.rounds.values()}) == 1


def column(seen, r):
    return [seen.rounds[rank][r] for rank in sorted(seen.rounds)]


def test_an_epoch_uses_every_sample_exactly_once():
    workers, batch = 4, 6
    task = counting(workers, batch, 30)
    strategy, seen = witnessed(ob.nonblocking(3, scale_lr=True))
    run = ob.simulate(strategy, task, workers=workers, steps=40, compute_s=lambda t, k: 0.4 if k == 0 else 0.1)
    slots = run.final.view(workers, -1) * workers * batch  # each sample counts 1 / (P · batch): like zeros for the late
    used = seen.memory[0].used
    assert used[1] == 40 * batch > 30 * batch > used[0]
    twice = used[1] - 30 * batch
    assert torch.allclose(slots[1], 1.0 + (torch.arange(30 * batch) < twice).double())
    assert torch.allclose(slots[0], (torch.arange(30 * batch) < used[0]).double())


# Time.


def test_a_round_lasts_one_batch_of_the_quick_and_one_micro_batch_of_the_slow_at_most():
    run = ob.simulate(
        ob.nonblocking(8), None, workers=4, steps=20, network=AT_ONCE, parameters=1,
        compute_s=lambda t, k: 0.45 if k == 2 else 0.1,
    )  # fmt: skip
    assert run.seconds <= 20 * (0.1 + 0.45 / 8) + 1e-9
    assert run.seconds >= 20 * 0.1


def test_delays_come_before_the_first_micro_batch_of_their_round():
    run = ob.simulate(
        ob.nonblocking(4), None, workers=2, steps=3, network=AT_ONCE, spans=True,
        delays=lambda t, k: 0.5 if (t, k) == (1, 0) else 0.0,
    )  # fmt: skip
    mine = [s for s in run.trace.spans if (s.rank, s.step) == (0, 1) and s.doing in ("delay", "compute")]
    assert [s.doing for s in mine] == ["delay", "compute"]
    assert mine[1].start_s == pytest.approx(mine[0].end_s) == pytest.approx(mine[0].start_s + 0.5)
    # Late by five batches, it does one micro-batch; the three others come first in the next round.
    others = [s for s in run.trace.spans if (s.rank, s.step, s.doing) == (1, 1, "compute")]
    assert len(others) == 4


def test_without_at_least_a_worker_that_slept_through_the_round_does_nothing_in_it():
    strategy, seen = witnessed(ob.nonblocking(4, at_least=0))
    late = lambda t, k: 0.5 if (t, k) == (1, 0) else 0.0  # noqa: E731
    ob.simulate(strategy, TASK, workers=3, steps=3, network=AT_ONCE, delays=late)
    assert [d.pieces for _, d, _ in seen.rounds[0]] == [4, 0, 4]
    assert [d.pieces for _, d, _ in seen.rounds[1]] == [4, 4, 4]


@pytest.mark.parametrize("task", [TASK, None], ids=["task", "time alone"])
def test_micro_auto_settles_where_the_slow_worker_does_16_and_the_others_keep_to_8(task):
    strategy, seen = witnessed(ob.nonblocking("auto")) if task else (ob.nonblocking("auto"), None)
    wide = dataclasses.replace(TASK, batch=lambda k, t: (torch.ones(64, 7).double(), torch.ones(64, 1).double()))
    run = ob.simulate(
        strategy, wide if task else None, workers=4, steps=60, network=AT_ONCE, spans=True, parameters=1,
        compute_s=lambda t, k: 0.4 if k == 0 else 0.1,
    )  # fmt: skip
    last = [s for s in run.trace.spans if s.step == 59 and s.doing == "compute"]
    if seen is not None:
        assert [effect.micro for _, _, effect in column(seen, 59)] == [64, 8, 8, 8]
    assert 16 <= sum(s.rank == 0 for s in last) <= 17 or task is None
    assert run.seconds < 60 * (0.1 + 0.4 / 16)


def test_a_learned_deadline_cuts_off_the_slow_and_follows_when_all_become_slower():
    def compute_s(t, k):
        return (0.4 if k == 0 else 0.1) * (1 if t < 20 else 3)

    strategy, seen = witnessed(ob.nonblocking(8, stop="auto"))
    ob.simulate(strategy, TASK, workers=4, steps=80, network=AT_ONCE, compute_s=compute_s)
    done = {r: [d.pieces for _, d, _ in column(seen, r)] for r in range(80)}
    assert done[0] == [8, 8, 8, 8]
    assert done[10] == [3, 8, 8, 8]
    assert done[79][1:] == [8, 8, 8], "all are three times slower by now, and the deadline should know"


@pytest.mark.parametrize("over", FORMS)
@pytest.mark.parametrize("ending", [{"steps": 7}, {"samples": 31}, {"seconds": 1.0}], ids=str)
@pytest.mark.parametrize("workers", [1, 2, 5, 8])
def test_every_form_ends_whatever_ends_the_run(over, ending, workers):
    run = ob.simulate(ob.nonblocking(4, over), TASK, workers=workers, **ending, delays=ob.delays.Pareto(0.02, 1.2))
    assert torch.isfinite(run.final).all()
    if "steps" in ending:
        assert run.gradients == (7,) * workers
    if "samples" in ending:
        assert sum(run.gradients) == 31


@pytest.mark.parametrize("over", ["allreduce", "server", "ring", "matcha"])
def test_codecs_compose_and_still_learn(over):
    run = ob.simulate(ob.nonblocking(4, over, codec=ob.codec.qsgd(8)), TASK, workers=4, steps=60, delays=LATE)
    plain = ob.simulate(ob.nonblocking(4, over), TASK, workers=4, steps=60, delays=LATE)
    assert run.losses[-5:].mean() < 0.5 * run.losses[0]
    assert run.wire_bytes != plain.wire_bytes


def test_batch_norm_moves_on_with_every_micro_batch():
    def net():
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()

    def batch(rank, step):
        generator = torch.Generator().manual_seed(step)
        return torch.randn(8, 3, generator=generator).double(), torch.randn(8, 1, generator=generator).double()

    task = ob.Task(net, nn.functional.mse_loss, batch, lambda p: torch.optim.SGD(p, lr=0.1))
    run = ob.simulate(ob.nonblocking(4), task, workers=1, steps=3)
    model = task.build(0)
    optimizer = task.optimizer(list(model.parameters()))
    for step in range(3):
        optimizer.zero_grad()
        for x, y in zip(*(part.split(2) for part in batch(0, step)), strict=True):
            (nn.functional.mse_loss(model(x), y) / 4).backward()
        optimizer.step()
    assert int(run.model[1].num_batches_tracked) == 12
    close(run.model[1].running_mean, model[1].running_mean)
    close(run.final, nn.utils.parameters_to_vector(model.parameters()).detach())


# What is refused.


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"micro": 0}, "micro"),
        ({"micro": "many"}, "micro"),
        ({"stop": "last"}, "nobody can stop at 'last'"),
        ({"stop": 0}, "nobody can stop at 0"),
        ({"stop": -1.0}, "nobody can stop at -1.0"),
        ({"stop": True}, "nobody can stop at True"),
        ({"weighting": "none"}, "weighting"),
        ({"at_least": -1}, "at_least"),
        ({"over": "nowhere"}, "nowhere"),
        ({"over": "matcha", "budget": 0.0}, "never mixes"),
    ],
)
def test_settings_that_make_no_sense_are_refused_at_once(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        ob.nonblocking(**settings)


def test_a_bell_that_waits_for_more_workers_than_there_are_is_refused():
    with pytest.raises(ValueError, match="the bell waits for 5 workers, but there are 4"):
        weights(ob.nonblocking(stop=5), workers=4)


def test_a_bell_that_arrives_late_stops_neither_its_own_round_nor_the_next():
    strategy, seen = witnessed(ob.nonblocking(4))
    far = ob.Network(latency_s=0.5)  # the news of a round comes when everybody is through it
    ob.simulate(strategy, TASK, workers=2, steps=10, network=far, compute_s=lambda t, k: 0.1 + 0.1 * k)
    assert [d.pieces for rank in (0, 1) for _, d, _ in seen.rounds[rank]] == [4] * 20


def test_the_ear_keeps_the_latest_round_and_the_hand_rings_once_a_round():
    from offbeat.live.partial.bell import Bell
    from offbeat.live.transport.hub import Frame, Word, read_frame

    class Board:
        rank = 3

    here, there = socket.socketpair()
    bell = Bell(here, Board(), patience_s=5)
    try:
        for r in (5, 3):  # the bell of round 3 comes late
            there.sendall(Frame(Word.RUNG, 0, r).pack())
        for r in (5, 6, 6, 7):
            while bell.rung < 5:
                time.sleep(0.001)
            bell.ring(r, 2)
        there.sendall(Frame(Word.FLUSH, 0).pack())
        bell.close()
        assert bell.rung == 5
        assert [read_frame(there).a for _ in range(2)] == [6, 7]
        assert read_frame(there) is None
    finally:
        there.close()
