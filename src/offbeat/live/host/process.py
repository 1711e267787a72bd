"""The host process itself: one loop that hears all workers of a host, and a server for each of their channels.

It also hears the host processes of the run's other hosts (`offbeat.live.host.links`).

Nothing here waits for one worker. What comes in pieces is put together as it comes; what does not fit into a worker's
connection is kept for it. A worker has left when its connection closes or its process ends, whichever is heard first: a
data loader that it has forked may hold the connection open.

Until a connection has shown the job's token it may be anybody's: who says nothing, or something else, delays nobody.
When the last worker has gone the process ends, and with it everything that it owned.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import selectors
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from offbeat.basics.units import format_seconds
from offbeat.live.host import protocol as say
from offbeat.live.host.adders import Adders, threads
from offbeat.live.host.books import Books
from offbeat.live.host.channel_server import ChannelServer
from offbeat.live.host.exchange_server import ExchangeServer
from offbeat.live.host.facts_server import BellServer, FactsServer, Membership
from offbeat.live.host.lease_server import LeaseServer
from offbeat.live.host.ledger import Expression
from offbeat.live.host.links import Links
from offbeat.live.host.onlookers import HANDS_IN, Onlookers
from offbeat.live.host.protocol import Inbox, packed
from offbeat.live.host.saver_server import SaverServer
from offbeat.live.host.server import BookedServer, Counterparts, Server
from offbeat.live.host.settling import Counts, Held
from offbeat.live.host.weights_server import WeightsServer
from offbeat.live.memory.arena import PAGE_BYTES, PAGES, WORDS, Arena, DeviceSlots, SlotMemory
from offbeat.live.memory.device import let_read
from offbeat.live.memory.pages import read_page
from offbeat.rounds.held import Elsewhere

COUNTS = (*HANDS_IN, say.MeetPeer)  # with these steps are handed in
MOST_STRANGERS = 128  # that have not said who they are; the oldest must go
DYING_S = 0.5  # after its line has closed, for a process to end
MOST_ONLOOKERS = 8  # whose answers wait to be read; the oldest must go
FIRST_S = 120.0  # for the first worker to come
LEAVE_S = 5.0  # for other hosts to hear what there was to say, when all workers here have left
GPU_LOOK_S = 0.0002  # how often words and streams of GPUs are looked at, while something is awaited there
READ_BYTES = 1 << 18
SWITCH_S = 0.0002  # how soon an adder lets go of the interpreter that the loop wants
_USER = struct.Struct("3i")


class Unheard:
    """What one worker has said and the host process has not heard yet, in its order.

    A message is heard when the worker's GPU has come to what it speaks of, which a word of the worker's says (``word``
    reads that of a channel). What stands behind a message that waits, waits with it.
    """

    def __init__(self, word: Callable[[str], int]) -> None:
        self._word, self._messages = word, deque[Any]()

    def __bool__(self) -> bool:
        return bool(self._messages)

    def come(self, message: Any) -> Iterator[Any]:
        """One more has come. Those that are heard now."""
        self._messages.append(message)
        return self.due()

    def due(self) -> Iterator[Any]:
        """Those that are heard now."""
        while self._messages and self._is_due(self._messages[0]):
            yield self._messages.popleft()

    def _is_due(self, message: Any) -> bool:
        due = getattr(message, "due", 0)
        return not due or self._word(message.key) >= due


class Connection:
    """One worker's, or a stranger's."""

    def __init__(self, line: socket.socket, pages: list[int], arena: Arena) -> None:
        self.line, self._pages, self._arena = line, pages, arena
        self.inbox = Inbox(say.LONGEST_HELLO)
        self.out = bytearray()
        self.rank, self.page, self.pidfd, self.pid = -1, -1, -1, 0
        self.dies_s: float | None = None  # its line has closed; until when its process may be seen to end
        self.workers: dict[str, int] = {}  # its number at each channel that it has come to
        self.words: dict[str, int] = {}  # which of its words belongs to that channel
        self.unheard = Unheard(self._word)
        self.is_known = self.has_looked = False
        self.handed_in: dict[str, int] = {}  # how many vectors, for whoever looks
        self.hands_over: set[LeaseServer] = set()  # who is to hear of the next
        self.since_unix_s, self.heard_s = 0.0, 0.0

    def _word(self, key: str) -> int:
        """What it has come to; of a channel that the worker has left, or never came to, nothing is awaited."""
        return int(self._arena.words_of(self.page)[self.words[key]]) if key in self.words else sys.maxsize

    def tell(self, answer: bytes) -> None:
        """Something that is packed already."""
        self.out += answer

    def send(self, message: Any) -> None:
        self.out += packed(message)

    def flush(self) -> bool:
        """As much as the connection takes now. Whether something is left."""
        with contextlib.suppress(OSError):  # it is full, or its worker is gone, which is heard otherwise
            while self.out:
                sent = self.line.send(self.out, socket.MSG_DONTWAIT)
                del self.out[:sent]
        return bool(self.out)

    def close(self) -> None:
        self.line.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        if self.page >= 0:
            self._pages.append(self.page)


class Host:
    """Serves the workers that come to ``listener`` with the job's token, until the last has gone."""

    def __init__(self, listener: socket.socket, token: str) -> None:
        self._listener, self._token = listener, token
        self._arena = Arena()
        self._pages = [PAGE_BYTES * k for k in reversed(range(PAGES))]
        self._ear, self._mouth = socket.socketpair()
        self._ear.setblocking(False)
        self._adders = Adders(self._wake)
        self._connections: list[Connection] = []
        self._servers: dict[str, Server] = {}
        self._name, self._links = "", None  # type: str, Links | None
        self._opened: dict[str, set[str]] = {}  # which other hosts' workers have come to a channel
        self._plans: dict[str, dict[str, Any]] = {}  # of channels that only others have come to
        self._dead: dict[str, list[int]] = {}  # of runs that go on without them
        self._lost_hosts: dict[str, list[str]] = {}  # that such runs have lost,
        self._settled: dict[str, tuple[list[str], Counts]] = {}  # and what counts of those of which it is settled
        self._came_back: dict[str, dict[int, int]] = {}  # at which pages of a run's exchanges its workers went on
        self._leaving: dict[str, float] = {}  # servers whose workers have left, and until when others may hear the rest
        self._coming: dict[str, tuple[str, int]] = {}  # for whose vector on its way a slot was taken, by host
        self._stretches: dict[str, tuple[say.Stretch, torch.Tensor]] = {}  # the same for what goes into no slot
        self._selector = selectors.DefaultSelector()
        self._had_workers = False
        self._ends_s: float | None = None  # without workers: until when others may hear the rest
        self._onlookers = Onlookers(
            self._arena, self._adders, self._connections, self._servers, lambda: self._links, token
        )

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._mouth.send(b"!", socket.MSG_DONTWAIT)

    # The loop.

    def run(self) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._ear, selectors.EVENT_READ, self._sums_are_there)
        self._onlookers.open(self._listener.getsockname())
        begun_s = time.monotonic()
        try:
            while not self._is_over(begun_s):
                for key, events in self._selector.select(self._pause_s()):
                    self._call(key, events)
                self._look_up()
                self._flush()
        finally:
            self._adders.close()
            self._onlookers.close()
            if self._links is not None:
                self._links.close()
            for connection in self._connections:
                connection.close()
            self._listener.close()

    def _is_over(self, begun_s: float) -> bool:
        now_s = time.monotonic()
        has_workers = any(connection.is_known for connection in self._connections)
        if has_workers or self._leaving or any(server.stays for server in self._servers.values()):
            self._ends_s = None
            return False
        if self._links is not None and self._links.owes_anybody:  # what was said last, they are to have
            self._ends_s = now_s + LEAVE_S if self._ends_s is None else self._ends_s
            return now_s >= self._ends_s
        return self._had_workers or now_s - begun_s > FIRST_S

    def _call(self, key: selectors.SelectorKey, events: int) -> None:
        if isinstance(key.data, Connection):
            connection = key.data
            if key.fd == connection.pidfd:
                self._hear_out(connection)
                self._part_with(connection, ended=True)
            elif events & selectors.EVENT_READ and connection in self._connections:
                self._read(connection)
        else:
            key.data()

    def _pause_s(self) -> float | None:
        if self._onlookers.is_busy:
            return 0.0
        if self._adders.looks or any(connection.unheard for connection in self._connections):
            return GPU_LOOK_S
        wakes = [wakes_s for one in self._servers.values() if (wakes_s := one.wakes_s) is not None]
        wakes += [one.dies_s for one in self._connections if one.dies_s is not None]
        wakes += [*self._leaving.values(), *([] if self._ends_s is None else [self._ends_s])]
        if self._links is not None and self._links.wakes_s is not None:
            wakes.append(self._links.wakes_s)
        if wakes:
            return max(0.0, min(wakes) - time.monotonic())
        return None if self._had_workers else 1.0

    def _look_up(self) -> None:
        """What time and GPUs have brought."""
        if self._adders.looks:
            self._adders.made()
        for connection in self._connections:
            for message in connection.unheard.due():
                self._hear(connection, message)
        now_s = time.monotonic()
        if self._onlookers.is_busy:
            self._onlookers.go_on()
        if now_s >= self._onlookers.sample_s:
            self._onlookers.sample(now_s)
        for connection in list(self._connections):
            if connection.dies_s is not None and now_s >= connection.dies_s:
                self._part_with(connection)
        for server in list(self._servers.values()):
            if (wakes_s := server.wakes_s) is not None and now_s >= wakes_s:
                server.silence(now_s)
        if self._links is not None and (wakes_s := self._links.wakes_s) is not None and now_s >= wakes_s:
            self._links.on_time(now_s)

    def _sums_are_there(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._ear.recv(4096):
                pass
        self._adders.made()

    def _flush(self) -> None:
        for server in self._servers.values():
            server.flush()
        for key, until_s in list(self._leaving.items()):
            if self._servers[key].is_through or time.monotonic() >= until_s:
                self._close(key)
        if self._links is not None:
            self._links.flush()
        for connection in self._connections:
            if connection.dies_s is not None:
                connection.out.clear()
            elif connection.out:
                wants = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.flush() else 0)
                if self._selector.get_key(connection.line).events != wants:
                    self._selector.modify(connection.line, wants, connection)
            elif self._selector.get_key(connection.line).events != selectors.EVENT_READ:
                self._selector.modify(connection.line, selectors.EVENT_READ, connection)

    # Those who come.

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            line, _ = self._listener.accept()
            line.setblocking(False)
            connection = Connection(line, self._pages, self._arena)
            self._connections.append(connection)
            self._selector.register(line, selectors.EVENT_READ, connection)
            strangers = [one for one in self._connections if not one.is_known]
            if len(strangers) > MOST_STRANGERS:
                self._part_with(strangers[0])

    def _read(self, connection: Connection) -> bool:
        """Whether there was something to hear."""
        try:
            data = connection.line.recv(READ_BYTES)
            if not data:
                self._has_hung_up(connection)
                return False
            for message in connection.inbox.feed(data):
                if connection.is_known:
                    connection.heard_s = time.monotonic()
                    if not hasattr(message, "key"):
                        raise ValueError(f"a {type(message).__name__}, which is not a worker's to say")
                    for one in connection.unheard.come(message):
                        self._hear(connection, one)
                else:
                    self._let_in(connection, message)
            return True
        except BlockingIOError:
            return False
        except OSError:
            self._has_hung_up(connection)
        except ValueError as error:
            if connection.is_known:
                print(f"offbeat: rank {connection.rank} said {error}", file=sys.stderr)
            self._part_with(connection)
        return False

    def _let_in(self, connection: Connection, message: Any) -> None:
        if isinstance(message, say.Look):
            self._show(connection, message)
            return
        if not isinstance(message, say.Hello) or not hmac.compare_digest(_bytes(message.token), _bytes(self._token)):
            raise ValueError("no token of this job")
        pid = _pid_of_own_user(connection.line)
        connection.is_known, connection.pid, self._had_workers = True, pid, True
        connection.since_unix_s, connection.heard_s = time.time(), time.monotonic()
        connection.rank, connection.page = message.rank, self._pages.pop()
        connection.inbox.longest = say.LONGEST
        with contextlib.suppress(OSError):  # of another pid namespace: then its line alone tells of its end
            connection.pidfd = os.pidfd_open(pid)
            self._selector.register(connection.pidfd, selectors.EVENT_READ, connection)
        self._arena.bytes_at(connection.page, PAGE_BYTES)[:] = 0
        welcome = packed(say.Welcome(self._arena.nbytes, connection.page, os.getpid()))
        socket.send_fds(connection.line, [welcome], [self._arena.descriptor])
        self._onlookers.came(connection)

    def _show(self, connection: Connection, message: say.Look) -> None:
        """Answer somebody who looks, once. It stays a stranger: whether it reads, or goes, changes nothing."""
        _pid_of_own_user(connection.line)
        if connection.has_looked or not self._onlookers.may_look(message):
            raise ValueError("no token of this job's onlookers, or the second look of one")
        connection.has_looked = True
        looking = [one for one in self._connections if one.has_looked and one.out]
        if len(looking) >= MOST_ONLOOKERS:
            self._part_with(looking[0])
        self._onlookers.ask(connection.tell)

    def _has_hung_up(self, connection: Connection) -> None:
        """The lines of a process that ends close a moment before it is known to have ended."""
        if connection.pidfd >= 0 and connection.workers:
            self._selector.unregister(connection.line)
            connection.dies_s = time.monotonic() + DYING_S
        else:
            self._part_with(connection)

    def _hear_out(self, connection: Connection) -> None:
        """What its process had said before it ended."""
        while connection in self._connections and connection.dies_s is None and self._read(connection):
            pass

    def _part_with(self, connection: Connection, ended: bool = False) -> None:
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        if connection.dies_s is None:
            self._selector.unregister(connection.line)
        if connection.pidfd >= 0:
            self._selector.unregister(connection.pidfd)
        servers = [(self._servers[key], rank) for key, rank in connection.workers.items() if key in self._servers]
        dead = [(one.root, one.ranks[rank]) for one, rank in servers if one.least]
        for key in list(connection.workers):
            self._leave(connection, key, ended)
        connection.close()
        for root, rank in dict.fromkeys(dead):
            self._bury(root, rank)
        for server, _ in servers:  # when it is known who of them is dead: a server may have to answer for these
            self._part_if_all_have(server.key, server)

    def _bury(self, root: str, rank: int) -> None:
        """A worker of a run is dead, or leaves it, and the others go on: all channels hear so, those too that it never
        came to.
        """
        dead = self._dead.setdefault(root, [])
        if rank in dead:  # it has left, and died before its connection was closed
            return
        dead.append(rank)
        for key, server in list(self._servers.items()):
            if server.root == root and rank in server.ranks:
                try:
                    server.bury(server.ranks.index(rank))
                except Exception as error:  # the workers there are to know; those of other channels go on
                    self._refuse_all(key, f"{type(error).__name__}: {error}, about the death of rank {rank}")
                self._part_if_all_have(key, server)
        self._answer_for_the_dead()

    def _answer_for_the_dead(self) -> None:
        """At channels that others have come to, and nobody of this host will: all who would are dead."""
        for key, plan in list(self._plans.items()):
            here = {rank for rank, home in zip(plan["ranks"], plan["homes"], strict=True) if home == self._name}
            if key not in self._servers and here and here.issubset(self._dead.get(plan["root"], ())):
                self._make(key, plan)

    def _can_revive(self, root: str, rank: int, twin_of: int) -> bool:
        """Whether a dead worker of a run can be one again now, as the twin of another one."""
        return all(
            server.can_revive(server.ranks.index(rank), server.ranks.index(twin_of))
            for server in self._servers.values()
            if server.root == root and {rank, twin_of} <= set(server.ranks)
        )

    def _revive(self, root: str, rank: int, twin_of: int, page: int) -> None:
        """It is one: all channels that it has a part in hear so, at one moment."""
        self._dead[root].remove(rank)
        self._came_back.setdefault(root, {})[rank] = page
        for server in self._servers.values():
            if server.root == root and rank in server.ranks:
                other = server.ranks.index(twin_of) if twin_of in server.ranks else -1
                server.pages = self._came_back[root]
                server.revive(server.ranks.index(rank), other)

    def _kill(self, key: str, worker: int) -> None:
        """Its end is heard of as any other's."""
        for connection in self._connections:
            if connection.workers.get(key) == worker and connection.pidfd >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(connection.pidfd, signal.SIGKILL)

    def _refuse_all(self, key: str, words: str) -> None:
        for connection in self._connections:
            if key in connection.workers:
                connection.send(say.Refused(key, words))

    def _leave(self, connection: Connection, key: str, ended: bool = False) -> None:
        worker, server = connection.workers.pop(key), self._servers.get(key)
        connection.words.pop(key, None)
        connection.handed_in.pop(key, None)
        if server is not None:
            server.leave(worker, ended)

    def _part_if_all_have(self, key: str, server: Server) -> None:
        if server.all_have_left and key not in self._leaving:
            self._leaving[key] = time.monotonic() + LEAVE_S

    def _close(self, key: str) -> None:
        """All have left, and what they had to say to other hosts is there."""
        del self._leaving[key]
        server = self._servers.pop(key)
        for host in server.others.others:
            self._carry(server.others.hosts[host], say.Shut(key), (), None)
        self._coming = {host: one for host, one in self._coming.items() if one[0] != key}
        if server.others.is_through:  # else a connection may still read its memory, which stays until this process ends
            server.close()

    # What they say.

    def _hear(self, connection: Connection, message: Any) -> None:
        if isinstance(message, say.OpenChannel):
            self._open(connection, message)
        elif isinstance(message, say.Listen | say.OtherHosts):
            self._meet_others(connection, message)
        elif isinstance(message, say.Close):
            if message.key in connection.workers:
                server = self._servers.get(message.key)
                self._leave(connection, message.key)
                if server is not None:
                    self._part_if_all_have(message.key, server)
        elif message.key in connection.workers and message.key in self._servers:  # else all have left in good order
            server = self._servers[message.key]
            if isinstance(message, HANDS_IN):
                connection.handed_in[message.key] = connection.handed_in.get(message.key, 0) + 1
            try:
                server.hear(connection.workers[message.key], message)
            except Exception as error:  # whatever one worker says, the others are not to lose their host process
                connection.send(say.Refused(message.key, f"{type(error).__name__}: {error}"))
            else:
                if isinstance(message, say.Stepped) and message.hands_over and isinstance(server, LeaseServer):
                    connection.hands_over.add(server)
                elif isinstance(message, COUNTS):
                    self._counts(connection)

    def _counts(self, connection: Connection) -> None:
        """Something was handed in, and with it the steps that its worker has spoken of before."""
        leases, connection.hands_over = connection.hands_over, set()
        for one in leases:
            if one.key in connection.workers:
                one.handed_in(connection.workers[one.key])

    def _open(self, connection: Connection, message: say.OpenChannel) -> None:
        try:
            if not 0 <= message.word < WORDS:
                raise ValueError(f"a page has no word {message.word}")
            if message.key not in self._servers:
                self._make(message.key, message.plan)
            if any(one.workers.get(message.key) == message.worker for one in self._connections):
                raise ValueError(f"worker {message.worker} is there already; is a RANK given twice?")
            connection.workers[message.key] = message.worker
            connection.words[message.key] = message.word
            self._servers[message.key].open(message, connection.send)
        except Exception as error:  # also of a waiting rule of the user's that cannot be imported here
            connection.send(say.Refused(message.key, f"{type(error).__name__}: {error}"))

    def _make(self, key: str, plan: dict[str, Any]) -> None:
        """The server of a channel."""
        self._plans.pop(key, None)
        made = self._servers[key] = self._server(key, plan)
        self._tell_others(key, plan if made.least else {})
        made.pages = self._came_back.get(made.root, {})
        if made.root in self._lost_hosts and made.least:
            self._lose_at(made, self._lost_hosts[made.root])
            made.asked_of(self._numbers(made, self._lost_hosts[made.root]))
            if made.root in self._settled:
                self._settle_at(made, *self._settled[made.root])
        for rank in self._dead.get(made.root, ()):
            if rank in made.ranks:
                made.bury(made.ranks.index(rank))

    def _server(self, key: str, plan: dict[str, Any]) -> Server:
        of = int(plan.get("of", 1))
        others = Counterparts(key, plan["homes"], int(plan["size"]), self._name, self._carry, of, self._trip_s)
        if plan["what"] == "facts":
            lost = self._ask, self._settle, self._give_up
            membership = Membership(self._bury, self._can_revive, self._revive, self._kill, *lost)
            return FactsServer(key, plan, others, self._doing, membership, self._arena)
        if plan["what"] == "bell":
            return BellServer(key, plan, others, self._arena)
        if plan["what"] == "saver":
            return SaverServer(key, plan, others, self._arena)
        if plan["what"] == "leases":
            return LeaseServer(key, plan, others)
        kinds = [(getattr(torch, name), int(n)) for name, n in plan["kinds"]]
        memory: SlotMemory
        if plan["gpus"]:
            devices = [_gpu(uuid, kinds) for uuid in plan["gpus"]]
            let_read(list(dict.fromkeys(devices)))
            memory = DeviceSlots(self._arena, kinds, int(plan["notes"]), devices)
        else:
            memory = SlotMemory(self._arena, kinds, int(plan["notes"]))
        books = Books(self._arena, memory, self._adders)
        if plan["what"] == "weights":
            return WeightsServer(key, plan, others, books)
        if plan["what"] == "exchanges":
            return ExchangeServer(key, plan, others, books)
        return ChannelServer(key, plan, others, books, self._elsewhere)

    # Other hosts.

    def _meet_others(self, connection: Connection, message: say.Listen | say.OtherHosts) -> None:
        try:
            if isinstance(message, say.Listen):
                if self._links is None:
                    # Another one each time: the host process before this one may not have been given up everywhere.
                    self._name = f"{message.name}-{secrets.token_hex(4)}"
                    self._links = Links(
                        self._name,
                        message.secret.encode(),
                        self._selector,
                        self._hear_host,
                        self._room,
                        self._lose,
                    )
                address, port = self._links.listen(message.address, message.port)
                connection.send(say.Listening(message.key, self._name, address, port))
            else:
                assert self._links is not None, "other hosts are told of after this one listens"
                for name, address, port in message.hosts:
                    self._links.know(name, address, int(port))
        except (OSError, ValueError) as error:
            connection.send(say.Refused(message.key, f"{type(error).__name__}: {error}"))

    def _carry(self, host: str, message: Any, vector: Sequence[memoryview], there: Callable[[], None] | None) -> None:
        assert self._links is not None, "a run of several hosts has told where they are"
        self._links.send(host, message, vector, there)

    def _trip_s(self, host: str) -> float:
        return 0.0 if self._links is None else self._links.trip_s(host)

    def _tell_others(self, key: str, plan: dict[str, Any]) -> None:
        """This host's server for a channel is there: which others are already, and that they may speak to it."""
        others = self._servers[key].others
        for host in self._opened.get(key, ()):
            others.opened(host)
        for number in others.others:
            self._carry(others.hosts[number], say.Opened(key, plan), (), None)

    def _hear_host(self, host: str, message: Any) -> None:
        if isinstance(message, say.LookHost | say.HostSeen):
            self._onlookers.hear_host(host, message)
            return
        server = self._servers.get(message.key)
        if isinstance(message, say.Opened):
            self._opened.setdefault(message.key, set()).add(host)
            if server is not None:
                server.others.opened(host)
            elif message.plan:
                self._plans[message.key] = message.plan
                self._answer_for_the_dead()
        elif isinstance(message, say.Shut):
            self._opened.get(message.key, set()).discard(host)
            self._plans.pop(message.key, None)
            if server is not None:
                server.others.shut(host)
                self._part_if_all_have(message.key, server)
        elif server is not None:
            try:
                number = server.others.hosts.index(host)
                if isinstance(message, say.Stretch) and isinstance(server, BookedServer):
                    server.sums.hear(number, message, self._stretch_of(host, message))
                else:
                    server.hear_host(number, message, self._value_of(host, message, server))
            except Exception as error:  # the workers here are to know; those of other channels go on
                self._refuse_all(message.key, f"{type(error).__name__}: {error}, about what another host said")

    def _room(self, host: str, message: Any, nbytes: int) -> Sequence[memoryview]:
        """Where the vector goes that comes with a message of another host: into a slot, or nowhere."""
        server = self._servers.get(message.key)
        self._give_up_room(host)
        if server is None:  # its workers have left
            return ()
        if isinstance(message, say.Stretch) and isinstance(server, BookedServer):
            stretch = server.room_of_stretch(server.others.hosts.index(host), message, nbytes)
            self._stretches[host] = message, stretch
            return [memoryview(stretch.numpy().data)]
        if isinstance(server, BookedServer) and (slot := server.room(message, nbytes)) is not None:
            self._coming[host] = message.key, slot
            return server.views_of(message, slot)
        if nbytes > say.LONGEST:
            raise ValueError(f"a vector of {nbytes} bytes for {message.key}, which has none of that length here")
        return [memoryview(bytearray(nbytes))]

    def _give_up_room(self, host: str) -> None:
        """A vector that was on its way begins anew, or never comes."""
        self._stretches.pop(host, None)
        if host in self._coming:
            key, slot = self._coming.pop(host)
            server = self._servers.get(key)
            if isinstance(server, BookedServer):
                server.came(slot)

    def _stretch_of(self, host: str, message: say.Stretch) -> torch.Tensor | None:
        """What came with it. One without a vector may come while another's is on its way."""
        if host in self._stretches and self._stretches[host][0] is message:
            return self._stretches.pop(host)[1]
        return None

    def _value_of(self, host: str, message: Any, server: Server) -> Expression | None:
        if host in self._coming and isinstance(server, BookedServer) and getattr(message, "gives", False):
            return server.came(self._coming.pop(host)[1])
        return None

    # The loss of another host.

    def _lose(self, host: str, words: str) -> None:
        """Another host cannot be reached any more. What follows, a run says that may go on without it."""
        assert self._links is not None, "who is lost was known"
        self._give_up_room(host)
        words, theirs = f"{self._links.where(host)} {words}", list[FactsServer]()
        for server in list(self._servers.values()):
            if host not in server.others.hosts:
                continue
            has_left = server.others.has_gone(server.others.hosts.index(host))
            server.others.lost(host)
            if not server.least:
                server.lost(server.others.hosts.index(host), words)
            elif isinstance(server, FactsServer) and not has_left:
                theirs.append(server)
        for facts in theirs:
            facts.lost(facts.others.hosts.index(host), words)
        for server in list(self._servers.values()):
            self._part_if_all_have(server.key, server)

    def _of_run(self, root: str) -> list[Server]:
        return [server for server in self._servers.values() if server.root == root and server.least]

    def _numbers(self, server: Server, hosts: Sequence[str]) -> set[int]:
        return {server.others.hosts.index(host) for host in hosts if host in server.others.hosts}

    def _lose_at(self, server: Server, hosts: Sequence[str]) -> None:
        for host in hosts:
            server.others.lost(host)

    def _ask(self, root: str, gone: list[str]) -> Held:
        """Nothing is heard of these hosts any more. What do the run's servers here hold of theirs?"""
        assert self._links is not None, "another host is lost"
        self._lost_hosts[root] = gone
        for host in gone:
            self._links.part_with(host, "the run goes on without this host")
        found = Held([], [])
        for server in self._of_run(root):
            self._lose_at(server, gone)
            numbers = self._numbers(server, gone)
            held, used = server.asked_of(numbers)
            found.held.extend((server.key, list(name), len(server.others.hosts) - len(numbers)) for name in held)
            found.used.extend((server.key, list(name)) for name in used)
        return found

    def _settle(self, root: str, gone: list[str], counts: Counts) -> None:
        """The run goes on without these hosts and their workers: all channels hear so, at one moment."""
        self._settled[root] = gone, counts
        ranks = set[int]()
        for server in self._of_run(root):
            ranks.update(
                server.ranks[rank]
                for rank, home in enumerate(server.others.host_of)
                if server.others.hosts[home] in gone
            )
            try:
                self._settle_at(server, gone, counts)
            except Exception as error:  # the workers there are to know; those of other channels go on
                self._refuse_all(server.key, f"{type(error).__name__}: {error}, about the loss of a host")
        for rank in sorted(ranks):
            self._bury(root, rank)

    def _settle_at(self, server: Server, gone: Sequence[str], counts: Counts) -> None:
        server.settle(self._numbers(server, gone), *counts.at(server.key, self._name))

    def _give_up(self, root: str, hosts: list[str], words: str) -> None:
        """The run ends here."""
        for server in self._of_run(root):
            for number in self._numbers(server, hosts) if not isinstance(server, FactsServer) else ():
                server.lost(number, words)
            self._part_if_all_have(server.key, server)

    # What workers are doing.

    def _elsewhere(self, server: ChannelServer, worker: int) -> Elsewhere:
        """Where a worker is, apart from this channel, by what its first rank's page shows and what is known here."""
        first = worker * server.others.of
        connection = next((one for one in self._connections if one.workers.get(server.key) == first), None)
        if connection is None:
            return Elsewhere()
        page = read_page(self._arena, connection.page)
        met = {
            name: (count, tuple(sorted({server.worker_of[rank] for rank in ranks if rank in server.worker_of})))
            for name, (count, ranks) in page.get("met", {}).items()
            if not name.startswith(f"{server.run}/")
        }
        others = {key: one for key, one in self._servers.items() if key in connection.workers and key != server.key}
        rounds = {key: one.waits_for(connection.workers[key]) for key, one in others.items()}
        inside = bool(page.get("inside")) or any(name != server.run for name, _, _ in page.get("waits", ()))
        return Elsewhere(inside, met, rounds)

    def _doing(self, key: str, worker: int) -> str | None:
        """What a worker is doing, in words; None: its process is stopped."""
        connection = next((one for one in self._connections if one.workers.get(key) == worker), None)
        if connection is None or _is_stopped(connection.pid):
            return None
        page, now_s = read_page(self._arena, connection.page), time.monotonic()
        at = f", at {page['at']}" if page.get("at") else ""
        for _, what, since_s in reversed(page.get("waits", ())):
            return f"waits for {what}, since {format_seconds(now_s - since_s)}"
        return f"is in a collective of the script's own{at}" if page.get("inside") else f"is busy{at}"


