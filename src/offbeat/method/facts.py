"""What runtimes may know of a method: facts of its settings, and numbers that it reports while it runs.

A runtime reads these, and never a method's memory, its name, or the words of its card.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from offbeat.runs.talking import Talking


@dataclass(frozen=True)
class Facts:
    """What is so throughout a run.

    ``meets``: "everyone" where all workers meet in every exchange, so that a step in which they send something is a
    round of all; "others" where some do, as along a graph, or where a channel keeps a record of its rounds.
    ``waits_where_it_begins``: an exchange is waited for in the step that begins it; otherwise training goes on.
    ``cuts_batches``: it asks for micro-batches (``Batch``), not for whole batches.
    ``late_gradients``: a third of the gradients and more are applied to weights that have moved on since, though nobody
    is slow.
    """

    meets: Literal["everyone", "others"] = "others"
    waits_where_it_begins: bool = False
    cuts_batches: bool = False
    late_gradients: bool = False


NOTHING_SAID = Facts()


@dataclass(frozen=True)
class Reported:
    """What a method has told last (``me.report``); a checkpoint holds it, all but ``talking``, which a run counts anew.

    ``period``: the steps from one average to the next, where it changes. ``micro_batches``: into how many a worker cuts
    its next batch. ``samples_used``: how many samples each worker has contributed, where batches are cut. ``talking``:
    how often this worker has talked in this run, where it decides by itself when to. ``coded``: the codec's name, where
    the method may choose one by itself.
    """

    period: int | None = None
    micro_batches: int = 1
    samples_used: tuple[int, ...] = ()
    talking: Talking | None = None
    coded: str = ""
