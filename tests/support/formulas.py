"""The papers' formulas as plain loops over all workers' weights, and runs to hold against them."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import offbeat as ob
from offbeat import topology
from offbeat.topology import matchings

LR, MOMENTUM, DIMENSION = 0.05, 0.5, 7
PLAIN = ob.tasks.regression(dimension=DIMENSION, batch=4, noise=1.0, lr=LR)
HEAVY = ob.tasks.regression(dimension=DIMENSION, batch=4, noise=1.0, lr=LR, momentum=MOMENTUM)
AT_ONCE = ob.Network(latency_s=0.0, bandwidth_Bps=math.inf)


def final(strategy: ob.Strategy, workers: int = 5, steps: int = 13, task: ob.Task = PLAIN, **how: Any) -> ob.Run:
    return ob.simulate(strategy, task, workers=workers, steps=steps, **how)


def start(workers: int, task: ob.Task = PLAIN) -> Tensor:
    return final(ob.allreduce(), workers, 0, task).weights.clone()


def gradients(w: Tensor, t: int, task: ob.Task = PLAIN) -> Tensor:
    """Of least squares, by hand: (2/b) Xᵀ(Xw − y), one row a worker."""
    rows = []
    for rank, row in enumerate(w):
        x, y = task.batch(rank, t)
        rows.append(2 / len(x) * x.T @ (x @ row - y[:, 0]))
    return torch.stack(rows)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


class Local:
    """All workers' weights, each with SGD and momentum of its own."""

    def __init__(self, workers: int) -> None:
        self.w, self.v = start(workers), torch.zeros(workers, DIMENSION, dtype=torch.float64)

    def step(self, g: Tensor, lr: float = LR) -> None:
        self.v = MOMENTUM * self.v + g
        self.w = self.w - lr * self.v

    def descend(self, t: int, lr: float = LR) -> None:
        self.step(gradients(self.w, t), lr)


def by_allreduce(workers: int, steps: int) -> Tensor:
    its = Local(workers)
    for t in range(steps):
        its.step(gradients(its.w, t).mean(0).expand_as(its.w))
    return its.w


def by_local_sgd(H: int, workers: int, steps: int) -> Tensor:
    its = Local(workers)
    for t in range(steps):
        its.descend(t)
        if (t + 1) % H == 0:
            its.w = its.w.mean(0).expand_as(its.w)
    return its.w


def by_dasgd(tau: int, d: int, xi: float, merge: str, workers: int, steps: int) -> Tensor:
    its, snapshot = Local(workers), None
    for k in range(steps):
        its.descend(k)
        if (k + 1) % tau == 0:
            snapshot = its.w
        if (k + 1) % tau == d and snapshot is not None:
            A = snapshot.mean(0)
            its.w = its.w + A - snapshot if merge == "correct" else xi * its.w + (1 - xi) * A
    return its.w


def by_dpsgd(graph: Any, order: str, workers: int, steps: int) -> Tensor:
    its, W = Local(workers), topology.graph(graph, workers)
    for k in range(steps):
        M, g = torch.from_numpy(W(k).matrix()), gradients(its.w, k)
        if order == "cta":
            its.w = M @ its.w
        its.step(g)
        if order == "atc":
            its.w = M @ its.w
    return its.w


def push_matrix(graph: Any, workers: int, k: int) -> Tensor:
    """Columns sum to one: every worker cuts itself evenly."""
    links = torch.from_numpy(topology.graph(graph, workers)(k).matrix()) != 0
    links |= torch.eye(workers, dtype=torch.bool)
    return links.double() / links.double().sum(0)


def by_sgp(graph: Any, workers: int, steps: int) -> Tensor:
    its, omega = Local(workers), torch.ones(workers, 1, dtype=torch.float64)
    for k in range(steps):
        g = gradients(its.w / omega, k)
        its.step(g)
        A = push_matrix(graph, workers, k)
        its.w, omega = A @ its.w, A @ omega
    return its.w / omega


def by_matcha(graph: Any, budget: Any, workers: int, steps: int, seed: int = 0) -> Tensor:
    its, plan = Local(workers), matchings.plan(topology.edges(graph, workers), workers, budget)
    for k in range(steps):
        its.descend(k)
        its.w = torch.from_numpy(matchings.mixing(plan, matchings.active(plan, seed, k)).matrix()) @ its.w
    return its.w


def by_diloco(
    H: int, lr: float, mu: float, fragments: int, overlap: int, alpha: float, workers: int, steps: int
) -> Tensor:
    """torch's own Nesterov as the outer optimiser, one for each fragment."""
    its, n = Local(workers), H // fragments
    bounds = [DIMENSION * k // fragments for k in range(fragments + 1)]
    spans = [slice(a, b) for a, b in pairwise(bounds)]
    outer = [torch.nn.Parameter(its.w[0, s].clone()) for s in spans]
    optimizers = [torch.optim.SGD([p], lr=lr, momentum=mu, nesterov=mu > 0) for p in outer]
    sent: Tensor | None = None
    turns = 0
    for t in range(steps):
        its.descend(t)
        f = turns % fragments
        if (t + 1) % n == (n - overlap) % n:
            sent = outer[f].detach() - its.w[:, spans[f]]
        if (t + 1) % n == 0:
            assert sent is not None
            outer[f].grad = sent.mean(0)
            optimizers[f].step()
            its.w = its.w.clone()
            its.w[:, spans[f]] = (1 - alpha) * outer[f].detach() + alpha * its.w[:, spans[f]]
            turns += 1
    return its.w


def by_sparseloco(H: int, beta: float, alpha: float, Q: Any, workers: int, steps: int) -> Tensor:
    its = Local(workers)
    theta, e = its.w[0], torch.zeros_like(its.w)
    for t in range(steps):
        its.descend(t)
        if (t + 1) % H == 0:
            e = beta * e + (theta - its.w)
            s = torch.stack([Q.decode(Q.encode(row, (0,)), row) for row in e]) if Q else e
            e = e - s
            theta = theta - alpha * s.mean(0)
            its.w = theta.expand_as(its.w)
    return its.w


def by_noloco(H: int, beta: float, mu: float, gamma: float, workers: int, steps: int, seed: int = 0) -> Tensor:
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
