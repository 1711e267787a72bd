"""Exchanges in step at the host process: everybody lays something down, and is answered when those have whom it needs.

The n-th exchange of one member meets the n-th of every other. A sum that several members want is made once.
"""

from __future__ import annotations

from typing import Any

from offbeat.live.host import protocol as say
from offbeat.live.host.books import Books, ClientRecord, Reply, Send
from offbeat.live.host.ledger import Expression, Sum


class Exchange:
    """One of them: what has been laid down, who wants what, and the sums that were wanted."""

    def __init__(self) -> None:
        self.laid: dict[int, Expression | None] = {}
        self.notes: dict[int, Any] = {}
        self.wants: dict[int, say.Lay] = {}
        self.totals: dict[tuple[Any, ...], Sum] = {}

    def can_answer(self, lay: say.Lay) -> bool:
        return all(member in self.laid for member in (*(member for member, _ in lay.sums), *lay.reads))

    def answer(self, lay: say.Lay) -> list[Expression]:
        vectors = []
        if lay.sums:
            key = (*map(tuple, lay.sums), lay.divisor)
            if key not in self.totals:
                laid = [(self.laid[member], weight) for member, weight in lay.sums]
                self.totals[key] = Sum([vector * weight for vector, weight in laid if vector is not None], lay.divisor)
            vectors.append(Expression([(self.totals[key], 1.0)]))
        read = [self.laid[member] for member in lay.reads]
        return [*vectors, *(vector.clone() for vector in read if vector is not None)]


class ExchangeServer:
    """The exchanges of some workers, all of one kind of vector."""

    wakes_s: float | None = None

    def __init__(self, key: str, plan: dict[str, Any], books: Books) -> None:
        self.key, self.run, self._books, self._size = key, str(plan["run"]), books, int(plan["size"])
        self._clients: dict[int, ClientRecord] = {}
        self._exchanges: dict[int, Exchange] = {}
        self._left: set[int] = set()
        books.also = lambda: [v for one in self._exchanges.values() for v in one.laid.values() if v is not None]

    def open(self, message: say.OpenChannel, send: Send) -> None:
        client = ClientRecord(self.key, message.worker, send, None)
        self._clients[message.worker] = self._books.clients[message.worker] = client
        self._books.grant(client)
        self._reply(client, "open")

    def _reply(self, client: ClientRecord, how: str, about: object = None, vectors: Any = ()) -> None:
        self._books.reply(client, Reply(how, about, 0, [], [(vector, None) for vector in vectors]))

    def leave(self, worker: int) -> bool:
        """Whether all have left."""
        self._left.add(worker)
        if worker in self._clients:
            self._clients[worker].replies.clear()
        return len(self._left) == self._size

    def waits_for(self, worker: int) -> tuple[int, int]:
        """What is waited for here, its page shows."""
        return 0, 0

    def hear(self, worker: int, message: Any) -> None:
        client = self._clients[worker]
        match message:
            case say.Release():
                client.release(message.released)
            case say.Lay(number=number, slot=slot):
                client.release(message.released)
                exchange = self._exchanges.setdefault(number, Exchange())
                exchange.laid[worker] = None if slot < 0 else client.written(slot)
                client.own = None
                exchange.notes[worker], exchange.wants[worker] = message.note, message
                self._answer(number, exchange)
                if worker in exchange.wants and message.early:
                    self._reply(client, "granted")
                if message.early:
                    self._books.grant(client)
            case _:
                raise ValueError(f"an exchange does not know what to do with {message}")

    def _answer(self, number: int, exchange: Exchange) -> None:
        for worker, lay in list(exchange.wants.items()):
            if exchange.can_answer(lay):
                del exchange.wants[worker]
                notes = [exchange.notes[member] for member in lay.reads]
                self._reply(self._clients[worker], "exchange", [number, notes], exchange.answer(lay))
        if len(exchange.laid) == self._size and not exchange.wants:
            del self._exchanges[number]  # what was answered stands on what it needs

    def silence(self, now_s: float) -> None:
        """Nothing waits for time."""

    def flush(self) -> None:
        """Send what can be sent. With an answer comes a slot for the next exchange: what was laid down may be free."""
        for client in self._clients.values():
            if client.replies and client.replies[0].is_ready:
                self._books.grant(client)
        self._books.flush()

    def close(self) -> None:
        self._books.close()
