"""``init`` and ``attach``: how a run begins."""

from __future__ import annotations

import itertools
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from offbeat.basics.checks import whole
from offbeat.basics.units import format_ranks
from offbeat.basics.warn import warn
from offbeat.live.attached import refusals as checks
from offbeat.live.attached.arguments import Arguments, OnError
from offbeat.live.attached.finite import Nonfinite
from offbeat.live.attached.optimizer import Attached
from offbeat.live.attached.recorder import NoRecorder, Recorder
from offbeat.live.attached.stats import Log
from offbeat.live.attached.training import Training
from offbeat.live.transport import ending, hosts, no_group, notice, processes
from offbeat.live.transport.errors import ConfigMismatch, OffbeatError, PeerFailed
from offbeat.live.transport.meeting import meet
from offbeat.live.worker.board import Board
from offbeat.method.strategy import Method
from offbeat.strategies import as_method

_number = itertools.count()

TIMEOUT = timedelta(seconds=1800)  # of the script's own collectives in a group that we make


class _World:
    """The default group, if ``init`` made it: it ends with the last optimiser that was attached to it."""

    made = False
    users = 0
    generation = 0
    store: Store | None = None  # met once; a second meeting at the same port could find the first one's host

    @classmethod
    def make(cls, patience_s: float) -> None:
        rank, size, backend = 0, 1, "gloo"
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            cls.store = cls.store or _store(rank, patience_s)
        store = cls.store or HashStore()
        store = PrefixStore(f"offbeat/world/{cls.generation}", store)
        if hosts.returns() and store.check([f"here/{rank}"]):  # with a worker whose place this one takes
            no_group.init(store, rank, size)
            cls.made, cls.generation = True, cls.generation + 1
            return
        meet(store, rank, size, str(size), patience_s, judge=_check_sizes, missing=_did_not_start)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        cls.made, cls.generation = True, cls.generation + 1

    @classmethod
    def let_go(cls) -> None:
        cls.users -= 1
        if cls.made and cls.users == 0:
            cls.made = False
            dist.destroy_process_group()


def _store(rank: int, patience_s: float) -> Store:
    """The job's store. A world of one is asked for, so that it waits for nobody: `meet` knows whom to name."""
    timeout = timedelta(seconds=max(patience_s, 1.0))
    try:
        store: Store = next(iter(rendezvous("env://", rank, 1, timeout=timeout)))[0]
    except dist.DistNetworkError as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        if rank == 0:
            raise OffbeatError(
                f"rank 0 cannot listen at {place} (MASTER_ADDR, MASTER_PORT): {error}; choose another port"
            ) from error
        raise PeerFailed(
            f"nobody answers at {place} (MASTER_ADDR, MASTER_PORT), where rank 0 should be, for {patience_s:g} s; "
            "has it been started, and can this host reach it?"
        ) from error
    return store


def _did_not_start(absent: list[int], waited_s: float, ended: bool) -> PeerFailed:
    return PeerFailed(
        f"{format_ranks(absent)} did not come within {waited_s:g} s; start as many processes as WORLD_SIZE says, each "
        "with a RANK of its own"
    )


def _check_sizes(posted: dict[int, str], size: int) -> None:
    """Every rank has posted its WORLD_SIZE."""
    for rank, theirs in sorted(posted.items()):
        if int(theirs) != size:
            own = next(rank for rank, one in posted.items() if int(one) == size)
            raise ConfigMismatch(
                f"rank {own} was started with WORLD_SIZE={size}, rank {rank} with WORLD_SIZE={theirs}; start all "
                "processes of a job with the same one"
            )


