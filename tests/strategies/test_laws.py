"""Every method against a plain loop that is its paper's formula, and against the methods it must equal in a limit."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from itertools import pairwise

import pytest
import torch

import offbeat as ob
from offbeat import topology
from offbeat.topology import matchings

LR, MOMENTUM, DIMENSION = 0.05, 0.5, 7
PLAIN = ob.tasks.regression(dimension=DIMENSION, batch=4, noise=1.0, lr=LR)
HEAVY = ob.tasks.regression(dimension=DIMENSION, batch=4, noise=1.0, lr=LR, momentum=MOMENTUM)
AT_ONCE = ob.Network(latency_s=0.0, bandwidth_Bps=math.inf)


def final(strategy, workers=5, steps=13, task=PLAIN, **how):
    return ob.simulate(strategy, task, workers=workers, steps=steps, **how)


def start(workers, task=PLAIN):
    return final(ob.allreduce(), workers, 0, task).weights.clone()


def gradients(w, t, task=PLAIN):
    """Of least squares, by hand: (2/b) Xᵀ(Xw − y), one row a worker."""
    rows = []
    for rank, row in enumerate(w):
        x, y = task.batch(rank, t)
        rows.append(2 / len(x) * x.T @ (x @ row - y[:, 0]))
    return torch.stack(rows)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


class Local:
    """All workers' weights, each with SGD and momentum of its own."""

    def __init__(self, workers):
        self.w, self.v = start(workers), torch.zeros(workers, DIMENSION, dtype=torch.float64)

    def step(self, g, lr=LR):
        self.v = MOMENTUM * self.v + g
        self.w = self.w - lr * self.v

    def descend(self, t, lr=LR):
        self.step(gradients(self.w, t), lr)


def by_allreduce(workers, steps):
    its = Local(workers)
    for t in range(steps):
        its.step(gradients(its.w, t).mean(0).expand_as(its.w))
    return its.w


def by_local_sgd(H, workers, steps):
    its = Local(workers)
    for t in range(steps):
        its.descend(t)
        if (t + 1) % H == 0:
            its.w = its.w.mean(0).expand_as(its.w)
    return its.w


def by_dasgd(tau, d, xi, merge, workers, steps):
    its, snapshot = Local(workers), None
    for k in range(steps):
        its.descend(k)
        if (k + 1) % tau == 0:
            snapshot = its.w
        if (k + 1) % tau == d and snapshot is not None:
            A = snapshot.mean(0)
            its.w = its.w + A - snapshot if merge == "correct" else xi * its.w + (1 - xi) * A
    return its.w


def by_dpsgd(graph, order, workers, steps):
    its, W = Local(workers), topology.graph(graph, workers)
    for k in range(steps):
        M, g = torch.from_numpy(W(k).matrix()), gradients(its.w, k)
        if order == "cta":
            its.w = M @ its.w
        its.step(g)
        if order == "atc":
            its.w = M @ its.w
    return its.w


def push_matrix(graph, workers, k):
    """Columns sum to one: every worker cuts itself evenly."""
    links = torch.from_numpy(topology.graph(graph, workers)(k).matrix()) != 0
    links |= torch.eye(workers, dtype=torch.bool)
    return links.double() / links.double().sum(0)


def by_sgp(graph, workers, steps):
    its, omega = Local(workers), torch.ones(workers, 1, dtype=torch.float64)
    for k in range(steps):
        g = gradients(its.w / omega, k)
        its.step(g)
        A = push_matrix(graph, workers, k)
        its.w, omega = A @ its.w, A @ omega
    return its.w / omega


def by_matcha(graph, budget, workers, steps, seed=0):
    its, plan = Local(workers), matchings.plan(topology.edges(graph, workers), workers, budget)
    for k in range(steps):
        its.descend(k)
        its.w = torch.from_numpy(matchings.mixing(plan, matchings.active(plan, seed, k)).matrix()) @ its.w
    return its.w


