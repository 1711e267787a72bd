"""Whoever may look at a job sees what everybody does, also while workers hang; whoever may not learns nothing."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

import offbeat as ob
from offbeat.cli import main
from offbeat.live.host import looking, protocol
from offbeat.live.host.looking import RunningJob
from offbeat.live.host.process import MOST_STRANGERS
from offbeat.live.host.protocol import Hello, Inbox, Look, Release, packed
from offbeat.live.host.status import WorkerStatus
from offbeat.live.worker import stacks, start
from tests.support import forge
from tests.support.forge import Job, attempt, hear, say
from tests.support.leftovers import held, host_pids, left
from tests.support.nets import PATIENCE_S
from tests.support.scenarios import Told, over, scenario

pytestmark = pytest.mark.live

T = TypeVar("T")
STEPS, WITHIN_S, MANY = 3, 60.0, 200
WRONG = "0" * 32


class Run:
    """Steps of a run, in each of which every number grows by one; ``own``: the job, as somebody outside finds it."""

    def __init__(self, method: ob.Method | None = None) -> None:
        self.model = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.zeros_(self.model.weight)
        inner = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.optimizer = ob.attach(inner, self.model, method or ob.eager("everyone"), patience_s=PATIENCE_S)
        self.steps()

    def steps(self, count: int = STEPS) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            (-self.model.weight.sum()).backward()
            self.optimizer.step()

    @property
    def own(self) -> RunningJob:
        (pid,) = host_pids()
        return found(pid)

    def finish(self) -> float:
        self.optimizer.finish()
        return self.model.weight[0, 0].item()


def found(pid: int) -> RunningJob:
    (job,) = (one for one in looking.jobs() if one.pid == pid)
    return job


def until(ask: Callable[[], T], holds: Callable[[T], bool]) -> T:
    """What is answered when it holds, or in the end."""
    end_s = time.monotonic() + WITHIN_S
    while not holds(answer := ask()) and time.monotonic() < end_s:
        time.sleep(0.05)
    return answer


# A worker is stopped, another one holds its interpreter's lock, the third waits for them, and the fourth looks.


@dataclass
class Seen4:
    """What rank 0 has seen: the status, the screen, the JSON; and what was told as the stacks of ranks 1 to 3."""

    status: ob.JobStatus
    screen: str
    document: dict[str, Any]
    stacks: list[str]
    is_over_stacks: str


def holds_its_lock(fifo: str, ticks: str) -> None:
    """Inside C, with the interpreter's lock: no other thread of this process runs. Until a byte comes."""

    def tick() -> None:
        with Path(ticks).open("ab", buffering=0) as file:
            while not ended:
                file.write(b".")
                time.sleep(0.002)

    ended: list[bool] = []
    other = threading.Thread(target=tick)
    other.start()
    pipe = os.open(fifo, os.O_RDWR)
    say("2 holds")
    ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)
    ended.append(True)
    other.join()
    os.close(pipe)


def has_stopped_growing(file: str) -> bool:
    before = Path(file).stat().st_size
    time.sleep(0.3)
    return Path(file).stat().st_size == before


def hang(rank: int) -> Seen4 | None:
    dist.init_process_group("gloo")
    folder = Path(os.environ["JOB_FOLDER"])
    fifo, ticks, seen = str(folder / "fifo"), str(folder / "ticks"), None
    if rank == 0:
        os.mkfifo(fifo)
        Path(ticks).touch()
    run = Run()
    if rank == 0:
        hear("1 stops")
        hear("2 holds")
        assert until(lambda: has_stopped_growing(ticks), bool), "no other thread of that process runs"
        seen = look_at_all(run)
        os.kill(seen.status.workers[1].pid, signal.SIGCONT)
        with Path(fifo).open("wb", buffering=0) as pipe:
            pipe.write(b"!")
    elif rank == 1:
        say("1 stops")
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank == 2:
        holds_its_lock(fifo, ticks)
    pid = os.getpid()
    run.steps()
    run.finish()
    over_ = told_by(pid)
    if seen is not None:
        seen.is_over_stacks = over_
    return seen


def look_at_all(run: Run) -> Seen4:
    def are_there(seen: ob.JobStatus) -> bool:
        states = [one.state for one in seen.workers]
        return states == ["busy", "stopped", "busy", "waits"] and min(one.quiet_s for one in seen.workers[1:]) > 1.5

    status = until(run.own.look, are_there)
    told = [told_by(one.pid) for one in status.workers[1:]]
    said = []
    for words in ([], ["--json"]):
        out = StringIO()
        with redirect_stdout(out):
            assert main(["status", "--job", str(status.pid), *words]) == 0
        said.append(out.getvalue())
    return Seen4(status, said[0], json.loads(said[1]), told, "")


