"""The plots of a report, as Plotly figures. Colours are those of Okabe and Ito; dashes and markers tell lines apart
without them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from offbeat.report.folder import Recording
from offbeat.runs.trace import Point

Figure = Any  # plotly is an extra, and has no types of its own

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#999999")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross")
PATTERNS = ("", "/", "x", ".", "\\", "-", "+")
HATCH = {"fillmode": "overlay", "fgcolor": "#ffffff", "fgopacity": 0.6, "size": 7}
MOST_POINTS = 300
MOST_BARS = 32
MOST_STALE = 16
INSTALL = "pip install 'offbeat[report]'"


def graph_objects() -> Any:
    """Plotly's figures; a sentence where it is not installed."""
    try:
        import plotly.graph_objects as go
    except ModuleNotFoundError:
        raise ValueError(f"the page needs Plotly, which is not installed; {INSTALL}") from None
    return go


def drawable() -> bool:
    """Whether Plotly is there."""
    return find_spec("plotly") is not None


def loss_over_time(runs: Sequence[Recording]) -> Figure | None:
    return _loss(runs, lambda p: p.time_s, "time (s)")


def loss_over_samples(runs: Sequence[Recording]) -> Figure | None:
    return _loss(runs, lambda p: p.samples, "samples seen by all workers")


def spread(runs: Sequence[Recording]) -> Figure | None:
    """On a logarithmic axis; replicas that are equal throughout have no line."""
    figure = _lines(runs, "spread", lambda p: p.time_s, "time (s)", "mean ‖x_i − x̄‖²", least=1e-9)
    if figure is not None:
        figure.update_yaxes(type="log", exponentformat="power", dtick=1)
    return figure


def period(runs: Sequence[Recording]) -> Figure | None:
    figure = _lines(runs, "period", lambda p: p.time_s, "time (s)", "steps between averages", shape="hv")
    if figure is not None:
        figure.update_yaxes(rangemode="tozero")
    return figure


def waiting(runs: Sequence[Recording]) -> Figure | None:
    """Seconds each worker waited: bars, or lines where there are too many workers for bars."""
    go = graph_objects()
    figure = _figure("rank", "waiting (s)")
    for number, run in _with(runs, lambda r: bool(r.wait_s)):
        ranks = list(range(len(run.wait_s)))
        if len(ranks) > MOST_BARS:
            figure.add_trace(go.Scatter(x=ranks, y=_rounded(run.wait_s), name=run.record.label, line=_line(number)))
        else:
            figure.add_trace(go.Bar(x=ranks, y=_rounded(run.wait_s), name=run.record.label, marker=_bar(number)))
    figure.update_layout(barmode="group")
    figure.update_xaxes(dtick=1 if max((len(r.wait_s) for r in runs), default=0) <= MOST_BARS else None)
    return figure if figure.data else None


def staleness(runs: Sequence[Recording]) -> Figure | None:
    """How old the contributions to the rounds were, as shares of all contributions."""
    go = graph_objects()
    figure = _figure("rounds old", "share of contributions")
    for number, run in _with(runs, lambda r: bool(r.trace.rounds)):
        counts = Counter(min(s, MOST_STALE) for r in run.trace.rounds for s in r.staleness.values() if s >= 0)
        total = sum(counts.values())
        if total:
            ages = range(max(counts) + 1)
            shares = [round(counts[age] / total, 4) for age in ages]
            names = [str(age) if age < MOST_STALE else f"{MOST_STALE}+" for age in ages]
            figure.add_trace(go.Bar(x=names, y=shares, name=run.record.label, marker=_bar(number)))
    figure.update_layout(barmode="group", yaxis_tickformat=".0%", xaxis_type="category")
    return figure if figure.data else None


