"""``share``: one supply of batches for all workers, of which a fast one takes more.

``SharedBatches`` is a batch sampler. A ``DataLoader`` that has one is known by it: its batches pass through here on
their way to the loop, so that one which another worker has taken since it was fetched is left out, and it is known
which batches the loop has. ``rounds/leases.py`` has the rule of who takes what; the host process has the leases.

A batch is used when a step is taken with it, and counts when that step has been handed in. Between the loader and the
step there may be several: gradients that are accumulated, a trainer that looks one batch ahead. So each backward pass
is heard, and a step uses as many batches as there were backward passes, the oldest first.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    get_worker_info,
)

from offbeat.basics import draw
from offbeat.basics.checks import whole
from offbeat.live.transport import hosts
from offbeat.live.transport.errors import OffbeatError
from offbeat.live.worker.board import Board
from offbeat.live.worker.lease_client import AloneLeases, LeaseClient, Leases
from offbeat.rounds.leases import Dealt, Ranges

T = TypeVar("T")

TOLD_S, TOLD_STEPS = 1.0, 64  # how often the others hear of steps, at the least, while any are taken
FRESH_S = 0.05  # and how old an answer to a script that asks for them may be
PATIENCE_S = 1800.0  # for the others, where no optimiser is attached that has its own
NAMED = 8  # stretches of samples that a sentence names
_SHUFFLE = 0x5A6E
_number = itertools.count()
_shares: weakref.WeakSet[SharedBatches] = weakref.WeakSet()
_taken_up: list[dict[str, Any]] = []  # the states of a checkpoint, one for each share of a script
_still_to_be_made: list[dict[str, Any]] = []  # those of shares that the script has not made yet
_runs: dict[str, RunShares] = {}  # the optimisers that are attached
_rebuilt: weakref.WeakKeyDictionary[DataLoader[Any], DataLoader[Any]] = weakref.WeakKeyDictionary()


@dataclass
class RunShares:
    """An attached optimiser: what it has taken batches from, and its steps where all workers take them together.

    ``until``: waits for something without a batch, where others may die and give some back. ``are_heard``: so is each
    backward pass.
    """

    steps_together: Callable[[], int | None]
    board: Board
    patience_s: float
    until: Callable[[Callable[[], bool]], None] | None
    are_heard: bool
    shares: set[SharedBatches] = field(default_factory=set)
    in_step: bool = False


@dataclass(frozen=True)
class LeasesAt:
    """Where a share's leases are, and of which run; None: of none."""

    leases: Leases
    run: str | None


