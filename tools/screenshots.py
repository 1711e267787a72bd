"""Photographs the page of a report for the documentation: ``python tools/screenshots.py``, which needs Chromium.

The commands are those that ``docs/reading-the-report.md`` shows. The picture carries a digest of the page it was taken
of, without its numbers; ``tests/house/test_pictures.py`` makes the page anew and fails when the picture is older.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

from offbeat.cli import main as offbeat

DOCS = Path(__file__).parent.parent / "docs"
PICTURE = DOCS / "images" / "report.png"
WIDTH, HEIGHT = 1100, 1660  # pixels
KEY = b"page"


def report(folder: Path) -> Path:
    """The page that the first command of the documentation writes."""
    text = (DOCS / "reading-the-report.md").read_text(encoding="utf-8")
    command = re.search(r"^\$ offbeat (compare .*--report (\S+).*)$", text, re.MULTILINE)
    assert command is not None
    before = Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            code = offbeat(shlex.split(command[1]))
    finally:
        os.chdir(before)
    if code:
        sys.exit(f"offbeat {command[1]} ended with {code}")
    return folder / command[2] / "report.html"


def digest(page: Path) -> str:
    """Of all that is on a page but its numbers, which another processor rounds otherwise, and Plotly itself."""
    scripts = re.split("(?=<script)", page.read_text(encoding="utf-8"))
    ours = "".join(part for part in scripts if "plotly.js v" not in part[:80])
    facts = re.sub(r"<dl.*?</dl>", "", ours, flags=re.DOTALL)  # date and versions
    return hashlib.sha256(re.sub(r"-?\d+(\.\d+)?(e[-+]?\d+)?", "#", facts).encode()).hexdigest()


def digest_in(picture: Path) -> str | None:
    """What a picture says of the page it was taken of."""
    for kind, content in _chunks(picture.read_bytes()):
        if kind == b"tEXt" and content.startswith(KEY + b"\0"):
            return content[len(KEY) + 1 :].decode()
    return None


def _chunks(png: bytes) -> list[tuple[bytes, bytes]]:
    at, found = 8, []
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        found.append((png[at + 4 : at + 8], png[at + 8 : at + 8 + length]))
        at += length + 12
    return found


def _png(chunks: list[tuple[bytes, bytes]]) -> bytes:
    packed = [
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def main() -> int:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("no Chromium found; install one")
    with tempfile.TemporaryDirectory() as folder:
        page, raw = report(Path(folder)), Path(folder, "raw.png")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        look = [f"--user-data-dir={folder}/profile", f"--window-size={WIDTH},{HEIGHT}", "--virtual-time-budget=5000"]
        command = [browser, *flags, *look, "--hide-scrollbars", f"--screenshot={raw}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True)
        head, *rest = _chunks(raw.read_bytes())
        PICTURE.write_bytes(_png([head, (b"tEXt", KEY + b"\0" + digest(page).encode()), *rest]))
    print(f"wrote {PICTURE.relative_to(DOCS.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
