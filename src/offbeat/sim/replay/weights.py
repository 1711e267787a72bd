"""Shared weights in the order of a record."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial

import simpy

from offbeat.method.replica import Replica
from offbeat.rounds.shared import Retired, SharedVec
from offbeat.runs.order import Event
from offbeat.sim.exchanges import Pending
from offbeat.sim.network import Network
from offbeat.sim.replay.mismatch import refuse
from offbeat.tensors.vector import Vec
from offbeat.tensors.wire import message_bytes


class ReplayedShared:
    """The shared weights of all workers, in the order of a record."""

    def __init__(
        self,
        env: simpy.Environment,
        network: Network,
        arrived: Callable[[Pending], None],
        events: Sequence[Sequence[Event]],
        stood: Callable[[int], None],
    ) -> None:
        self._env, self._network, self._arrived, self._stood = env, network, arrived, stood
        self._events = [deque(own) for own in events]
        self._me: dict[int, Replica] = {}
        self._shared: dict[int, SharedVec] = {}
        self._departs: dict[int, tuple[int, Pending]] = {}  # whom a worker wants to visit
        self._on_the_way: dict[tuple[int, int], deque[tuple[Vec, Pending]]] = defaultdict(deque)  # (from, to)
        self._halves: dict[int, deque[tuple[Vec, Pending]]] = defaultdict(deque)  # on their way home
        self._adds: dict[int, tuple[Vec, Callable[[Vec], None]]] = {}
        self._waiting: dict[int, Callable[[Vec], None]] = {}
        self._retired: Retired | None = None
        self._stands = set[int]()
        self._before: dict[int, Vec] = {}
        self._shifts: dict[int, Vec] = {}
        self._goes_on = False
        self.bytes_sent = 0

    @property
    def is_open(self) -> bool:
        return bool(self._shared)

    def share(self, me: Replica, x: Vec) -> None:
        self._me[me.rank], self._shared[me.rank] = me, SharedVec(x)
        self._retired = self._retired or Retired(me.size)

    def add(self, rank: int, delta: Vec, answer: Callable[[Vec], None]) -> None:
        self._adds[rank] = (delta, answer)
        self._go_on()

    def meet(self, i: int, j: int) -> Pending:
        """The visit begins when the list says so; before that nothing can happen that would change what it takes."""
        pending = Pending(i, self._env.now)
        if i == j:
            pending.arrived = True
            return pending
        self._departs[i] = (j, pending)
        self._go_on()
        return pending

    def retire(self, rank: int, answer: Callable[[Vec], None]) -> None:
        self._waiting[rank] = answer
        assert self._retired is not None, "who retires has shared its weights"
        self._retired.one_more()
        self._go_on()

    def stand(self, rank: int) -> None:
        self._stands.add(rank)
        self._go_on()

    def adopt(self, rank: int) -> None:
        self._shifts[rank] = self._me[rank].x - self._before.pop(rank)
        self._go_on()

    def _go_on(self) -> None:
        if self._goes_on:
            return
        self._goes_on = True
        while any(self._follow(rank) for rank in list(self._shared)):
            pass
        self._goes_on = False
        if len(self._waiting) == len(self._shared) and not any(self._events):
            for rank, answer in sorted(self._waiting.items()):
                self._env.timeout(0).callbacks.append(partial(self._let_go, rank, answer))
            self._waiting.clear()

    def _let_go(self, rank: int, go: Callable[[Vec], None], _: object) -> None:
        go(self._shared[rank].now())

    def _follow(self, rank: int) -> bool:
        moved = False
        while self._events[rank] and self._done(rank, self._events[rank][0]):
            moved = True
        return moved

    def _done(self, rank: int, event: Event) -> bool:
        (what, number), mine = event, self._shared[rank]
        match what:
            case "depart":
                if rank not in self._departs:
                    return False
                peer, pending = self._departs.pop(rank)
                self._events[rank].popleft()
                _, sent = mine.depart()
                self._travel(rank, peer, lambda: self._on_the_way[rank, peer].append((sent, pending)))
            case "visited":
                if not self._on_the_way[number, rank]:
                    return False
                self._events[rank].popleft()
                theirs, pending = self._on_the_way[number, rank].popleft()
                half = mine.visited(number, theirs)
                self._travel(rank, number, lambda: self._halves[number].append((half, pending)))
            case "home":
                if not self._halves[rank]:
                    return False
                self._events[rank].popleft()
                half, pending = self._halves[rank].popleft()
                mine.home(number, half)
                pending.arrived = True
                self._arrived(pending)
            case "add":
                if rank not in self._adds:
                    return False
                self._events[rank].popleft()
                delta, answer = self._adds.pop(rank)
                answer(mine.add(delta).clone())  # what is next on the list may change it before it is read
            case "stand":
                if rank not in self._stands and rank not in self._waiting:
                    return False
                self._events[rank].popleft()
                self._stands.discard(rank)
                self._before[rank] = mine.stand()
                self._me[rank].x.copy_(self._before[rank])
                self._stood(rank)
            case "shift":
                if rank not in self._shifts:
                    return False
                self._events[rank].popleft()
                mine.shift(self._shifts.pop(rank))
            case _:
                raise refuse(rank, event, "this version knows nothing of that")
        return True

    def _travel(self, sender: int, receiver: int, arrive: Callable[[], None]) -> None:
        nbytes = message_bytes(self._shared[sender].empty(), None)
        self.bytes_sent += nbytes

        def there(_: object) -> None:
            arrive()
            self._go_on()

        self._env.timeout(self._network.send_s(sender, receiver, nbytes)).callbacks.append(there)

    def who_waits(self) -> dict[int, str]:
        return {
            rank: f"for what the record says next: {own[0][0]} of {own[0][1]}"
            for rank, own in enumerate(self._events)
            if own
        }
