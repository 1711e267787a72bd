"""Draws pictures of the documentation: ``python tools/pictures.py`` writes them anew.

The timeline is of a simulation, the bars are of what ``docs/demo.md`` shows of real processes, the tree is ``LADDER``,
and the two hosts are ``HOSTS``.
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
WORDS = {"delay": "late", "compute": "computes", "wait": "waits", "communicate": "communicates"}
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


LADDER = (  # a question, and what to write after a yes
    ("Must the numbers be those of DDP?", '"allreduce"', "also: workers alike, a quick network, few samples"),
    ("Are bytes what you pay for?", '"local_sgd:period=8,codec=int8"', "one exchange in hundreds of steps: diloco"),
    ("Do batches differ much in cost?", '"nonblocking:micro=4"', "sequences of uneven length"),
    ("Are whole multi-GPU machines late?", '"eager:per_node=8"', "in step inside, waiting for nobody outside"),
    (
        "Are you free to change the data loader?",
        "no method, and ob.share(loader)",
        "no worker's share of data is fixed",
    ),
)


def tree() -> str:
    """Which method: questions from top to bottom, the answer to the right of the first yes."""
    row, box, answer_at, width = 76, 350, 450, 884
    height = len(LADDER) * row + 70
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" '
        'font-size="15" fill="#1f2933" role="img">',
        "<title>Which method: five questions, and what to write after the first yes</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for place, (question, answer, note) in enumerate(LADDER):
        y = 14 + place * row
        out += [
            f'<rect x="14" y="{y}" width="{box}" height="44" rx="8" fill="#eef2ff" stroke="#6366f1"/>',
            f'<text x="28" y="{y + 27}">{question}</text>',
            f'<path d="M{14 + box} {y + 22}H{answer_at - 10}m-8 -5l8 5l-8 5" fill="none" stroke="#52606d"/>',
            f'<text x="{(14 + box + answer_at) / 2 - 4}" y="{y + 16}" text-anchor="middle" fill="#52606d">yes</text>',
            f'<rect x="{answer_at}" y="{y}" width="{width - answer_at - 14}" height="44" rx="8" fill="#dbeafe" '
            'stroke="#3b82f6"/>',
            f'<text x="{answer_at + 14}" y="{y + 19}" font-weight="bold">{answer}</text>',
            f'<text x="{answer_at + 14}" y="{y + 36}" font-size="13" fill="#52606d">{note}</text>',
            f'<path d="M60 {y + 44}v{row - 44}m-5 -8l5 8l5 -8" fill="none" stroke="#52606d"/>',
            f'<text x="70" y="{y + 64}" fill="#52606d">no</text>',
        ]
    y = 14 + len(LADDER) * row
    out += [
        f'<rect x="14" y="{y}" width="{box}" height="44" rx="8" fill="#dbeafe" stroke="#3b82f6"/>',
        f'<text x="28" y="{y + 27}" font-weight="bold">ob.attach(optimizer, model)</text>',
        "</svg>\n",
    ]
    return "\n".join(out)


HOSTS = {  # what the workers of each do
    "host A": ("computes", "writes, reads", "frozen"),
    "host B": ("computes", "writes, reads", "computes"),
}
DUTIES = (
    "seats: who has arrived, who is late",
    "sums: made when somebody takes them",
    "codec: of what leaves the host",
)


def host() -> str:
    """Two hosts: workers write into slots of their host process, and host processes talk to each other."""
    tip = '<path d="M0 0L10 5L0 10z" fill="#52606d"/></marker></defs>'
    out = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 920 430" font-family="system-ui, sans-serif" '
        'font-size="14" fill="#1f2933" role="img">',
        "<title>Workers write into and read from slots of the host process; host processes talk over TCP</title>",
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6" markerHeight="6" '
        f'orient="auto-start-reverse">{tip}',
        '<rect width="920" height="430" fill="#fff"/>',
    ]
    for place, (name, workers) in enumerate(HOSTS.items()):
        x = 14 + 472 * place
        out += [
            f'<rect x="{x}" y="14" width="420" height="402" rx="12" fill="#f5f7fa" stroke="#9aa5b1"/>',
            f'<text x="{x + 18}" y="40" font-weight="bold" fill="#52606d">{name}</text>',
        ]
        for number, does in enumerate(workers):
            left, is_frozen = x + 18 + 132 * number, does == "frozen"
            colours = 'fill="#e4e7eb" stroke="#9aa5b1"' if is_frozen else 'fill="#dbeafe" stroke="#3b82f6"'
            rank = len(workers) * place + number
            out += [
                f'<rect x="{left}" y="56" width="120" height="62" rx="8" {colours}/>',
                f'<text x="{left + 60}" y="82" text-anchor="middle" font-weight="bold">worker {rank}</text>',
                f'<text x="{left + 60}" y="103" text-anchor="middle" font-size="12.5" fill="#52606d">{does}</text>',
            ]
            ways = ((72, 186, 120),) if is_frozen else ((48, 120, 186), (72, 186, 120))
            dashes = ' stroke-dasharray="4 4"' if is_frozen else ""
            looks = f'stroke="#52606d" stroke-width="2" marker-end="url(#tip)"{dashes}'
            out += [f'<path d="M{left + at} {begin}V{end}" {looks}/>' for at, begin, end in ways]
        out += [
            f'<rect x="{x + 18}" y="190" width="384" height="210" rx="8" fill="#fff" stroke="#6366f1"/>',
            f'<text x="{x + 30}" y="214" font-weight="bold" fill="#4338ca">host process: offbeat-host</text>',
            *[
                f'<rect x="{x + 30 + 62 * slot}" y="228" width="54" height="34" rx="4" '
                f'fill="{"#c7d2fe" if slot in (0, 1, 4) else "#eef2ff"}" stroke="#a5b4fc"/>'
                for slot in range(6)
            ],
            f'<text x="{x + 30}" y="282" font-size="13" fill="#52606d">slots in memory that all workers map</text>',
            *[f'<text x="{x + 44}" y="{314 + 26 * k}">•  {duty}</text>' for k, duty in enumerate(DUTIES)],
        ]
    out += [
        '<path d="M420 342H502" stroke="#52606d" stroke-width="2" marker-start="url(#tip)" marker-end="url(#tip)"/>',
        '<text x="461" y="330" font-size="13" text-anchor="middle" font-weight="bold" fill="#4338ca">TCP</text>',
        "</svg>\n",
    ]
    return "\n".join(out)


PICTURES = {"timeline.svg": timeline, "demo.svg": demo, "tree.svg": tree, "host.svg": host}


def main() -> int:
    for name, drawn in PICTURES.items():
        (IMAGES / name).write_text(drawn(), encoding="utf-8")
        print(f"wrote docs/images/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
