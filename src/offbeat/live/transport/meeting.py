"""All ranks meet in the job's store, before there is anything else between them.

Nobody waits longer than it must: one that cannot come any more is named, and what the ranks have posted may be refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from torch._C._distributed_c10d import Store

from offbeat.live.transport.errors import OffbeatError

LOOK_S = 0.5  # how often it is asked whether those who are missing have ended
STAY_S = 2.0  # how long a rank that gives up stays for the others


class Missing(Protocol):
    def __call__(self, absent: list[int], waited_s: float, ended: bool) -> OffbeatError:
        """The error for ranks that have not come within so long, or have ended."""
        ...


def meet(
    store: Store,
    rank: int,
    size: int,
    own: str,
    patience_s: float,
    *,
    judge: Callable[[dict[int, str], int], None],
    missing: Missing,
    ended: Callable[[int], bool] = lambda rank: False,
) -> dict[int, str]:
    """Post ``own``, and wait until all have posted theirs: what each has posted.

    ``judge`` hears what has been posted so far, and how many there will be: it may raise. The store may leave with the
    first rank that raises; so that rank stays until those who have come have seen what it saw, or for two seconds.
    """
    begun_s = looked_s = time.monotonic()
    pause_s, posted = 0.001, {rank: own}
    store.set(f"here/{rank}", own)
    try:
        while True:
            come = [other for other in range(size) if other not in posted and store.check([f"here/{other}"])]
            posted.update({other: store.get(f"here/{other}").decode() for other in come})
            judge(posted, size)
            absent = [other for other in range(size) if other not in posted]
            if not absent:
                return posted
            now_s = time.monotonic()
            if now_s - begun_s > patience_s:
                raise missing(absent, patience_s, ended=False)
            if now_s - looked_s > LOOK_S:
                looked_s = now_s
                if gone := [other for other in absent if ended(other)]:
                    raise missing(gone, now_s - begun_s, ended=True)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
    except OffbeatError:
        with suppress(RuntimeError):  # the store has left: then they have
            store.set(f"seen/{rank}", "")
            end_s = time.monotonic() + STAY_S
            while not all(store.check([f"seen/{other}"]) for other in posted) and time.monotonic() < end_s:
                time.sleep(0.01)
        raise
