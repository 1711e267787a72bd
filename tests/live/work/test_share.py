"""Shared work: every sample is used once an epoch, by whoever is free, or it is named."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset, WeightedRandomSampler

import offbeat as ob
from tests.support import forge
from tests.support.forge import Job, attempt, hear, say
from tests.support.nets import PATIENCE_S
from tests.support.samples import Numbers, together
from tests.support.samples import once as samples_once
from tests.support.scenarios import Told, over, scenario

pytestmark = pytest.mark.live

SAMPLES, BATCH = 50, 4


class Run:
    """One worker's run over a shared loader; it knows which samples it has taken steps with."""

    def __init__(self, method: Any = None, accumulate: int = 1, **settings: Any) -> None:
        self.model = nn.Linear(1, 1).double()
        inner = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.optimizer = ob.attach(
            inner, self.model, method, accumulate=accumulate, patience_s=PATIENCE_S, seed=1, **settings
        )
        self.used: list[int] = []
        self._pending: list[int] = []

    def backward(self, batch: torch.Tensor) -> None:
        self.model(batch.double()[:, None]).mean().backward()
        self._pending += batch.tolist()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.used += self._pending
        self._pending = []

    def train(self, batch: torch.Tensor) -> None:
        self.backward(batch)
        self.step()

    def finish(self) -> list[str]:
        self.optimizer.finish()
        return [one for one in self.optimizer.summary().sentences if "samples" in one]


def shared(samples: int = SAMPLES, **settings: Any) -> DataLoader[Any]:
    return ob.share(DataLoader(Numbers(samples), batch_size=BATCH, shuffle=True, **settings))


def once(epochs: int = 1, samples: int = SAMPLES) -> Counter[int]:
    return samples_once(samples, epochs)


# Every method, any number of workers.


def _epochs(method: Any, epochs: int = 2) -> tuple[list[int], list[str]]:
    run, loader = Run(method), shared()
    for _ in range(epochs):
        for batch in loader:
            run.train(batch)
    return run.used, run.finish()