def told_by(pid: int) -> str:
    """Its stacks, or why there are none."""
    try:
        return stacks.stacks_of(pid)
    except ob.OffbeatError as error:
        return str(error)


@pytest.fixture(scope="module")
def hung() -> Seen4:
    (outcomes,) = forge.run([Job(hang, 4, timeout_s=180)])
    seen: Seen4 = forge.values(outcomes)[0]
    return seen


def test_a_stopped_worker_is_shown_as_stopped_and_the_others_as_what_they_are(hung: Seen4) -> None:
    workers = hung.status.workers
    assert [one.rank for one in workers] == [0, 1, 2, 3]
    assert workers[1].doing == "is stopped (SIGSTOP)"
    assert workers[2].doing.startswith("is busy, since ")
    assert "after test_status.py:" in workers[2].doing
    assert workers[3].doing.startswith(f"waits for round {STEPS} of 'eager', since ")
    assert [one.steps for one in workers] == [STEPS] * 4
    assert [one.submitted for one in workers] == [STEPS, STEPS, STEPS, STEPS + 1]
    assert [one.taken for one in workers] == [STEPS] * 4


def test_it_is_said_who_waits_for_whom(hung: Seen4) -> None:
    workers = hung.status.workers
    assert [one.waits_for for one in workers] == [(), (), (), (0, 1, 2)]
    assert [one.waited_for_by for one in workers] == [(3,), (3,), (3,), ()]
    assert "Rank 3 waits for ranks 0, 1 and 2." in hung.status.sentences
    assert f"Rank 1 is stopped (SIGSTOP); kill -CONT {workers[1].pid} lets it go on." in hung.status.sentences


def test_the_screen_and_the_json_say_the_same(hung: Seen4) -> None:
    words = " ".join(hung.screen.split())
    assert "is stopped (SIGSTOP)" in words
    assert "Rank 3 waits for ranks 0, 1 and 2." in words
    (job,) = hung.document["jobs"]
    assert job["pid"] == hung.status.pid
    assert [one["state"] for one in job["workers"]] == [one.state for one in hung.status.workers]


def test_rounds_and_memory_are_counted(hung: Seen4) -> None:
    (channel,) = (one for one in hung.status.channels if one.kind == "partial rounds")
    assert channel.rounds == STEPS
    assert channel.ranks == (0, 1, 2, 3)
    assert 4 <= channel.slots_in_use <= channel.slots
    assert channel.memory_bytes == channel.slots * channel.slot_bytes > 0
    assert hung.status.memory.arena_bytes > 0
    assert hung.status.memory.pages_bytes == 4 << 16
    assert (hung.status.sums_under_way, hung.status.size) == (0, 4)


def test_a_worker_that_holds_its_interpreters_lock_tells_its_stacks(hung: Seen4) -> None:
    stopped, holding, waiting = hung.stacks
    assert "in holds_its_lock" in holding
    assert "in tick" in holding, "of all threads"
    assert "in step" in waiting
    assert "is stopped (SIGSTOP); kill -CONT" in stopped


def test_after_the_run_a_worker_listens_to_that_signal_no_longer(hung: Seen4) -> None:
    assert "writes no stacks" in hung.is_over_stacks


# Those who may not look, and those who look badly.


def said_to(job: RunningJob, *messages: bytes) -> list[Any]:
    """What comes before the connection is closed, or silence."""
    inbox, heard = Inbox(), list[Any]()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(job.socket)
        with suppress(OSError):
            line.sendall(b"".join(messages))
        line.settimeout(20.0)
        with suppress(ConnectionError):
            while data := line.recv(1 << 16):
                heard += inbox.feed(data)
                if heard:
                    line.settimeout(0.5)
                    with suppress(TimeoutError):
                        continue
        return heard


