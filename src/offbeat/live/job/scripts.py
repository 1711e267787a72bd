"""A user's script in several processes of this host that outlive each other, as ``offbeat launch`` runs it.

Where a job has several hosts, each has a launcher, and they meet at the store of the first one, which listens there as
long as any of them says that it is still there.

The launcher hosts the job's store, so that no rank takes it away, and passes on output and signals. It is one thread
and one loop, over pipes, ends of processes and signals. Everything that it passes on is written by that loop, line by
line: lines of several workers cannot mix.
"""

from __future__ import annotations

import math
import os
import secrets
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import IO, NamedTuple

import torch.distributed as dist

from offbeat.basics import checks
from offbeat.basics.units import format_ranks, format_seconds
from offbeat.live.transport.errors import OffbeatError
from offbeat.live.transport.hosts import RESUME, RETURNS
from offbeat.live.worker.board import BEGAN, POLL_S

VARIABLE = "OFFBEAT_MIN_WORKERS"  # as long as so many are left, a run goes on without the dead: see ``attach``
LOOPBACK = "127.0.0.1"
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)  # after these a worker has its grace, and no more
SAME_S = 0.3  # two of one signal within this are one: a terminal's, and the same once more from a parent
READ_BYTES = 1 << 16
MEET_S = 600.0  # for the launchers of all hosts to come
BEAT_S, SILENT_S = 2.0, 20.0  # how often a launcher says that it is there, and without which it is not
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 30.0  # before a worker is started again; each is twice the one before
LONGEST_LINE = 1 << 24  # a longer one is passed on in pieces, since it has to be kept until it ends
UPDATE_S, UPDATE_LOGGED_S = 1.0, 10.0  # between two updates of a progress bar: on a terminal, and in a file


class JobHost(NamedTuple):
    """One of a job's hosts: its number, how many there are, and where the first one has the store."""

    number: int
    of: int
    address: str
    port: int


def run_script(
    words: Sequence[str],
    workers: int,
    *,
    port: int = 0,
    host: JobHost | None = None,
    grace_s: float = 30.0,
    prefix: bool = True,
    min_workers: int = 1,
    restarts: int = 0,
    resume: str | None = None,
) -> int:
    """Run ``python words…`` in ``workers`` processes with torchrun's environment; answers an exit code.

    One that dies is told of on stderr, and the others go on; it is started again up to ``restarts`` times, as long as
    another one lives, each time after a longer pause. It is over when all have ended: with 0 if at least one has
    ended well, else with the code of the first that has ended; after Ctrl-C or SIGTERM with 130 or 143, and then
    those that have not ended by ``grace_s`` are killed. ``port`` is the store's, 0 for any that is free; ``host``:
    which of several this is. A run of ours goes on as long as ``min_workers`` are left. ``resume``: the folder of a
    checkpoint to begin with.
    """
    checks.workers(workers)
    if sys.platform != "linux":
        raise OffbeatError(f"workers that outlive each other run on Linux, and this is {sys.platform}; use torchrun")
    hosts = None if host is None else _Hosts(host, workers)
    store = _store(LOOPBACK, port) if hosts is None else hosts.store
    usual = one_host() if host is None or host.address.startswith("127.") else {"OMP_NUM_THREADS": "1"}
    if workers == 1:
        del usual["OMP_NUM_THREADS"]
    elif "OMP_NUM_THREADS" not in os.environ:
        _say("each worker computes with one thread; set OMP_NUM_THREADS to change that")
    own = _common(workers, store.port) if hosts is None else hosts.environment()
    everybody = {**usual, **os.environ, **own, VARIABLE: str(min_workers)}
    if resume is not None:
        everybody[RESUME] = os.path.abspath(resume)
    with ExitStack() as stack:
        crew = _Crew(words, everybody, grace_s, prefix, restarts, lambda: bool(store.check([BEGAN])), stack, hosts)
        for rank in range(workers):
            if crew.asked is None:
                crew.start(rank)
        return crew.watch()


