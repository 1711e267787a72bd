"""Decoupled DiLoCo, after Douillard et al. (2026)."""

from __future__ import annotations

import math
from typing import Literal

from offbeat.method import (
    Axes,
    Body,
    Channel,
    Got,
    Nodes,
    Open,
    Paper,
    Replica,
    Rules,
    Vec,
    Wait,
    Window,
    between,
    checked_window,
    method,
    numbers,
    one_of,
    pack,
    topology,
    whole,
)
from offbeat.strategies.common import fading, own_gradient
from offbeat.strategies.common import quorum as needed
from offbeat.strategies.desloc import MomentsBeside, both_every

PAPER = Paper(
    name="decoupled",
    full_name="Decoupled DiLoCo",
    title="Decoupled DiLoCo for Resilient Distributed Pre-training",
    authors=(
        "Douillard, Arthur and Rush, Keith and Donchev, Yani and Charles, Zachary and Fallen, Nova and Dubey, Ayush "
        "and Gog, Ionel and Dean, Josef and Woodworth, Blake and Garrett, Zachary and Keating, Nate and Bishop, Jenny "
        "and Prior, Henry and Yvinec, Edouard and Szlam, Arthur and Ranzato, Marc'Aurelio and Dean, Jeff"
    ),
    year=2026,
    venue="arXiv preprint arXiv:2604.21428",
    arxiv="2604.21428",
    axes=Axes(
        what="displacement of a fragment",
        when="every few steps, fragment by fragment",
        whom="everyone",
        wait="a quorum",
        merge="mean of lengths and of directions, outer optimiser",
    ),
    laws=(
        "quorum of all, one fragment, merge='direct': equals diloco",
        "one worker: merge='radial' equals merge='direct'",
        "where all displacements have one length, merge='radial' keeps it",
        "Θ and its momentum are the same bits on all workers that have seen the same rounds",
    ),
    confidence=(
        "read from summaries and one re-implementation, not from the paper; outer_lr 0.7 and momentum 0.9 are those of "
        "implementations; that the radial mean is taken tensor by tensor: medium"
    ),
)

NOTHING = 1e-6  # of directions of length 1: so short a mean is one of rounding errors


