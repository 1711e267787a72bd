"""Which worker is slow? From how long each worker's steps took, in words.

A worker is *late* in a step if its own time there (late or computing, not waiting) is above the median of all workers'
by more than a fifth of it. Medians, since a straggler must not move what it is measured against. It is slow *for good*
if it is late in at least half of the steps, or for a long stretch without a break; otherwise now and then.

Waiting is shared out among the late ones by how late they were. That says nothing of why anybody waited, so it is told
as waiting *for* a worker only

* where it is no trifle: a hundredth of all workers' time, or more;
* as far as the others can have waited for it: each no longer than it was late, or a fifth longer;
* for one that is slow for good, where the others waited longer than it did, by more than a fifth: what all wait for
  alike is the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_low

from offbeat.basics.units import format_seconds

MARGIN = 0.2
MIN_LATE_S = 0.001  # below a millisecond it is the operating system's business
CHRONIC_SHARE = 0.5
TRIFLE = 0.01  # of all workers' time
STRETCH_STEPS = 10


@dataclass(frozen=True)
class Late:
    """A worker that was late: in how many of how many steps, by how much usually and in all, its share of all waiting.

    ``first`` and ``last`` are the steps between which it was late, where it was so for a long stretch.
    """

    rank: int
    times: int
    steps: int
    by_s: float
    in_all_s: float
    waited_for_s: float
    chronic: bool
    first: int = 0
    last: int = 0


def late_workers(busy_s: Sequence[Sequence[float]], wait_s: Sequence[float]) -> list[Late]:
    """Those that were late, the most waited for first.

    ``busy_s[rank][step]`` is the worker's own time, ``wait_s[rank]`` what it waited in all. The waiting is shared out
    among the late ones by how late they were.
    """
    if len(busy_s) < 2:
        return []
    steps = min(len(own) for own in busy_s)
    late_by: list[dict[int, float]] = [{} for _ in busy_s]
    for step in range(steps):
        usual = median_low([own[step] for own in busy_s])
        for rank, own in enumerate(busy_s):
            if own[step] - usual > max(MARGIN * usual, MIN_LATE_S):
                late_by[rank][step] = own[step] - usual
    total_s = sum(sum(late.values()) for late in late_by)
    found = []
    for rank, late in enumerate(late_by):
        if late:
            first, last = _longest_stretch(sorted(late))
            stretch = last - first + 1
            found.append(
                Late(
                    rank=rank,
                    times=len(late),
                    steps=steps,
                    by_s=median(late.values()),
                    in_all_s=sum(late.values()),
                    waited_for_s=sum(wait_s) * sum(late.values()) / total_s,
                    chronic=len(late) >= CHRONIC_SHARE * steps or stretch >= max(STRETCH_STEPS, steps / 10),
                    first=first,
                    last=last,
                )
            )
    return sorted(found, key=lambda late: -late.waited_for_s)


def would_have_waited(busy_s: Sequence[Sequence[float]]) -> list[float]:
    """For each worker, how long the others together would have waited for it if all had taken every step in step."""
    waited_for = [0.0] * len(busy_s)
    for step in zip(*busy_s, strict=False):
        longest = max(step)
        waited_for[step.index(longest)] += sum(longest - own for own in step)
    return waited_for


def in_words(busy_s: Sequence[Sequence[float]], wait_s: Sequence[float]) -> list[str]:
    """The answer as sentences, the most important first."""
    workers = len(busy_s)
    if workers < 2:
        return ["One worker alone waits for nobody."]
    steps = min(len(own) for own in busy_s)
    if steps == 0:
        return ["No step was recorded on every worker, so nobody can be called slow."]
    total_s = sum(wait_s)
    all_s = total_s + sum(sum(own) for own in busy_s)
    share = total_s / all_s if total_s else 0.0
    sentences = [f"The {workers} workers waited {format_seconds(total_s)} in all, {share:.0%} of their time."]
    # What happens in a step or two of a long run is noise: loading, warming up.
    late = [one for one in late_workers(busy_s, wait_s) if one.times > max(1, steps // 50)]
    if not late:
        return [*sentences, "No worker was noticeably slower than the others."]
    chronic = [one for one in late if one.chronic]
    passing = [one for one in late if not one.chronic]
    for one in chronic:
        when = f"in {one.times} of {one.steps} steps"
        if one.times < CHRONIC_SHARE * one.steps:
            when += f", without a break from step {one.first} to {one.last}"
        sentences.append(
            f"Rank {one.rank} is chronically slow: late {when}, by {format_seconds(one.by_s)} each; "
            f"{_waited_for([one], wait_s, all_s)}."
        )
    if passing:
        least, most = min(one.times for one in passing), max(one.times for one in passing)
        times = f"{most}" if least == most else f"{least} to {most}"
        each = " each" if len(passing) > 1 else ""
        beginning = "No worker is chronically slow: " if not chronic else "Besides, "
        waited_for = _waited_for(passing, wait_s, all_s)
        sentences.append(
            f"{beginning}{_named(passing)} {'was' if len(passing) == 1 else 'were'} late now and then, in {times} of "
            f"{steps} steps{each}, by {format_seconds(median(one.by_s for one in passing))}; {waited_for}."
        )
    return sentences


def _waited_for(late: Sequence[Late], wait_s: Sequence[float], all_s: float) -> str:
    """What there is to say of the others' waiting for one that is slow for good, or for all that are now and then."""
    others, seconds = len(wait_s) - 1, sum(one.waited_for_s for one in late)
    longest_s = others * sum(one.in_all_s for one in late)
    them = "it" if len(late) == 1 else "them"
    if min(seconds, longest_s) < TRIFLE * all_s:
        return f"{'the others hardly' if seconds else 'nobody'} waited for {them}"
    if late[0].chronic:
        own_s = wait_s[late[0].rank]
        others_s = sum(wait_s) - own_s
        if others_s <= others * (1 + MARGIN) * own_s:
            return "the others waited hardly longer than it did, so for something else"
        seconds = min(seconds, others_s)
    if seconds > (1 + MARGIN) * longest_s:
        return f"the others waited at most {format_seconds(longest_s)} for {them}"
    return f"the others waited {format_seconds(seconds)} for {them}"


def _named(late: Sequence[Late]) -> str:
    ranks = [str(rank) for rank in sorted(one.rank for one in late)]
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"{len(ranks)} ranks"
    return f"ranks {', '.join(ranks[:-1])} and {ranks[-1]}"


def _longest_stretch(steps: Sequence[int]) -> tuple[int, int]:
    """The first and last of the longest row of successive steps."""
    best = start = previous = steps[0]
    end = best
    for step in steps[1:]:
        if step != previous + 1:
            start = step
        previous = step
        if step - start > end - best:
            best, end = start, step
    return best, end
