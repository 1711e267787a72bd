"""Exchanges in step at the host process: everybody lays something down, and is answered when those have whom it needs.

An exchange of one member meets those of the others that have its number. A number says at which *page* of the run an
exchange is, and which of those there: so whoever has returned knows where the others are. A sum that several members
want is made once. Where the members are on several hosts and all want the same sum, each host adds up what its own have
brought, and the hosts sum their parts: two hosts send each other what they have; what is coded, or long and of more
hosts, goes in two phases (host_sums.py). What some members want as it is goes to their hosts.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import partial
from typing import Any, NamedTuple

from offbeat.live.host import protocol as say
from offbeat.live.host.books import Books, ClientRecord, Reply, Send
from offbeat.live.host.host_sums import GivenByHost, Summed
from offbeat.live.host.ledger import Expression, Sum
from offbeat.live.host.server import BookedServer, Counterparts, Whereabouts
from offbeat.live.host.settling import Name

PAGE = 1 << 32  # exchanges of a page, at most
WHOLE = -1  # in the name of a part, in place of a member: of all of a host, or what all came to


class Exchange:
    """One of them: what has been laid down, who wants what, and the sums that were wanted.

    ``is_alike``: all hosts give a part, since all want the same sum. ``parts``: what each host's members have brought
    together; None: nothing. ``summed``: what has come of all parts, where they were summed in two phases. ``missing``:
    the dead of all hosts that have no part in it. ``read``: whose vectors were in answers. ``lost``: what coding has
    lost in a sum that another host passes on.
    """

    def __init__(self) -> None:
        self.laid: dict[int, Expression | None] = {}
        self.notes: dict[int, Any] = {}
        self.wants: dict[int, say.Lay] = {}
        self.totals: dict[tuple[Any, ...], Sum] = {}
        self.is_alike = self.is_given = False
        self.parts: dict[int, Expression | None] = {}
        self.summed: Summed | None = None
        self.missing: set[int] = set()
        self.first: tuple[int, say.Lay] | None = None  # of those of this host that have come
        self.read: set[int] = set()
        self.lost: Expression | None = None

    def values(self) -> list[Expression]:
        lost = None if self.summed is None else self.summed.lost
        every = (*self.laid.values(), *self.parts.values(), lost, self.lost)
        return [vector for vector in every if vector is not None]

    def answer(self, member: int, lay: say.Lay) -> list[Expression]:
        vectors = []
        self.read.update(m for m in (*(m for m, _ in lay.sums), *lay.reads) if m in self.laid)
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
        return [member for some, _ in self.summed.said for member, gives, _ in some if gives]

    def notes_for(self, lay: say.Lay) -> list[Any]:
        """What was said beside the vectors that are read, or that were coded and summed: by all, in their order."""
        if lay.reads or not lay.draws:
            return [self.notes[member] for member in lay.reads if member in self.notes]
        said = [] if self.summed is None else [one for some, _ in self.summed.said for one in some]
        told = {member: note for member, _, note in said}
        return [note for _, note in sorted({**self.notes, **told}.items())]

    def lacks(self, lay: say.Lay) -> list[int]:
        """Whom it names, and who has brought nothing here, not even a note."""
        named = dict.fromkeys([*(m for m, _ in lay.sums), *lay.reads])
        return [m for m in named if m not in self.laid and m not in self.missing]

    def absent(self, lay: say.Lay) -> list[int]:
        """Of those the dead, when all others have."""
        in_parts = self.summed is not None or len(self.parts) > 1
        return sorted(self.missing) if in_parts else self.lacks(lay)

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


class Known(NamedTuple):
    """What has come of an exchange: vectors of other hosts' members that were read, and what all came to."""

    laid: dict[int, tuple[Expression | None, Any]]
    total: Expression | None
    said: list[Any]
    missing: list[int]

    def values(self) -> list[Expression]:
        return [one for one in (self.total, *(vector for vector, _ in self.laid.values())) if one is not None]