class _Hosts:
    """The launchers of all hosts of a job, who meet at the store of the first."""

    def __init__(self, me: JobHost, workers: int) -> None:
        self._me, self._workers, self._beats, self._beat_s = me, workers, 0, -math.inf
        address = _address_of(me.address)
        if me.number == 0:
            self.store = _store(address, me.port)
            self.store.set("offbeat/launcher/run", secrets.token_hex(16))
        else:
            self.store = _store_of(address, me.port)
        self.store.set(self._key(me.number), str(workers))
        others = [number for number in range(me.of) if number != me.number]
        end_s, told = time.monotonic() + MEET_S, False
        while missing := [number for number in others if not self.store.check([self._key(number)])]:
            if time.monotonic() > end_s:
                raise OffbeatError(
                    f"the launcher of host {', '.join(map(str, missing))} did not come within {MEET_S:g} s; start "
                    f"offbeat launch --job {me.address}:{me.port} --hosts {me.of} --host NUMBER on each"
                )
            if not told:
                _say(f"waits for the launcher of host {', '.join(map(str, missing))} of {me.of}")
                told = True
            time.sleep(POLL_S)
        counts = [int(self.store.get(self._key(number))) for number in range(me.of)]
        self.first, self.size = sum(counts[: me.number]), sum(counts)

    @staticmethod
    def _key(number: int) -> str:
        return f"offbeat/launcher/{number}"

    def environment(self) -> dict[str, str]:
        """As torchrun sets it for all workers of this host."""
        run = self.store.get("offbeat/launcher/run").decode()
        return {
            **_common(self._workers, self._me.port),
            "WORLD_SIZE": str(self.size),
            "ROLE_WORLD_SIZE": str(self.size),
            "GROUP_WORLD_SIZE": str(self._me.of),
            "GROUP_RANK": str(self._me.number),
            "MASTER_ADDR": self._me.address,
            "TORCHELASTIC_RUN_ID": run,
        }

    def beat(self, says: str = "") -> float:
        """This launcher is still there; how long until it says so again."""
        now_s = time.monotonic()
        if says or now_s - self._beat_s >= BEAT_S:
            self._beat_s, self._beats = now_s, self._beats + 1
            with suppress(RuntimeError):  # the first host's has ended
                self.store.set(f"{self._key(self._me.number)}/beat", says or str(self._beats))
        return self._beat_s + BEAT_S - now_s

    def until_all_have_ended(self, is_asked: Callable[[], bool]) -> None:
        """The store is here, and others may need it."""
        self.beat("ended")
        heard = {number: ("", time.monotonic()) for number in range(1, self._me.of) if self._me.number == 0}
        while heard and not is_asked():
            for number, (before, since_s) in list(heard.items()):
                key = f"{self._key(number)}/beat"
                said = self.store.get(key).decode() if self.store.check([key]) else ""
                if said == "ended" or (said == before and time.monotonic() - since_s > SILENT_S):
                    del heard[number]
                elif said != before:
                    heard[number] = said, time.monotonic()
            time.sleep(POLL_S)


def one_host() -> dict[str, str]:
    """What workers of one host are given, unless the user has said otherwise."""
    usual = {"OMP_NUM_THREADS": "1"}
    if any(name == "lo" for _, name in socket.if_nameindex()):
        usual["GLOO_SOCKET_IFNAME"] = "lo"  # Gloo would look up the host's name, which may lead nowhere
    return usual


def _common(workers: int, port: int) -> dict[str, str]:
    """As torchrun sets them for all workers."""
    return {
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "ROLE_WORLD_SIZE": str(workers),
        "GROUP_WORLD_SIZE": "1",
        "GROUP_RANK": "0",
        "ROLE_NAME": "default",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": secrets.token_hex(16),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_ERROR_FILE": "",  # not that of a job that this one is started from
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "PYTHONUNBUFFERED": "1",
    }