def wire(runs: Sequence[Recording]) -> Figure | None:
    """Bytes sent by all workers."""
    go = graph_objects()
    figure = _figure("", "MB sent by all workers")
    labels = [run.record.label for run in runs]
    sent = [round(run.record.wire_bytes / 1e6, 4) for run in runs]
    patterns = [PATTERNS[k % len(PATTERNS)] for k in range(len(runs))]
    colours = [COLOURS[k % len(COLOURS)] for k in range(len(runs))]
    marker = {"color": colours, "pattern": {"shape": patterns, **HATCH}}
    text = [f"{mb:.3g}" for mb in sent]
    bars = go.Bar(x=labels, y=sent, marker=marker, text=text, textposition="outside", cliponaxis=False)
    figure.add_trace(bars)
    return figure


def _loss(runs: Sequence[Recording], x: Callable[[Point], float], x_title: str) -> Figure | None:
    figure = _lines(runs, "loss", x, x_title, "training loss", smooth=True)
    if figure is not None and all(y > 0 for line in figure.data for y in line.y):
        figure.update_yaxes(type="log", tickformat="~g", dtick="D2")
    return figure


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most ``most`` points: the means of neighbours. What is not a number is left out."""
    good = [p for p in points if math.isfinite(p.value)]
    if len(good) <= most:
        return good
    size = math.ceil(len(good) / most)
    groups = [good[k : k + size] for k in range(0, len(good), size)]
    return [
        Point(
            sum(p.time_s for p in group) / len(group),
            sum(p.samples for p in group) // len(group),
            sum(p.value for p in group) / len(group),
        )
        for group in groups
    ]


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Each value as the mean of those before it, over a twentieth of the run."""
    good = [p for p in points if math.isfinite(p.value)]
    width = max(len(good) // 20, 1)
    means, total = [], 0.0
    for k, p in enumerate(good):
        total += p.value - (good[k - width].value if k >= width else 0.0)
        means.append(p._replace(value=total / min(k + 1, width)))
    return means


def _lines(
    runs: Sequence[Recording],
    name: str,
    x: Callable[[Point], float],
    x_title: str,
    y_title: str,
    least: float = -math.inf,
    shape: str = "linear",
    smooth: bool = False,
) -> Figure | None:
    go = graph_objects()
    figure = _figure(x_title, y_title)
    for number, run in _with(runs, lambda r: bool(r.trace.series.get(name))):
        series = run.trace.series[name]
        points = [p for p in thinned(smoothed(series) if smooth else series) if p.value > least]
        if not points:
            continue
        every = max(len(points) // 8, 1)  # a marker now and then tells lines apart, one at each point would hide them
        sizes = [7 if k % every == every // 2 else 0 for k in range(len(points))]
        figure.add_trace(
            go.Scatter(
                x=_rounded([x(p) for p in points]),
                y=[float(f"{p.value:.5g}") for p in points],
                name=run.record.label,
                mode="lines+markers",
                line={**_line(number), "shape": shape},
                marker={"size": sizes, "symbol": MARKERS[number % len(MARKERS)], "line": {"width": 0}},
            )
        )
    return figure if figure.data else None


def _figure(x_title: str, y_title: str) -> Figure:
    figure = graph_objects().Figure()
    figure.update_layout(
        template="none",
        margin={"l": 56, "r": 12, "t": 24, "b": 44},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0},
        hovermode="closest",
        font={"family": "system-ui, sans-serif", "size": 13},
    )
    figure.update_xaxes(title=x_title, zeroline=False)
    figure.update_yaxes(title={"text": y_title, "standoff": 8}, zeroline=False, automargin=True)
    return figure


def _with(runs: Sequence[Recording], has: Callable[[Recording], bool]) -> list[tuple[int, Recording]]:
    """Those that have something to show, with their numbers: a method looks the same in every plot."""
    return [(number, run) for number, run in enumerate(runs) if has(run)]


def _line(number: int) -> dict[str, object]:
    return {"color": COLOURS[number % len(COLOURS)], "dash": DASHES[number % len(DASHES)], "width": 2}


def _bar(number: int) -> dict[str, object]:
    shape = PATTERNS[number % len(PATTERNS)]
    return {"color": COLOURS[number % len(COLOURS)], "pattern": {"shape": shape, **HATCH}}


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]