class ExchangeServer(BookedServer):
    """The exchanges of some workers, all of one kind of vector."""

    what = "exchanges"

    def __init__(self, key: str, plan: dict[str, Any], others: Counterparts, books: Books) -> None:
        super().__init__(key, plan, others, books)
        self._clients: dict[int, ClientRecord] = {}
        self._exchanges: dict[int, Exchange] = {}
        self._last: dict[int, int] = {}  # the exchange that a member has come to last
        self._last_of_dead: dict[int, int] = {}  # of other hosts
        self._awaited: set[Name] = set()  # what others pass on: a number, and a member or WHOLE
        self._totals: dict[Name, tuple[say.ExchangeTotal, Expression]] = {}  # passed on before it is settled here
        self._numbers_are_pages = bool(plan["pages"])
        self.sums.on_wanted = self._is_wanted

    def values(self) -> list[Expression]:
        known = [vector for one in self._exchanges.values() for vector in one.values()]
        kept = [vector for one in self._kept.values() for vector in one.what.values()]
        return [*known, *kept, *(total for _, total in self._totals.values())]

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
            self._give_part(number, exchange)
            self._answer(number, exchange)

    def bury_elsewhere(self, buried: say.Buried) -> None:
        self._last_of_dead[buried.worker] = buried.last
        super().bury_elsewhere(buried)

    def last_of(self, rank: int) -> int:
        return self._last.get(rank, -1)

    def revive(self, rank: int, twin_of: int) -> None:
        super().revive(rank, twin_of)
        self._last.pop(rank, None)

    def _will_come(self, number: int, member: int) -> bool:
        """Whether it has still to come to this exchange. The dead never do, nor who has returned at a later page, nor
        who has gone past: it was there while others were dead. What one of another host has brought before it died may
        be on its way.
        """
        if self.others.home_of[member] in self.gone:
            return (number, member) in self._awaited
        if member in self._last_of_dead:
            return number <= self._last_of_dead[member]
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
                if self.others.others:
                    exchange.is_alike = exchange.is_alike or message.alike
                    if exchange.first is None or worker < exchange.first[0]:
                        exchange.first = worker, message
                    self._tell_hosts(worker, message, exchange)
                    self._give_part(number, exchange)
                self._answer(number, exchange)
                if worker in exchange.wants and message.early:
                    self._reply(client, "granted")
                if message.early:
                    self._books.grant(client)
            case _:
                raise ValueError(f"an exchange does not know what to do with {message}")

    def hear_host(self, host: int, message: Any, value: Expression | None) -> None:
        match message:
            case say.ExchangeTotal(number=number):
                assert value is not None
                self._totals[number, WHOLE] = message, value
                self._take_totals()
            case say.Laid(number=number, worker=worker):
                self._awaited.discard((number, worker))
                if number not in self._exchanges and not self._anybody_comes(number):
                    return  # passed on, and not needed
                exchange = self._exchanges.setdefault(number, Exchange())
                exchange.laid[worker], exchange.notes[worker] = value, message.note
                self._answer(number, exchange)
            case say.HostSum(number=number, absent=absent):
                exchange = self._exchanges.setdefault(number, Exchange())
                exchange.parts[host], exchange.is_alike = value, True
                exchange.missing.update(absent)
                self._give_part(number, exchange)
                self._answer(number, exchange)
            case _:
                super().hear_host(host, message, value)

    def _tell_hosts(self, worker: int, lay: say.Lay, exchange: Exchange) -> None:
        """What other hosts need of what has come just now."""
        value, home_of = exchange.laid[worker], self.others.home_of
        for host in sorted({home_of[member] for member in lay.sends} - {self.others.me}):
            self._pass_on(host, say.Laid(self.key, lay.number, worker, lay.note, value is not None), value)

    def _anybody_comes(self, number: int) -> bool:
        return any(self._will_come(number, member) for member in self.others.here)

    def _give_part(self, number: int, exchange: Exchange) -> None:
        """What the members here have brought together, to all hosts, when no more come."""
        here = [member for member in self.others.here if member not in exchange.laid]
        if not exchange.is_alike or exchange.is_given or any(self._will_come(number, member) for member in here):
            return
        exchange.is_given = True
        terms = [vector for _, vector in sorted(exchange.laid.items()) if vector is not None]
        part, hosts = self.as_one(terms) if terms else None, self.left(range(len(self.others.hosts)))
        for host in self.gone:
            self._gives_nothing(exchange, host)
        if self.sums.takes(hosts):
            self._sum_in_phases(number, exchange, part, here, hosts)
            return
        exchange.parts[self.others.me] = part
        exchange.missing.update(here)
        if len(hosts) == 1 and self.sums.codec is not None:  # nobody else is left: nothing is coded, and nothing lost
            said = [self._said(exchange, here)]
            terms = [] if part is None else [part]
            nothing = Expression([(Sum(()), 1.0)])
            exchange.summed = Summed(said, lambda divisor: Sum(terms, divisor), nothing)
        for host in hosts:
            if host != self.others.me:
                self._pass_on(host, say.HostSum(self.key, number, here, part is not None), part)

    def _gives_nothing(self, exchange: Exchange, host: int) -> None:
        """A lost host, to an exchange of which nobody has heard its part, or not all have."""
        if host not in exchange.parts:
            exchange.parts[host] = None
            exchange.missing.update(m for m, home in enumerate(self.others.home_of) if home == host)

    def _said(self, exchange: Exchange, missing: list[int]) -> list[Any]:
        """What the members here say beside a sum."""
        laid = exchange.laid
        return [[(member, laid[member] is not None, exchange.notes[member]) for member in sorted(laid)], missing]

    def _sum_in_phases(
        self, number: int, exchange: Exchange, part: Expression | None, missing: list[int], hosts: list[int]
    ) -> None:
        first = exchange.first

        def answer(summed: Summed) -> None:
            exchange.summed = summed
            exchange.missing.update(member for _, absent in summed.said for member in absent)
            self._answer(number, exchange)

        said = self._said(exchange, missing)
        draws, keeps = ((), False) if first is None else (tuple(first[1].draws), first[1].keeps)
        given = GivenByHost(part, said, draws, anew=keeps)
        self.sums.begin((number,), hosts, given, answer)

    def _is_wanted(self, name: tuple[int, ...]) -> None:
        """Another host has given its part of a sum."""
        (number,) = name
        exchange = self._exchanges.setdefault(number, Exchange())
        exchange.is_alike = True
        self._give_part(number, exchange)

    def _pass_on(self, host: int, message: Any, value: Expression | None) -> None:
        if value is None:
            self.others.send(host, message)
        else:
            self.send(host, message, value.clone())

    def _can_answer(self, exchange: Exchange, lay: say.Lay) -> bool:
        if lay.alike and self.others.others:
            return self._is_whole(lay.number, exchange)
        named = [*(member for member, _ in lay.sums), *lay.reads] if self.asked else ()
        if any(self.others.home_of[member] in self.asked for member in named):
            return False
        return not any(self._will_come(lay.number, member) for member in exchange.lacks(lay))

    def _is_whole(self, number: int, exchange: Exchange) -> bool:
        """Whether all hosts have given their parts, where they do."""
        if exchange.is_alike and (self.asked or (number, WHOLE) in self._awaited):
            return False
        return not exchange.is_alike or exchange.summed is not None or len(exchange.parts) == len(self.others.hosts)

    def _answer(self, number: int, exchange: Exchange) -> None:
        for worker, lay in list(exchange.wants.items()):
            if self._can_answer(exchange, lay):
                del exchange.wants[worker]
                about = [number, exchange.notes_for(lay), exchange.absent(lay)]
                self._reply(self._clients[worker], "exchange", about, exchange.answer(worker, lay))
        all_have_come = not self._anybody_comes(number)
        if number in self._exchanges and all_have_come and not exchange.wants and self._is_whole(number, exchange):
            self.rounds += 1
            del self._exchanges[number]  # what was answered stands on what it needs
            self.is_whole_here((number,), range(len(self.others.hosts)), self._known(exchange))

    # A host is lost, and the run goes on.

    def _known(self, exchange: Exchange) -> Known:
        laid = {m: (exchange.laid[m], exchange.notes[m]) for m in exchange.read if not self.others.is_here(m)}
        total = next((Expression([(total, 1.0)]) for total in exchange.totals.values()), None)
        said = [] if exchange.summed is None else exchange.summed.said
        return Known(laid, total if exchange.is_alike else None, said, sorted(exchange.missing))

    def asked_of(self, gone: Set[int]) -> tuple[list[Name], list[Name]]:
        self.asked.update(gone - self.gone)
        held, used = list[Name](), list[Name]()
        for number, exchange in self._exchanges.items():
            held += [(host, number, WHOLE) for host in exchange.parts if host in gone]
            held += [(self.others.home_of[m], number, m) for m in exchange.laid if self.others.home_of[m] in gone]
        known = {number: self._known(exchange) for number, exchange in self._exchanges.items()}
        for number, one in (known | {number: kept.what for (number, *_), kept in self._kept.items()}).items():
            used += [(number, member) for member in one.laid if self.others.home_of[member] in gone]
            used += [(number, WHOLE)] if one.total is not None else []
        return held, used

    def settle(self, gone: Set[int], held: Set[Name], used: Mapping[Name, bool]) -> None:
        """A vector that somebody has read is passed on, and so is what an exchange has come to somewhere."""
        super().settle(gone, held, used)
        given = dict[Name, GivenByHost]()
        for host in gone:
            given |= self.sums.lost(host, {(number,) for number, member in used if member == WHOLE})
        self._awaited = {name for name in used if self._lacks(*name)}
        for number, exchange in self._exchanges.items():
            for m in [m for m in exchange.laid if self.others.home_of[m] in gone]:
                if (self.others.home_of[m], number, m) not in held and (number, m) not in used:
                    del exchange.laid[m], exchange.notes[m]
            if (number,) in given and (number, WHOLE) in self._awaited:
                exchange.lost = given[number,].lost
            elif (number,) in given:
                exchange.is_given = False  # and gives anew
            for host in () if exchange.totals or (number, WHOLE) in self._awaited else gone:
                if (host, number, WHOLE) not in held:
                    exchange.parts.pop(host, None)
                if exchange.is_given:
                    self._gives_nothing(exchange, host)
        self._take_totals()
        for number, exchange in list(self._exchanges.items()):
            self._give_part(number, exchange)
            self._answer(number, exchange)

    def _lacks(self, number: int, member: int) -> bool:
        """Whether this host waits for it to be passed on."""
        exchange = self._exchanges.get(number)
        if member == WHOLE:
            return exchange is not None and not exchange.totals
        return self._anybody_comes(number) if exchange is None else member not in exchange.laid

    def known_of(self, name: Name) -> Any:
        exchange = self._exchanges.get(name[0])
        return super().known_of(name[:1]) if exchange is None else self._known(exchange)

    def pass_on(self, name: Name, what: Any) -> None:
        number, member = name
        for host in self.left(self.others.others):
            if member == WHOLE:
                self.send(host, say.ExchangeTotal(self.key, number, what.said, what.missing, True), what.total)
            else:
                vector, note = what.laid[member]
                self._pass_on(host, say.Laid(self.key, number, member, note, vector is not None), vector)

    def _take_totals(self) -> None:
        for name in self._awaited.intersection(self._totals):
            message, total = self._totals.pop(name)
            self._awaited.discard(name)
            exchange = self._exchanges[message.number]
            exchange.parts, exchange.missing = {self.others.me: total}, set(message.absent)
            exchange.summed = Summed(message.said, partial(_as_it_is, total), exchange.lost)
            self._answer(message.number, exchange)
        if not self.asked:
            self._totals.clear()

    def places(self) -> dict[int, Whereabouts]:
        waits = {worker: set[int]() for worker in self._clients}
        for one in self._exchanges.values():
            for worker, lay in one.wants.items():
                waits[worker] |= set(one.lacks(lay))
        return {worker: Whereabouts(-1, -1, tuple(sorted(whom))) for worker, whom in waits.items()}

    def flush(self) -> None:
        """Send what can be sent. With an answer comes a slot for the next exchange: what was laid down may be free."""
        for client in self._clients.values():
            if client.replies and client.replies[0].is_ready:
                self._books.grant(client)
        super().flush()


def _as_it_is(total: Expression, divisor: int) -> Sum:
    """What has been divided already."""
    return Sum([total])
