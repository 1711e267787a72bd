"""Faults that were planted are found: each of them makes an order of events go wrong, and the checks see it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from offbeat.live.host import books, channel_server, ledger, process, weights_server
from offbeat.live.host import protocol as say
from offbeat.live.host.channel_server import ChannelServer
from offbeat.live.host.ledger import Expression, Sum
from offbeat.live.host.server import BookedServer, Counterparts, MeetingServer, Passage, Server, Unison
from offbeat.live.host.settling import Counts, Inquiry
from offbeat.live.worker.channel_client import ChannelClient
from offbeat.live.worker.slots import ThroughHost
from offbeat.rounds import waiting
from offbeat.rounds.rules import Rules
from offbeat.rounds.seat import Seat
from offbeat.topology import groups
from tests.support import at_host
from tests.support.at_host import (
    Case,
    Play,
    every_gradient_is_applied_once_by_all,
    heard_by_one,
    nothing_is_lost_from_the_sum,
    play,
    rounds_are_of_what_lay_in_the_trays,
    what_the_dead_had_submitted_counts_once,
)

STEPS = ("sssasss", "ssssss", "sss")
CASES = {
    "gradients": Case(Rules(waiting.first, "carry"), STEPS),
    "a death": Case(Rules(waiting.first, "last"), ("sssss", "ssss", "sss"), groups(3, 2), dies=0),
    "late gradients": Case(Rules(waiting.first, "carry", late=1), STEPS, is_long=True),
    "gradients of a late GPU": Case(Rules(waiting.first, "carry", late=1), STEPS, late_gpu=True),
    "gradients through stages": Case(Rules(waiting.first, "carry"), STEPS, late_gpu="stages"),
    "late gradients through stages": Case(Rules(waiting.first, "carry", late=1), STEPS, late_gpu="stages"),
    "weights through stages": Case(
        Rules(waiting.first, "shared", late=1, good_for=math.inf), ("s" * 14, "s" * 8, "s" * 5), late_gpu="stages"
    ),
    "last weights": Case(Rules(waiting.first, "last"), STEPS, groups(3, 2)),
    "shared weights": Case(Rules(waiting.first, "shared", late=1), STEPS, groups(3, 2)),
    "as they come": Case(Rules(waiting.first, "shared", good_for=math.inf, pool=2), STEPS),
    "pairs": Case(None, ("sssassa", "ssss", "ss")),
    "hosts": Case(Rules(waiting.first, "carry"), STEPS, homes=(0, 1, 0)),
    "weights of hosts": Case(Rules(waiting.first, "last"), STEPS, groups(3, 2), homes=(0, 1, 1)),
    "three hosts": Case(Rules(waiting.first, "carry"), STEPS, homes=(0, 1, 2)),
    "pairs of hosts": Case(None, ("sssassa", "ssss", "ss"), homes=(0, 1, 0)),
    "nodes of hosts": Case(
        Rules(waiting.first, "carry", late=1), STEPS, homes=(0, 1, 1, 0, 0, 2), of=2, loses=True, is_long=True
    ),
    "islands of hosts": Case(
        Rules(waiting.first, "shared", late=1), STEPS, groups(3, 2), homes=(0, 1, 1, 0, 0, 2), of=2, sharded=True
    ),
    "replicas": Case(Rules(waiting.first, "carry", spares=True), ("s" * 30, "s" * 30, "sss"), paces=(60, 40, 1)),
    "gradients of the dead": Case(Rules(waiting.first, "carry"), STEPS, dies=0, goes_on=True),
    "late gradients of the dead": Case(Rules(waiting.first, "carry", late=1), STEPS, dies=0, goes_on=True),
    "weights of the dead": Case(Rules(waiting.first, "last"), STEPS, groups(3, 2), dies=0, goes_on=True),
    "pairs with the dead": Case(None, STEPS, dies=0, goes_on=True),
    "the dead of a host": Case(Rules(waiting.first, "carry"), STEPS, homes=(0, 0, 1), dies=2, goes_on=True),
    "a lost host": Case(Rules(waiting.first, "carry"), ("ss", "ss", "ss"), homes=(0, 1, 2), lost_host=2),
    "all dead of the first host": Case(
        Rules(waiting.first, "last"), STEPS, groups(3, 2), homes=(0, 1, 1), dies=0, goes_on=True
    ),
}
SEEDS = range(40)

Plant = Callable[[pytest.MonkeyPatch], None]


def check(one: Play) -> None:
    rules = one.case.rules
    if any(worker.is_dead for worker in one.workers):
        if one.outlives and rules is not None:
            what_the_dead_had_submitted_counts_once(one)
        return
    if rules is not None and not rules.of_weights:
        every_gradient_is_applied_once_by_all(one)
    if rules is None or rules.absent == "shared":
        nothing_is_lost_from_the_sum(one)
    if rules is not None and rules.absent in ("carry", "last"):
        rounds_are_of_what_lay_in_the_trays(one)


def played(name: str, seed: int) -> Play:
    case = CASES[name]
    return play(case, seed) if case.lost_host is None else heard_by_one(case, seed)


def roots_without(*names: str) -> Plant:
    """What a worker may be reading, or is about to be given, but for these."""

    def roots(client: Any) -> Iterator[Expression]:
        for _, vectors in () if "answers" in names else client._unreleased:
            yield from vectors
        for reply in () if "replies" in names else client.replies:
            yield from (vector for vector, _ in reply.vectors)
        yield from (one for name in ("own", "put_by") if name not in names and (one := getattr(client, name)))

    return lambda patch: patch.setattr(books.ClientRecord, "roots", property(roots))


def what_is_read_beside_an_answer(patch: pytest.MonkeyPatch) -> None:
    """A seat knows it, too, until the next one comes."""
    values = Seat.values.fget  # type: ignore[attr-defined]
    patch.setattr(Seat, "values", property(lambda self: [one for one in values(self) if one is not self._newest]))
    roots_without("own")(patch)


def slots_that_are_free_though_granted(patch: pytest.MonkeyPatch) -> None:
    roots = books.Books._roots
    patch.setattr(books.Books, "_roots", lambda self: (roots(self)[0], [*self.aside]))


def slots_that_are_free_though_asked_for(patch: pytest.MonkeyPatch) -> None:
    def roots(self: books.Books) -> tuple[list[Expression], list[int]]:
        aside, self.aside = self.aside, set()
        found = whole(self)
        self.aside = aside
        return found

    whole = books.Books._roots
    patch.setattr(books.Books, "_roots", roots)


def terms_that_are_free(patch: pytest.MonkeyPatch) -> None:
    def unreached(self: Any) -> list[int]:
        expressions, slots = self._roots()
        reached = {*slots, *(place.slot for one in expressions for place, _ in one.refs)}
        return [slot for slot in self.all if slot not in reached]

    patch.setattr(ledger.Slots, "_unreached", unreached)


def a_release_too_far(patch: pytest.MonkeyPatch) -> None:
    release = books.ClientRecord.release
    patch.setattr(books.ClientRecord, "release", lambda self, upto: release(self, upto + 3))


def released_as_soon_as_heard(patch: pytest.MonkeyPatch) -> None:
    hear = ChannelClient._hear

    def hears(self: ChannelClient, answer: say.Answer) -> None:
        hear(self, answer)
        self._answered = answer.number

    patch.setattr(ChannelClient, "_hear", hears)


def messages_that_overtake(patch: pytest.MonkeyPatch) -> None:
    def send(self: Any, message: Any) -> None:
        self.up.appendleft(say.packed(message))

    patch.setattr(at_host.Line, "send", send)


def messages_that_pass_one_that_waits(patch: pytest.MonkeyPatch) -> None:
    def due(self: Any) -> Iterator[Any]:
        for message in [one for one in self._messages if self._is_due(one)]:
            self._messages.remove(message)
            yield message

    patch.setattr(process.Unheard, "due", due)


def a_total_that_is_divided_twice(patch: pytest.MonkeyPatch) -> None:
    make = Sum.__init__

    def init(self: Sum, terms: Any, divisor: int = 1) -> None:
        make(self, [term * (1.0 / divisor) for term in terms], divisor)

    patch.setattr(Sum, "__init__", init)


def an_order_that_is_lost(patch: pytest.MonkeyPatch) -> None:
    make, asked = at_host.Adders.make, [0]

    def makes(self: Any, total: Sum, memory: Any) -> None:
        asked[0] += 1
        if asked[0] % 5:
            make(self, total, memory)

    patch.setattr(at_host.Adders, "make", makes)


def a_message_that_is_lost(patch: pytest.MonkeyPatch) -> None:
    hear, heard = channel_server.ChannelServer.hear, [0]

    def hears(self: Any, worker: int, message: Any) -> None:
        heard[0] += isinstance(message, say.Submit)
        if not isinstance(message, say.Submit) or heard[0] % 7:
            hear(self, worker, message)

    patch.setattr(channel_server.ChannelServer, "hear", hears)


def a_sum_that_forgets(patch: pytest.MonkeyPatch) -> None:
    """Of two that stand on the same slot."""

    def add(self: Expression, other: Expression, alpha: float = 1.0) -> Expression:
        self.refs = tuple({**dict(self.refs), **dict((other * alpha).refs)}.items())
        return self

    patch.setattr(Expression, "add_", add)


def a_replica_that_stands_for_one_too_many(patch: pytest.MonkeyPatch) -> None:
    keep = channel_server.ChannelServer._keep
    patch.setattr(
        channel_server.ChannelServer,
        "_keep",
        lambda self, client, upto, vectors, said: keep(self, client, upto + 1, vectors, said),
    )


def a_meeting_that_changes_one_of_two(patch: pytest.MonkeyPatch) -> None:
    def meet(self: Any, me: Any, peer: Any) -> None:
        before = peer.y.refs
        whole(self, me, peer)
        if me is not peer:
            peer.y.refs = before

    whole = weights_server.WeightsServer._meet
    patch.setattr(weights_server.WeightsServer, "_meet", meet)


def what_another_host_says_is_lost(patch: pytest.MonkeyPatch) -> None:
    hear, heard = channel_server.ChannelServer.hear_host, [0]

    def hears(self: Any, host: int, message: Any, value: Any) -> None:
        heard[0] += isinstance(message, say.BlockPart)
        if not isinstance(message, say.BlockPart) or heard[0] % 5:
            hear(self, host, message, value)

    patch.setattr(channel_server.ChannelServer, "hear_host", hears)


def parts_that_belong_to_whatever_round(patch: pytest.MonkeyPatch) -> None:
    """By the order in which they come, and not by what they say."""
    hear = channel_server.ChannelServer._hear_part

    def hears(self: Any, name: tuple[int, int], host: int, part: Any) -> None:
        hear(self, next(iter(self._under_way), name), host, part)

    patch.setattr(channel_server.ChannelServer, "_hear_part", hears)


def a_room_that_is_free(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(channel_server.ChannelServer, "room", lambda self, message, nbytes: self._books.slots.take())


def a_host_that_adds_itself_alone(patch: pytest.MonkeyPatch) -> None:
    """It does not wait for the others' parts."""
    patch.setattr(channel_server.Block, "is_whole", property(lambda self: bool(self.parts)))


