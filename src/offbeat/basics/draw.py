"""Random choices that every worker makes alike, without talking.

A draw is a pure function of a key such as ``(seed, step, rank)``. There is no stream to fall out of step with: asking
twice gives the same answer, and asking in another order changes nothing. (A shared stream goes wrong as soon as one
worker draws once more than another.)

Models draw from the global generators, which are such streams: they are seeded anew for every batch (``for_batch``).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a draw itself needs none of them
    import torch

_WORD = (1 << 64) - 1
_MODEL = 0x6D6F64  # so that no other draw shares our keys


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
    import torch

    return torch.Generator(device=device).manual_seed(bits(*key) >> 1)


def for_batch(seed: int, rank: int, step: int, row: int = 0) -> int:
    """The seed of what a model draws for the samples from ``row`` on of batch ``step`` of worker ``rank``.

    Both worlds ask here, so it does not matter whose gradients are computed when, or together with whose.
    """
    return bits(_MODEL, seed, rank, step, row) >> 1


def reseed(seed: int, cuda: Sequence[int] = ()) -> None:
    """Seed the global generators of torch (CPU, and these CUDA devices), numpy and ``random``."""
    import numpy as np
    import torch

    # Not torch.manual_seed: where CUDA sleeps, that leaves an order behind to seed it when it wakes up.
    torch.default_generator.manual_seed(seed)
    for device in cuda:
        torch.cuda.default_generators[device].manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed every global generator, and put them all back afterwards. (CUDA's only if it is awake.)"""
    import numpy as np
    import torch

    cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else range(0)
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=list(cuda)):
            reseed(seed, cuda)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def cuda_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The CUDA devices on which some of these lie."""
    return sorted({t.get_device() for t in tensors if t.is_cuda})


def states() -> tuple[object, ...]:
    """Where Python's and numpy's generators stand: equal as long as nobody draws from them."""
    import numpy as np

    name, words, *rest = np.random.get_state()
    return random.getstate(), name, bytes(np.asarray(words)), *rest
