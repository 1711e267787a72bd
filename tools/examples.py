"""Runs the commands whose output the documentation shows, and writes what they print now.

A block of Markdown that begins with ``$ offbeat …`` and has lines under it is made anew; a command without output is
left alone. ``tests/house/test_docs.py`` fails when what is shown is no longer what is printed.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from offbeat.cli import main as offbeat

ROOT = Path(__file__).parent.parent
SHOWN = re.compile(r"^```console\n\$ offbeat (?P<words>.+)\n(?P<output>(?:(?!\$ |```).*\n)+)```$", re.MULTILINE)


def made_anew(match: re.Match[str]) -> str:
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(io.StringIO()) as said:
        code = offbeat(shlex.split(match["words"]))
    if code:
        sys.exit(f"offbeat {match['words']} ended with {code}: {said.getvalue().strip()}")
    lines = "\n".join(line.rstrip() for line in out.getvalue().splitlines())
    return f"```console\n$ offbeat {match['words']}\n{lines}\n```"


def main() -> int:
    os.environ["COLUMNS"] = "100"
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        text = page.read_text(encoding="utf-8")
        anew = SHOWN.sub(made_anew, text)
        if anew != text:
            page.write_text(anew, encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
