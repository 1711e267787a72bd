"""The host process's tables and their workers without processes: real servers and real clients, in any order of events.

Between the two everything is a model: a vector is a number, a slot holds one, sums take their time, a message is
somewhere on its way. So it is between the tables of several hosts, where vectors are read while they travel. Each
worker is a thread, but only one runs at any time, and a *chooser* says who goes on: so what happens is a function of
what it chooses, and nothing waits for a clock.

Of an island a slot holds an array, a number for each of its ranks.

Every time something is written, its slot gets a new *stamp*. Whoever is promised what lies in a slot, is promised the
stamp that it has then, and looks whether it is still the same when it reads. A slot that is taken gets another stamp at
once, as if whoever has taken it had written already.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, cast
from unittest.mock import patch

import numpy as np

from offbeat.live.host import channel_server, weights_server
from offbeat.live.host import protocol as say
from offbeat.live.host.books import Books
from offbeat.live.host.channel_server import ChannelServer
from offbeat.live.host.facts_server import FactsServer, Membership
from offbeat.live.host.ledger import Expression, Slots, Sum, Written
from offbeat.live.host.process import Unheard
from offbeat.live.host.server import Counterparts
from offbeat.live.host.settling import Counts, Held
from offbeat.live.host.weights_server import WeightsServer
from offbeat.live.partial.opening import _plan_of
from offbeat.live.worker import channel_client, waiter, weights_client
from offbeat.live.worker import slots as worker_slots
from offbeat.live.worker.channel_client import LONG_BYTES, ChannelClient, Rank
from offbeat.live.worker.slots import ThroughHost
from offbeat.live.worker.weights_client import WeightsClient
from offbeat.method.effects import Channel, Got
from offbeat.rounds.held import Elsewhere
from offbeat.rounds.rules import Rules
from offbeat.rounds.seat import Event
from offbeat.runs.trace import Trace
from offbeat.tensors.vector import Way
from offbeat.topology import everyone
from offbeat.topology.hierarchy import Nodes

KEY, FACTS, PATIENCE_S = "run/channel", "run/facts", float("inf")
LOST = 0.5  # what coding has lost before, of the first rank
NOW = 1_000_000  # the weight of what nothing comes before
MOST_EVENTS = 50_000  # of a play: then somebody goes in circles


class Wrong(AssertionError):
    """Something happened that must never happen."""


def insist(is_so: bool, words: str) -> None:
    if not is_so:
        raise Wrong(words)


# Memory.


class Place(int):
    """A slot, with the stamp of what is meant by it."""

    stamp: int
    shard: int | None = None  # of an island's slot

    def __len__(self) -> int:
        return Memory.slot_bytes

    @classmethod
    def of(cls, slot: int, stamp: int) -> Place:
        place = cls(slot)
        place.stamp = stamp
        return place


class Cell(NamedTuple):
    """What lies in a slot: a number, or a replica; nothing that can be read if it is None."""

    value: Any
    stamp: int
    by: object


class Memory:
    """All slots of a channel. ``may_write``: whether a slot is a worker's to write to."""

    slot_bytes = 8

    parameters = 0

    def __init__(self, ranks: int = 1) -> None:
        """``ranks``: so many write to a slot, each its number."""
        self.ranks = ranks
        self.cells: dict[int, Cell] = {}
        self.may_write: Callable[[int, int], bool] = lambda rank, slot: True
        self._stamps = 0

    def put(self, slot: int, value: Any, by: object) -> int:
        self._stamps += 1
        self.cells[slot] = Cell(value, self._stamps, by)
        return self._stamps

    def write(self, slot: int, value: Any, rank: int) -> int:
        """A worker does."""
        insist(self.may_write(rank, slot), f"worker {rank} writes to slot {slot}, which is not its own")
        return self.put(slot, value, rank) if self.ranks == 1 else self.put_shards(slot, {rank % self.ranks: value})

    def put_shards(self, slot: int, shards: dict[int, Any]) -> int:
        """Beside what the other ranks have put there since the slot was taken."""
        cell = self.cells[slot]
        value = np.full(self.ranks, np.nan) if cell.value is None else cell.value.copy()
        for shard, number in shards.items():
            value[shard] = number
        self.cells[slot] = Cell(value, cell.stamp, "ranks")
        return cell.stamp

    def note_used(self, slot: int, used: Any) -> None:
        """Nobody asks."""

    def used(self, slots: Sequence[int]) -> Any:
        """Nobody asks."""

    def of_shard(self, shard: Any) -> Any:
        """What of a slot is a rank's."""

        def views(slot: int) -> list[Place]:
            place = self.bytes_of(slot)
            place.shard = shard.number
            return [place]

        return SimpleNamespace(views=views)

    def read(self, place: Place, who: str) -> Any:
        cell = self.cells[place]
        insist(cell.stamp == place.stamp, f"{who} reads slot {place}, where something else lies by now")
        insist(cell.value is not None, f"{who} reads slot {place}, where nothing lies yet")
        return cell.value

    def known(self, place: Any) -> Any:
        """By its stamp, if it is read from its slot alone: what is passed on to another host is."""
        if isinstance(place, Written) and not isinstance(place.slot, Place):
            return Written(Place.of(place.slot, self.cells[place.slot].stamp))
        return place

    def bytes_of(self, slot: int) -> Place:
        """What a connection to another host will read."""
        cell = self.cells[slot]
        insist(getattr(slot, "stamp", cell.stamp) == cell.stamp, f"slot {slot} is sent, where something else lies")
        return Place.of(slot, cell.stamp)

    def forget(self) -> None:
        """Nothing is kept open."""


class Arena:
    """Gives slots, and counts those that have come back."""

    def __init__(self) -> None:
        self.taken = self.back = 0

    def take(self, nbytes: int) -> int:
        self.taken += 1
        return self.taken

    def give_back(self, slot: int, nbytes: int) -> None:
        self.back += 1


class WatchedSlots(Slots):
    """Slots, each of which holds nothing from the moment at which it is taken."""

    memory: Memory

    def take(self) -> int:
        slot = super().take()
        self.memory.put(slot, None, "nobody")
        return slot


class Making:
    """A sum, and how far it has come."""

    def __init__(self, total: Sum, memory: Memory) -> None:
        self.total = total
        self.left = [(place, f) for term in total.terms for place, f in term.refs]
        self.left = [(memory.known(place), f) for place, f in self.left]
        self.value = 0.0


class Adders:
    """Sums are made in the order in which they were asked for, term by term, whenever it is their turn.

    ``at_once``: short ones are made by whoever asks for them, as those are that stand on nothing unmade.
    """

    def __init__(self, memory: Memory, at_once: Callable[[], bool]) -> None:
        self.queue: deque[Making] = deque()
        self._memory, self._at_once = memory, at_once

    def make(self, total: Sum, memory: Any) -> None:
        assert total.slot is not None
        making = Making(total, self._memory)
        self._memory.put(total.slot, None, total)
        inner = (place for place, _ in making.left if isinstance(place, Sum))
        if all(one.is_made for one in inner) and self._at_once():
            while making.left:
                self._add_one(making)
            self._end(making)
        else:
            self.queue.append(making)

    def work(self) -> None:
        """A term is added; after the last of them the sum is there."""
        if self.queue[0].left:
            self._add_one(self.queue[0])
        else:
            self._end(self.queue.popleft())

    def _add_one(self, making: Making) -> None:
        place, f = making.left.pop(0)
        assert place.slot is not None
        if isinstance(place, Written):
            insist(isinstance(place.slot, Place), "what a worker has written is known by its stamp")
            value = self._memory.read(place.slot, "an adder")  # type: ignore[arg-type]
        else:
            cell = self._memory.cells[place.slot]
            insist(place.is_made and cell.by is place, "an adder reads a sum that is not there, or not there any more")
            value = cell.value
        making.value += f * value

    def _end(self, making: Making) -> None:
        total = making.total
        assert total.slot is not None
        insist(self._memory.cells[total.slot].by is total, "the slot of a sum was taken while it was made")
        self._memory.put(total.slot, making.value / total.divisor, total)
        total.made()

    def through_with(self, memory: Any) -> None:
        while self.queue:
            self.work()

    def roots(self) -> list[Expression]:
        return [Expression((one.total, 1.0) for one in self.queue)]


# A worker's vectors and slots.


class Mark:
    """Of a stream that has come so far, once it ``is_over``."""

    is_over = False

    def __call__(self) -> None:
        self.is_over = True

    def query(self) -> bool:
        return self.is_over