def by_diloco(H, lr, mu, fragments, overlap, alpha, workers, steps):
    """torch's own Nesterov as the outer optimiser, one for each fragment."""
    its, n = Local(workers), H // fragments
    bounds = [DIMENSION * k // fragments for k in range(fragments + 1)]
    spans = [slice(a, b) for a, b in pairwise(bounds)]
    outer = [torch.nn.Parameter(its.w[0, s].clone()) for s in spans]
    optimizers = [torch.optim.SGD([p], lr=lr, momentum=mu, nesterov=mu > 0) for p in outer]
    sent, turns = None, 0
    for t in range(steps):
        its.descend(t)
        f = turns % fragments
        if (t + 1) % n == (n - overlap) % n:
            sent = outer[f].detach() - its.w[:, spans[f]]
        if (t + 1) % n == 0:
            outer[f].grad = sent.mean(0)
            optimizers[f].step()
            its.w = its.w.clone()
            its.w[:, spans[f]] = (1 - alpha) * outer[f].detach() + alpha * its.w[:, spans[f]]
            turns += 1
    return its.w


def by_noloco(H, beta, mu, gamma, workers, steps, seed=0):
    its = Local(workers)
    phi, m = its.w, torch.zeros_like(its.w)
    for t in range(steps):
        its.descend(t)
        if (t + 1) % H == 0:
            pair = torch.from_numpy(topology.pairs(workers, seed)((t + 1) // H - 1).matrix())
            m = mu * m + beta * pair @ (its.w - phi) + gamma * (pair @ phi - phi)
            phi = phi + m
            its.w = phi
    return its.w


UNEVEN = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0), (0, 2)]
REFERENCES = {
    "allreduce": (ob.allreduce(), by_allreduce),
    "local_sgd": (ob.local_sgd(3), partial(by_local_sgd, 3)),
    "dasgd": (ob.dasgd(4, 2, 0.25), partial(by_dasgd, 4, 2, 0.25, "paper")),
    "dasgd at once": (ob.dasgd(4, 0, 0.4), partial(by_dasgd, 4, 0, 0.4, "paper")),
    "dasgd correct": (ob.dasgd(4, 3, merge="correct"), partial(by_dasgd, 4, 3, None, "correct")),
    "dpsgd": (ob.dpsgd(), partial(by_dpsgd, "ring", "cta")),
    "dpsgd atc": (ob.dpsgd("exponential", "atc"), partial(by_dpsgd, "exponential", "atc")),
    "dpsgd edges": (ob.dpsgd(UNEVEN), partial(by_dpsgd, UNEVEN, "cta")),
    "sgp": (ob.sgp(), partial(by_sgp, "one_peer_exponential")),
    "sgp uneven": (ob.sgp(UNEVEN), partial(by_sgp, UNEVEN)),
    "matcha": (ob.matcha(), partial(by_matcha, "ring", 0.5)),
    "matcha whole": (ob.matcha("complete", 1.0), partial(by_matcha, "complete", 1.0)),
    "diloco": (ob.diloco(3), partial(by_diloco, 3, 0.7, 0.9, 1, 0, 0.0)),
    "diloco overlap": (ob.diloco(4, overlap=2), partial(by_diloco, 4, 0.7, 0.9, 1, 2, 0.0)),
    "streaming": (
        ob.diloco(6, 0.4, 0.8, fragments=2, overlap=2, merge=0.5),
        partial(by_diloco, 6, 0.4, 0.8, 2, 2, 0.5),
    ),
    "streaming thrice": (
        ob.diloco(6, 1.0, 0.0, fragments=3, overlap=1, merge=0.25),
        partial(by_diloco, 6, 1.0, 0.0, 3, 1, 0.25),
    ),
    "noloco": (ob.noloco(3), partial(by_noloco, 3, 0.7, 0.5, 0.7)),
    "noloco pull": (ob.noloco(2, 0.9, 0.3, pull=0.2), partial(by_noloco, 2, 0.9, 0.3, 0.2)),
}


@pytest.mark.parametrize("steps", [1, 12, 29])
@pytest.mark.parametrize("name", REFERENCES)
def test_the_weights_are_those_of_the_papers_formula(name, steps):
    strategy, reference = REFERENCES[name]
    close(final(strategy, 5, steps, HEAVY).weights, reference(5, steps))


@pytest.mark.parametrize("seed", [1, 2])
def test_random_methods_follow_their_own_seed(seed):
    """Matchings and pairs come from the seed; so do initial weights, hence a run that begins with another seed's."""
    model = dataclasses.replace(HEAVY, model=partial(_model_of_seed, 0))
    close(final(ob.matcha(), 5, 12, model, seed=seed).weights, by_matcha("ring", 0.5, 5, 12, seed))
    close(final(ob.noloco(2), 5, 12, model, seed=seed).weights, by_noloco(2, 0.7, 0.5, 0.7, 5, 12, seed))


def _model_of_seed(seed):
    return PLAIN.build(seed)


# ------------------------------------------------------------------------------------------------ the adaptive period


def by_adaptive(period, sampling_steps, low, high, cap, rates, workers, steps):
    """The weights, the steps after which all were averaged, and the periods that were in force."""
    its, p, cnt, samples, when, periods = Local(workers), period, 0, [], [], [period]
    for k in range(steps):
        its.descend(k, rates(k))
        cnt += 1
        if cnt == p:
            mean = its.w.mean(0)
            spread = (its.w**2).sum(1).mean() - (mean**2).sum()
            its.w, cnt = mean.expand_as(its.w), 0
            when.append(k + 1)
            if k < sampling_steps:
                samples.append(spread / rates(k))
            else:
                target = rates(k) * sum(samples) / len(samples)
                p += int(spread < low * target) - int(spread > high * target)
                p = min(max(p, 1), cap)
                periods.append(p)
    return its.w, when, periods


def _factor(k):
    return 1.0 if k < 80 else 1.6 if k < 110 else 0.3


@pytest.mark.parametrize("cap", [64, 5])
def test_the_adaptive_period_follows_the_papers_rule(cap):
    up_and_down = dataclasses.replace(HEAVY, scheduler=partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=_factor))
    strategy = ob.adaptive(period=3, sampling=0.25, low=0.7, high=1.3, cap=cap)
    run = final(strategy, 4, 160, up_and_down, compute_s=1.0, network=AT_ONCE)
    w, when, periods = by_adaptive(3, 40, 0.7, 1.3, cap, lambda k: LR * _factor(k), 4, 160)
    assert [round(r.end_s) for r in run.trace.rounds[::2]] == when
    close(run.weights, w)
    moves = {b - a for a, b in pairwise(periods)}
    assert moves == {-1, 0, 1}, "this run must try all three branches to prove anything"


