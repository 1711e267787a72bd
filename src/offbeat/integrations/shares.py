"""Shared work under a trainer: which loaders and methods it is for, and how far it is in the trainer's own steps."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from offbeat.live.work.share import SharedBatches, _world, share
from offbeat.method.strategy import Method

SAMPLERS = (RandomSampler, SequentialSampler, DistributedSampler)
# Steps of these methods wait for nobody. In those of the others the fast workers wait anyway, so there is little to
# share; and with fixed shares ``allreduce`` has the bits of the trainer's own DDP.
ALONE = ("self_clocked", "eager", "msync", "ringmaster", "wagma", "ad_psgd", "decoupled")


class TrainersShare(SharedBatches):
    """A share whose ``steps`` are those of the trainer, which counts ``per_epoch`` of them in an epoch.

    ``last``: the step at which the job is over. The epoch in which it lies has only the batches up to it, so that all
    workers end with the work, and none has to be told to stop. ``scale``: how often the trainer steps a scheduler
    for a step of the job.
    """

    per_epoch: float
    last: int | None = None
    accumulate = 1
    scale = 1
    loader: Any = None  # that counts epochs, too
    _floor = 0.0

    @property
    def sampler(self) -> TrainersShare:  # where Lightning looks for set_epoch
        return self

    def plan(self, per_epoch: float, last: int | None, accumulate: int = 1) -> None:
        self.per_epoch, self.last, self.accumulate = per_epoch, last, accumulate
        if last is not None and last % per_epoch:
            epoch = int(last // per_epoch)
            kept = range(self._planned(epoch))
            self._left[epoch] = tuple(batch for batch in self._left.get(epoch, kept) if batch in kept)

    def _planned(self, epoch: int) -> int:
        """How many batches of this epoch are to be used."""
        if self.last is None or self.last >= (epoch + 1) * self.per_epoch:
            return self.batches
        return min(int(self.last - epoch * self.per_epoch) * self.accumulate * _world()[1], self.batches)

    def step_at_the_end_of(self, epoch: int) -> float:
        end = (epoch + 1) * self.per_epoch
        return end if self.last is None else min(end, self.last)

    @property
    def now(self) -> int | None:
        """The epoch in which this worker is, or was last."""
        return None if self._pass is None else self._pass.number

    def end_epoch(self) -> float:
        """There is no work left in this worker's epoch: what the others still compute counts as done."""
        assert self.now is not None
        self._floor = self.step_at_the_end_of(self.now)
        return self._floor

    @property
    def steps(self) -> float:
        one = self._fresh()
        if one is None:
            return self._epoch * self.per_epoch * self.scale
        count = self._planned(one.number)
        planned = self._in_an_epoch if count == self.batches else count * self.batch_size
        done = 1.0 - (self._in_an_epoch - one.used_by_all) / planned
        first, end = one.number * self.per_epoch, self.step_at_the_end_of(one.number)
        reached = min(first + (end - first) * max(done, 0.0) + 1e-6, end)
        return int(max(reached, self._floor) * self.scale)

    def state_dict(self) -> dict[str, Any]:
        """With the batches that were left out for a job that ends in the middle of an epoch: another may go on."""
        state = super().state_dict()
        if self.last is not None and self.last % self.per_epoch:
            epoch = int(self.last // self.per_epoch)
            left = state["left"].get(epoch, torch.tensor([], dtype=torch.int64))
            state["left"] = {
                **state["left"],
                epoch: torch.cat([left, torch.arange(self._planned(epoch), self.batches)]),
            }
            state["epoch"] = min(state["epoch"], epoch)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.plan(self.per_epoch, self.last, self.accumulate)
        if self.loader is not None:
            self.loader.iteration = self.epoch


def shared(loader: Any, method: Method, seed: int) -> DataLoader[Any] | None:
    """The same loader over work that all workers share; None where it, or the method, wants fixed shares."""
    if not isinstance(loader, DataLoader) or method.name not in ALONE or _world()[1] == 1:
        return None
    if type(loader.batch_sampler) is not BatchSampler or type(loader.sampler) not in SAMPLERS:
        return None
    try:
        made = share(loader, seed=seed)
    except ValueError:  # not every sample once
        return None
    plain: Any = made.batch_sampler
    names = ("shuffle", "seed", "drop_last", "epochs")
    work = TrainersShare(plain.samples, plain.batch_size, **{name: getattr(plain, name) for name in names})
    work.per_epoch = len(work)
    object.__setattr__(made, "batch_sampler", work)  # a loader refuses another one once it is made
    return made


def work_of(loader: Any) -> TrainersShare | None:
    found = getattr(loader, "batch_sampler", None)
    return found if isinstance(found, TrainersShare) else None
