"""Any method with any of its settings, for searches: what each setting may be, for so many workers.

Every setting in the signature of every registered method has a line here, or ``a_method`` says which one has none.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import reject
from hypothesis import strategies as st

import offbeat as ob

CODECS = [
    ob.codec.bf16(), ob.codec.fp16(), ob.codec.int8(bucket=5), ob.codec.qsgd(2, 3), ob.codec.qsgd(8),
    ob.codec.qsgd(4, 7, "l2"),
]  # fmt: skip
SPARSE = [ob.codec.topk(2, 5), ob.codec.topk(), ob.codec.topk(5, 5, floats=True)]
GRAPHS = ["ring", "complete", "everyone", "exponential", "one_peer_exponential", "grid", "torus", "hypercube"]

Settings = dict[str, Any]
Choice = Callable[[int, Settings], Sequence[Any]]  # of the workers, and of what was drawn before it


def one(*values: Any) -> Choice:
    return lambda workers, drawn: values


def whole(least: int, most: int) -> Choice:
    return lambda workers, drawn: range(least, most + 1)


def codecs(workers: int, drawn: Settings) -> Sequence[Any]:
    return [None, None, None, *CODECS]


def per_node(workers: int, drawn: Settings) -> Sequence[int]:
    """Nodes that make up all workers, several rather than one, and enough of them for a group."""
    group = drawn.get("group")
    least = group if isinstance(group, int) else 1
    fitting = [n for n in range(1, workers + 1) if workers % n == 0 and workers // n >= least]
    return [n for n in fitting if 1 < n < workers] * 2 + fitting


def a_tree(workers: int, seed: int) -> tuple[tuple[int, int], ...]:
    """Edges that connect all."""
    draw = random.Random(seed)
    return tuple((draw.randrange(rank), rank) for rank in range(1, workers))


def graphs(workers: int, drawn: Settings) -> Sequence[Any]:
    return [*GRAPHS, *(a_tree(workers, seed) for seed in range(len(GRAPHS)))]


WAITS = one("first", "majority", "everyone", 1, 2, 3, 0.25, 0.5, 0.9)
STALENESS: Choice = lambda workers, drawn: [None] if drawn["sync"] == "barrier" else [None, 1, 2, 5]  # noqa: E731

GRACE = one(0.0, 0.0, 0.05, 0.7, "auto", "auto")


PACE = one(None, "equal", "speed")
MOMENTS = one(None, None, 1, 3, "1/1", "2/1")
TOGETHER = one(None, None, 1, 3, "2/2")

CHOICES: dict[str, dict[str, Choice]] = {
    "allreduce": {},
    "qsgd": {"bits": whole(2, 16), "bucket": one(1, 3, 512)},
    "local_sgd": {"period": one(1, 2, 3, 4, 5, "speed"), "codec": codecs, "pace": PACE, "moments": MOMENTS},
    "adaptive": {
        "period": whole(1, 4), "sampling": one(0.25, 1.0, 3.0), "low": one(0.0, 0.7), "high": one(0.9, 1.3, 9.0),
        "cap": whole(4, 8), "codec": codecs, "moments": MOMENTS,
    },
    "dasgd": {
        "period": whole(1, 5), "delay": lambda workers, drawn: range(drawn["period"]),
        "xi": one(0.0, 0.25, 1.0), "merge": one("paper", "correct"), "codec": codecs, "moments": MOMENTS,
    },
    "eager": {
        "wait": WAITS, "sync_every": one(None, 1, 2, 5, 33), "stale": one("carry", "carry", "drop", "fade"),
        "apply": one("queue", "queue", "latest"), "catch_up": one("current", "every_step"),
        "sync": one("barrier", "bounded"), "staleness": STALENESS, "late": one(0, 1), "grace": GRACE,
        "per_node": per_node, "codec": codecs,
    },
    "msync": {"m": one("75%", "2 workers", 1, 2, 3, 0.25, 0.5, 0.9, 1.0), "codec": codecs},
    "ringmaster": {"threshold": one("workers", None, 1, 2, 5), "per_node": per_node, "codec": codecs},
    "wagma": {
        "group": lambda workers, drawn: [None] * workers + [*range(1, workers + 1)], "tau": one(None, 1, 3, 10),
        "wait": WAITS, "merge": one("paper", "correct"), "catch_up": one("current", "every_step"),
        "sync": one("barrier", "bounded"), "staleness": STALENESS, "late": one(0, 1), "grace": GRACE,
        "per_node": per_node, "codec": codecs, "moments": TOGETHER,
    },
    "self_clocked": {
        "period": whole(1, 3),
        "group": lambda workers, drawn: [None, "auto"] * (workers // 2 + 1) + [*range(1, workers + 1)],
        "wait": lambda workers, drawn: ["auto"] * 9 + [*WAITS(workers, drawn)], "late": one(0, 1),
        "pause": one(0.0, 0.5, 1.0, "auto"),
        "draw": lambda workers, drawn: range(4) if drawn["group"] == 2 else [0, "auto"],
        "per_node": per_node, "codec": codecs, "squares": one(1, 4, "auto"), "moments": TOGETHER,
    },
    "nonblocking": {
        "micro": one("auto", 1, 2, 3, 8),
        "over": lambda workers, drawn: ["allreduce", "server", "matcha"] * 5 + [*graphs(workers, drawn)],
        "stop": lambda workers, drawn: ["first", "auto", 0.04, 0.3] * 2 + [*range(1, workers + 1)],
        "weighting": one("samples", "workers"), "at_least": whole(0, 3), "scale_lr": one(False, True),
        "budget": one(0.2, 0.5, 1.0), "codec": codecs,
    },
    "dpsgd": {"graph": graphs, "order": one("cta", "atc"), "codec": codecs, "moments": MOMENTS},
    "ad_psgd": {"graph": graphs, "moments": TOGETHER},
    "sgp": {"graph": graphs, "codec": codecs, "moments": MOMENTS},
    "matcha": {"graph": graphs, "budget": one(0.2, 0.5, 1.0), "codec": codecs, "moments": MOMENTS},
    "diloco": {
        "period": one(1, 2, 4, 6, "speed"), "outer_lr": one(0.0, 0.7, 1.0), "outer_momentum": one(0.0, 0.9),
        "fragments": one(1, 1, 2), "overlap": whole(0, 2), "merge": one(0.0, 0.5, 1.0),
        "codec": codecs, "pace": PACE, "moments": MOMENTS,
    },
    "decoupled": {
        "every": whole(1, 4), "fragments": whole(1, 3), "quorum": WAITS, "merge": one("radial", "direct"),
        "outer_lr": one(0.0, 0.7, 1.0), "outer_momentum": one(0.0, 0.9), "grace": GRACE, "per_node": per_node,
        "moments": TOGETHER,
    },
    "sparseloco": {
        "period": whole(1, 5), "decay": one(0.0, 0.5, 0.95, 1.0), "outer_lr": one(0.0, 0.65, 1.0),
        "codec": lambda workers, drawn: [None, *CODECS, *SPARSE], "moments": MOMENTS,
    },
    "noloco": {
        "period": whole(1, 4), "outer_lr": one(0.0, 0.7, 1.0), "outer_momentum": one(0.0, 0.5), "pull": one(None, 0.3),
        "moments": MOMENTS,
    },
}  # fmt: skip


def settings_of(name: str) -> list[str]:
    return list(inspect.signature(ob.STRATEGIES[name].make).parameters)


def drawn(name: str, workers: int, pick: Callable[[Sequence[Any]], Any]) -> ob.Strategy:
    """Method ``name``, its settings picked one after the other. ``ValueError``: it refuses the combination."""
    assert name in CHOICES, f"nobody has said what {name}'s settings may be; add a line to CHOICES"
    picked: Settings = {}
    for setting in settings_of(name):
        assert setting in CHOICES[name], f"nobody has said what {name}'s {setting} may be; add it to CHOICES"
        picked[setting] = pick(CHOICES[name][setting](workers, picked))
    return ob.strategy(name, **picked)


@st.composite
def a_method(draw: st.DrawFn, name: str, workers: int) -> ob.Strategy:
    """Any settings of method ``name``; combinations that it refuses are drawn anew."""
    try:
        return drawn(name, workers, lambda options: draw(st.sampled_from(options)))
    except ValueError:
        reject()


# Every method, and of some its ways that differ most.
EVERY_KIND = {
    str(strategy): strategy
    for strategy in (
        ob.allreduce(),
        ob.qsgd(),
        ob.local_sgd(period=2),
        ob.adaptive(period=2),
        ob.dasgd(period=2, delay=1),
        ob.dpsgd(),
        ob.sgp(),
        ob.matcha(),
        ob.diloco(period=20),
        ob.noloco(period=2),
        ob.sparseloco(period=2),
        ob.nonblocking(),
        ob.ad_psgd(),
        ob.eager(),
        ob.eager(late=1),
        ob.eager(wait="majority"),
        ob.eager(wait="everyone"),
        ob.eager(sync_every=1),
        ob.eager(sync_every=2),
        ob.eager(per_node=3),
        ob.wagma(),
        ob.wagma(merge="correct"),
        ob.wagma(tau=1),
        ob.wagma(tau=2),
        ob.wagma(wait="everyone"),
        ob.wagma(moments=1),
        ob.ad_psgd(moments=1),
        ob.msync(),
        ob.ringmaster(),
        ob.decoupled(),
        ob.self_clocked(),
    )
}