def test_sampling_above_one_is_a_number_of_steps_and_needs_no_horizon():
    runs = [
        ob.simulate(ob.adaptive(3, sampling=sampling), PLAIN, 4, compute_s=1.0, network=AT_ONCE, **end)
        for sampling, end in ((20, {"seconds": 80}), (0.25, {"steps": 80}))
    ]
    assert torch.equal(runs[0].weights, runs[1].weights)


def test_a_share_of_a_run_of_unknown_length_is_twenty_five_periods():
    unknown, told = (
        ob.simulate(ob.adaptive(2, sampling=s), PLAIN, 4, seconds=80, compute_s=1.0, network=AT_ONCE)
        for s in (0.25, 50)
    )
    assert torch.equal(unknown.weights, told.weights)


# ------------------------------------------------------------------------------------- what equals what, in which limit

EQUALS_ALLREDUCE = {
    "local_sgd": ob.local_sgd(1),
    "adaptive": ob.adaptive(1, low=0.0, high=math.inf),
    "adaptive that may only shrink": ob.adaptive(1, low=0.0),
    "dasgd": ob.dasgd(1, 0, 0.0),
    "dasgd correct": ob.dasgd(1, 0, merge="correct"),
    "dpsgd": ob.dpsgd("complete", "atc"),
    "sgp": ob.sgp("everyone"),
    "diloco": ob.diloco(1, 1.0, 0.0),
}
EQUALS_LOCAL = {
    "dasgd": ob.dasgd(4, 0, 0.0),
    "dasgd correct": ob.dasgd(4, 0, merge="correct"),
    "adaptive": ob.adaptive(4, low=0.0, high=math.inf),
    "adaptive that only samples": ob.adaptive(4, sampling=1.0),
    "diloco": ob.diloco(4, 1.0, 0.0),
}
SERIAL = {
    **EQUALS_ALLREDUCE,
    **{f"{name}, period 4": made for name, made in EQUALS_LOCAL.items()},
    "adaptive, default": ob.adaptive(),
    "dasgd, late but correct": ob.dasgd(4, 2, merge="correct"),
    "dasgd, independent": ob.dasgd(4, 2, 1.0),
    "dpsgd": ob.dpsgd(),
    "sgp": ob.sgp(),
    "matcha": ob.matcha(),
    "noloco": ob.noloco(4, 1.0, 0.0),
}
TOGETHER = {  # with the number of steps after which all replicas must be equal, bit for bit
    "allreduce": (ob.allreduce(), 3),
    "qsgd": (ob.qsgd(4), 3),
    "local_sgd": (ob.local_sgd(4), 8),
    "local_sgd, coded": (ob.local_sgd(4, codec=ob.codec.qsgd(4)), 8),
    "adaptive": (ob.adaptive(4), 12),
    "dasgd": (ob.dasgd(4, 0, 0.0), 8),
    "diloco": (ob.diloco(4), 8),
    "diloco, coded": (ob.diloco(4, codec=ob.codec.int8()), 8),
}