@method(PAPER)
def decoupled(
    every: int = 1,
    fragments: int = 24,
    quorum: str | int | float | Wait = "50%",
    merge: Literal["radial", "direct"] = "radial",
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    grace: Window = 0.0,
    per_node: int = 1,
    moments: int | None = None,
) -> Body:
    """Let an outer Nesterov step follow those learners who are ready, one fragment of the model after the other.

    Learners train alone. Every few steps they come to a round. It is about one fragment of the model, and starts when a
    quorum is there. Learner m brings its displacement since the fragment was last renewed, v_m = Θ − θ_m, with a weight
    w_m, the number of its steps since then. The absent bring nothing. From Δ, the mean of the displacements, Nesterov's
    momentum makes the new fragment: buf ← μ·buf + Δ, Θ ← Θ − η·(Δ + μ·buf), and θ_m ← Θ on all. A learner that comes
    late takes over what it has missed, in order. If it has learned something of the fragment whose round is open then,
    it joins that round with all of it.

    ``every``: a learner's steps from one round to the next. A fragment's turn comes every ``every · fragments`` steps.
    ``fragments``: how many; they are whole tensors, near-equal in bytes. A model of fewer tensors has one for each.
    ``quorum``: who must be there, as ``wait`` of ``eager``. ``grace``: how long others are waited for then.
    ``merge="radial"``: of each tensor, Δ has the mean length of the displacements, and the direction of the mean of
    their directions. So it does not shrink when those of many learners part. ``merge="direct"``: Δ is their weighted
    mean.
    ``outer_lr``: η. ``outer_momentum``: μ.
    ``per_node=8``: eight consecutive ranks are one learner, and average their gradients in step.
    ``moments=10``: after every tenth round of its own a learner hands in its inner optimiser's moments, such as Adam's,
    for a round of all, and takes their mean. The last values of the absent answer for them.

    *When it helps*: learners far apart, of unequal speed, some of which fail or stall: the others go on, and a slow one
    counts for what it has done.
    *When it hurts*: a quorum of one, where most of what is learned is thrown away. With one fragment a late learner's
    steps are lost altogether. Workers that are alike: a GPT did not get off its plateau (+33 % of all-reduce's loss).
    *Suggested settings*: AdamW inside, ``every · fragments`` of 24 to 100; half of the learners or more as the quorum.
    *Departures*: there is no server: all keep Θ and buf, and apply the same sums in the same order. The paper waits for
    one learner, and then for a window of the time that is left until the result is needed. Here it is a quorum, and
    with ``grace="auto"`` a window that follows from when the others usually come. Those in time wait for a round, where
    the paper lets two be under way. All batches count alike, and embeddings are merged as everything else.

    Example: ``ob.decoupled(every=4, fragments=8, quorum="75%")``
    """
    whole("every", every, 1)
    whole("fragments", fragments, 1)
    whole("per_node", per_node, 1)
    one_of("merge", merge, ("radial", "direct"))
    eta = between("outer_lr", outer_lr, 0, float("inf"))
    mu = fading(outer_momentum)
    how = Rules(needed(quorum), "anew", good_for=1, grace=checked_window(grace))
    radial, K = merge == "radial", both_every(moments)

    async def body(me: Replica) -> None:
        P, cut = Nodes(me.size, per_node).count, Fragments(me, fragments)
        F = len(cut.tensors)
        mem = me.recall(theta=me.x.clone(), buf=me.x.zeros_like(), steps=[0] * F, rounds=0)
        x, theta, buf = cut(me.x), cut(mem.theta), cut(mem.buf)

        def share(p: int) -> Vec:
            w, lengths = float(mem.steps[p]), []
            for k, (Theta, theta_m) in enumerate(zip(theta[p], x[p], strict=True)):
                v = Theta - theta_m
                length = norm(me, v)
                v.put_into(cut.sent[p][k], w / length if radial and length else w)
                lengths.append(w * length)
            return cut.message(lengths, w)

        def outer_step(results: list[Got]) -> None:
            for got in results:
                if got.version != mem.rounds:
                    raise ValueError(
                        f"decoupled: worker {me.rank} has seen {mem.rounds} rounds, but this is number {got.version}: "
                        f"it was saved when others had seen more or fewer; save all of them after optimizer.average()"
                    )
                p = got.version % F
                ways, lengths, W = cut.read(got.value, p)
                for k, way in enumerate(ways if W else ()):  # nobody's steps weigh anything in time alone
                    delta = way * (radius(norm(me, way), lengths[k], W) if radial else 1.0 / W)
                    buf[p][k].mul_(mu).add_(delta)
                    theta[p][k].add_(delta + buf[p][k] * mu, alpha=-eta)
                for Theta, theta_m in zip(theta[p], x[p], strict=True):
                    theta_m.copy_(Theta)
                mem.steps[p], mem.rounds = 0, got.version + 1

        rounds = Channel("decoupled", topology.everyone(P), how, outer_step, per_node=per_node, like=cut.like)
        moments_too = MomentsBeside(me, K, per_node)
        await Open(rounds, None)
        await moments_too.open()
        async for t in me.own_steps(per_node):
            me.step(await own_gradient(me, per_node))
            mem.steps = [c + 1 for c in mem.steps]
            is_in = (t + 1) % every != 0
            while not is_in and mem.steps[p := mem.rounds % F]:
                results = await rounds.mix(share(p), t)
                outer_step(results)  # of earlier rounds, if it was too late for this one
                is_in = any(me.rank in got.contributors for got in results)
                if is_in:
                    await moments_too.averaged(t)
        async for got in rounds.rest(lambda: None):
            outer_step([got])
        await moments_too.rest()

    return body


