"""Where runs are made: one after the other, or several at a time, each in a process of its own.

Each outcome is kept as it comes, a line of JSON in a file, so that a run that was stopped can be gone on with.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Protocol, TypeVar

import torch

from offbeat.experiments.figures import Figures

A = TypeVar("A")
R = TypeVar("R")


class Runnable(Protocol):
    """What a bench runs; where there are several at a time, it can be pickled."""

    @property
    def title(self) -> str: ...

    def run(self) -> Figures: ...


class Bench:
    """``jobs``: how many runs at a time. ``kept``: the file of their outcomes; what is in it is not run again.

    A run is known there by ``about`` and its title: ``about`` says all else that it depends on. ``told`` hears a line
    after each.
    """

    def __init__(
        self,
        jobs: int = 1,
        kept: Path | None = None,
        about: str = "",
        told: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.jobs, self._kept, self._about, self._told = jobs, kept, about, told
        self._done = read(kept, about) if kept is not None else {}
        self._lock = Lock()
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Bench:
        if self.jobs > 1:
            # Not forked: a child of a process whose torch has begun threads may hang.
            self._pool = ProcessPoolExecutor(
                self.jobs,
                multiprocessing.get_context("spawn"),
                initializer=torch.set_num_threads,
                initargs=(max(1, (os.cpu_count() or 1) // self.jobs),),
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def run(self, wanted: Sequence[Runnable]) -> list[Figures]:
        """What each comes to, in this order; several at a time where there are several jobs."""
        missing = [job for job in wanted if job.title not in self._done]
        if self._pool is None:
            for job in missing:
                self._keep(job.title, job.run())
        else:
            running: dict[Future[Figures], str] = {self._pool.submit(_run, job): job.title for job in missing}
            for future in as_completed(running):
                self._keep(running[future], future.result())
        return [self._done[job.title] for job in wanted]

    def each(self, look: Callable[[A], R], cases: Sequence[A]) -> list[R]:
        """What ``look`` finds in each. It may ask for runs; where there are several jobs, all ask at the same time."""
        if self.jobs == 1:  # in no other thread, where Ctrl-C would not reach it
            return list(map(look, cases))
        with ThreadPoolExecutor(len(cases)) as threads:
            return list(threads.map(look, cases))

    def _keep(self, title: str, figures: Figures) -> None:
        with self._lock:
            self._done[title] = figures
            if self._kept is not None:
                self._kept.parent.mkdir(parents=True, exist_ok=True)
                with self._kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"about": self._about, "run": title, **asdict(figures)}) + "\n")
            self._told(f"{title}: {figures}")


def _run(job: Runnable) -> Figures:
    return job.run()


def read(file: Path, about: str) -> dict[str, Figures]:
    """The outcomes of runs that were made for the same; a last line that was cut off when it was written is removed."""
    found: dict[str, Figures] = {}
    if not file.exists():
        return found
    text = file.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole, encoding="utf-8")
    for row in map(json.loads, whole.splitlines()):
        if row.pop("about") == about:
            title = row.pop("run")
            for curve in ("curve", "reached"):
                row[curve] = tuple((at_s, value) for at_s, value in row[curve])
            found[title] = Figures(**row)
    return found