class Stream:
    """What a worker's GPU does, in order, and in its own time if it is ``late``; else at once. It may wait for marks of
    the streams ``beside`` it.
    """

    def __init__(self, late: bool) -> None:
        self.late, self.asked, self.word = late, deque[Callable[[], None]](), 0
        self.beside: list[Stream] = []
        self._number, self._waits = 0, dict[int, Mark]()

    def mark(self) -> Mark:
        made = Mark()
        self.do(made)
        return made

    def wait(self, mark: Mark) -> None:
        def go_on() -> None:
            insist(mark.is_over, "a stream goes on that waits for another")

        if not mark.is_over:
            self.asked.append(go_on)
            self._waits[id(go_on)] = mark

    @property
    def can_work(self) -> bool:
        if not self.asked:
            return False
        mark = self._waits.get(id(self.asked[0]))
        return mark is None or mark.is_over

    def do(self, what: Callable[[], None]) -> None:
        if self.late:
            self.asked.append(what)
        else:
            what()

    def work(self) -> None:
        done = self.asked.popleft()
        self._waits.pop(id(done), None)
        done()

    def synchronize(self) -> None:
        while able := [one for one in (self, *self.beside) if one.can_work]:
            able[0].work()

    def due(self) -> int:
        """The number that the worker's word will have when all that was asked for is done."""
        if not self.late:
            return 0
        self._number += 1
        number = self._number
        self.asked.append(lambda: setattr(self, "word", number))
        return number


class Vector:
    """Does what a client, a channel and a worker ask of a vector, when its worker's stream comes to it."""

    used, cut, _phantom_bytes = None, None, 0

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def get(self) -> Any:
        raise NotImplementedError

    def set(self, value: Any) -> None:
        raise NotImplementedError

    def put_into(self, target: Any) -> Any:
        self.stream.do(lambda: target.set(self.get()))
        return target

    def copy_(self, other: Any) -> Any:
        return other.put_into(self)

    def clone(self) -> Number:
        made: Number = self.put_into(Number(self.stream))
        return made

    def __sub__(self, other: Any) -> Number:
        made = Number(self.stream)
        self.stream.do(lambda: made.set(self.get() - other.get()))
        return made

    def add(self, number: float) -> None:
        self.stream.do(lambda: self.set(self.get() + number))

    @property
    def parts(self) -> list[Any]:
        return [self]


class Number(Vector):
    """A worker's own."""

    def __init__(self, stream: Stream, value: Any = 0.0) -> None:
        super().__init__(stream)
        self.value = value

    def get(self) -> Any:
        return self.value

    def set(self, value: Any) -> None:
        self.value = value


class Room(Vector):
    """A slot that its worker writes to."""

    def __init__(self, slots: AtSlots, slot: int) -> None:
        super().__init__(slots.stream)
        self._slots, self._slot = slots, slot

    def get(self) -> Any:
        return self._slots.number_at(self._slots.mine(self._slot))

    def set(self, value: Any) -> None:
        self._slots.stamp(self._slot, value)


class Lent(Vector):
    """What slots hold together, ``plus`` one of the worker's own; read where it lies, whenever somebody looks."""

    def __init__(self, slots: AtSlots, refs: Sequence[tuple[Place, float]], plus: Any = None) -> None:
        super().__init__(slots.stream)
        self._slots, self._refs, self._plus = slots, list(refs), 0.0
        if isinstance(plus, Vector):
            self.stream.do(lambda: setattr(self, "_plus", plus.get()))
        elif plus is not None:
            self.stream.do(lambda: self._refs.append((slots.mine(plus), 1.0)))

    def get(self) -> Any:
        values = [(self._slots.number_at(place), f) for place, f in self._refs]
        is_one = len(values) == 1 and values[0][1] == 1.0 and not self._plus
        return values[0][0] if is_one else sum(f * value for value, f in values) + self._plus


class AtSlots:
    """A worker's slots. ``deposits``: what it has written, in order."""

    keeps = True

    def __init__(self, memory: Memory, rank: int, stream: Stream) -> None:
        self.memory, self.rank, self.stream = memory, rank, stream
        self.deposits: list[float] = []
        self._own: dict[int, int] = {}

    def number_at(self, place: Place) -> Any:
        """Of an island, this rank's."""
        value = self.memory.read(place, f"worker {self.rank}")
        if self.memory.ranks == 1:
            return value
        number = float(value[self.rank % self.memory.ranks])
        insist(number == number, f"worker {self.rank} reads slot {place}, where its shard does not lie")
        return number

    def mine(self, slot: int) -> Place:
        """What this worker has written there last."""
        return Place.of(slot, self._own[slot])

    def own(self, x: Any, memory: Any) -> Any:
        """What another rank of this worker writes, in memory of this one's."""
        made, is_way = Number(self.stream) if memory is None else memory, isinstance(x, Way)
        self.stream.do(lambda: made.set(x.end.get() - x.start.get() if is_way else x.get()))
        return made

    def stamp(self, slot: int, value: Any) -> None:
        self._own[slot] = self.memory.write(slot, value, self.rank)

    def write(self, x: Any, slot: int) -> None:
        is_way = isinstance(x, Way)

        def lay() -> None:
            self.deposits.append(x.end.get() - x.start.get() if is_way else x.get())
            self.stamp(slot, self.deposits[-1])

        self.stream.do(lay)

    write_way = write

    def fetch(self, slots: Sequence[Any]) -> None:
        """They are read where they lie."""

    is_fetched = True

    def read(self, refs: Sequence[tuple[Any, float]], plus: Any = None) -> Lent:
        """Slots that this worker is told of; or one, by its number, that it has written itself."""
        lent = Lent(self, [], plus)
        self.stream.do(lambda: lent._refs.extend((s if isinstance(s, Place) else self.mine(s), f) for s, f in refs))
        return lent

    def each(self, slots: Sequence[Place]) -> list[Lent]:
        return [Lent(self, [(slot, 1.0)]) for slot in slots]

    def room(self, slot: int) -> Room:
        return Room(self, slot)

    def wrote(self, slots: Sequence[int]) -> None:
        """They lie where they were written."""

    def due(self) -> int:
        return self.stream.due()

    def released(self) -> None:
        """No copy of it is kept."""

    def close(self) -> None:
        """Nothing is kept open."""


class Added(Vector):
    """Stands for ``slots.Unadded``."""

    def __init__(self, terms: Sequence[tuple[Vector, float]], used: Any, room: Any) -> None:
        super().__init__(terms[0][0].stream)
        self._terms = terms

    def get(self) -> Any:
        return sum(f * vector.get() for vector, f in self._terms)


class ThroughStages(ThroughHost, AtSlots):  # type: ignore[misc, override]
    """The same, where the worker computes on a GPU and slots are memory of the host: the real one, but for its copies,
    which streams make in their own time.
    """

    keeps = False

    def __init__(self, memory: Memory, rank: int, stream: Stream) -> None:
        AtSlots.__init__(self, memory, rank, stream)
        stream.beside = [Stream(True), Stream(True)]
        self.down_stream, self.up_stream = stream.beside
        self._stage: Any = None
        self._staged = None
        self._stages, self._lent, self._fetched, self._rooms = [], [], {}, {}

    def _new(self) -> Any:
        return Number(self.stream)

    def own(self, x: Any, memory: Any) -> Any:
        return AtSlots.own(self, x, memory)

    def read(self, refs: Any, plus: Any = None) -> Any:
        if not isinstance(plus, Vector):
            return ThroughHost.read(self, refs, plus)
        return Added([(cast(Any, ThroughHost.read(self, refs)), 1.0), (plus, 1.0)], None, None)

    def write(self, x: Any, slot: int) -> None:
        if isinstance(x, Way):
            start, end, way = x.start, x.end, Number(self.stream)
            self.stream.do(lambda: way.set(end.get() - start.get()))  # type: ignore[attr-defined]
            x = way
        ThroughHost.write(self, x, slot)
        stage = cast(Any, self._stage)
        self.down_stream.do(lambda: self.deposits.append(stage.get()))

    def _copy_down(self, stage: Any, slot: int) -> None:
        self.down_stream.wait(self.stream.mark())
        self.down_stream.do(lambda: self.stamp(slot, stage.get()))

    def _wait_for_down(self) -> None:
        self.stream.wait(self.down_stream.mark())

    def _number_in(self, slot: int) -> Any:
        return self.number_at(slot if isinstance(slot, Place) else self.mine(slot))

    def _copy_up(self, slot: int, stage: Any, free: list[Any]) -> list[Any]:
        for mark in free:
            self.up_stream.wait(mark)
        self.up_stream.do(lambda: stage.set(self._number_in(slot)))
        return [self.up_stream.mark()]

    def _copy_here(self, slot: int, stage: Any) -> None:
        self.stream.do(lambda: stage.set(self._number_in(slot)))

    def _mark(self) -> list[Any]:
        return [self.stream.mark()]

    def _wait(self, events: list[Any]) -> None:
        for mark in events:
            self.stream.wait(mark)

    def _write_word(self) -> int:
        self.stream._number += 1
        number = self.stream._number
        self.down_stream.wait(self.stream.mark())
        self.down_stream.do(lambda: setattr(self.stream, "word", number))
        return number

    def close(self) -> None:
        """Nothing is kept open."""