def without_parts(self: Any) -> list[Expression]:
    """What lies at a channel, but for what other hosts have sent."""
    return [value for seat in self._seats.values() for value in seat.values]


def vectors_that_are_overtaken(patch: pytest.MonkeyPatch) -> None:
    """What two hosts say of a worker is heard as it comes."""

    def come(self: Any, message: say.PassedOn, vector: Expression | None) -> Iterator[Any]:
        if vector is not None:
            self._vectors.append(vector)
        if message.said:
            vectors, self._vectors = self._vectors, []
            yield message, vectors

    patch.setattr(Passage, "come", come)


def what_was_passed_on_is_free(patch: pytest.MonkeyPatch) -> None:
    def pass_on(self: Any, rank: int, message: Any) -> None:
        whole(self, rank, message)
        self._books.clients[rank].put_by = None
        self._books.clients[rank].reads_nothing_own()

    whole = MeetingServer._pass_on
    patch.setattr(MeetingServer, "_pass_on", pass_on)


def heard_when_the_first_has_spoken(patch: pytest.MonkeyPatch) -> None:
    def speak(self: Any, worker: int, rank: int, message: Any) -> Any:
        return message if rank == self._speakers(worker)[0] else None

    patch.setattr(Unison, "say", speak)


def a_stage_that_is_given_back_before_it_is_read(patch: pytest.MonkeyPatch) -> None:
    def read(self: ThroughHost, refs: Any, plus: Any = None) -> Any:
        found = whole(self, refs, plus)
        lent, self._lent = self._lent, []
        self._give_back(lent)
        return found

    whole = ThroughHost.read
    patch.setattr(ThroughHost, "read", read)


