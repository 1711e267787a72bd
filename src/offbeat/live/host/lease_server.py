"""The batches of a share at the host process: who has which, which count, and what a dead worker gives back.

`offbeat.rounds.leases` has the rule. Where the workers are on several hosts the first host's server deals for all; the
others pass on what their workers say, and what these are answered.

A step counts when what it is in has been handed in. The worker says so first (``Stepped.hands_over``) and hands it in
then, on the same line: so if its process dies between the two, nothing counts, and nobody has what it was in.
"""

from __future__ import annotations

from typing import Any

from offbeat.live.host import protocol as say
from offbeat.live.host.books import Send
from offbeat.live.host.ledger import Expression
from offbeat.live.host.server import Counterparts, Server
from offbeat.rounds.leases import Dealer, Dealt


class LeaseServer(Server):
    """One share's."""

    what = "leases"

    def __init__(self, key: str, plan: dict[str, Any], others: Counterparts) -> None:
        super().__init__(key, plan, others)
        self._dealer = Dealer(len(others.host_of))
        self._sends: dict[int, Send] = {}
        self._about: dict[int, str] = {}  # of each epoch, as it was said first
        self._asked: dict[int, int] = {}  # the number of the question of one that waits

    def open(self, message: say.OpenChannel, send: Send) -> None:
        self._sends[message.worker] = send

    def hear(self, worker: int, message: Any) -> None:
        if self.others.decides:
            self._hear(worker, message)
        else:
            self._pass_on(worker, say.wrapped(message))

    def handed_in(self, worker: int) -> None:
        """What this worker has handed over last was handed in."""
        if self.others.decides:
            self._dealer.handed_in(worker)
        else:
            self._pass_on(worker, [])

    def leave(self, rank: int, ended: bool = False) -> None:
        super().leave(rank, ended)
        self._sends.pop(rank, None)
        if self.others.decides:
            self._die(rank)
        else:
            self._pass_on(rank, say.wrapped(say.Close(self.key)))

    def bury(self, rank: int) -> None:
        super().bury(rank)
        if self.others.decides:
            self._die(rank)

    def _die(self, worker: int) -> None:
        self._dealer.die(worker)
        self._tell_those_who_wait()

    # Several hosts.

    def _pass_on(self, worker: int, said: list[Any]) -> None:
        self.others.send(0, say.OfLeases(self.key, worker, said))
        self.flush()  # before what the worker says next, which may be passed on by another server

    def hear_host(self, host: int, message: Any, value: Expression | None) -> None:
        if not isinstance(message, say.OfLeases):
            super().hear_host(host, message, value)
        elif not self.others.decides:
            if message.worker in self._sends:
                self._sends[message.worker](say.unwrapped(message.said))
        elif not message.said:
            self._dealer.handed_in(message.worker)
        elif isinstance(said := say.unwrapped(message.said), say.Close):
            self._left.add(message.worker)
            self._die(message.worker)
        else:
            self._hear(message.worker, said)

    def lost(self, host: int, words: str) -> None:
        super().lost(host, words)
        for worker, home in enumerate(self.others.host_of):
            if home == host and self.others.decides:
                self._left.add(worker)
                self._die(worker)

    @property
    def is_through(self) -> bool:
        """Workers of other hosts may have something to ask as long as they are there."""
        everybody = range(len(self.others.host_of))
        return super().is_through and (not self.others.decides or self._left.issuperset(everybody))

    # At the first host.

    def _hear(self, worker: int, message: Any) -> None:
        dealer = self._dealer
        match message:
            case say.BeginEpoch(number=number, epoch=epoch):
                said = self._about.setdefault(epoch, message.about)
                if said == message.about:
                    self._answer(worker, number, dealer.open(worker, epoch, message.batches))
                else:
                    self._answer(worker, number, Dealt(), said)
            case say.BeginBatch(number=number, epoch=epoch):
                self._answer(worker, number, dealer.begin(worker, epoch, message.place, message.batch_us))
            case say.TakeBatches(number=number, epoch=epoch, waits=True):
                self._asked[worker] = number
                dealer.wait(worker, epoch, message.batch_us)
            case say.TakeBatches(number=number, epoch=epoch):
                self._answer(worker, number, dealer.take(worker, epoch, message.batch_us, message.backlog))
            case say.StopWaiting():
                if (dealt := dealer.stop_waiting(worker)) is not None:
                    self._answer(worker, self._asked[worker], dealt)
            case say.Stepped(epoch=epoch):
                dealer.step(worker, epoch, message.places, message.skipped, message.steps)
                if message.hands_over:
                    dealer.hands_over(worker)
            case say.HandedIn():
                dealer.hands_over(worker)
                dealer.handed_in(worker)
            case say.CloseEpoch(epoch=epoch):
                dealer.close(worker, epoch)
            case say.HowFar(number=number, epoch=epoch) if epoch >= 0:
                self._answer(worker, number, dealer.look(worker, epoch))
            case say.HowFar(number=number):
                told = [(one.number, one.left, one.skipped) for one in dealer.accounts()]
                self._send(worker, say.Accounts(self.key, number, told, dealer.steps))
            case _:
                raise ValueError(f"a share does not know what to do with {message}")
        self._tell_those_who_wait()

    def _tell_those_who_wait(self) -> None:
        for worker, dealt in self._dealer.awaited():
            self._answer(worker, self._asked[worker], dealt)

    def _answer(self, worker: int, number: int, dealt: Dealt, other: str = "") -> None:
        one = dealt
        fields = (one.front, one.back, list(one.taken), one.is_over, one.used, one.has_last, one.steps)
        self._send(worker, say.BatchesDealt(self.key, number, *fields, other))

    def _send(self, worker: int, answer: Any) -> None:
        if (home := self.others.host_of[worker]) != self.others.me:
            self.others.send(home, say.OfLeases(self.key, worker, say.wrapped(answer)))
        elif worker in self._sends:
            self._sends[worker](answer)

    def close(self) -> None:
        """All have left."""
        self._sends = {}
