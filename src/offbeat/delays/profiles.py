"""Stragglers as they were measured elsewhere: step times of other people's clusters, by name.

Each is a shape, relative to a median step of 1; ``profile(name, seconds)`` gives it a median in seconds. What a source
publishes is rarely a distribution of step times: what was computed from it, and what had to be assumed, stands beside
each (``PROFILES[name].assumed``).
"""

from __future__ import annotations

import difflib
import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist, fmean

from offbeat.basics import draw
from offbeat.delays.distribution import Distribution, seconds_ok, words

Shape = Callable[[int, int, int, int, float], float]  # of seed, step, rank, workers and the median's seconds

_STANDARD = NormalDist()
_BYTEDANCE = "ByteDance-Seed/StragglerAnalysis, the traces of arXiv:2505.05713 (OSDI '25)"
_GREYHOUND = "Greyhound (USENIX ATC '25)"


@dataclass(frozen=True)
class Measurement:
    """One of ``PROFILES``: who was slow there, who measured it, and what was assumed to make step times of it.

    ``median_s``: the median step where the source gives seconds, else 1.
    """

    who: str
    source: str
    assumed: str
    shape: Shape
    median_s: float = 1.0


@dataclass(frozen=True)
class Profile(Distribution):
    """Measured stragglers, with a median step of ``seconds``."""

    name: str
    seconds: float

    def __post_init__(self) -> None:
        known(self.name)
        seconds_ok(self.seconds)

    @property
    def about(self) -> Measurement:
        """Who was slow, the source, and what was assumed."""
        return PROFILES[self.name]

    def draw(self, seed: int, step: int, rank: int, workers: int) -> float:
        return self.seconds * self.about.shape(seed, step, rank, workers, self.seconds)

    def __str__(self) -> str:
        return f"{self.name} with median {words(self.seconds)}"


def profile(name: str, seconds: float | None = None) -> Profile:
    """The stragglers that were measured under this name (``PROFILES``), with a median step of so many seconds.

    Without ``seconds``, the median is the source's own where it gives one, and 1 s elsewhere.
    """
    return Profile(name, known(name).median_s if seconds is None else seconds)


def known(name: str) -> Measurement:
    """What is known under this name; a ValueError lists the names that there are."""
    if not isinstance(name, str) or name not in PROFILES:
        close = difflib.get_close_matches(str(name), PROFILES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"no profile is called {name!r}; {hint}there are {', '.join(PROFILES)}")
    return PROFILES[name]


def _quantiles(table: dict[float, float]) -> Shape:
    """Every rank and step by itself, from the quantiles (in percent), straight between two of them."""
    percents, values = zip(*sorted(table.items()), strict=True)

    def shape(seed: int, step: int, rank: int, workers: int, seconds: float) -> float:
        p = 100 * draw.uniform(seed, 9, step, rank)
        k = bisect_right(percents, p)
        return float(
            values[k - 1] + (values[k] - values[k - 1]) * (p - percents[k - 1]) / (percents[k] - percents[k - 1])
        )

    return shape


def _spread(cov: float, *key: int) -> float:
    """A log-normal number with median 1 and this standard deviation over its mean."""
    u = draw.uniform(*key) or 2.0**-54
    return math.exp(math.sqrt(math.log1p(cov * cov)) * _STANDARD.inv_cdf(u))


def _steady(cov: float) -> Shape:
    return lambda seed, step, rank, workers, seconds: _spread(cov, seed, 10, step, rank)


