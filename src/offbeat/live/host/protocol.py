"""Everything that a worker and its host process, and host processes of several hosts, say to each other.

A message is a tuple of plain values. On the line it is its length, its kind and the values as JSON: nothing of a
stranger's is ever run, and a message that is too long, or does not have the values of its kind, ends the connection it
came by and no other. Lengths are looked at before memory is taken.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

HEAD = struct.Struct("<IB")
LONGEST = 1 << 26  # bytes of a message
LONGEST_HELLO = 1 << 10  # until its sender has shown the job's token

Ref = tuple[int, float]  # a slot, and what it counts


# From a worker.


ATTACHED = "attached"  # before a worker's number: a fact that it posts when it has


class Hello(NamedTuple):
    """The first message."""

    token: str
    rank: int


class OpenChannel(NamedTuple):
    """A rank comes to a channel, or to shared weights. What all of them must agree on is in ``plan``.

    ``worker``: its number there. Where several ranks are one worker, they have numbers one after the other, and what
    they say after this is heard when all of them have said it.
    """

    key: str
    worker: int
    plan: dict[str, Any]
    first_step: int
    logs: bool
    spares: bool
    word: int  # of its page, that streams of its GPU write


class FirstDeposit(NamedTuple):
    """What answers for the worker until its first step lies in ``slot``; −1: nothing does."""

    key: str
    slot: int


class Submit(NamedTuple):
    """The work of a step lies in ``slot``.

    ``taken``: how many of the results that the worker was told of it has taken before, and goes on with; −1: it waits
    for this round. ``released``: of the answers up to this one nothing is read any more. ``due``: all of this is so
    when the worker's word has come to that number.
    """

    key: str
    slot: int
    step: int
    taken: int
    released: int
    due: int


class Release(NamedTuple):
    """Of the answers up to this one nothing is read any more."""

    key: str
    released: int
    due: int


class Renew(NamedTuple):
    """Without a step to take, what lies in ``slot`` answers for the worker from now on."""

    key: str
    slot: int
    due: int


class NextResult(NamedTuple):
    """The next result, for a worker without a step to take."""

    key: str
    released: int
    due: int


class Nothing(NamedTuple):
    """The worker waits for results no longer: one of its ranks says so for all."""

    key: str


class NoMore(NamedTuple):
    """The worker, which looks ahead, wants to hear of no more results."""

    key: str


class IsThrough(NamedTuple):
    """Would a deposit now wait for nothing? Asked where the ranks of a worker are to hear the same."""

    key: str


class Newest(NamedTuple):
    """What there is beyond what the worker was told of."""

    key: str


class Finished(NamedTuple):
    """The worker has no data left."""

    key: str


class Stands(NamedTuple):
    """The worker takes no step until it is back."""

    key: str


class Back(NamedTuple):
    """All stand; the worker will take steps again."""

    key: str


class CatchUp(NamedTuple):
    """All results of the rounds that have started: so many."""

    key: str
    results: int
    released: int
    due: int


class KeepLost(NamedTuple):
    """What coding has lost for the worker before, in ``slot``: the host process keeps it from now on."""

    key: str
    slot: int
    due: int


class Lost(NamedTuple):
    """What has coding lost for the worker?"""

    key: str


class Owed(NamedTuple):
    """What lies in the worker's tray, or what its shared weights are."""

    key: str


class Spare(NamedTuple):
    """The worker's replica after ``upto`` results lies in the first ``vectors`` of the slots it was given for that."""

    key: str
    upto: int
    vectors: int
    said: Any
    due: int


class RoundsAhead(NamedTuple):
    """Who averages with whom, from round ``first`` on: of each round the block of each worker."""

    key: str
    first: int
    rounds: list[list[list[int] | None]]


class MeetPeer(NamedTuple):
    """The worker's shared weights and those of ``peer`` become the mean of the two."""

    key: str
    peer: int


class AddStep(NamedTuple):
    """The step in ``slot`` is added to the worker's shared weights."""

    key: str
    slot: int
    released: int
    due: int


