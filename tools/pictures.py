"""Draws the pictures of the documentation that are made from runs: ``python tools/pictures.py`` writes them anew.

The timeline is of a simulation, the bars are of what ``docs/demo.md`` shows of real processes.
``tests/house/test_pictures.py`` fails when a picture is no longer what its run gives.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import offbeat as ob
from offbeat.runs.trace import Span

DOCS = Path(__file__).parent.parent / "docs"
IMAGES = DOCS / "images"
COLOURS = {"delay": "#f59e0b", "compute": "#3b82f6", "wait": "#e5e7eb", "communicate": "#6366f1"}
WORDS = {"delay": "late", "compute": "computes", "wait": "waits", "communicate": "talks in the open"}
WORKERS, STEPS = 6, 8
LEFT, WIDTH, ROW, TOP = 84, 800, 20, 34  # pixels


def timeline() -> str:
    """Six workers, another one late in each step: in step, and with the default."""
    runs = [
        ob.simulate(
            method,
            None,
            workers=WORKERS,
            steps=STEPS,
            parameters=1_000_000,
            compute_s=0.1,
            delays=ob.delays.random(ranks=1, seconds=0.3),
            spans=True,
        )
        for method in (ob.allreduce(), ob.self_clocked())
    ]
    longest_s = max(run.seconds for run in runs)
    panels, height = [], 0
    for run, title in zip(runs, ("in step, as DDP (allreduce)", "the default (self_clocked)"), strict=True):
        panels.append(_panel(run.trace.spans, f"{title}: {run.seconds:.1f} s", height, longest_s))
        height += TOP + WORKERS * ROW + 14
    panels.append(_legend(height + 16))
    height += 34
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 16} {height}" '
            'font-family="system-ui, sans-serif" font-size="14" fill="#1f2933" role="img">',
            "<title>What six workers do over time, when another one is late in each step</title>",
            f'<rect width="{LEFT + WIDTH + 16}" height="{height}" fill="#fff"/>',
            *panels,
            "</svg>\n",
        ]
    )


def _panel(spans: Sequence[Span], title: str, y: int, longest_s: float) -> str:
    lines = [f'<text x="8" y="{y + 22}" font-weight="bold">{title}</text>']
    for rank in range(WORKERS):
        lines.append(f'<text x="8" y="{y + TOP + rank * ROW + 14}" fill="#52606d" font-size="13">worker {rank}</text>')
    for span in spans:
        x, end = (LEFT + WIDTH * seconds / longest_s for seconds in (span.start_s, span.end_s))
        lines.append(
            f'<rect x="{x:.1f}" y="{y + TOP + span.rank * ROW + 2}" width="{max(end - x, 0.4):.1f}" '
            f'height="{ROW - 5}" fill="{COLOURS[span.doing]}"/>'
        )
    return "\n".join(lines)


def _legend(y: int) -> str:
    parts = []
    for place, (doing, colour) in enumerate(COLOURS.items()):
        x = LEFT + 150 * place
        parts.append(f'<rect x="{x}" y="{y - 11}" width="22" height="13" fill="{colour}"/>')
        parts.append(f'<text x="{x + 28}" y="{y}" font-size="13">{WORDS[doing]}</text>')
    return "\n".join(parts)


def demo() -> str:
    """Each method's time in the first part of the demo, and how much of it was waiting, as its page shows them."""
    page = (DOCS / "demo.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^(\S+(?: \(torch\))?) +([\d.]+) s +([\d.]+)× +([\d.]+)%", page.partition("```text")[2], re.MULTILINE
    )
    rows = rows[: [name for name, *_ in rows].index("self_clocked") + 1]  # the second part comes behind it
    longest_s, left, width, row = max(float(s) for _, s, *_ in rows), 120, 640, 30
    lines = []
    for place, (name, seconds, speed_up, waiting) in enumerate(rows):
        y, whole = 44 + place * row, width * float(seconds) / longest_s
        waits = whole * float(waiting) / 100
        lines += [
            f'<text x="{left - 8}" y="{y + 16}" text-anchor="end">{name}</text>',
            f'<rect x="{left}" y="{y}" width="{whole - waits:.1f}" height="22" fill="{COLOURS["compute"]}"/>',
            f'<rect x="{left + whole - waits:.1f}" y="{y}" width="{waits:.1f}" height="22" fill="#cbd5e1"/>',
            f'<text x="{left + whole + 8:.1f}" y="{y + 16}">{seconds} s, {speed_up}×</text>',
        ]
    height = 44 + len(rows) * row + 34
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 130} {height}" '
            'font-family="system-ui, sans-serif" font-size="14" fill="#1f2933" role="img">',
            "<title>What each method takes for the same 400 batches, when another worker is late in each step</title>",
            f'<rect width="{left + width + 130}" height="{height}" fill="#fff"/>',
            '<text x="8" y="26" font-weight="bold">four processes, another one late by 100 ms in each step</text>',
            *lines,
            f'<rect x="{left}" y="{height - 24}" width="22" height="13" fill="{COLOURS["compute"]}"/>',
            f'<text x="{left + 28}" y="{height - 13}" font-size="13">computes, or is late</text>',
            f'<rect x="{left + 190}" y="{height - 24}" width="22" height="13" fill="#cbd5e1"/>',
            f'<text x="{left + 218}" y="{height - 13}" font-size="13">waits</text>',
            "</svg>\n",
        ]
    )


PICTURES = {"timeline.svg": timeline, "demo.svg": demo}


def main() -> int:
    for name, drawn in PICTURES.items():
        (IMAGES / name).write_text(drawn(), encoding="utf-8")
        print(f"wrote docs/images/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
