"""Samples that are their own numbers, and how often they were used."""

from __future__ import annotations

import itertools
from collections import Counter

from torch.utils.data import Dataset


class Numbers(Dataset[int]):
    """Every sample is its own number."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> int:
        return index


def together(told: list[list[int]]) -> Counter[int]:
    return Counter(itertools.chain.from_iterable(told))


def once(samples: int, epochs: int = 1) -> Counter[int]:
    return Counter(dict.fromkeys(range(samples), epochs))
