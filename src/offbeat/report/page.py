"""One page about a command's runs: a single HTML file that needs no network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from offbeat.basics.units import format_seconds
from offbeat.report import charts
from offbeat.report.folder import Recording, Story
from offbeat.report.table import cells, header
from offbeat.report.timeline import lanes
from offbeat.runs import absences, talking
from offbeat.runs.foreign import told
from offbeat.runs.slowness import judge

WORTH_TELLING = 0.1  # of all workers' time


def html(story: Story) -> str:
    """The page, whole."""
    charts.graph_objects()  # before anything else, for its sentence
    from plotly.offline import get_plotlyjs

    runs = story.recordings
    figures = {
        "loss-time": charts.loss_over_time(runs),
        "loss-samples": charts.loss_over_samples(runs),
        "waiting": charts.waiting(runs),
        "staleness": charts.staleness(runs),
        "spread": charts.spread(runs),
        "period": charts.period(runs),
        "wire": charts.wire(runs),
    }
    shown = {name: figure for name, figure in figures.items() if figure is not None}
    data = {"figures": {name: json.loads(figure.to_json()) for name, figure in shown.items()}, "lanes": lanes(runs)}
    # "</" inside JSON could end the script element early.
    packed = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    title = "Offbeat: " + ", ".join(run.record.label for run in runs)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title[:120])}</title>
<style>{_file("page.css")}</style>
</head>
<body>
<main>
{_body(story, set(shown), bool(data["lanes"]))}
</main>
<script>{get_plotlyjs()}</script>
<script type="application/json" id="data">{packed}</script>
<script>{_file("page.js")}</script>
</body>
</html>
"""


def write(path: Path, story: Story) -> None:
    """Write the page beside its place first: a reader never sees half of it."""
    text = html(story)
    half = path.with_name(path.name + ".unfinished")
    half.write_text(text, encoding="utf-8")
    half.replace(path)


def words(run: Recording) -> list[str]:
    """Which worker is slow, who died, who had nothing left to do and whose collectives held them, in sentences.

    Nothing where it was not recorded.
    """
    absent = absences.told(run.record.absences, run.workers, max(run.finished_s, default=0.0))
    if not run.trace.spans:
        return absent
    workers, foreign = run.record.workers, run.record.foreign
    wait_s = run.wait_s or run.trace.wait_s(workers)
    all_s = sum(wait_s) + sum(one.seconds for one in foreign)
    busy_s = run.trace.busy_s(workers)
    elsewhere = told(foreign, all_s, workers * run.record.steps, workers)
    return [
        judge(busy_s, wait_s).verdict,
        *absent,
        *done_early(run),
        *talking.told(run.record.talking, busy_s),
        *elsewhere,
    ]


def done_early(run: Recording) -> list[str]:
    """Whether workers had nothing left to do while others trained, in a sentence where it is worth one."""
    idle_s = sum(end_s - start_s for _, start_s, end_s in run.idle)
    share = idle_s / (run.workers * max(run.finished_s, default=0.0) or 1.0)
    if share < WORTH_TELLING:
        return []
    return [
        f"{len(run.idle)} of {run.workers} workers were done before the job was, and idle for "
        f"{format_seconds(idle_s)} together, {share:.0%} of the time."
    ]


def _body(story: Story, shown: set[str], timeline: bool) -> str:
    heading = "".join(f'<p class="quiet">{escape(line)}</p>' for line in story.heading.splitlines())
    parts = [f"<header><h1>Offbeat: what the workers did</h1>{heading}</header>"]
    if story.notes:
        notes = "".join(f"<p>{escape(note)}</p>" for note in story.notes)
        parts.append(f'<section class="warning"><h2>Not all of it is here</h2>{notes}</section>')
    parts.append(_section("The runs", _table(story.recordings)))
    slow = _slow(story.recordings)
    if slow:
        parts.append(_section("Which worker is slow?", slow))
    parts.append(
        _pair(
            _chart("loss-time", "Loss against time", "Running mean over a twentieth of the run.", shown),
            _chart("loss-samples", "Loss against samples", "Lower at equal samples: learns more from each.", shown),
        )
    )
    if timeline:
        parts.append(_TIMELINE)
    parts.append(
        _pair(
            _chart("waiting", "Waiting, by worker", "", shown),
            _chart("staleness", "Staleness", "How many rounds old the work in a round was; 0 is fresh.", shown),
        )
    )
    parts.append(
        _pair(
            _chart("spread", "Spread of the replicas", "Methods that keep all replicas equal have no line.", shown),
            _chart("period", "Period of adaptive averaging", "It follows the spread of the replicas.", shown),
        )
    )
    parts.append(_chart("wire", "Bytes on the wire", "", shown))
    parts.append(_section("Settings", _settings(story)))
    return "\n".join(part for part in parts if part)


_TIMELINE = """<section><h2>Timeline</h2>
<p class="quiet">A lane for each worker; rounds link those who took part, filled where their newest work was in it.
Drag to zoom, double-click for the whole run, hover or tap for details.</p>
<div class="controls"><label>Run <select id="timeline-run"></select></label>
<button data-move="left" aria-label="earlier">◀</button><button data-move="right" aria-label="later">▶</button>
<button data-move="in">Zoom in</button><button data-move="out">Zoom out</button>
<button data-move="whole">Whole run</button></div>
<div id="timeline" role="img" aria-label="What each worker did when"></div>
<p class="quiet" id="timeline-note"></p></section>"""


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _chart(name: str, title: str, caption: str, shown: set[str]) -> str:
    if name not in shown:
        return ""
    quiet = f'<p class="quiet">{escape(caption)}</p>' if caption else ""
    return _section(title, f'{quiet}<div class="chart" id="{name}" role="img" aria-label="{escape(title)}"></div>')


def _pair(left: str, right: str) -> str:
    return f'<div class="pair">{left}{right}</div>' if left and right else left + right


def _table(runs: Sequence[Recording]) -> str:
    records = [run.record for run in runs]
    head = "".join(f"<th>{escape(name)}</th>" for name in header(records))
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in cells(records))
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _slow(runs: Sequence[Recording]) -> str:
    said = [(run.record.label, words(run)) for run in runs]
    return "".join(f"<p><b>{escape(label)}.</b> {escape(' '.join(lines))}</p>" for label, lines in said if lines)


def _settings(story: Story) -> str:
    first = story.recordings[0].record
    rows = [
        ("command", f"<code>{escape(story.command)}</code>" if story.command else ""),
        ("made", escape(story.made)),
        ("seed", escape(str(first.seed))),
        ("task", escape(str(first.task))),
        ("delays", escape(str(first.delay))),
        ("versions", escape(", ".join(f"{name} {version}" for name, version in story.versions.items()))),
    ]
    for run in story.recordings:
        settings = ", ".join(f"{key}={value}" for key, value in run.record.settings.items())
        went = f"; vectors went through {' and '.join(run.record.carriers)}" if run.record.carriers else ""
        rows.append((escape(run.record.label), escape((settings or "no settings") + went)))
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in rows if value) + "</dl>"


def _file(name: str) -> str:
    return files("offbeat.report").joinpath(name).read_text(encoding="utf-8")
