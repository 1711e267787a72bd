"""Data that do not come with the package: where they may lie, how they come there, whether they are the right ones."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Dataset:
    """Files by their names, each with the sha256 of what is in it, unpacked.

    ``packaged``: where a system package puts them. ``how``: the command that brings them.
    """

    name: str
    files: Mapping[str, str]
    packaged: Path
    how: str

    def place(self, folder: Path | None) -> Path:
        """The folder that has them: the one that was named, or the package's. A ValueError says how to get them."""
        looked = [self.packaged] if folder is None else [folder, self.packaged]
        for place in looked:
            if all((place / file).is_file() for file in self.files):
                return place
        missing = next(file for file in self.files if not (looked[0] / file).is_file())
        raise ValueError(
            f"{self.name} is in none of {', '.join(map(str, looked))} ({missing} is missing); `{self.how}` brings it, "
            "or name its folder: --data DIR"
        )

    def read(self, place: Path, file: str) -> bytes:
        """What is in a file, unpacked and checked."""
        try:
            unpacked = gzip.decompress((place / file).read_bytes())
        except (OSError, EOFError) as error:
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
