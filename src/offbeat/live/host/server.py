"""What all servers of a host process do: they are opened, hear their workers, answer, and close when all have left.

A run's workers may be on several hosts. Then each host process has a server for those of them that are its own, and
these servers are *counterparts*. The first of them, at the host of worker 0, decides where one must. A counterpart is
spoken to when it has been opened: what there is to say waits for that here, where its memory is.

Between two counterparts messages without a vector stay in their order; one with a vector may be overtaken by them. So a
message says which exchange, round or visit it belongs to, and nothing is known by the order alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from offbeat.live.host import protocol as say
from offbeat.live.host.books import Books, ClientRecord, Send
from offbeat.live.host.host_sums import HostSums, codec_of
from offbeat.live.host.ledger import Expression, Sum, Written

if TYPE_CHECKING:
    from torch import Tensor

    from offbeat.live.memory.arena import SlotMemory

EVERYBODY = -1  # has come, or stands, or has retired

Carry = Callable[[str, Any, Sequence[memoryview], "Callable[[], None] | None"], None]


class Bytes:
    """A vector that lies in no slot; ``there`` is called when the other host has it."""

    totals: Sequence[Sum] = ()  # it stands on

    def __init__(self, views: Sequence[memoryview], there: Callable[[], None]) -> None:
        self.views, self.there = views, there


class Whereabouts(NamedTuple):
    """Where a worker is at a server, for whoever looks: results it has taken, those that are there, whom it waits for.

    ``taken``: −1 where its server does not know.
    """

    taken: int
    there: int
    waits_for: tuple[int, ...]


class Counterparts:
    """The servers of one channel at all hosts of its workers.

    ``homes``: the name of each rank's host; none are named where all are on this one. Hosts are numbered in the order
    of their first ranks. ``of``: so many ranks, one after the other and on one host, are a worker. ``carry`` takes a
    message to another host, with the memory of its vector, and calls when it is there; ``trip_s``: how long a message
    takes to a host.
    """

    def __init__(
        self,
        key: str,
        homes: Sequence[str],
        size: int,
        me: str,
        carry: Carry,
        of: int = 1,
        trip_s: Callable[[str], float] = lambda host: 0.0,
    ) -> None:
        self._key, self._carry, self._trip_s = key, carry, trip_s
        self.hosts = tuple(dict.fromkeys(homes)) or (me,)
        self.me = self.hosts.index(me)
        numbers = [self.hosts.index(home) for home in homes] or [0] * size
        self.of, self.home_of = of, numbers[::of]  # of each worker
        self.here = [rank for rank, home in enumerate(numbers) if home == self.me]  # the ranks that come here
        self.others = [host for host in range(len(self.hosts)) if host != self.me]
        self._open: set[int] = set()
        self._gone: set[int] = set()  # closed again, or lost
        self._held: dict[int, list[tuple[Any, Expression | Bytes | None]]] = {host: [] for host in self.others}
        self._on_their_way: list[tuple[int, Expression | Bytes]] = []

    @property
    def decides(self) -> bool:
        """Whether what all must agree on is decided here."""
        return self.me == 0

    def send(self, host: int, message: Any, value: Expression | Bytes | None = None) -> None:
        """An expression is one slot, or one sum that is being made."""
        if host not in self._gone:
            self._held[host].append((message, value))

    def tell_others(self, message: Any) -> None:
        for host in self.others:
            self.send(host, message)

    def trip_s(self, hosts: Iterable[int]) -> float:
        """How long a message takes until all of these have it."""
        return max((self._trip_s(self.hosts[host]) for host in hosts if host != self.me), default=0.0)

    def opened(self, host: str) -> None:
        """A counterpart can be spoken to."""
        self._open.add(self.hosts.index(host))

    def shut(self, host: str) -> None:
        """It has closed, or is lost: nothing that is said there is heard."""
        if host in self.hosts and (number := self.hosts.index(host)) != self.me:
            self._gone.add(number)
            self._held[number] = []

    def lost(self, host: str) -> None:
        """Nothing of what was on its way there is read any more."""
        self.shut(host)
        if host in self.hosts:
            gone = self.hosts.index(host)
            self._on_their_way = [(number, value) for number, value in self._on_their_way if number != gone]

    def flush(self, memory: SlotMemory | None = None) -> None:
        """Let go what can go: to counterparts that are open, values that are made."""
        for host in self._open - self._gone:
            if not self._held[host]:
                continue
            held, self._held[host] = self._held[host], []
            for message, value in held:
                if value is None:
                    self._carry(self.hosts[host], message, (), None)
                elif any(not total.is_made for total in value.totals):
                    self._held[host].append((message, value))
                else:
                    self._on_their_way.append((host, value))
                    self._carry(self.hosts[host], message, _views(value, memory), partial(self._is_there, host, value))

    def _is_there(self, host: int, value: Expression | Bytes) -> None:
        self._on_their_way = [one for one in self._on_their_way if one[1] is not value or one[0] != host]
        if isinstance(value, Bytes):
            value.there()

    @property
    def is_through(self) -> bool:
        """Whether everything has been said."""
        return not self._on_their_way and not any(self._held.values())

    @property
    def roots(self) -> list[Expression]:
        """What is still to be read for the others."""
        held = [value for some in self._held.values() for _, value in some]
        every = [*held, *(value for _, value in self._on_their_way)]
        return [value for value in every if isinstance(value, Expression)]


def _views(value: Expression | Bytes, memory: SlotMemory | None) -> Sequence[memoryview]:
    if isinstance(value, Bytes):
        return value.views
    assert memory is not None
    ((slot, factor),) = value.slots
    assert factor == 1.0
    return [memory.bytes_of(slot)]


class Unison:
    """What ranks say that are one worker, ``of`` each: it is heard when all of them have said it.

    They run the same text, so each says the same in the same order: the n-th message of one is the n-th of the others.
    """

    def __init__(self, of: int) -> None:
        self._of, self._said = of, dict[int, list[deque[Any]]]()

    def say(self, rank: int, message: Any) -> tuple[int, Any] | None:
        """What is heard now, if something is: the worker, and what its first rank has said."""
        worker, number = divmod(rank, self._of)
        said = self._said.setdefault(worker, [deque() for _ in range(self._of)])
        said[number].append(message)
        if not all(said):
            return None
        first, *others = [one.popleft() for one in said]
        for other in others:
            if type(other) is not type(first):
                raise ValueError(f"the ranks of worker {worker} say {first} and {other}; all must run the same steps")
        return worker, first


class Server:
    """One channel of a run, or whatever else its workers have in common. Whoever comes and speaks is a *rank*."""

    what = "facts"  # in words, for whoever looks
    rounds = 0  # that have begun
    wakes_s: float | None = None  # when it wants to be called, if nothing is heard before

    def __init__(self, key: str, plan: dict[str, Any], others: Counterparts) -> None:
        self.key, self.run, self.others = key, str(plan["run"]), others
        self._left: set[int] = set()

    def open(self, message: say.OpenChannel, send: Send) -> None:
        """A rank comes."""
        raise NotImplementedError

    def hear(self, rank: int, message: Any) -> None:
        raise NotImplementedError

    def hear_host(self, host: int, message: Any, value: Expression | None) -> None:
        """What a counterpart says; ``value``: the vector that came with it."""
        raise ValueError(f"{type(self).__name__} does not know what to do with {message} of another host")

    def room(self, nbytes: int) -> int | None:
        """A slot for a vector that comes from another host; None: there are none of that length here."""
        return None

    def leave(self, rank: int, ended: bool = False) -> None:
        """It has left; ``ended``: with its process."""
        self._left.add(rank)

    @property
    def all_have_left(self) -> bool:
        return self._left.issuperset(self.others.here)

    @property
    def is_through(self) -> bool:
        """Whether the other hosts have everything that they need of this one."""
        return self.others.is_through

    def lost(self, host: int, words: str) -> None:
        """Another host cannot be reached any more; ``words`` say why."""

    def waits_for(self, rank: int) -> tuple[int, int]:
        """How many results it has heard of, and how many it waits for. What is waited for in step, its page shows."""
        return 0, 0

    def places(self) -> dict[int, Whereabouts]:
        """Where the workers of this host are, by their numbers here."""
        return {}

    def silence(self, now_s: float) -> None:
        """The time has come that was asked for."""

    def flush(self) -> None:
        """Send what can be sent."""
        self.others.flush()

    def close(self) -> None:
        """All have left."""


class BookedServer(Server):
    """One that has vectors."""

    def __init__(self, key: str, plan: dict[str, Any], others: Counterparts, books: Books) -> None:
        super().__init__(key, plan, others)
        self._books = books
        codec = codec_of(plan.get("codec"))
        self.sums = HostSums(key, others.me, codec, books, self._send_bytes, self._refuse)
        books.also = lambda: [*self.values(), *self.sums.values, *others.roots]

    def values(self) -> list[Expression]:
        """All vectors that may still be asked for."""
        raise NotImplementedError

    @property
    def memory(self) -> tuple[int, int, int, bool]:
        """Slots, how many of them are in use, how long one is, and whether they lie on a GPU."""
        return self._books.in_use()

    def room(self, nbytes: int) -> int | None:
        if nbytes != self._books.memory.slot_bytes:
            return None
        slot = self._books.slots.take()
        self._books.aside.add(slot)
        return slot

    def _send_bytes(self, host: int, message: Any, views: Sequence[memoryview], there: Callable[[], None]) -> None:
        self.others.send(host, message, Bytes(views, there) if views else None)

    def _refuse(self, error: BaseException) -> None:
        """The workers here are to know."""
        for client in self._books.clients.values():
            client.refuse(f"{type(error).__name__}: {error}")

    def room_of_stretch(self, host: int, message: say.Stretch, nbytes: int) -> Tensor:
        """Memory for a vector of another host that goes into no slot."""
        return self.sums.room(host, message, nbytes)

    def bytes_of(self, slot: int) -> memoryview:
        return self._books.memory.bytes_of(slot)

    def came(self, slot: int) -> Expression:
        """What another host has sent lies there now."""
        self._books.aside.discard(slot)
        return Expression([(Written(slot), 1.0)])

    def as_one(self, terms: Sequence[Expression]) -> Expression:
        """These added up, in one slot, so that they can be sent."""
        if len(terms) == 1 and len(terms[0].refs) == 1 and terms[0].refs[0][1] == 1.0:
            return terms[0].clone()
        return Expression([(Sum(terms), 1.0)])

    def send(self, host: int, message: Any, value: Expression) -> None:
        """A message with a vector, made by ``as_one``."""
        self.others.send(host, message, value)  # first: a slot that is taken from now on is none of its own
        self._books.make(value)

    def leave(self, rank: int, ended: bool = False) -> None:
        super().leave(rank, ended)
        if rank in self._books.clients:
            self._books.clients[rank].replies.clear()

    @property
    def is_through(self) -> bool:
        return super().is_through and self.sums.are_through

    def lost(self, host: int, words: str) -> None:
        super().lost(host, words)
        self.sums.lost(host)

    def flush(self) -> None:
        self._books.flush()
        self.others.flush(self._books.memory)

    def close(self) -> None:
        self.sums.close()
        self._books.close()


class MeetingServer(BookedServer):
    """One at which nothing begins before all workers, of all hosts, have come."""

    def __init__(self, key: str, plan: dict[str, Any], others: Counterparts, books: Books) -> None:
        super().__init__(key, plan, others, books)
        self._there: set[int] = set()
        self._all_are_there = False
        self._early: list[tuple[int, Any]] = []
        self._unison = Unison(others.of)
        self._opened: dict[int, list[tuple[say.OpenChannel, Send]]] = {}
        self._all_write = bool(plan["all_write"])

    @property
    def absent(self) -> tuple[int, ...]:
        """Which workers have not come yet, as far as it is known here."""
        if self._all_are_there or not self.others.decides:
            return ()
        return tuple(worker for worker in range(len(self.others.home_of)) if worker not in self._there)

    # The ranks of a worker.

    def open(self, message: say.OpenChannel, send: Send) -> None:
        worker, of = message.worker // self.others.of, self.others.of
        opened = self._opened.setdefault(worker, [])
        opened.append((message, send))
        if len(opened) < of:
            return
        (first, send), *others = sorted(self._opened.pop(worker), key=lambda one: one[0].worker)
        client = self.seat(worker, first, send)
        client.mates = [ClientRecord(self.key, worker, send, None, self._all_write) for _, send in others]
        for number, one in enumerate(client.ranks):
            self._books.clients[worker * of + number] = one
        self._books.grant(client)
        self.greet(client)

    def seat(self, worker: int, message: say.OpenChannel, send: Send) -> ClientRecord:
        """A worker is there: its record, which is its first rank's."""
        raise NotImplementedError

    def greet(self, client: Any) -> None:
        """The first answer to a worker."""
        raise NotImplementedError

    def hear(self, rank: int, message: Any) -> None:
        if (released := getattr(message, "released", None)) is not None:
            self._books.clients[rank].release(released)
        if isinstance(message, say.Release) or self.hear_one(rank, message):
            return
        said = self._unison.say(rank, message)
        if said is None:
            return
        worker, message = said
        if isinstance(message, say.KeepLost):
            self.begin(worker, message)
        elif isinstance(message, say.FirstDeposit):
            self.begin(worker, message)
            self.has_come(worker)
        elif self._all_are_there:
            self.hear_in_time(worker, message)
        else:
            self._early.append((worker, message))

    def hear_one(self, rank: int, message: Any) -> bool:
        """Whether a message is one rank's own, and not its worker's; then it has been heard."""
        return False

    def begin(self, worker: int, message: Any) -> None:
        """What a worker brings from before: what answers for it until its first step, what coding has lost."""
        raise NotImplementedError

    def hear_in_time(self, worker: int, message: Any) -> None:
        """What all ranks of a worker have said, when all workers are there."""
        raise NotImplementedError

    def has_come(self, worker: int) -> None:
        """A worker of this host is there."""
        if self.others.decides:
            self._one_more_is_there(worker)
        else:
            self.others.send(0, say.There(self.key, worker))

    def hear_host(self, host: int, message: Any, value: Expression | None) -> None:
        if not isinstance(message, say.There):
            super().hear_host(host, message, value)
        elif message.worker == EVERYBODY:
            self._all_have_come()
        else:
            self._one_more_is_there(message.worker)

    def _one_more_is_there(self, worker: int) -> None:
        self._there.add(worker)
        if len(self._there) == len(self.others.home_of):
            self.others.tell_others(say.There(self.key, EVERYBODY))
            self._all_have_come()

    def _all_have_come(self) -> None:
        self._all_are_there = True
        early, self._early = self._early, []
        for one in early:
            self.hear_in_time(*one)
