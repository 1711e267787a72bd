"""The timeline in the trace event format: what https://ui.perfetto.dev and chrome://tracing open.

A run is a process, a worker is a thread, what it does are complete events ("X"), a round is a flow ("s", "t", "f")
through the workers that took part, loss, spread and period are counters ("C"). Times are microseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from offbeat.basics.version import __version__
from offbeat.report.folder import Recording
from offbeat.runs.trace import Round

Event = dict[str, Any]


def events(recordings: Sequence[Recording]) -> Iterator[Event]:
    """All events of these runs, run after run."""
    flow = 0
    for number, recording in enumerate(recordings, 1):
        trace, record = recording.trace, recording.record
        yield _named("process_name", number, 0, record.label)
        for rank in range(record.workers):
            yield _named("thread_name", number, _thread(rank), f"rank {rank}")
            yield {**_named("thread_sort_index", number, _thread(rank), ""), "args": {"sort_index": rank}}
        for span in trace.spans:
            yield {
                "ph": "X",
                "name": span.doing,
                "cat": "worker",
                "pid": number,
                "tid": _thread(span.rank),
                "ts": _us(span.start_s),
                "dur": _us(span.end_s - span.start_s),
                "args": {"step": span.step},
            }
        stretches = [("done", *one) for one in recording.idle] + [("dead", *one) for one in recording.absent]
        for name, rank, start_s, end_s in stretches:
            lane = {"ph": "X", "name": name, "cat": "worker", "pid": number, "tid": _thread(rank), "args": {}}
            yield {**lane, "ts": _us(start_s), "dur": _us(end_s - start_s)}
        for round_ in trace.rounds:
            flow += 1
            yield from _flow(round_, number, flow)
        for name, points in trace.series.items():
            for point in points:
                if math.isfinite(point.value):
                    yield {
                        "ph": "C",
                        "cat": "number",
                        "name": name,
                        "pid": number,
                        "tid": 0,
                        "ts": _us(point.time_s),
                        "args": {name: point.value},
                    }


def write(path: Path, recordings: Sequence[Recording]) -> None:
    """Write the file, one event a line."""
    with path.open("w", encoding="utf-8") as out:
        out.write('{"displayTimeUnit":"ms","otherData":' + json.dumps({"offbeat": __version__}) + ',"traceEvents":[\n')
        for number, event in enumerate(events(recordings)):
            out.write((",\n" if number else "") + json.dumps(event, separators=(",", ":"), allow_nan=False))
        out.write("\n]}\n")


def _named(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "cat": "__metadata", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _flow(round_: Round, pid: int, flow: int) -> Iterator[Event]:
    members = round_.members
    if len(members) < 2:
        return
    args = {
        "round": round_.version,
        "started by": round_.started_by,
        "fresh": list(round_.fresh),
        "staleness": {str(rank): steps for rank, steps in round_.staleness.items()},
    }
    # Just before its end, so that the moment lies inside the slice that the round ended, and not on its edge.
    moment = max(_us(round_.end_s) - 1, 0)
    for place, rank in enumerate(members):
        ph = "s" if place == 0 else "f" if place == len(members) - 1 else "t"
        event = {"ph": ph, "name": "round", "cat": "round", "id": flow, "pid": pid, "tid": _thread(rank), "ts": moment}
        yield {**event, "args": args, **({"bp": "e"} if ph == "f" else {})}


def _thread(rank: int) -> int:
    return rank + 1  # number 0 stands for the process itself, or for an idle CPU, in some of the format's readers


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