class Shift(NamedTuple):
    """The difference in ``slot`` is."""

    key: str
    slot: int
    due: int


class Lay(NamedTuple):
    """A worker's part in exchange ``number`` of those who exchange here.

    ``slot``: what it brings; −1: nothing. ``note``: what it says beside. ``sums``: whose vectors it wants the sum of,
    each with its weight, divided by ``divisor`` (0: by how many bring something); ``reads``: whose it wants as they
    are. ``early``: it wants another slot before the answer. ``sends``: who wants what it brings as it is; ``alike``:
    all members want the same sum. ``draws`` key those of coding, where it speaks for its host; ``keeps``: then it wants
    to have what coding has lost.
    """

    key: str
    number: int
    slot: int
    note: Any
    sums: list[tuple[int, float]]
    divisor: int
    reads: list[int]
    sends: list[int]
    alike: bool
    draws: list[int]
    keeps: bool
    early: bool
    released: int
    due: int


class Post(NamedTuple):
    """A fact that all workers of a run are to know."""

    key: str
    name: str
    value: str


class Fail(NamedTuple):
    """The worker's last words to the others."""

    key: str
    words: str


class Bye(NamedTuple):
    """The worker will leave, and is not to be missed."""

    key: str


class Leave(NamedTuple):
    """The worker leaves, and the others go on without it. ``how``, as they are told: "has left"."""

    key: str
    how: str


class Returns(NamedTuple):
    """The worker comes in place of one that has died, and wants a member's replica."""

    key: str


class CanHand(NamedTuple):
    """The worker is between two steps, and could lay its replica down, which takes up to so many bytes."""

    key: str
    nbytes: int


class Handed(NamedTuple):
    """It lies where it was to lie, ``nbytes`` of it; 0: it could not be laid down, and ``why``.

    All that the worker has said before is in it, and nothing that it says from now on. ``page``: of its exchanges in
    step, where it goes on.
    """

    key: str
    nbytes: int
    page: int
    why: str


class HasTaken(NamedTuple):
    """The worker goes on as the one that has laid its replica down."""

    key: str


class CanSave(NamedTuple):
    """The worker is between two steps, and could lay its model down for checkpoint ``number`` of this run; what else a
    checkpoint has takes up to ``state_bytes``.
    """

    key: str
    number: int
    model_bytes: int
    state_bytes: int


class HasSaved(NamedTuple):
    """They lie there, the state in so many bytes. ``why``: they do not."""

    key: str
    number: int
    state_bytes: int
    step: int
    why: str


class Ask(NamedTuple):
    """What is everybody doing?"""

    key: str
    number: int


class Ring(NamedTuple):
    """The worker is through its batch of round ``r``; the bell rings when ``workers`` are."""

    key: str
    r: int
    workers: int


class BeginEpoch(NamedTuple):
    """The worker comes to an epoch of so many batches. What all must agree on is in ``about``. Questions are numbered,
    and so are their answers.
    """

    key: str
    number: int
    epoch: int
    batches: int
    about: str


class BeginBatch(NamedTuple):
    """Of its home, the worker begins this place, and some behind it. ``batch_us``: how long one takes it."""

    key: str
    number: int
    epoch: int
    place: int
    batch_us: int


class TakeBatches(NamedTuple):
    """What others have, or have given back: the worker has no more, but ``backlog`` that are loaded. ``waits``: it is
    answered when there is something, or when there will be nothing.
    """

    key: str
    number: int
    epoch: int
    batch_us: int
    backlog: int
    waits: bool


class StopWaiting(NamedTuple):
    """Whatever there is by now: the worker has something else to do."""

    key: str


class Stepped(NamedTuple):
    """So many steps more, with the batches at these places of an epoch; with those that are ``skipped`` none is taken.

    ``hands_over``: all steps that the worker has told of are in what it hands in next, and count when that is heard.
    """

    key: str
    epoch: int
    places: list[int]
    skipped: list[int]
    steps: int
    hands_over: bool


class HandedIn(NamedTuple):
    """All steps that the worker has told of count, though it hands in nothing."""

    key: str


