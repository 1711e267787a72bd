"""``share``: one supply of batches for all workers, of which a fast one takes more.

``SharedBatches`` is a batch sampler. A ``DataLoader`` that has one is known by it: its batches pass through here on
their way to the loop, so that one which another worker has taken since it was fetched is left out, and it is known
which batches the loop has. ``rounds/leases.py`` has the rule of who takes what; the words lie in the job's store.

A batch counts when a step is taken with it. Between the loader and the step there may be several: gradients that are
accumulated, a trainer that looks one batch ahead. So each backward pass is heard, and a step uses as many batches as
there were backward passes, the oldest first.
"""

from __future__ import annotations

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
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
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
from offbeat.live.transport.errors import ConfigMismatch, OffbeatError
from offbeat.rounds.leases import Epoch, Op, Put, Request, Swap

T = TypeVar("T")

TOLD_S, TOLD_STEPS = 1.0, 64  # how often the others hear of steps, at the least, while any are taken
FRESH_S = 0.05  # and how old an answer to a script that asks for them may be
_SHUFFLE = 0x5A6E
_number = itertools.count()
_shares: weakref.WeakSet[SharedBatches] = weakref.WeakSet()
_runs: dict[str, RunShares] = {}  # the optimisers that are attached
_rebuilt: weakref.WeakKeyDictionary[DataLoader[Any], DataLoader[Any]] = weakref.WeakKeyDictionary()


@dataclass
class RunShares:
    """An attached optimiser: what it has taken batches from, and its steps where all workers take them together."""

    steps_together: Callable[[], int | None]
    shares: set[SharedBatches] = field(default_factory=set)


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
        self._supply: Words | None = None
        self._epoch = 0  # the next one
        self._left: dict[int, tuple[int, ...]] = {}  # of epochs that were taken up from a state
        self._feeding: Pass | None = None
        self._pass: Pass | None = None  # whose batches may still be in the loop
        self._skipped = 0  # samples that were fetched, and no step was taken with
        self._snapshot: dict[str, Any] | None = None
        self._batch_us = 0
        self._steps_before = 0
        _through_shares()
        _shares.add(self)

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
        """The epoch of the next loop; after ``load_state_dict``, the first that was not used up."""
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
        words = self._supply
        return (self._steps_before + (0 if words is None else words.steps_of_all)) / _world()[1]

    def _fresh(self) -> Pass | None:
        if self._pass is not None:
            self._pass.tell(FRESH_S)
        return self._pass

    def told(self) -> list[str]:
        """Whether every sample was used once, in words. Exact when all workers have finished."""
        supply = self._opened()
        epochs = range(min(self._left, default=0), max(supply.everyones_epochs(), default=-1) + 1)
        whole_ones, sentences = 0, []
        for number in epochs:
            used = self._used_before(number) + supply.used(number)
            if used == self._in_an_epoch:
                whole_ones += 1
            else:
                sentences.append(f"Epoch {number}: {used:,} of {self._in_an_epoch:,} samples were used.")
        if whole_ones:
            each = "" if whole_ones == 1 else f", in each of {whole_ones} epochs"
            sentences.insert(0, f"{self._in_an_epoch:,} of {self._in_an_epoch:,} samples were used once{each}.")
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
        self._left = {int(epoch): tuple(left.tolist()) for epoch, left in state["left"].items()}
        self._epoch, self._steps_before = int(state["epoch"]), round(state["steps"] * _world()[1])
        self._supply, self.number, self._snapshot = None, next(_number), None

    # Passes.

    def _opened(self) -> Words:
        if self._supply is None:
            rank, size = _world()
            if size > 1 and not dist.is_initialized():
                raise OffbeatError(
                    "a shared loader was asked for batches before the job was joined; call ob.init() first"
                )
            store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else HashStore()
            self._supply = Words(PrefixStore(f"offbeat/share/{self.number}", store), rank, size)
            about = (
                f"{self.samples} samples in batches of {self.batch_size}, shuffle={self.shuffle}, seed={self.seed}, "
                f"drop_last={self.drop_last}"
            )
            self._supply.agree("about", about, "make them equal")
        return self._supply

    def _next_pass(self, by_step: bool = True) -> Pass:
        if get_worker_info() is not None:
            raise OffbeatError(
                "a share was asked for batches inside a loader's worker process, where it does not know the others; "
                "give it to the DataLoader as batch_sampler, or loop over the shards in the main process"
            )
        self._settle()
        supply, number = self._opened(), self._epoch
        left = self._left.get(number)
        if left is not None:
            supply.agree(
                f"{number}/left",
                f"{len(left)} batches of epoch {number}, number {draw.bits(*left) % 10**6}",
                "load the same state on all ranks: save it after optimizer.average()",
            )
        self._epoch = number + 1
        for run in _runs.values():
            run.shares.add(self)
        self._pass = Pass(self, supply, number, range(self.batches) if left is None else left, by_step)
        supply.begin_epoch(number)
        return self._pass

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
        """Let all know what this worker holds and has used."""
        if self._pass is not None:
            self._pass.tell(0.0)
            self._pass.tell_held()

    def _read_state(self) -> dict[str, Any]:
        supply = self._opened()
        epochs = supply.everyones_epochs()
        first = min(epochs, default=self._epoch)
        left = {}
        for number in range(first, max(epochs, default=first - 1) + 1):
            numbers = self._left.get(number, range(self.batches))
            asked = Epoch(supply.rank, supply.size, numbers)
            left[number] = torch.tensor(supply.ask(number, asked.left()), dtype=torch.int64)
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


