"""Shared weights at the host process: a meeting of two happens here, in one go, whatever the two are doing.

Weights are expressions (`offbeat.live.host.ledger`). When i meets j, both become the mean of the two, which is made at
once: whoever needs its weights next finds it there.

Where the two are on different hosts, i's weights travel to j's host, and half the difference travels back. Meanwhile
both go on, and whatever happens to either is added. A worker's step, its standing and its retiring come when its visits
are over: so a link that is slower than the steps holds them up, instead of filling memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Set
from typing import Any, cast

from offbeat.live.host import protocol as say
from offbeat.live.host.books import Books, ClientRecord, Reply, Send, unheard
from offbeat.live.host.ledger import Expression, Sum
from offbeat.live.host.server import EVERYBODY, Counterparts, MeetingServer, Whereabouts
from offbeat.live.host.settling import Name
from offbeat.rounds.seat import Event
from offbeat.rounds.shared import SharedVec


class Sharer(ClientRecord):
    """A worker and its shared weights."""

    def __init__(self, key: str, worker: int, send: Send, log: list[Event] | None) -> None:
        super().__init__(key, worker, send, log)
        self.shared: SharedVec | None = None
        self.stands = False  # between two steps, until it has said how far it was moved
        self.visits: dict[int, int] = {}  # of its own, that are under way, and at which hosts
        self.then: list[Callable[[], None]] = []  # what is to happen when they are over

    @property
    def y(self) -> Expression:
        assert self.shared is not None
        return cast(Expression, self.shared.weights)


class WeightsServer(MeetingServer):
    """The shared weights of one run."""

    what = "shared weights"

    def __init__(self, key: str, plan: dict[str, Any], others: Counterparts, books: Books) -> None:
        super().__init__(key, plan, others, books)
        self._size = len(others.home_of)
        self._retired, self._all_retired = set[int](), False
        self._sharers: dict[int, Sharer] = {}
        self._standing: set[int] = set()

    def values(self) -> list[Expression]:
        return [one.y for one in self._living if one.shared is not None]

    def places(self) -> dict[int, Whereabouts]:
        absent = self.absent
        own = {worker: Whereabouts(-1, -1, () if worker in absent else absent) for worker in self._sharers}
        return {**super().places(), **own}

    def seat(self, worker: int, message: say.OpenChannel, send: Send) -> ClientRecord:
        if worker in self._returning:
            return self._sharers[worker].comes(send)
        client = self._sharers[worker] = Sharer(self.key, worker, send, [] if message.logs else None)
        return client

    def can_revive(self, rank: int, twin_of: int) -> bool:
        return super().can_revive(rank, twin_of) and twin_of not in self._retired

    def revive(self, rank: int, twin_of: int) -> None:
        """Its weights are those of the other one by now."""
        super().revive(rank, twin_of)
        self._retired.discard(rank)
        me = self._sharers[rank] = Sharer(self.key, rank, unheard, None)
        me.shared = SharedVec(cast(Any, self._sharers[twin_of].y))
        self._books.clients[rank] = me

    def bury(self, rank: int) -> None:
        """Its weights are nobody's from now on. What it has given in meetings stays with the others."""
        self._early = [one for one in self._early if one[0] != rank]
        super().bury(rank)
        if rank in self._sharers:
            self._sharers[rank].stands = False
        if not self.others.decides:
            return
        if self._standing:
            self._hear_of_all(say.Standing(self.key, min(self._standing)))
        self._hear_of_all(say.HasRetired(self.key, rank))

    def greet(self, client: Sharer) -> None:
        self._books.reply(client, Reply("open", None, 0, [], ()))

    def begin(self, worker: int, message: Any) -> None:
        me = self._sharers[worker]
        brought = me.written(message.slot)
        if worker not in self._returning:  # else they are there, and others may have met them
            me.shared = SharedVec(brought, me.log)
        self._books.reply(me, Reply("heard", None, 0, [], ()))
        self._books.grant(me)

    def hear_in_time(self, worker: int, message: Any) -> None:
        me = self._sharers[worker]
        assert me.shared is not None
        match message:
            case say.MeetPeer(peer=peer):
                if peer in self._dead:
                    self._meet(me, me)
                elif peer in self._sharers:
                    self._meet(me, self._sharers[peer])
                else:
                    self._visit(me, peer)
            case say.AddStep(slot=slot):
                me.put_by = step = me.written(slot)
                self._when_home(me, lambda: self._add(me, step))
            case say.Shift(slot=slot):
                me.shared.shift(me.written(slot))
                self._books.reply(me, Reply("heard", None, 0, [], ()))
                self._books.grant(me)
                me.stands = False
                self._end_if_over()
            case say.Stands():
                me.stands = True
                self._when_home(me, lambda: self._say_to_first(say.Standing(self.key, worker)))
            case say.Finished():
                self._when_home(me, lambda: self._say_to_first(say.HasRetired(self.key, worker)))
            case _:
                raise ValueError(f"shared weights do not know what to do with {message}")

    def hear_host(self, host: int, message: Any, value: Expression | None) -> None:
        match message:
            case say.Visit(visitor=visitor, peer=peer, number=number):
                shared, theirs = None if peer in self._dead else self._sharers[peer].shared, cast(Any, value)
                if shared is None:  # it meets nobody
                    self.others.send(host, say.HalfBack(self.key, visitor, number, False))
                    return
                half = self.as_one([cast(Expression, shared.visited(visitor, theirs))])
                self.send(host, say.HalfBack(self.key, visitor, number, True), half)
                self._make_one(self._sharers[peer])
            case say.HalfBack(visitor=visitor, number=number):
                self._come_home(self._sharers[visitor], number, value if message.gives else Expression())
            case say.Standing() | say.HasRetired():
                self._hear_of_all(message)
            case _:
                super().hear_host(host, message, value)

    def _add(self, me: Sharer, step: Any) -> None:
        assert me.shared is not None
        me.put_by = None
        me.shared.add(step)
        self._show(me)
        self._books.shorten(me.y)
        self._books.grant(me)

    def _visit(self, me: Sharer, peer: int) -> None:
        """Somebody of another host."""
        assert me.shared is not None
        self.rounds += 1
        number, sent = me.shared.depart()
        me.visits[number] = self.others.home_of[peer]
        visit = say.Visit(self.key, me.worker, peer, number, True)
        self.send(self.others.home_of[peer], visit, self.as_one([cast(Expression, sent)]))

    def _come_home(self, me: Sharer, number: int, half: Any) -> None:
        assert me.shared is not None
        me.news.append((me.shared.home(number, half), time.monotonic()))
        self._make_one(me)
        del me.visits[number]
        self._when_home(me)

    def settle(self, gone: Set[int], held: Set[Name], used: Mapping[Name, bool]) -> None:
        """Who visits a lost host comes home as it went: the two met, or not, for that host alone."""
        super().settle(gone, held, used)
        for me in self._sharers.values():
            for number in [number for number, host in me.visits.items() if host in gone]:
                self._come_home(me, number, Expression())

    def _when_home(self, me: Sharer, then: Callable[[], None] | None = None) -> None:
        if then is not None:
            me.then.append(then)
        if not me.visits:
            due, me.then = me.then, []
            for one in due:
                one()

    def _make_one(self, one: Sharer) -> None:
        """Its weights have become a sum, which is made at once."""
        one.y.refs = ((Sum([one.y.clone()]), 1.0),)
        self._books.make(one.y)

    # What all must have done before anybody goes on.

    def _say_to_first(self, message: say.Standing | say.HasRetired) -> None:
        if self.others.decides:
            self._hear_of_all(message)
        else:
            self.others.send(0, message)

    def _hear_of_all(self, message: say.Standing | say.HasRetired) -> None:
        """At the first host: one more does; the last of them lets all go on."""
        if message.worker != EVERYBODY:
            those = self._retired if isinstance(message, say.HasRetired) else self._standing
            those.add(message.worker)
            if len(those | self._dead) < self._size or (those is self._retired and self._all_retired):
                return
            self._standing = set()
            message = message._replace(worker=EVERYBODY)
            self.others.tell_others(message)
        if isinstance(message, say.HasRetired):
            self._all_retired = True
            self._end_if_over()
            return
        for one in self._living:
            assert one.shared is not None
            one.shared.stand()
            self._show(one)

    def _end_if_over(self) -> None:
        """Tell all what their weights have become, when nobody changes them any more.

        One that has retired may still be taking part in an average: the other, which asked for it, goes on, retires,
        and is heard first. What the one that is late has to add belongs to its weights, too.
        """
        if self._all_retired and not any(one.stands for one in self._sharers.values()):
            for one in self._living:
                self._show(one, "over")

    @property
    def _living(self) -> list[Sharer]:
        return [one for one in self._sharers.values() if not one.is_dead]

    def _meet(self, me: Sharer, peer: Sharer) -> None:
        self.rounds += 1
        stale = 0
        if me is not peer:
            assert me.shared is not None
            assert peer.shared is not None
            number, sent = me.shared.depart()
            half = peer.shared.visited(me.worker, sent)
            stale = me.shared.home(number, half)
            self._make_one(me)
            peer.y.refs = me.y.refs  # both have become this
        me.news.append((stale, time.monotonic()))

    def _show(self, one: Sharer, how: str = "shown") -> None:
        """What they are; a step of its own that has just come is a part of it that its worker adds itself."""
        self._books.reply(one, Reply(how, None, 0, [], [(one.y.clone(), None)]))
