"""Codecs: what is lost, what is not, and how many bytes it takes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.tensors import codec

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LARGEST = [codec.topk(128, 512), codec.topk(128, 512, floats=True)]
ALL = [
    *(codec.bf16(), codec.fp16(), codec.int8(), codec.qsgd(2), codec.qsgd(5), codec.qsgd(8), codec.qsgd(16)),
    *LARGEST,
]
LEVELS = [codec.int8(bucket=64), codec.qsgd(2, 64), codec.qsgd(4, 64), codec.qsgd(8, 64), codec.qsgd(4, 64, "l2")]


def gaussian(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def through(c: codec.Codec, x: torch.Tensor, *key: int) -> torch.Tensor:
    return c.decode(c.encode(x, key), x)


def name(value: object) -> str:
    return value.name if isinstance(value, codec.Codec) else str(value)


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_qsgd_is_right_on_average(bits: int, norm: str) -> None:
    x, trials = gaussian(40, dtype=torch.float64), 1500
    c = codec.qsgd(bits, 16, norm)  # type: ignore[arg-type]
    draws = torch.stack([through(c, x, trial) for trial in range(trials)])
    standard_error = draws.std(0) / math.sqrt(trials)
    assert bool(((draws.mean(0) - x).abs() <= 5 * standard_error + 1e-6).all())


@pytest.mark.parametrize(("d", "bits"), [(1000, 3), (1000, 4), (64, 2), (512, 8)])
def test_the_error_of_qsgd_stays_under_the_papers_bound(d: int, bits: int) -> None:
    x, c = gaussian(d), codec.qsgd(bits, d, "l2")
    error = sum(float((through(c, x, trial) - x).square().sum()) for trial in range(200)) / 200
    assert 0 < error <= min(d / c.s**2, math.sqrt(d) / c.s) * float(x.square().sum())


@pytest.mark.parametrize("c", LEVELS, ids=name)
def test_no_level_is_above_the_norm_and_no_sign_is_turned(c: codec.Levels) -> None:
    x = gaussian(1000)
    codes = c.codes(c.encode(x, (3,)), 1000)
    assert int(codes.abs().max()) <= c.s
    assert bool((codes.sign() * x.sign() >= 0).all())
    assert bool((codes != 0).any())


@pytest.mark.parametrize("c", [c for c in LEVELS if c.norm == "max"], ids=name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_number_of_a_bucket_arrives_exactly(c: codec.Levels, dtype: torch.dtype) -> None:
    x = gaussian(640).to(torch.float32).to(dtype)
    largest = x.view(10, 64).abs().argmax(1) + 64 * torch.arange(10)
    assert torch.equal(through(c, x, 1)[largest], x[largest])


def test_numbers_that_lie_on_a_level_are_not_moved() -> None:
    c = codec.qsgd(8, 256)
    x = torch.arange(-127, 128, dtype=torch.float32)
    for key in range(300):
        assert torch.equal(through(c, x, key), x)


def test_many_levels_come_close_to_the_identity() -> None:
    x = gaussian(5000)
    errors = [float((through(codec.qsgd(bits), x, 0) - x).abs().max()) for bits in (2, 4, 8, 12, 16)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] <= float(x.abs().max()) / 32767 * 1.01


def test_int8_rounds_to_the_nearest_level_whatever_the_key() -> None:
    c, x = codec.int8(bucket=64), gaussian(640)
    step = x.view(10, 64).abs().amax(1).repeat_interleave(64) / 127
    assert bool(((through(c, x, 1) - x).abs() <= step * 0.5001).all())
    assert torch.equal(c.encode(x, (1,)), c.encode(x, (2,)))


@settings(deadline=None, max_examples=150)
@given(numel=st.integers(0, 700), bits=st.integers(2, 16), bucket=st.integers(1, 300), dtype=st.sampled_from(DTYPES))
def test_a_message_has_the_promised_length_and_gives_its_codes_back(
    numel: int, bits: int, bucket: int, dtype: torch.dtype
) -> None:
    c, x = codec.qsgd(bits, bucket), gaussian(numel, seed=numel, dtype=dtype)
    message = c.encode(x, (7, numel))
    assert message.dtype == torch.uint8
    assert (
        message.numel() == c.message_bytes(numel, x.element_size()) == 4 * -(-numel // bucket) + -(-numel * bits // 8)
    )
    y = c.decode(message, x)
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    codes = c.codes(message, numel)
    assert int(codes.abs().sum()) >= -(-numel // bucket)  # each bucket's largest number has the highest level
    for at in range(0, numel, bucket):
        norm = x[at : at + bucket].to(torch.float64).abs().max().to(torch.float32).to(torch.float64)
        expected = norm * codes[at : at + bucket].to(torch.float64) / c.s
        torch.testing.assert_close(y[at : at + bucket].to(torch.float64), expected, rtol=8e-3, atol=1e-7)


@pytest.mark.parametrize("bits", range(2, 17))
def test_codes_of_every_width_survive_packing(bits: int) -> None:
    c = codec.qsgd(bits, 4001)
    levels = (torch.arange(4001) * 37) % (2 * c.s + 1) - c.s
    levels[0] = c.s
    assert torch.equal(c.codes(c.encode(levels.to(torch.float64), (1,)), 4001), levels.to(torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("c", ALL, ids=name)
def test_every_codec_serves_every_dtype(c: codec.Codec, dtype: torch.dtype) -> None:
    assert isinstance(c, codec.Codec)
    x = gaussian(1234, dtype=dtype)
    before = x.clone()
    message = c.encode(x, (1, 2, 3))
    assert message.numel() == c.message_bytes(1234, x.element_size())
    y = c.decode(message, x)
    assert (y.dtype, y.shape, y.device) == (x.dtype, x.shape, x.device)
    assert torch.equal(x, before)
    assert torch.nn.functional.cosine_similarity(x.double(), y.double(), dim=0) > 0.55  # two bits keep this much


@pytest.mark.parametrize("c", ALL, ids=name)
def test_a_message_can_be_read_from_any_place_in_a_larger_buffer(c: codec.Codec) -> None:
    x = gaussian(777)
    message = c.encode(x, (1,))
    buffer = torch.cat([torch.zeros(3, dtype=torch.uint8), message])
    assert torch.equal(c.decode(buffer[3:], x), c.decode(message, x))


@pytest.mark.parametrize("c", ALL, ids=name)
def test_a_message_does_not_change_when_the_numbers_do(c: codec.Codec) -> None:
    for dtype in DTYPES:
        x = gaussian(64, dtype=dtype)
        message = c.encode(x, (1,))
        kept = message.clone()
        x.fill_(9)
        assert torch.equal(message, kept)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("c", ALL, ids=name)
def test_a_gpu_reads_a_message_bit_for_bit_as_a_cpu_does(c: codec.Codec, dtype: torch.dtype) -> None:
    x = gaussian(5000, dtype=dtype)
    message = c.encode(x.cuda(), (1, 2))
    assert message.is_cuda
    assert torch.equal(c.decode(message, x.cuda()).cpu(), c.decode(message.cpu(), x))


def test_a_key_decides_the_bytes() -> None:
    c, x = codec.qsgd(4), gaussian(2000)
    assert torch.equal(c.encode(x, (1, 2)), c.encode(x, (1, 2)))
    assert not torch.equal(c.encode(x, (1, 2)), c.encode(x, (1, 3)))
    torch.manual_seed(5)
    one = c.encode(x, (1, 2))
    torch.manual_seed(6)
    assert torch.equal(one, c.encode(x, (1, 2)))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("c", [*ALL, codec.qsgd(4, norm="l2")], ids=name)
def test_broken_numbers_are_never_hidden(c: codec.Codec, dtype: torch.dtype, bad: float) -> None:
    x = gaussian(1500, dtype=dtype)
    x[700] = bad
    y = through(c, x, 1)
    assert not bool(torch.isfinite(y[700]))
    assert bool(torch.isfinite(y[:512]).all())
    assert bool(torch.isfinite(y[1024:]).all())


@pytest.mark.parametrize("c", ALL, ids=name)
def test_zeros_stay_zeros_and_nothing_stays_nothing(c: codec.Codec) -> None:
    x = torch.cat([torch.zeros(512), gaussian(512)])
    assert torch.equal(through(c, x, 1)[:512], torch.zeros(512))
    empty = torch.empty(0)
    assert c.encode(empty, (1,)).numel() == c.message_bytes(0, 4) == through(c, empty, 1).numel() == 0


@pytest.mark.parametrize("size", [1e-30, 1e30])
@pytest.mark.parametrize("norm", ["max", "l2"])
def test_very_large_and_very_small_numbers_keep_their_scale(size: float, norm: str) -> None:
    x = gaussian(512) * size
    y = through(codec.qsgd(16, norm=norm), x, 1)  # type: ignore[arg-type]
    assert float((x - y).abs().max() / x.abs().max()) < 1e-3


def test_a_float64_norm_beyond_float32_becomes_nan() -> None:
    assert bool(through(codec.qsgd(), torch.tensor([1e300, 1.0], dtype=torch.float64), 1).isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_of_each_chunk_arrive_and_nothing_else(dtype: torch.dtype) -> None:
    x, c = gaussian(1100).to(dtype), codec.topk(20, 300, floats=True)  # numbers that a float32 holds
    y = through(c, x, 1)
    for at in range(0, 1100, 300):
        chunk, came = x[at : at + 300], y[at : at + 300]
        assert torch.equal(came[came != 0], chunk[came != 0])
        assert int((came != 0).sum()) == 20
        assert float(chunk[came == 0].abs().max()) <= float(chunk[came != 0].abs().min())


def test_whole_chunks_of_plain_numbers_lose_nothing() -> None:
    for n in (1, 4096, 9000):
        x = gaussian(n)
        assert torch.equal(through(codec.topk(4096, floats=True), x, 1), x)


def test_two_bits_say_which_of_four_means_a_number_is_taken_for() -> None:
    x, plain = gaussian(4096) ** 3, codec.topk(200, floats=True)
    sent, came = through(plain, x, 1), through(codec.topk(200), x, 1)
    assert torch.equal(sent != 0, came != 0)
    values = came[came != 0].unique()
    assert len(values) == 4
    for value in values:
        torch.testing.assert_close(sent[came == value].mean(), value)
    inner, outer = values.abs().sort().values.split(2)
    assert inner.max() < outer.min()
    assert float((sent - came).square().sum()) < 0.2 * float(sent.square().sum())


@settings(deadline=None, max_examples=100)
@given(numel=st.integers(0, 700), chunk=st.integers(1, 300), data=st.data(), floats=st.booleans())
def test_a_number_of_the_largest_takes_fourteen_bits(numel: int, chunk: int, data: st.DataObject, floats: bool) -> None:
    c, x = codec.topk(data.draw(st.integers(1, chunk)), chunk, floats), gaussian(numel, seed=numel)
    full, rest = divmod(numel, chunk)
    kept = full * c.k + min(c.k, rest)
    message = c.encode(x, (1,))
    size = 4 * kept if floats else 16 * (full + (rest > 0)) + math.ceil(kept * 2 / 8)
    assert message.numel() == c.message_bytes(numel, 4) == size + math.ceil(kept * 12 / 8)
    assert int((c.decode(message, x) != 0).sum()) <= kept


def test_every_place_in_a_chunk_can_be_named() -> None:
    for place in (0, 1, 2047, 2048, 4095):
        x = torch.zeros(2 * 4096)
        x[4096 + place] = 3.0
        for c in (codec.topk(1), codec.topk(1, floats=True)):
            assert torch.equal(through(c, x, 1), x)


@pytest.mark.parametrize("c", LARGEST, ids=name)
def test_a_chunk_with_more_broken_numbers_than_it_sends_is_broken_as_a_whole(c: codec.TopK) -> None:
    x = gaussian(1500)
    x[512:1000] = math.nan
    y = through(c, x, 1)
    assert bool(y[512:1024].isnan().all())
    assert bool(y[:512].isfinite().all())
    assert bool(y[1024:].isfinite().all())


@pytest.mark.parametrize("c", [codec.int8(), codec.int8(300), codec.qsgd(5, 300)], ids=name)
def test_long_messages_are_worked_on_in_blocks_that_leave_no_seam(c: codec.Levels) -> None:
    n = 3 * 2**18 + 77
    x = gaussian(n)
    y = through(c, x, 1)
    step = torch.nn.functional.pad(x.abs(), (0, -n % c.bucket)).view(-1, c.bucket).amax(1) / c.s
    assert bool(((y - x).abs() <= step.repeat_interleave(c.bucket)[:n] * 1.001).all())
    cut = n // 2 // c.bucket * c.bucket
    if c.rounding == "nearest":
        assert torch.equal(torch.cat([through(c, x[:cut], 1), through(c, x[cut:], 1)]), y)


def plainly(x: torch.Tensor, bucket: int) -> torch.Tensor:
    """An int8 message by the formula, of as many numbers as are rounded alike."""
    v = torch.nn.functional.pad(x, (0, -x.numel() % bucket)).view(-1, bucket)
    norms = v.abs().amax(1)
    scale = 127 / norms
    if bool((torch.isfinite(scale) & (scale > 0)).all()):
        level = v * scale[:, None]
    else:
        fine = torch.isfinite(norms) & (norms > 0)
        level = (v / torch.where(fine, norms, 1)[:, None]).masked_fill(~fine[:, None], 0) * 127
    codes = level.round().to(torch.int8).view(-1)[: x.numel()]
    return torch.cat([norms.view(torch.uint8), codes.view(torch.uint8)])


@pytest.mark.parametrize("special", [None, 0.0, -0.0, math.nan, math.inf, -math.inf, 1e-38, 3e38])
@pytest.mark.parametrize("n", [1, 300, 301, 2**18 + 5, 2**20 + 1000])
def test_int8_has_the_bits_of_its_formula_wherever_a_bucket_lies(special: float | None, n: int) -> None:
    bucket = 300
    c, x = codec.int8(bucket), (gaussian(n) * 4).round() / 4  # so many are halfway between two levels
    if special is not None:
        at = n // 2 // bucket * bucket
        x[at : at + bucket] = special if math.isfinite(special) else x[at : at + bucket]
        x[at] = special
    message, block = c.encode(x, (1,)), 2**18 // 600 * 600
    parts = [plainly(x[lo : lo + block], bucket) for lo in range(0, n, block)]
    buckets = [-(-len(x[lo : lo + block]) // bucket) for lo in range(0, n, block)]
    norms = torch.cat([part[: 4 * k] for part, k in zip(parts, buckets, strict=True)])
    assert torch.equal(message, torch.cat([norms, *(p[4 * k :] for p, k in zip(parts, buckets, strict=True))]))
    decoded = (c.codes(message, n).to(torch.float32) / torch.tensor([127.0])).view(-1)
    expected = decoded * norms.view(torch.float32).repeat_interleave(bucket)[:n]
    assert torch.equal(c.decode(message, x).view(torch.int32), expected.view(torch.int32))


def test_elias_omega_codes_are_the_known_ones_and_can_be_read_back() -> None:
    assert [codec.elias_omega(n) for n in (1, 2, 3, 4, 16)] == ["0", "100", "110", "101000", "10100100000"]
    for n in [*range(1, 2000), 2**31, 2**40 + 1]:
        assert codec.elias_number(codec.elias_omega(n)) == n


@pytest.mark.parametrize("code", ["", "1", "10", "00", "1000", "x"])
def test_what_is_not_an_elias_code_is_refused(code: str) -> None:
    with pytest.raises(ValueError, match="not one Elias-omega code"):
        codec.elias_number(code)


@pytest.mark.parametrize("c", LEVELS, ids=name)
@pytest.mark.parametrize("sparse", [True, False])
def test_the_elias_estimate_counts_the_bits_of_the_real_codes(c: codec.Levels, sparse: bool) -> None:
    x = gaussian(300) * (torch.arange(300) % 50 == 7 if sparse else 1)
    codes = c.codes(c.encode(x, (4,)), 300).tolist()
    by_gap, by_level, last = "", "", -1
    for at, code in enumerate(codes):
        by_level += codec.elias_omega(abs(code) + 1) + ("1" if code else "")
        if code:
            by_gap += codec.elias_omega(at - last) + "1" + codec.elias_omega(abs(code))
            last = at
    assert codec.elias_bytes(x, c, (4,)) == 4 * 5 + math.ceil((1 + min(len(by_gap), len(by_level))) / 8)


def test_codecs_are_found_by_name() -> None:
    assert codec.parse("none") is None
    largest = (codec.topk(), codec.topk(1), codec.topk(4096), codec.topk(64, floats=True))
    for c in (codec.bf16(), codec.fp16(), codec.int8(), *map(codec.qsgd, range(2, 17)), *largest):
        assert codec.parse(c.name) == c
    assert codec.parse("topk") == codec.topk(64)
    assert codec.parse(" QSGD4 ") == codec.qsgd(4)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda: codec.parse("zip"), "there is no codec 'zip'; use none, bf16"),
        (lambda: codec.parse("qsgd"), "there is no codec 'qsgd'"),
        (lambda: codec.parse("qsgd17"), "17 bits cannot hold .* use 2 to 16"),
        (lambda: codec.parse("topk5000"), "5000 numbers cannot be taken from a chunk of 4096; use 1 to 4096"),
        (lambda: codec.topk(0), "0 numbers cannot be taken"),
        (lambda: codec.topk(3, chunk=5000), "a chunk of 5000 numbers do not fit 12 bits"),
        (lambda: codec.topk().decode(torch.zeros(5, dtype=torch.uint8), torch.zeros(2)), "for 2 numbers is 20 bytes"),
        (lambda: codec.qsgd(1), "1 bits"),
        (lambda: codec.qsgd(8, 0), "a bucket of 0 numbers"),
        (lambda: codec.qsgd(norm="l1"), "no norm 'l1'"),  # type: ignore[arg-type]
        (lambda: codec.qsgd().encode(torch.zeros(2, 2), (1,)), r"not torch.float32 of shape \(2, 2\)"),
        (lambda: codec.bf16().encode(torch.zeros(2, dtype=torch.int32), (1,)), "not torch.int32"),
        (lambda: codec.qsgd().decode(torch.zeros(5, dtype=torch.uint8), torch.zeros(2)), "for 2 numbers is 6 bytes"),
        (lambda: codec.qsgd().decode(torch.zeros(6), torch.zeros(2)), "not torch.float32 of shape"),
        (lambda: codec.qsgd().decode(torch.zeros(6, dtype=torch.uint8), torch.zeros(2).int()), "not torch.int32"),
        (lambda: codec.elias_bytes(torch.zeros(2), codec.bf16()), "bf16 has no levels"),
        (lambda: codec.elias_omega(0), "begin at 1"),
    ],
)
def test_mistakes_are_answered_with_a_sentence(wrong: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        wrong()  # type: ignore[operator]
