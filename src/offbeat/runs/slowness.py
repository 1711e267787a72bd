"""Which worker is slow? From how long each worker's steps took, in a sentence.

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
from dataclasses import dataclass, replace
from statistics import median, median_low

from offbeat.basics.units import format_ranks, format_seconds

MARGIN = 0.2
MIN_LATE_S = 0.001  # below a millisecond it is the operating system's business
CHRONIC_SHARE = 0.5
TRIFLE = 0.01  # of all workers' time
LITTLE = 0.1  # of it: more is worth a word, whoever it was for
STRETCH_STEPS = 10
IDLE, IDLE_S = 0.05, 0.1  # an end of this share of the time, and so long, is worth a sentence


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


def cost_of_shares(workers: Sequence[tuple[int, float]]) -> list[str]:
    """What it cost that each worker had its own share of the data, in a sentence; none where it cost little.

    ``workers``: how many steps each took, and after how many seconds it had no more data.
    """
    ended_s = [seconds for _, seconds in workers]
    if len(workers) < 2 or min(ended_s) <= 0 or max(ended_s) - min(ended_s) < max(IDLE * max(ended_s), IDLE_S):
        return []
    shared_s = sum(steps for steps, _ in workers) / sum(steps / seconds for steps, seconds in workers)
    return [
        f"The job ended {format_seconds(max(ended_s) - min(ended_s))} after rank {ended_s.index(min(ended_s))} had run "
        f"out of data, {format_seconds(max(ended_s))} after it began; with ob.share it would have taken about "
        f"{format_seconds(shared_s)}."
    ]


def would_have_waited(busy_s: Sequence[Sequence[float]]) -> list[float]:
    """For each worker, how long the others together would have waited for it if all had taken every step in step."""
    waited_for = [0.0] * len(busy_s)
    for step in zip(*busy_s, strict=False):
        longest = max(step)
        waited_for[step.index(longest)] += sum(longest - own for own in step)
    return waited_for


@dataclass(frozen=True)
class Judged:
    """``verdict``: a sentence. ``late``: those that were late, with what the others have waited for each as far as
    that can be said; ``steps``: how many were compared."""

    verdict: str
    late: tuple[Late, ...] = ()
    steps: int = 0


def judge(busy_s: Sequence[Sequence[float]], wait_s: Sequence[float], *, begin: int = 0) -> Judged:
    """Who is slow, and whether anybody waited for it. ``begin`` is the number of the first of these steps."""
    workers = len(busy_s)
    if workers < 2:
        return Judged("One worker alone waits for nobody.")
    steps = min(len(own) for own in busy_s)
    if steps == 0:
        return Judged("No step was recorded on every worker, so nobody can be called slow.")
    total_s = sum(wait_s)
    all_s = total_s + sum(sum(own) for own in busy_s)
    late = late_workers(busy_s, wait_s)
    # What happens in a step or two of a long run is noise: loading, warming up.
    often = [one for one in late if one.times > max(1, steps // 50)]
    passing = [one for one in often if not one.chronic]
    for_passing_s, of_passing = _waited_for(passing, wait_s, all_s) if passing else (0.0, "")
    shared_s = sum(one.waited_for_s for one in passing)
    said = {one.rank: _waited_for([one], wait_s, all_s) for one in often if one.chronic}
    for_it_s = {rank: seconds for rank, (seconds, _) in said.items()}
    if shared_s:
        for_it_s |= {one.rank: for_passing_s * one.waited_for_s / shared_s for one in passing}
    late = sorted((replace(one, waited_for_s=for_it_s.get(one.rank, 0.0)) for one in late), key=_worst)
    chronic = [one for one in late if one.rank in said]
    if not often:
        verdict = f"Nobody was noticeably slower than the others, {_waiting(total_s, all_s)}."
    elif not chronic:
        least, most = min(one.times for one in passing), max(one.times for one in passing)
        times = f"{most}" if least == most else f"{least} to {most}"
        each = " each" if len(passing) > 1 else ""
        verdict = (
            f"Nobody is chronically slow: {_named(passing)} {'was' if len(passing) == 1 else 'were'} late now and then "
            f"(in {times} of {steps} steps{each}, by {format_seconds(median(one.by_s for one in passing))}), "
            f"{of_passing}."
        )
    else:
        first = chronic[0]
        when = f"in {first.times} of {steps} steps"
        if first.times < CHRONIC_SHARE * steps:
            when += f", without a break from step {begin + first.first} to {begin + first.last}"
        who = f"{_named(chronic)} {'is' if len(chronic) == 1 else 'are'} chronically slow"
        who += f", rank {first.rank} most of all" if len(chronic) > 1 else ""
        besides = (
            f"; {_named(passing)} {'was' if len(passing) == 1 else 'were'} late now and then" if for_passing_s else ""
        )
        verdict = (
            f"{who[0].upper()}{who[1:]} (late {when}, by {format_seconds(first.by_s)} each), "
            f"{said[first.rank][1]}{besides}."
        )
    return Judged(verdict, tuple(late), steps)


def _worst(one: Late) -> tuple[float, float]:
    return -one.waited_for_s, -one.in_all_s


def _waiting(total_s: float, all_s: float) -> str:
    if not total_s:
        return "and nobody waited"
    share = total_s / all_s
    return f"{'and' if share < LITTLE else 'but'} waiting took {_percent(share)} of the time"


def _waited_for(late: Sequence[Late], wait_s: Sequence[float], all_s: float) -> tuple[float, str]:
    """The others' waiting for one that is slow for good, or for all that are now and then: seconds, and in words."""
    others, seconds, total_s = len(wait_s) - 1, sum(one.waited_for_s for one in late), sum(wait_s)
    longest_s = others * sum(one.in_all_s for one in late)
    them = "it" if len(late) == 1 else "them"
    share = total_s / all_s if total_s else 0.0
    if not seconds:
        return 0.0, f"but nobody waited for {them}"
    if min(seconds, longest_s) < TRIFLE * all_s:
        though = f", though waiting took {_percent(share)} of the time" if share >= LITTLE else ""
        return 0.0, f"but the others hardly waited for {them}{though}"
    if late[0].chronic:
        own_s = wait_s[late[0].rank]
        others_s = total_s - own_s
        if others_s <= others * (1 + MARGIN) * own_s:
            if share < LITTLE:
                return 0.0, "but the others did not wait for it"
            as_long = "longer than" if own_s > (1 + MARGIN) * others_s / others else "about as long as"
            waiting = f"the waiting, {_percent(share)} of the time,"
            return 0.0, f"but it waited {as_long} the others: {waiting} was for something else"
        seconds = min(seconds, others_s)
    if seconds > (1 + MARGIN) * longest_s:
        most, in_all = format_seconds(longest_s), format_seconds(total_s)
        return longest_s, f"and the others waited at most {most} for {them}, of {in_all} in all"
    share_of_it = _percent(seconds / all_s)
    return seconds, f"and the others waited {format_seconds(seconds)} for {them}, {share_of_it} of the time"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 else "less than 1%"


def _named(late: Sequence[Late]) -> str:
    return format_ranks([one.rank for one in late])


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
