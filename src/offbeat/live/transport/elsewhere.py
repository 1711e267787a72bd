"""Where this process is while it takes no step of ours: in a collective of the script's own, or in another optimiser.

A worker inside one cannot arrive at a partial round, and the others may need the round to get there themselves; so
rounds must not wait for it (``rounds.held`` has the rule). To know, torch's own calls are wrapped while an optimiser is
attached: the collectives of ``ProcessGroup`` and ``Work.wait``, at which all of ``torch.distributed`` arrives,
and the forward pass of DDP, whose exchange happens in C++ during backward. What is noticed is shown on the worker's
page, which costs some additions to numbers; nothing is sent. Methods of torch's classes are wrapped, not functions of
its modules: a name that a script has imported before sees no function put in later.

The time spent inside is noted in the ledgers of all optimisers that are attached, with the line that called.

Only the thread that trains is looked at: what a loader or a checkpoint does on another one holds up nobody's steps.
``_telling`` protects what is shown: it is the state of now, so that of two threads which show it at the same time the
last one is right. Without it "inside" could be shown after "outside", and stay.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.nn.parallel import DistributedDataParallel

from offbeat.basics.units import format_seconds
from offbeat.live.transport.errors import OffbeatError
from offbeat.live.transport.wait_log import THEIRS, WaitLog, kind_of

# fmt: off
COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "all_gather_single", "all_gather_single_coalesced", "alltoall",
    "alltoall_base", "all_to_all_single", "barrier", "broadcast", "gather", "monitored_barrier", "reduce",
    "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "scatter",
)
# fmt: on
SHORT_S = 20e-6  # a wait that is none
MESSAGES = ("send", "recv", "recv_anysource")

plain_wait: Callable[..., Any] = Work.wait  # as torch made it: for our own waits, which are not elsewhere

_telling = threading.RLock()  # a signal's handler may come here while its thread is here


class _Here:
    """What is known of this process."""

    def __init__(self) -> None:
        self.users: set[str] = set()  # the optimisers that are attached
        self.thread = 0  # that trains
        self.depth = 0  # calls of the script's own that it is inside
        self.waits: list[tuple[str, str, float]] = []  # in which optimiser's meetings, for what, since when
        self.in_ddp = False  # between a forward pass of DDP and our next call
        self.met: dict[str, tuple[int, tuple[int, ...]]] = {}  # meeting → how many were entered, and who takes part
        self.pages: dict[str, Callable[[dict[str, Any]], None]] = {}  # where the state of now is shown, at every change
        self.ledgers: dict[str, WaitLog] = {}  # an optimiser → where the time in such calls went
        self.parameters: dict[str, set[int]] = {}  # an optimiser → its model's parameters, by their ids
        self.not_ours: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()  # models found to have none of them
        self.undo: list[Callable[[], None]] = []

    def changed(self) -> None:
        if self.pages:
            with _telling:
                for show in list(self.pages.values()):
                    show(self.state())

    def state(self) -> dict[str, Any]:
        inside = self.depth > 0 or self.in_ddp
        where = _where()
        at = where if inside or self.waits else ""
        now_s = time.monotonic()
        return {"inside": inside, "at": at, "waits": self.waits, "met": self.met, "last": where, "since": now_s}


_here = _Here()


# What is asked.


def inside() -> bool:
    """Whether this process is in a call of the script's own."""
    return _here.depth > 0 or _here.in_ddp


def in_words() -> str:
    """What the thread that trains is doing, for those who wait for it."""
    for _, what, since_s in reversed(list(_here.waits)):
        return f"waits for {what}, since {format_seconds(time.monotonic() - since_s)}"
    where = f", at {at}" if (at := _where()) else ""
    return f"is in a collective of the script's own{where}" if inside() else f"is busy{where}"


def _where() -> str:
    """The line of the script at which the thread that trains is."""
    own = threading.get_ident() == _here.thread  # the rule, and cheaper
    frame = sys._getframe(1) if own else sys._current_frames().get(_here.thread)
    while frame is not None and kind_of(frame.f_code.co_filename) != THEIRS:
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def shown(name: str, show: Callable[[dict[str, Any]], None] | None) -> None:
    """Call ``show`` with the state of now, and after every change from now on; None: no longer."""
    with _telling:
        _here.pages.pop(name, None)
        if show is not None:
            _here.pages[name] = show
            show(_here.state())


# What is noted.


def attached(name: str, ledger: WaitLog, parameters: Iterable[torch.Tensor]) -> None:
    """An optimiser of these parameters is attached by this thread; all ranks begin to count now.

    ``ledger``: notes time from now on.
    """
    _here.parameters[name] = {id(parameter) for parameter in parameters}
    _here.not_ours.clear()
    _here.thread = threading.get_ident()
    if not _here.users:
        _wrap()
    _here.users.add(name)
    _here.ledgers[name] = ledger


