"""One worker's side of a method: its weights, its optimiser step, its steps, what it must remember."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from offbeat.method.effects import Next, Turn
from offbeat.method.facts import Reported
from offbeat.method.moments import Moments, as_of_the_mean
from offbeat.runs.talking import Talking
from offbeat.tensors.codec import Codec, sent_to
from offbeat.tensors.layout import Slot
from offbeat.tensors.vector import Vec, pack
from offbeat.topology.hierarchy import Nodes

OWN = ("lost", "e")  # in a method's memory: what coding has lost, which is not sent twice


class Replica:
    """What a method calls ``me``.

    - ``x``: the weights. ``model``: the weights together with floating buffers, such as BatchNorm statistics. Both are
      the live memory of the model, so ``me.x.copy_(…)`` changes it.
    - ``horizon``: the number of steps of the run, where that is known.
    - ``hosts``: on how many hosts the workers are. On one, vectors do not travel.
    - ``parameters``: how many the weights consist of, where gradients say which of them they used.
    - ``slots``: where each of these lies. ``sizes``: the bytes of each, which may be more than what lies here.
    - ``whole``: if this is a shard of a model, it makes sums over the shard sums over all of the model.
    - ``held``: what of a tensor lies here.
    - ``memory``: the method's own (``recall``).
    - ``reported``: what runtimes read.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        x: Vec,
        buffers: Vec,
        update: Callable[[Vec], None],
        groups: Callable[[], list[dict[str, Any]]],
        seed: int = 0,
        horizon: int | None = None,
        after: Callable[[], None] = lambda: None,
        parameters: int = 0,
        states: Callable[[], Mapping[Any, Mapping[str, Any]]] = dict,
        slots: Sequence[Slot] = (),
        sizes: Sequence[int] = (),
        whole: Callable[[Vec], Vec] = lambda v: v,
        held: Callable[[Any], Tensor] = lambda tensor: tensor,
        hosts: int = 1,
    ) -> None:
        self.rank, self.size, self.seed, self.horizon, self.hosts = rank, size, seed, horizon, hosts
        self.x, self.parameters = x, parameters
        self.model = pack(x, buffers) if buffers.parts else x
        self.t = 0
        self.memory = SimpleNamespace()
        self.spared = ""  # the codec that was asked for and not needed
        self.reported = Reported()
        self._update = update
        self._groups, self._after, self._states, self._slots = groups, after, states, tuple(slots)
        self._sizes, self._whole, self._held = tuple(sizes), whole, held

    @property
    def lr(self) -> float:
        """The inner optimiser's learning rate now (its first parameter group's)."""
        groups = self._groups()
        return float(groups[0]["lr"]) if groups else 0.0

    def step(self, g: Vec | None, lr_scale: float = 1.0, mean_of: int = 1) -> None:
        """Let the inner optimiser take a step with gradient ``g``; without one, nothing moves (momentum neither).

        ``lr_scale`` multiplies the learning rate for this step. ``mean_of``: Adam divides by the squares that the mean
        of so many workers' gradients has (`offbeat.method.moments.as_of_the_mean`).
        """
        if g is None:
            return
        groups = () if lr_scale == 1.0 else self._groups()
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * lr_scale
        if mean_of == 1:
            self._update(g)
        else:
            with as_of_the_mean(mean_of, self._groups(), self._states()):
                self._update(g)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        self._after()

    def sends(self, codec: Codec | None) -> Codec | None:
        """The codec of what is sent: None where nothing leaves a host. Memory is quicker than any code, and exact."""
        sent = sent_to(codec, self.hosts - 1)
        if codec is not None and sent is None and self.size > 1:
            self.spared = codec.name
        return sent

    def moments(self, order: int) -> Moments:
        """A copy of the inner optimiser's averages of gradients (``order`` 1) or of their squares (2), as a vector."""
        return Moments(order, self.x, self._groups(), self._states(), self._held)

    def tensors(self, v: Vec) -> list[Vec]:
        """``v``, which is like the weights, as the model's tensors: views, in the model's order. (A phantom is one.)"""
        if not v.parts:
            return [v]
        if not self._slots:
            return [Vec((p,)) for p in v.parts]
        return [Vec((v.parts[s.part][s.offset : s.offset + s.numel],)) for s in self._slots]

    def tensor_bytes(self) -> list[int]:
        """How large each of the model's tensors is, whole."""
        return list(self._sizes) or [v.nbytes for v in self.tensors(self.x)]

    def square_norm(self, v: Vec) -> Vec:
        """‖v‖² in float64, as a vector of one number, so that it can be mixed.

        Of ``v`` over the whole model, also where ranks hold it in shards: all of them ask for it then.
        """
        return self._whole(v.square_norm())

    def steps(self) -> Steps:
        """The steps of the run, from where it stands (after a resume not from 0); everybody takes all of them."""
        return Steps(self, None)

    def own_steps(self, per_node: int = 1) -> Steps:
        """The steps this worker, or one of its node, has data for: no turns are taken for the sake of others."""
        nodes = Nodes(self.size, per_node)
        return Steps(self, nodes.ranks(nodes.of(self.rank)))

    def release(self) -> None:
        """The run is over: let go of the weights' memory. What the method remembers stays, for a checkpoint."""
        self.x = self.model = Vec(())
        self._update, self._states, self._whole = lambda g: None, dict, lambda v: v

    def go_on_as(self, other: Replica) -> None:
        """As a twin of another worker, which is between two steps and holds the same weights by now."""
        self.t, self.spared = other.t, other.spared
        self.reported = replace(other.reported, talking=self.reported.talking)
        for name, value in vars(other.memory).items():
            setattr(self.memory, name, _copied(value, as_nothing=name in OWN))

    def recall(self, **first: Any) -> SimpleNamespace:
        """What this method remembers across a checkpoint: numbers, ``None``, vectors, and lists of these.

        The arguments are the values at the very beginning.
        """
        for name, value in first.items():
            if not hasattr(self.memory, name):
                setattr(self.memory, name, value)
        return self.memory

    def report(
        self,
        *,
        period: int | None = None,
        micro_batches: int | None = None,
        samples_used: Sequence[int] | None = None,
        talking: Talking | None = None,
        coded: str | None = None,
    ) -> None:
        """Tell whoever looks how the run goes (``Reported``); what is left out stays as it was told last."""
        told = self.reported
        self.reported = replace(
            told,
            period=told.period if period is None else period,
            micro_batches=told.micro_batches if micro_batches is None else micro_batches,
            samples_used=told.samples_used if samples_used is None else tuple(samples_used),
            talking=told.talking if talking is None else talking,
            coded=told.coded if coded is None else coded,
        )


class Steps:
    """``async for t in me.steps()``. The step counter moves on when the body of the loop is through."""

    __slots__ = ("_among", "_begun", "_me")

    def __init__(self, me: Replica, among: tuple[int, ...] | None) -> None:
        self._me, self._among, self._begun = me, among, False

    def __aiter__(self) -> Steps:
        return self

    async def __anext__(self) -> int:
        if self._begun:
            self._me.t += 1
        self._begun = True
        if await Next(self._me.t, self._among) is Turn.STOP:
            raise StopAsyncIteration
        return self._me.t


def _copied(value: Any, as_nothing: bool) -> Any:
    if isinstance(value, list):
        return [_copied(one, as_nothing) for one in value]
    if isinstance(value, Vec):
        return value.zeros_like() if as_nothing else value.clone()
    return value