@scenario(2)
def beside_strangers(rank: int) -> tuple[dict[str, list[str]], float]:
    """What each is told whose connection the host process has to close."""
    run, told = Run(), dict[str, list[str]]()
    job = run.own
    cases = {
        "a wrong token": [packed(Look(WRONG))],
        "no token": [packed(Look(""))],
        "a token that is half a letter": [protocol.HEAD.pack(10, protocol.KINDS.index(Look)) + b'["\\ud800"]'],
        "the viewers' token of a worker": [packed(Hello(job.token, 0))],
        "another message": [packed(Release("0/eager", 0, 0))],
        "what only host processes say": [packed(protocol.LookHost(""))],
        "two looks": [packed(Look(job.token))] * 2,
        "a look and a worker's message": [packed(Look(job.token)), packed(Hello(job.token, 0))],
    }
    for name, messages in cases.items():
        if rank == 0:
            told[name] = [type(message).__name__ for message in said_to(job, *messages)]
        run.steps()
    return told, run.finish()


def test_a_stranger_learns_nothing_and_a_viewer_is_no_worker(told: Told) -> None:
    (heard, reached), (_, also) = told(beside_strangers)
    assert {name for name, some in heard.items() if some} == set()
    assert len(heard) == 8
    assert reached == also == 9 * STEPS


@scenario(2)
def beside_viewers(rank: int) -> tuple[int, bool, float]:
    """While steps are taken, there are viewers with half a question, and many that never read what they were told."""
    run, idle = Run(), list[socket.socket]()
    job = run.own
    for number in range(MANY if rank == 0 else 0):
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        line.connect(job.socket)
        line.sendall(packed(Look(job.token))[: 7 if number % 2 else None])
        idle.append(line)
        if number % 50 == 0:
            run_alone(run)
    run.steps()
    still = until(lambda: sum(map(is_open, idle)), lambda count: count <= MOST_STRANGERS) if rank == 0 else 0
    answers = rank == 1 or run.own.look().pid == job.pid
    run.steps()
    for line in idle:
        line.close()
    return still, answers, run.finish()


def run_alone(run: Run) -> None:
    """The host process hears its worker beside them."""
    assert run.optimizer.status().workers


def is_open(line: socket.socket) -> bool:
    line.setblocking(False)
    try:
        while data := line.recv(1 << 16):
            del data
        return False
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def test_viewers_that_say_half_a_question_or_never_read_delay_no_step_and_keep_nobody_out(told: Told) -> None:
    (still, answers, reached), (_, _, also) = told(beside_viewers)
    assert 0 < still <= MOST_STRANGERS
    assert answers
    assert reached == also == 3 * STEPS


@scenario(2)
def by_the_optimizer(rank: int) -> tuple[list[WorkerStatus], str, float]:
    run = Run()
    dist.barrier()
    seen = run.optimizer.status()
    return list(seen.workers), str(seen), run.finish()


def test_the_optimizer_tells_the_same(told: Told) -> None:
    for workers, text, _ in told(by_the_optimizer):
        assert [(one.rank, one.steps) for one in workers] == [(0, STEPS), (1, STEPS)]
        assert "0/eager" in text or "/eager" in text
        assert "partial rounds" in text


@scenario(2)
def with_handlers(rank: int) -> tuple[str, str, bool, bool, str]:
    """A script that has a handler for the signal before; one that puts one in its place later."""

    def theirs(*_: object) -> None:
        heard.append(True)

    heard: list[bool] = []
    before = signal.signal(stacks.SIGNAL, theirs)
    run = Run()
    refused = told_by(os.getpid())
    own = next(one for one in run.optimizer.status().workers if one.pid == os.getpid())
    run.finish()
    stays = signal.getsignal(stacks.SIGNAL) is theirs
    signal.signal(stacks.SIGNAL, before)
    run = Run()
    signal.signal(stacks.SIGNAL, theirs)
    run.finish()
    os.kill(os.getpid(), stacks.SIGNAL)
    later = signal.getsignal(stacks.SIGNAL) is theirs and heard == [True]
    signal.signal(stacks.SIGNAL, before)
    run = Run()
    again = told_by(os.getpid())
    run.finish()
    return refused, own.stacks, stays, later, again


def test_a_handler_of_the_scripts_own_stays_and_it_is_said_that_there_are_no_stacks_then(told: Told) -> None:
    for refused, words, stays, later, again in told(with_handlers):
        assert "a handler of the script's own has SIGURG" in refused
        assert words == stacks.TAKEN
        assert stays
        assert later
        assert "in with_handlers" in again


