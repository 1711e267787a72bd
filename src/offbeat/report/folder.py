"""A run's folder: ``run.json`` says what was run, a ``.jsonl`` file beside it for each run says what happened when.

The trace files stand on their own: their first line repeats the run's record, every further line is one thing that
happened, and the last line counts them. So a folder whose writing was interrupted can still be read, up to there.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbeat.basics.version import __version__
from offbeat.report.table import Record
from offbeat.runs.absences import Absence
from offbeat.runs.foreign import ForeignWait
from offbeat.runs.talking import Talking
from offbeat.runs.trace import DOINGS, Point, Round, Span, Trace

FORMAT = 1
MICRO = 1e6  # times are whole microseconds in the files


@dataclass(frozen=True)
class Recording:
    """One run with its trace. ``finished_s`` and ``wait_s`` are per worker."""

    record: Record
    trace: Trace
    finished_s: tuple[float, ...]
    wait_s: tuple[float, ...]

    @property
    def workers(self) -> int:
        return self.record.workers

    @property
    def idle(self) -> list[tuple[int, float, float]]:
        """(rank, from, to) of every worker that was done before the last one was."""
        end_s, dead = (
            max(self.finished_s, default=0.0),
            {one.rank for one in self.record.absences if one.back_s is None},
        )
        return [(r, done_s, end_s) for r, done_s in enumerate(self.finished_s) if done_s < end_s and r not in dead]

    @property
    def absent(self) -> list[tuple[int, float, float]]:
        """(rank, from, to) of every worker that had died."""
        end_s = max(self.finished_s, default=0.0)
        return [(o.rank, o.died_s, end_s if o.back_s is None else o.back_s) for o in self.record.absences]


@dataclass(frozen=True)
class Story:
    """What one command did. ``notes`` are sentences about what could not be read."""

    heading: str
    command: str
    made: str
    versions: Mapping[str, str]
    recordings: Sequence[Recording]
    notes: Sequence[str] = field(default_factory=tuple)


def write(folder: Path, story: Story) -> None:
    """Write the folder, anew if there is one. ``run.json`` comes last: where it is, the rest is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in [folder / "run.json", folder / "report.html", *folder.glob("[0-9]*-*.jsonl")]:
        old.unlink(missing_ok=True)
    files = []
    for number, recording in enumerate(story.recordings, 1):
        name = re.sub(r"[^a-z0-9]+", "-", recording.record.label.lower()).strip("-")[:40]
        file = folder / f"{number:02d}-{name}.jsonl"
        with file.open("w", encoding="utf-8") as out:
            out.writelines(line + "\n" for line in _lines(recording))
        files.append(file.name)
    about = {
        "format": FORMAT,
        "offbeat": __version__,
        "heading": story.heading,
        "command": story.command,
        "made": story.made,
        "versions": dict(story.versions),
        "runs": [{**r.record.json(), "label": r.record.label} for r in story.recordings],
        "traces": files,
    }
    half = folder / "run.json.unfinished"
    half.write_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    half.replace(folder / "run.json")


