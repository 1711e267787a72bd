"""Local worker processes, started and watched by torchrun's own machinery."""

from __future__ import annotations

import logging
import math
import multiprocessing.process
import os
import pickle
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from offbeat import delays as delays_
from offbeat.basics import checks
from offbeat.delays import Seconds
from offbeat.live.job import worker
from offbeat.live.job.scripts import one_host
from offbeat.live.job.steplog import Status
from offbeat.live.job.worker import STATUS, Job, read_statuses
from offbeat.live.transport.errors import PeerFailed
from offbeat.method.strategy import Method
from offbeat.runs.result import LiveRun
from offbeat.tasks.task import Task

__all__ = ["LiveRun", "launch", "launch_all"]

AGAIN_S = 3.0  # for a run to end after Ctrl-C, before it is asked again
LOOK_S = 0.1


def launch(
    method: Method,
    task: Task,
    *,
    workers: int,
    steps: int,
    seed: int = 0,
    delays: Seconds | None = None,
    compute_s: Seconds | None = None,
    progress: Callable[[int], None] | None = None,
    shared: bool = False,
    record: bool = False,
) -> LiveRun:
    """Train ``task`` under ``method`` in ``workers`` processes of this machine, ``steps`` steps each.

    ``shared``: the job takes as many in all, whoever is free takes the next, and the task's schedule follows the job.

    ``delays`` are slept before each step's computation, ``compute_s`` on top, as a stand-in for a larger model:
    numbers, distributions (``ob.delays``) or importable functions of (step, rank). ``progress`` is called from another
    thread with the number of steps that the workers have done on average. Each process computes with one thread unless
    ``OMP_NUM_THREADS`` says otherwise. A script that calls this needs the usual ``if __name__ == "__main__":``.

    ``record`` keeps what decides the run, in ``run.order``.

    What the workers write to stderr is dropped unless one of them fails without a word of its own.
    """
    checks.workers(workers)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"steps={steps!r} cannot end a run; use a whole number, 0 or more")
    for what, spec in (("delays", delays), ("compute_s", compute_s)):
        delays_.bind(spec, seed=seed, workers=workers, what=what)  # for its sentences, before anything is started
    job = Job(method, task, steps, seed, delays, compute_s, shared, record)

    told = -1

    def watch(statuses: Sequence[Status]) -> None:
        nonlocal told
        mean = sum(status.step for status in statuses) // workers
        if progress is not None and mean != told:
            told = mean
            progress(mean)

    (run,) = launch_all([job], workers, watch)
    return run


def launch_all(
    jobs: Sequence[Job],
    workers: int,
    watch: Callable[[Sequence[Status]], None] | None = None,
    done: Callable[[int, LiveRun], None] | None = None,
) -> list[LiveRun]:
    """Run jobs one after the other in the same processes, which are started once.

    ``watch`` hears from another thread, several times a second, where each worker stands, and ``done`` of every run
    that is finished: also of those that were finished before a failure or Ctrl-C.
    """
    payload = _packed(jobs)
    runs: dict[int, LiveRun] = {}
    with tempfile.TemporaryDirectory(prefix="offbeat-") as place:
        folder = Path(place)
        (folder / "status").write_bytes(STATUS.pack(-1, 0, 0, -1, float("nan")) * workers)

        def look() -> None:
            statuses = read_statuses(folder / "status")  # first: where rank 0 is at the next job, its run is written
            while (file := folder / f"run-{len(runs)}").exists():
                number = len(runs)
                runs[number] = pickle.loads(file.read_bytes())
                if done is not None:
                    done(number, runs[number])
            if watch is not None:
                watch(statuses)

        with _environment(), _quiet(), _signals(), _watched(look, (folder / "status").read_bytes, workers):
            try:
                elastic_launch(_config(workers, place), worker.entry)(payload, place)
            except ChildFailedError as error:
                raise PeerFailed(_why(error, folder)) from None
            except SignalException as error:
                if error.sigval == signal.SIGINT:
                    raise KeyboardInterrupt from None
                raise SystemExit(128 + error.sigval) from None
    return [runs[number] for number in range(len(jobs))]


def _config(workers: int, place: str) -> LaunchConfig:
    """Made where the environment is ours: it reads there how long a worker may take to end."""
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=LOOK_S,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=place, redirects=Std.ERR),
    )