@scenario(2)
def two_jobs(rank: int) -> tuple[set[int], set[int], list[int], float]:
    """Two starts of a job side by side: their host processes; what is found; what one asks for by its number."""
    first = Run()
    own = host_pids()
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    second = Run()
    del os.environ["TORCHELASTIC_RESTART_COUNT"]
    (other,) = host_pids() - own
    everyone, chosen = {job.pid for job in looking.jobs()}, list[int]()
    out = StringIO()
    with redirect_stdout(out):
        assert main(["status", "--json", "--job", str(other)]) == 0
    chosen = [job["pid"] for job in json.loads(out.getvalue())["jobs"]]
    assert chosen == [other]
    second.finish()
    return host_pids() | {other}, everyone, chosen, first.finish()


def test_of_two_jobs_both_are_found_and_one_can_be_chosen(told: Told) -> None:
    for pids, everyone, chosen, _ in told(two_jobs):
        assert len(pids) == 2
        assert pids <= everyone
        assert set(chosen) < pids


@scenario(4)
def on_two_hosts(rank: int) -> tuple[list[int], list[int], list[bool], str]:
    return over(rank, "hosts", _on_two_hosts)


def _on_two_hosts(rank: int) -> tuple[list[int], list[int], list[bool], str]:
    run = Run()
    status = until(lambda: run.own.look(whole=True), lambda seen: len(seen.everybody) == 4)
    dist.barrier()
    run.finish()
    (other,) = status.other_hosts
    return (
        [one.rank for one in status.workers],
        sorted(one.rank for one in status.everybody),
        [other.answers],
        str(status),
    )


def test_of_another_host_it_is_shown_what_that_tells(told: Told) -> None:
    for rank, (here, everybody, answers, text) in enumerate(told(on_two_hosts)):
        assert here == ([0, 1] if rank < 2 else [2, 3])
        assert everybody == [0, 1, 2, 3]
        assert answers == [True]
        assert "other host" in text


# Ends.


def killed(rank: int) -> tuple[str, list[str], bool, str]:
    """The host process is stopped, then killed: what a viewer hears; what is left; whether the job is still found."""
    dist.init_process_group("gloo")
    start.spawn = start.spawn_python
    run = Run()
    dist.barrier()
    (pid,) = host_pids()
    if rank > 0:
        hear("0 has looked")
        run.optimizer._run.abandon("")
        return "", [], False, ""
    job, everything = found(pid), held()
    os.kill(pid, signal.SIGSTOP)
    silent = attempt(lambda: looking.ask(job.socket, job.token, pid, within_s=0.2))
    os.kill(pid, signal.SIGKILL)
    still = left([everything])
    gone = attempt(job.look)
    is_found = pid in {one.pid for one in looking.jobs()}
    say("0 has looked")
    run.optimizer._run.abandon("")
    return silent, still, is_found, gone


def test_a_host_process_that_is_stopped_or_killed_is_told_of_and_leaves_nothing() -> None:
    (outcomes,) = forge.run([Job(killed, 2, timeout_s=120)])
    silent, still, is_found, gone = forge.values(outcomes)[0]
    assert "is stopped (SIGSTOP), and all workers wait for it; kill -CONT" in silent
    assert still == []
    assert not is_found
    assert "has ended, and its job on this host with it" in gone


def watched_to_the_end(rank: int) -> tuple[int, list[str]]:
    """A viewer has looked, and stays; another one is in the middle of its question. Then the run is over."""
    dist.init_process_group("gloo")
    run = Run()
    dist.barrier()
    job, everything, viewers = run.own, held(), list[socket.socket]()
    for said in (packed(Look(job.token)), packed(Look(job.token))[:7]):
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.connect(job.socket)
        line.sendall(said)
        viewers.append(line)
    run.finish()
    dist.barrier()
    return len(viewers), left([everything])


def test_a_viewer_does_not_keep_a_host_process_alive() -> None:
    (outcomes,) = forge.run([Job(watched_to_the_end, 2, timeout_s=120)])
    assert forge.values(outcomes) == [(2, []), (2, [])]


def alone(rank: int) -> tuple[str, str, str]:
    """One worker; the same when its run is over; and with others, without a host process."""
    dist.init_process_group("gloo")
    own = ob.attach(torch.optim.SGD((model := torch.nn.Linear(1, 1)).parameters()), model, ob.eager())
    during = str(own.status())
    own.finish()
    return during, str(own.status()), str(rank)


def test_a_single_worker_says_that_it_has_no_host_process() -> None:
    (outcomes,) = forge.run([Job(alone, 1, timeout_s=120)])
    ((during, after, _),) = forge.values(outcomes)
    assert "This run has one worker, and so no host process" in during
    assert "The run is over" in after
