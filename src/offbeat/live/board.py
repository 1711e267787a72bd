"""The notice board of a job: small facts that workers post for one another, beside the tensors.

It lives in the store that ``torch.distributed`` was started with. No thread reads it: a worker looks at it while it
waits, so a run in which nobody waits costs nothing.

Uneven data. A worker that has run out posts ``done``; it may take step s idly only when it knows that some worker
takes it with data. That worker posts ``reached`` when it has waited for a moment at that step (see ``Waiter``), or at
once from then on, since it then knows that somebody is done. When all are done, the last step is known to all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from offbeat.live.errors import ConfigMismatch, PeerFailed
from offbeat.live.vitals import has_ended, this_process

START_S = 300.0  # how long a worker waits for the others to attach
ROLL_CALL_S = 5.0  # how long a worker that is alive may take to say so: it does not while it computes
GRACE_S = 3.0  # how long operations under way may still end well after the store is gone

T = TypeVar("T")


class Board:
    """Facts of one attached optimiser, under a prefix of its own."""

    def __init__(self, store: Store, prefix: str, rank: int, size: int) -> None:
        self._store = PrefixStore(prefix, store)
        self.rank, self.size = rank, size
        self.someone_is_done = False
        self._reached = -1
        self._gone_since_s: float | None = None

    # The beginning.

    def agree(self, facts: dict[str, str]) -> None:
        """Every worker posts what it is; one that differs from rank 0 is refused on all of them."""
        self._store.set(f"reached/{self.rank}", "-1")
        self._store.set(f"done/{self.rank}", "-1")
        self._store.set(f"process/{self.rank}", json.dumps(this_process()))
        self._store.set(f"hello/{self.rank}", json.dumps(facts))
        keys = [f"hello/{r}" for r in range(self.size)]
        start, pause = time.monotonic(), 0.001
        while not self._store.check(keys):
            if time.monotonic() - start > START_S:
                absent = [r for r, key in enumerate(keys) if not self._store.check([key])]
                raise PeerFailed(f"ranks {absent} did not attach within {START_S:.0f} s; do all ranks call it?")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        posted = [json.loads(self._store.get(key)) for key in keys]
        for rank, theirs in enumerate(posted):
            for fact, value in posted[0].items():
                if theirs.get(fact) != value:
                    raise ConfigMismatch(_difference(fact, value, rank, str(theirs.get(fact))))

    def store(self, name: str) -> Store:
        """A part of the store for one group."""
        return PrefixStore(f"group/{name}", self._store)

    def meeting(self, name: str, ranks: tuple[int, ...]) -> Callable[[], bool]:
        """Say that this worker is there; the answer tells whether all ``ranks`` are."""
        self._store.set(f"meeting/{name}/{self.rank}", "1")
        keys = [f"meeting/{name}/{r}" for r in ranks]
        return lambda: self._ask(False, self._store.check, keys)

    # Failure.

    def publish(self, name: str, text: str) -> None:
        """A fact under a name of its own."""
        self._store.set(f"fact/{name}", text)

    def published(self, name: str) -> str | None:
        """That fact, if it has been published."""
        key = f"fact/{name}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def fail(self, message: str, lost: bool = False) -> None:
        """Tell everyone that this worker has failed, or that it has ``lost`` another; the first message stays."""
        if self._gone_since_s is not None:
            return  # nobody could read it, and torch would write a long complaint
        notice = json.dumps([self.rank, message[:4000], lost])
        self._ask(None, self._store.compare_set, "failed", "", notice)

    def check(self) -> None:
        """Raise if another worker has failed."""
        if self._ask(False, self._store.check, ["failed"]):
            rank, message, lost = json.loads(self._store.get("failed"))
            if lost:
                raise self.lost(message)
            if rank != self.rank:
                raise PeerFailed(f"rank {rank} failed: {message}")

    def lost(self, when: str) -> PeerFailed:
        """The error for a peer that vanished without a word: the living answer a roll call, the others are named.

        Who computes does not hear it. So processes on this machine are looked for as well, and if one of them is gone,
        nobody else is waited for or named.
        """
        try:
            self._store.set(f"alive/{self.rank}", "1")
            ended, silent = self._roll_call()
        except RuntimeError:
            self._gone_since_s = time.monotonic()
            return _store_gone(when)
        if ended:
            return PeerFailed(f"lost a peer during {when}; {_no_sign(ended)}: the process has ended")
        if silent:
            others = f"nor does one that computes for more than {ROLL_CALL_S:.0f} s"
            return PeerFailed(f"lost a peer during {when}; {_no_sign(silent)} ({others})")
        return PeerFailed(f"lost a peer during {when}; all ranks still answer")

    def _roll_call(self) -> tuple[list[int], list[int]]:
        """Those who have ended without an answer, as far as that can be known; those who have not answered."""
        silent = list(range(self.size))
        found = self._store.multi_get([f"process/{r}" for r in silent])
        processes, here = [json.loads(text) for text in found], this_process()
        start, pause_s = time.monotonic(), 0.01
        while True:
            # Looked for first: a worker that has answered may end, but none answers after its end.
            ended = [r for r in silent if has_ended(processes[r], here)]
            silent = [r for r in silent if not self._store.check([f"alive/{r}"])]
            ended = [r for r in ended if r in silent]
            if ended or not silent or time.monotonic() - start > ROLL_CALL_S:
                return ended, silent
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)

    def _ask(self, otherwise: T, call: Callable[..., Any], *args: object) -> T | Any:
        """Ask the store. A store that has gone is forgiven for a moment: its host may have finished before us."""
        try:
            return call(*args)
        except RuntimeError as error:
            now = time.monotonic()
            self._gone_since_s = self._gone_since_s or now
            if now - self._gone_since_s > GRACE_S:
                raise _store_gone("the run") from error
            return otherwise

    # Steps and their end.

    def reach(self, t: int) -> None:
        """Step ``t`` is taken with data."""
        if t > self._reached:
            self._reached = t
            self._ask(None, self._store.set, f"reached/{self.rank}", str(t))

    def post_done(self, steps: int) -> None:
        """This worker has no data left, after so many steps."""
        self._store.set(f"done/{self.rank}", str(steps))
        self._store.set("done", "1")
        self.someone_is_done = True

    def look_for_done(self) -> bool:
        self.someone_is_done = self.someone_is_done or bool(self._ask(False, self._store.check, ["done"]))
        return self.someone_is_done

    def progress(self, among: tuple[int, ...] | None = None) -> tuple[bool, int]:
        """Whether all of these workers are without data, and the last step one of them is known to take with data."""
        ranks = range(self.size) if among is None else among
        keys = [f"{fact}/{r}" for fact in ("done", "reached") for r in ranks]
        numbers = [int(n) for n in self._ask(["-1"] * len(keys), self._store.multi_get, keys)]
        done, reached = numbers[: len(ranks)], numbers[len(ranks) :]
        return min(done) >= 0, max(*reached, *(steps - 1 for steps in done), -1)

    # Averages in the middle of a run.

    def ask_for_average(self, number: int) -> None:
        self._store.set(f"average/{number}/{self.rank}", "1")
        self._store.set(f"average/{number}", "1")

    def average_is_asked(self, number: int, among: tuple[int, ...] | None = None) -> bool:
        """Whether anybody, or anybody ``among`` these, asks for it."""
        keys = [f"average/{number}"] if among is None else [f"average/{number}/{rank}" for rank in among]
        return any(self._ask(False, self._store.check, [key]) for key in keys)


def _store_gone(when: str) -> PeerFailed:
    return PeerFailed(f"the job's store is gone during {when}: rank 0, or the launcher, has ended")


def _no_sign(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} gives no sign of life"
    return f"ranks {', '.join(map(str, ranks))} give no sign of life"


def _difference(fact: str, here: str, rank: int, there: str) -> str:
    if fact == "parameters":
        ours, theirs = here.split("\n"), there.split("\n")
        for a, b in zip(ours, theirs, strict=False):
            if a != b:
                return f"the models differ: rank 0 has {a}, rank {rank} has {b}; build the same model on every rank"
        return (
            f"the models differ: rank 0 has {len(ours)} parameters and buffers, rank {rank} has {len(theirs)}; "
            "build the same model on every rank"
        )
    return f"the ranks differ in their {fact}: rank 0 has {here}, rank {rank} has {there}; make them equal"