class Words:
    """The words of one share, in the job's store."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self.rank, self.size = store, rank, size
        self._there: set[str] = set()  # keys that are known to exist
        self.steps_of_all = 0  # when it was last asked, and this worker's own since

    def ask(self, epoch: int, request: Request[T]) -> T:
        """Answer what a request asks until it returns."""
        try:
            op = next(request)
            while True:
                op = request.send(self._answer(op, f"{epoch}/"))
        except StopIteration as end:
            answer: T = end.value
            return answer

    def _answer(self, op: Op, prefix: str) -> list[str]:
        if isinstance(op, Put):
            self._store.set(prefix + op.key, op.text)
            return []
        if isinstance(op, Swap):
            return [self._store.compare_set(prefix + op.key, op.old, op.new).decode()]
        keys = [prefix + key for key in op.keys]
        if len(keys) > 1 and self._there.issuperset(keys):
            return [text.decode() for text in self._store.multi_get(keys)]
        self._there.update(keys)
        # Nothing is expected where something lies: then what lies there is answered.
        return [self._store.compare_set(key, "", first).decode() for key, first in zip(keys, op.first, strict=True)]

    def agree(self, key: str, own: str, way_out: str) -> None:
        """The first rank says; one that would say something else is refused."""
        said = self._store.compare_set(key, "", own).decode()
        if said != own:
            raise ConfigMismatch(
                f"the ranks share different work: one has {said}, rank {self.rank} has {own}; {way_out}"
            )

    def begin_epoch(self, number: int) -> None:
        self._store.set(f"at/{self.rank}", str(number))

    def everyones_epochs(self) -> list[int]:
        """At which epoch each worker is that has begun one; of one that has not, the first."""
        keys = [f"at/{rank}" for rank in range(self.size)]
        found = [int(self._store.get(key)) for key in keys if self._store.check([key])]
        return found and found + [0] * (self.size - len(found))

    def count(self, epoch: int, samples: int, steps: int) -> int:
        """Add to what all have used. The answer is how many samples of the epoch that is by now."""
        self.steps_of_all = self._store.add("steps", steps)
        return int(self._store.add(f"{epoch}/used", samples))

    def used(self, epoch: int) -> int:
        return int(self._store.add(f"{epoch}/used", 0))


class Pass:
    """One worker's way through one epoch.

    ``by_step``: a batch counts when a step is taken with it, and otherwise when the loop comes back for the next.
    """

    def __init__(self, share: SharedBatches, supply: Words, number: int, batches: Sequence[int], by_step: bool) -> None:
        self.number, self._share, self._supply, self._by_step = number, share, supply, by_step
        self._epoch = Epoch(supply.rank, supply.size, batches)
        self._indices = share._indices(number)
        self._loading: deque[int] = deque()  # fetched, and not begun
        self._hand: list[int] = []  # begun, and not stepped with
        self._backwards = 0  # of them, those that a backward pass was for
        self._is_silent = True  # no backward pass since the last batch
        self._silent: list[int] = []  # no backward pass before the batch behind them
        self._first: int | None = None
        self._begun, self._since_s = 0, 0.0
        self._is_over = False
        self._used = self._steps = 0  # not told yet
        self._told_s = time.monotonic()
        self.used_by_all = share._used_before(number)  # samples, as far as is known

    # Batches.

    def feed(self) -> Iterator[list[int]]:
        """What a loader is to fetch. It may be far ahead of the loop."""
        while (batch := self._ask(self._epoch.fetch(self._batch_us, len(self._loading)))) is not None:
            self._loading.append(batch)
            yield self._indices(batch)

    def loaded(self, inner: Iterator[Any], loader: DataLoader[Any]) -> Generator[Any]:
        """The batches that ``inner`` has fetched, and then those that nobody has reached."""
        try:
            for batch in inner:
                if self._is_over:
                    return
                if self._begin(number := self._loading.popleft()):
                    self._hand_out(number)
                    yield batch
            while (more := self._more()) is not None:
                self._hand_out(more)
                yield _fetched(loader, self._indices(more))
        except BaseException:
            self.settle()
            raise

    def plain(self) -> Generator[list[int]]:
        """The indices of batches, for a loader that is not known: each is begun when it is fetched."""
        try:
            while (batch := self._more()) is not None:
                self._hand_out(batch)
                yield self._indices(batch)
            if not self._by_step:
                self._use(len(self._hand))
        except BaseException:
            self.settle()
            raise

    def _more(self) -> int | None:
        while not self._is_over:
            batch = self._ask(self._epoch.fetch(self._batch_us, 0))
            if batch is None or self._begin(batch):
                return batch
        return None

    def _begin(self, batch: int) -> bool:
        return self._ask(self._epoch.begin(batch, self._batch_us))

    def _hand_out(self, batch: int) -> None:
        now_s = time.monotonic()
        self._since_s = self._since_s or now_s
        if self._begun:
            self._share._batch_us = max(1, int(1e6 * (now_s - self._since_s) / self._begun))
        self._begun += 1
        if not self._counts_steps:
            self._use(len(self._hand))
        elif self._hand and self._is_silent:
            self._silent.append(self._hand[-1])
        self._first = batch if self._first is None else self._first
        self._is_silent = True
        self._hand.append(batch)

    # What becomes of them.

    def backward(self) -> None:
        self._is_silent = False
        self._backwards = min(self._backwards + 1, len(self._hand))

    @property
    def is_open(self) -> bool:
        """Whether a step may be one with batches of this pass."""
        return not self._is_over

    def stepped(self, are_heard: bool) -> None:
        """A step was taken; ``are_heard``: of the optimiser that took it, each backward pass is heard."""
        if self._by_step:
            self._use(max(self._backwards, 1) if are_heard else len(self._hand))
        self._steps += 1
        self._supply.steps_of_all += 1
        self.tell()

    def thrown_away(self) -> None:
        """The gradients of the backward passes since the last step are gone."""
        self._skip(self._backwards)

    def settle(self) -> None:
        """No more batches are asked for: what was not used goes back to the others.

        A batch that the loop passed over (an exception that it caught) leaves a backward pass fewer than batches, and
        the newest ones would be taken for unused. They are not, unless the loop looks ahead: then already the first
        batch has no backward pass before the second.
        """
        if self._is_over:
            return
        self._is_over = True
        if not self._by_step:
            self._skip(len(self._hand))
        elif not _runs:
            self._use(len(self._hand))
        elif self._silent and self._silent[0] != self._first:
            late = min(len(self._silent), len(self._hand))
            passed_over = self._silent[-late:] if late else []
            self._share._skipped += self._samples(passed_over)
            self._used -= self._samples(passed_over)  # each was counted in place of one that is in hand
            self._use(late)
        self._ask(self._epoch.give_back(self._hand, self._loading))
        self._hand, self._backwards = [], 0
        self._loading.clear()
        self.tell(0.0)

    def tell(self, after_s: float = TOLD_S) -> None:
        """Let the others know what was used, if they last heard of it so long ago."""
        now_s = time.monotonic()
        if self._steps >= TOLD_STEPS or now_s - self._told_s >= after_s:
            before = self._share._used_before(self.number)
            self.used_by_all = before + self._supply.count(self.number, self._used, self._steps)
            self._used, self._steps, self._told_s = 0, 0, now_s

    def tell_held(self) -> None:
        """Let them know what this worker has."""
        if not self._is_over:
            self._ask(self._epoch.tell())

    def _use(self, count: int) -> None:
        for batch in self._hand[:count]:
            self._epoch.resolve(batch)
            self._used += self._share._rows(batch)
            self.used_by_all += self._share._rows(batch)
        del self._hand[:count]
        self._backwards = 0
        self._share._snapshot = None

    def _skip(self, count: int) -> None:
        for batch in self._hand[:count]:
            self._epoch.resolve(batch)
            self._share._skipped += self._share._rows(batch)
        del self._hand[:count]
        self._backwards = 0

    @property
    def _counts_steps(self) -> bool:
        """Else nobody says when a step is taken: when the loop comes back, it was."""
        return self._by_step and bool(_runs)

    def _samples(self, batches: Iterable[int]) -> int:
        return sum(map(self._share._rows, batches))

    @property
    def _batch_us(self) -> int:
        return self._share._batch_us

    def _ask(self, request: Request[T]) -> T:
        return self._supply.ask(self.number, request)


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

    The first takes over the loader's batch size, workers and prefetching, and whether it shuffles. ``epochs``: how many
    there will be, for ``progress``. ``slices``: each shard in so many parts, which come as ``(shard, slice)``. All
    ranks call it, with the same data. In a job of one it is a plain loader, sampler or iterable.
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
        raise ValueError(f"share: how many samples of this {type(data).__name__} make a batch? Say batch_size=…")
    if drop_last is not None:
        raise ValueError("share: drop_last goes with a batch_size")
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


def attached(run: str, steps_together: Callable[[], int | None]) -> None:
    """From now on a batch counts when a step is taken with it.

    ``steps_together``: how many steps all workers have taken, where they take each one together; else None.
    """
    _runs[run] = RunShares(steps_together)


def released(run: str) -> None:
    _runs.pop(run, None)


def backward() -> None:
    """A backward pass has made gradients."""
    for share in _shares:
        if share._pass is not None:
            share._pass.backward()


def stepped(run: str, are_heard: bool) -> None:
    """A step was taken; ``are_heard``: so is each backward pass."""
    for share in _shares:
        if share._pass is not None and share._pass.is_open:
            _runs[run].shares.add(share)
            share._pass.stepped(are_heard)


def thrown_away() -> None:
    """Gradients were set to zero, or to nothing."""
    for share in _shares:
        if share._pass is not None:
            share._pass.thrown_away()


def settle(run: str) -> None:
    """The run ends: what is in hand will not be used."""
    for share in _of(run):
        share._settle()


def tell(run: str) -> None:
    """Let all know what this worker holds and has used."""
    for share in _of(run):
        share._tell()


def take_snapshots(run: str) -> None:
    """All have told: what a state says until the next step."""
    for share in _of(run):
        share._snapshot = share._read_state()


def in_words(run: str) -> list[str]:
    """Of the shares that were used in this run: whether every sample was used once."""
    return [sentence for share in _of(run) for sentence in share.told()]


def used_by(run: str | None = None) -> SharedBatches | None:
    """The share that this run, or any that is attached, took batches from last; None where nothing is shared."""
    runs = list(_runs) if run is None else [run]
    return max((share for one in runs for share in _of(one)), key=lambda share: share.number, default=None)


def _of(run: str) -> list[SharedBatches]:
    return sorted(_runs[run].shares if run in _runs else (), key=lambda share: share.number)