class CloseEpoch(NamedTuple):
    """The worker asks for no more of this epoch, and uses none of what it holds; −1: of any."""

    key: str
    epoch: int


class HowFar(NamedTuple):
    """How many batches of this epoch are used, and how many steps were taken? Of −1: what has become of all epochs?"""

    key: str
    number: int
    epoch: int


class Close(NamedTuple):
    """The worker leaves a channel, or shared weights."""

    key: str


# From somebody who only looks: the first message, and the only one.


class Look(NamedTuple):
    """What is known of the job? ``token``: that of viewers, which opens nothing else."""

    token: str


# From the host process.


class Seen(NamedTuple):
    """The answer to who looks: `offbeat.live.host.status.JobStatus`, as plain values."""

    status: dict[str, Any]


class Welcome(NamedTuple):
    """The arena's descriptor comes with it. ``page``: where in the arena the worker's page begins."""

    arena_bytes: int
    page: int
    pid: int


class Answer(NamedTuple):
    """What a worker hears at a channel.

    ``number`` counts the answers. ``results``: how many rounds are over. ``given``: vectors, each as the slots that are
    to be added up and what is said of it. ``grants``: slots that the worker may write to. ``handles``: of slots on a
    GPU that it has not heard of, what they are opened by.
    """

    key: str
    number: int
    how: str
    about: Any
    results: int
    lost: list[int]
    given: list[tuple[list[Ref], Any]]
    grants: list[int]
    handles: dict[str, str]
    news: list[Any]
    events: list[tuple[str, int]]


class Fact(NamedTuple):
    """Another worker has posted it."""

    key: str
    name: str
    value: str


class Failed(NamedTuple):
    """Another worker's last words."""

    key: str
    worker: int
    words: str


class Gone(NamedTuple):
    """Another worker has left before the end, as it ``said``, or without a word. ``ended``: its process has.

    ``goes_on``: the run does, without it; else ``why`` may say why not.
    """

    key: str
    worker: int
    ended: bool
    goes_on: bool
    why: str
    said: str


class HostGone(NamedTuple):
    """A host is lost, with these workers. ``goes_on``: the run does, without them; else ``words`` say what has happened
    to it, and what follows.
    """

    key: str
    workers: list[int]
    goes_on: bool
    words: str


class Wanted(NamedTuple):
    """So many have returned, and want a member's replica."""

    key: str
    many: int


class HandHere(NamedTuple):
    """The answer to CanHand: where in the arena the replica is to lie; −1: nowhere now."""

    key: str
    at: int


class SaveHere(NamedTuple):
    """The answer to CanSave: where in the arena the model is to lie, and behind it the state if ``whole``; −1: nowhere
    now. To a worker that comes: where the number of the checkpoint lies that is due.
    """

    key: str
    at: int
    whole: bool


class TakeHere(NamedTuple):
    """What the worker has asked for as it returned lies there."""

    key: str
    at: int
    nbytes: int


class Returned(NamedTuple):
    """A worker that had died is a member again: what ``twin_of`` had said by now, it has said, too."""

    key: str
    worker: int
    twin_of: int


class NoReturn(NamedTuple):
    """It cannot be one, and ``why``."""

    key: str
    why: str


class Doing(NamedTuple):
    """What each worker is doing; of whom nothing is said, its process is stopped."""

    key: str
    number: int
    said: list[tuple[int, str]]


class BatchesDealt(NamedTuple):
    """The answer to a question about batches: `offbeat.rounds.leases.Dealt`. ``other``: what another worker has said
    that all must agree on, where this one said something else.
    """

    key: str
    number: int
    front: int
    back: int
    taken: list[int]
    is_over: bool
    used: int
    has_last: bool
    steps: int
    other: str


class Accounts(NamedTuple):
    """What has become of all epochs: of each `offbeat.rounds.leases.Account`. ``steps``: of all workers."""

    key: str
    number: int
    epochs: list[tuple[int, list[tuple[int, int]], list[tuple[int, int]]]]
    steps: int