@pytest.mark.parametrize("name", EQUALS_ALLREDUCE)
def test_in_this_limit_it_is_allreduce(name):
    close(final(EQUALS_ALLREDUCE[name]).final, final(ob.allreduce()).final)


def test_quantised_with_many_bits_it_is_nearly_allreduce():
    exact = final(ob.allreduce()).final
    errors = [(final(ob.qsgd(bits)).final - exact).norm().item() for bits in (4, 8, 16)]
    assert errors[0] > errors[1] > errors[2] > 0
    assert errors[2] < 1e-4


@pytest.mark.parametrize("name", EQUALS_LOCAL)
def test_in_this_limit_it_is_local_sgd(name):
    close(final(EQUALS_LOCAL[name], task=HEAVY).weights, final(ob.local_sgd(4), task=HEAVY).weights)


@pytest.mark.parametrize("name", ["dasgd", "adaptive", "adaptive that only samples"])
def test_in_this_limit_it_is_local_sgd_bit_for_bit(name):
    assert torch.equal(final(EQUALS_LOCAL[name]).weights, final(ob.local_sgd(4)).weights)


def test_two_workers_without_outer_momentum_make_noloco_local_sgd():
    close(final(ob.noloco(4, 1.0, 0.0), workers=2).weights, final(ob.local_sgd(4), workers=2).weights)


@pytest.mark.parametrize("name", SERIAL)
def test_one_worker_alone_is_serial_sgd(name):
    run = final(SERIAL[name], workers=1, task=HEAVY)
    close(run.final, by_local_sgd(99, 1, 13)[0])
    close(run.weights[0], run.final)


def test_one_worker_alone_is_not_serial_sgd_with_a_blend_or_an_outer_optimiser():
    serial = by_local_sgd(99, 1, 13)
    for strategy in (ob.dasgd(4, 1), ob.diloco(4), ob.noloco(4)):
        assert not torch.allclose(final(strategy, workers=1, task=HEAVY).weights, serial, atol=1e-4)


@pytest.mark.parametrize("name", TOGETHER)
def test_after_a_full_synchronisation_replicas_are_bitwise_equal(name):
    strategy, steps = TOGETHER[name]
    w = final(strategy, steps=steps, task=HEAVY).weights
    assert torch.equal(w, w[:1].expand_as(w))
    before = final(strategy, steps=steps - 1, task=HEAVY).weights
    assert name in ("allreduce", "qsgd") or not torch.equal(before, before[:1].expand_as(before))


# ------------------------------------------------------------------------------------------- what the mean does

LOSSY = (None, ob.codec.bf16(), ob.codec.qsgd(2))
KEEPS_THE_MEAN = {
    "local_sgd": ob.local_sgd(2),
    "adaptive": ob.adaptive(2),
    "dasgd": ob.dasgd(3, 1, merge="correct"),
    **{f"dpsgd {c and c.name}": ob.dpsgd(codec=c) for c in LOSSY},
    **{f"dpsgd atc {c and c.name}": ob.dpsgd("grid", "atc", codec=c) for c in LOSSY},
    **{f"sgp {c and c.name}": ob.sgp(codec=c) for c in LOSSY},
    **{f"matcha {c and c.name}": ob.matcha(codec=c) for c in LOSSY},
}


@pytest.mark.parametrize("name", KEEPS_THE_MEAN)
def test_the_mean_moves_by_the_mean_of_the_updates_alone(name):
    """Of plain SGD; whatever a codec loses is lost by nobody in particular."""
    runs = [final(KEEPS_THE_MEAN[name], 6, steps).weights for steps in range(8)]
    for t, (now, after) in enumerate(pairwise(runs)):
        close(after.mean(0), now.mean(0) - LR * gradients(now, t).mean(0))


