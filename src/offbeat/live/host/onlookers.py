"""Those who look at a job while it runs: how they find its host process, and what they are answered.

An onlooker is no worker. It gets no page and no arena, one answer, and keeps nothing alive. To look it must be of the
same user, and show a token that opens nothing else. That token lies in a nameless file (``memfd``) of the host process,
beside the name of its socket: only who may read the process may read it, and it ends with the process, however that
ends. So nothing is ever left on a disk, and there is nothing to sweep.

The loop pays little. What is known is put together in slices of about ``SLICE_S``, between which it hears its workers;
at most every ``FRESH_S``, and for at most a ``SHARE`` of all time. Whoever looks more often is given the same again. No
worker is asked: what it does is read from its page.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from offbeat.basics.version import __version__
from offbeat.live.host import protocol as say
from offbeat.live.host.adders import Adders, threads
from offbeat.live.host.facts_server import FactsServer
from offbeat.live.host.links import Links, PeerState
from offbeat.live.host.server import BookedServer, Server
from offbeat.live.host.status import (
    DEAF_S,
    ChannelStatus,
    JobStatus,
    MemoryStatus,
    OtherHost,
    WorkerStatus,
    doing,
    plain,
    rebuilt,
)
from offbeat.live.memory.arena import PAGE_BYTES, Arena
from offbeat.live.memory.pages import read_page

PROCESS = "offbeat-host"  # what the kernel calls a host process
FILE = "offbeat-status"  # where it says how to look
FRESH_S, SHARE = 0.2, 0.02  # how old an answer may be; of the loop's time for making one
SLICE_S = 0.0005
SAMPLE_S, SAMPLES = 1.0, 10  # rates are those of the last seconds
ASK_S = 1.0  # how often other hosts are asked
TRIES = 3  # for a page that is being written: nobody is waited for
HANDS_IN = (say.Submit, say.AddStep, say.Lay)


class LetIn(Protocol):
    """A connection of the host process's, as far as it is looked at here."""

    is_known: bool
    rank: int
    pid: int
    page: int
    workers: dict[str, int]
    words: dict[str, int]
    handed_in: dict[str, int]
    since_unix_s: float
    heard_s: float


class Sample(NamedTuple):
    """Counts of one moment: steps of ranks, rounds of servers, bytes to and from other hosts."""

    at_s: float
    counts: dict[tuple[str, str | int], int]


