"""The study in one picture: every cell a dot, by what a message costs.

    python benchmarks/plot.py records/study.json records/study-fashion.json … docs/images/study.svg

On the left the loss of self_clocked at equal time over that of the cell's best rival, on the right the share of the
time after which it has reached that rival's final loss (dots at the upper edge: it has not). The lines are medians.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import NamedTuple

from cells import DEFAULT, MESSAGES, RIVALS, Cell

WIDTH, HEIGHT, LEFT, TOP, FOOT, GAP = 860, 360, 52, 46, 64, 70
COLOURS = {"digits": "#2b6cb0", "fashion": "#c05621", "verses": "#2f855a"}
NAMES = {"digits": "digits", "fashion": "Fashion-MNIST", "verses": "Transformer on verses"}
WORDS = {0.0: "free", 0.5: "0.5 steps", 2.0: "2 steps", 8.0: "8 steps"}


class Dot(NamedTuple):
    cell: Cell
    loss: float  # over the best rival's
    time: float  # to the best rival's loss, as a share of all


def dots(paths: list[str]) -> list[Dot]:
    rows = [row for path in paths for row in json.loads(Path(path).read_text())["rows"] if "tuning" in row]
    by_cell: dict[Cell, dict[str, dict[str, object]]] = {}
    for row in rows:
        by_cell.setdefault(Cell(**row["cell"]), {})[row["method"]] = row
    return [_dot(cell, found) for cell, found in by_cell.items() if DEFAULT in found and cell.ends == "time"]


def _dot(cell: Cell, found: dict[str, dict[str, object]]) -> Dot:
    def final(name: str) -> float:
        losses = found[name]["losses"]
        assert isinstance(losses, list)
        return statistics.median(math.inf if loss is None else loss for loss in losses)

    reached = found[DEFAULT]["to_rival"]
    best = min(final(name) for name in found if name in RIVALS)
    return Dot(cell, final(DEFAULT) / best, reached if isinstance(reached, float) else math.inf)


def panel(at: float, width: float, title: str, values: list[tuple[Dot, float]], low: float, high: float) -> list[str]:
    """One picture, its height logarithmic from ``low`` to ``high``."""
    bottom, column = HEIGHT - FOOT, width / len(MESSAGES)

    def y(value: float) -> float:
        share = math.log(min(max(value, low), high) / low) / math.log(high / low)
        return bottom - share * (bottom - TOP)

    out = [f'<text x="{at:.0f}" y="{TOP - 20}" class="title">{title}</text>']
    for tick in (0.3, 0.4, 0.5, 0.6, 0.8, 1.0):
        if low <= tick <= high:
            dash = "" if tick == 1.0 else ' stroke-dasharray="2 4"'
            out.append(
                f'<line x1="{at:.0f}" x2="{at + width:.0f}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" class="grid"{dash}/>'
            )
            out.append(f'<text x="{at - 8:.0f}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for k, message in enumerate(MESSAGES):
        mine = sorted([(v, d) for d, v in values if d.cell.message == message], key=lambda one: one[0])
        middle = at + (k + 0.5) * column
        out.append(f'<text x="{middle:.0f}" y="{bottom + 20}" text-anchor="middle">{WORDS[message]}</text>')
        for number, (value, dot) in enumerate(mine):
            x = middle + (number - (len(mine) - 1) / 2) * min(9.0, 0.8 * column / max(len(mine), 1))
            said = f"{dot.cell}: {'not reached' if math.isinf(value) else f'{value:.2f}'}"
            out.append(
                f'<circle cx="{x:.1f}" cy="{y(value):.1f}" r="4" fill="{COLOURS[dot.cell.task]}" fill-opacity="0.75">'
                f"<title>{said}</title></circle>"
            )
        if mine:
            half = statistics.median(value for value, _ in mine)
            ends = middle - 0.42 * column, middle + 0.42 * column
            out.append(
                f'<line x1="{ends[0]:.0f}" x2="{ends[1]:.0f}" y1="{y(half):.1f}" y2="{y(half):.1f}" class="median"/>'
            )
    out.append(f'<text x="{at + width / 2:.0f}" y="{bottom + 40}" text-anchor="middle">a message takes</text>')
    return out


def picture(found: list[Dot]) -> str:
    width = (WIDTH - 2 * LEFT - GAP + 30) / 2
    parts = panel(LEFT, width, "Loss at equal time, over the best rival's", [(d, d.loss) for d in found], 0.35, 1.45)
    second = LEFT + width + GAP
    parts += panel(second, width, "Time to the best rival's final loss", [(d, d.time) for d in found], 0.25, 1.1)
    for k, (task, colour) in enumerate(COLOURS.items()):
        x = LEFT + 10 + 170 * k
        parts.append(f'<circle cx="{x}" cy="{HEIGHT - 10}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 10}" y="{HEIGHT - 6}">{NAMES[task]}</text>')
    style = (
        "text{font:12px system-ui,sans-serif;fill:#444}.title{font-size:14px;font-weight:600;fill:#222}"
        ".grid{stroke:#bbb}.median{stroke:#222;stroke-width:2}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
    title = "<title>self_clocked against the best rival of each cell, by what a message costs</title>"
    return "\n".join(
        [
            head,
            title,
            f"<style>{style}</style>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", help="files of the study's figures")
    parser.add_argument("picture", help="where the picture goes")
    chosen = parser.parse_args()
    Path(chosen.picture).write_text(picture(dots(chosen.records)))


if __name__ == "__main__":
    main()
