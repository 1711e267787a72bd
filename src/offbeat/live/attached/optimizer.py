"""``Attached``: the user's optimiser, whose step is a method's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from offbeat.live.attached.cutting import MicroBatches, batches
from offbeat.live.attached.summary import Summary
from offbeat.live.attached.training import Training
from offbeat.live.host.status import JobStatus
from offbeat.live.transport import notice
from offbeat.live.transport.errors import OffbeatError, PeerFailed
from offbeat.live.work import share
from offbeat.live.work.follow import OwnRates
from offbeat.method.replica import Replica
from offbeat.method.strategy import Method
from offbeat.runs.trace import Trace

P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V", float, torch.Tensor)

MOST_OF_A_MEAN = 4096  # numbers


def _over_when_a_peer_fails(method: Callable[Concatenate[Attached, P], T]) -> Callable[Concatenate[Attached, P], T]:
    """A run that has lost a peer is over: it has left, and given its memory back, before the user hears of it. So is
    one whose process is asked to end.
    """

    method = notice.heeding(method)

    @functools.wraps(method)
    def call(self: Attached, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except PeerFailed as error:
            self._run.abandon(f"{type(error).__name__}: {error}")
            raise

    return call


class Attached(torch.optim.Optimizer):
    """A torch optimiser whose ``step`` is one step of a method. It shares ``param_groups`` and ``state`` with yours.

    ``finish()`` (or the end of a ``with`` block) ends the run on all ranks with equal weights. ``average()`` makes them
    equal during a run. After ``leave()`` the others go on without this worker.
    """

    def __init__(self, inner: torch.optim.Optimizer, method: Method, run: Training) -> None:
        # torch's own __init__ would add the parameters anew; what it sets up is shared with the inner optimiser.
        self.inner, self.method, self._run, self._schedule = inner, method, run, OwnRates(inner, run.name)

    @property
    def strategy(self) -> Method:
        """Another name of ``method``."""
        return self.method

    # What a torch optimiser has.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def __repr__(self) -> str:
        return f"{self.method} on rank {self.rank} of {self.size} over {self.inner!r}"

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._run.stepping.gradients.forget_backwards()
        share.thrown_away()
        self._run.stepping.stream.forget()
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise OffbeatError("parameters cannot be added after attach; give them to the optimizer before it")

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.inner.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.inner.register_step_post_hook(hook)

    @notice.heeding
    def state_dict(self) -> dict[str, Any]:
        """The inner optimiser's state and, under "offbeat", the method's. It communicates nothing.

        With methods that do not wait (``eager``, ``wagma``, ``ad_psgd``) rounds are under way at any moment: call
        ``average()`` on all ranks before, and nothing is lost or applied twice.
        """
        return {**self.inner.state_dict(), "offbeat": self._run.saved()}

    @notice.heeding
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume a run from ``state_dict``.

        Load this rank's model after ``attach`` too, which gives all ranks the weights of rank 0.
        """
        rest = dict(state_dict)
        own = rest.pop("offbeat", None)
        if own is not None:  # first, as it may refuse: then nothing is loaded
            self._run.restore(own)
        if rest or own is None:  # else only the method's, as where the inner one was loaded by itself
            self.inner.load_state_dict(rest)

    @_over_when_a_peer_fails
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the method with the gradients that backward left in ``p.grad``."""
        self._run.refuse_if_over("step()")
        if self._run.is_sharded and share.used_by(self._run.name) is not None:
            raise OffbeatError(
                "ob.share gives every rank as many batches as it can take, but the ranks of a sharded model must take "
                "equally many; use a DistributedSampler"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        share.stepping(self._run.name)
        self._run.stepping.end()
        share.stepped(self._run.name)
        # A scheduler that was made on the inner one asks it whether it has stepped: with late=1 it has not yet.
        self.inner._opt_called = True  # type: ignore[attr-defined]
        self._run.took_step()
        self._run.stats.stepped(self)
        self._schedule.stepped()
        return loss

    # What Offbeat adds.

    @property
    def rank(self) -> int:
        """Which worker this is, from 0."""
        return self.me.rank

    @property
    def size(self) -> int:
        """How many workers there were at the beginning."""
        return self.me.size

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of those who are left: all of them, unless some have died and the run goes on (``min_workers``)."""
        return self._run.members

    @property
    def begun_at(self) -> int:
        """The step with which this worker began: 0, unless its process was started again and took over a replica.

        A loop that counts steps begins there: ``for step in range(optimizer.begun_at, steps)``.
        """
        return self._run.begun_at

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, well or not."""
        return self._run.is_over

    @property
    def me(self) -> Replica:
        """This worker, as the method knows it."""
        return self._run.me

    @property
    def wait_s(self) -> float:
        """Seconds this worker has spent waiting for the network and the others, in what Offbeat does."""
        return self._run.wait_s

    @property
    def wire_bytes(self) -> int:
        """Bytes this worker has sent."""
        return self._run.wire_bytes

    @property
    def carriers(self) -> tuple[str, ...]:
        """The ways this worker's vectors go: "shm", "ipc" (memory that ranks share), "tcp" (to other hosts), "nccl"."""
        return tuple(sorted(self._run.transport.carriers))

    @property
    def trace(self) -> Trace:
        """The partial rounds this worker took part in: who was fresh, how stale the others were, how long it waited."""
        return self._run.endpoints.trace

    @property
    def lost(self) -> list[int]:
        """The steps of this worker whose gradients were dropped (``ringmaster``, ``eager(stale="drop")``)."""
        return self._run.endpoints.lost

    @property
    def step_times_s(self) -> list[list[float]]:
        """Of each worker, its own seconds (all but waiting) in each step after the first: known after ``finish()``.

        ``ob.delays.trace(optimizer)`` turns them into step times for ``ob.simulate``. Of a long run these are the last
        steps.
        """
        return self._run.stats.everyones_s(self.size)

    def summary(self) -> Summary:
        """A table of this worker's times and, after ``finish()``, of all workers', with a sentence on who is slow."""
        return self._run.stats.summary(self)

    def status(self) -> JobStatus:
        """What every worker is doing now, who is late and who waits for it, rounds, memory and other hosts.

        ``offbeat status`` shows the same. The host process answers, which asks no worker: so this also works while
        others hang, and from another thread while this worker does. It does not disturb the training. Raises
        ``OffbeatError`` if the host process does not answer within a few seconds.
        """
        return self._run.status()

    @_over_when_a_peer_fails
    def micro_batches(self, batch: Any, cost: Callable[[Any], float] | None = None) -> MicroBatches:
        """Cut ``batch`` for ``nonblocking``: micro-batches until the others move on; the rest comes first next time.

        A batch is a tensor, or a tuple, list or dict of tensors with one row a sample. ``cost`` cuts by the cost of
        samples instead of their number: its argument is one sample, a batch without its first dimension. The loss of a
        micro-batch must be the mean over its samples. A micro-batch without a ``backward`` does not count.
        """
        self._run.refuse_if_over("micro_batches()")
        asks, stream = self._run.stepping.batch(), self._run.stepping.stream
        stream.add(batch, cost)
        return stream.open(asks)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """A loader's batches for ``micro_batches``; new data is fetched only when the leftovers do not make a round."""
        return batches(self._run.stepping.stream, lambda: self.me.reported.micro_batches, loader)

    @property
    def samples_used(self) -> list[int]:
        """How many samples each worker has contributed (``nonblocking``): epochs and schedules count their sum.

        A worker uses its samples in order, so a resumed one goes on after its first ``samples_used[rank]``. Along a
        graph, the counts of the others are those of the round before.
        """
        return list(self.me.reported.samples_used)

    @_over_when_a_peer_fails
    def average(self) -> None:
        """Make all replicas equal now (weights and buffers), to evaluate or to save. Every rank must call it."""
        self._run.refuse_if_over("average()")
        self._run.average()

    @_over_when_a_peer_fails
    def mean(self, value: V) -> V:
        """The mean over all workers of a number or a small tensor, to log or to decide by.

        Every worker calls it equally often, between two steps. It waits for all workers but the dead and those that
        have finished; rounds of others do not wait meanwhile. The mean is the same on all.
        """
        self._run.refuse_if_over("mean()")
        numbers = value.detach().double().reshape(-1).tolist() if isinstance(value, torch.Tensor) else [float(value)]
        if len(numbers) > MOST_OF_A_MEAN:
            raise ValueError(
                f"mean() was given {len(numbers)} numbers; give it at most {MOST_OF_A_MEAN}, what one logs"
            )
        found = self._run.mean(numbers)
        if isinstance(value, torch.Tensor):
            like = value.detach()
            kind = like.dtype if like.is_floating_point() else torch.get_default_dtype()
            return torch.tensor(found, dtype=kind, device=like.device).reshape(like.shape)
        return found[0]

    @_over_when_a_peer_fails
    def full_state_dict(self) -> dict[str, Any]:
        """The averaged model, as ``torch.save``, safetensors' ``save_file`` and ``load_state_dict`` take it.

        It has the names of ``model.state_dict()``. Each tensor is a copy, which later steps do not change; tied weights
        are one tensor under both names. It calls ``average()``, so every rank must call it; after ``finish()`` any rank
        may. Of a sharded model it has the full tensors, gathered one after the other into host memory: all ranks of an
        island call it, also after the end; the first one gets the tensors, the others an empty dict.
        """
        return self._run.full_state()

    @_over_when_a_peer_fails
    def finish(self) -> None:
        """End the run: answer the others until all have finished, apply what is under way, make all replicas equal.

        A second call does nothing. A call during an exception, as in a ``finally:``, ends the run on all ranks with the
        words of that exception, as the ``with`` block does.
        """
        self._run.finish()

    @_over_when_a_peer_fails
    def leave(self) -> None:
        """Leave the run before its end, and let the others go on. It waits for nobody.

        What this worker has handed in counts, as after a death; its steps since the last exchange are lost to the
        others. The model keeps this worker's own weights. It needs ``min_workers``: if too few are left, the run ends
        for the others with an error. Call it between two steps; afterwards ``finish()`` does nothing.
        """
        self._run.leave()

    def __enter__(self) -> Attached:
        return self

    @notice.heeding
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        else:
            self._run.abandon(f"{type(error).__name__}: {error}")
