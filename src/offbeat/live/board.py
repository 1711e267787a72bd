"""The notice board of a job: small facts that workers post for one another, beside the tensors.

It lives in the store that ``torch.distributed`` was started with. No thread reads it: a worker looks at it while it
waits, so a run in which nobody waits costs nothing.

Uneven data. A worker that has run out posts ``done``; it may take step s idly only when it knows that some worker
takes it with data. That worker posts ``reached`` when it has waited for a moment at that step (see ``Waiter``), or at
once from then on, since it then knows that somebody is done. When all are done, the last step is known to all.
"""

from __future__ import annotations

import json
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from offbeat.live.errors import ConfigMismatch, PeerFailed

START_S = 300.0  # how long a worker waits for the others to attach


class Board:
    """Facts of one attached optimiser, under a prefix of its own."""

    def __init__(self, store: Store, prefix: str, rank: int, size: int) -> None:
        self._store = PrefixStore(prefix, store)
        self.rank, self.size = rank, size
        self.someone_is_done = False
        self._reached = -1

    def agree(self, facts: dict[str, str]) -> None:
        """Every worker posts what it is; one that differs from rank 0 is refused on all of them."""
        self._store.set(f"hello/{self.rank}", json.dumps(facts))
        keys = [f"hello/{r}" for r in range(self.size)]
        try:
            self._store.wait(keys, timedelta(seconds=START_S))
        except Exception as error:
            absent = [r for r, key in enumerate(keys) if not self._store.check([key])]
            raise PeerFailed(f"ranks {absent} did not attach within {START_S:.0f} s; do all ranks call it?") from error
        posted = [json.loads(self._store.get(key)) for key in keys]
        for rank, theirs in enumerate(posted):
            for fact, value in posted[0].items():
                if theirs.get(fact) != value:
                    raise ConfigMismatch(_difference(fact, value, rank, str(theirs.get(fact))))

    def fail(self, message: str) -> None:
        """Tell everyone that this worker has failed; the first message stays."""
        self._store.compare_set("failed", "", json.dumps([self.rank, message[:4000]]))

    def check(self) -> None:
        """Raise if another worker has failed."""
        if self._store.check(["failed"]):
            rank, message = json.loads(self._store.get("failed"))
            if rank != self.rank:
                raise PeerFailed(f"rank {rank} failed: {message}")

    def reach(self, t: int) -> None:
        """Step ``t`` is taken with data."""
        if t > self._reached:
            self._reached = t
            self._store.set(f"reached/{self.rank}", str(t))

    def post_done(self, steps: int) -> None:
        """This worker has no data left, after so many steps."""
        self._store.set(f"done/{self.rank}", str(steps))
        self._store.set("done", "1")
        self.someone_is_done = True

    def look_for_done(self) -> bool:
        self.someone_is_done = self.someone_is_done or self._store.check(["done"])
        return self.someone_is_done

    def last_reached(self) -> int:
        """The last step known to be taken with data by anyone."""
        keys = [k for r in range(self.size) for k in (f"reached/{r}",) if self._store.check([k])]
        done = [int(self._store.get(f"done/{r}")) - 1 for r in range(self.size) if self._store.check([f"done/{r}"])]
        return max([int(self._store.get(k)) for k in keys] + done, default=-1)

    def all_done(self) -> bool:
        return self._store.check([f"done/{r}" for r in range(self.size)])

    def ask_for_average(self, number: int) -> None:
        self._store.set(f"average/{number}", "1")

    def average_is_asked(self, number: int) -> bool:
        return self._store.check([f"average/{number}"])

    def leave(self) -> int:
        """Count the workers that no longer need the board; answers how many have left."""
        return self._store.add("left", 1)

    def left(self) -> int:
        return self._store.add("left", 0)


def _difference(fact: str, here: str, rank: int, there: str) -> str:
    if fact == "parameters":
        ours, theirs = here.split("\n"), there.split("\n")
        for a, b in zip(ours, theirs, strict=False):
            if a != b:
                return f"the models differ: rank 0 has {a}, rank {rank} has {b}; build the same model on every rank"
        return (
            f"the models differ: rank 0 has {len(ours)} parameters, rank {rank} has {len(theirs)}; "
            "build the same model on every rank"
        )
    return f"the ranks differ in their {fact}: rank 0 has {here}, rank {rank} has {there}; make them equal"