def read(folder: Path) -> Story:
    """Read a folder; what is missing is said in ``notes``. A ValueError says why nothing of it can be shown."""
    if not folder.exists():
        raise ValueError(f"there is no folder {folder}; `offbeat compare --report DIR` makes one")
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; name the folder that --report made")
    notes: list[str] = []
    about = _about(folder, notes)
    traces = sorted(folder.glob("[0-9]*-*.jsonl"))
    if not traces and not about:
        raise ValueError(
            f"{folder} holds no run: neither run.json nor traces can be used; name a folder that --report made"
        )
    recordings = []
    for file in traces:
        recording = _read_trace(file, notes)
        if recording is not None:
            recordings.append(recording)
    for name in _missing(about, traces):
        notes.append(f"The trace {name} is missing.")
    if not recordings:
        recordings = _records_alone(about, notes)
    if not recordings:
        raise ValueError(f"nothing in {folder} can be shown: {' '.join(notes) or 'it holds no runs.'}")
    versions = about.get("versions")
    return Story(
        heading=str(about.get("heading", "")),
        command=str(about.get("command", "")),
        made=str(about.get("made", "")),
        versions={str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else {},
        recordings=recordings,
        notes=notes,
    )


def recorded(place: Path) -> Recording:
    """The one run of a folder, or the run of a trace file in it. A ValueError says why it cannot be used."""
    if not place.is_dir():
        notes: list[str] = []
        if not place.exists():
            raise ValueError(f"there is no trace {place}; name a folder that --report made, or a .jsonl file in it")
        recording = _read_trace(place, notes)
        if recording is None:
            raise ValueError(" ".join(notes))
        return recording
    recordings = read(place).recordings
    if len(recordings) > 1:
        names = ", ".join(file.name for file in sorted(place.glob("[0-9]*-*.jsonl")))
        raise ValueError(f"{place} holds {len(recordings)} runs; name one of its files: {names}")
    return recordings[0]


def _lines(recording: Recording) -> Iterator[str]:
    trace, count = recording.trace, 0
    head = {
        "format": FORMAT,
        "offbeat": __version__,
        "record": {**recording.record.json(), "label": recording.record.label},
        "finished_s": recording.finished_s,
        "wait_s": recording.wait_s,
    }
    yield _dumped(head)
    for span in trace.spans:
        yield _dumped(["s", span.rank, span.step, DOINGS.index(span.doing), _us(span.start_s), _us(span.end_s)])
        count += 1
    for r in trace.rounds:
        waited = {rank: _us(seconds) for rank, seconds in r.waited_s.items()}
        yield _dumped(["r", r.version, r.started_by, r.fresh, r.staleness, waited, _us(r.end_s)])
        count += 1
    for name, points in trace.series.items():
        for point in points:
            value = point.value if math.isfinite(point.value) else None
            yield _dumped(["p", name, _us(point.time_s), point.samples, value])
            count += 1
    yield _dumped(["end", count])


def _about(folder: Path, notes: list[str]) -> dict[str, Any]:
    try:
        about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append("run.json is missing: the run was interrupted, or the folder is not complete.")
        return {}
    except (ValueError, OSError) as error:
        notes.append(f"run.json cannot be read ({error}).")
        return {}
    if not isinstance(about, dict):
        notes.append("run.json does not hold a run.")
        return {}
    _check_format(about, folder / "run.json")
    return about


def _check_format(about: Mapping[str, Any], file: Path) -> None:
    seen = about.get("format")
    if isinstance(seen, int) and seen != FORMAT:
        raise ValueError(
            f"{file} has format {seen}, written by offbeat {about.get('offbeat', '?')}, and offbeat {__version__} "
            f"reads format {FORMAT}; use the version that wrote it"
        )


def _missing(about: Mapping[str, Any], traces: Sequence[Path]) -> list[str]:
    named = about.get("traces")
    there = {file.name for file in traces}
    return [str(name) for name in named if str(name) not in there] if isinstance(named, list) else []


def _records_alone(about: Mapping[str, Any], notes: list[str]) -> list[Recording]:
    """Without traces the table can still be shown."""
    found = []
    for plain in about.get("runs") or []:
        try:
            found.append(Recording(_record(plain), Trace(), (), ()))
        except (KeyError, TypeError, ValueError, AttributeError):
            notes.append("A run in run.json is not understood.")
    return found


def _read_trace(file: Path, notes: list[str]) -> Recording | None:
    text = file.read_text(encoding="utf-8", errors="replace")
    first, *rest = text.splitlines() or [""]
    try:
        head = json.loads(first)
        _check_format(head, file)
        recording = Recording(_record(head["record"]), Trace(), tuple(head["finished_s"]), tuple(head["wait_s"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ValueError) and "has format" in str(error):
            raise
        notes.append(f"The trace {file.name} is {'damaged at its beginning' if first else 'empty'}.")
        return None
    whole, damaged = False, 0
    for line in rest:
        try:
            whole = _take(json.loads(line), recording.trace)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            damaged += 1
    if not whole:
        notes.append(f"The trace {file.name} is cut off; what was written before is shown.")
    elif damaged:
        notes.append(f"{damaged} lines of the trace {file.name} are damaged and left out.")
    return recording


def _take(line: list[Any], trace: Trace) -> bool:
    """Put a line into the trace; True for the last one."""
    kind = line[0]
    if kind == "s":
        _, rank, step, doing, start, end = line
        trace.spans.append(Span(int(rank), int(step), DOINGS[doing], start / MICRO, end / MICRO))
    elif kind == "r":
        _, version, started_by, fresh, staleness, waited, end = line
        trace.rounds.append(
            Round(
                int(version),
                int(started_by),
                tuple(map(int, fresh)),
                {int(rank): int(s) for rank, s in staleness.items()},
                {int(rank): us / MICRO for rank, us in waited.items()},
                end / MICRO,
            )
        )
    elif kind == "p":
        _, name, us, samples, value = line
        number = math.nan if value is None else float(value)
        trace.series.setdefault(str(name), []).append(Point(us / MICRO, int(samples), number))
    return bool(kind == "end")


def _record(plain: Mapping[str, Any]) -> Record:
    names = {f.name for f in dataclasses.fields(Record)}
    if "strategy" in plain:  # its earlier name
        plain = {"method": plain["strategy"], **plain}
    known = {name: value for name, value in plain.items() if name in names}
    if plain.get("diverged"):
        known = {name: math.nan if name in ("loss", "train_loss") and v is None else v for name, v in known.items()}
    carriers = tuple(map(str, known.get("carriers", ())))
    foreign = tuple(ForeignWait(**one) for one in known.get("foreign", ()))
    talking = tuple(Talking(**one) for one in known.get("talking", ()))
    absences = tuple(Absence(**one) for one in known.get("absences", ()))
    record = Record(**{**known, "carriers": carriers, "foreign": foreign, "talking": talking, "absences": absences})
    for name in ("workers", "steps", "seconds", "wait_fraction", "wire_bytes"):
        if not isinstance(getattr(record, name), (int, float)):
            raise TypeError(f"{name} is {getattr(record, name)!r}")
    return record


def _us(seconds: float) -> int:
    return round(seconds * MICRO)


def _dumped(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
