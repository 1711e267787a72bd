"""Exchanges in step at the host process: everybody lays something down, and is answered when those have whom it needs.

An exchange of one member meets those of the others that have its number. A number says at which *page* of the run an
exchange is, and which of those there: so whoever has returned knows where the others are. A sum that several members
want is made once. Where the members are on several hosts and all want the same sum, each host adds up what its own have
brought, and the hosts sum their parts: two hosts send each other what they have; what is coded, or long and of more
hosts, goes in two phases (host_sums.py). What some members want as it is goes to their hosts.
"""

from __future__ import annotations

from typing import Any

from offbeat.live.host import protocol as say
from offbeat.live.host.books import Books, ClientRecord, Reply, Send
from offbeat.live.host.host_sums import GivenByHost, Summed
from offbeat.live.host.ledger import Expression, Sum
from offbeat.live.host.server import BookedServer, Counterparts, Whereabouts

PAGE = 1 << 32  # exchanges of a page, at most


class Exchange:
    """One of them: what has been laid down, who wants what, and the sums that were wanted.

    ``parts``: what each host's members have brought together; None: nothing. ``summed``: what has come of all parts,
    where they were summed in two phases.
    """

    def __init__(self) -> None:
        self.laid: dict[int, Expression | None] = {}
        self.notes: dict[int, Any] = {}
        self.wants: dict[int, say.Lay] = {}
        self.totals: dict[tuple[Any, ...], Sum] = {}
        self.parts: dict[int, Expression | None] = {}
        self.summed: Summed | None = None
        self.first: say.Lay | None = None  # of this host's first member

    def values(self) -> list[Expression]:
        lost = None if self.summed is None else self.summed.lost
        return [vector for vector in (*self.laid.values(), *self.parts.values(), lost) if vector is not None]

    def answer(self, member: int, lay: say.Lay) -> list[Expression]:
        vectors = []
        if lay.sums:
            weights = self._weights(member, lay)
            key = (*weights, lay.divisor)
            if key not in self.totals:
                divisor = lay.divisor or max(1, len(self.gave))
                terms = self._terms(weights)
                self.totals[key] = Sum(terms, divisor) if self.summed is None else self.summed.total(divisor)
            vectors.append(Expression([(self.totals[key], 1.0)]))
            if lay.keeps and self.summed is not None and self.summed.lost is not None:
                vectors.append(self.summed.lost.clone())
        read = [self.laid.get(member) for member in lay.reads]
        return [*vectors, *(vector.clone() for vector in read if vector is not None)]

    @property
    def gave(self) -> list[int]:
        """Who has brought something."""
        if self.summed is None:
            return [member for member, vector in self.laid.items() if vector is not None]
        return [member for some in self.summed.said for member, gives, _ in some if gives]

    def notes_for(self, lay: say.Lay) -> list[Any]:
        """What was said beside the vectors that are read, or that were coded and summed: by all, in their order."""
        if lay.reads or not lay.draws:
            return [self.notes[member] for member in lay.reads if member in self.notes]
        told = {} if self.summed is None else {member: note for some in self.summed.said for member, _, note in some}
        return [note for _, note in sorted({**self.notes, **told}.items())]

    def absent(self, lay: say.Lay) -> list[int]:
        """Whom it names, and who has brought nothing to this exchange, not even a note."""
        return [m for m in dict.fromkeys([*(m for m, _ in lay.sums), *lay.reads]) if m not in self.laid]

    def _weights(self, member: int, lay: say.Lay) -> list[tuple[int, float]]:
        """Along a row of a matrix one's own vector has the weight of those who are dead. A mean is one of fewer."""
        weights = {m: weight for m, weight in lay.sums if m in self.laid or len(self.parts) > 1}
        if len(weights) < len(lay.sums) and not lay.alike and lay.divisor == 1:
            weights[member] = weights.get(member, 0.0) + sum(weight for m, weight in lay.sums if m not in self.laid)
        return sorted(weights.items())

    def _terms(self, weights: list[tuple[int, float]]) -> list[Expression]:
        if len(self.parts) > 1:
            return [part for _, part in sorted(self.parts.items()) if part is not None]
        laid = [(self.laid[member], weight) for member, weight in weights]
        return [vector * weight for vector, weight in laid if vector is not None]


