"""Random choices that every worker makes alike, without talking.

A draw is a pure function of a key such as ``(seed, step, rank)``. There is no stream to fall out of step with: asking
twice gives the same answer, and asking in another order changes nothing. (A shared stream goes wrong as soon as one
worker draws once more than another.)
"""

from __future__ import annotations

import random

import torch

_WORD = (1 << 64) - 1


def bits(*key: int) -> int:
    """64 well-mixed bits for this key (splitmix64, one round for each part of the key)."""
    z = 0x9E3779B97F4A7C15
    for part in key:
        z = (z ^ (part & _WORD)) & _WORD
        z = (z + 0x9E3779B97F4A7C15) & _WORD
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
        z ^= z >> 31
    return z


def uniform(*key: int) -> float:
    """A number in [0, 1)."""
    return (bits(*key) >> 11) * 2.0**-53


def below(n: int, *key: int) -> int:
    """A whole number in 0 … n − 1."""
    return (bits(*key) * n) >> 64


def sample(n: int, k: int, *key: int) -> tuple[int, ...]:
    """``k`` different numbers out of 0 … n − 1, ascending."""
    return tuple(sorted(random.Random(bits(*key)).sample(range(n), k)))


def permutation(n: int, *key: int) -> tuple[int, ...]:
    """The numbers 0 … n − 1 in a drawn order."""
    order = list(range(n))
    random.Random(bits(*key)).shuffle(order)
    return tuple(order)


def generator(*key: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch generator that belongs to this key alone."""
    return torch.Generator(device=device).manual_seed(bits(*key) >> 1)
