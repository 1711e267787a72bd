"""What the host process keeps of each worker at a channel or at shared weights, and how it answers.

An answer goes out when all sums that it tells of are made, and answers to one worker go out in their order. Until its
worker says that it has read an answer, nothing that the answer tells of is overwritten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from offbeat.live.host.adders import Adders
from offbeat.live.host.ledger import Expression, Slots, Sum, Written
from offbeat.live.host.protocol import Answer, Refused
from offbeat.live.memory.arena import Arena, DeviceSlots, SlotMemory
from offbeat.rounds.seat import Event

FEW = 4  # places in an expression that grows; more are added up

Send = Callable[[Any], None]


def unheard(message: Any) -> None:
    """Nobody is there who would hear it."""


class Reply(NamedTuple):
    """An answer that may have to wait for sums. ``vectors``: what is given, each with what is said of it."""

    how: str
    about: object
    results: int
    lost: list[int]
    vectors: Sequence[tuple[Expression, Any]]

    @property
    def is_ready(self) -> bool:
        return all(total.is_made for vector, _ in self.vectors for total in vector.totals)


class ClientRecord:
    """A rank at a channel, or at shared weights.

    Where several ranks are one worker, its first rank's record is the worker's: ``mates`` are the others'. They are
    told the same, and any of them may be reading what the worker has submitted. ``writes``: it is told of slots.
    """

    def __init__(self, key: str, worker: int, send: Send, log: list[Event] | None, writes: bool = True) -> None:
        self.key, self.worker, self.log, self._send, self._writes = key, worker, log, send, writes
        self.mates: Sequence[ClientRecord] = ()
        self.replies: deque[Reply] = deque()
        self.news: list[Any] = []
        self.told = 0  # results that it has heard are over
        self._number = 0
        self._unreleased: deque[tuple[int, list[Expression]]] = deque()
        self.own: Expression | None = None  # what it has submitted last, and may be reading beside an answer
        self.put_by: Expression | None = None  # what it has submitted, and its seat has not heard of yet
        self.granted: set[int] = set()  # slots that it may write to
        self.is_dead = False
        self._new_grants: list[int] = []
        self._opened: set[int] = set()  # slots on a GPU that it has heard of

    def written(self, slot: int) -> Any:
        """What lies in a slot of its own, as a vector."""
        if slot not in self.granted:
            raise ValueError(f"slot {slot} was not granted to worker {self.worker}")
        self.granted.discard(slot)
        own = Expression([(Written(slot), 1.0)])
        for one in self.ranks:
            one.own = own
        return own.clone()

    @property
    def ranks(self) -> list[ClientRecord]:
        """All that are this worker."""
        return [self, *self.mates]

    def reads_nothing_own(self) -> None:
        """Nothing is read of what the worker has submitted before."""
        for one in self.ranks:
            one.own = None

    def release(self, upto: int) -> None:
        """It reads nothing more of the answers up to this one, nor of what it has submitted before."""
        self.own = None
        while self._unreleased and self._unreleased[0][0] <= upto:
            self._unreleased.popleft()

    def bury(self) -> None:
        """It reads and writes nothing more; what it has submitted and its seat has not heard of yet stays."""
        self.is_dead, self.own = True, None
        self.replies.clear()
        self._unreleased.clear()
        self.news.clear()

    def comes(self, send: Send) -> ClientRecord:
        """Its worker, of which nobody had heard yet, is there."""
        self._send = send
        self.news.clear()
        return self

    def tell(self, news: Any) -> None:
        """With the next answer, to all ranks that bring something."""
        for one in self.ranks:
            if one._writes and not one.is_dead:
                one.news.append(news)

    def refuse(self, words: str) -> None:
        """Something went wrong; its worker is to know at once."""
        self._send(Refused(self.key, words))

    def grant(self, slot: int) -> None:
        self.granted.add(slot)
        for one in self.ranks:
            if one._writes:
                one._new_grants.append(slot)

    def flush(self, memory: SlotMemory) -> None:
        """Send what can be sent."""
        while self.replies and self.replies[0].is_ready:
            reply = self.replies.popleft()
            self._number += 1
            given = [(vector.slots, said) for vector, said in reply.vectors]
            if reply.vectors:
                self._unreleased.append((self._number, [vector.clone() for vector, _ in reply.vectors]))
            grants, self._new_grants = self._new_grants, []
            news, self.news = self.news, []
            events = list(self.log or ())
            if self.log:
                self.log.clear()
            handles = self._handles(memory, [*grants, *(slot for slots, _ in given for slot, _ in slots)])
            if reply.how == "spare":
                handles |= self._handles(memory, reply.about)
            self.told = reply.results
            self._send(
                Answer(
                    self.key,
                    self._number,
                    reply.how,
                    reply.about,
                    reply.results,
                    reply.lost,
                    given,
                    grants,
                    handles,
                    news,
                    events,
                )
            )

    def _handles(self, memory: SlotMemory, slots: Any) -> dict[str, str]:
        if not isinstance(memory, DeviceSlots):
            return {}
        new = [slot for slot in dict.fromkeys(slots) if slot not in self._opened]
        self._opened.update(new)
        return {str(slot): memory.handle(slot) for slot in new}

    @property
    def roots(self) -> Iterator[Expression]:
        """What it may be reading, or is about to be given."""
        for _, vectors in self._unreleased:
            yield from vectors
        for reply in self.replies:
            yield from (vector for vector, _ in reply.vectors)
        yield from (one for one in (self.own, self.put_by) if one is not None)


class Books:
    """Slots and sums of one channel, or of shared weights, and the workers there."""

    def __init__(self, arena: Arena, memory: SlotMemory, adders: Adders) -> None:
        self._arena, self.memory, self.adders = arena, memory, adders
        self.clients: dict[int, ClientRecord] = {}
        self.also: Callable[[], Iterable[Expression]] = lambda: ()  # what else may be asked for
        self.aside: set[int] = set()  # slots that are to be written to
        self.slots = Slots(self._new, self._roots)

    def _new(self) -> int:
        slot = self._arena.take(self.memory.slot_bytes)
        if isinstance(self.memory, DeviceSlots):
            self.memory.make(slot)
        return slot

    def _roots(self) -> tuple[list[Expression], list[int]]:
        found = [*self.adders.roots(), *self.also()]
        slots = [*self.aside]
        for client in self.clients.values():
            found += client.roots
            slots += client.granted
        return found, slots

    def grant(self, client: ClientRecord) -> None:
        """A slot to write to, if it has none."""
        if not client.granted and not client.is_dead:
            client.grant(self.slots.take())

    def make(self, vector: Expression) -> None:
        """Let all sums in it be made that are not."""
        for total in vector.totals:
            for one in total.unmade([]):
                if one.slot is None:
                    one.slot = self.slots.take()
                    self.adders.make(one, self.memory)

    def shorten(self, vector: Expression) -> None:
        """Of an expression that has grown long, the sum takes its place: what it stood on is free sooner."""
        if len(vector.refs) > FEW:
            vector.refs = ((Sum([vector.clone()]), 1.0),)
            self.make(vector)

    def reply(self, client: ClientRecord, reply: Reply) -> None:
        """Tell a worker, all its ranks."""
        if client.is_dead:
            return
        for one in client.ranks:
            one.replies.append(reply)  # first: a slot that is taken from now on is none that it tells of
        for vector, _ in reply.vectors:
            self.make(vector)

    def reply_to(self, rank: int, reply: Reply) -> None:
        """Tell one rank of a worker what it alone has asked."""
        self.clients[rank].replies.append(reply)
        for vector, _ in reply.vectors:
            self.make(vector)

    def in_use(self) -> tuple[int, int, int, bool]:
        """Slots, how many of them are in use, how long one is, and whether they lie on a GPU."""
        memory, on_gpu = self.memory, isinstance(self.memory, DeviceSlots)
        length = memory.vector_bytes if on_gpu else memory.slot_bytes
        return len(self.slots.all), self.slots.in_use, length, on_gpu

    def flush(self) -> None:
        for client in self.clients.values():
            if client.replies:
                client.flush(self.memory)

    def close(self) -> None:
        """All have left: the memory goes back."""
        self.adders.through_with(self.memory)
        self.memory.forget()
        for slot in self.slots.all:
            self._arena.give_back(slot, self.memory.slot_bytes)
        self.slots.all = []