# Threads of which one runs at a time.


class Ended(BaseException):
    """The play is over, or this worker's process; its thread is to end."""


class Turn:
    """A thread that goes on only when it is told to."""

    def __init__(self, body: Callable[[], None]) -> None:
        self._body = body
        self._go, self._stop = threading.Lock(), threading.Lock()  # held until the other lets go
        self._go.acquire()
        self._stop.acquire()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.is_done = self._is_over = False
        self.until: Callable[[], bool] = lambda: True
        self.looks_up, self.looked_at = False, -1  # it may look up from its wait; what the board was when it did
        self.error: BaseException | None = None
        self._looks = False
        self._thread.start()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._is_over:
                self._body()
        except Ended:
            pass
        except BaseException as error:
            self.error = error
        self.is_done = True
        self._stop.release()

    def go(self, looks: bool = False) -> None:
        """Until it waits again. ``looks``: what it waits for has not come."""
        self._looks = looks
        self._go.release()
        self._stop.acquire()
        if self.error is not None:
            raise self.error

    def wait(self, until: Callable[[], bool] = lambda: True, looks_up: bool = False) -> bool:
        """In the thread: go on when ``until`` is so, and the chooser lets it. Whether it is so."""
        self.until, self.looks_up = until, looks_up
        self._stop.release()
        self._go.acquire()
        if self._is_over:
            raise Ended
        if not self._looks:
            self.looked_at = -1
        return not self._looks

    def end(self) -> None:
        self._is_over = True
        if not self.is_done:
            self._go.release()
        self._thread.join()


class Line:
    """A worker's line: messages to the host process, and answers, somewhere on their way."""

    def __init__(self, play: Play, rank: int) -> None:
        self._play, self._rank = play, rank
        self.up: deque[bytes] = deque()
        self.down: deque[Any] = deque()
        self._heard: deque[Any] = deque()

    def send(self, message: Any) -> None:
        self.up.append(say.packed(message))

    def arrive(self) -> None:
        self._heard.append(self.down.popleft())

    def heard_within(self, key: str, seconds: float) -> Any:
        if not self._heard:
            turn = self._play.workers[self._rank].turn
            if not seconds or not turn.wait(lambda: bool(self._heard), looks_up=True):
                self._play.now_s += min(seconds, 1.0)
                return None
        return self._heard.popleft()

    def part(self, key: str, word: int) -> None:
        """Nothing is kept."""


class Board:
    """What workers know of each other beside the channel."""

    def __init__(self, play: Play, rank: int) -> None:
        self._play, self.rank = play, rank

    def check(self, during: str = "") -> None:
        """Nobody has failed."""

    def handing_over(self, with_gradient: bool = False) -> None:
        """No batches are shared."""

    def waits_for(self, what: str) -> Any:
        return nullcontext()

    def bear_with(self, since_s: float, patience_s: float, what: str) -> float:
        return since_s

    def pause(self, seconds: float, ready: Callable[[], bool]) -> None:
        self._play.workers[self.rank].turn.wait(ready)

    def ask(self, average: int) -> None:
        self._play.post(("asked", average), self.rank, None)

    def is_asked(self, average: int) -> bool:
        return ("asked", average) in self._play.facts

    def meeting(self, name: object) -> Callable[[], bool]:
        self._play.post(name, self.rank, None)
        return lambda: self._play.have_all(self._play.facts[name])

    def gather(self, name: object, said: Any) -> list[Any]:
        """What each has said, when all have."""
        self._play.post(name, self.rank, said)
        found = self._play.facts[name]
        self._play.workers[self.rank].turn.wait(lambda: self._play.have_all(found))
        lost = [one.rank for one in self._play.workers if one.table.is_lost and name[0] == "applied"]  # type: ignore[index]
        return [found[rank] for rank in range(self._play.size) if rank in found and rank not in lost]


# Who goes on.


class Option(NamedTuple):
    """Something that can happen next. ``who`` does it; the greater its weight, the sooner it is drawn."""

    who: int
    weight: int
    do: Callable[[], None]


class Chooser(Protocol):
    prompt: bool  # answers are sent and arrive at once
    draw: random.Random

    def choose(self, options: list[Option]) -> int: ...


class Drawn:
    """By lot."""

    prompt = False

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def choose(self, options: list[Option]) -> int:
        return self.draw.choices(range(len(options)), [one.weight for one in options])[0]


class InTurn:
    """All take turns, but at some decisions as many are passed over as ``passed_over`` says."""

    prompt = True

    def __init__(self, passed_over: dict[int, int]) -> None:
        self.draw, self._passed_over, self._last = random.Random(0), passed_over, -1
        self.widths: list[int] = []  # of each decision, how many could have been passed over

    def choose(self, options: list[Option]) -> int:
        after = next((k for k, one in enumerate(options) if one.who > self._last), 0)
        chosen = (after + self._passed_over.get(len(self.widths), 0)) % len(options)
        self.widths.append(len(options) - 1)
        self._last = options[chosen].who
        return chosen


def all_orders(case: Case, check: Callable[[Play], None], departures: int) -> int:
    """Play every order in which, once all have come, at most so many are passed over when it is their turn.

    How many these are.
    """
    count, todo = 0, [dict[int, int]()]
    while todo:
        passed_over = todo.pop()
        chooser = InTurn(passed_over)
        one = Play(case, chooser)
        one.run()
        check(one)
        count += 1
        left = departures - sum(passed_over.values())
        for at in range(max(passed_over, default=one.all_came_at) + 1, len(chooser.widths)):
            todo += [{**passed_over, at: k} for k in range(1, min(left, chooser.widths[at]) + 1)]
    return count


# Workers.


@dataclass(frozen=True)
class Case:
    """What is played.

    ``programs``: what each worker does; "s" takes a step, "a" asks for an average, "t" looks whether its last round is
    through, "o" asks what it owes. ``is_long``: vectors are, so that memory is given back when a step is over, and
    copies lie in slots. ``late_gpu``: what workers write and read happens later than they ask for it; with "stages" the
    slots are memory of the host, and vectors go there and back through others. ``dies``: a worker whose process ends,
    at any moment; a while later the others give up, or if ``goes_on`` they do. ``meets``: how often a worker whose
    weights meet in pairs goes to another one before a step. ``homes``: the host of each rank, if there are several.
    ``again``: so often the one that has died comes back, as the twin of another; it may die anew before the last time.
    ``of``: so many ranks, one after the other, are a worker, a node, or an island if ``sharded``. ``loses``: coding has
    lost something before. ``lost_host``: it is lost, at any moment, with all of its workers, and the others go on; each
    of the other hosts finds so when it likes, and may have heard more of it than another, or less. ``lost_at``: so many
    events after all have come.
    """

    rules: Rules | None  # None: weights that meet in pairs
    programs: tuple[str, ...]
    whom: Any = None
    is_long: bool = False
    late_gpu: bool | str = False
    paces: tuple[int, ...] = ()
    dies: int | None = None
    meets: float = 0.7
    homes: tuple[int, ...] = ()
    of: int = 1
    sharded: bool = False
    loses: bool = False
    goes_on: bool = False
    again: int = 0
    lost_host: int | None = None
    lost_at: int | None = None

    @property
    def size(self) -> int:
        return len(self.programs)

    @property
    def nodes(self) -> Nodes:
        return Nodes(self.of * self.size, self.of)


