"""Data that do not come with the package: where they may lie, how they come there, whether they are the right ones."""

from __future__ import annotations

import gzip
import hashlib
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Dataset:
    """Files by their names, each with the sha256 of what is in it, unpacked.

    ``packaged``: where a system package puts them. ``how``: the command that brings them. ``made``: where the package
    has them in a form of its own, the files of that form there, and what makes ours of them.
    """

    name: str
    files: Mapping[str, str]
    packaged: Path
    how: str
    made: tuple[tuple[str, ...], Callable[[], bytes]] | None = None

    def place(self, folder: Path | None) -> Path:
        """The folder that has them: the one that was named, or the package's. A ValueError says how to get them."""
        looked = [self.packaged] if folder is None else [folder, self.packaged]
        for place in looked:
            if all((place / file).is_file() for file in self.files):
                return place
        if self.made is not None and all((self.packaged / file).is_file() for file in self.made[0]):
            return self.packaged
        missing = next(file for file in self.files if not (looked[0] / file).is_file())
        raise ValueError(
            f"{self.name} is in none of {', '.join(map(str, looked))} ({missing} is missing); `{self.how}` brings it, "
            "or name its folder: --data DIR"
        )

    def read(self, place: Path, file: str) -> bytes:
        """What is in a file, unpacked and checked."""
        try:
            is_made = self.made is not None and not (place / file).is_file()
            unpacked = self.made[1]() if self.made and is_made else gzip.decompress((place / file).read_bytes())
        except (OSError, EOFError, subprocess.CalledProcessError) as error:
            raise ValueError(f"{place / file} cannot be unpacked ({error}); bring it anew: `{self.how}`") from None
        seen, wanted = hashlib.sha256(unpacked).hexdigest(), self.files[file]
        if seen != wanted:
            raise ValueError(
                f"{place / file} is not that of {self.name}: its sha256 is {seen[:16]}… instead of {wanted[:16]}…; "
                f"bring it anew: `{self.how}`"
            )
        return unpacked


FASHION = Dataset(
    "Fashion-MNIST",
    {
        "train-images-idx3-ubyte.gz": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels-idx1-ubyte.gz": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images-idx3-ubyte.gz": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels-idx1-ubyte.gz": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
    Path("/usr/share/datasets/fashion-mnist"),
    "apt-get install dataset-fashion-mnist",
)


@cache
def fashion(place: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of 28 × 28 pixels, as bytes, and their labels: 60,000 to train on, 10,000 held out."""

    def part(name: str) -> tuple[Tensor, Tensor]:
        images, labels = (FASHION.read(place, f"{name}-{what}-ubyte.gz") for what in ("images-idx3", "labels-idx1"))
        pixels = torch.from_numpy(np.frombuffer(images, np.uint8)[16:].reshape(-1, 784).copy())
        return pixels, torch.from_numpy(np.frombuffer(labels, np.uint8)[8:].astype(np.int64))

    return (*part("train"), *part("t10k"))


def scaled(pixels: Tensor) -> Tensor:
    """Bytes as numbers around 0, by the mean and the deviation of all pixels of Fashion-MNIST."""
    return (pixels.float() / 255 - 0.286) / 0.353


# Verses


def _verses() -> bytes:
    """Each verse of the King James version, a tab, and the same of the Reina-Valera of 1909, without notes and
    headings, where neither is 2.2 times as long as the other.
    """
    english, spanish = (_of_module(module) for module in ("engKJV2006eb", "spaRV1909eb"))
    pairs = [(english[place], spanish[place]) for place in english if place in spanish]
    kept = [(a, b) for a, b in pairs if max(len(a), len(b)) <= 2.2 * min(len(a), len(b))]
    return "".join(f"{a}\t{b}\n" for a, b in kept).encode()


def _of_module(module: str) -> dict[str, str]:
    told = subprocess.run(["mod2imp", module], capture_output=True, check=True, text=True, encoding="utf-8").stdout
    plain: dict[str, str] = {}
    for entry in told.split("$$$")[1:]:
        place, _, marked = entry.partition("\n")
        text = re.sub(r"<[^>]*>|¶", "", re.sub(r"<(note|title)\b.*?</\1>", "", marked, flags=re.DOTALL))
        if not place.endswith(":0") and ":" in place and text.strip():
            plain[place] = " ".join(text.split())
    return plain


VERSES = Dataset(
    "English and Spanish verses",
    {"verses.txt.gz": "46c7bed7a6c13a1edc525567f6016212f0a9a696ff2c7c79c3086a909d8c3f0c"},
    Path("/usr/share/sword"),
    "apt-get install libsword-utils sword-text-kjv sword-text-sparv",
    (("mods.d/engKJV2006eb.conf", "mods.d/spaRV1909eb.conf"), _verses),
)


@cache
def verses(place: Path | None) -> str:
    """English, a tab, and Spanish on each line: 31,034 verses, or without a place the 915 of the Proverbs."""
    if place is not None:
        return VERSES.read(place, "verses.txt.gz").decode()
    return gzip.decompress(files("offbeat.experiments").joinpath("data", "proverbs.txt.gz").read_bytes()).decode()