def a_stage_that_is_kept_though_nobody_read_it(patch: pytest.MonkeyPatch) -> None:
    fetch = ThroughHost.fetch
    patch.setattr(ThroughHost, "fetch", lambda self, slots: fetch(self, slots) if slots else None)


def always(owner: Any, name: str, value: Any) -> Plant:
    return lambda patch: patch.setattr(owner, name, value, raising=False)


OVERWRITTEN, STUCK = "something else lies by now", "nobody can go on"
# What is planted, in which case, and by which words it is found.
whole_divisor, one_more_is_there = Seat.divisor, MeetingServer._one_more_is_there


def what_the_dead_had_submitted_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    bury = Seat.bury

    def buried(self: Seat) -> Any:
        self.tray.clear()
        return bury(self)

    patch.setattr(Seat, "bury", buried)


def parts_that_do_not_say_who_is_absent(patch: pytest.MonkeyPatch) -> None:
    send = Counterparts.send

    def sends(self: Counterparts, host: int, message: Any, value: Any = None) -> None:
        send(self, host, message._replace(absent=[]) if isinstance(message, say.BlockPart) else message, value)

    patch.setattr(Counterparts, "send", sends)


def other_hosts_that_hear_of_no_death(patch: pytest.MonkeyPatch) -> None:
    send = Counterparts.send

    def sends(self: Counterparts, host: int, message: Any, value: Any = None) -> None:
        if not isinstance(message, say.Buried):
            send(self, host, message, value)

    patch.setattr(Counterparts, "send", sends)