def _address_of(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise ValueError(f"--job: the host {name} is not known here ({error}); give its address") from None


def _own(rank: int, local: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(local), "ROLE_RANK": str(rank)}


def _store(address: str, port: int) -> dist.TCPStore:  # type: ignore[name-defined]
    """The job's store, in this process. Told only an address, it would listen at all of them: so the socket is ours."""
    if not 0 <= port < 2**16:
        raise ValueError(f"port {port} is none; use one from 1 to 65535, or 0 for any that is free")
    with socket.socket() as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind((address, port))
            door.listen(1024)
        except OSError as error:
            way = "or 0 for any that is free" if address == LOOPBACK else "or the address of another host, with --job"
            raise ValueError(
                f"port {port} of {address} cannot be had ({error.strerror}); choose another, {way}"
            ) from None
        port = door.getsockname()[1]
        return dist.TCPStore(  # type: ignore[attr-defined]
            address, port, None, True, wait_for_workers=False, master_listen_fd=door.detach()
        )


def _store_of(address: str, port: int) -> dist.TCPStore:  # type: ignore[name-defined]
    """That of the first host's launcher, which may still have to start."""
    end_s = time.monotonic() + MEET_S
    while True:
        try:
            socket.create_connection((address, port), BEAT_S).close()
            return dist.TCPStore(address, port, None, False, wait_for_workers=False)  # type: ignore[attr-defined]
        except OSError as error:
            if time.monotonic() > end_s:
                raise OffbeatError(
                    f"no launcher of host 0 is at {address}, port {port} ({error.strerror or error}); start it with "
                    "--host 0, and look whether a firewall is between"
                ) from None
            time.sleep(POLL_S)


# Ends the process with the launcher, however that ends, and becomes the script. It is run by a bare interpreter of its
# own: between fork and exec, code of ours could wait for a lock that another thread of the launcher held.
_BOUND = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):  # it has ended before
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class _Worker:
    """One process, in a session of its own: a terminal's Ctrl-C reaches it through the launcher alone, thus once."""

    def __init__(self, rank: int, life: int, process: subprocess.Popen[bytes], streams: Sequence[_Stream]) -> None:
        self.rank, self.life, self.streams, self._process = rank, life, streams, process
        self.end = os.pidfd_open(process.pid)  # can be read when the process has ended
        self.began_s = time.monotonic()
        self.code: int | None = None
        self._there = True  # as long as its number is surely its own

    def send(self, number: int) -> None:
        """To the process itself. Its children are its own concern, as a loader's that outlive a notice."""
        if self._there:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.end, number)

    def kill(self) -> None:
        """With all that it has started and not put elsewhere."""
        if self._there:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def reap(self) -> int:
        """After its end: how it ended. If not well, its children end with it."""
        how = os.waitid(os.P_PIDFD, self.end, os.WEXITED | os.WNOWAIT)
        assert how is not None
        if how.si_code != os.CLD_EXITED or how.si_status != 0:
            self.kill()
        self._there = False
        self.code = self._process.wait()
        os.close(self.end)
        return self.code