def _packed(jobs: Sequence[Job]) -> bytes:
    functions = "let its functions be importable ones (def, functools.partial), not lambdas or functions inside others"
    for job in jobs:
        parts: tuple[tuple[str, object, str], ...] = (
            (f"the method {job.method}", job.method, "let its settings be plain values"),
            (f"the task {job.task.name!r}", job.task, functions),
            ("the function given as delays", job.delays, "let it be an importable one, or use ob.delays"),
            ("the function given as compute_s", job.compute_s, "let it be an importable one, or use ob.delays"),
        )
        for what, part, way_out in parts:
            try:
                pickle.dumps(part)
            except Exception as error:
                raise ValueError(f"{what} cannot be sent to other processes ({error}); {way_out}") from None
    return pickle.dumps(list(jobs))


def _why(error: ChildFailedError, folder: Path) -> str:
    """One sentence: the rank that failed, and its error."""
    rank, failure = error.get_first_failure()
    said = failure.message
    text = str(said.get("message", "") if isinstance(said, dict) else said)
    if text.startswith("PeerFailed: rank "):
        return text.removeprefix("PeerFailed: ")  # a survivor was seen first, and it quotes the one that failed
    if failure.exitcode < 0:
        text = f"it was ended by {failure.signal_name()}"
    elif not isinstance(said, dict):
        text = f"it ended with exit code {failure.exitcode}"
    logs = sorted(folder.glob(f"*/attempt_0/{failure.local_rank}/stderr.log"))
    words = logs[0].read_text(errors="replace").strip().splitlines() if logs and not isinstance(said, dict) else []
    return f"rank {rank} failed: {text}" + (f"; its last words: {words[-1]}" if words else "")


@contextmanager
def _environment() -> Iterator[None]:
    """What the workers inherit, unless the user has said otherwise; this process gets its own values back."""
    before = dict(os.environ)
    for name, value in {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5", **one_host()}.items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Elastic logs a failure at length before it raises it; the error says all of it."""
    loggers = [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing"))
        and isinstance(logger, logging.Logger)
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _signals() -> Iterator[None]:
    """Keep Ctrl-C away from processes that are only starting, and put back the handlers that elastic replaces.

    A process inherits the signals that are blocked in the thread that starts it. So SIGINT is blocked in this thread
    (another one, see ``_watched``, takes it, and Python hands it to the main thread as always), and a worker unblocks
    it once it has begun. Otherwise each of them would print a traceback from the middle of its imports.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers belong to the main thread, and elastic leaves them alone here
        return
    resource_tracker.ensure_running()  # multiprocessing starts it with the first process, and unblocks SIGINT for it
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _started() -> set[object]:
    """The processes that this one has started. (``active_children()`` would reap those that have ended, which elastic
    is to do.)
    """
    return set(multiprocessing.process._children)  # type: ignore[attr-defined]


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Whether SIGINT has come since it was asked last: told by the interpreter itself, whatever its handler does."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # signals are the main thread's
        return
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    former = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def arrived() -> bool:
        try:
            return signal.SIGINT in os.read(reader, 1024)
        except BlockingIOError:
            return False

    try:
        yield arrived
    finally:
        signal.set_wakeup_fd(former)
        os.close(reader)
        os.close(writer)


@contextmanager
def _watched(look: Callable[[], None], progress: Callable[[], bytes], workers: int) -> Iterator[None]:
    """A thread that takes signals for the main one, and looks how far the workers are; a last look when it ends.

    It takes them once all workers have been started: one whose start is interrupted is told half of what it is to do,
    and prints a traceback.
    A signal becomes an ``Exception`` in the main thread, at whatever line it is. Some lines of elastic's catch every
    one, and the run would go on as if nobody had pressed Ctrl-C: where ``progress`` is made long after it, once more.
    """
    over = threading.Event()
    failures: list[Exception] = []
    others, at_first = _started(), progress()

    def watch() -> None:
        asked_s, seen, hears = math.inf, b"", False
        try:
            while not over.wait(LOOK_S):
                if not hears and (len(_started() - others) == workers or progress() != at_first):
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                    hears = True
                look()
                before, seen = seen, progress()
                if arrived():
                    asked_s = time.monotonic()
                elif time.monotonic() > asked_s + AGAIN_S and seen != before:
                    os.kill(os.getpid(), signal.SIGINT)
        except Exception as error:
            failures.append(error)
            over.wait()

    thread = threading.Thread(target=watch, name="offbeat-progress", daemon=True)
    with _interrupts() as arrived:
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            if not failures:
                look()
    if failures:
        raise failures[0]