@pytest.mark.parametrize(("c", "tolerance"), [(None, 1e-12), (ob.codec.qsgd(2), 1e-6)], ids=["exact", "qsgd2"])
def test_push_sum_conserves_numerators_and_weights_on_an_uneven_graph(c, tolerance):
    """The codec sends an ω as a float32; that is all by which its sums may be off."""
    omega = torch.ones(5, 1, dtype=torch.float64)
    runs = [final(ob.sgp(UNEVEN, codec=c), 5, steps).weights for steps in range(8)]
    for t, (now, after) in enumerate(pairwise(runs)):
        before = (omega * now - LR * gradients(now, t)).sum(0)
        omega = push_matrix(UNEVEN, 5, t) @ omega
        torch.testing.assert_close((omega * after).sum(0), before, rtol=tolerance, atol=tolerance)
    assert omega.sum() == pytest.approx(5)
    assert not torch.allclose(omega, torch.ones_like(omega)), "on an uneven graph ω must differ from 1"


@pytest.mark.parametrize(("tau", "d", "xi"), [(4, 1, 0.25), (5, 3, 0.6), (3, 2, 0.0)])
def test_the_blend_discards_a_known_share_and_shrinks_the_spread_by_xi(tau, d, xi):
    at_snapshot = final(ob.dasgd(tau, d, xi), steps=tau).weights
    alone = final(ob.dasgd(tau, d, 1.0), steps=tau + d).weights
    blended = final(ob.dasgd(tau, d, xi), steps=tau + d).weights
    close(blended.mean(0), at_snapshot.mean(0) + xi * (alone.mean(0) - at_snapshot.mean(0)))
    close(blended - blended.mean(0), xi * (alone - alone.mean(0)))


def test_the_pulls_of_a_pair_cancel():
    """Σφ takes no notice of the pull: after one outer round from different φ, whatever γ is."""
    sums = [final(ob.noloco(3, 0.7, 0.0, pull=pull), 6, 6).weights.sum(0) for pull in (0.0, 0.5)]
    close(*sums)


# ---------------------------------------------------------------------------------------------- how late, how flushed


@pytest.mark.parametrize("merge", ["paper", "correct"])
def test_a_delayed_average_is_applied_exactly_d_steps_later(merge):
    alone = ob.dasgd(5, 0, 1.0)
    for steps in range(8):
        assert torch.equal(final(ob.dasgd(5, 3, merge=merge), steps=steps).weights, final(alone, steps=steps).weights)
    assert not torch.equal(final(ob.dasgd(5, 3, merge=merge), steps=8).weights, final(alone, steps=8).weights)


def test_a_fragment_under_way_is_applied_exactly_tau_steps_later_and_nothing_else_is():
    streaming, alone = ob.diloco(8, fragments=2, overlap=2, merge=0.5), ob.dasgd(5, 0, 1.0)
    for steps in range(4):
        assert torch.equal(final(streaming, steps=steps).weights, final(alone, steps=steps).weights)
    first, second = (final(s, steps=4).weights.split([3, 4], dim=1) for s in (streaming, alone))
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_a_merge_of_one_leaves_the_local_weights_alone():
    assert torch.equal(final(ob.diloco(4, overlap=1, merge=1.0)).weights, final(ob.dasgd(5, 0, 1.0)).weights)


def test_an_average_under_way_is_blended_in_at_the_end():
    snapshot, run = final(ob.dasgd(4, 3), steps=4).weights, final(ob.dasgd(4, 3, 0.25), steps=6)
    close(run.final, (0.25 * run.weights + 0.75 * snapshot.mean(0)).mean(0))
    correct = final(ob.dasgd(4, 3, merge="correct"), steps=6)
    close(correct.final, correct.weights.mean(0))


def test_a_fragment_under_way_takes_its_outer_step_at_the_end():
    run = final(ob.diloco(4, 0.7, 0.9, overlap=2, merge=0.5), steps=3)
    sent = start(5) - final(ob.local_sgd(9), steps=2).weights
    theta = start(5)[0] - 0.7 * (1 + 0.9) * sent.mean(0)
    close(run.final, (0.5 * theta + 0.5 * run.weights).mean(0))