class Worker:
    """One worker, or a rank of one: its numbers, and what it does."""

    def __init__(self, play: Play, rank: int) -> None:
        case = play.case
        self.play, self.rank, self.program = play, rank, case.programs[rank // case.of]
        self.draw = random.Random(f"{play.seed} {rank // case.of}")
        self.stream = Stream(bool(case.late_gpu))
        self.table = play.tables[case.homes[rank] if case.homes else 0]
        self.slots = (ThroughStages if case.late_gpu == "stages" else AtSlots)(self.table.memory, rank, self.stream)
        self.board, self.line = Board(play, rank), Line(play, rank)
        self.unheard = Unheard(lambda key: self.stream.word)
        self.turn = Turn(self.live)
        self.nbytes = LONG_BYTES if case.is_long else 8
        self.trace, self.log = Trace(keep_spans=False), list[Event]()
        self.apart = (rank % case.of) / 8 if case.sharded else 0.0  # numbers of one shard are not those of another
        self.start = self.draw.randint(1, 1000) + self.apart
        self.x = Number(self.stream, self.start)
        self.given: list[float] = []  # what it has made in each step
        self.step = self.averages = 0
        self.is_dead = self.has_left = False
        self.told: list[Event] = []  # what it was told of its seat's log, or would have been
        self.buried_at: int | None = None  # so many events after the beginning
        self.is_handing, self.handed = False, dict[str, Any]()  # its replica, which nobody has heard of yet
        self.said_by_then: set[object] = set()
        self.twin_of, self.twin_since, self.had_begun = -1, 0, True  # another's results, until that round

    def die(self) -> None:
        self.is_dead = True
        self.turn.end()

    def live(self) -> None:
        raise NotImplementedError

    def hand_over(self) -> None:
        """Between two steps: lay a replica down for one that comes back, if one does."""
        if self.play.is_wanted and not self.is_handing:
            self.stream.synchronize()
            self.is_handing, self.handed = True, self.replica()
            self.said_by_then = {name for name, said in self.play.facts.items() if self.rank in said}
            self.line.send(say.Handed(KEY, 1, 0, ""))

    def replica(self) -> dict[str, Any]:
        return {"x": self.x.get(), "step": self.step, "averages": self.averages}

    def take_over(self, replica: dict[str, Any]) -> None:
        self.x = Number(self.stream, replica["x"])
        self.step, self.averages = replica["step"], replica["averages"]

    def opened(self, plan: dict[str, Any], spares: bool = False) -> say.OpenChannel:
        homes = [str(home) for home in self.play.case.homes]
        size = self.play.size
        plan = {**plan, "run": "run", "size": size, "members": list(range(size)), "homes": homes}
        plan["of"] = of = self.play.case.of
        plan["min_workers"] = int(self.play.outlives)
        plan["shards"] = [1] * of if self.play.case.sharded else []
        return say.OpenChannel(KEY, self.rank, plan, 0, self.rank % of == 0, spares, 0)

    def makes(self) -> float:
        self.given.append(self.draw.randint(1, 1000) + self.apart)
        return self.given[-1]

    def asked(self) -> bool:
        return self.board.is_asked(self.averages)

    def among(self, said: list[Any]) -> list[Any]:
        """Of all ranks, what those say who have the same shard."""
        return said[self.rank % self.play.case.of :: self.play.case.of] if self.play.case.sharded else said


class AtChannel(Worker):
    """At a channel. ``history`` is its replica: the results that it has applied, in their order."""

    def __init__(self, play: Play, rank: int) -> None:
        super().__init__(play, rank)
        rules = play.case.rules
        assert rules is not None
        self.rules = rules
        self.history: list[float] = []
        self.got: list[tuple[int, float]] = []  # the rounds whose results it has read, and these
        self.parts: list[tuple[int, int]] = []  # of these rounds: how many took part, and brought something
        self.applied = self.taken_over = 0
        holds: Any = self.holds
        lost: Any = Number(self.stream, LOST + rank) if play.case.loses else None
        self.channel, of = Channel("channel", play.whom, rules, self.apply, holds=holds, lost=lost), play.case.of
        fake: Any = _Lays(self)
        self.client = ChannelClient(
            KEY,
            fake.line,
            0,
            fake.slots,
            self.channel,
            play.case.nodes,
            fake.board,
            self.trace,
            self.nbytes,
            0,
            PATIENCE_S,
            None if rank % of else self.log,
            fake if rules.spares else None,
            Rank(rank % of, of, play.case.sharded or not rank % of),
        )

    def holds(self) -> Any:
        return self.x if self.rules.absent == "last" else None

    def live(self) -> None:
        plan = _plan_of(self.channel, self.play.case.nodes, 0, 0)
        first: Any = self.x if self.rules.of_weights else None
        self.client.begin(self.opened(plan, self.rules.spares), first)
        self.play.comes()
        for what in self.program:
            self.hand_over()
            self.turn.wait()  # it computes
            {"s": self.take_step, "a": self.average, "t": self.look, "o": self.ask_what_it_owes}[what]()
        self.client.finished(self.holds())
        while (got := self.client.rest(self.holds(), self.asked, self.take_part)) is not None:
            self.turn.wait()
            self.apply([got])
        self.client.close()

    def take_step(self) -> None:
        number, work = self.makes(), None
        if self.rules.absent == "shared":
            before: Any = self.channel.keep(self.x)  # type: ignore[arg-type]
            self.x.add(number)
            work = Way(before, self.x)  # type: ignore[arg-type]
        elif self.rules.absent == "last":
            self.x.add(number)
            work = self.x  # type: ignore[assignment]
        else:
            work = Number(self.stream, number)  # type: ignore[assignment]
        assert work is not None
        results = self.client.offer(work, self.step)
        self.step += 1
        self.turn.wait()  # others go on before it has read anything
        self.apply(results)
        self.client.step_over()

    def apply(self, results: list[Got]) -> None:
        self.applied += len(results)
        for got in results:
            self.stream.do(lambda got=got: self._apply(got))  # type: ignore[misc]

    def _apply(self, got: Any) -> None:
        value = got.value.get()
        self.history.append(value)
        self.got.append((got.version, value))
        self.parts.append((got.count, len(got.contributors)))
        if self.rules.of_weights:
            self.x.set(value)

    def look(self) -> None:
        if self.client.through(self.step):
            insist(not self.client._waits, "who is through waits for nothing")

    def ask_what_it_owes(self) -> None:
        """Its newest gradients, as many as are in no round yet."""
        found: Any = self.client.owed()

        def compare() -> None:
            mine, owed = self.slots.deposits, 0.0 if found is None else found.get()
            could_be = [sum(mine[k:]) for k in range(len(mine) + 1)]
            insist(any(abs(owed - one) < 1e-6 for one in could_be), f"{owed} is owed, of {mine}")

        self.stream.do(compare)

    def average(self) -> None:
        self.board.ask(self.averages)
        self.take_part()

    def take_part(self) -> None:
        name, self.averages = self.averages, self.averages + 1

        def largest(number: int) -> int:
            return max(self.board.gather(("started", name), number))

        self.client.stand(self.board.meeting(("standing", name)), largest, self.apply)
        stood, shared = self.x.clone(), self.rules.absent == "shared"
        self.stream.synchronize()
        if not self.rules.of_weights:
            histories = self.among(self.board.gather(("applied", name), tuple(self.history)))
            insist(len(set(histories)) == 1, "who stand have applied the same results")
        else:
            xs = self.among(self.board.gather(("x", name), self.x.get()))
            self.x.set(sum(xs) / len(xs))
        renewed: Any = self.x - stood if shared else self.holds()
        self.client.renew(renewed)

    def replica(self) -> dict[str, Any]:
        history = {"history": [*self.history], "applied": self.applied, "rounds": self.client.rounds}
        return {**super().replica(), **history, "holds": self.client.holds}

    def take_over(self, replica: dict[str, Any]) -> None:
        super().take_over(replica)
        self.history, self.applied = replica["history"], replica["applied"]
        self.client.rounds, self.client.holds = replica["rounds"], replica["holds"]


class _Lays:
    """A worker's replica, of one vector, instead of many results."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def lay_into(self, room: Callable[[int], Room], most: int) -> tuple[int, int]:
        into, worker = room(0), self._worker
        worker.stream.do(lambda: into.set(tuple(worker.history)))
        return 1, worker.applied

    def take_over(self, vectors: Sequence[Lent], said: int) -> None:
        worker = self._worker
        worker.applied, worker.taken_over = said, worker.taken_over + 1

        def take() -> None:
            worker.history[:] = vectors[0].get()
            insist(len(worker.history) == said, "a replica holds as many results as it says")

        worker.stream.do(take)


class AtWeights(Worker):
    """At weights that meet in pairs."""

    def __init__(self, play: Play, rank: int) -> None:
        super().__init__(play, rank)
        fake: Any = self
        self.client = WeightsClient(
            KEY, fake.line, 0, fake.slots, fake.board, self.trace, self.nbytes, PATIENCE_S, self.log
        )

    def live(self) -> None:
        first: Any = self.x
        self.client.begin(self.opened({"what": "weights"}), first)
        self.play.comes()
        for what in self.program:
            self.hand_over()
            self.turn.wait()
            {"s": self.take_step, "a": self.average}[what]()
        last: Any = self.client.retire(self.asked, self.take_part)
        self.turn.wait()
        last.put_into(self.x)
        self.stream.synchronize()
        self.client.close()

    def take_step(self) -> None:
        if self.draw.random() < self.play.case.meets:
            self.client.finish(self.client.meet(self.draw.randrange(self.play.case.size)))
            self.turn.wait()
        delta: Any = Number(self.stream, self.makes())
        become: Any = self.client.add(delta)
        self.turn.wait()
        become.put_into(self.x)
        self.client.step_over()

    def average(self) -> None:
        self.board.ask(self.averages)
        self.take_part()

    def take_part(self) -> None:
        name, self.averages = self.averages, self.averages + 1
        x: Any = self.x
        self.client.stand(x, self.board.meeting(("standing", name)))
        self.stream.synchronize()
        xs = self.among(self.board.gather(("x", name), self.x.get()))
        self.x.set(sum(xs) / len(xs))
        self.client.adopt(x)


# The play.


class Road:
    """What is on its way from one host to another: words in their order, and vectors in theirs."""

    def __init__(self, start: Table, end: Table) -> None:
        self._start, self._end = start, end
        self.words: deque[bytes] = deque()
        self.vectors: deque[tuple[bytes, Sequence[Place], Callable[[], None]]] = deque()
        self.acknowledged: deque[Callable[[], None]] = deque()
        self._room: int | None = None
        self.has_ended = False

    @property
    def ends_nowhere(self) -> bool:
        return self._end.is_lost

    def end_of_acknowledgements(self) -> None:
        """Of what its start has sent: that one is no more."""
        self.acknowledged.clear()

    def end(self) -> None:
        """Nothing of what is on its way arrives."""
        self.words.clear()
        self.vectors.clear()
        self.acknowledged.clear()
        if self._room is not None and self._end.server is not None:
            self._end.server.came(self._room)
        self._room, self.has_ended = None, True

    def carry(self, message: Any, vector: Sequence[Any], there: Callable[[], None] | None) -> None:
        if self.has_ended:
            return
        if vector:
            assert there is not None
            self.vectors.append((say.packed(message), vector, there))
        else:
            self.words.append(say.packed(message))

    def next_word(self) -> None:
        (message,) = say.Inbox().feed(self.words.popleft())
        self._end.hear_host(self._start, message, None)

    def next_vector(self) -> None:
        """Its head arrives, and a slot is taken; or the rest of it does."""
        packed, places, there = self.vectors[0]
        server = self._end.server
        if self._room is None and server is not None:
            (message,) = say.Inbox().feed(packed)
            self._room = server.room(message, sum(map(len, places)))
            return
        self.vectors.popleft()
        values = [self._start.memory.read(place, "a connection") for place in places]
        self.acknowledged.append(there)
        if server is not None and self._room is not None:
            stamp = self._put(places, values, self._room)
            came = server.came(self._room)
            came.refs[0][0].slot = Place.of(self._room, stamp)
            (message,) = say.Inbox().feed(packed)
            self._end.hear_host(self._start, message, came)
        self._room = None

    def _put(self, places: Sequence[Place], values: list[Any], slot: int) -> int:
        if places[0].shard is None:
            return self._end.memory.put(slot, values[0], "another host")
        shards = {place.shard: value[place.shard] for place, value in zip(places, values, strict=True)}
        return self._end.memory.put_shards(slot, shards)  # type: ignore[arg-type]

    def next_acknowledgement(self) -> None:
        self.acknowledged.popleft()()


class Table:
    """Of the host process of one host."""

    def __init__(self, play: Play, host: int, at_once: Callable[[], bool]) -> None:
        self._play, self.host, self.name = play, host, str(host) if play.case.homes else ""
        self.memory, self.arena = Memory(play.case.of if play.case.sharded else 1), Arena()
        self.adders = Adders(self.memory, at_once)
        fake: Any = self
        self.books = Books(fake.arena, fake.memory, fake.adders)
        self.books.slots = slots = WatchedSlots(self.books._new, self.books._roots)
        slots.memory = self.memory
        self.memory.may_write = self._may_write
        self.server: ChannelServer | WeightsServer | None = None
        self.roads: dict[str, Road] = {}
        self._opened: set[str] = set()
        self._plan: dict[str, Any] = {}
        self.has_looked = self.is_closed = self.is_lost = False
        self._gone: list[str] = []  # hosts that are lost, by name
        self._settled: tuple[list[str], Counts] | None = None
        self.facts = self._facts() if play.case.lost_host is not None else None

    # The loss of a host. Whether the run goes on, and what counts, its real facts decide.

    def _facts(self) -> FactsServer:
        homes, fake = [str(home) for home in self._play.case.homes], cast(Any, self)
        others = Counterparts(FACTS, homes, len(homes), self.name, self._carry)
        for number in others.others:
            others.opened(others.hosts[number])
        plan = {"run": "run", "root": "run", "ranks": list(range(len(homes))), "min_workers": 1}
        nothing: Any = lambda *_: None  # noqa: E731
        lost = self._ask, self._settle, nothing
        facts = FactsServer(FACTS, plan, others, nothing, Membership(nothing, nothing, nothing, nothing, *lost), fake)
        facts._facts = {f"{say.ATTACHED}/{rank}": "1" for rank in range(len(homes))}
        return facts

    def is_lost_here(self) -> None:
        """This host is lost, with all of its workers."""
        self.is_lost = True
        for worker in self._play.workers:
            if worker.table is self:
                worker.die()
                worker.has_left = True
                worker.line.up.clear()
        for road in self.roads.values():
            road.end_of_acknowledgements()

    def loses(self, other: Table) -> None:
        """This host finds that it is."""
        if other.roads[self.name].has_ended:
            return
        assert self.facts is not None
        other.roads[self.name].end()
        self.roads[other.name].end()
        if self.server is not None:
            self.server.others.lost(other.name)
        self.facts.others.lost(other.name)
        self.facts.lost(self.facts.others.hosts.index(other.name), "it is lost")
        self.facts.flush()
        self.went_on()

    def _ask(self, root: str, gone: list[str]) -> Held:
        self._gone = gone
        for table in self._play.tables:
            if table.name in gone:
                self.loses(table)
        if self.server is None:
            return Held([], [])
        numbers = self._numbers(gone)
        held, used = self.server.asked_of(numbers)
        left = len(self.server.others.hosts) - len(numbers)
        return Held([(KEY, list(name), left) for name in held], [(KEY, list(name)) for name in used])

    def _settle(self, root: str, gone: list[str], counts: Counts) -> None:
        self._settled = gone, counts
        lost = [worker.rank for worker in self._play.workers if worker.table.name in gone]
        self._play.buried += [rank for rank in lost if rank not in self._play.buried]
        self._play.posted += 1
        self._play.has_settled = True
        self._settle_here()

    def _settle_here(self) -> None:
        if self.server is not None and self._settled is not None:
            gone, counts = self._settled
            self.server.settle(self._numbers(gone), *counts.at(KEY, self.name))
            for worker in self._play.workers:
                if worker.table.name in gone:
                    self.server.bury(worker.rank)

    def _numbers(self, gone: Sequence[str]) -> set[int]:
        assert self.server is not None
        return {self.server.others.hosts.index(name) for name in gone}

    def _may_write(self, rank: int, slot: int) -> bool:
        """Its worker's records are those of its ranks here; slots are granted to the first of them."""
        clients: Any = self.books.clients
        own = [one for one in clients.values() if one.worker == clients[rank].worker]
        return any(slot in one.granted or slot in getattr(one, "replica", ()) for one in own)

    # Other hosts.

    def _carry(self, host: str, message: Any, vector: Sequence[Any], there: Callable[[], None] | None) -> None:
        self.roads[host].carry(message, vector, there)

    def hear_host(self, other: Table, message: Any, value: Expression | None) -> None:
        server = self.server
        if message.key == FACTS:
            assert self.facts is not None
            self.facts.hear_host(self.facts.others.hosts.index(other.name), message, None)
            self.facts.flush()
            self.went_on()
            return
        if isinstance(message, say.Opened):
            self._opened.add(other.name)
            self._plan = message.plan or self._plan
            self._answer_for_the_dead()
        elif isinstance(message, say.Shut):
            self._opened.discard(other.name)
        if server is None or self.is_closed:
            self.went_on()
            return
        if isinstance(message, say.Opened):
            server.others.opened(other.name)
        elif isinstance(message, say.Shut):
            server.others.shut(other.name)
        else:
            server.hear_host(server.others.hosts.index(other.name), message, value)
        self.went_on()

    # What happens here.

    @property
    def can_flush(self) -> bool:
        if self.server is None or self.is_closed:
            return False
        others = self.server.others
        goes = any(
            value is None or all(total.is_made for total in value.totals)
            for host in others._open - others._gone
            for _, value in others._held[host]
        )
        return goes or any(one.replies and one.replies[0].is_ready for one in self.books.clients.values())

    @property
    def wakes(self) -> bool:
        """Whether time brings something; where the host process only looks where everybody is, it has found that."""
        if self.server is None or self.server.wakes_s is None:
            return False
        referee, due = getattr(self.server, "_referee", None), getattr(self.server, "_due", ())
        knows = any(block.begins_s is not None for block in due)
        return knows or not (self.has_looked and referee is not None and referee.deadline_s is None)

    def add(self) -> None:
        self.adders.work()
        self.went_on()

    def wake(self) -> None:
        assert self.server is not None
        assert self.server.wakes_s is not None
        self._play.now_s = max(self._play.now_s, self.server.wakes_s)
        self.has_looked = True
        self.server.silence(self._play.now_s)
        self.went_on()

    def flush(self) -> None:
        assert self.server is not None
        self.server.flush()
        for worker in self._play.workers if self._play.is_prompt else ():
            while worker.line.down:
                worker.line.arrive()

    def went_on(self) -> None:
        """After everything that the host process does."""
        if self._play.is_prompt and self.server is not None and not self.is_closed:
            self.flush()
        taken = [slot for client in self.books.clients.values() for slot in client.granted]
        taken += [*self.books.aside, *(one.total.slot for one in self.adders.queue if one.total.slot is not None)]
        insist(len(taken) == len(set(taken)), "no slot is given to two")

    def act(self, worker: Worker, messages: Iterator[Any]) -> None:
        for message in messages:
            for table in self._play.tables:
                table.has_looked = False
            if isinstance(message, say.OpenChannel):
                self._open(worker, message)
            elif isinstance(message, say.Close):
                self.leave(worker)
            elif isinstance(message, say.Handed):
                self._play.revive(worker)
            else:
                assert self.server is not None
                self.server.hear(worker.rank, self._stamped(worker.rank, message))
        self.went_on()

    def _open(self, worker: Worker, message: say.OpenChannel) -> None:
        if self.server is None:
            self._make(message.plan)
        assert self.server is not None
        self.server.open(message, lambda answer: self._send(worker, answer))

    def _make(self, plan: dict[str, Any]) -> None:
        size, trip_s = self._play.size, self._play.trip_s
        of, trip = plan["of"], lambda host: trip_s
        others = Counterparts(KEY, plan["homes"], size, self.name, self._carry, of, trip)
        send = others.send
        others.send = lambda host, message, value=None: send(host, message, self._known(value))  # type: ignore
        if plan["what"] == "weights":
            self.server = WeightsServer(KEY, plan, others, self.books)
        else:
            self.server = ChannelServer(KEY, plan, others, self.books, _is_nowhere)
        for name in self._opened:
            others.opened(name)
        for host in others.others:
            self._carry(others.hosts[host], say.Opened(KEY, plan if self._play.outlives else {}), (), None)
        for name in self._gone:
            others.lost(name)
        if self._gone:
            self.server.asked_of(self._numbers(self._gone))
        self._settle_here()
        for rank in self._buried:
            self.server.bury(rank)

    @property
    def _buried(self) -> list[int]:
        """Of the workers here."""
        return [rank for rank in self._play.buried if self._play.workers[rank].table is self]

    def _answer_for_the_dead(self) -> None:
        """Nobody of this host comes, and others have."""
        here = [worker.rank for worker in self._play.workers if worker.table is self]
        if self.server is None and self._plan and set(here) <= set(self._buried):
            self._make(self._plan)

    def _known(self, value: Any) -> Any:
        return value and Expression((self.memory.known(place), f) for place, f in value.refs)

    def leave(self, worker: Worker) -> None:
        if not worker.has_left and self.server is not None:
            worker.has_left = True
            self.server.leave(worker.rank)

    def bury(self, worker: Worker) -> None:
        """The others go on without it."""
        self.leave(worker)
        worker.has_left = True
        self._play.buried.append(worker.rank)
        self._play.posted += 1
        self._answer_for_the_dead()
        if self.server is not None and worker.rank not in self.server._dead:
            worker.buried_at = len(self.log_of(worker))
            self.server.bury(worker.rank)
        self.went_on()

    def log_of(self, worker: Worker) -> list[Event]:
        """All of it, whether it has heard so or not."""
        client = None if worker in self._play.past else self.books.clients.get(worker.rank)
        return [*worker.told, *(client.log or () if client is not None else ())]

    @property
    def can_close(self) -> bool:
        return not self.is_lost and self.server is not None and self.server.all_have_left and not self.is_closed

    def close(self) -> None:
        assert self.server is not None
        others = self.server.others
        for host in others.others:
            self._carry(others.hosts[host], say.Shut(KEY), (), None)
        self.server.close()
        self.is_closed = True
        being_made = [one.total.slot for one in self.adders.queue]
        insist(not being_made, f"memory goes back while sums are made there: {being_made}")

    def _stamped(self, rank: int, message: Any) -> Any:
        """With what lies in its slots now, which is to lie there until nobody needs it."""
        if isinstance(message, say.Spare):
            client: Any = self.books.clients[rank]
            for k in range(message.vectors):
                client.replica[k] = self._written(rank, client.replica[k])
        slot = getattr(message, "slot", -1)
        return message if slot < 0 else message._replace(slot=self._written(rank, slot))

    def _written(self, rank: int, slot: int) -> Place:
        cell = self.memory.cells[slot]
        written = cell.by == rank if self.memory.ranks == 1 else not np.isnan(cell.value[rank % self.memory.ranks])
        insist(bool(written), f"worker {rank} is heard before it has written")
        return Place.of(slot, cell.stamp)

    def _send(self, worker: Worker, answer: say.Answer) -> None:
        worker.told += [(what, number) for what, number in answer.events]
        stamps: dict[int, int] = {}
        for refs, _ in answer.given:
            for slot, _ in refs:
                cell = self.memory.cells[slot]
                insist(cell.value is not None, f"worker {worker.rank} is told of what does not lie in slot {slot}")
                meant = getattr(slot, "stamp", cell.stamp)
                insist(meant == cell.stamp, f"worker {worker.rank} is told of what lies in slot {slot} no longer")
                stamps[int(slot)] = cell.stamp
        (answer,) = say.Inbox().feed(say.packed(answer))
        given: Any = [([(Place.of(slot, stamps[slot]), f) for slot, f in refs], said) for refs, said in answer.given]
        worker.line.down.append(answer._replace(given=given))


class Play:
    """The tables of the host processes, their workers, and everything that is on its way between them."""

    def __init__(self, case: Case, chooser: Chooser, seed: int = 0) -> None:
        self.case, self.seed, self.size, self._chooser = case, seed, case.of * case.size, chooser
        self.whom = everyone(case.size) if case.whom is None else case.whom
        self.now_s, self.is_prompt = 0.0, chooser.prompt
        self.trip_s = seed % 3 * 0.001  # to another host, as far as it is known
        self.facts: dict[object, dict[int, Any]] = {}
        self.posted = self._happened = self._came = self.all_came_at = 0
        self.buried: list[int] = []  # those who are dead, where the others go on
        self.past: list[Any] = []  # workers whose places others have taken
        self.outlives, self.has_settled = case.goes_on or case.lost_host is not None, False
        self.excused: dict[object, set[int]] = {}  # from what was done before they came back
        draw = chooser.draw
        at_once = 0.0 if chooser.prompt else draw.choice([0.0, 0.5, 1.0])
        hosts = range(max(case.homes, default=0) + 1)
        self.tables = [Table(self, host, lambda: draw.random() < at_once) for host in hosts]
        for one in self.tables:
            one.roads = {other.name: Road(one, other) for other in self.tables if other is not one}
        self._is_given_up = False
        n = self.size
        # Some are slow, or their messages are; so may the adders be.
        self._paces = case.paces or tuple(draw.choice([2, 10, 60]) for _ in range(n))
        self._ups, self._downs, self._streams = ([draw.choice([3, 20, 60]) for _ in range(n)] for _ in range(3))
        self._adding, self._flushing = draw.choice([2, 20, 60]), draw.choice([10, 60])
        self._words, self._vectors = ([draw.choice([2, 20, 60]) for _ in hosts] for _ in range(2))
        # What the lost host has sent comes to one soon, and to another late, or never.
        self._last_words = [draw.choice([1, 100]) for _ in hosts] if case.lost_host is not None else []
        kind = AtWeights if case.rules is None else AtChannel
        self.workers: list[Any] = []
        for rank in range(n):
            self.workers.append(kind(self, rank))

    @property
    def books(self) -> Books:
        """Of the first host."""
        return self.tables[0].books

    @property
    def arena(self) -> Arena:
        """Of the first host."""
        return self.tables[0].arena

    def comes(self) -> None:
        """A worker has opened the channel."""
        self._came += 1
        if self._came == self.size:
            self.all_came_at = self._happened - 1

    def have_all(self, said: dict[int, Any]) -> bool:
        """Whether all have said it who are not dead."""
        excused = next((self.excused.get(name, ()) for name, one in self.facts.items() if one is said), ())
        return len({*said, *self.buried, *excused}) == self.size

    @property
    def is_wanted(self) -> bool:
        """Whether one has died that comes back."""
        return bool(self.buried) and len(self.past) < self.case.again

    def revive(self, donor: Any) -> None:
        """A replica of this one has been laid down: the dead one is its twin from now on, if that can be."""
        donor.is_handing, rank, server = False, self.case.dies, donor.table.server
        if not self.is_wanted or rank is None or not server.can_revive(rank, donor.rank):
            return
        before = self.workers[rank]
        before.told = donor.table.log_of(before)
        before.had_begun = rank in getattr(server, "_seats", ()) and server._seats[rank].tray.deposits > 0
        self.past.append(before)
        server.revive(rank, donor.rank)
        self.buried.remove(rank)
        for name, said in self.facts.items():
            if name in donor.said_by_then:
                self.excused.setdefault(name, set()).add(rank)
            elif isinstance(name, tuple) and name[0] == "standing":
                said.pop(rank, None)
        twin = self.workers[rank] = type(donor)(self, rank)
        client = donor.table.books.clients[rank]
        results = 0
        if isinstance(donor, AtChannel):
            client.log, results = [], client.seat.results
            client.seat._log = client.log
        twin.take_over(donor.handed)
        twin.program = "s" * self._chooser.draw.randint(0, 4)
        twin.twin_of, twin.twin_since = donor.rank, results
        self.posted += 1

    def post(self, name: object, rank: int, said: Any) -> None:
        donor = self.workers[rank] if self.workers else None
        if donor is not None and donor.is_handing:  # what it says now is heard after that
            donor.turn.wait(lambda: not donor.is_handing)
        self.facts.setdefault(name, {}).setdefault(rank, said)
        self.posted += 1

    # What happens.

    def run(self) -> None:
        with ExitStack() as stack:
            clock = SimpleNamespace(monotonic=lambda: self.now_s)
            for module in (channel_client, channel_server, weights_client, weights_server, waiter):
                stack.enter_context(patch.object(module, "time", clock))
            stack.enter_context(patch.object(worker_slots, "Unadded", Added))
            stack.callback(lambda: [worker.turn.end() for worker in (*self.workers, *self.past)])
            while not all(table.is_closed or table.is_lost for table in self.tables) and not self._is_given_up:
                self._happened += 1
                insist(self._happened < MOST_EVENTS, f"this does not end: {self._where()}")
                options = self._options()
                insist(bool(options), f"nobody can go on: {self._where()}")
                options[self._chooser.choose(options)].do()
        for worker in self.workers:
            if not worker.is_dead and not self._is_given_up:
                worker.stream.synchronize()
            worker.table.leave(worker)
        for table in self.tables:
            if table.is_lost:
                continue
            if table.can_close:
                table.close()
            insist(table.arena.back == table.arena.taken, "all memory has gone back")

    def _options(self) -> list[Option]:
        n, found = self.size, list[Option]()
        for rank, worker in enumerate(self.workers):
            turn, line = worker.turn, worker.line
            if not turn.is_done:
                if turn.until():
                    found.append(Option(rank, self._paces[rank], turn.go))
                elif turn.looks_up and turn.looked_at != self.posted:
                    found.append(Option(rank, 1, lambda turn=turn: self._look_up(turn)))  # type: ignore[misc]
            if line.up:
                found.append(Option(n + rank, self._ups[rank], lambda w=worker: self._hear(w)))  # type: ignore[misc]
            if line.down:
                found.append(Option(2 * n + rank, self._downs[rank], line.arrive))
            if worker.is_dead and not line.up and not worker.has_left:
                leave = lambda w=worker: (w.table.bury if self.case.goes_on else w.table.leave)(w)  # noqa: E731
                found.append(Option(n + rank, self._ups[rank], leave))
            for k, stream in enumerate((worker.stream, *worker.stream.beside)):
                if stream.can_work and not worker.is_dead:
                    found.append(Option(3 * n + rank + 1000 * k, self._streams[rank], stream.work))
            if worker.unheard and not worker.has_left and worker.unheard._is_due(worker.unheard._messages[0]):
                act = lambda w=worker: self._act(w, w.unheard.due())  # noqa: E731
                found.append(Option(4 * n + rank, 20, act))
        for table in self.tables:
            found += [] if table.is_lost else self._options_of(table, 5 * n + 8 * table.host)
        if self.case.lost_host is not None:
            losses = self._losses(self.tables[self.case.lost_host])
            if self.case.lost_at is not None and len(losses) == 1 and losses[0].weight == NOW:
                return losses
            found += losses
        if self.case.dies is not None:
            one = self.workers[self.case.dies]
            if self.past and len(self.past) == self.case.again:
                pass
            elif not one.is_dead and not one.turn.is_done:
                found.append(Option(5 * n + 3, 1, one.die))
            elif one.is_dead and not self.case.goes_on:
                found.append(Option(5 * n + 3, 1, self._give_up))
        found.sort(key=lambda one: one.who)
        return found

    def _losses(self, lost: Table) -> list[Option]:
        n, last_words = self.size, self._last_words
        if not lost.is_lost:
            at_work = any(not worker.turn.is_done for worker in self.workers if worker.table is lost)
            if self.case.lost_at is None:
                return [Option(5 * n + 3, 1, lost.is_lost_here)] if at_work else []
            is_due = self.all_came_at and self._happened > self.all_came_at + self.case.lost_at
            return [Option(5 * n + 3, NOW, lost.is_lost_here)] if at_work and is_due else []
        here = [table for table in self.tables if not table.is_lost]
        find = [
            Option(5 * n + 8 * table.host + 3, 30, lambda table=table: table.loses(lost))  # type: ignore[misc]
            for table in here
            if not lost.roads[table.name].has_ended
        ]
        return find + [
            option
            for table in here
            for option in self._arrivals(lost.roads[table.name], 5 * n + 8 * lost.host, *2 * [last_words[table.host]])
        ]

    def _arrivals(self, road: Road, first: int, words: int, vectors: int) -> list[Option]:
        """Of what is on its way."""
        found = [Option(first + 4, words, road.next_word)] if road.words else []
        return found + ([Option(first + 5, vectors, road.next_vector)] if road.vectors else [])

    def _options_of(self, table: Table, first: int) -> list[Option]:
        found, h = list[Option](), table.host
        if table.adders.queue:
            found.append(Option(first, self._adding, table.add))
        if table.can_flush:
            found.append(Option(first + 1, self._flushing, table.flush))
        if table.wakes:
            found.append(Option(first + 2, 3, table.wake))
        for road in table.roads.values():
            found += [] if road.ends_nowhere else self._arrivals(road, first, self._words[h], self._vectors[h])
            if road.acknowledged:
                found.append(Option(first + 6, self._words[h], road.next_acknowledgement))
        if table.can_close and table.server is not None and table.server.is_through:
            found.append(Option(first + 7, 60, table.close))
        return found

    def _give_up(self) -> None:
        """The others have heard that one has died."""
        self._is_given_up = True

    def _look_up(self, turn: Turn) -> None:
        turn.looked_at = self.posted
        turn.go(looks=True)

    def _hear(self, worker: Worker) -> None:
        (message,) = say.Inbox().feed(worker.line.up.popleft())
        self._act(worker, worker.unheard.come(message))

    def _act(self, worker: Worker, messages: Iterator[Any]) -> None:
        self.now_s += 0.001 * self._chooser.draw.random()
        worker.table.act(worker, messages)

    def _where(self) -> str:
        said = [
            f"worker {w.rank} {'has left' if w.turn.is_done else 'waits'}, {len(w.unheard._messages)} unheard"
            for w in self.workers
        ]
        return "; ".join(said)


def _is_nowhere(server: ChannelServer, worker: int) -> Elsewhere:
    return Elsewhere()


def play(case: Case, seed: int) -> Play:
    """In an order that is drawn."""
    one = Play(case, Drawn(seed), seed)
    one.run()
    return one


def programs(seed: int, size: int, steps: tuple[int, int] = (0, 6), also: str = "") -> tuple[str, ...]:
    """So many steps for each worker, and some of what else there is ``also`` to do between them."""
    draw = random.Random(f"programs {seed}")

    def one() -> str:
        told = "".join("s" + draw.choice(["", "", *also]) for _ in range(draw.randint(*steps)))
        return draw.choice(["", *also]) + told if told else told

    return tuple(one() for _ in range(size))


class HeardByOne(Drawn):
    """Only the second of three hosts hears anything of the last, which is lost when its part of a round has come there.
    The other two have not exchanged theirs by then.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.play: Play

    def choose(self, options: list[Option]) -> int:
        first, second, last = self.play.tables
        if not last.is_lost:
            server: Any = second.server
            parts = (
                [] if server is None else [*server._parts.values(), *(one.parts for one in server._under_way.values())]
            )
            has_come = any(last.host in some for some in parts)
            found = [k for k, one in enumerate(options) if (one.do == last.is_lost_here) == has_come]
            late = first.roads[second.name], second.roads[first.name]
            soon = [k for k in found if options[k].do not in [road.next_vector for road in late]]
            return self.draw.choice(soon or found or range(len(options)))
        kept = [k for k, one in enumerate(options) if getattr(one.do, "__self__", None) is not last.roads[first.name]]
        return self.draw.choice(kept or range(len(options)))


def heard_by_one(case: Case, seed: int) -> Play:
    """In such an order."""
    chooser = HeardByOne(seed)
    one = chooser.play = Play(case, chooser, seed)
    one.run()
    return one


# What must be so, whatever the order was.


def whole_vectors(one: Play) -> list[list[tuple[Any, list[Any]]]]:
    """Of each shard: for every worker the rank that writes it, and those that hold it. Else of the vector."""
    of, workers = one.case.of, one.workers
    if one.case.sharded:
        return [[(worker, [worker]) for worker in workers[shard::of]] for shard in range(of)]
    return [[(workers[first], workers[first : first + of]) for first in range(0, len(workers), of)]]


def every_gradient_is_applied_once_by_all(one: Play) -> None:
    for vector in whole_vectors(one):
        (first, _), size = vector[0], len(vector)
        lost = sum(worker.given[step] for worker, _ in vector for step in worker.client.lost)
        given = sum(sum(worker.given) for worker, _ in vector)
        for worker in (one for _, ranks in vector for one in ranks):
            insist(worker.history == first.history, "all workers apply the same")
            applied = sum(worker.history) * size
            insist(is_near(applied, given - lost), f"of {given} without {lost}, {applied} were applied")


def nothing_is_lost_from_the_sum(one: Play) -> None:
    for vector in whole_vectors(one):
        for worker, ranks in vector:
            insist(all(is_near(one.x.get(), worker.x.get()) for one in ranks), "ranks of a worker hold the same")
        held = sum(worker.x.get() for worker, _ in vector)
        should_be = sum(worker.start + sum(worker.given) for worker, _ in vector)
        insist(is_near(held, should_be), f"the workers hold {held} of {should_be}")


def rounds_are_of_what_lay_in_the_trays(one: Play) -> None:
    """By the seats' own logs: a round takes the gradients since the one before, or the weights that came last."""
    for vector in whole_vectors(one):
        _rounds_of(one, vector)


def _rounds_of(one: Play, vector: list[tuple[Any, list[Any]]]) -> None:
    rules = one.case.rules
    assert rules is not None
    gave: dict[int, dict[int, float]] = {}
    of_weights = rules.of_weights
    for number, (worker, _) in enumerate(vector):
        deposits = iter(worker.slots.deposits[one.case.loses :])
        tray = next(deposits) if of_weights else 0.0
        for what, version in one.workers[worker.rank - worker.rank % one.case.of].log:
            if what in ("offer", "renew"):
                tray = next(deposits) + (0.0 if of_weights else tray)
            elif what in ("snapshot", "flush"):
                gave.setdefault(version, {})[number] = tray
                tray = tray if of_weights else 0.0
        insist(next(deposits, None) is None, "all that was written was handed in")
    for worker in (one for _, ranks in vector for one in ranks):
        for version, value in worker.got:
            all_take_part = not of_weights or rules.is_full(version)
            members: Any = range(one.case.size)
            if not all_take_part:
                members = one.whom(version).block(worker.rank // one.case.of)
            should_be = sum(gave[version][rank] for rank in members) / len(members)
            insist(is_near(value, should_be), f"round {version} came to {value} instead of {should_be}")


def what_the_dead_had_submitted_counts_once(one: Play) -> None:
    """Where the others go on: by the seats' logs, each round is the mean of what lay in the trays, of those who were
    alive or gave something; and in the end nothing lies there. Of a host that is lost all that it gave to a block
    counts, or nothing, and for all who are left alike.
    """
    rules = one.case.rules
    assert rules is not None
    gave, came_to = _given(one), dict[tuple[int, tuple[int, ...]], float]()
    for worker in one.workers:
        for version, value in worker.got if not worker.is_dead else ():
            all_take_part = not rules.of_weights or rules.is_full(version)
            rank = worker.twin_of if version < worker.twin_since else worker.rank
            members: Any = tuple(range(one.case.size))
            members = members if all_take_part else one.whom(version).block(rank)
            given = [gave[version][rank] for rank in members if rank in gave[version]]
            lost = [rank for rank in members if one.workers[rank].table.is_lost]
            without = [gave[version][rank] for rank in members if rank in gave[version] and rank not in lost]
            is_right = any(
                None in some or is_near(value, sum(cast(list[float], some)) / len(some))
                for some in (given, without)
                if some
            )
            insist(is_right, f"round {version} came to {value} instead of the mean of {given} or of {without}")
            same = came_to.setdefault((version, members), value)
            insist(is_near(value, same) or rules.absent == "shared", f"round {version} came to {value} and to {same}")
    if not rules.of_weights:
        living = [worker.history for worker in one.workers if not worker.is_dead]
        insist(all(one == living[0] for one in living), "all who are left apply the same")


def _given(one: Play) -> dict[int, dict[int, float | None]]:
    """What each worker gave to each round, by the logs of the seats; None: what is not known."""
    rules = one.case.rules
    assert rules is not None
    gave: dict[int, dict[int, float | None]] = {}
    for worker in (*one.past, *one.workers):
        if worker.table.server is None:  # its host was lost before
            continue
        deposits, log = iter(worker.slots.deposits), worker.table.log_of(worker)
        seat = worker.table.server._seats.get(worker.rank)
        has_begun = worker.had_begun and rules.of_weights and seat is not None and seat.tray.deposits > 0
        tray, counted = next(deposits, None) if has_begun else 0.0, not has_begun
        if worker.twin_of >= 0 and rules.of_weights:
            tray = None  # until its first step another's weights answer for it
        for at, (what, version) in enumerate(log):
            if what in ("offer", "renew"):
                tray, counted = next(deposits) + (0.0 if rules.of_weights else tray), False
            elif what in ("snapshot", "flush"):
                is_there = worker.buried_at is None or at < worker.buried_at or not counted
                if is_there:
                    gave.setdefault(version, {})[worker.rank] = tray
                tray, counted = tray if rules.of_weights else 0.0, True
        is_over = counted or not worker.is_dead or worker.table.is_lost
        insist(is_over or rules.of_weights, "what the dead one had submitted is in a round")
    return gave


def rounds_are_told_once(one: Play) -> None:
    for worker in one.workers:
        versions = [r.version for r in worker.trace.rounds]
        insist(versions == sorted(set(versions)), "a round is told of once, in its order")


def is_near(a: float, b: float) -> bool:
    return abs(a - b) < 1e-6 * max(1.0, abs(a), abs(b))
