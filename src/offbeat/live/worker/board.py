"""The notice board of a job: small facts that workers post for one another, beside the tensors.

Facts travel through the host processes (`offbeat.live.worker.news`), and every worker holds a copy of them all: reading
the board costs nothing, and no store is asked once the workers have met. (A store may live in a process that has been
stopped, and whoever asks it then is deaf for as long.)

Uneven data. A worker that has run out posts ``done``; it may take step s idly only when it knows that some worker
takes it with data. That worker posts ``reached`` when it has waited for a moment at that step (see ``Waiter``), or at
once from then on, since it then knows that somebody is done. When all are done, the last step is known to all.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from offbeat.basics.units import format_ranks
from offbeat.live.host import mean
from offbeat.live.host import protocol as say
from offbeat.live.transport import elsewhere, hosts, meeting, notice
from offbeat.live.transport.errors import ConfigMismatch, OffbeatError, PeerFailed
from offbeat.live.transport.processes import rank_has_ended
from offbeat.live.worker.line import Line, join, leave
from offbeat.live.worker.news import Failure, Loss, RunFacts
from offbeat.live.worker.start import prepare, secret_of

POLL_S = 0.02  # how often a waiting worker looks up by itself: signals are heard then
BEGAN = "offbeat/began"  # in the job's store, once a run has that goes on without the dead
NEWS_S = 2.0  # how long a worker that lost a connection waits to hear whose it was


class Board:
    """Facts of one attached optimiser, and the line to those who post them."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        rank: int,
        size: int,
        members: tuple[int, ...] = (),
        of_job: Store | None = None,
        min_workers: int = 0,
        frozen_s: float | None = None,
    ) -> None:
        """``min_workers``: as long as so many are left the run goes on without those who die; 0: it does not. Who is
        stopped for longer than ``frozen_s`` is killed; None: it is waited for.
        """
        self.of_job, self._store = of_job or store, PrefixStore(prefix, store)
        self.line: Line | None = None  # to the host process, where there are several workers
        self.homes: list[str] = []  # the names of all ranks' hosts, where there are several
        self.name, self.rank, self.size = prefix, rank, size
        self.members = members or tuple(range(size))  # what the script calls those whom we number from 0
        self.root, self.min_workers, self.frozen_s = prefix, min_workers, frozen_s
        self.beside: Board | None = None  # of the same run: who fails there is missing here as well
        # Called before something is handed in that has all steps so far in it, or, if so, the one being taken, too.
        self.hands_over: Callable[[bool], None] | None = None
        self._section = ""  # before the names of what is posted for one channel of several
        self.someone_is_done = False
        self.averages = 0  # that this worker has taken part in
        self.means = 0  # that it has asked for
        self._alone: dict[str, str] = {}  # the facts of a single worker
        self._reached = -1
        self._link: RunFacts | None = None

    # The beginning.

    def agree(self, facts: dict[str, str], patience_s: float) -> None:
        """Every worker posts what it is; one that differs from rank 0 is refused on all of them."""
        if self.size == 1:
            return
        try:
            prepare(self.of_job)  # it takes seconds to start, which the others may need to come here
            own = {**facts, _HOME: hosts.name()}
            told = self._meet("", json.dumps(own), patience_s, _refuse)
            homes = [json.loads(told[rank])[_HOME] for rank in range(self.size)]
            self.line = self._join_host(homes, patience_s)
            self._link = RunFacts(self.name, self.line, self.rank, self.plan(), self.members.__getitem__)
        except RuntimeError as error:
            self.abandon()
            if isinstance(error, OffbeatError):
                raise
            raise PeerFailed(_STORE_GONE) from error
        except BaseException:
            self.abandon()
            raise

    def come_back(self, facts: dict[str, str], patience_s: float) -> None:
        """In place of a worker that has died: what this one is must be what a member has said that it is."""
        try:
            told = {rank: self._store.get(f"here/{rank}").decode() for rank in range(self.size)}
            own = json.dumps({**facts, _HOME: hosts.name()})
            if json.loads(told[self.rank])[_HOME] != hosts.name():
                raise ConfigMismatch(
                    f"rank {self.members[self.rank]} has come back on another host; start it where it was"
                )
            known = {
                rank: {name: one[name] for name in (*facts, _HOME)}
                for rank, words in told.items()
                for one in [json.loads(words)]
            }
            _refuse({rank: json.dumps(one) for rank, one in known.items()} | {self.rank: own}, self.size)
            self.line = join(self.name, self.of_job, self.members[self.rank], patience_s, starts=False)
            self._link = RunFacts(self.name, self.line, self.rank, self.plan(), self.members.__getitem__)
        except RuntimeError as error:
            self.abandon()
            if isinstance(error, OffbeatError):
                raise
            raise PeerFailed(_STORE_GONE) from error

    @property
    def has_posted_before(self) -> bool:
        """Whether somebody with this worker's rank has attached."""
        return bool(self._store.check([f"here/{self.rank}"]))

    def replica(self, patience_s: float) -> tuple[int, int]:
        """Where in the arena a member has laid its replica for this worker, which has come back, and its length."""
        assert self._link is not None
        start_s, what = time.monotonic(), "a member's replica"
        while (found := self._link.returns()) is None:
            self.check(what)
            if time.monotonic() - start_s > patience_s:
                raise self.gave_up(patience_s, what)
            self._link.hear(POLL_S)
        if isinstance(found, say.NoReturn):
            raise OffbeatError(f"rank {self.members[self.rank]} cannot come back: {found.why}")
        return found.at, found.nbytes

    def has_taken(self) -> None:
        """This worker is a member again."""
        assert self._link is not None
        self._link.has_taken()

    @property
    def wanted(self) -> bool:
        """Whether a worker that has come back wants a member's replica."""
        if self._link is None:
            return False
        self._link.hear(0.0)
        return self._link.wanted > 0

    def place_for(self, nbytes: int) -> int | None:
        """Where this worker's replica is to lie, which is between two steps; None: nowhere now."""
        assert self._link is not None
        return self._link.place_for(nbytes)

    def handed(self, nbytes: int, page: int, why: str = "") -> None:
        """It lies there. ``why``: it does not."""
        assert self._link is not None
        self._link.handed(nbytes, page, why)

    @property
    def losses(self) -> Sequence[Loss]:
        """Those without whom the others went on."""
        return () if self._link is None else self._link.losses

    def _meet(
        self, what: str, own: str, patience_s: float, judge: Callable[[dict[int, str], int], None]
    ) -> dict[int, str]:
        return meeting.meet(
            PrefixStore(what, self._store) if what else self._store,
            self.rank,
            self.size,
            own,
            patience_s,
            judge=judge,
            missing=self._did_not_attach,
            ended=lambda rank: rank_has_ended(self.members[rank]),
        )

    def _join_host(self, homes: list[str], patience_s: float) -> Line:
        """The line to the host process, if all have found theirs; else all ranks say whose is missing, and why.

        Where there are several hosts, their host processes are told of each other.
        """
        line, own = None, {"why": "", "at": ["", "", 0]}
        try:
            line = join(self.name, self.of_job, self.members[self.rank], patience_s)
            if len(set(homes)) > 1:
                secret = secret_of(self.of_job)
                told_at = line.listen(self.name, homes[self.rank], secret, hosts.address(), hosts.port(), patience_s)
                own["at"] = list(told_at)
        except (OSError, OffbeatError) as error:
            own["why"] = str(error) or type(error).__name__
        told = self._meet("host", json.dumps(own), patience_s, lambda posted, size: None)
        said = {rank: json.loads(words) for rank, words in sorted(told.items())}
        failed = [(rank, one["why"]) for rank, one in said.items() if one["why"]]
        if failed or line is None:
            if line is not None:
                leave(self.name, line)
            rank, why = failed[0]
            raise OffbeatError(f"rank {self.members[rank]} has no host process: {why}")
        if len(set(homes)) > 1:
            self.homes = [one["at"][0] for one in said.values()]
            others = {tuple(one["at"]) for one in said.values() if one["at"] != own["at"]}
            line.send(say.OtherHosts(f"{self.name}/hosts", sorted(others)))
        return line

    def carriers(self, gpus: Sequence[str]) -> set[str]:
        """The ways of vectors whose slots lie on these GPUs, or on the host."""
        return {"ipc" if gpus else "shm", *(("tcp",) if self.homes else ())}

    def plan(self, ranks: Sequence[int] | None = None) -> dict[str, Any]:
        """What a server must know of these workers, who have their numbers there in this order: all of them."""
        ranks = range(self.size) if ranks is None else ranks
        return {
            "run": self.name,
            "size": len(ranks),
            "homes": [self.homes[rank] for rank in ranks if self.homes],
            **self.membership(ranks),
        }

    def membership(self, ranks: Sequence[int]) -> dict[str, Any]:
        """What a server of these ranks must know to go on without some."""
        return {
            "root": self.root,
            "ranks": list(ranks),
            "min_workers": self.min_workers,
            "frozen_s": self.frozen_s,
        }

    def has_attached(self) -> Callable[[], bool]:
        """This worker can go on without others; where the run does, it will when all can, which the answer tells."""
        if self.min_workers and self._link is not None:
            self._link.post_attached()
        return lambda: not self.min_workers or self._link is None or self._all(say.ATTACHED)

    def has_begun(self) -> None:
        """From now on a worker that dies can come back: whoever hosts the job's store is to know."""
        store = self.of_job
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        store.set(BEGAN, "1")

    @property
    def dead(self) -> dict[int, float]:
        """Those without whom the run goes on, and when this worker has heard of it."""
        return {} if self._link is None else self._link.dead

    def _did_not_attach(self, absent: list[int], waited_s: float, ended: bool) -> PeerFailed:
        ranks = format_ranks([self.members[rank] for rank in absent])
        if ended:
            return PeerFailed(f"the process of {ranks} ended before it called ob.attach; look there first")
        return PeerFailed(
            f"{ranks} did not attach within {waited_s:g} s; every rank must call ob.attach, and patience_s is how long "
            "it waits for the others"
        )

    def all_have_read(self) -> None:
        """Before a refusal of all ranks: waits a moment for the others to have read what it is about."""
        self._post(f"read/{self.rank}", "1")
        with suppress(PeerFailed):
            self._until(lambda: self._all("read"), NEWS_S)

    def _until(self, ready: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not ready() and time.monotonic() < end:
            self.check()
            self.pause(POLL_S, ready)

    def _all(self, name: str) -> bool:
        return all(f"{name}/{r}" in self._facts for r in range(self.size))

    def store(self, name: str) -> Store:
        """A part of the store for one group."""
        return PrefixStore(f"group/{name}", self._store)

    def section(self, name: str) -> Board:
        """This board for one channel more: the same line and failures, names of its own for what is awaited."""
        part = copy.copy(self)
        part.name, part._section, part.hands_over = f"{self.name}/{name}", f"{name}/", None
        return part

    # Facts.

    @property
    def _facts(self) -> dict[str, str]:
        return self._alone if self._link is None else self._link.facts

    def _post(self, name: str, value: str) -> None:
        if self._link is None:
            self._alone[name] = value
        else:
            self._link.post(name, value)

    def pause(self, seconds: float, ready: Callable[[], bool]) -> None:
        """Sleep until there is news, and no longer than that; not at all if ``ready``, which is not missed."""
        if self._link is None:
            time.sleep(seconds)
            return
        if not ready():
            self._link.hear(seconds)

    def meeting(self, name: str, ranks: tuple[int, ...]) -> Callable[[], bool]:
        """Say that this worker is there; the answer tells whether all ``ranks`` are."""
        name = f"meeting/{self._section}{name}"
        self._post(f"{name}/{self.rank}", "1")
        return lambda: all(f"{name}/{r}" in self._facts or r in self.dead for r in ranks)

    def publish(self, name: str, text: str) -> None:
        """A fact under a name of its own."""
        self._post(f"fact/{self._section}{name}", text)

    def published(self, name: str) -> str | None:
        """That fact, if it has been published."""
        return self._facts.get(f"fact/{self._section}{name}")

    # Failure.

    def fail(self, message: str) -> None:
        """Tell everyone that this worker has failed; nothing where it only follows another."""
        if self._link is not None:
            self._link.fail(message[:4000])

    @property
    def has_failed(self) -> bool:
        """Whether the run is over because of another worker."""
        return self._link is not None and self._link.failure is not None

    def leave(self, how: str) -> None:
        """The others go on without this worker, as long as they are enough."""
        if self._link is not None:
            self._link.leave(how)

    def check(self, during: str = "") -> None:
        """Raise if another worker has failed, or is gone; or if this one is asked to end."""
        notice.look()
        for board in (self, self.beside):
            if board is not None and board._link is not None and board._link.failure is not None:
                if board._link.failure.after_notice:
                    notice.expect()
                raise _failed(board._link.failure, during)  # under no name: a frame that holds its error is a cycle

    def lost(self, during: str) -> PeerFailed:
        """The error for a connection that broke. Whose it was is on its way: that worker's own line has closed too."""
        with suppress(PeerFailed):
            self._until(lambda: False, NEWS_S)
        for board in (self, self.beside):
            if board is not None and board._link is not None and board._link.failure is not None:
                return _failed(board._link.failure, during)
        return PeerFailed(f"lost a connection during {during}; {self._in_words(self._answers())}")

    def waits_for(self, what: str) -> AbstractContextManager[None]:
        """While this lasts, that is what this worker is said to wait for."""
        return elsewhere.waiting(self.name, what)

    def gave_up(self, seconds: float, what: str) -> PeerFailed:
        """The error for a wait that outlasted its patience: it says where everybody is."""
        self.check(what)
        return PeerFailed(f"waited {seconds:.0f} s for {what}; {self._in_words(self._answers())}")

    def bear_with(self, since_s: float, patience_s: float, what: str) -> float:
        """Look up from a wait that may last as long as others train. Answers since when all are known to be there.

        Raises if a worker has failed, or, when patience has run out, if one does not even answer. (One that computes
        does; so does one that waits.)
        """
        self.check(what)
        if time.monotonic() - since_s <= patience_s:
            return since_s
        answers = self._answers()
        if len(answers) < self.size - len(self.dead):
            self.check(what)
            raise PeerFailed(f"lost a peer during {what}; {self._in_words(answers)}")
        return time.monotonic()

    def _answers(self) -> dict[int, str]:
        heard = {} if self._link is None else self._link.ask_all(self.size)
        return {**heard, self.rank: elsewhere.in_words()}

    def _in_words(self, answers: dict[int, str]) -> str:
        silent = [r for r in range(self.size) if r not in answers and r not in self.dead]
        said = [f"rank {self.members[r]} {_SILENT}" for r in silent]
        said += [f"rank {self.members[r]} {doing}" for r, doing in sorted(answers.items()) if r != self.rank]
        return "; ".join(said[:16]) + (f"; and {len(said) - 16} more" if len(said) > 16 else "")

    # Steps and their end.

    def reach(self, t: int) -> None:
        """Step ``t`` is taken with data."""
        if t > self._reached:
            self._reached = t
            self._post(f"reached/{self.rank}", str(t))

    def post_done(self, steps: int) -> None:
        """This worker has no data left, after so many steps."""
        self._post(f"done/{self.rank}", str(steps))
        self._post("done", "1")
        self.someone_is_done = True

    def look_for_done(self) -> bool:
        """Whether somebody may have no data for this step: its data has ended, it waits for more, or it averages."""
        self.someone_is_done = self.someone_is_done or "done" in self._facts
        facts = self._facts
        waits = any(facts.get(f"waits/{rank}") == "1" and rank not in self.dead for rank in range(self.size))
        return self.someone_is_done or waits or self.average_is_asked(self.averages)

    def waits_for_data(self, waits: bool) -> None:
        """Whether this worker has no data now, and may be given more."""
        self._post(f"waits/{self.rank}", "1" if waits else "")

    def progress(self, among: tuple[int, ...] | None = None) -> tuple[bool, int]:
        """Whether all of these workers are without data, and the last step one of them is known to take with data."""
        ranks, facts = range(self.size) if among is None else among, self._facts
        done = [int(facts.get(f"done/{r}", "-1")) for r in ranks]
        reached = [int(facts.get(f"reached/{r}", "-1")) for r in ranks]
        return min(done) >= 0, max(*reached, *(steps - 1 for steps in done), -1)

    def handing_over(self, with_gradient: bool = False) -> None:
        """What is handed in next has this worker's work in it."""
        if self.hands_over is not None:
            self.hands_over(with_gradient)

    def took_steps(self, steps: int) -> None:
        """So many, which whoever looks at the job is shown. Nobody is told."""
        if isinstance(self._link, RunFacts):
            self._link.took_steps(steps)

    # Averages in the middle of a run.

    def ask_for_average(self, number: int) -> None:
        self._post(f"average/{number}/{self.rank}", "1")
        self._post(f"average/{number}", "1")

    def average_is_asked(self, number: int, among: tuple[int, ...] | None = None) -> bool:
        """Whether anybody, or anybody ``among`` these, asks for it."""
        keys = [f"average/{number}"] if among is None else [f"average/{number}/{rank}" for rank in among]
        return any(key in self._facts for key in keys)

    def all_ask_for_average(self, number: int, among: tuple[int, ...] | None = None) -> bool:
        """Whether all of these ask for it, but those whose data has ended."""
        ranks, facts = range(self.size) if among is None else among, self._facts
        return all(f"average/{number}/{rank}" in facts or f"done/{rank}" in facts for rank in ranks)

    # Means of what the script has measured.

    def say_for_mean(self, numbers: Sequence[float]) -> Callable[[], list[float] | None]:
        """What this worker has for the mean that is next; the answer is that mean, once it is known.

        Only the last two of each are kept: whoever says something for one has read the last but one.
        """
        number, self.means = self.means, self.means + 1
        if self._link is None:
            return lambda: [*numbers]
        self._post(mean.said_by(number, self.rank), mean.words(number, self.rank, numbers))
        return lambda: mean.known(self._facts, number)

    # The end.

    def close(self) -> None:
        """All are through."""
        if self._link is not None:
            self._link.close()
        self._leave_host()

    def _leave_host(self) -> None:
        if self.line is not None:
            leave(self.name, self.line)
            self.line = None

    def abandon(self) -> None:
        """Leave without waiting for anybody; the others have been told why, if there was something to tell."""
        if self._link is not None:
            self._link.abandon()
        self._leave_host()


_HOME = "host"
_STORE_GONE = "the job's store is gone: rank 0, or the launcher, has ended; look at what that one printed"
_SILENT = "does not answer: its process is stopped, or its host is out of reach"


def _failed(failure: Failure, during: str) -> PeerFailed:
    said = f"lost a peer during {during}; " if during and failure.vanished else ""
    return PeerFailed(said + failure.words)


def _refuse(posted: dict[int, str], size: int) -> None:
    """Say what differs from rank 0, when all have posted what they are."""
    if len(posted) < size:
        return
    facts = [json.loads(posted[rank]) for rank in range(size)]
    for own in facts:
        own.pop(_HOME)
    for rank, theirs in enumerate(facts):
        for fact, value in facts[0].items():
            if theirs.get(fact) != value:
                raise ConfigMismatch(_difference(fact, value, rank, str(theirs.get(fact))))


def _difference(fact: str, here: str, rank: int, there: str) -> str:
    if fact == "parameters":
        ours, theirs = here.split("\n"), there.split("\n")
        for a, b in zip(ours, theirs, strict=False):
            if a != b:
                return f"the models differ: rank 0 has {a}, rank {rank} has {b}; build the same model on every rank"
        return (
            f"the models differ: rank 0 has {len(ours)} parameters and buffers, rank {rank} has {len(theirs)}; "
            "build the same model on every rank"
        )
    return f"the ranks differ in their {fact}: rank 0 has {here}, rank {rank} has {there}; make them equal"
