"""A small Transformer on the characters of English and Spanish verses: a task that a hundred steps do not solve.

    apt-get install libsword-utils sword-text-kjv sword-text-sparv
    python benchmarks/verses.py build/data                              writes build/data/verses.txt.gz, 2.5 MB

Each line is a verse of the King James version, a tab, and the same verse of the Reina-Valera of 1909 (both in the
public domain, but for a royal patent on printing the former in the United Kingdom), without notes and headings, where
neither is 2.2 times as long as the other. In small letters and one after the other they are the text; every tenth line
is held out, of which 1,024 rows are looked at. The model is character.py's: one layer of width 32, 32 characters at a
time, 8 rows a worker and step.
"""

from __future__ import annotations

import argparse
import gzip
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from character import CONTEXT, ROWS, Transformer, loss
from torch import Tensor, nn

import offbeat as ob
from offbeat.basics import draw

FILE, MODULES, RATIO, HELD_OUT_ROWS = "verses.txt.gz", ("engKJV2006eb", "spaRV1909eb"), 2.2, 1024


def verses(module: str) -> Iterator[tuple[str, str]]:
    """Each verse's place and its plain text."""
    told = subprocess.run(["mod2imp", module], capture_output=True, check=True, text=True).stdout
    for entry in told.split("$$$")[1:]:
        place, _, marked = entry.partition("\n")
        plain = re.sub(r"<[^>]*>|¶", "", re.sub(r"<(note|title)\b.*?</\1>", "", marked, flags=re.DOTALL))
        if not place.endswith(":0") and ":" in place and plain.strip():
            yield place, " ".join(plain.split())


def write(folder: Path) -> None:
    english, spanish = (dict(verses(module)) for module in MODULES)
    pairs = [(english[place], spanish[place]) for place in english if place in spanish]
    kept = [(a, b) for a, b in pairs if max(len(a), len(b)) <= RATIO * min(len(a), len(b))]
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"{a}\t{b}\n" for a, b in kept)
    (folder / FILE).write_bytes(gzip.compress(lines.encode(), mtime=0))
    print(f"{len(kept)} of {len(pairs)} pairs, {len(lines)} characters, in {folder / FILE}")


@cache
def text(folder: str) -> tuple[Tensor, Tensor, int]:
    """What is trained on, the held-out rows, and how many letters there are."""
    path = Path(folder) / FILE
    if not path.exists():
        raise ValueError(
            f"the verses are not in {folder} ({FILE} is missing); `python benchmarks/verses.py {folder}` writes them, "
            "with the packages that its first lines name, or name their folder with --data-folder"
        )
    lines = gzip.decompress(path.read_bytes()).decode().lower().replace("\t", "\n").splitlines(keepends=True)
    numbers = {letter: number for number, letter in enumerate(sorted(set("".join(lines))))}
    parts: tuple[list[str], list[str]] = ([], [])
    for place, line in enumerate(lines):
        parts[place // 2 % 10 == 9].append(line)
    train, held_out = (torch.from_numpy(_numbered("".join(part), numbers)) for part in parts)
    rows = held_out.unfold(0, CONTEXT + 1, CONTEXT)
    return train, rows[:: len(rows) // HELD_OUT_ROWS][:HELD_OUT_ROWS], len(numbers)


def _numbered(letters: str, numbers: dict[str, int]) -> np.ndarray:
    codes = np.frombuffer(letters.encode("utf-32-le"), np.uint32)
    table = np.zeros(codes.max() + 1, np.int64)
    for letter, number in numbers.items():
        table[ord(letter)] = number
    return table[codes]


def task(optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer], seed: int, folder: str) -> ob.Task:
    return ob.Task(
        model=partial(_model, folder),
        loss=loss,
        batch=partial(_batch, seed, folder),
        optimizer=optimizer,
        evaluate=partial(_evaluate, folder),
        name="verses",
    )


def _model(folder: str) -> nn.Module:
    return Transformer(text(folder)[2])


def _batch(seed: int, folder: str, rank: int, step: int) -> tuple[Tensor, Tensor]:
    train, _, _ = text(folder)
    starts = torch.randint(len(train) - CONTEXT, (ROWS,), generator=draw.generator(0x3E25, seed, rank, step))
    rows = train.unfold(0, CONTEXT + 1, 1)[starts]
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def _evaluate(folder: str, model: nn.Module) -> dict[str, float]:
    rows = text(folder)[1]
    output = model(rows[:, :-1])
    right = (output.argmax(dim=2) == rows[:, 1:]).double().mean().item()
    return {"loss": loss(output, rows[:, 1:]).item(), "accuracy": right}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)


if __name__ == "__main__":
    main()
