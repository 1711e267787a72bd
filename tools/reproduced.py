"""The tables of docs/reproduce.md, made from the records of full runs.

``python tools/reproduced.py`` rewrites what stands between the page's two marks; with ``--check`` it only says whether
that is up to date. A record is what ``offbeat reproduce NAME`` has written: ``results.json`` and ``table.md``, kept as
``records/reproduce-NAME.json`` and ``.txt``.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offbeat.experiments import EXPERIMENTS
from offbeat.experiments.experiment import ALL_IN_ONE
from offbeat.experiments.telling import missed, not_there

ROOT = Path(__file__).parent.parent
PAGE, RECORDS = ROOT / "docs" / "reproduce.md", ROOT / "records"
HEADS = ("case", "what", "ours", "over", "the paper", "to reach", "here (least … most)", "")
BEGIN, END = "<!-- results: made by tools/reproduced.py from the records -->", "<!-- results: end -->"


def page(text: str) -> str:
    """The page with its tables as the records have them."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{results()}\n{END}{after}"


def results() -> str:
    """A section for each experiment of which there is a record, and one for the default in all of them."""
    files = [file for name in EXPERIMENTS if (file := RECORDS / f"reproduce-{name}.json").exists()]
    records = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return "\n".join([all_in_one(records), *map(section, records)])


def all_in_one(records: Sequence[dict[str, Any]]) -> str:
    """``self_clocked`` in every experiment, beside the best of the others."""
    rows = [
        (record["experiment"], *_row(claim)[:2], *_row(claim)[5:])
        for record in records
        for claim in record["claims"]
        if claim["method"] == ALL_IN_ONE
    ]
    met = sum(row[-1] == "met" for row in rows)
    return "\n".join(
        [
            "## all-in-one",
            "",
            f"`{ALL_IN_ONE}` with its defaults, but for the rate, which is searched for as everybody's, against the "
            f"best of the others in each experiment: {met} of {len(rows)} met.",
            "",
            *_table(("experiment", *HEADS[:2], *HEADS[5:]), rows),
            "",
        ]
    )


def section(record: dict[str, Any]) -> str:
    """What one record says: the claim, what was changed here, and every row."""
    name = record["experiment"]
    injected = "; ".join(of["injected"] for of in record["cases"] if of["injected"]) or "nothing"
    rows = [_row(claim) for claim in record["claims"] if claim["method"] != ALL_IN_ONE]
    lines = [f"## {name}", "", f"*The paper's claim:* {record['claim']}.", ""]
    lines += [f"*Here:* {record['here']} *Injected:* {injected}.", ""]
    lines += _table(HEADS, rows)
    machine = ", ".join(f"{what} {version}" for what, version in record["versions"].items())
    lines += [
        "",
        f"`{record['command']}`, {record['made'][:10]}, {machine}; all figures: `records/reproduce-{name}.txt`.",
        "",
    ]
    return "\n".join(lines)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(row)} |" for row in (heads, *rows)]
    return [lines[0].replace("|  |", "| |"), "| --- " * len(heads) + "|", *lines[1:]]


def _row(claim: dict[str, Any]) -> tuple[str, ...]:
    values = [float("inf") if value is None else value for value in claim["values"]]
    here = f"{statistics.median(values):.3g} ({min(values):.3g} … {max(values):.3g})"
    here = here.replace("inf", not_there(claim["measure"]))
    outcome = "met" if claim["met"] else missed(claim["measure"], claim["missed_by"]).replace("missed", "**missed**")
    over = claim["over"]
    rivals = "the best of the others" if len(over) > 2 else " and ".join(over) or "–"
    return (claim["case"], claim["measure"], claim["method"], rivals, claim["paper"], claim["goal"], here, outcome)


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    made = page(text)
    if "--check" in sys.argv[1:]:
        if made != text:
            sys.exit("docs/reproduce.md is not as the records are; run: python tools/reproduced.py")
        return
    PAGE.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