class Onlookers:
    """Answers those who look. It reads what the host process knows, and changes nothing."""

    def __init__(
        self,
        arena: Arena,
        adders: Adders,
        connections: Sequence[LetIn],
        servers: Mapping[str, Server],
        links: Callable[[], Links | None],
        token: str,
    ) -> None:
        self._arena, self._adders = arena, adders
        self._connections, self._servers, self._links = connections, servers, links
        self._token, self._of_workers, self._file = secrets.token_hex(16), token, -1
        self._since_unix_s, self._script = time.time(), ""
        self._samples = deque[Sample](maxlen=SAMPLES)
        self._known, self._answer, self._fresh_until_s = dict[str, Any](), b"", 0.0
        self._making: Iterator[None] | None = None  # of the next answer,
        self._took_s = 0.0  # which has taken so much of the loop's time,
        self._waiting: list[Callable[[], None]] = []  # and those who wait for it
        self._told: dict[str, tuple[float, JobStatus]] = {}  # by other hosts, and when
        self._asked_s = -ASK_S
        self.sample_s = 0.0  # when counts are to be noted, if anything happens at all

    def open(self, name: bytes | str) -> None:
        """Say how to look, to whoever may read this process. ``name``: of the socket."""
        with contextlib.suppress(OSError):  # a system that has no such files: then nobody can look
            self._file = os.memfd_create(FILE, os.MFD_CLOEXEC)
            os.fchmod(self._file, 0o600)
            text = name.decode("latin-1") if isinstance(name, bytes) else name
            os.write(self._file, json.dumps({"socket": text, "token": self._token, "pid": os.getpid()}).encode())
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text(PROCESS, encoding="ascii")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def may_look(self, message: say.Look) -> bool:
        """Whoever has a token for looking, and workers, which have a better one."""
        shown = message.token.encode(errors="replace")
        return any(hmac.compare_digest(shown, token.encode()) for token in (self._token, self._of_workers))

    def ask(self, tell: Callable[[bytes], None]) -> None:
        """Somebody who may look does: ``tell`` is called soon, or at once."""
        now_s = time.monotonic()
        self._ask_hosts(now_s)
        self._know(now_s, lambda: tell(self._answer))

    def _know(self, now_s: float, then: Callable[[], None]) -> None:
        """Put together what is known, unless that was done a moment ago."""
        if self._making is None and now_s < self._fresh_until_s:
            then()
            return
        self._waiting.append(then)
        if self._making is None:
            self._took_s, self._making = 0.0, self._put_together()

    @property
    def is_busy(self) -> bool:
        """Whether ``go_on`` wants to be called."""
        return self._making is not None

    def go_on(self) -> None:
        """Put together a little more: the loop has others to hear."""
        begun_s = now_s = time.monotonic()
        while self._making is not None and now_s - begun_s < SLICE_S:
            is_over = next(self._making, self) is self
            took_s, now_s = time.monotonic() - now_s, time.monotonic()
            self._took_s += took_s
            if is_over:
                self._making = None
                self._fresh_until_s = now_s + max(FRESH_S, self._took_s / SHARE)
                waiting, self._waiting = self._waiting, []
                for then in waiting:
                    then()

    def _ask_hosts(self, now_s: float) -> None:
        links = self._links()
        if links is not None and now_s >= self._asked_s + ASK_S:
            self._asked_s = now_s
            for peer in links.peers():
                if peer.is_connected and peer.stalls_s is None:  # else questions would pile up
                    links.send(peer.name, say.LookHost(""))

    def hear_host(self, host: str, message: Any) -> None:
        """Another host asks, or has answered."""
        now_s = time.monotonic()
        if isinstance(message, say.LookHost):
            self._know(now_s, lambda: self._tell_host(host))
        else:
            with contextlib.suppress(ValueError):
                self._told[host] = (now_s, rebuilt(JobStatus, message.status))

    def _tell_host(self, host: str) -> None:
        if (links := self._links()) is not None:
            links.send(host, say.HostSeen("", {**self._known, "other_hosts": []}))

    def came(self, worker: LetIn) -> None:
        """A worker has been let in."""
        if not self._script:
            self._script = script(worker.pid)

    # Rates.

    def sample(self, now_s: float) -> None:
        """Note counts, from which rates are made."""
        self.sample_s = now_s + SAMPLE_S
        self._samples.append(Sample(now_s, self._counts()))

    def _counts(self) -> dict[tuple[str, str | int], int]:
        counts: dict[tuple[str, str | int], int] = {}
        for one in self._connections:
            if one.is_known:
                counts["steps", one.rank] = self._steps(one)
        for key, server in self._servers.items():
            counts["rounds", key] = server.rounds
        for peer in self._peers():
            counts["sent", peer.name], counts["received", peer.name] = peer.sent_bytes, peer.received_bytes
        return counts

    def _rate(self, now_s: float, name: str, of: str | int, count: int) -> float | None:
        for sample in self._samples:
            if (name, of) in sample.counts and now_s - sample.at_s > 0.5 * SAMPLE_S:
                return (count - sample.counts[name, of]) / (now_s - sample.at_s)
        return None

    def _steps(self, worker: LetIn) -> int:
        """How many it has taken, which it shows in its words of runs."""
        words = self._arena.words_of(worker.page)
        runs = [word for key, word in worker.words.items() if isinstance(self._servers.get(key), FactsServer)]
        return max((int(words[word]) for word in runs), default=0)

    def _peers(self) -> list[PeerState]:
        links = self._links()
        return [] if links is None else links.peers()

    # What is known.

    def _put_together(self) -> Iterator[None]:
        """All of it, with a pause after each channel and each worker: what has gone meanwhile is left out."""
        known = [one for one in self._connections if one.is_known]
        ranks = {one.rank for one in known}
        waits: dict[int, set[int]] = {rank: set() for rank in ranks}
        taken, behind = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
        channels = []
        for key, server in list(self._servers.items()):
            if not isinstance(server, FactsServer):
                channels.append(self._channel(time.monotonic(), key, server))
                self._count(key, server, taken, behind, waits)
                yield
        by: dict[int, list[int]] = {}
        for rank in sorted(ranks):
            for other in waits[rank]:
                by.setdefault(other, []).append(rank)
        workers = []
        for one in sorted(known, key=lambda one: one.rank):
            if one in self._connections:
                rank = one.rank
                waiting = tuple(sorted(waits[rank])), tuple(by.get(rank, ()))
                workers.append(vars(self._worker(time.monotonic(), one, taken[rank], behind[rank], *waiting)))
                yield
        status = JobStatus(
            __version__,
            socket.gethostname(),
            os.getpid(),
            self._script,
            self._since_unix_s,
            max((len(one.others.home_of) for one in self._servers.values()), default=len(workers)),
            (),
            tuple(sorted(channels, key=lambda one: one.name)),
            tuple(self._other(time.monotonic(), peer) for peer in self._peers()),
            self._memory(channels),
            self._adders.under_way,
            threads(),
            tuple(note for one in self._servers.values() if isinstance(one, FactsServer) for note in one.notes),
        )
        yield
        self._known = {**plain(status), "workers": workers}
        yield
        self._answer = say.packed(say.Seen(self._known))

    def _count(
        self, key: str, server: Server, taken: dict[int, int], behind: dict[int, int], waits: dict[int, set[int]]
    ) -> None:
        """Where workers are at a server, added to what is known of them."""
        here = [one for one in self._connections if one.is_known and key in one.workers]
        ranks = {one.workers[key]: one.rank for one in here}
        handed_in = {one.rank: one.handed_in.get(key, 0) for one in here}
        of = server.others.of
        everyone = ((number, place) for w, place in server.places().items() for number in range(of * w, of * w + of))
        for number, place in everyone:
            if (rank := ranks.get(number)) is None:
                continue
            own = place.taken if place.taken >= 0 else handed_in[rank] - bool(place.waits_for)
            there = place.there if place.there >= 0 else max(handed_in.values()) - bool(place.waits_for)
            taken[rank] += own
            if server.what != "shared weights":  # where nobody is to have what others have
                behind[rank] = max(behind[rank], there - own)
            waits[rank].update(ranks.get(of * other, of * other) for other in place.waits_for)

    def _worker(
        self, now_s: float, one: LetIn, taken: int, behind: int, waits_for: tuple[int, ...], by: tuple[int, ...]
    ) -> WorkerStatus:
        letter = state_of(one.pid)
        page = {} if letter in ("T", "t") else read_page(self._arena, one.page, TRIES)
        state, words, at, quiet_s = doing(letter, page, now_s, one.heard_s)
        steps = self._steps(one)
        return WorkerStatus(
            one.rank,
            one.pid,
            one.since_unix_s,
            state,
            words,
            at,
            quiet_s,
            steps,
            self._rate(now_s, "steps", one.rank, steps),
            sum(one.handed_in.get(key, 0) for key in one.workers),
            taken,
            behind,
            waits_for,
            by,
            str(page.get("stacks") or ""),
        )

    def _channel(self, now_s: float, key: str, server: Server) -> ChannelStatus:
        ranks = tuple(sorted(one.rank for one in self._connections if one.is_known and key in one.workers))
        memory = server.memory if isinstance(server, BookedServer) else (0, 0, 0, False)
        rate = self._rate(now_s, "rounds", key, server.rounds)
        return ChannelStatus(key.removeprefix("offbeat/"), server.what, ranks, server.rounds, rate, *memory)

    def _other(self, now_s: float, peer: PeerState) -> OtherHost:
        ranks = set[int]()
        for server in self._servers.values():
            if isinstance(server, FactsServer) and peer.name in server.others.hosts:
                number = server.others.hosts.index(peer.name)
                ranks.update(worker for worker, home in enumerate(server.others.home_of) if home == number)
        told_s, told = self._told.get(peer.name, (None, None))
        stalls_s = 0.0 if peer.stalls_s is None else now_s - peer.stalls_s
        answers = peer.is_connected and stalls_s < DEAF_S
        return OtherHost(
            peer.address,
            answers,
            "" if answers else f"nothing for {stalls_s:.0f} s" if peer.is_connected else peer.words,
            None if peer.heard_s is None else now_s - peer.heard_s,
            peer.sent_bytes,
            peer.received_bytes,
            self._rate(now_s, "sent", peer.name, peer.sent_bytes),
            self._rate(now_s, "received", peer.name, peer.received_bytes),
            tuple(sorted(ranks)),
            "" if told is None else told.host,
            None if told_s is None else now_s - told_s,
            () if told is None else told.workers,
        )

    def _memory(self, channels: Sequence[ChannelStatus]) -> MemoryStatus:
        own_bytes = 0
        with contextlib.suppress(OSError, ValueError, IndexError):
            _, resident, shared, *_ = Path("/proc/self/statm").read_text(encoding="ascii").split()
            own_bytes = (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
        return MemoryStatus(
            os.fstat(self._arena.descriptor).st_blocks * 512,
            sum(one.is_known for one in self._connections) * PAGE_BYTES,
            sum(one.memory_bytes for one in channels if one.gpu),
            own_bytes,
        )


def state_of(pid: int) -> str:
    """A letter for the state of a process, as the kernel names it; "" where it is not known, "X" where it has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(") ")[2][:1]
    except (FileNotFoundError, ProcessLookupError):
        return "X" if pid > 0 else ""
    except OSError:
        return ""


def script(pid: int) -> str:
    """What a process runs, in a word or two: the script's name, or its module."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(4096).decode(errors="replace").split("\0")
    except OSError:
        return ""
    for before, word in pairwise(words):
        if word == "-c" or before == "-m":
            return "python -c" if word == "-c" else word
        if word and not word.startswith("-") and before not in ("-W", "-X"):
            return Path(word).name
    return ""
