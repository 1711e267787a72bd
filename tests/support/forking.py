"""The process that forks the workers of jobs: what runs inside it."""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import math
import os
import pickle
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.forge import Job, Outcome
from tests.support.ports import hold_port

LINKS = "TEST_LINKS"  # in the environment of a worker: limits of its host process's links, in seconds
FIRST_S = 5.0  # a host process waits for its first worker: where an attach is refused, nobody comes
ENDS_S = 30.0  # one that is there so long after its workers is left behind


def main(parent: int, socket: int) -> None:
    _die_with(parent)
    work = _serve(Connection(socket))
    if work is not None:
        work()


def _die_with(parent: int) -> None:
    """If the tests are killed, nothing that they have started stays behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before
            os.kill(os.getpid(), signal.SIGKILL)


def _serve(connection: Connection) -> Callable[[], None] | None:
    """Run what is asked for. In a worker this returns the function to run: its end is the end of a plain script."""
    import torch

    import offbeat  # noqa: F401

    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)])  # imports torch's compiler: better once than in every worker
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return None
        try:
            jobs, at_once, folder = pickle.loads(request)  # imports the modules of the jobs
        except Exception:
            connection.send_bytes(pickle.dumps(traceback.format_exc()))
            continue
        gc.freeze()  # or every worker would spend seconds, when it ends, on what it has inherited
        try:
            outcomes = _run(jobs, at_once, Path(folder), connection)
        except RuntimeError as error:
            connection.send_bytes(pickle.dumps(str(error)))
            continue
        if callable(outcomes):
            return outcomes
        connection.send_bytes(pickle.dumps(outcomes))


def _run(
    jobs: list[Job], at_once: int, folder: Path, connection: Connection
) -> list[list[Outcome]] | Callable[[], None]:
    outcomes: list[list[Outcome]] = [[] for _ in jobs]
    waiting, running = list(enumerate(jobs)), dict[int, _Running]()
    host_processes = _HostProcesses(connection)
    while waiting or running:
        while waiting and len(running) < at_once:
            number, job = waiting.pop(0)
            place = folder / str(number)
            place.mkdir()
            agent, held = None, None
            if job.rank_0_hosts:
                held = hold_port()
                port = held.getsockname()[1]
            else:
                agent, port = _agent(connection)
            pids, forge = [], os.getpid()
            for rank in range(job.size):
                pid = os.fork()
                if pid == 0:
                    _die_with(forge)
                    connection.close()
                    for one in running.values():
                        one.let_go()
                    if held is not None:
                        held.close()
                    host_processes.are_asked_for_here()
                    return _worker(job, rank, port, place)
                pids.append(pid)
            running[number] = _Running(job, place, pids, agent, held)
        for number, one in list(running.items()):
            if one.look():
                outcomes[number] = one.outcomes
                del running[number]
        if running:
            ends = [fd for one in running.values() for fd in one.ends.values()]
            if host_processes.door.fileno() in select.select([host_processes.door.fileno(), *ends], [], [], 0.2)[0]:
                host_processes.start([fd for one in running.values() for fd in one.ends.values()])
    if still := host_processes.close():
        raise RuntimeError(f"host processes that did not end with their workers: {still}")
    return outcomes


class _HostProcesses:
    """The host processes of all jobs, forked where torch has been imported."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._name = connection, f"\0forge-{os.getpid()}-{time.monotonic_ns()}"
        self.door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.door.bind(self._name)
        self.door.listen(64)
        self._pids: list[int] = []

    def are_asked_for_here(self) -> None:
        """In a worker: ask for one, instead of starting a Python for it."""
        from offbeat.live.worker import start

        self.door.close()
        name = self._name

        def spawn(listener: socket.socket, token: str) -> None:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
                line.connect(name)
                told = f"{token} {os.environ.get(LINKS, '{}')}"
                socket.send_fds(line, [told.encode()], [listener.fileno(), 2])
                line.recv(1)

        start.spawn = spawn

    def start(self, not_its_own: list[int]) -> None:
        line, _ = self.door.accept()
        told, (listener, stderr), _, _ = socket.recv_fds(line, 1024, 2)
        token, _, seconds = told.decode().partition(" ")
        forge, pid = os.getpid(), os.fork()
        if pid == 0:
            _die_with(forge)
            os.setsid()
            os.dup2(stderr, 2)
            self._connection.close()
            for one in (self.door, line):
                one.close()
            for descriptor in (*not_its_own, stderr):
                os.close(descriptor)
            try:
                from offbeat.live.host import links, process

                process.FIRST_S = FIRST_S
                vars(links).update(json.loads(seconds))
                process.serve(socket.socket(fileno=listener), token)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(0)
        for descriptor in (listener, stderr):
            os.close(descriptor)
        self._pids = [one for one in [*self._pids, pid] if os.waitpid(one, os.WNOHANG)[0] == 0]
        line.send(b"!")
        line.close()

    def close(self) -> list[int]:
        """They end by themselves, with their workers. Those that did not."""
        self.door.close()
        end_s = time.monotonic() + ENDS_S
        while self._pids and time.monotonic() < end_s:
            self._pids = [one for one in self._pids if os.waitpid(one, os.WNOHANG)[0] == 0]
            time.sleep(0.002)
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return self._pids