def _bad_worker(factor: float, one_in: int, between: float, within: float) -> Shape:
    """One worker in so many is slow for good, at least one; the others differ from each other, and a little in time."""

    def shape(seed: int, step: int, rank: int, workers: int, seconds: float) -> float:
        slow = workers > 1 and rank in draw.sample(workers, max(1, workers // one_in), seed, 11)
        own = factor if slow else _spread(between, seed, 12, rank)
        return own * _spread(within, seed, 10, step, rank)

    return shape


def _halves(ratio: float, cov: float) -> Shape:
    """The second half of the ranks is slower than the first by this ratio; the middle between them is 1."""

    def shape(seed: int, step: int, rank: int, workers: int, seconds: float) -> float:
        slow = 2 * rank >= workers
        return math.sqrt(ratio if slow else 1 / ratio) * _spread(cov, seed, 10, step, rank)

    return shape


def _speeds(*relative: float) -> Shape:
    return lambda seed, step, rank, workers, seconds: relative[rank % len(relative)]


def _episodes(factors: tuple[float, ...], job: float, mean_s: float) -> Shape:
    """Stretches that are slow by one of the factors, so that a job in step takes ``job`` times as long."""
    return _stretches((job - 1) / (fmean(factors) - 1), mean_s, lambda seed: factors)


def _worse_in_some_jobs(worst: float, power: float, job: float, mean_s: float) -> Shape:
    """Stretches that are slow by one factor in each job (seed), 1 + (worst − 1)·u^power, u even between 0 and 1.

    Stretches are as frequent in one job as in another, so that jobs in step take ``job`` times as long on average.
    """
    share = (job - 1) * (1 + power) / (worst - 1)
    return _stretches(share, mean_s, lambda seed: (1 + (worst - 1) * draw.uniform(seed, 16) ** power,))


def _stretches(share: float, mean_s: float, factors_of: Callable[[int], tuple[float, ...]]) -> Shape:
    """One drawn rank is slow for stretches of time, this share of its steps, by one of the factors of its seed.

    Stretches are made of windows of equal length, each of which is slow or not by a draw of its own: so a step's time
    needs no history, and a stretch has a geometric number of windows, ``mean_s`` on average.
    """

    def shape(seed: int, step: int, rank: int, workers: int, seconds: float) -> float:
        if rank != draw.below(workers, seed, 13):
            return 1.0
        factors = factors_of(seed)
        window = step // max(1, round(mean_s * (1 - share) / (fmean(factors) * max(seconds, 1e-9))))
        if draw.uniform(seed, 14, window) >= share:
            return 1.0
        return factors[draw.below(len(factors), seed, 15, window)]

    return shape


_DILOCO_S = (0.58, 0.75, 1.51, 3.33)
_DILOCO_MEDIAN_S = (0.75 + 1.51) / 2

PROFILES: dict[str, Measurement] = {
    "bytedance-se": Measurement(
        "everybody now and then: sequences of uneven length, 8 micro-batches a step",
        f"{_BYTEDANCE}, trace-SE: 1,376 steps of replicas",
        "quantiles computed from the trace, the last but one from the slowest of 32 (p95 1.51 medians); steps and "
        "ranks independent (measured: lag-1 correlation .007, between-rank share .012)",
        _quantiles(
            {
                0: 0.80, 1: 0.85, 5: 0.87, 10: 0.88, 20: 0.91, 30: 0.93, 40: 0.96, 50: 1, 60: 1.03, 70: 1.05, 80: 1.10,
                90: 1.17, 95: 1.23, 99: 1.35, 99.84: 1.51, 100: 1.74,
            }
        ),
    ),
    "bytedance-se-micro": Measurement(
        "everybody now and then, one micro-batch a step: one in ten takes twice as long",
        f"{_BYTEDANCE}, trace-SE: 11,008 micro-batches",
        "quantiles computed from the trace, and that 11% take over 1.5, 8% over 2 medians; all independent",
        _quantiles(
            {
                0: 0.40, 1: 0.91, 5: 0.92, 10: 0.93, 20: 0.94, 30: 0.95, 40: 0.97, 50: 1, 60: 1.04, 70: 1.08, 80: 1.16,
                89: 1.5, 90: 1.62, 92: 2.0, 95: 2.18, 99: 2.23, 100: 2.26,
            }
        ),
    ),
    "bytedance-ar": Measurement(
        "one bad worker in 16, 2.5 times slower for good",
        f"{_BYTEDANCE}, trace-AR",
        "a rank is one worker (the replica of several that the bad one sits in is 1.34 times slower), drawn from the "
        "seed; the others' CoV of .02 is mostly between ranks, as a between-rank share of .999 wants it",
        _bad_worker(2.5, 16, 0.017, 0.01),
    ),
    "bytedance-st": Measurement(
        "nobody: what is uneven there is the pipeline, not the replicas",
        f"{_BYTEDANCE}, trace-ST",
        "the CoV of .003 between data-parallel replicas, as independent noise",
        _steady(0.003),
    ),
    "greyhound-compute": Measurement(
        "one rank, 21% less speed for ten minutes at a time: heat, or others on the same cores",
        f"{_GREYHOUND}: 6 of 392 jobs on one node",
        "one of the 6 jobs, not one of the 392; how often it strikes from the job's +11.8%; others are even; stretches "
        "last minutes, so a run wants thousands of steps, or a long median",
        _episodes((1 / 0.79,), 1.118, 600.0),
    ),
    "greyhound-network": Measurement(
        "one rank behind a congested link, for 24 minutes at a time",
        f"{_GREYHOUND}: 42 of 107 jobs on four nodes",
        "rates of .57, then .41 or .31 iterations a second, put as the rank's own time, as if every step sent "
        "something: unfair to methods that send rarely; how often it strikes from the job's +15.5%",
        _episodes((0.57 / 0.41, 0.57 / 0.31), 1.155, 1440.0),
        1 / 0.57,
    ),
    "greyhound-large": Measurement(
        "one rank of a large job, for 72 minutes at a time: up to 5 times slower, 3.4 on average, alike within a job",
        f"{_GREYHOUND}: 16 of 27 jobs on 512 to 1,024 GPUs",
        "measured: the 72 minutes, jobs' +34.6% on average and more than +50% in a fifth, and the worst speed, 80% "
        "less; chosen to go with them: 1 + 4·u^.68 times slower, u even between 0 and 1, drawn for each job (seed), in "
        "14.5% of its steps; put as the rank's own time, whatever the cause; a second cause on top (90% less) is left "
        "out; stretches last more than an hour, so a run wants many steps, or a long median",
        _worse_in_some_jobs(5.0, 0.68, 1.346, 4320.0),
    ),
    "tpu-mix": Measurement(
        "two generations of hardware: half of the ranks 18% slower than the others, and some noise",
        "the mixed fleet of Decoupled DiLoCo (arXiv:2604.21428), as told by others",
        "the second half of the ranks is the slow one; 10% of noise as a log-normal CoV of .1",
        _halves(1.18, 0.1),
    ),
    "async-diloco": Measurement(
        "four kinds of workers: .58, .75, 1.51 and 3.33 s a step, for good",
        "google-deepmind/asyncdiloco, its simulated workers",
        "more than four ranks take the four speeds in turn; no noise",
        _speeds(*(s / _DILOCO_MEDIAN_S for s in _DILOCO_S)),
        _DILOCO_MEDIAN_S,
    ),
}  # fmt: skip