class Refused(NamedTuple):
    """The host process cannot do what was asked; ``words`` say why."""

    key: str
    words: str


# From a worker whose run has workers at other hosts.


class Listen(NamedTuple):
    """Be there for other hosts: under which name, with the job's secret, at which address, and port (0: any)."""

    key: str
    name: str
    secret: str
    address: str
    port: int


class OtherHosts(NamedTuple):
    """Where the host processes of the other hosts listen: name, address, port."""

    key: str
    hosts: list[tuple[str, str, int]]


class Listening(NamedTuple):
    """The host process's answer: as whom the other hosts' know it, and where."""

    key: str
    name: str
    address: str
    port: int


# Between host processes: what the servers of one key say to each other.


class Opened(NamedTuple):
    """This host's workers have come. ``plan``: what a host whose workers are all dead needs to answer for them; empty
    where the run does not go on without the dead.
    """

    key: str
    plan: dict[str, Any]


class Shut(NamedTuple):
    """They have left."""

    key: str


class Buried(NamedTuple):
    """A worker of this host is dead; what it has said before counts. Of its exchanges in step ``last`` was the last."""

    key: str
    worker: int
    last: int


class HostLost(NamedTuple):
    """To the first host: another one cannot be reached from here."""

    key: str
    host: str
    words: str


class WhatOf(NamedTuple):
    """From the first host: these are ``gone``. Hear no more of them; what do you hold of theirs, and what is used?"""

    key: str
    number: int
    gone: list[str]


class HeldOf(NamedTuple):
    """The answer: `offbeat.live.host.settling.Held`."""

    key: str
    number: int
    held: list[tuple[str, list[int], int]]
    used: list[tuple[str, list[int]]]


class Settled(NamedTuple):
    """From the first host: these are ``gone``, and of theirs this counts: `offbeat.live.host.settling.Counts`.

    ``why`` the run does not go on without them; empty: it does.
    """

    key: str
    gone: list[str]
    words: str
    why: str
    held: list[tuple[str, list[int]]]
    used: list[tuple[str, list[int], str]]


class ToldToAll(NamedTuple):
    """What a worker has posted (``what`` is "fact"), its last words ("failed"), its farewell ("bye"), its end ("gone"),
    or that it leaves ("left").

    A fact goes to the first host, and from there to all; so does an end where the run may go on, which the first host
    decides (``name`` says what follows). The rest goes to all at once.
    """

    key: str
    worker: int
    what: str
    name: str
    value: str


class AskHost(NamedTuple):
    """What are your workers doing? ``worker`` asks."""

    key: str
    worker: int
    number: int


class HostSays(NamedTuple):
    """The answer."""

    key: str
    worker: int
    number: int
    said: list[tuple[int, str]]


class LookHost(NamedTuple):
    """What is known of your workers? Somebody looks here."""

    key: str


class HostSeen(NamedTuple):
    """The answer, as in ``Seen``."""

    key: str
    status: dict[str, Any]


class OfLeases(NamedTuple):
    """What a worker says about batches, on its way to the first host, or what it is answered there; see ``wrapped``.

    Empty: what it has handed over has been handed in.
    """

    key: str
    worker: int
    said: list[Any]


class Rung(NamedTuple):
    """The bell of round ``r`` has rung."""

    key: str
    r: int


class There(NamedTuple):
    """A worker has come to a channel; −1: all have."""

    key: str
    worker: int


class Noticed(NamedTuple):
    """A seat's notice to the referee: `offbeat.rounds.referee.Notice`, by the name of what it says."""

    key: str
    worker: int
    what: str
    position: int
    base: int
    next_base: int


class Go(NamedTuple):
    """Round ``version`` has started. ``members``: who takes part, where the referee names them."""

    key: str
    version: int
    started_by: int
    members: list[int] | None
    flush: bool


class BlockPart(NamedTuple):
    """What a host's workers give to their block of a round, added up; ``block`` is its first worker.

    ``shares``: whose work is in it, how old it is, and whether it was in time. ``absent``: the dead among them, who
    give nothing. ``gives``: whether a vector comes along.
    """

    key: str
    version: int
    block: int
    shares: list[tuple[int, int, bool]]
    absent: list[int]
    gives: bool


