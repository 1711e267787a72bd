"""What all servers of a host process do: they are opened, hear their workers, answer, and close when all have left.

A run's workers may be on several hosts. Then each host process has a server for those of them that are its own, and
these servers are *counterparts*. The first of them, at the host of worker 0, decides where one must. A counterpart is
spoken to when it has been opened: what there is to say waits for that here, where its memory is.

Between two counterparts messages without a vector stay in their order; one with a vector may be overtaken by them. So a
message says which exchange, round or visit it belongs to, and nothing is known by the order alone.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from offbeat.live.host import protocol as say
from offbeat.live.host.books import Books, ClientRecord, Reply, Send
from offbeat.live.host.host_sums import HostSums, codec_of
from offbeat.live.host.ledger import Expression, Sum, Written
from offbeat.live.host.settling import Name
from offbeat.live.memory.arena import Shard, SlotMemory

if TYPE_CHECKING:
    from torch import Tensor

EVERYBODY = -1  # has come, or stands, or has retired

Carry = Callable[[str, Any, Sequence[memoryview], "Callable[[], None] | None"], None]
ViewsOf = Callable[[Any, int], Sequence[memoryview]]  # what of a slot goes with a message


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
    of their first ranks. ``of``: so many ranks, one after the other, are a worker, whose home is that of the first.
    ``carry`` takes a message to another host, with the memory of its vector, and calls when it is there; ``trip_s``:
    how long a message takes to a host.
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
        self.host_of = [self.hosts.index(home) for home in homes] or [0] * size  # of each rank
        self.of, self.home_of = of, self.host_of[::of]  # of each worker
        self.here = [rank for rank, host in enumerate(self.host_of) if host == self.me]  # the ranks that come here
        self.others = [host for host in range(len(self.hosts)) if host != self.me]
        self._open: set[int] = set()
        self._gone: set[int] = set()  # closed again, or lost
        self._held: dict[int, list[tuple[Any, Expression | Bytes | None]]] = {host: [] for host in self.others}
        self._on_their_way: list[tuple[int, Expression | Bytes]] = []

    @property
    def decides(self) -> bool:
        """Whether what all must agree on is decided here."""
        return self.me == 0

    def is_here(self, rank: int) -> bool:
        return self.host_of[rank] == self.me

    def is_home_of(self, rank: int) -> bool:
        """Whether its worker's seat is here."""
        return self.home_of[rank // self.of] == self.me

    def beside(self, rank: int) -> list[int]:
        """The ranks of its worker that are on its host."""
        first = rank - rank % self.of
        return [one for one in range(first, first + self.of) if self.host_of[one] == self.host_of[rank]]

    def speakers(self, worker: int) -> list[int]:
        """Who speaks for it here: its ranks on this host; where its seat is, the first rank on each other host, too."""
        ranks = range(worker * self.of, (worker + 1) * self.of)
        is_home = self.home_of[worker] == self.me
        return [r for r in ranks if self.host_of[r] == self.me or (is_home and self.beside(r)[0] == r)]

    def has_gone(self, host: int) -> bool:
        """Nothing that is said there is heard."""
        return host in self._gone

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

    def flush(self, views_of: ViewsOf | None = None) -> None:
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
                    views = _views(message, value, views_of)
                    self._carry(self.hosts[host], message, views, partial(self._is_there, host, value))

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


def _views(message: Any, value: Expression | Bytes, views_of: ViewsOf | None) -> Sequence[memoryview]:
    if isinstance(value, Bytes):
        return value.views
    assert views_of is not None
    ((slot, factor),) = value.slots
    assert factor == 1.0
    return views_of(message, slot)


class Unison:
    """What ranks say that are one worker: it is heard when all of its ``speakers`` have said it.

    They run the same text, so each says the same in the same order: the n-th message of one is the n-th of the others.
    """

    def __init__(self, speakers: Callable[[int], Sequence[int]]) -> None:
        self._speakers, self._said = speakers, dict[int, dict[int, deque[Any]]]()

    def say(self, worker: int, rank: int, message: Any) -> Any:
        """What its first speaker has said, if all have said it now."""
        if worker not in self._said:
            self._said[worker] = {one: deque() for one in self._speakers(worker)}
        said = self._said[worker]
        said[rank].append(message)
        if not all(said.values()):
            return None
        first, *others = [one.popleft() for one in said.values()]
        for other in others:
            if type(other) is not type(first):
                raise ValueError(f"the ranks of worker {worker} say {first} and {other}; all must run the same steps")
        return first


class Passage:
    """What two hosts say of a worker that has ranks on both. It is heard in the order in which it was said, though a
    message with a vector may be overtaken on its way.
    """

    def __init__(self) -> None:
        self.said = self._heard = 0
        self._early: dict[int, tuple[say.PassedOn, Expression | None]] = {}
        self._vectors: list[Expression] = []  # for the next message

    def come(self, message: say.PassedOn, vector: Expression | None) -> Iterator[tuple[say.PassedOn, list[Expression]]]:
        """One more has come. The messages that are heard now, each with its vectors."""
        self._early[message.number] = message, vector
        while self._heard in self._early:
            heard, vector = self._early.pop(self._heard)
            self._heard += 1
            if vector is not None:
                self._vectors.append(vector)
            if heard.said:
                vectors, self._vectors = self._vectors, []
                yield heard, vectors

    @property
    def values(self) -> list[Expression]:
        """Vectors of what has not been heard yet."""
        return [*self._vectors, *(vector for _, vector in self._early.values() if vector is not None)]


class Server:
    """One channel of a run, or whatever else its workers have in common. Whoever comes and speaks is a *rank*."""

    what = "facts"  # in words, for whoever looks
    rounds = 0  # that have begun
    wakes_s: float | None = None  # when it wants to be called, if nothing is heard before

    def __init__(self, key: str, plan: dict[str, Any], others: Counterparts) -> None:
        self.key, self.run, self.others = key, str(plan["run"]), others
        self.root = str(plan.get("root", self.run))
        self.ranks = [int(rank) for rank in plan.get("ranks", ())]  # those who come here, as the run numbers them
        self.least = int(plan.get("min_workers", 0))  # with so many the run goes on; 0: it does not without any
        self._left: set[int] = set()
        self._dead: set[int] = set()
        self.pages: Mapping[int, int] = {}  # of those who have returned, as the run numbers them: where they went on

    def open(self, message: say.OpenChannel, send: Send) -> None:
        """A rank comes."""
        raise NotImplementedError

    def hear(self, rank: int, message: Any) -> None:
        raise NotImplementedError

    def hear_host(self, host: int, message: Any, value: Expression | None) -> None:
        """What a counterpart says; ``value``: the vector that came with it."""
        if not isinstance(message, say.Buried):
            raise ValueError(f"{type(self).__name__} does not know what to do with {message} of another host")
        self.bury_elsewhere(message)

    def room(self, message: Any, nbytes: int) -> int | None:
        """A slot for the vector that comes with a message of another host; None: there are none of that length here."""
        return None

    def leave(self, rank: int, ended: bool = False) -> None:
        """It has left; ``ended``: with its process."""
        self._left.add(rank)

    def bury(self, rank: int) -> None:
        """It is dead, whether it has come or not, and the others go on; what it has said counts.

        Its own host hears so first, in the order of what it has said, and tells the counterparts in that order.
        """
        self._left.add(rank)
        self._dead.add(rank)
        if self.others.is_here(rank):
            self.others.tell_others(say.Buried(self.key, rank, self.last_of(rank)))

    def bury_elsewhere(self, buried: say.Buried) -> None:
        """A rank of another host is dead."""
        self.bury(buried.worker)

    def last_of(self, rank: int) -> int:
        """Its last exchange in step, where there are such; −1: none."""
        return -1

    def can_revive(self, rank: int, twin_of: int) -> bool:
        """Whether a dead rank can be a worker again now, as the twin of another one between two steps."""
        return True

    def revive(self, rank: int, twin_of: int) -> None:
        """It is one: whatever includes the other one from now on includes it. ``twin_of``: −1 if that is not here."""
        self._left.discard(rank)
        self._dead.discard(rank)

    @property
    def all_have_left(self) -> bool:
        return self._left.issuperset(self.others.here) and not self.stays

    @property
    def stays(self) -> bool:
        """Whether this server answers for dead workers alone: as long as others of the run are at other hosts."""
        here, everybody = self.others.here, range(len(self.others.host_of))
        anybody = any(not self.others.has_gone(host) for host in self.others.others)
        return anybody and self._dead.issuperset(here) and not self._dead.issuperset(everybody)

    @property
    def is_through(self) -> bool:
        """Whether the other hosts have everything that they need of this one."""
        return self.others.is_through

    def lost(self, host: int, words: str) -> None:
        """Another host cannot be reached any more, and the run ends; ``words`` say why."""

    def asked_of(self, gone: Set[int]) -> tuple[list[Name], list[Name]]:
        """These hosts are gone, and the run goes on. Nothing of theirs is used from now on until it is settled what
        counts. The names of what is held of theirs, and of what has been used.
        """
        return [], []

    def settle(self, gone: Set[int], held: Set[Name], used: Mapping[Name, bool]) -> None:
        """Of theirs this counts; see `offbeat.live.host.settling`. Their workers are buried next."""

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


class Kept(NamedTuple):
    """What has come of a sum here, until these hosts have it, too."""

    what: Any
    lacking: set[int]


class BookedServer(Server):
    """One that has vectors.

    ``gone``: lost hosts of which it is settled what counts; ``asked``: others, of which it is not.
    """

    def __init__(self, key: str, plan: dict[str, Any], others: Counterparts, books: Books) -> None:
        super().__init__(key, plan, others)
        self._books = books
        codec = codec_of(plan.get("codec"))
        self.sums = HostSums(key, others.me, codec, books, self._send_bytes, self._refuse, bool(self.least))
        self.gone, self.asked = set[int](), self.sums.asked
        self._kept: dict[Name, Kept] = {}  # what may have to be passed on, if one more host is lost
        self._all_there: dict[Name, set[int]] = {}  # who has all of a sum that is not whole here
        books.also = lambda: [*self.values(), *self.on_their_way()]

    def on_their_way(self) -> list[Expression]:
        """Vectors that go to other hosts, or have come from there and are not heard of yet."""
        return [*self.sums.values, *self.others.roots]

    def values(self) -> list[Expression]:
        """All vectors that may still be asked for."""
        raise NotImplementedError

    @property
    def memory(self) -> tuple[int, int, int, bool]:
        """Slots, how many of them are in use, how long one is, and whether they lie on a GPU."""
        return self._books.in_use()

    # The loss of another host.

    def left(self, hosts: Iterable[int]) -> list[int]:
        """Of these, those that are not lost."""
        return [host for host in hosts if host not in self.gone]

    def is_whole_here(self, name: Name, hosts: Iterable[int], what: Any) -> None:
        """A sum is. Where two others have a part in it, one of them may be lost before the other has all."""
        if not self.least:
            return
        early, others = self._all_there.pop(name, set()), set(self.left(hosts)) - {self.others.me}
        inhabited = self._inhabited
        if len(others) < 2 or self.others.me not in inhabited:
            return
        for host in others & inhabited:
            self.others.send(host, say.AllThere(self.key, list(name)))
        if lacking := (others & inhabited) - early:
            self._kept[name] = Kept(what, lacking)

    @property
    def _inhabited(self) -> set[int]:
        """Hosts with living workers: others need nothing."""
        return {home for rank, home in enumerate(self.others.host_of) if rank not in self._dead}

    def has_all(self, host: int, name: Name) -> None:
        """Another host needs nobody to pass a sum on."""
        if name not in self._kept:
            self._all_there.setdefault(name, set()).add(host)
            return
        self._kept[name].lacking.discard(host)
        if not self._kept[name].lacking:
            del self._kept[name]

    def _keep_no_longer(self) -> None:
        """What only hosts lack that need it no longer, or that nobody else could need."""
        for name, kept in list(self._kept.items()):
            kept.lacking.intersection_update(self._inhabited - self.gone)
            if not kept.lacking:
                del self._kept[name]

    def hear_host(self, host: int, message: Any, value: Expression | None) -> None:
        if isinstance(message, say.AllThere):
            self.has_all(host, tuple(message.sum))
        else:
            super().hear_host(host, message, value)

    def settle(self, gone: Set[int], held: Set[Name], used: Mapping[Name, bool]) -> None:
        self.gone |= gone
        self.asked -= gone
        for name, passes_on in used.items():
            if passes_on and (what := self.known_of(name)) is not None:
                self.pass_on(name, what)
        if len(self.left(range(len(self.others.hosts)))) < 3:
            self._kept.clear()
            self._all_there.clear()
        self._keep_no_longer()

    def known_of(self, name: Name) -> Any:
        """What has come of a sum, if it is still known here."""
        return self._kept[name].what if name in self._kept else None

    def pass_on(self, name: Name, what: Any) -> None:
        """What has come of a sum, to those who may lack it."""

    def room(self, message: Any, nbytes: int) -> int | None:
        slot = self._books.slots.take()
        if nbytes != sum(map(len, self.views_of(message, slot))):
            return None
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

    def views_of(self, message: Any, slot: int) -> Sequence[memoryview]:
        """What of a slot comes with a message, or goes with it."""
        return [self._books.memory.bytes_of(slot)]

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

    def bury(self, rank: int) -> None:
        super().bury(rank)
        if rank in self._books.clients:
            self._books.clients[rank].bury()
        self._keep_no_longer()

    @property
    def is_through(self) -> bool:
        return super().is_through and self.sums.are_through

    def lost(self, host: int, words: str) -> None:
        super().lost(host, words)
        self.sums.lost(host)

    def flush(self) -> None:
        self._books.flush()
        self.others.flush(self.views_of)

    def close(self) -> None:
        self.sums.close()
        self._books.close()


class MeetingServer(BookedServer):
    """One at which nothing begins before all workers, of all hosts, have come.

    A worker's seat is at the host of its first rank. Its ranks on another host write and read slots of that host. What
    they say goes on to the seat's host, as what one rank says there, and what is answered comes back: a message, and
    before it the vectors that belong to it, or of these the shards of the ranks at that host.
    """

    own: tuple[type[Any], ...] = ()  # what a rank says for itself alone
    own_answers: tuple[str, ...] = ()

    def __init__(self, key: str, plan: dict[str, Any], others: Counterparts, books: Books) -> None:
        super().__init__(key, plan, others, books)
        self._there: set[int] = set()
        self._all_are_there = False
        self._early: list[tuple[int, Any]] = []
        self._unison = Unison(others.speakers)
        self._opened: dict[int, list[tuple[say.OpenChannel, Send]]] = {}
        self._shards, before = list[SlotMemory](), 0
        for number, parts in enumerate(plan["shards"]):
            self._shards.append(books.memory.of_shard(Shard(before, before + parts, number, others.of)))
            before += parts
        self._passages = defaultdict[tuple[int, int], Passage](Passage)  # of a worker, with another host
        self._returning: set[int] = set()  # workers again, that have not come yet
        self._meant: dict[int, int] = {}  # for slots that are granted here: which of the seat's they stand for

    @property
    def absent(self) -> tuple[int, ...]:
        """Which workers have not come yet, as far as it is known here."""
        if self._all_are_there or not self.others.decides:
            return ()
        return tuple(worker for worker in range(len(self.others.home_of)) if worker not in self._there)

    # The ranks of a worker.

    def open(self, message: say.OpenChannel, send: Send) -> None:
        worker = message.worker // self.others.of
        opened = self._opened.setdefault(worker, [])
        opened.append((message, send))
        if len(opened) < len(self.others.speakers(worker)):
            return
        opened = sorted(self._opened.pop(worker), key=lambda one: one[0].worker)
        is_home, writes = self.others.is_home_of(message.worker), bool(self._shards) or self.others.of == 1
        records = [ClientRecord(self.key, worker, send, None, writes) for _, send in opened]
        client = records[0] = self.seat(worker, *opened[0]) if is_home else records[0]
        client.mates = records[1:]
        for (one, _), record in zip(opened, records, strict=True):
            is_here = self.others.host_of[one.worker] == self.others.me
            for rank in [one.worker] if is_here else self.others.beside(one.worker):
                self._books.clients[rank] = record
        if is_home:
            self._books.grant(client)
            self.greet(client)
        else:
            first = opened[0][0]
            self._pass_on(first.worker, first._replace(plan={}))

    def seat(self, worker: int, message: say.OpenChannel, send: Send) -> ClientRecord:
        """A worker is there: its record, which is its first rank's."""
        raise NotImplementedError

    def greet(self, client: Any) -> None:
        """The first answer to a worker."""
        raise NotImplementedError

    def hear(self, rank: int, message: Any) -> None:
        if (released := getattr(message, "released", None)) is not None:
            self._books.clients[rank].release(released)
        if not isinstance(message, say.Release):
            self._hear(rank, message)

    def _hear(self, rank: int, message: Any) -> None:
        """What a rank says, or the first of those at another host for all of them."""
        worker, is_own = rank // self.others.of, isinstance(message, self.own)
        if not is_own and (message := self._unison.say(worker, rank, message)) is None:
            return
        if not self.others.is_home_of(rank):
            self._pass_on(rank if is_own else self.others.beside(rank)[0], message)
        elif is_own:
            self.hear_one(rank, message)
        elif isinstance(message, say.KeepLost):
            self.begin(worker, message)
        elif isinstance(message, say.FirstDeposit):
            self.begin(worker, message)
            if worker in self._returning:
                self._returning.discard(worker)
                self.has_returned(worker)
            else:
                self.has_come(worker)
        elif self._all_are_there:
            self.hear_in_time(worker, message)
        else:
            self._early.append((worker, message))

    def hear_one(self, rank: int, message: Any) -> None:
        """What a rank says for itself alone."""
        raise NotImplementedError

    def begin(self, worker: int, message: Any) -> None:
        """What a worker brings from before: what answers for it until its first step, what coding has lost."""
        raise NotImplementedError

    def hear_in_time(self, worker: int, message: Any) -> None:
        """What all ranks of a worker have said, when all workers are there."""
        raise NotImplementedError

    def bury(self, rank: int) -> None:
        super().bury(rank)
        self._returning.discard(rank)
        if self.others.decides and rank not in self._there:  # nobody waits for it
            self._one_more_is_there(rank)
        self._forget_grants()

    def can_revive(self, rank: int, twin_of: int) -> bool:
        return self._all_are_there and self._books.clients[twin_of].put_by is None

    def revive(self, rank: int, twin_of: int) -> None:
        super().revive(rank, twin_of)
        self._returning.add(rank)

    def has_returned(self, worker: int) -> None:
        """One that had died is there again."""

    def has_come(self, worker: int) -> None:
        """A worker of this host is there."""
        if self.others.decides:
            self._one_more_is_there(worker)
        else:
            self.others.send(0, say.There(self.key, worker))

    def hear_host(self, host: int, message: Any, value: Expression | None) -> None:
        if isinstance(message, say.PassedOn):
            if message.gives and value is None:  # a shard of no numbers
                value = Expression([(Written(self._books.slots.take()), 1.0)])
            for one, vectors in self._passages[message.rank // self.others.of, host].come(message, value):
                self._hear_passed(host, one.rank, say.unwrapped(one.said), vectors)
        elif not isinstance(message, say.There):
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
        self._forget_grants()

    def _forget_grants(self) -> None:
        """The dead write to no slot, when everything that they have said has been heard."""
        for rank in self._dead.intersection(self._books.clients) if self._all_are_there else ():
            self._books.clients[rank].granted.clear()

    # A worker with ranks on several hosts.

    def _pass(self, host: int, rank: int, message: Any, value: Expression | None = None, slot: int = -1) -> None:
        """Say it to the other host; or let a vector go there, for the message that follows."""
        passage = self._passages[rank // self.others.of, host]
        number, passage.said = passage.said, passage.said + 1
        said = [] if message is None else say.wrapped(message)
        passed = say.PassedOn(self.key, rank, number, slot, said, value is not None)
        if value is None:
            self.others.send(host, passed)
        else:
            self.send(host, passed, value)

    def _pass_on(self, rank: int, message: Any) -> None:
        """To the seat's host. What ranks have written goes into the slot there that was granted with theirs."""
        home, client = self.others.home_of[rank // self.others.of], self._books.clients[rank]
        if self.others.has_gone(home):
            raise ValueError("the host of the first rank of this worker has left the run")
        if (slot := getattr(message, "slot", -1)) >= 0:
            client.put_by = client.written(slot)  # and read beside answers, until there is another
            message = message._replace(slot=self._meant.pop(slot))
            self._pass(home, rank, None, client.put_by, message.slot)
        self._pass(home, rank, message)

    def _hear_passed(self, host: int, rank: int, message: Any, vectors: list[Expression]) -> None:
        if not self.others.is_home_of(rank):
            self._answer(self._books.clients[rank], message, vectors)
        elif isinstance(message, say.OpenChannel):
            self.open(message, partial(self._pass_back, host, rank))
        elif isinstance(message, say.Close):
            self._left.add(rank)
        else:
            self._hear(rank, message)

    def _pass_back(self, host: int, rank: int, answer: say.Answer | say.Refused) -> None:
        """To another host, which keeps its vectors from then on."""
        if isinstance(answer, say.Answer):
            for refs, _ in answer.given:
                self._pass(host, rank, None, self.as_one([Expression((Written(slot), f) for slot, f in refs)]))
            self._books.clients[rank].release(answer.number)
            answer = answer._replace(given=[([], said) for _, said in answer.given])
        self._pass(host, rank, answer)

    def _answer(self, client: ClientRecord, answer: say.Answer | say.Refused, vectors: list[Expression]) -> None:
        """What has been answered at the seat's host, to the ranks here."""
        if isinstance(answer, say.Refused):
            for one in client.ranks:
                one.refuse(answer.words)
            return
        for news in answer.news:
            client.tell(news)
        given = [(vector, said) for vector, (_, said) in zip(vectors, answer.given, strict=True)]
        reply = Reply(answer.how, answer.about, answer.results, answer.lost, given)
        if answer.how in self.own_answers:
            self._books.reply_to(int(str(answer.about)), reply)
        else:
            self._books.reply(client, reply)
        for slot in answer.grants:
            own = self._books.slots.take()
            self._meant[own] = slot
            client.grant(own)

    def views_of(self, message: Any, slot: int) -> Sequence[memoryview]:
        if not self._shards or not isinstance(message, say.PassedOn):
            return super().views_of(message, slot)
        ranks = self.others.beside(message.rank)
        return [view for rank in ranks for view in self._shards[rank % self.others.of].views(slot)]

    def room(self, message: Any, nbytes: int) -> int | None:
        if not isinstance(message, say.PassedOn) or message.slot < 0:
            return super().room(message, nbytes)
        if message.slot not in self._books.clients[message.rank - message.rank % self.others.of].granted:
            raise ValueError(f"slot {message.slot} was not granted to the worker of rank {message.rank}")
        return message.slot

    def on_their_way(self) -> list[Expression]:
        return [*super().on_their_way(), *(value for one in self._passages.values() for value in one.values)]

    def places(self) -> dict[int, Whereabouts]:
        """Of a worker whose seat is elsewhere, as far as it shows here."""
        others = self.others
        return {rank // others.of: Whereabouts(-1, -1, ()) for rank in others.here if not others.is_home_of(rank)}

    def leave(self, rank: int, ended: bool = False) -> None:
        super().leave(rank, ended)
        if not self.others.is_home_of(rank):
            self._pass(self.others.home_of[rank // self.others.of], rank, say.Close(self.key))

    @property
    def is_through(self) -> bool:
        """Ranks on other hosts, of workers that have their seats here, may have something to ask as long as they are
        there.
        """
        others = self.others
        elsewhere = (rank for rank, host in enumerate(others.host_of) if host != others.me and others.is_home_of(rank))
        return super().is_through and self._left.issuperset(elsewhere)

    def lost(self, host: int, words: str) -> None:
        super().lost(host, words)
        self._left.update(rank for rank, its_host in enumerate(self.others.host_of) if its_host == host)
