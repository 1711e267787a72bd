"""Non-blocking SGD in virtual time, and what the workers of one run did."""

from __future__ import annotations

import dataclasses
import math
import types
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import offbeat as ob
from offbeat.method.effects import Batch, Next
from offbeat.method.replica import Replica

TASK = ob.tasks.regression(dimension=7, batch=8, noise=1.0, lr=0.05, momentum=0.5)
LATE = ob.delays.Exponential(0.05)
AT_ONCE = ob.Network(latency_s=0.0, bandwidth_Bps=math.inf)
FORMS = ["allreduce", "server", "ring", "matcha", "exponential"]


def weights(strategy: ob.Strategy, workers: int = 5, steps: int = 13, task: ob.Task = TASK, **how: Any) -> Tensor:
    return ob.simulate(strategy, task, workers=workers, steps=steps, **how).weights


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


Round = tuple[Tensor, Any, Batch]  # the weights it begins with, what was done (or None), what was asked for


@dataclass
class Witness:
    """What the workers of one run did."""

    rounds: dict[int, list[Round]] = field(default_factory=lambda: defaultdict(list))  # of each worker
    weights: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    used: dict[int, list[int]] = field(default_factory=dict)


def witnessed(strategy: ob.Strategy) -> tuple[ob.Strategy, Witness]:
    seen = Witness()

    @types.coroutine
    def body(me: Replica) -> Generator[Any, Any, None]:
        inner, begun = strategy.body(me), torch.empty(0)
        answer: Any = None
        effect: Any = None
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
            seen.used[me.rank] = list(me.reported.samples_used)
        finally:
            inner.close()

    return dataclasses.replace(strategy, body=body), seen


def column(seen: Witness, r: int) -> list[Round]:
    return [seen.rounds[rank][r] for rank in sorted(seen.rounds)]
