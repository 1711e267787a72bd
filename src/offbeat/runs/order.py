"""The order of events that decided a run, so that it can be run again.

Where nobody waits, a run depends on who came when. What happened at one worker happened in one order: its deposits, the
snapshots that rounds took, the results it was given and took (`offbeat.rounds.seat`); visits to its shared weights
(`offbeat.rounds.shared`); how much of its batches it was through when the bell rang; how long its own steps took, where
a method asks. These are all that chance decides. A folder holds one file for each worker, ``order-0.json``,
``order-1.json``, …, each with a digest of itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offbeat.basics.version import __version__

FORMAT = 2
SAMPLED = 1_000  # of the final weights' numbers, at most

Event = tuple[str, int]
Piece = tuple[int, int, int]  # batch, from row, to row


@dataclass(frozen=True)
class Part:
    """What a worker did of its batch in one round: the micro-batches with a gradient, how many it did, of how many."""

    pieces: tuple[Piece, ...]
    done: int
    of: int
    whole_s: float | None
    samples: int  # 1 where a batch was not cut: its gradient counts as one


@dataclass
class Told:
    """What one worker writes down while it trains."""

    events: list[Event] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    averages: list[int] = field(default_factory=list)  # how many steps it had begun when it asked for each
    spent: list[float] = field(default_factory=list)  # the seconds of its own that it was told of
    gradients: int = 0  # steps with data
    beside: dict[str, list[Event]] = field(default_factory=dict)  # events of channels beside the one of ``events``

    def events_of(self, channel: str, beside: bool) -> list[Event]:
        """Where what happens at this channel is written down."""
        return self.beside.setdefault(channel, []) if beside else self.events


@dataclass(frozen=True)
class About:
    """What all workers of a run have in common."""

    method: str
    written: Mapping[str, Any]  # the method, so that it can be made again
    workers: int
    seed: int
    steps: int | None  # that methods were told of, to plan ahead
    model: str  # a digest of the weights it began with
    task: str = ""  # its name, if one was given
    cannot: str = ""  # why this run cannot be replayed, if it cannot
    hosts: int = 1  # that the workers were on
    homes: tuple[int, ...] = ()  # the number of each worker's host; none where they are not known


@dataclass(frozen=True)
class Order:
    """A run's record. ``final``: some of the numbers of the final weights, evenly spread."""

    about: About
    told: tuple[Told, ...]
    final: tuple[float, ...]

    def write(self, folder: Path) -> None:
        """One file for each worker; older ones are replaced."""
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("order-*.json"):
            old.unlink()
        for rank, told in enumerate(self.told):
            write_one(folder, rank, self.about, told, self.final)


def write_one(folder: Path, rank: int, about: About, told: Told, final: Sequence[float]) -> None:
    """One worker's file, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    body = {"offbeat": __version__, "rank": rank, "about": asdict(about), "told": asdict(told), "final": list(final)}
    text = _text(body)
    unfinished = folder / f"order-{rank}.unfinished"
    unfinished.write_text(
        json.dumps({"format": FORMAT, "digest": _digest(text), "run": json.loads(text)}), encoding="utf-8"
    )
    unfinished.rename(folder / f"order-{rank}.json")


def read(folder: Path) -> Order:
    """The record in a folder. A ValueError says why it cannot be used."""
    files = sorted(folder.glob("order-*.json"), key=lambda file: (len(file.name), file.name))
    if not files:
        raise ValueError(
            f"{folder} holds no order of a run; `offbeat train --save DIR` and ob.attach(…, record=DIR) write one"
        )
    bodies = [_body(file) for file in files]
    about = bodies[0]["about"]
    cannot = next((body["about"]["cannot"] for body in bodies if body["about"]["cannot"]), "")
    about["cannot"] = cannot
    for file, body in zip(files, bodies, strict=True):
        if {**body["about"], "cannot": cannot} != about:
            raise ValueError(f"{file} is of another run than {files[0].name}; record every run in a folder of its own")
    if [body["rank"] for body in bodies] != list(range(about["workers"])):
        there = ", ".join(str(body["rank"]) for body in bodies)
        raise ValueError(
            f"{folder} holds the order of rank {there}, but the run had {about['workers']} workers; "
            "put the files of all of them into one folder"
        )
    told = [_told(body["told"]) for body in bodies]
    return Order(About(**{**about, "homes": tuple(about["homes"])}), tuple(told), tuple(bodies[0]["final"]))


def _body(file: Path) -> dict[str, Any]:
    try:
        whole = json.loads(file.read_text(encoding="utf-8"))
        seen, digest, body = whole["format"], whole["digest"], whole["run"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({error}); record the run again") from None
    if seen != FORMAT:
        raise ValueError(
            f"{file} has format {seen}, and offbeat {__version__} reads format {FORMAT}; "
            "replay it with the version that wrote it"
        )
    if _digest(_text(body)) != digest:
        raise ValueError(f"{file} is damaged: it is not as it was written; record the run again")
    if body["offbeat"] != __version__:
        raise ValueError(
            f"{file} was written by offbeat {body['offbeat']}, and methods may have changed until {__version__}; "
            "replay it with the version that wrote it"
        )
    return dict(body)


def _told(plain: Mapping[str, Any]) -> Told:
    return Told(
        _events(plain["events"]),
        [
            Part(tuple((b, lo, hi) for b, lo, hi in p["pieces"]), p["done"], p["of"], p["whole_s"], p["samples"])
            for p in plain["parts"]
        ],
        list(plain["averages"]),
        [float(seconds) for seconds in plain["spent"]],
        plain["gradients"],
        {name: _events(events) for name, events in plain.get("beside", {}).items()},
    )


def _events(plain: Sequence[Sequence[Any]]) -> list[Event]:
    return [(str(what), int(number)) for what, number in plain]


def digest(parameters: Iterable[Tensor]) -> str:
    """Of a model's weights."""
    total = hashlib.sha256()
    for p in parameters:
        total.update(p.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def sampled(weights: Tensor) -> tuple[float, ...]:
    """Some of the numbers of a vector, evenly spread."""
    stride = max(1, -(-weights.numel() // SAMPLED))
    return tuple(weights.detach().cpu()[::stride].double().tolist())


def _text(body: object) -> str:
    return json.dumps(body, sort_keys=True, allow_nan=False)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