class SharedBatches(Sampler[list[int]]):
    """A batch sampler that all workers share: ``DataLoader(dataset, batch_sampler=ob.share(dataset, batch_size=32))``.

    Every sample is used once an epoch, by the worker that is free. ``len()`` is the number of batches that each worker
    would have if all took equally many, so what is made from it (``epochs * len(loader)`` steps of a schedule) is in
    steps of the whole job.
    """

    def __init__(
        self, samples: int, batch_size: int, *, shuffle: bool, seed: int, drop_last: bool, epochs: int | None
    ) -> None:
        whole("share: batch_size", batch_size, 1)
        self.samples, self.batch_size, self.drop_last = samples, batch_size, drop_last
        self.shuffle, self.seed, self.epochs = shuffle, seed, epochs
        self.batches = samples // batch_size if drop_last else -(-samples // batch_size)
        if not self.batches:
            raise ValueError(
                f"share: {samples} samples do not make a batch of {batch_size}; use a smaller batch_size"
                + (", or drop_last=False" if drop_last and samples else "")
            )
        self.number = next(_number)
        self._open: LeasesAt | None = None
        self._epoch = 0  # the next one
        self._has_come_back = False
        self._left: dict[int, tuple[int, ...]] = {}  # of epochs that were taken up from a state, or from a run before
        self._passed_over: dict[int, tuple[int, ...]] = {}  # of epochs that were begun in runs before
        self._feeding: Pass | None = None
        self._pass: Pass | None = None  # whose batches may still be in the loop
        self._skipped = 0  # samples that were fetched, and no step was taken with
        self._snapshot: dict[str, Any] | None = None
        self._owes = False  # a step was told of that has not been handed in
        self._batch_us = 0
        self._steps_before = 0
        _through_shares()
        _shares.add(self)
        if _still_to_be_made:
            self.load_state_dict(_still_to_be_made.pop(0))

    # What a loader asks.

    def __len__(self) -> int:
        return -(-self.batches // _world()[1])

    def __iter__(self) -> Iterator[list[int]]:
        if (feeding := self._feeding) is not None:
            return feeding.feed()
        return self._next_pass().plain()

    def set_epoch(self, epoch: int) -> None:
        """The next loop is this epoch's. Without it, epochs are counted by loops."""
        self._epoch = whole("share: epoch", epoch, 0)

    # What a script may ask.

    @property
    def epoch(self) -> int:
        """The epoch of the next loop; after ``load_state_dict``, or in a worker that has come back, the first that was
        not used up.
        """
        if hosts.returns() and _runs and self._pass is None and not self._has_come_back:
            self._has_come_back = True
            self._opened()
            known = self._known()
            left = [number for number, (left, _) in known.items() if left]
            self._epoch = max(self._epoch, min(left, default=max(known, default=-1) + 1))
        return self._epoch

    @property
    def progress(self) -> float:
        """How much of the work of all workers is done, from 0 to 1: of ``epochs``, or else of this epoch."""
        one = self._fresh()
        done, now = (0.0, self._epoch) if one is None else (one.used_by_all / self._in_an_epoch, one.number)
        return min(done if self.epochs is None else (now + done) / self.epochs, 1.0)

    @property
    def steps(self) -> float:
        """How many steps the job has taken: those of all workers, over their number.

        Where all take each step together it is the number of these, the same on all workers in the same step: a rate
        that differed would let their replicas drift apart.
        """
        for run in _runs.values():
            if self in run.shares and (together := run.steps_together()) is not None:
                return together
        self._fresh()
        told = 0 if self._open is None else self._open.leases.steps
        return (self._steps_before + told + (0 if self._pass is None else self._pass.untold)) / _world()[1]

    def _fresh(self) -> Pass | None:
        if self._pass is not None:
            self._pass.tell(FRESH_S)
        return self._pass

    def told(self) -> list[str]:
        """Whether every sample was used once, in words. Exact when all workers have finished."""
        known, total = self._known(), self._in_an_epoch
        whole_ones, sentences = 0, []
        for number in range(min(known, default=0), max(known, default=-1) + 1):
            left, passed_over = known.get(number, (range(self.batches), ()))
            missing = sorted({*left, *passed_over})
            if not missing:
                whole_ones += 1
                continue
            indices = self._indices(number)
            named = _named(sorted(sample for batch in missing for sample in indices(batch)))
            used = total - sum(map(self._rows, missing))
            sentences.append(f"Epoch {number}: {used:,} of {total:,} samples were used, and not {named}.")
        if whole_ones:
            each = "" if whole_ones == 1 else f", in each of {whole_ones} epochs"
            sentences.insert(0, f"{total:,} of {total:,} samples were used once{each}.")
        if self._skipped:
            sentences.append(f"This worker fetched {self._skipped:,} samples without taking a step with them.")
        return sentences

    def state_dict(self) -> dict[str, Any]:
        """Where all workers are: the same on every rank right after ``optimizer.average()``, so one file is enough."""
        if self._snapshot is None:
            self._tell()
            self._snapshot = self._read_state()
        return dict(self._snapshot)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was saved, with any number of workers. All ranks load the same one."""
        for name in ("samples", "batch_size", "drop_last", "shuffle", "seed"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the state was saved with {name}={state[name]}, and this share has {name}={getattr(self, name)}; "
                    "make them equal, or begin the epoch anew without the state"
                )
        self._settle()
        self._close()
        self._left = {int(epoch): tuple(left.tolist()) for epoch, left in state["left"].items()}
        self._epoch, self._steps_before = int(state["epoch"]), round(state["steps"] * _world()[1])
        self.number, self._snapshot, self._passed_over = next(_number), None, {}

    # Passes.

    def _opened(self) -> Leases:
        if self._open is None:
            rank, size = _world()
            if size > 1 and not dist.is_initialized():
                raise OffbeatError(
                    "a shared loader was asked for batches before the job was joined; call ob.init() first"
                )
            self._open = LeasesAt(AloneLeases(), None) if size == 1 else self._at_host(rank, size)
        return self._open.leases

    def _at_host(self, rank: int, size: int) -> LeasesAt:
        """With the first run that is attached, or else by itself."""
        name = f"share/{self.number}"
        for run, one in _runs.items():
            if one.board.line is not None and one.board.size == size:
                return LeasesAt(LeaseClient(f"{one.board.name}/{name}", one.board, one.patience_s), run)
        board = Board(dist.distributed_c10d._get_default_store(), f"offbeat/{name}", rank, size)
        meet = board.come_back if hosts.returns() and board.has_posted_before else board.agree
        meet({}, PATIENCE_S)
        return LeasesAt(LeaseClient(f"{board.name}/leases", board, PATIENCE_S, needs_all=False), None)

    def _close(self) -> None:
        """Ask no more where the leases are now."""
        if self._pass is not None:
            self._pass.give_up()
        if self._open is not None:
            self._open.leases.close()
        self._open, self._owes = None, False

    def _ends_with(self, run: str) -> None:
        """The run in which the leases are is over: another goes on where they were when all had settled."""
        if self._open is not None and self._open.run == run:
            self._close()

    def _keep(self) -> None:
        """All have settled: what there is to be known stays when the run is over."""
        if self._open is not None and self._open.run is not None:
            known = self._known()
            if self._pass is not None:
                self._pass.look()
            self._steps_before += self._open.leases.steps
            self._left |= {number: tuple(left) for number, (left, _) in known.items()}
            self._passed_over = {number: tuple(passed) for number, (_, passed) in known.items()}
            self._close()

    def _known(self) -> dict[int, tuple[Sequence[int], Sequence[int]]]:
        """Of epochs that were begun: the batches that are left, and those that were passed over."""
        known: dict[int, tuple[Sequence[int], Sequence[int]]] = {
            number: (self._left[number], passed_over) for number, passed_over in self._passed_over.items()
        }
        if self._open is not None:
            for one in self._open.leases.accounts():
                numbers = self._numbers(one.number)
                passed_over = [*self._passed_over.get(one.number, ()), *_at(one.skipped, numbers)]
                known[one.number] = _at(one.left, numbers), passed_over
        return known

    def _numbers(self, epoch: int) -> Sequence[int]:
        """The batches that this epoch has for those who loop over it."""
        return self._left.get(epoch, range(self.batches))

    def _about(self, epoch: int) -> str:
        """What all must agree on."""
        numbers = self._numbers(epoch)
        left = "" if isinstance(numbers, range) else f", {len(numbers)} left (number {draw.bits(*numbers) % 10**6})"
        return (
            f"{self.samples} samples in batches of {self.batch_size}, shuffle={self.shuffle}, seed={self.seed}, "
            f"drop_last={self.drop_last}{left}"
        )

    def _next_pass(self, by_step: bool = True) -> Pass:
        if get_worker_info() is not None:
            raise OffbeatError(
                "a share was asked for batches inside a loader's worker process, where it does not know the others; "
                "give it to the DataLoader as batch_sampler, or loop over the shards in the main process"
            )
        self._settle()
        number = self._epoch
        self._pass = Pass(self, self._opened(), number, by_step)
        self._epoch = number + 1
        for run in _runs.values():
            run.shares.add(self)
        return self._pass

    def _is_here(self, leases: Leases) -> bool:
        """Whether these are still asked."""
        return self._open is not None and self._open.leases is leases

    def _until(self) -> Callable[[Callable[[], bool]], None] | None:
        """How a worker waits that has no batch, if there may be more."""
        run = None if self._open is None or self._open.run is None else _runs.get(self._open.run)
        return None if run is None else run.until

    def _settle(self) -> None:
        if self._pass is not None:
            self._pass.settle()

    @property
    def _in_an_epoch(self) -> int:
        return self.batches * self.batch_size if self.drop_last else self.samples

    def _used_before(self, epoch: int) -> int:
        """Of an epoch that was taken up: how many of its samples were used before."""
        left = self._left.get(epoch)
        return 0 if left is None else self._in_an_epoch - sum(map(self._rows, left))

    def _rows(self, batch: int) -> int:
        return min(self.batch_size, self.samples - batch * self.batch_size)

    def _indices(self, epoch: int) -> Callable[[int], list[int]]:
        if not self.shuffle:
            return lambda batch: list(range(batch * self.batch_size, batch * self.batch_size + self._rows(batch)))
        order = torch.randperm(self.samples, generator=draw.generator(_SHUFFLE, self.seed, epoch))
        return lambda batch: order[batch * self.batch_size : batch * self.batch_size + self._rows(batch)].tolist()

    # What the attached optimiser tells.

    def _tell(self) -> None:
        """Let all know what this worker has used."""
        if self._pass is not None:
            self._pass.tell(0.0)

    def _read_state(self) -> dict[str, Any]:
        if _runs:
            self._opened()
        known = self._known()
        first = min(known, default=self._epoch)
        left = {
            number: torch.tensor(known.get(number, (range(self.batches), ()))[0], dtype=torch.int64)
            for number in range(first, max(known, default=first - 1) + 1)
        }
        while len(left) and not left[first].numel():  # used up
            del left[first]
            first += 1
        names = ("samples", "batch_size", "drop_last", "shuffle", "seed")
        return {**{name: getattr(self, name) for name in names}, "epoch": first, "left": left, "steps": self.steps}

    # Loaders.

    def _through(self, loader: DataLoader[Any], plain: Callable[[DataLoader[Any]], Iterator[Any]]) -> Iterator[Any]:
        """The batches of a loader whose batch sampler this is."""
        if not getattr(loader, "in_order", True):
            return plain(loader)  # which batch comes when is not known: each is taken when it is fetched
        self._feeding = one = self._next_pass()
        try:
            inner = plain(loader)
        finally:
            self._feeding = None
        return one.loaded(inner, loader)


class Pass:
    """One worker's way through one epoch. Batches are known by their places in it.

    ``by_step``: a batch counts when a step is taken with it, and otherwise when the loop comes back for the next.
    """

    def __init__(self, share: SharedBatches, leases: Leases, number: int, by_step: bool) -> None:
        self.number, self._share, self._leases, self._by_step = number, share, leases, by_step
        self._numbers, self._indices = share._numbers(number), share._indices(number)
        self._taker = leases.taker(number, len(self._numbers), share._about(number))
        self._loading: deque[int] = deque()  # fetched, and not begun
        self._hand: list[int] = []  # begun, and not used
        self._backwards = 0  # of them, those that a backward pass was for
        self._are_in_step = False  # those of the step that is being taken are used already
        self._is_silent = True  # no backward pass since the last batch
        self._looks_ahead = False  # the loop has one batch more than it computes with
        self._begun, self._since_s = 0, 0.0
        self._is_over = False
        self._used: list[int] = []  # not told yet
        self._skipped: list[int] = []  # the same
        self.untold = 0  # steps
        self._told_s = time.monotonic()
        self.used_by_all = share._used_before(number)  # samples, as far as is known

    # Batches.

    def feed(self) -> Iterator[list[int]]:
        """What a loader is to fetch. It may be far ahead of the loop."""
        while not self._is_over and (place := self._taker.fetch(self._batch_us, len(self._loading))) is not None:
            self._loading.append(place)
            yield self._indices(self._numbers[place])

    def loaded(self, inner: Iterator[Any], loader: DataLoader[Any]) -> Generator[Any]:
        """The batches that ``inner`` has fetched, and then those that nobody has reached."""
        try:
            for batch in inner:
                if self._is_over:
                    return
                if self._taker.begin(place := self._loading.popleft(), self._batch_us):
                    self._hand_out(place)
                    yield batch
            while (more := self._more()) is not None:
                self._hand_out(more)
                yield _fetched(loader, self._indices(self._numbers[more]))
        except BaseException:
            self._settle_at_an_error()
            raise

    def plain(self) -> Generator[list[int]]:
        """The indices of batches, for a loader that is not known: each is begun when it is fetched."""
        try:
            while (place := self._more()) is not None:
                self._hand_out(place)
                yield self._indices(self._numbers[place])
        except BaseException:
            self._settle_at_an_error()
            raise

    def _more(self) -> int | None:
        """The next batch that is this worker's; waits for what others may give back."""
        if not self._counts_steps:
            self._use_all()
        while not self._is_over:
            place = self._taker.fetch(self._batch_us, 0)
            if place is not None and self._taker.begin(place, self._batch_us):
                return place
            if place is None and not self._waited():
                return None
        return None

    def _waited(self) -> bool:
        """Whether others have given something back, where this worker has no work left."""
        self._tell()
        if self._taker.is_over:
            return False
        dealt = self._leases.wait(self.number, self._batch_us, self._share._until())
        if dealt is None:
            return False
        self._taker.give(dealt)
        return bool(dealt.taken)

    def _hand_out(self, place: int) -> None:
        now_s = time.monotonic()
        self._since_s = self._since_s or now_s
        if self._begun:
            self._share._batch_us = max(1, int(1e6 * (now_s - self._since_s) / self._begun))
        self._begun += 1
        if not self._counts_steps:
            self._use_all()
        elif self._hand and self._is_silent:  # an exception that the loop caught, or else the first is one ahead
            self._looks_ahead = self._looks_ahead or self._begun == 2
            if not self._looks_ahead:
                self._skip(self._hand[-1:])
        self._is_silent = True
        self._hand.append(place)

    # What becomes of them.

    def backward(self) -> None:
        self._is_silent = False
        self._backwards = min(self._backwards + 1, len(self._hand))

    @property
    def is_open(self) -> bool:
        """Whether a step may be one with batches of this pass."""
        return not self._is_over

    def in_step(self, are_heard: bool) -> None:
        """A step is being taken, and what is in hand is in it: ``are_heard``: as many as there were backward passes."""
        if self._by_step and self.is_open:
            once = self._backwards if self._are_in_step else max(self._backwards, 1)
            self._use(once if are_heard else len(self._hand))
            self._are_in_step = True

    def stepped(self, are_heard: bool) -> None:
        """It was taken."""
        self.in_step(are_heard)
        self._are_in_step = False
        self.untold += 1
        self.tell()

    def hands_over(self) -> None:
        """What is handed in next has in it all steps that were taken with batches of this pass."""
        if self._used or self._share._owes:
            self._tell(hands_over=True)
            self._share._owes = False

    def thrown_away(self) -> None:
        """The gradients of the backward passes since the last step are gone."""
        self._skip(self._hand[: self._backwards])
        self._backwards = 0

    def give_up(self) -> None:
        """There is nobody to ask any more."""
        self._is_over = True

    def settle(self) -> None:
        """No more batches are asked for: what was not used goes back to the others."""
        if self._is_over:
            return
        self._is_over = True
        if not self._by_step:
            self._skip(self._hand)
        elif not _runs:
            self._use_all()
        self._tell()
        self._leases.close_epoch(self.number)
        self._hand, self._backwards = [], 0
        self._loading.clear()
        self.look()

    def _settle_at_an_error(self) -> None:
        with contextlib.suppress(OffbeatError):  # of the same run: whoever hears of the first is told enough
            self.settle()

    def tell(self, after_s: float = TOLD_S) -> None:
        """Let the others know what was used, if they last heard of it so long ago."""
        if self.untold >= TOLD_STEPS or time.monotonic() - self._told_s >= after_s:
            self._tell()
            self.look()

    def _tell(self, hands_over: bool = False) -> None:
        if self._share._is_here(self._leases) and (self._used or self._skipped or self.untold or hands_over):
            self._leases.step(self.number, self._used, self._skipped, self.untold, hands_over)
            self._share._owes = self._share._owes or bool(self._used)
            self._used, self._skipped, self.untold = [], [], 0

    def look(self) -> None:
        """How far all are."""
        if not self._share._is_here(self._leases):
            return
        self.used_by_all = self._share._used_before(self.number) + self._used_of(self._leases.look(self.number))
        self._told_s = time.monotonic()

    def _used_of(self, dealt: Dealt) -> int:
        full = self._share.batch_size
        return dealt.used * full - (full - self._share._rows(self._numbers[-1]) if dealt.has_last else 0)

    def _use(self, count: int) -> None:
        self._used += self._hand[:count]
        self.used_by_all += self._samples(self._hand[:count])
        del self._hand[:count]
        self._backwards = 0
        self._share._snapshot = None

    def _use_all(self) -> None:
        """They count at once: nobody says when a step is taken, or with what."""
        if self._hand:
            self._use(len(self._hand))
            self._tell()
            self._leases.count()

    def _skip(self, places: list[int]) -> None:
        """No step is taken with these, which are in hand."""
        self._share._skipped += self._samples(places)
        self._skipped += places
        self._hand = [place for place in self._hand if place not in places]

    @property
    def _counts_steps(self) -> bool:
        """Else nobody says when a step is taken: when the loop comes back, it was."""
        return self._by_step and bool(_runs)

    def _samples(self, places: Iterable[int]) -> int:
        return sum(self._share._rows(self._numbers[place]) for place in places)

    @property
    def _batch_us(self) -> int:
        return self._share._batch_us


class Shards(Iterable[T]):
    """Files, or whatever data comes in pieces: each goes once an epoch to a worker that is free."""

    def __init__(self, items: Sequence[T], slices: int, shuffle: bool, seed: int, epochs: int | None) -> None:
        self._items, self._slices = items, whole("share: slices", slices, 1)
        self.sampler = SharedBatches(len(items) * slices, 1, shuffle=shuffle, seed=seed, drop_last=False, epochs=epochs)

    def __iter__(self) -> Iterator[Any]:
        for (place,) in self.sampler._next_pass(by_step=False).plain():
            item, part = self._items[place // self._slices], place % self._slices
            yield item if self._slices == 1 else (item, slice(part, None, self._slices))

    def __len__(self) -> int:
        return len(self.sampler)

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state)


@overload
def share(data: DataLoader[T], *, seed: int = 0, epochs: int | None = None) -> DataLoader[T]: ...


@overload
def share(
    data: Sized,
    batch_size: int,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    epochs: int | None = None,
) -> SharedBatches: ...


@overload
def share(
    data: Iterable[T], *, shuffle: bool = True, seed: int = 0, epochs: int | None = None, slices: int = 1
) -> Shards[T]: ...


def share(
    data: Any,
    batch_size: int | None = None,
    *,
    shuffle: bool | None = None,
    seed: int = 0,
    drop_last: bool | None = None,
    epochs: int | None = None,
    slices: int | None = None,
) -> Any:
    """Give the work to whoever is free: every sample is used once an epoch, and a fast worker takes more of them.

    ```python
    loader = ob.share(loader)  # as it was made for one process: no DistributedSampler
    sampler = ob.share(dataset, batch_size=32)  # or as a batch sampler: DataLoader(dataset, batch_sampler=sampler)
    for shard in ob.share(files): ...  # or for streams: a file, or a part of one, for whoever is free
    ```

    All ranks call it, with the same data. In a job of one it is a plain loader, sampler or iterable.

    Args:
        data: A loader, whose batch size, workers, prefetching and shuffling stay; or a dataset; or shards.
        batch_size: Of a dataset: the samples of a batch.
        shuffle: Of a dataset or of shards: whether each epoch has another order. A loader says so itself.
        seed: Seeds that order.
        drop_last: Of a dataset: whether a last batch that is not full is left out.
        epochs: How many there will be, for ``progress``.
        slices: Of shards: each comes in so many parts, as ``(shard, slice)``.
    """
    whole("share: seed", seed, 0)
    if epochs is not None:
        whole("share: epochs", epochs, 1)
    if isinstance(data, DataLoader):
        if not (batch_size is shuffle is drop_last is slices is None):
            raise ValueError("share takes batch size, order and drop_last from the loader; set them there")
        if data not in _rebuilt:  # asked for again, as inside the loop over epochs, it is the same one
            _rebuilt[data] = _over_a_share(data, seed, epochs)
        return _rebuilt[data]
    if batch_size is not None:
        if slices is not None:
            raise ValueError("share: slices go with shards, and a batch_size with samples; leave one of them out")
        if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
            raise ValueError(
                f"share: the samples of a {type(data).__name__} have no numbers by which to deal them out; share its "
                "shards instead: for shard in ob.share(files): …"
            )
        shuffled, dropped = shuffle is not False, drop_last is True
        return SharedBatches(len(data), batch_size, shuffle=shuffled, seed=seed, drop_last=dropped, epochs=epochs)
    if isinstance(data, Dataset) or not isinstance(data, Iterable):
        raise ValueError(
            f"share: how many samples of this {type(data).__name__} make a batch? No number was given; say batch_size=…"
        )
    if drop_last is not None:
        raise ValueError("share: drop_last has no meaning without batches; say batch_size=…, or leave it out")
    return Shards(list(data), 1 if slices is None else slices, shuffle is not False, seed, epochs)


def _over_a_share(loader: DataLoader[Any], seed: int, epochs: int | None) -> DataLoader[Any]:
    """The same loader over a share of its data."""
    if isinstance(loader.batch_sampler, SharedBatches):
        return loader
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            f"share: the data of this loader come as a stream ({type(loader.dataset).__name__}), whose samples have no "
            "numbers; share its shards instead: for shard in ob.share(files): …"
        )
    sampler, batching, samples = loader.sampler, loader.batch_sampler, len(loader.dataset)  # type: ignore[arg-type]
    shuffles = isinstance(sampler, RandomSampler) or bool(getattr(sampler, "shuffle", False))
    once = not isinstance(sampler, RandomSampler) or (not sampler.replacement and sampler.num_samples == samples)
    known = isinstance(sampler, RandomSampler | SequentialSampler | DistributedSampler) and once
    if type(batching) is not BatchSampler or not known:
        kind = type(sampler if type(batching) is BatchSampler else batching).__name__
        raise ValueError(
            f"share: this loader draws by {kind}, and a share deals out every sample once an epoch; give "
            "ob.share(dataset, batch_size=…) a dataset of the samples that are to be used"
        )
    return DataLoader(
        loader.dataset,
        batch_sampler=SharedBatches(
            samples,
            batching.batch_size,
            shuffle=shuffles,
            seed=sampler.seed if isinstance(sampler, DistributedSampler) else seed,
            drop_last=batching.drop_last,
            epochs=epochs,
        ),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def _fetched(loader: DataLoader[Any], indices: list[int]) -> Any:
    """One batch, loaded here: at the end of an epoch, when the loader's own processes have gone."""
    one = DataLoader(
        loader.dataset, batch_sampler=[indices], collate_fn=loader.collate_fn, pin_memory=loader.pin_memory
    )
    return next(iter(one))


def _through_shares() -> None:
    """From now on a loader whose batch sampler is a share hands out its batches through it."""
    plain = DataLoader.__iter__
    if getattr(plain, "knows_shares", False):
        return

    @functools.wraps(plain)
    def __iter__(loader: DataLoader[Any]) -> Any:
        sampler = loader.batch_sampler
        return sampler._through(loader, plain) if isinstance(sampler, SharedBatches) else plain(loader)

    __iter__.knows_shares = True  # type: ignore[attr-defined]
    DataLoader.__iter__ = __iter__  # type: ignore[method-assign]


def _world() -> tuple[int, int]:
    """This rank and the number of ranks; before the job is joined, as the launcher says."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


# What the attached optimisers of this process say. ``run`` is an optimiser's name.


def attached(
    run: str,
    board: Board,
    patience_s: float,
    steps_together: Callable[[], int | None],
    until: Callable[[Callable[[], bool]], None] | None,
    are_heard: bool,
) -> None:
    """From now on a batch is used when a step is taken with it, and counts when that has been handed in.

    ``steps_together``: how many steps all workers have taken, where they take each one together; else None. ``until``:
    waits for something while the others train, where workers may die. ``are_heard``: so is each backward pass.
    """
    _runs[run] = RunShares(steps_together, board, patience_s, until, are_heard)
    board.hands_over = functools.partial(hands_over, run)


def released(run: str) -> None:
    """The run is over. What it knows of its shares was kept, if all have come to its end."""
    if (one := _runs.pop(run, None)) is not None:
        one.board.hands_over = None
    for share in list(_shares):
        share._ends_with(run)


def backward() -> None:
    """A backward pass has made gradients."""
    for share in _shares:
        if share._pass is not None:
            share._pass.backward()


def stepping(run: str) -> None:
    """A step is being taken."""
    _runs[run].in_step = True


def applied(run: str) -> None:
    """The inner optimiser moves the weights; in a step, what is in hand is in them from now on."""
    if (one := _runs.get(run)) is not None and one.in_step:
        _are_in_step(one)


def _are_in_step(run: RunShares) -> None:
    for share in _shares:
        if share._pass is not None and share._pass.is_open:
            run.shares.add(share)
            share._pass.in_step(run.are_heard)


def hands_over(run: str, with_gradient: bool) -> None:
    """What is handed in next has all steps so far in it; ``with_gradient``: the one that is being taken, too."""
    if (one := _runs.get(run)) is None:
        return
    if with_gradient:
        _are_in_step(one)
    for share in one.shares:
        if share._pass is not None and share._open is not None:
            share._pass.hands_over()


def stepped(run: str) -> None:
    """It was taken."""
    one = _runs[run]
    one.in_step = False
    for share in _shares:
        if share._pass is not None and share._pass.is_open:
            one.shares.add(share)
            share._pass.stepped(one.are_heard)


def thrown_away() -> None:
    """Gradients were set to zero, or to nothing."""
    for share in _shares:
        if share._pass is not None:
            share._pass.thrown_away()


def settle(run: str) -> None:
    """The run ends: what is in hand will not be used, and this worker takes no more."""
    for share in _of(run):
        share._settle()
        if share._open is not None and share._open.run == run:
            share._open.leases.close_epoch(-1)


def tell(run: str) -> None:
    """Let all know what this worker has used."""
    for share in _of(run):
        share._tell()


def take_snapshots(run: str) -> None:
    """All have told: what a state says until the next step."""
    for share in _of(run):
        share._snapshot = share._read_state()


def states(run: str) -> list[dict[str, Any]]:
    """Of the shares of this run, in the order in which they were made: what has been handed in by now."""
    return [share._read_state() for share in _of(run)]


def take_up(states: Sequence[dict[str, Any]]) -> None:
    """The shares of this script go on where these were saved, each in its turn, those too that are made later."""
    _taken_up[:] = _still_to_be_made[:] = states
    for share in sorted(_shares, key=lambda share: share.number):
        if _still_to_be_made:
            share.load_state_dict(_still_to_be_made.pop(0))


def taken_up() -> Sequence[dict[str, Any]]:
    """With what this script's shares began: for a worker that comes back."""
    return tuple(_taken_up)


def in_words(run: str) -> list[str]:
    """Of the shares of this run, all of whose workers have settled: whether every sample was used once."""
    for share in _of(run):
        share._keep()
    return [sentence for share in _of(run) for sentence in share.told()]


def used_by(run: str | None = None) -> SharedBatches | None:
    """The share that this run, or any that is attached, took batches from last; None where nothing is shared."""
    runs = list(_runs) if run is None else [run]
    return max((share for one in runs for share in _of(one)), key=lambda share: share.number, default=None)


def _of(run: str) -> list[SharedBatches]:
    return sorted(_runs[run].shares if run in _runs else (), key=lambda share: share.number)


def _at(places: Ranges, numbers: Sequence[int]) -> list[int]:
    """The batches at these places."""
    return [number for first, end in places for number in numbers[first:end]]


def _named(samples: Sequence[int]) -> str:
    """``3, 7–9 and 12``; of many the first, and how many more there are."""
    ranges = list[list[int]]()
    for one in samples:
        if ranges and ranges[-1][1] == one - 1:
            ranges[-1][1] = one
        else:
            ranges.append([one, one])
    words = [str(first) if first == last else f"{first}–{last}" for first, last in ranges[:NAMED]]
    more = sum(last - first + 1 for first, last in ranges[NAMED:])
    *most, end = [*words, f"{more:,} more"] if more else words
    return f"{', '.join(most)} and {end}" if most else end