class AllThere(NamedTuple):
    """All parts of a round's block, or of an exchange, have come to this host: it needs nobody to pass them on."""

    key: str
    sum: list[int]


class BlockTotal(NamedTuple):
    """What a block of a round came to, where a host of it is lost that had brought its part; as in ``BlockPart``."""

    key: str
    version: int
    block: int
    shares: list[tuple[int, int, bool]]
    absent: list[int]
    gives: bool


class ExchangeTotal(NamedTuple):
    """The same of an exchange whose members all want one sum. ``said``: what hosts have said beside it."""

    key: str
    number: int
    said: list[Any]
    absent: list[int]
    gives: bool


class Stretch(NamedTuple):
    """Of a sum of ``hosts`` in two phases (host_sums.py): this host's share of the stretch that you own, or the sum of
    the stretch that this host owns.

    ``sum``: which it is: a round and the first worker of its block, or an exchange. ``said``: what this host's members
    say beside. ``gives``: whether they give anything; it comes along, if your stretch has a length.
    """

    key: str
    sum: list[int]
    hosts: list[int]
    phase: int
    said: Any
    gives: bool


class PassedOn(NamedTuple):
    """Between the host of a worker's first rank, which has its seat, and another host of its ranks.

    ``rank``: the first of them there, which stands for all of them, or one that speaks for itself. ``number`` counts
    what is said of this worker between the two hosts, each way. ``said``: a message, see ``wrapped``; empty: a vector
    comes along for the next message. ``slot``: where at the seat's host it belongs; −1: in any.
    """

    key: str
    rank: int
    number: int
    slot: int
    said: list[Any]
    gives: bool


class StartedWith(NamedTuple):
    """So many rounds have started that a worker has a part in, which is back."""

    key: str
    worker: int
    rounds: int


class WhereAre(NamedTuple):
    """Where are your workers, apart from this channel?"""

    key: str
    number: int


class TheyAre(NamedTuple):
    """The answer: of each worker `offbeat.rounds.held.Elsewhere`."""

    key: str
    number: int
    said: list[tuple[int, bool, dict[str, Any], dict[str, Any]]]


class Laid(NamedTuple):
    """What a worker has brought to an exchange that some of your workers want; ``gives``: a vector comes along."""

    key: str
    number: int
    worker: int
    note: Any
    gives: bool


class HostSum(NamedTuple):
    """What all of a host's workers have brought to an exchange, added up; ``gives``: a vector comes along. ``absent``:
    those of them that never come to it.
    """

    key: str
    number: int
    absent: list[int]
    gives: bool


class Visit(NamedTuple):
    """A worker's shared weights come along, and meet those of ``peer``."""

    key: str
    visitor: int
    peer: int
    number: int
    gives: bool


class HalfBack(NamedTuple):
    """Half the difference comes along, which the visitor takes out of its own."""

    key: str
    visitor: int
    number: int
    gives: bool


class Standing(NamedTuple):
    """A worker stands, and no visit of its own is under way; −1: so do all."""

    key: str
    worker: int


class HasRetired(NamedTuple):
    """A worker visits nobody any more; −1: nobody does."""

    key: str
    worker: int


# Between host processes, until each has proved that it belongs to the job (links.py).


class Knock(NamedTuple):
    """The first message: ``name`` would talk to ``peer``. ``life`` tells a process from a later one of its name."""

    version: int
    name: str
    peer: str
    nonce: str
    life: str


class Challenge(NamedTuple):
    """The answer to whoever knocks."""

    nonce: str
    life: str


class Proof(NamedTuple):
    """The job's secret is known; said by both. What has been heard of the other before: so many messages, so many
    vectors, and ``at`` bytes of the next one; −1: not even its message.
    """

    proof: str
    messages: int
    vectors: int
    at: int