class ExchangeServer(BookedServer):
    """The exchanges of some workers, all of one kind of vector."""

    what = "exchanges"

    def __init__(self, key: str, plan: dict[str, Any], others: Counterparts, books: Books) -> None:
        super().__init__(key, plan, others, books)
        self._clients: dict[int, ClientRecord] = {}
        self._exchanges: dict[int, Exchange] = {}
        self._last: dict[int, int] = {}  # the exchange that a member has come to last
        self._numbers_are_pages = bool(plan["pages"])

    def values(self) -> list[Expression]:
        return [vector for one in self._exchanges.values() for vector in one.values()]

    def open(self, message: say.OpenChannel, send: Send) -> None:
        client = ClientRecord(self.key, message.worker, send, None)
        self._clients[message.worker] = self._books.clients[message.worker] = client
        self._books.grant(client)
        self._reply(client, "open")

    def bury(self, rank: int) -> None:
        super().bury(rank)
        if rank in self._clients:
            self._clients[rank].granted.clear()
        for number, exchange in list(self._exchanges.items()):
            exchange.wants.pop(rank, None)
            self._answer(number, exchange)

    def revive(self, rank: int, twin_of: int) -> None:
        super().revive(rank, twin_of)
        self._last.pop(rank, None)

    def _will_come(self, number: int, member: int) -> bool:
        """Whether it has still to come to this exchange. The dead never do, nor who has returned at a later page, nor
        who has gone past: it was there while others were dead.
        """
        if member in self._dead or self._last.get(member, -1) >= number:
            return False
        return not self._numbers_are_pages or number // PAGE >= self.pages.get(self.ranks[member], 0)

    def _reply(self, client: ClientRecord, how: str, about: object = None, vectors: Any = ()) -> None:
        self._books.reply(client, Reply(how, about, 0, [], [(vector, None) for vector in vectors]))

    def hear(self, worker: int, message: Any) -> None:
        client = self._clients[worker]
        match message:
            case say.Release():
                client.release(message.released)
            case say.Lay(number=number, slot=slot):
                client.release(message.released)
                exchange = self._exchanges.setdefault(number, Exchange())
                brought = None if slot < 0 else client.written(slot)
                client.own = None
                self._last[worker] = number
                if worker not in exchange.laid:  # else it had died after that, and others may have what it brought then
                    exchange.laid[worker], exchange.notes[worker] = brought, message.note
                exchange.wants[worker] = message
                if worker == self.others.here[0]:
                    exchange.first = message
                if self.others.others:
                    self._tell_hosts(worker, message, exchange)
                self._answer(number, exchange)
                if worker in exchange.wants and message.early:
                    self._reply(client, "granted")
                if message.early:
                    self._books.grant(client)
            case _:
                raise ValueError(f"an exchange does not know what to do with {message}")

    def hear_host(self, host: int, message: Any, value: Expression | None) -> None:
        match message:
            case say.Laid(number=number, worker=worker):
                exchange = self._exchanges.setdefault(number, Exchange())
                exchange.laid[worker], exchange.notes[worker] = value, message.note
                self._answer(number, exchange)
            case say.HostSum(number=number):
                exchange = self._exchanges.setdefault(number, Exchange())
                exchange.parts[host] = value
                self._answer(number, exchange)
            case _:
                super().hear_host(host, message, value)

    def _tell_hosts(self, worker: int, lay: say.Lay, exchange: Exchange) -> None:
        """What other hosts need of what has come just now."""
        value, home_of = exchange.laid[worker], self.others.home_of
        for host in sorted({home_of[member] for member in lay.sends} - {self.others.me}):
            self._pass_on(host, say.Laid(self.key, lay.number, worker, lay.note, value is not None), value)
        if lay.alike and all(member in exchange.laid for member in self.others.here):
            brought = [exchange.laid[member] for member in self.others.here]
            terms = [vector for vector in brought if vector is not None]
            part = self.as_one(terms) if terms else None
            if self.sums.takes(self.others.hosts):
                self._sum_in_phases(lay.number, exchange, part)
                return
            exchange.parts[self.others.me] = part
            for host in self.others.others:
                self._pass_on(host, say.HostSum(self.key, lay.number, part is not None), part)

    def _sum_in_phases(self, number: int, exchange: Exchange, part: Expression | None) -> None:
        first, laid = exchange.first, exchange.laid
        assert first is not None

        def answer(summed: Summed) -> None:
            exchange.summed = summed
            self._answer(number, exchange)

        said = [(member, laid[member] is not None, exchange.notes[member]) for member in self.others.here]
        given = GivenByHost(part, said, tuple(first.draws), anew=first.keeps)
        self.sums.begin((number,), range(len(self.others.hosts)), given, answer)

    def _pass_on(self, host: int, message: Any, value: Expression | None) -> None:
        if value is None:
            self.others.send(host, message)
        else:
            self.send(host, message, value.clone())

    def _can_answer(self, exchange: Exchange, lay: say.Lay) -> bool:
        if lay.alike and self.others.others:
            return exchange.summed is not None or len(exchange.parts) == len(self.others.hosts)
        return not any(self._will_come(lay.number, member) for member in exchange.absent(lay))

    def _answer(self, number: int, exchange: Exchange) -> None:
        for worker, lay in list(exchange.wants.items()):
            if self._can_answer(exchange, lay):
                del exchange.wants[worker]
                absent = [] if self.others.others else exchange.absent(lay)
                about = [number, exchange.notes_for(lay), absent]
                self._reply(self._clients[worker], "exchange", about, exchange.answer(worker, lay))
        all_have_come = not any(self._will_come(number, member) for member in self.others.here)
        if number in self._exchanges and all_have_come and not exchange.wants:
            self.rounds += 1
            del self._exchanges[number]  # what was answered stands on what it needs

    def places(self) -> dict[int, Whereabouts]:
        waits = {worker: set[int]() for worker in self._clients}
        for one in self._exchanges.values():
            for worker, lay in one.wants.items():
                waits[worker] |= set(one.absent(lay))
        return {worker: Whereabouts(-1, -1, tuple(sorted(whom))) for worker, whom in waits.items()}

    def flush(self) -> None:
        """Send what can be sent. With an answer comes a slot for the next exchange: what was laid down may be free."""
        for client in self._clients.values():
            if client.replies and client.replies[0].is_ready:
                self._books.grant(client)
        super().flush()