def _pid_of_own_user(line: socket.socket) -> int:
    pid, user, _ = _USER.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _USER.size))
    if user != os.getuid():
        raise ValueError(f"a message of user {user}")
    return int(pid)


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(") ")[2].split()[0] in "Tt"
    except OSError:
        return False


def _bytes(token: str) -> bytes:
    return token.encode(errors="replace")  # whatever letters a stranger uses


def _gpu(uuid: str, kinds: Any) -> torch.device:
    from offbeat.live.memory.kernels import prepare

    for k in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(k).uuid) == uuid:
            device = torch.device("cuda", k)
            torch.zeros(1, device=device)  # the driver's calls need the context that torch makes
            prepare(device, (kind for kind, _ in kinds))
            return device
    raise OSError(f"the host process does not see the GPU {uuid}")


def serve(listener: socket.socket, token: str) -> None:
    """Be the host process, in a process that has torch."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a scheduler's notice to all processes: it ends with its last worker
    torch.set_num_threads(threads())
    torch.set_grad_enabled(False)
    sys.setswitchinterval(SWITCH_S)
    with contextlib.suppress(OSError):  # what all stand on is not the first to go when memory is short
        Path("/proc/self/oom_score_adj").write_text("-500", encoding="ascii")
    Host(listener, token).run()


def main() -> None:
    """What a worker starts: told in one line which socket to listen at, and the job's token."""
    told = json.loads(sys.stdin.readline())
    sys.path += [path for path in told["path"] if path not in sys.path]  # a waiting rule of the user's may lie there
    serve(socket.socket(fileno=int(told["listener"])), str(told["token"]))


if __name__ == "__main__":
    main()