@scenario(3)
def every_method(rank: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nonblocking would like to cut its batches
        return {name: _epochs(name) for name in ob.METHODS}


@pytest.mark.parametrize("name", list(ob.METHODS))
def test_every_method_uses_every_sample_once_an_epoch(told: Told, name: str) -> None:
    out = [one[name] for one in told(every_method)]
    assert together([used for used, _ in out]) == once(2)
    for _, said in out:
        assert said == ["50 of 50 samples were used once, in each of 2 epochs."]


def any_size(rank: int) -> Any:
    return _epochs(None)[0], _epochs("local_sgd:period=2")[0]


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_any_number_of_workers_does(size: int) -> None:
    (outcomes,) = forge.run([Job(any_size, size)])
    out = forge.values(outcomes)
    assert together([one[0] for one in out]) == together([one[1] for one in out]) == once(2)


@scenario(3)
def averaging(rank: int) -> Any:
    """With 13 batches for three workers, somebody has one more than the others when they meet after an epoch."""
    out = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ob.METHODS:
            run, loader = Run(name), shared()
            for _ in range(2):
                for batch in loader:
                    run.train(batch)
                run.optimizer.average()
            out[name] = run.used, [p.tolist() for p in run.model.parameters()], run.finish()
    return out


@pytest.mark.parametrize("name", list(ob.METHODS))
def test_workers_with_unequally_many_batches_meet_in_an_average(told: Told, name: str) -> None:
    out = [one[name] for one in told(averaging)]
    assert together([used for used, _, _ in out]) == once(2)
    assert out[0][1] == out[1][1] == out[2][1]


def on_two_hosts(rank: int) -> Any:
    return over(rank, "hosts", _two_methods)


def _two_methods(rank: int) -> Any:
    return [_epochs(name) for name in ("allreduce", "eager:late=1,sync_every=none")]


def test_workers_on_several_hosts_share_one_supply() -> None:
    (outcomes,) = forge.run([Job(on_two_hosts, 4)])
    for out in zip(*forge.values(outcomes), strict=True):
        assert together([used for used, _ in out]) == once(2)
        for _, said in out:
            assert said == ["50 of 50 samples were used once, in each of 2 epochs."]


# Who takes what.


@scenario(2)
def held_back(rank: int) -> Any:
    """Rank 1 stays with its first batch until rank 0 has no more work."""
    out = []
    for number, workers in enumerate((0, 2)):
        run, loader = Run("eager:late=1,sync_every=none"), shared(96, num_workers=workers)
        batches = iter(loader)
        run.train(next(batches))
        if rank == 1:
            hear(f"no more {number}")
        for batch in batches:
            run.train(batch)
        if rank == 0:
            say(f"no more {number}")
        out.append((run.used, run.finish()))
    return out


@pytest.mark.parametrize("loader", [0, 1], ids=["without worker processes", "with two, which have fetched ahead"])
def test_a_free_worker_takes_what_one_that_is_held_back_does_not(told: Told, loader: int) -> None:
    (fast, said), (slow, _) = (out[loader] for out in told(held_back))
    assert together([fast, slow]) == once(samples=96)
    assert len(fast) >= 4 * len(slow)
    assert said == ["96 of 96 samples were used once."]


@scenario(2)
def in_step(rank: int) -> Any:
    run, loader = Run("allreduce"), shared()
    order = [int(sample) for batch in DataLoader(Numbers(SAMPLES), batch_sampler=plain_order()) for sample in batch]
    for batch in loader:
        run.train(batch)
    run.finish()
    return run.used, order


def plain_order() -> list[list[int]]:
    """The batches of an epoch in their order: what one worker alone is given."""
    from offbeat.live.work.share import SharedBatches

    alone = SharedBatches(SAMPLES, BATCH, shuffle=True, seed=0, drop_last=False, epochs=None)
    indices = alone._indices(0)
    return [indices(batch) for batch in range(alone.batches)]


def test_equal_workers_take_fixed_shares_in_order(told: Told) -> None:
    """With 13 batches for two, the last may go to either."""
    for rank, (used, order) in enumerate(told(in_step)):
        batches = [order[k : k + BATCH] for k in range(0, SAMPLES, BATCH)]
        own = [sample for batch in batches[:12][rank::2] for sample in batch]
        assert used[: len(own)] == own


# What is not used.


@scenario(2)
def leaving(rank: int) -> Any:
    """Rank 1 leaves after two batches, with a third in its hands; rank 0 goes on."""
    run, loader = Run("eager:late=1,sync_every=none"), shared()
    for number, batch in enumerate(loader):
        if rank == 1 and number == 2:
            break
        if rank == 0 and number == 1:
            hear("left")
        run.train(batch)
    if rank == 1:
        say("left")
    return run.used, run.finish()


def test_what_a_worker_leaves_behind_goes_to_the_others(told: Told) -> None:
    out = told(leaving)
    assert together([used for used, _ in out]) == once()
    assert len(out[1][0]) == 2 * BATCH
    assert out[0][1] == ["50 of 50 samples were used once."]


@scenario(2)
def all_leave(rank: int) -> Any:
    run = Run()
    for number, batch in enumerate(shared()):
        if number == 3:
            break
        run.train(batch)
    return run.used, run.finish()


def test_what_nobody_uses_is_named(told: Told) -> None:
    out = told(all_leave)
    used = together([used for used, _ in out])
    assert set(used.values()) == {1}
    for _, said in out:
        assert said == [f"Epoch 0: {used.total()} of 50 samples were used, and not {unused(used)}."]


def unused(used: Counter[int]) -> str:
    """As a sentence has them, if there are few enough; the others are named by the first ones."""
    ranges = list[tuple[int, int]]()
    for one in sorted(set(range(SAMPLES)) - set(used)):
        ranges = [*ranges[:-1], (ranges[-1][0], one)] if ranges and ranges[-1][1] == one - 1 else [*ranges, (one, one)]
    words = [str(first) if first == last else f"{first}–{last}" for first, last in ranges[:8]]
    if more := sum(last - first + 1 for first, last in ranges[8:]):
        words.append(f"{more} more")
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


@scenario(2)
def passing_over(rank: int) -> Any:
    """A batch that raises is passed over, and gradients of another are thrown away."""
    run = Run()
    for number, batch in enumerate(shared()):
        time.sleep(0.02)  # else whoever comes first has taken all
        with contextlib.suppress(ZeroDivisionError):
            if number == 2:
                raise ZeroDivisionError
            run.backward(batch)
            if number == 4:
                run.optimizer.zero_grad()
                run._pending.clear()
                continue
            run.step()
    return run.used, run.finish()


def test_batches_that_were_passed_over_are_named(told: Told) -> None:
    out = told(passing_over)
    used = together([used for used, _ in out])
    assert set(used.values()) == {1}
    for _, said in out:
        assert said[0] == f"Epoch 0: {used.total()} of 50 samples were used, and not {unused(used)}."
        assert said[1] == "This worker fetched 8 samples without taking a step with them."


@scenario(2)
def accumulating(rank: int) -> Any:
    run, waiting = Run(accumulate=2), 0
    for batch in shared(48):
        run.backward(batch)
        waiting += 1
        if waiting == 2:
            run.step()
            waiting = 0
    return run.used, run.finish()


def test_steps_of_several_batches_use_all_of_them(told: Told) -> None:
    out = told(accumulating)
    used = together([used for used, _ in out])
    assert set(used.values()) == {1}
    left = 48 - used.total()  # a worker with an odd number of batches has one without a step
    for _, said in out:
        whole = ["48 of 48 samples were used once."]
        assert said == whole if not left else said[0].startswith(f"Epoch 0: {48 - left} of 48 samples were used, and")


class LooksAhead:
    """As trainers do, to know which batch is the last."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        held = next(batches, None)
        for batch in batches:
            yield held
            held = batch
        if held is not None:
            yield held


@scenario(2)
def looking_ahead(rank: int) -> Any:
    run, loader = Run(), shared()
    for _ in range(2):
        for batch in LooksAhead(loader):
            run.train(batch)
    return run.used, run.finish()


def test_a_trainer_may_look_a_batch_ahead(told: Told) -> None:
    out = told(looking_ahead)
    assert together([used for used, _ in out]) == once(2)
    assert out[0][1] == ["50 of 50 samples were used once, in each of 2 epochs."]


# Resuming.


def saving(rank: int, file: str) -> Any:
    """Some steps of the second epoch, an average, and one file; then it is all over."""
    run, loader = Run("eager:late=1"), shared()
    for batch in loader:
        run.train(batch)
    first = list(run.used)
    for number, batch in enumerate(loader):
        run.train(batch)
        if number == rank:
            break
    run.optimizer.average()
    if rank == 0:
        sampler: Any = loader.batch_sampler
        torch.save(sampler.state_dict(), file)
    return first, run.used[len(first) :]


def resuming(rank: int, file: str) -> Any:
    run, loader = Run("eager:late=1"), shared()
    sampler: Any = loader.batch_sampler
    sampler.load_state_dict(torch.load(file, weights_only=True))
    epochs = []
    for epoch in range(sampler.epoch, 3):
        begun = len(run.used)
        for batch in loader:
            run.train(batch)
        epochs.append((epoch, run.used[begun:]))
    return epochs, run.finish()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_run_goes_on_with_another_number_of_workers(size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "state.pt"))
        (before,) = forge.run([Job(saving, 3, (file,))])
        (after,) = forge.run([Job(resuming, size, (file,))])
    first, second = zip(*forge.values(before), strict=True)
    assert together(list(first)) == once()
    out = forge.values(after)
    rest = {epoch: together([dict(epochs)[epoch] for epochs, _ in out]) for epoch in (1, 2)}
    assert together(list(second)) + rest[1] == once()
    assert rest[2] == once()
    assert out[0][1] == ["50 of 50 samples were used once, in each of 2 epochs."]


# Without a job, and without an attached optimiser.


def test_one_worker_alone_has_a_plain_shuffled_loader() -> None:
    loader, again = shared(), shared()
    epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
    assert all(together(epoch) == once() for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert [batch.tolist() for batch in again] == epochs[0]
    assert len(loader) == len(epochs[0]) == 13
    in_order = ob.share(DataLoader(Numbers(10), batch_size=4, drop_last=True))
    assert [batch.tolist() for batch in in_order] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_loader_may_have_worker_processes_that_stay() -> None:
    loader = shared(num_workers=2, persistent_workers=True)
    assert [together([batch.tolist() for batch in loader]) for _ in range(2)] == [once(), once()]


@scenario(2)
def streams(rank: int) -> Any:
    files = [f"file-{number}" for number in range(7)]
    whole = list(ob.share(files))
    parts = [(name, part.start, part.step) for name, part in ob.share(files, slices=3)]
    return whole, parts


def test_shards_and_parts_of_them_go_to_one_worker_each(told: Told) -> None:
    out = told(streams)
    assert Counter(itertools.chain(*(whole for whole, _ in out))) == Counter(f"file-{k}" for k in range(7))
    every = Counter((f"file-{k}", start, 3) for k in range(7) for start in range(3))
    assert Counter(itertools.chain(*(parts for _, parts in out))) == every


# Refusals.


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


untyped: Any = ob.share  # also with what its types forbid
WEIGHTED = WeightedRandomSampler([1.0] * 50, 50)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ob.share(DataLoader(Stream())), "share its shards instead"),
        (lambda: untyped(Stream(), batch_size=2), "share its shards instead"),
        (lambda: ob.share(DataLoader(Numbers(SAMPLES), sampler=WEIGHTED)), "draws by WeightedRandomSampler"),
        (
            lambda: ob.share(DataLoader(Numbers(SAMPLES), sampler=RandomSampler(Numbers(SAMPLES), replacement=True))),
            "deals out every sample once",
        ),
        (lambda: untyped(TensorDataset(torch.ones(3))), "how many samples of this TensorDataset make a batch?"),
        (lambda: ob.share(Numbers(SAMPLES), batch_size=0), "batch_size is 0"),
        (lambda: ob.share(Numbers(3), batch_size=4, drop_last=True), "drop_last=False"),
        (lambda: ob.share(["a"], slices=0), "slices is 0"),
        (lambda: untyped(DataLoader(Numbers(SAMPLES)), batch_size=3), "from the loader"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_the_way_out(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match="share") as error:
        make()
    assert words in str(error.value)


@scenario(2)
def different(rank: int) -> Any:
    return attempt(lambda: list(shared(50 + rank)))


def test_ranks_that_share_different_work_are_told(told: Told) -> None:
    said = sorted(told(different), key=len)
    assert said[0] == ""  # who came first
    assert "51 samples in batches of 4" in said[1]
    assert "50 samples in batches of 4" in said[1]


# Schedules.


@scenario(2)
def following(rank: int) -> Any:
    run, loader = Run("eager:late=1,sync_every=none"), shared(96)
    epochs, inner = 2, run.optimizer.inner
    schedule: Any = torch.optim.lr_scheduler.LinearLR(inner, 1.0, 0.0, epochs * len(loader))
    schedule = ob.follow(schedule)
    for epoch in range(epochs):
        for number, batch in enumerate(loader):
            run.train(batch)
            schedule.step()
            if rank == 1 and number == 0:
                hear(f"followed {epoch}")
        if rank == 0:
            say(f"followed {epoch}")
    run.finish()
    schedule.step()
    saved = schedule.state_dict()
    return run.optimizer.summary().steps, schedule.get_last_lr()[0], saved["last_epoch"], len(loader)


def test_a_schedule_that_follows_ends_with_the_work_on_every_worker(told: Told) -> None:
    (fast, *end), (slow, *other) = told(following)
    assert fast > 3 * slow
    assert fast + slow == 48
    assert end == other == [pytest.approx(0.0), 24, 12]


@scenario(3)
def following_in_step(rank: int) -> Any:
    """The rates and the weights that a worker had at each of its steps."""
    run, loader = Run("allreduce"), shared()
    schedule = ob.follow(torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer.inner, 3 * len(loader)))
    rates, weights = [], []
    for _ in range(3):
        for batch in loader:
            run.train(batch)
            schedule.step()
            rates.append(schedule.get_last_lr()[0])
            weights.append(run.model.weight.item())
        run.optimizer.average()
    run.finish()
    return rates, weights, 3 * len(loader)


def test_workers_that_step_together_have_one_rate_in_every_step(told: Told) -> None:
    out = told(following_in_step)
    every = {(rate, weight) for rates, weights, _ in out for rate, weight in zip(rates, weights, strict=True)}
    assert len(every) <= out[0][2]  # else two workers had different ones in the same step
    assert len({rate for rate, _ in every}) == len(every)


@scenario(2)
def by_hand(rank: int) -> Any:
    """Rank 1 waits with its first batch until rank 0 is through."""
    run, loader = Run("eager:late=1,sync_every=none"), shared(400)
    schedule = torch.optim.lr_scheduler.LinearLR(run.optimizer.inner, 1.0, 0.1, 50)
    if rank == 1:
        loader = ob.follow_nothing(loader) if False else loader
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for number, batch in enumerate(loader):
            run.train(batch)
            schedule.step()
            if rank == 1 and number == 0:
                hear("through")
        if rank == 0:
            say("through")
    run.finish()
    return [str(one.message) for one in seen]


def test_a_schedule_by_a_workers_own_steps_is_warned_of(told: Told) -> None:
    fast, _ = told(by_hand)
    assert len([words for words in fast if "scheduler = ob.follow(scheduler)" in words]) == 1


def test_what_goes_by_a_metric_cannot_follow() -> None:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD(nn.Linear(1, 1).parameters()))
    with pytest.raises(TypeError, match="where the metric is known"):
        ob.follow(plateau)


def test_progress_is_of_the_epochs_that_were_announced() -> None:
    sampler = ob.share(Numbers(8), batch_size=4, epochs=2)
    seen = [round(sampler.progress, 3) for _ in range(2) for _ in DataLoader(Numbers(8), batch_sampler=sampler)]
    assert seen == [0.0, 0.25, 0.5, 0.75]


def test_a_loader_that_is_shared_in_every_epoch_goes_on_with_the_next() -> None:
    plain = DataLoader(Numbers(SAMPLES), batch_size=BATCH, shuffle=True)
    epochs = [[batch.tolist() for batch in ob.share(plain)] for _ in range(2)]
    assert epochs[0] != epochs[1]