KINDS: tuple[type[Any], ...] = (
    Hello,
    OpenChannel,
    FirstDeposit,
    Submit,
    Release,
    Renew,
    NextResult,
    Nothing,
    NoMore,
    IsThrough,
    Newest,
    Finished,
    Stands,
    Back,
    CatchUp,
    KeepLost,
    Lost,
    Owed,
    Spare,
    RoundsAhead,
    MeetPeer,
    AddStep,
    Shift,
    Lay,
    Post,
    Fail,
    Bye,
    Leave,
    Returns,
    CanHand,
    Handed,
    HasTaken,
    CanSave,
    HasSaved,
    Ask,
    Ring,
    Close,
    Welcome,
    Answer,
    Fact,
    Failed,
    Gone,
    Wanted,
    HandHere,
    SaveHere,
    TakeHere,
    Returned,
    NoReturn,
    Doing,
    Refused,
    Listen,
    OtherHosts,
    Listening,
    Opened,
    Shut,
    Buried,
    ToldToAll,
    AskHost,
    HostSays,
    Rung,
    There,
    Noticed,
    Go,
    BlockPart,
    Stretch,
    PassedOn,
    StartedWith,
    WhereAre,
    TheyAre,
    Laid,
    HostSum,
    Visit,
    HalfBack,
    Standing,
    HasRetired,
    Knock,
    Challenge,
    Proof,
    Look,
    Seen,
    LookHost,
    HostSeen,
    BeginEpoch,
    BeginBatch,
    TakeBatches,
    StopWaiting,
    Stepped,
    HandedIn,
    CloseEpoch,
    HowFar,
    BatchesDealt,
    Accounts,
    OfLeases,
    HostGone,
    HostLost,
    WhatOf,
    HeldOf,
    Settled,
    AllThere,
    BlockTotal,
    ExchangeTotal,
)
_NUMBER = {kind: number for number, kind in enumerate(KINDS)}
_encode = json.JSONEncoder(separators=(",", ":")).encode


def _types_of(kind: type[Any]) -> list[Any]:
    """What its values are; what is inside lists is looked at where it is used."""
    return [_plain(one) for one in get_type_hints(kind).values()]


def _plain(one: Any) -> Any:
    if one is Any:
        return object
    if isinstance(one, UnionType):
        return tuple(_plain(each) for each in get_args(one))
    return get_origin(one) or one


_TYPES = {kind: _types_of(kind) for kind in KINDS}


def packed(message: Any) -> bytes:
    """A message as it goes over the line."""
    body = _encode(message).encode()
    if len(body) > LONGEST:
        raise ValueError(f"a {type(message).__name__} of {len(body)} bytes is longer than {LONGEST}")
    return HEAD.pack(len(body), _NUMBER[type(message)]) + body


def wrapped(message: Any) -> list[Any]:
    """A message as a value of another one."""
    return [_NUMBER[type(message)], *message]


def unwrapped(said: list[Any]) -> Any:
    """The inverse."""
    return _made(KINDS[said[0]], said[1:])


class Inbox:
    """Bytes as they come, in whatever pieces, and the messages in them."""

    def __init__(self, longest: int = LONGEST) -> None:
        self._bytes, self.longest = bytearray(), longest

    def feed(self, data: bytes) -> Iterator[Any]:
        """More has come. The messages that are whole now."""
        self._bytes += data
        while len(self._bytes) >= HEAD.size:
            length, kind = HEAD.unpack_from(self._bytes)
            if length > self.longest or kind >= len(KINDS):
                raise ValueError(f"a message of kind {kind} and {length} bytes")
            end = HEAD.size + length
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[HEAD.size : end])
            del self._bytes[:end]
            yield _read(KINDS[kind], body)


def _read(kind: type[Any], body: bytes) -> Any:
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a {kind.__name__} that cannot be read: {error}") from error
    return _made(kind, values)


def _made(kind: type[Any], values: Any) -> Any:
    types = _TYPES[kind]
    if isinstance(values, list) and len(values) == len(types) and all(map(isinstance, values, types)):
        return kind(*values)
    raise ValueError(f"a {kind.__name__} with other values than {', '.join(kind._fields)}")
