"""Jobs of several processes for the live tests.

Importing torch takes seconds, so one process imports it and then forks the workers of one job after the other. Each
worker is a whole process, down to the end of its interpreter, and meets the others as under torchrun: at a store that
none of them hosts (or that rank 0 hosts, where a job says so).
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OUTLIVES_S = 60.0  # a worker that is still there so long after another one has failed hangs


@dataclass(frozen=True)
class Job:
    """``function(rank, *args)`` of the module ``module`` on ``size`` processes."""

    module: str
    function: str
    size: int
    args: tuple[Any, ...] = ()
    timeout_s: float = 300.0  # bounds a hang
    rank_0_hosts: bool = False
    whole_end: bool = False  # let the interpreter end by itself: the rule for scripts, but it takes a second
    left_behind: int | None = None  # a rank that will never end by itself; it is killed when the others have ended


@dataclass
class Outcome:
    """How one worker ended."""

    value: Any = None
    returned: bool = False
    error: str = ""
    exit_code: int | None = None
    ended_s: float = 0.0
    hung: bool = False
    stderr: str = field(default="", repr=False)


def run(jobs: list[Job], at_once: int = 1) -> list[list[Outcome]]:
    """The outcomes of all workers of all jobs, of which so many run at once."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "jobs").write_bytes(pickle.dumps((jobs, at_once)))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, "-W", "error", __file__, folder, str(os.getpid())]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr[-4000:]
        return pickle.loads(Path(folder, "outcomes").read_bytes())


def values(outcomes: list[Outcome]) -> list[Any]:
    """What the workers returned, if all did, and ended well; else how the first one ended: the others may follow it."""
    for rank, outcome in sorted(enumerate(outcomes), key=lambda one: one[1].ended_s):
        assert (outcome.returned, outcome.exit_code) == (True, 0), f"rank {rank}: {outcome}\n{outcome.stderr[-3000:]}"
    return [outcome.value for outcome in outcomes]


# Inside the forge.


def _die_with(parent: int) -> None:
    """If the tests are killed, nothing that they have started stays behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before
            os.kill(os.getpid(), signal.SIGKILL)


def _forge(folder: Path) -> Callable[[], None] | None:
    """Run all jobs. In a worker this returns the function to run, so that its end is the end of a plain script."""
    import torch

    import offbeat  # noqa: F401

    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)])  # imports torch's compiler: better once than in every worker
    jobs, at_once = pickle.loads((folder / "jobs").read_bytes())
    for module in {job.module for job in jobs}:
        importlib.import_module(module)
    gc.freeze()  # or every worker would spend seconds, when it ends, on what it has inherited
    outcomes: list[list[Outcome]] = [[] for _ in jobs]
    waiting, running = list(enumerate(jobs)), dict[int, _Running]()
    while waiting or running:
        while waiting and len(running) < at_once:
            number, job = waiting.pop(0)
            place = folder / str(number)
            place.mkdir()
            port = _free_port()
            agent = None if job.rank_0_hosts else _agent(port)
            pids, forge = [], os.getpid()
            for rank in range(job.size):
                pid = os.fork()
                if pid == 0:
                    _die_with(forge)
                    return _worker(job, rank, port, place)
                pids.append(pid)
            running[number] = _Running(job, place, pids, agent)
        for number, one in list(running.items()):
            if one.look():
                outcomes[number] = one.outcomes
                del running[number]
        time.sleep(0.002)
    (folder / "outcomes").write_bytes(pickle.dumps(outcomes))
    return None


def _free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _agent(port: int) -> int:
    """A process that hosts the store, as torchrun's agent does."""
    ready, tell = os.pipe()
    forge, pid = os.getpid(), os.fork()
    if pid == 0:
        _die_with(forge)
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
        os.write(tell, b"1")
        while True:
            signal.pause()
            del store
    os.read(ready, 1)
    os.close(ready)
    os.close(tell)
    return pid


def _worker(job: Job, rank: int, port: int, place: Path) -> Callable[[], None]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    os.environ["JOB_FOLDER"] = str(place)
    if not job.rank_0_hosts:
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    stderr = os.open(place / f"{rank}.stderr", os.O_CREAT | os.O_WRONLY)
    os.dup2(stderr, 2)

    def work() -> None:
        function = getattr(importlib.import_module(job.module), job.function)
        value = function(rank, *job.args)
        (place / f"{rank}.value").write_bytes(pickle.dumps(value))
        if not job.whole_end:
            os._exit(0)

    return work


class _Running:
    """The workers of one job."""

    def __init__(self, job: Job, place: Path, pids: list[int], agent: int | None) -> None:
        self._job, self._place, self._agent = job, place, agent
        self.outcomes = [Outcome() for _ in pids]
        self._start, self._waiting = time.monotonic(), dict(enumerate(pids))
        self._end = self._start + job.timeout_s

    def look(self) -> bool:
        """Whether all have ended."""
        for rank, pid in list(self._waiting.items()):
            late = time.monotonic() > self._end
            if late or list(self._waiting) == [self._job.left_behind]:
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if ended:
                del self._waiting[rank]
                outcome = self.outcomes[rank]
                outcome.hung, outcome.exit_code = late, os.waitstatus_to_exitcode(status)
                outcome.ended_s = time.monotonic() - self._start
                if outcome.exit_code:
                    self._end = min(self._end, time.monotonic() + OUTLIVES_S)
        if self._waiting:
            return False
        for rank, outcome in enumerate(self.outcomes):
            file = self._place / f"{rank}.value"
            if file.exists():
                outcome.value, outcome.returned = pickle.loads(file.read_bytes()), True
            outcome.stderr = (self._place / f"{rank}.stderr").read_text()
            outcome.error = (outcome.stderr.strip().splitlines() or [""])[-1]
        if self._agent is not None:
            os.kill(self._agent, signal.SIGKILL)
            os.waitpid(self._agent, 0)
        return True


# For the jobs.


def say(event: str) -> None:
    """Let every worker of this job know that something has happened."""
    Path(os.environ["JOB_FOLDER"], event).touch()


def said(event: str) -> bool:
    return Path(os.environ["JOB_FOLDER"], event).exists()


def hear(event: str, timeout_s: float = 240.0) -> None:
    """Wait until a worker of this job says so: an order of events, whatever the machine does."""
    start = time.monotonic()
    while not said(event):
        if time.monotonic() - start > timeout_s:
            raise TimeoutError(f"nobody said {event!r} within {timeout_s:.0f} s")
        time.sleep(0.002)


def attempt(action: Callable[[], Any]) -> str:
    """The error of ``action`` as text, or "" if there was none."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def table(rank: int, module: str, names: list[str]) -> dict[str, tuple[str, Any]]:
    """Several scenarios one after the other in one group of processes.

    One that raises ends them: the worker would meet the others in different scenarios, and hang.
    """
    import torch.distributed as dist

    dist.init_process_group("gloo")
    out = {}
    for name in names:
        try:
            out[name] = ("returned", getattr(importlib.import_module(module), name)(rank))
        except Exception as error:
            raise RuntimeError(f"scenario {name} raised {type(error).__name__}: {error}") from error
    dist.destroy_process_group()
    return out


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.support import forge  # under its own name, which the pickles bear

    forge._die_with(int(sys.argv[2]))
    work = forge._forge(Path(sys.argv[1]))
    if work is not None:
        work()