def _agent(connection: Connection) -> tuple[int, int]:
    """A process that hosts the store, as torchrun's agent does: its id and the port."""
    hear, tell = os.pipe()
    forge, pid = os.getpid(), os.fork()
    if pid == 0:
        _die_with(forge)
        connection.close()
        import torch.distributed as dist

        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, None, True, wait_for_workers=False
        )
        os.write(tell, str(store.port).encode())
        while True:
            signal.pause()
    os.close(tell)
    port = int(os.read(hear, 10))
    os.close(hear)
    return pid, port


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
        try:
            value = job.function(rank, *job.args)
        except Exception:
            if job.whole_end:
                raise
            _say_and_end()
        (place / f"{rank}.value").write_bytes(pickle.dumps(value))
        if not job.whole_end:
            os._exit(0)

    return work


def _say_and_end() -> None:
    """As the interpreter does it, but without taking itself down."""
    sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
    sys.excepthook(*sys.exc_info())
    atexit._run_exitfuncs()
    os._exit(1)


class _Running:
    """The workers of one job."""

    def __init__(self, job: Job, place: Path, pids: list[int], agent: int | None, held: socket.socket | None) -> None:
        self._job, self._place, self._agent, self._held = job, place, agent, held
        self.outcomes = [Outcome() for _ in pids]
        self.ends = {rank: os.pidfd_open(pid) for rank, pid in enumerate(pids)}  # can be read when a process has ended
        self._start, self._waiting = time.monotonic(), dict(enumerate(pids))
        self._end, self._failed = self._start + job.timeout_s, False

    def let_go(self) -> None:
        """Of what a worker of another job has inherited."""
        for end in self.ends.values():
            os.close(end)
        if self._held is not None:
            self._held.close()

    def look(self) -> bool:
        """Whether all have ended."""
        for rank, pid in list(self._waiting.items()):
            late = time.monotonic() > self._end and not self._goes_on()
            if late or list(self._waiting) == [self._job.left_behind]:
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if ended:
                del self._waiting[rank]
                os.close(self.ends.pop(rank))
                outcome = self.outcomes[rank]
                outcome.hung, outcome.exit_code = late, os.waitstatus_to_exitcode(status)
                outcome.ended_s = time.monotonic() - self._start
                if outcome.exit_code:
                    self._failed = True
                    self._end = min(self._end, time.monotonic() + self._job.outlives_s)
        if self._waiting:
            return False
        for rank, outcome in enumerate(self.outcomes):
            self._read(rank, outcome)
        if self._agent is not None:
            os.kill(self._agent, signal.SIGKILL)
            os.waitpid(self._agent, 0)
        if self._held is not None:
            self._held.close()
        return True

    def _goes_on(self) -> bool:
        """Whether a worker has left a note not long ago; then all have time again."""
        ages_s = [time.time() - notes.stat().st_mtime for notes in self._place.glob("*.notes")]
        if self._failed or min(ages_s, default=math.inf) > self._job.timeout_s:
            return False
        self._end = time.monotonic() + self._job.timeout_s - min(ages_s)
        return True

    def _read(self, rank: int, outcome: Outcome) -> None:
        file = self._place / f"{rank}.value"
        if file.exists():
            outcome.value, outcome.returned = pickle.loads(file.read_bytes()), True
        if (notes := self._place / f"{rank}.notes").exists():
            with notes.open("rb") as source:
                outcome.noted = _all_in(source)
        outcome.stderr = (self._place / f"{rank}.stderr").read_text()
        outcome.error = (outcome.stderr.strip().splitlines() or [""])[-1]


def _all_in(source: Any) -> list[Any]:
    out = []
    while True:
        try:
            out.append(pickle.load(source))
        except (EOFError, pickle.UnpicklingError):  # the end, or a note that was being written
            return out