def holds(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether an optimiser that is attached has any of these parameters in its model."""
    held = set[int]().union(*_here.parameters.values())
    return any(id(parameter) in held for parameter in parameters)


def released(name: str) -> None:
    """The optimiser called ``name`` has ended."""
    _here.users.discard(name)
    _here.ledgers.pop(name, None)
    _here.parameters.pop(name, None)
    if not _here.users:
        for undo in _here.undo:
            undo()
        _here.undo.clear()
        _here.met.clear()
        _here.in_ddp = False


def stepping() -> None:
    """The worker is in a call of ours again."""
    if _here.in_ddp:
        _here.in_ddp = False
        _here.changed()


def count(name: str, ranks: tuple[int, ...]) -> None:
    """One more meeting of this name is entered; so do all of ``ranks``, each as often."""
    _here.met[name] = _here.met.get(name, (0, ()))[0] + 1, ranks
    if _here.pages:
        _here.changed()


@contextmanager
def waiting(name: str, what: str) -> Iterator[None]:
    """The thread that trains waits in a meeting of the optimiser ``name``."""
    if threading.get_ident() != _here.thread:
        yield
        return
    _here.waits.append((name, what, time.monotonic()))
    _here.changed()
    try:
        yield
    finally:
        _here.waits.pop()
        _here.changed()


# What is wrapped.


def _wrap() -> None:
    for name in COLLECTIVES:
        _put(ProcessGroup, name, lambda method: _noticed(method, _group_key))
    for name in MESSAGES:
        _put(ProcessGroup, name, lambda method: _noticed(method, _own_key))
    _put(Work, "wait", lambda method: _noticed(method, None))
    _put(DistributedDataParallel, "forward", _noticed_forward)


def _put(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    before = vars(owner).get(name)  # as it lies there: what getattr gives of torch's C++ methods no longer binds
    if before is None:  # another version of torch
        return
    method = getattr(owner, name)
    ours = functools.wraps(method)(wrap(method))
    setattr(owner, name, ours)

    def undo() -> None:
        if vars(owner).get(name) is ours:  # else somebody has wrapped it since, and calls us: we only pass on then
            setattr(owner, name, before)

    _here.undo.append(undo)


def _noticed(method: Any, key: Callable[[Any], str] | None) -> Any:
    """``method`` of a group, which enters a meeting, or without a ``key`` of a work, which waits for one."""
    what = str(method.__name__)

    def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
        here = _here
        if threading.get_ident() != here.thread:
            return method(owner, *args, **kwargs)
        if key is not None:
            name = key(owner)
            known = here.met.get(name)
            here.met[name] = (known[0] + 1, known[1]) if known else (1, _ranks(owner))
        here.depth += 1
        if here.pages:
            here.changed()
        start_s = time.perf_counter()
        try:
            return method(owner, *args, **kwargs)
        finally:
            took_s = time.perf_counter() - start_s
            here.depth -= 1
            if here.pages:
                here.changed()
            # Inside another one it is part of a call that is noted; and most waits are for what is there already.
            if not here.depth and (key is not None or took_s > SHORT_S):
                for ledger in here.ledgers.values():
                    ledger.note(what, sys._getframe(1), took_s)

    return call


def _noticed_forward(forward: Any) -> Any:
    """DDP waits for the others in backward, out of our sight: so the worker is elsewhere until it comes to us again."""

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        here = _here
        if threading.get_ident() != here.thread:
            return forward(module, *args, **kwargs)
        _refuse_ours(module)
        count(f"{_group_key(module.process_group)}/ddp", _ranks(module.process_group))
        here.in_ddp = True
        here.changed()
        try:
            return forward(module, *args, **kwargs)
        finally:
            here.in_ddp = torch.is_grad_enabled() and bool(module.require_backward_grad_sync)
            here.changed()

    return call


def _refuse_ours(module: DistributedDataParallel) -> None:
    """An attached model that is called through DDP would be averaged by both."""
    if module in _here.not_ours or not (torch.is_grad_enabled() and module.require_backward_grad_sync):
        return
    if holds(module.module.parameters()):
        raise OffbeatError(
            "the attached model is called through DistributedDataParallel, which averages its gradients too; call the "
            "model itself, and remove the line that wraps it: model = DistributedDataParallel(model, …)"
        )
    _here.not_ours.add(module)


def _group_key(group: Any) -> str:
    return f"group {group.group_name}"


def _own_key(group: Any) -> str:
    """A message between two is not matched by one of the same number: nobody else counts under this name."""
    return f"message {group.group_name} {group.rank()}"


def _ranks(group: Any) -> tuple[int, ...]:
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return tuple(range(dist.get_world_size()))
