"""Shared weights at the host process: a meeting of two happens here, in one go, whatever the two are doing.

Weights are expressions (`offbeat.live.host.ledger`). When i meets j, both become the mean of the two, which is made at
once: whoever needs its weights next finds it there.
"""

from __future__ import annotations

import time
from typing import Any, cast

from offbeat.live.host import protocol as say
from offbeat.live.host.books import Books, ClientRecord, Reply, Send
from offbeat.live.host.ledger import Expression, Sum
from offbeat.rounds.seat import Event
from offbeat.rounds.shared import Retired, SharedVec


class Sharer(ClientRecord):
    """A worker and its shared weights."""

    def __init__(self, key: str, worker: int, send: Send, log: list[Event] | None) -> None:
        super().__init__(key, worker, send, log)
        self.shared: SharedVec | None = None
        self.stands = False  # between two steps, until it has said how far it was moved

    @property
    def y(self) -> Expression:
        assert self.shared is not None
        return cast(Expression, self.shared.weights)


class WeightsServer:
    """The shared weights of one run."""

    wakes_s: float | None = None

    def __init__(self, key: str, plan: dict[str, Any], books: Books) -> None:
        self.key, self.run, self._books, self._size = key, str(plan["run"]), books, int(plan["size"])
        self._retired, self._all_retired = Retired(self._size), False
        self._sharers: dict[int, Sharer] = {}
        self._early: list[tuple[int, Any]] = []
        self._left: set[int] = set()
        books.also = lambda: [one.y for one in self._sharers.values() if one.shared is not None]

    def open(self, message: say.OpenChannel, send: Send) -> None:
        client = Sharer(self.key, message.worker, send, [] if message.logs else None)
        self._sharers[message.worker] = self._books.clients[message.worker] = client
        self._books.grant(client)
        self._books.reply(client, Reply("open", None, 0, [], ()))

    def leave(self, worker: int) -> bool:
        """Whether all have left."""
        self._left.add(worker)
        if worker in self._sharers:
            self._sharers[worker].replies.clear()
        return len(self._left) == self._size

    def waits_for(self, worker: int) -> tuple[int, int]:
        """Nobody waits here for another's step."""
        return 0, 0

    def hear(self, worker: int, message: Any) -> None:
        if isinstance(message, say.FirstDeposit):
            me = self._sharers[worker]
            me.shared = SharedVec(me.written(message.slot), me.log)
            self._books.reply(me, Reply("heard", None, 0, [], ()))
            self._books.grant(me)
        else:
            self._early.append((worker, message))
        if sum(one.shared is not None for one in self._sharers.values()) == self._size:  # nobody is met before
            early, self._early = self._early, []
            for one in early:
                self._hear(*one)

    def _hear(self, worker: int, message: Any) -> None:
        me = self._sharers[worker]
        assert me.shared is not None
        match message:
            case say.Release():
                me.release(message.released)
            case say.MeetPeer(peer=peer):
                self._meet(me, self._sharers[peer])
            case say.AddStep(slot=slot):
                me.release(message.released)
                me.shared.add(me.written(slot))
                self._show(me)
                self._books.shorten(me.y)
                self._books.grant(me)
            case say.Shift(slot=slot):
                me.shared.shift(me.written(slot))
                self._books.reply(me, Reply("heard", None, 0, [], ()))
                self._books.grant(me)
                me.stands = False
                self._end_if_over()
            case say.Stands():
                me.shared.stand()
                me.stands = True
                self._show(me)
            case say.Finished():
                self._all_retired = self._retired.one_more()
                self._end_if_over()
            case _:
                raise ValueError(f"shared weights do not know what to do with {message}")

    def _end_if_over(self) -> None:
        """Tell all what their weights have become, when nobody changes them any more.

        One that has retired may still be taking part in an average: the other, which asked for it, goes on, retires,
        and is heard first. What the one that is late has to add belongs to its weights, too.
        """
        if self._all_retired and not any(one.stands for one in self._sharers.values()):
            for one in self._sharers.values():
                self._show(one, "over")

    def _meet(self, me: Sharer, peer: Sharer) -> None:
        stale = 0
        if me is not peer:
            assert me.shared is not None
            assert peer.shared is not None
            number, sent = me.shared.depart()
            half = peer.shared.visited(me.worker, sent)
            stale = me.shared.home(number, half)
            me.y.refs = peer.y.refs = ((Sum([me.y.clone()]), 1.0),)  # both have become this
            self._books.make(me.y)
        me.news.append((stale, time.monotonic()))

    def _show(self, one: Sharer, how: str = "shown") -> None:
        """What they are; a step of its own that has just come is a part of it that its worker adds itself."""
        self._books.reply(one, Reply(how, None, 0, [], [(one.y.clone(), None)]))

    def silence(self, now_s: float) -> None:
        """Nothing waits for time."""

    def flush(self) -> None:
        """Send what can be sent."""
        self._books.flush()

    def close(self) -> None:
        self._books.close()
