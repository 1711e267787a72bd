"""The ranks of an island that do not lead it, at a channel and with shared weights: as the leader does, shard by shard.

Each has a seat, and sums, of its own, in the world of its shard. What happens there, and when, was decided at the
leader's seat: `Orders` has it. So nothing is waited for but one's turn; a result that the leader has taken after a step
is there when this rank is told to take it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from offbeat.live.partial.clerk import Apply, Clerk
from offbeat.live.partial.pairs import SharedWeights, Visit
from offbeat.live.partial.telling import MEMBERS, OVER, PART, Orders
from offbeat.method.effects import Got, Ticket
from offbeat.rounds.referee import Notice
from offbeat.rounds.seat import THROUGH, Freshness
from offbeat.tensors.vector import Vec


class FollowingClerk(Clerk):
    """A shard's side of one channel."""

    def _begin(self) -> None:
        self._orders = Orders(self._link, self._board, self._patience_s)
        self._link.listen(self._orders.hear)
        self._link.alongside(self._follow)

    @property
    def waited_s(self) -> float:
        return self._orders.waited_s

    def offer(self, x: Vec, step: int) -> list[Got]:
        mine = self._staging.down(x)
        with self._orders.turn("offer"):
            self._seat.offer(mine, step)
        with self._orders.turn("take"):
            return self._up(self._seat.take(step))

    def through(self, step: int) -> bool:
        return bool(self._orders.answer(THROUGH))

    def finished(self, x: Vec | None) -> None:
        self.renew(x)
        if not self._seat.has_finished:
            with self._orders.turn("finish"):
                self._seat.finish()

    def renew(self, x: Vec | None) -> None:
        if x is not None:
            mine = self._staging.down(x)
            with self._orders.turn("renew"):
                self._seat.renew(mine)

    def rest(self, x: Vec | None, asked: Callable[[], bool], take_part: Callable[[], None]) -> Got | None:
        self.renew(x)
        while True:
            with self._lock:
                what, _ = self._orders.first("next", PART, OVER)
                got = self._next() if what == "next" else None
                self._orders.strike()
            if what != PART:
                return got
            take_part()

    def stand(self, all_there: Callable[[], bool], agree_on_largest: Callable[[int], int], apply: Apply) -> None:
        """The leader has stood until all leaders did, and agreed with them on the number of rounds."""
        with self._orders.turn("stand"):
            self._seat.stand()
        self.renew(self._channel.holds())
        while True:
            with self._lock:
                what, results = self._orders.first("next", "catch up")
                got = self._next() if what == "next" else None
                taken = [got] if got is not None else self._up(self._seat.catch_up(results))
                self._orders.strike()
            apply(taken)
            if what == "catch up":
                return
            self.renew(self._channel.holds())

    def _tell(self, notice: Notice | None) -> None:
        """The referee hears the leaders."""

    def _record(self, version: int, started_by: int, shares: Mapping[int, Freshness]) -> None:
        """Rounds are told of by leaders."""

    def _follow(self) -> None:
        members: tuple[int, ...] = ()
        while (event := self._orders.upcoming(MEMBERS, "snapshot", "flush")) is not None:
            what, version = event
            if what == MEMBERS:
                members = self._orders.members()
            else:
                self._round(version, -1, what == "flush", members)
                members = ()

    @contextmanager
    def _turn(self, what: str) -> Iterator[None]:
        with self._orders.other_turn(what):
            yield


class FollowingWeights(SharedWeights):
    """A shard of shared weights."""

    def _begin(self) -> None:
        self._orders = Orders(self._link, self._board, self._patience_s)
        self._link.listen(self._orders.hear)
        self._link.alongside(self._follow)

    @property
    def waited_s(self) -> float:
        return super().waited_s + self._orders.waited_s

    def _announce(self, peer: int) -> None:
        """The leader does, at its peer's leader."""

    @contextmanager
    def _turn(self, what: str) -> Iterator[None]:
        with self._orders.turn(what):
            yield

    @contextmanager
    def _visit(self) -> Iterator[None]:
        with self._orders.other_turn("visited"):
            yield

    def retire(self, asked: Callable[[], bool], take_part: Callable[[], None]) -> Vec:
        while True:
            with self._lock:
                what, _ = self._orders.first(PART, OVER)
                self._orders.strike()
                if what == OVER:
                    return self._staging.up(self._shared.now())
            take_part()

    def stand(self, x: Vec, all_there: Callable[[], bool]) -> None:
        """When it is told of, all leaders stand, and no visit is under way among them."""
        with self._turn("stand"):
            self._stood = self._shared.stand()
        x.copy_(self._stood)

    def finish(self, visit: Ticket[None]) -> None:
        assert isinstance(visit, Visit)
        self._worker.wait(visit.works, f"rank {visit.peer}'s half of a meeting")
        with self._turn("home"):
            self._shared.home(visit.number, visit.half)

    def _follow(self) -> None:
        while (event := self._orders.upcoming("visited")) is not None:
            self._visited(event[1])