class Fragments:
    """A model's tensors in fragments, and the message that has room for any one of them.

    A message is the fragment's tensors side by side, then a number for each of them, then one for all: everything in
    which the outer step is linear. ``sent[p]``: where the tensors of fragment p lie in the one that is sent.
    """

    def __init__(self, me: Replica, count: int) -> None:
        self._me, x = me, me.x
        every = x.fragments(min(count, max(x.numel, 1))) if not x.parts else me.tensors(x)
        self._phantoms = [v.nbytes for v in every] if not x.parts else []
        self.tensors = packed(self._phantoms or me.tensor_bytes(), count)
        kinds = list(dict.fromkeys((p.dtype, p.device) for p in x.parts))
        self._places: list[list[tuple[int, int, int]]] = []  # of each tensor: which part of the message, from, to
        room = [0] * len(kinds)
        for fragment in self.tensors:
            ends, places = [0] * len(kinds), []
            for (tensor,) in (every[i].parts for i in fragment if x.parts):
                k = kinds.index((tensor.dtype, tensor.device))
                places.append((k, ends[k], ends[k] + tensor.numel()))
                ends[k] += tensor.numel()
            self._places.append(places)
            room = [max(a, b) for a, b in zip(room, ends, strict=True)]
        self._most = max(map(len, self.tensors))
        parts = [x.parts[0].new_zeros(n, dtype=d, device=v) for n, (d, v) in zip(room, kinds, strict=True)]
        self._vectors = Vec(parts, max(self._phantoms, default=0))
        self.like = pack(self._vectors, numbers([0.0] * (self._most + 1), x))
        self.sent = [self._cut(self._vectors, p) for p in range(len(self.tensors))]

    def __call__(self, v: Vec) -> list[list[Vec]]:
        """A vector like the weights: of each fragment its tensors."""
        every = v.fragments(len(self.tensors)) if not v.parts else self._me.tensors(v)
        return [[every[i] for i in fragment] for fragment in self.tensors]

    def message(self, lengths: list[float], w: float) -> Vec:
        """What lies in ``sent``, with a number for each tensor and one for all."""
        padded = [*lengths, *[0.0] * (self._most - len(lengths)), w]
        return pack(self._vectors, numbers(padded, self._me.x))

    def read(self, message: Vec, p: int) -> tuple[list[Vec], list[float], float]:
        """The tensors of fragment ``p`` in a message, the number of each, and that of all."""
        *lengths, w = Vec(message.parts[-1:], 0 if message.parts else 8 * (self._most + 1)).tolist()
        return self._cut(message, p), lengths, w

    def _cut(self, message: Vec, p: int) -> list[Vec]:
        if not self._me.x.parts:
            return [Vec((), self._phantoms[i]) for i in self.tensors[p]]
        return [Vec((message.parts[k][a:b],)) for k, a, b in self._places[p]]


def packed(nbytes: list[int], count: int) -> list[list[int]]:
    """Things of these sizes in ``count`` heaps, or one for each: the largest first, each to the lightest heap."""
    heaps: list[list[int]] = [[] for _ in range(min(count, max(len(nbytes), 1)))]
    weights = [0] * len(heaps)
    for i in sorted(range(len(nbytes)), key=lambda i: -nbytes[i]):
        lightest = min(range(len(heaps)), key=lambda h: (weights[h], len(heaps[h])))
        heaps[lightest].append(i)
        weights[lightest] += nbytes[i]
    return [sorted(heap) for heap in heaps]


def radius(resultant: float, length: float, W: float) -> float:
    """What makes Σ w φ(v), which is so long, as long as Σ w ‖v‖ / Σ w, φ(x) = x/‖x‖.

    Ways that cancel out but for rounding have none.
    """
    return length / W / resultant if resultant > NOTHING * W else 0.0


def norm(me: Replica, v: Vec) -> float:
    """‖v‖."""
    return math.sqrt(me.square_norm(v).item())