def parts_that_count_though_others_lack_them(patch: pytest.MonkeyPatch) -> None:
    decided = Inquiry.decided

    def decides(self: Inquiry) -> Counts:
        held = [(key, name) for said in self._said.values() for key, name, _ in said.held]
        return decided(self)._replace(held=held)

    patch.setattr(Inquiry, "decided", decides)


def parts_that_each_keeps_as_it_likes(patch: pytest.MonkeyPatch) -> None:
    settle = ChannelServer.settle

    def settles(self: ChannelServer, gone: Any, held: Any, used: Any) -> None:
        known = [*self._parts.items(), *((name, one.parts) for name, one in self._under_way.items())]
        settle(self, gone, {(host, *name) for name, parts in known for host in parts}, used)

    patch.setattr(ChannelServer, "settle", settles)


def parts_that_are_used_before_it_is_settled(patch: pytest.MonkeyPatch) -> None:
    asked_of = ChannelServer.asked_of

    def asks(self: ChannelServer, gone: Any) -> Any:
        found = asked_of(self, gone)
        self.asked.clear()
        return found

    patch.setattr(ChannelServer, "asked_of", asks)


FAULTS: dict[str, tuple[Plant, str, str]] = {
    "answers that are being read are no roots": (roots_without("answers"), "gradients", OVERWRITTEN),
    "answers that wait for sums are no roots": (roots_without("replies"), "gradients", "is told of what does not lie"),
    "what was submitted, and is read beside an answer, is no root": (
        what_is_read_beside_an_answer,
        "shared weights",
        OVERWRITTEN,
    ),
    "what was submitted, and its seat has not heard of, is no root": (roots_without("put_by"), "replicas", OVERWRITTEN),
    "slots that were granted are no roots": (slots_that_are_free_though_granted, "gradients", "given to two"),
    "slots for a replica are no roots": (slots_that_are_free_though_asked_for, "replicas", "given to two"),
    "sums in the making are no roots": (
        always(at_host.Adders, "roots", lambda self: []),
        "a death",
        "given to two|was taken while it was made",
    ),
    "memory goes back while sums are made": (
        always(at_host.Adders, "through_with", lambda *_: None),
        "a death",
        "memory goes back",
    ),
    "what lies at the seats is no root": (
        always(channel_server.ChannelServer, "values", lambda self: []),
        "gradients",
        OVERWRITTEN,
    ),
    "terms of a sum that is not made are no roots": (terms_that_are_free, "gradients", OVERWRITTEN),
    "an answer goes out before its sum is made": (
        always(books.Reply, "is_ready", True),
        "gradients",
        "is told of what does not lie",
    ),
    "a result is told twice": (
        always(Seat, "heard_of", property(lambda self: self.place.taken)),
        "late gradients",
        "IndexError|were applied",
    ),
    "a release is counted too far": (a_release_too_far, "late gradients", OVERWRITTEN),
    "a worker releases what it has only heard of": (released_as_soon_as_heard, "late gradients", OVERWRITTEN),
    "messages of a worker overtake each other": (messages_that_overtake, "gradients", STUCK),
    "messages pass one that waits for a GPU": (
        messages_that_pass_one_that_waits,
        "gradients of a late GPU",
        f"{STUCK}|IndexError|RecursionError",
    ),
    "messages are heard before a GPU has written": (
        always(process.Unheard, "_is_due", lambda self, message: True),
        "gradients of a late GPU",
        "heard before it has written",
    ),
    "what waits to go to another host is no root": (always(Counterparts, "roots", ()), "hosts", OVERWRITTEN),
    "what another host has sent is no root": (
        always(channel_server.ChannelServer, "values", without_parts),
        "hosts",
        OVERWRITTEN,
    ),
    "a slot for what comes from another host is free": (a_room_that_is_free, "hosts", OVERWRITTEN),
    "what another host says is lost": (what_another_host_says_is_lost, "hosts", STUCK),
    "what two hosts say of a worker is heard as it comes": (vectors_that_are_overtaken, "nodes of hosts", "zip"),
    "what has come for an answer is no root": (always(Passage, "values", ()), "nodes of hosts", "no longer|by now"),
    "what is on its way to ranks elsewhere is no root": (
        always(Counterparts, "roots", ()),
        "nodes of hosts",
        OVERWRITTEN,
    ),
    "what was passed on, and is read beside an answer, is no root": (
        what_was_passed_on_is_free,
        "islands of hosts",
        OVERWRITTEN,
    ),
    "a worker is heard when its first rank has spoken": (
        heard_when_the_first_has_spoken,
        "islands of hosts",
        "not granted|shard does not lie|hold nan",
    ),
    "a shard goes into whatever slot": (
        always(MeetingServer, "room", BookedServer.room),
        "islands of hosts",
        "shard does not lie|hold nan",
    ),
    "a seat's host leaves before ranks elsewhere": (
        always(MeetingServer, "is_through", BookedServer.is_through),
        "nodes of hosts",
        STUCK,
    ),
    "a part counts for whatever round": (parts_that_belong_to_whatever_round, "three hosts", STUCK),
    "a host does not wait for the others": (a_host_that_adds_itself_alone, "hosts", "KeyError|apply the same"),
    "what was released is read from its stage": (
        always(ThroughHost, "released", lambda self: None),
        "gradients through stages",
        "have applied the same|apply the same|were applied",
    ),
    "a stage is given back before it is read": (
        a_stage_that_is_given_back_before_it_is_read,
        "late gradients through stages",
        "have applied the same|apply the same|were applied",
    ),
    "a stage is kept though nobody has read it": (
        a_stage_that_is_kept_though_nobody_read_it,
        "weights through stages",
        "hold",
    ),
    "what the dead had submitted is forgotten": (
        what_the_dead_had_submitted_is_forgotten,
        "gradients of the dead",
        "came to|is in a round",
    ),
    "the dead answer for ever": (
        always(Seat, "is_dead", property(lambda s: False, lambda s, v: None)),
        "weights of the dead",
        "came to",
    ),
    "a mean is of the dead, too": (
        always(Seat, "divisor", lambda self, members, absent=(): whole_divisor(self, members)),
        "gradients of the dead",
        "came to",
    ),
    "nobody is told of a death": (
        always(channel_server.ChannelServer, "bury", BookedServer.bury),
        "gradients of the dead",
        f"{STUCK}|is not in list",
    ),
    "other hosts do not hear of a death": (other_hosts_that_hear_of_no_death, "the dead of a host", STUCK),
    "a part of a round does not say who is absent": (
        parts_that_do_not_say_who_is_absent,
        "the dead of a host",
        "came to",
    ),
    "a host process whose workers are dead leaves": (
        always(Server, "stays", property(lambda self: False)),
        "all dead of the first host",
        STUCK,
    ),
    "a host whose workers are all dead opens nothing": (
        always(at_host.Table, "_answer_for_the_dead", lambda self: None),
        "the dead of a host",
        STUCK,
    ),
    "nobody keeps what a round came to": (
        always(BookedServer, "is_whole_here", lambda *_: None),
        "a lost host",
        "came to",
    ),
    "what a round came to is not passed on": (always(ChannelServer, "pass_on", lambda *_: None), "a lost host", STUCK),
    "a lost host's part counts though others lack it": (
        parts_that_count_though_others_lack_them,
        "a lost host",
        f"{STUCK}|came to",
    ),
    "a lost host's part counts for whoever has it": (parts_that_each_keeps_as_it_likes, "a lost host", "came to"),
    "a lost host's part is used before it is settled what counts": (
        parts_that_are_used_before_it_is_settled,
        "a lost host",
        "came to",
    ),
    "a dead one is waited for before it has come": (
        always(
            MeetingServer,
            "_one_more_is_there",
            lambda self, worker: one_more_is_there(self, worker) if worker not in self._dead else None,
        ),
        "weights of the dead",
        STUCK,
    ),
    "the dead go on being told": (
        always(books.ClientRecord, "is_dead", property(lambda s: False, lambda s, v: None)),
        "late gradients of the dead",
        f"RecursionError|{STUCK}|memory has gone back|not written",
    ),
    "the dead have not retired": (
        always(weights_server.WeightsServer, "bury", BookedServer.bury),
        "pairs with the dead",
        f"{STUCK}|{OVERWRITTEN}",
    ),
    "a total is divided twice": (a_total_that_is_divided_twice, "last weights", "came to"),
    "an order to the adders is lost": (an_order_that_is_lost, "gradients", STUCK),
    "a message is lost": (a_message_that_is_lost, "gradients", STUCK),
    "a sum forgets one of two that stand on the same slot": (a_sum_that_forgets, "pairs", "hold"),
    "a replica stands for one result too many": (a_replica_that_stands_for_one_too_many, "replicas", "apply the same"),
    "a meeting changes one of two": (a_meeting_that_changes_one_of_two, "pairs", "hold"),
    "who stands is not waited for when all have retired": (
        always(weights_server.Sharer, "stands", property(lambda self: False, lambda self, stands: None)),
        "pairs",
        "IndexError",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_was_planted_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, case, words = FAULTS[name]
    plant(monkeypatch)
    for seed in SEEDS:
        try:
            check(played(case, seed))
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
            break
    else:
        found = "nothing"
    assert re.search(words, found)


@pytest.mark.parametrize("case", CASES)
def test_without_one_nothing_is_found(case: str) -> None:
    for seed in SEEDS[:8]:
        check(played(case, seed))
