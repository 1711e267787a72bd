"""What is coded or decoded together with a sum or a division has the bits that it has by itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from offbeat.tensors import codec

LONG = 3 * 2**17 + 77  # several strips, and a bucket that is not full
TERMS = ["own theirs", "theirs own", "theirs theirs", "own theirs theirs", "theirs own theirs", "own", "theirs"]


def numbers(seed: int, n: int) -> Tensor:
    """So many that are halfway between two levels."""
    return (torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 4).round() / 4


def added(terms: list[Tensor], n: int, c: codec.Codec) -> Tensor:
    total = torch.zeros(0)
    for term in terms:
        read = c.decode(term, torch.empty(n)) if term.dtype == torch.uint8 else term
        total = total + read if total.numel() else read
    return total


@pytest.mark.parametrize("bucket", [512, 300])
@pytest.mark.parametrize("n", [1, 1000, LONG])
@pytest.mark.parametrize("words", TERMS)
def test_a_sum_is_coded_as_if_it_had_been_made_before(words: str, n: int, bucket: int) -> None:
    c, drawn = codec.int8(bucket), [numbers(k, n) + 1 for k in range(3)]
    terms = [x if word == "own" else c.encode(x, ()) for word, x in zip(words.split(), drawn, strict=False)]
    before, message = [t.clone() for t in terms], torch.empty(c.message_bytes(n, 4), dtype=torch.uint8)
    assert codec.encode_sum(c, terms, n, message)
    assert torch.equal(message, c.encode(added(terms, n, c), ()))
    assert all(torch.equal(a, b) for a, b in zip(before, terms, strict=True)), "what was added has changed"


@pytest.mark.parametrize("at", [0, LONG - 400])
@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_a_sum_with_an_empty_or_broken_bucket_must_be_made(at: int, bad: float) -> None:
    c, x = codec.int8(), numbers(0, LONG) + 1
    x[at // 512 * 512 :][:512] = bad
    message = torch.empty(c.message_bytes(LONG, 4), dtype=torch.uint8)
    assert not codec.encode_sum(c, [x], LONG, message)


@pytest.mark.parametrize("c", [codec.bf16(), codec.qsgd(8), codec.qsgd(4), codec.topk()], ids=lambda c: str(c.name))
def test_other_codecs_make_the_sum_before(c: codec.Codec) -> None:
    message = torch.empty(c.message_bytes(512, 4), dtype=torch.uint8)
    assert not codec.encode_sum(c, [numbers(0, 512), c.encode(numbers(1, 512), (1,))], 512, message)


@pytest.mark.parametrize("divisor", [1, 2, 3, 4, 6, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "c", [codec.bf16(), codec.fp16(), codec.int8(), codec.int8(300), codec.qsgd(8), codec.qsgd(4)], ids=str
)
def test_what_is_decoded_and_divided_has_the_bits_of_one_after_the_other(
    c: codec.Codec, dtype: torch.dtype, divisor: int
) -> None:
    x = numbers(0, LONG).to(dtype)
    message = c.encode(x, (1,))
    assert torch.equal(codec.decode_into(c, message, torch.empty_like(x), divisor), c.decode(message, x) / divisor)
