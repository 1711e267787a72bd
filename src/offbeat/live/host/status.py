"""What a host process knows of its job, as plain values: what ``optimizer.status()`` and ``offbeat status`` show.

Nothing here asks anybody. The host process fills these in from its own tables (`offbeat.live.host.onlookers`), they
travel as JSON, and whoever looks builds them again. All names carry units: seconds are ``_s``, bytes ``_bytes``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from offbeat.basics.units import format_bytes, format_ranks, format_seconds
from offbeat.basics.version import __version__

T = TypeVar("T")

QUIET_S = 1.0  # a worker that was heard of more recently is simply busy
DEAF_S = 2.0  # another host that owes an acknowledgement for so long does not answer
SHOWN = 64  # workers in a table of text
AWAY_BYTES = 1 << 20  # of memory, from which on it is worth a word

State = Literal["busy", "waits", "elsewhere", "stopped", "ended"]


@dataclass(frozen=True)
class WorkerStatus:
    """One worker, as its host process sees it.

    ``rank``: as the script counts. ``since_unix_s``: when it came. ``state``: "busy" (in the script's own code),
    "waits" (in a call of Offbeat's), "elsewhere" (in a collective of the script's own), "stopped" or "ended".
    ``doing`` says it in words. ``at``: the line of the script, as far as the worker has shown it: exact while it waits
    or is elsewhere, else the line from which Offbeat was called last. ``quiet_s``: since it was last heard of.

    ``steps``: taken so far; ``steps_per_s``: over the last seconds, None where that is not known yet. ``submitted``:
    vectors handed in; ``taken``: results taken. ``rounds_behind``: results that are there, and that it has not taken;
    in exchanges in step, how many the first one is ahead. ``waits_for``, ``waited_for_by``: ranks. ``stacks``: why its
    stacks cannot be had; empty where they can.
    """

    rank: int
    pid: int
    since_unix_s: float
    state: State
    doing: str
    at: str
    quiet_s: float
    steps: int
    steps_per_s: float | None
    submitted: int
    taken: int
    rounds_behind: int
    waits_for: tuple[int, ...] = ()
    waited_for_by: tuple[int, ...] = ()
    stacks: str = ""


@dataclass(frozen=True)
class ChannelStatus:
    """What workers have in common at a host: rounds, exchanges or shared weights, and their memory.

    ``rounds``: how many have begun, over all hosts where the workers are on several. ``slots``: pieces of memory for a
    vector of ``slot_bytes`` each. ``gpu``: whether they lie on a GPU.
    """

    name: str
    kind: str
    ranks: tuple[int, ...]
    rounds: int
    rounds_per_s: float | None
    slots: int
    slots_in_use: int
    slot_bytes: int
    gpu: bool

    @property
    def memory_bytes(self) -> int:
        """Of all its slots."""
        return self.slots * self.slot_bytes


@dataclass(frozen=True)
class OtherHost:
    """Another host of the job. ``answers``: it is connected, and acknowledges what it is told. ``words``: if not, why.

    ``silent_s``: since anything came from it. ``sent_bytes`` and ``received_bytes``: by this host, to and from it.
    ``ranks``: its workers. ``workers``: what its host process said of them, ``told_ago_s`` ago; None: it has not yet.
    """

    address: str
    answers: bool
    words: str
    silent_s: float | None
    sent_bytes: int
    received_bytes: int
    sent_Bps: float | None
    received_Bps: float | None
    ranks: tuple[int, ...]
    host: str = ""
    told_ago_s: float | None = None
    workers: tuple[WorkerStatus, ...] = ()


@dataclass(frozen=True)
class MemoryStatus:
    """What the host process holds. ``arena_bytes``: host memory that is really there, shared with the workers.

    ``pages_bytes``: of it, for what workers show. ``gpu_bytes``: slots on GPUs. ``own_bytes``: of the process itself.
    """

    arena_bytes: int
    pages_bytes: int
    gpu_bytes: int
    own_bytes: int


@dataclass(frozen=True)
class JobStatus:
    """What ``optimizer.status()`` and ``offbeat status`` show: one job, as the host process of one host sees it.

    Printing it gives tables, and the sentences below them.

    - ``host``: the name of this host.
    - ``pid``: that of the host process; 0 where there is none.
    - ``size``: how many workers there are on all hosts.
    - ``workers``: the workers of this host.
    - ``rounds_per_s``: the rounds of the channel that has the most.
    - ``sums_under_way``: the sums that are still to be made.
    - ``adders``: how many threads make them.
    """

    version: str
    host: str
    pid: int
    script: str
    since_unix_s: float
    size: int
    workers: tuple[WorkerStatus, ...]
    channels: tuple[ChannelStatus, ...] = ()
    other_hosts: tuple[OtherHost, ...] = ()
    memory: MemoryStatus = MemoryStatus(0, 0, 0, 0)
    sums_under_way: int = 0
    adders: int = 0
    notes: tuple[str, ...] = ()

    @property
    def rounds_per_s(self) -> float | None:
        """Of the channel with the most."""
        return max((one.rounds_per_s for one in self.channels if one.rounds_per_s is not None), default=None)

    @property
    def sent_bytes(self) -> int:
        """To other hosts."""
        return sum(one.sent_bytes for one in self.other_hosts)

    @property
    def received_bytes(self) -> int:
        """From other hosts."""
        return sum(one.received_bytes for one in self.other_hosts)

    @property
    def everybody(self) -> tuple[WorkerStatus, ...]:
        """The workers of this host, and what other hosts have said of theirs."""
        return (*self.workers, *(worker for other in self.other_hosts for worker in other.workers))

    @property
    def sentences(self) -> tuple[str, ...]:
        """What is not as it should be, and what there is to do."""
        return (*_of_workers(self.everybody), *_of_hosts(self.other_hosts), *self.notes)

    def json(self) -> dict[str, Any]:
        """As ``json.dumps`` takes it."""
        whole = cast("dict[str, Any]", plain(self))
        for one, channel in zip(whole["channels"], self.channels, strict=True):
            one["memory_bytes"] = channel.memory_bytes
        for name in ("rounds_per_s", "sent_bytes", "received_bytes", "sentences"):
            whole[name] = plain(getattr(self, name))
        return whole

    def __str__(self) -> str:
        parts = [heading(self), table(worker_cells(self))]
        if self.channels:
            parts.append(table(channel_cells(self)))
        if self.other_hosts:
            parts.append(table(host_cells(self)))
        if self.pid:
            parts.append(resources(self))
        return "\n\n".join([*parts, *(["\n".join(self.sentences)] if self.sentences else [])])


def of_one(
    rank: int, size: int, pid: int, host: str, script: str, steps: int, wait: tuple[State, str, str], why: str
) -> JobStatus:
    """What a worker can say by itself, without a host process; ``why`` it has none."""
    state, doing, at = wait
    me = WorkerStatus(rank, pid, 0.0, state, doing, at, 0.0, steps, None, 0, 0, 0)
    return JobStatus(__version__, host, 0, script, 0.0, size, (me,), notes=(why,))


# What a worker is doing.


def doing(letter: str, page: Mapping[str, Any], now_s: float, heard_s: float) -> tuple[State, str, str, float]:
    """The state, the words, the place, and since when nothing was heard, of a worker that shows ``page``.

    ``letter``: of its process, as the kernel names its state; "" where that is not known.
    """
    last_s = page.get("since")
    quiet_s = max(0.0, now_s - max(heard_s, last_s if isinstance(last_s, float) else 0.0))
    at = str(page.get("at") or "")
    last = str(page.get("last") or "")
    if letter in ("T", "t"):
        by = "SIGSTOP" if letter == "T" else "a debugger"
        return "stopped", f"is stopped ({by})", at or last, quiet_s
    if letter in ("Z", "X"):
        return "ended", "has ended", "", quiet_s
    waits = page.get("waits") or []
    if waits:
        _, what, since_s = waits[-1]
        return "waits", f"waits for {what}, since {format_seconds(max(0.0, now_s - since_s))}", at or last, quiet_s
    if page.get("inside"):
        where = f", at {at}" if at else ""
        return "elsewhere", f"is in a collective of the script's own{where}", at, quiet_s
    words = "is busy"
    if quiet_s >= QUIET_S:
        words += f", since {format_seconds(quiet_s)}" + (f", after {last}" if last else "")
    if letter == "D":
        words += ", in a call of the kernel that nothing interrupts"
    return "busy", words, last, quiet_s


def _of_workers(workers: Sequence[WorkerStatus]) -> list[str]:
    said = []
    for one in workers:
        if one.state == "stopped":
            way_out = "" if "debugger" in one.doing else f"; kill -CONT {one.pid} lets it go on"
            said.append(f"Rank {one.rank} {one.doing}{way_out}.")
    whom: dict[tuple[int, ...], list[int]] = {}
    for one in workers:
        if one.waits_for and one.quiet_s >= QUIET_S:
            whom.setdefault(one.waits_for, []).append(one.rank)
    known = {one.rank: one for one in workers}
    for late, waiting in sorted(whom.items()):
        verb = "waits" if len(waiting) == 1 else "wait"
        said.append(f"{_ranks(waiting)} {verb} for {format_ranks(late)}{_why(late, known)}.")
    return said


def _why(late: Sequence[int], known: Mapping[int, WorkerStatus]) -> str:
    return f", which {known[late[0]].doing}" if len(late) == 1 and late[0] in known else ""


def _of_hosts(others: Sequence[OtherHost]) -> list[str]:
    return [f"The host at {one.address} does not answer: {one.words}." for one in others if not one.answers]


def _ranks(ranks: Sequence[int]) -> str:
    words = format_ranks(ranks)
    return words[:1].upper() + words[1:]


# As text.


def heading(status: JobStatus) -> str:
    """Which job this is, in a line."""
    here = len(status.workers)
    of = "" if here == status.size else f" of {status.size}"
    workers = f"{here}{of} {'worker' if status.size == 1 else 'workers'}"
    process = f", host process {status.pid}" if status.pid else ""
    return f"{status.script or 'a job'} on {status.host}: {workers}{process}"


def worker_cells(status: JobStatus, narrow: bool = False) -> list[list[str]]:
    """The header and a row for each worker, as texts; ``narrow``: without what can be spared."""
    workers = sorted(status.everybody, key=lambda one: (-len(one.waited_for_by), -one.quiet_s, one.rank))[:SHOWN]
    homes = {one.rank: other.host or other.address for other in status.other_hosts for one in other.workers}
    old_s = {one.rank: o.told_ago_s or 0.0 for o in status.other_hosts for one in o.workers}
    header = ["rank", "pid", "steps", "steps/s", "submitted", "taken", "behind", "doing"]
    if homes:
        header.insert(1, "host")
    rows = [header]
    for one in sorted(workers, key=lambda one: one.rank):
        row = [
            str(one.rank),
            str(one.pid),
            str(one.steps),
            _rate(one.steps_per_s),
            str(one.submitted),
            str(one.taken),
            str(one.rounds_behind) if one.rounds_behind else "-",
            one.doing + (f" ({_ago(old_s[one.rank])})" if old_s.get(one.rank, 0.0) >= DEAF_S else ""),
        ]
        if homes:
            row.insert(1, homes.get(one.rank, status.host))
        rows.append(row)
    spared = [rows[0].index(name) for name in ("submitted", "taken") if narrow]
    return [[cell for column, cell in enumerate(row) if column not in spared] for row in rows]


def channel_cells(status: JobStatus) -> list[list[str]]:
    """The header and a row for each channel, as texts."""
    rows = [["channel", "what", "rounds", "rounds/s", "slots in use", "memory", ""]]
    for one in status.channels:
        rows.append(
            [
                one.name,
                one.kind,
                str(one.rounds),
                _rate(one.rounds_per_s),
                f"{one.slots_in_use} of {one.slots}",
                format_bytes(one.memory_bytes),
                "on a GPU" if one.gpu else "",
            ]
        )
    return rows


def host_cells(status: JobStatus) -> list[list[str]]:
    """The header and a row for each other host, as texts."""
    rows = [["other host", "ranks", "link", "sent", "received", "heard"]]
    for one in status.other_hosts:
        rows.append(
            [
                f"{one.host} {one.address}".strip(),
                format_ranks(one.ranks).partition(" ")[2] if 0 < len(one.ranks) <= 8 else str(len(one.ranks)),
                "answers" if one.answers else f"does not answer: {one.words}",
                _bytes(one.sent_bytes, one.sent_Bps),
                _bytes(one.received_bytes, one.received_Bps),
                "never" if one.silent_s is None else _ago(one.silent_s),
            ]
        )
    return rows


def resources(status: JobStatus) -> str:
    """Memory, and what the adders have to do, in a line."""
    memory = status.memory
    said = [
        f"memory: {format_bytes(memory.arena_bytes)} shared with the workers",
        f"{format_bytes(memory.own_bytes)} of the host process's own",
    ]
    if memory.gpu_bytes:
        said.insert(1, f"{format_bytes(memory.gpu_bytes)} on GPUs")
    count = status.sums_under_way
    sums = "no sum waits" if not count else "1 sum waits" if count == 1 else f"{count} sums wait"
    threads = f"{status.adders} {'thread' if status.adders == 1 else 'threads'}"
    return f"{', '.join(said)}; adders: {sums}, {threads}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns of plain text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = [is_number_column(rows, column) for column in range(len(widths))]
    places = list(zip(widths, right, strict=True))
    lines = [
        "  ".join(c.rjust(n) if is_right else c.ljust(n) for c, (n, is_right) in zip(row, places, strict=True))
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def is_number_column(rows: Sequence[Sequence[str]], column: int) -> bool:
    """Whether its cells are to stand at the right."""
    return all(_is_number(row[column]) for row in rows[1:])


def _is_number(cell: str) -> bool:
    return cell in ("-", "") or cell.replace(".", "", 1).isdigit()


def _ago(seconds: float) -> str:
    return "now" if seconds < QUIET_S else f"{format_seconds(round(seconds, 1))} ago"


def _rate(per_s: float | None) -> str:
    return "-" if per_s is None else f"{per_s:.3g}" if per_s < 999.5 else f"{per_s:.0f}"


def _bytes(count: int, per_s: float | None) -> str:
    return format_bytes(count) + (f", {format_bytes(per_s)}/s" if per_s else "")


# As JSON, and back.


def plain(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists."""
    if is_dataclass(value):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    return [plain(one) for one in value] if isinstance(value, tuple | list) else value


def rebuilt(kind: type[T], value: Any) -> T:
    """What ``plain`` has made flat. Raises ``ValueError`` where it was another version's."""
    try:
        return cast(T, _rebuilt(kind, value))
    except (KeyError, TypeError, AttributeError) as error:
        version = value.get("version") if isinstance(value, dict) else None
        raise ValueError(
            f"the job runs Offbeat {version}, and this is {__version__}; look with the Offbeat that it runs"
        ) from error


def _rebuilt(kind: Any, value: Any) -> Any:
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return cast(Any, kind)(**{one.name: _rebuilt(hints[one.name], value[one.name]) for one in fields(kind)})
    if get_origin(kind) is tuple:
        return tuple(_rebuilt(get_args(kind)[0], one) for one in value)
    if isinstance(kind, UnionType):
        return value
    if kind in (int, float, str, bool) and not isinstance(value, (int, float) if kind is float else kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