class _Crew:
    """All workers of a job, until the last has ended."""

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        grace_s: float,
        prefix: bool,
        restarts: int,
        has_begun: Callable[[], bool],
        stack: ExitStack,
        hosts: _Hosts | None,
    ) -> None:
        """A worker's number here is its rank, but for the workers of the hosts before this one."""
        self.asked: int | None = None  # the signal that asked for the end
        self._words, self._environment = words, environment
        self._grace_s, self._prefix, self._restarts, self._has_begun = grace_s, prefix, restarts, has_begun
        self._hosts, self._first = hosts, 0 if hosts is None else hosts.first
        self._workers: list[_Worker] = []
        self._ended: list[_Worker] = []  # that no other has taken, or will take, the place of
        self._again: list[tuple[float, int, int]] = []  # who is to be started again: when, its rank, for the n-th time
        self._asked_s, self._kill_s = -math.inf, math.inf
        self._heard_by_now: list[int] = []  # signals that were passed on
        self._unsaid: list[str] = []  # by a handler, which may have come in the middle of a line
        self._bell = stack.enter_context(_handled(self._heard))
        self._selector = stack.enter_context(selectors.DefaultSelector())
        stack.callback(self._end_all)
        self._selector.register(self._bell, selectors.EVENT_READ)

    def start(self, local: int, life: int = 0) -> None:
        """``life``: how often it has been started before."""
        heard_before, rank = len(self._heard_by_now), self._first + local
        environment = {**self._environment, **_own(rank, local), RETURNS: str(life)}
        pipe = subprocess.PIPE if self._prefix else None
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BOUND, str(os.getpid()), sys.executable, *self._words],
            env=environment,
            stdout=pipe,
            stderr=pipe,
            bufsize=0,
            start_new_session=True,
        )
        both = ((process.stdout, 1), (process.stderr, 2))
        streams = [_Stream(source, into, rank) for source, into in both if source is not None]
        worker = _Worker(rank, life, process, streams)
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        missed = self._heard_by_now[heard_before:]  # while it was being started
        self._workers.append(worker)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        for number in missed:
            worker.send(number)
        for stream in streams:
            self._selector.register(stream, selectors.EVENT_READ, stream)
        self._selector.register(worker.end, selectors.EVENT_READ, worker)

    def watch(self) -> int:
        """Until all have ended; answers the exit code."""
        while len(self._ended) < len(self._workers) or self._again:
            moments = [self._kill_s, *(at_s for at_s, _, _ in self._again)]
            if self._hosts is not None:
                moments.append(time.monotonic() + self._hosts.beat())
            left_s = None if min(moments) == math.inf else max(min(moments) - time.monotonic(), 0.0)
            for key, _ in self._selector.select(left_s):
                if isinstance(key.data, _Stream):
                    self._pass_on(key.data)
                elif isinstance(key.data, _Worker):
                    self._over(key.data)
                else:
                    with suppress(BlockingIOError):
                        os.read(self._bell, READ_BYTES)
            while self._unsaid:
                _say(self._unsaid.pop(0))
            if time.monotonic() >= self._kill_s:
                self._give_up()
            self._start_again()
        for worker in self._workers:  # processes that a worker has left behind may have gone on writing
            self._drain(worker)
        code = self._summary()
        if self._hosts is not None:
            self._hosts.until_all_have_ended(lambda: self.asked is not None)
        return code

    def _pass_on(self, stream: _Stream) -> bool:
        """Whether there was anything."""
        if stream.closed:
            return False
        try:
            some = stream.pass_on()
        except OSError as error:
            self._close_all(stream.into, error)
            return False
        if stream.ended:
            self._close(stream)
        return some

    def _close_all(self, into: int, error: OSError) -> None:
        """Nobody reads what we write: let the workers meet what they would have met without us."""
        for worker in self._workers:
            for stream in worker.streams:
                if stream.into == into:
                    self._close(stream)
        if not isinstance(error, BrokenPipeError):
            name = "stdout" if into == 1 else "stderr"
            _say(f"{name} cannot be written ({error.strerror}); what workers write there fails from now on")

    def _close(self, stream: _Stream) -> None:
        if not stream.closed:
            self._selector.unregister(stream)
            stream.close()

    def _drain(self, worker: _Worker) -> None:
        """What is there now, but no more than a worker can have left behind: its heirs may write for ever."""
        for stream in worker.streams:
            for _ in range(LONGEST_LINE // READ_BYTES):
                if not self._pass_on(stream):
                    break
            if not stream.closed:
                with suppress(OSError):
                    stream.finish_line()

    def _over(self, worker: _Worker) -> None:
        self._selector.unregister(worker.end)
        code = worker.reap()
        self._drain(worker)
        self._ended.append(worker)
        if code == 0 or self.asked is not None:
            return
        after = format_seconds(time.monotonic() - worker.began_s)
        left = "the others go on" if self._someone_lives else f"no other is left{self._here}"
        if self._restarts and self._someone_lives:
            left += self._whether_again(worker)
        alone = self._environment["WORLD_SIZE"] == "1"
        _say(f"rank {worker.rank} {_how(code)} after {after}" + ("" if alone else f"; {left}"))

    @property
    def _here(self) -> str:
        return "" if self._hosts is None else " on this host"

    @property
    def _someone_lives(self) -> bool:
        return any(worker.code is None for worker in self._workers)

    def _whether_again(self, worker: _Worker) -> str:
        """In words; if so, it will be started again."""
        if not self._has_begun():
            return ", and it is not started again, since not all workers had attached"
        if worker.life == self._restarts:
            return f", and it is not started again, since it has been {_times(self._restarts)}"
        pause_s = min(FIRST_PAUSE_S * 2**worker.life, LONGEST_PAUSE_S)
        self._again.append((time.monotonic() + pause_s, worker.rank, worker.life + 1))
        return f", and it is started again in {format_seconds(pause_s)}"

    def _start_again(self) -> None:
        """Those whose pause is over, unless nobody is there any more whose place it could take."""
        if self.asked is not None or not self._someone_lives:
            self._again.clear()
        for one in [one for one in self._again if time.monotonic() >= one[0]]:
            self._again.remove(one)
            _, rank, life = one
            before = next(worker for worker in self._workers if worker.rank == rank)
            self._workers.remove(before)
            self._ended.remove(before)
            for stream in before.streams:
                self._close(stream)
            self.start(rank - self._first, life)

    def _summary(self) -> int:
        failed = [worker.rank for worker in self._ended if worker.code != 0]
        well = len(self._ended) - len(failed)
        if self.asked is not None:
            return 128 + self.asked
        if well and failed:
            _say(f"{well} of {len(self._ended)} workers ended well; {format_ranks(failed)} did not")
        first = self._ended[0].code or 0
        return 0 if well else first if first > 0 else 128 - first

    # Signals.

    def _heard(self, number: int, _frame: FrameType | None) -> None:
        """A handler: the loop may be anywhere, also where it waits for whoever reads our output."""
        now_s, was_asked = time.monotonic(), self.asked is not None
        if number in ENDING:
            if now_s - self._asked_s < SAME_S:
                return
            self.asked, self._asked_s = self.asked or number, now_s
            if was_asked and number == signal.SIGINT:
                self._kill_s = now_s
                for worker in self._workers:
                    worker.kill()
                return
            if not was_asked:
                self._kill_s = now_s + self._grace_s
                name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
                self._unsaid.append(
                    f"{name} is passed on; workers have {format_seconds(self._grace_s)} to end, "
                    f"and {'one more' if number == signal.SIGINT else 'a'} Ctrl-C kills them at once"
                )
        self._heard_by_now.append(number)
        for worker in self._workers:
            worker.send(number)

    def _give_up(self) -> None:
        self._kill_s = math.inf
        late = [worker for worker in self._workers if worker.code is None]
        if late:
            _say(f"{format_ranks([worker.rank for worker in late])} had not ended yet: killed")
        for worker in late:
            worker.kill()

    def _end_all(self) -> None:
        """Also where this process itself has failed: nobody stays behind."""
        for worker in self._workers:
            if worker.code is None:
                worker.kill()
                worker.reap()
            for stream in worker.streams:
                self._close(stream)


class _Stream:
    """One of a worker's two outputs, on its way to ours: whole lines, each behind the rank in brackets.

    A line that rewrites itself, as progress bars do with carriage returns, is passed on as it stands when it ends,
    and now and then before.
    """

    def __init__(self, source: IO[bytes], into: int, rank: int) -> None:
        self.into, self.closed, self.ended = into, False, False
        self._source, self._tag = source, b"[%d] " % rank
        self._line = bytearray()  # what has come of it
        self._update_s = UPDATE_S if os.isatty(into) else UPDATE_LOGGED_S
        self._updated_s = -math.inf
        os.set_blocking(source.fileno(), False)

    def fileno(self) -> int:
        return self._source.fileno()

    def close(self) -> None:
        self.closed = True
        self._source.close()

    def pass_on(self) -> bool:
        """What is there, up to a limit. Whether there was anything."""
        try:
            data = os.read(self.fileno(), READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.ended = True
            self.finish_line()
            return False
        *whole, rest = data.split(b"\n")
        out = []
        for end in whole:
            out.append(self._tag + self._shown(bytes(self._line) + end) + b"\n")
            self._line.clear()
        self._line += rest
        if b"\r" in rest:
            out += self._update()
        if len(self._line) > LONGEST_LINE:
            out.append(self._tag + self._line + b"\n")
            self._line.clear()
        _write(self.into, b"".join(out))
        return True

    def finish_line(self) -> None:
        """One that has no end gets one."""
        if self._line:
            line = self._tag + self._shown(bytes(self._line)) + b"\n"
            self._line.clear()
            _write(self.into, line)

    @staticmethod
    def _shown(line: bytes) -> bytes:
        """What a terminal would show of it at its end."""
        return line.rstrip(b"\r").rpartition(b"\r")[2]

    def _update(self) -> Iterator[bytes]:
        """As far as it is surely whole: a carriage return at the very end may belong to the line's end."""
        shown, cut, rest = bytes(self._line[:-1]).rpartition(b"\r")
        if not cut:
            return
        self._line[:] = rest + self._line[-1:]
        text = self._shown(shown)
        if text and time.monotonic() - self._updated_s > self._update_s:
            self._updated_s = time.monotonic()
            yield self._tag + text + b"\n"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # one of the real-time signals
        return f"was killed by signal {-code}"


def _say(sentence: str) -> None:
    with suppress(OSError):  # nobody is there to hear it
        _write(2, f"offbeat: {sentence}\n".encode())


def _write(into: int, data: bytes) -> None:
    """All of it, also where somebody else has made our output one that does not block."""
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(into, left) :]
        except BlockingIOError:
            select.select([], [into], [])


@contextmanager
def _handled(handler: signal._HANDLER) -> Iterator[int]:
    """Signals for the length of a block; what can be read when one has come. Those that are ignored stay so: nohup."""
    heard = [number for number in PASSED_ON if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    bell = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    former = {number: signal.signal(number, handler) for number in heard}
    try:
        yield reader
    finally:
        for number, one in former.items():
            signal.signal(number, one)
        signal.set_wakeup_fd(bell)
        os.close(reader)
        os.close(writer)