def init(timeout_s: float = 1800.0) -> torch.device:
    """Join the job, and return the device on which this rank trains: ``model.to(ob.init())``.

    It starts ``torch.distributed`` if the script has not: from torchrun's environment, or as a single worker without
    one. With CUDA, the device is the GPU with this rank's number on its host (``LOCAL_RANK``, or else its rank), and
    becomes torch's current one. More ranks than GPUs share them. If the script has used CUDA already, as by
    ``torch.cuda.set_device``, the device stays the one it has chosen. Without CUDA it is the CPU. A second call returns
    the same. ``timeout_s``: how long it waits for the other ranks.
    """
    _join(timeout_s)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if not torch.cuda.is_initialized():  # to ask for the current device is to have chosen the first one
        torch.cuda.set_device(_number_on_host(dist.get_rank()) % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def _join(patience_s: float) -> None:
    """The group alone: whoever attaches has put the model where it is to be."""
    ending.watch()
    if not dist.is_initialized():
        _World.make(patience_s)
    processes.make_known()


def _number_on_host(otherwise: int) -> int:
    return int(os.environ.get("LOCAL_RANK", otherwise))


def _warn_of_first_gpu(model: nn.Module) -> None:
    """``.to("cuda")`` without a device that was chosen is the first GPU, on every rank."""
    number, first = _number_on_host(0), torch.device("cuda", 0)
    if number and all(p.device == first for p in model.parameters()):
        gpus = torch.cuda.device_count()
        if gpus > 1 and number % gpus:
            warn(
                f"the model of local rank {number} is on cuda:0, as that of local rank 0, and there are {gpus} GPUs; "
                "move it to this rank's own before the optimizer is made: device = ob.init(), then model.to(device)"
            )


def _warn_of_late_gradients(optimizer: torch.optim.Optimizer, method: Method) -> None:
    """Of an older gradient Adam's step is too long: a loss that stands on a plateau may stay there."""
    if method.facts.late_gradients and any("betas" in group for group in optimizer.param_groups):
        warn(
            f"{method.name} applies gradients that are a step old or older, and {type(optimizer).__name__} may not get "
            "off a plateau with them, whatever the learning rate (docs/late-gradients.md); leave the method out, use "
            'ob.eager() with late=0 and grace="auto", or train with SGD'
        )


def _least(wanted: int | None, size: int) -> int:
    """With how many workers the run goes on; 0: with all alone, and it was not asked for anything else."""
    if wanted is None:
        said = os.environ.get("OFFBEAT_MIN_WORKERS", str(size))
        if not said.isdecimal():
            raise ValueError(f"OFFBEAT_MIN_WORKERS is {said!r}, but must be a whole number of at least 1")
        wanted = min(int(said), size)
    if whole("attach: min_workers", wanted, 1) > size:
        raise ValueError(f"attach: min_workers is {wanted}, and there are {size} workers; ask for at most so many")
    return wanted if wanted < size else 0


def _check_on_error(on_error: str, least: int, size: int) -> None:
    if on_error not in ("stop", "leave"):
        raise ValueError(f'attach: on_error is {on_error!r}; use "stop" or "leave"')
    if on_error == "leave" and not least and size > 1:
        raise ValueError(
            f'attach: on_error="leave" lets the others go on, and this run needs all its {size} workers; say with how '
            "many it may go on: min_workers=1"
        )


@notice.heeding  # with another run under way
def attach(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    method: Method | str | None = None,
    *,
    max_norm: float | None = None,
    accumulate: int = 1,
    steps: int | None = None,
    seed: int = 0,
    patience_s: float = 1800.0,
    log: Log | None = None,
    record: str | Path | Recorder | None = None,
    mesh: DeviceMesh | None = None,
    min_workers: int | None = None,
    on_error: OnError = "stop",
    frozen_s: float | None = None,
    nonfinite: Nonfinite = "skip",
    checkpoint: str | Path | None = None,
    every_s: float = 600.0,
    resume: str | Path | None = None,
    strategy: Method | str | None = None,
) -> Attached:
    """Let ``method`` decide what each ``optimizer.step()`` exchanges. Every rank must call it.

    The default is ``self_clocked()``: nobody waits, and workers exchange as often as the network permits. Another
    method is ``ob.wagma(tau=5)``, or as text, as on the command line, ``"wagma:tau=5"``.

    All ranks get rank 0's parameters and buffers.

    Args:
        optimizer: A torch optimizer of the model's parameters.
        model: The model, on its device, and not wrapped.
        method: What each step exchanges.
        max_norm: Clips the gradient that the inner optimiser gets.
        accumulate: How many ``backward()`` calls make a step.
        steps: The number of steps of the run, for methods that plan ahead.
        seed: Seeds the method's own random choices.
        patience_s: The longest wait for another worker before the run ends with an error.
        log: Gets the numbers of every step: a ``SummaryWriter``, or anything with its ``add_scalar(tag, value, step)``.
        record: A folder into which each rank writes the order of events at the end; ``ob.replay`` runs it again, if
            model, data and optimiser are those of a ``Task``.
        mesh: The ranks over which ``fully_shard`` has spread the model, which are one worker. By default they are read
            from the parameters.
        min_workers: A worker whose process dies is left behind, and the others go on as long as so many are left;
            without it any death ends the run. Under ``offbeat launch`` the default is 1.
        on_error: An exception that ends the script of one worker ends the run for all (``"stop"``), or is a death, and
            the others go on (``"leave"``).
        frozen_s: A worker whose process is stopped (SIGSTOP, a debugger) for longer is killed, and the others go on.
            By default methods in step wait for it.
        nonfinite: A gradient with a NaN or an infinity in it counts as zero, with a warning (``"skip"``), or ends the
            run (``"stop"``).
        checkpoint: A folder for checkpoints, which are written while the workers train: their averaged model, the
            optimizer's state, the step.
        every_s: The seconds between two checkpoints.
        resume: A folder of checkpoints: the run begins with the newest whole one, if there is one, at step
            ``begun_at``. ``offbeat launch --resume`` does the same.
        strategy: Another name of ``method``.
    """
    if isinstance(optimizer, Attached):
        raise ValueError(f"this optimizer is attached already, with {optimizer.method}; attach the inner one only once")
    checks.check(optimizer, model, strategy if method is None else method)
    method = as_method(method, strategy)
    whole("attach: accumulate", accumulate, 1)
    _join(patience_s)
    if dist.get_world_size() > 1:
        _warn_of_late_gradients(optimizer, method)
    if nonfinite not in ("skip", "stop"):
        raise ValueError(f'attach: nonfinite is {nonfinite!r}; use "skip" or "stop"')
    if not 0 < every_s < float("inf"):
        raise ValueError(f"attach: every_s is {every_s}; use a number of seconds")
    number = next(_number)
    least = _least(min_workers, dist.get_world_size())
    _check_on_error(on_error, least, dist.get_world_size())
    if frozen_s is not None and not 0 < frozen_s < float("inf"):
        raise ValueError(f"attach: frozen_s is {frozen_s}; use a number of seconds, or None")
    if frozen_s is not None and not least and dist.get_world_size() > 1:
        raise ValueError("attach: frozen_s kills workers that are stopped, and this run needs all; add min_workers=1")
    _warn_of_first_gpu(model)
    store = dist.distributed_c10d._get_default_store()
    name = f"offbeat/{number}"
    board = Board(store, name, dist.get_rank(), dist.get_world_size(), min_workers=least, frozen_s=frozen_s)
    recorder = NoRecorder() if record is None else record if isinstance(record, Recorder) else Recorder(record)
    saves = None if checkpoint is None else Path(checkpoint).resolve()
    begins = hosts.resumes() if resume is None and number == 0 else resume
    given = Arguments(
        max_norm,
        accumulate,
        steps,
        seed,
        patience_s,
        log,
        recorder,
        mesh,
        least,
        on_error,
        frozen_s,
        nonfinite,
        saves,
        every_s,
        begins,
    )
    run = Training(optimizer, model, method, board, given, _World.let_go)
    _World.users += 1
    if run.is_sharded:
        _World.made = False  # the model's own groups lie in it, and the model is there after the run
    return Attached(optimizer, method, run)
