"""Numbers with units, in and out of words: ``320ms``, ``10Gbps``, ``25MB``, ``25.6M``.

Prefixes are decimal (k = 1000); ``KiB``, ``MiB`` … are the binary ones. In rates a small b is a bit and a large B a
byte, so ``10Gbps`` and ``1.25GBps`` are the same. Inside the program, durations are seconds and rates bytes a second.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal

_SECONDS = {"ns": "1e-9", "us": "1e-6", "µs": "1e-6", "μs": "1e-6", "ms": "1e-3", "s": "1", "min": "60", "h": "3600"}
_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_TEXT = re.compile(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]{1,3})?\s*([^\s0-9.+-]*)\s*", re.IGNORECASE)


def parse_seconds(text: str) -> float:
    """``320ms``, ``50us``, ``1.5s``, ``2min``, ``1h`` in seconds. Only 0 may go without a unit."""
    number, unit = _split(text, "a duration such as 320ms, 50us, 1.5s or 2min")
    if unit == "" and number == 0:
        return 0.0
    if unit == "":
        raise ValueError(f"{text!r} has no unit; write {number}ms or {number}s")
    if unit not in _SECONDS:
        raise ValueError(f"{text!r} is not a duration: {_seen(unit)}; write ns, us, ms, s, min or h after the number")
    return float(number * Decimal(_SECONDS[unit]))


def parse_rate(text: str) -> float:
    """``10Gbps``, ``100Mbps`` (bits), ``1.25GBps`` (bytes) in bytes a second; ``Gbit/s`` and ``GB/s`` mean the same."""
    number, unit = _split(text, "a rate such as 10Gbps, 100Mbps or 1.25GBps")
    match = re.fullmatch(r"([kKmMgGtT]?)(b|B|bit)(ps|/s)", unit)
    if match is None:
        raise ValueError(f"{text!r} is not a rate: {_seen(unit)}; write bps, Mbps or Gbps for bits, GBps for bytes")
    if number == 0:
        raise ValueError(f"a rate of {text!r} would never deliver anything; use one above 0")
    return float(number * _PREFIXES[match[1].lower()] / (1 if match[2] == "B" else 8))


def parse_bytes(text: str) -> int:
    """``25MB``, ``64KiB``, ``100k``, ``512`` as a whole number of bytes."""
    number, unit = _split(text, "a number of bytes such as 25MB, 64KiB or 512")
    prefix = (unit[:-1] if unit.endswith("B") else unit).lower()
    scale = {**_PREFIXES, **_BINARY}.get(prefix)
    if scale is None:
        raise ValueError(f"{text!r} is not a number of bytes: {_seen(unit)}; write B, kB, MB, GB, KiB, MiB or GiB")
    return _whole(text, number * scale, "bytes")


def parse_count(text: str) -> int:
    """``100k``, ``25.6M``, ``7``, as a whole number."""
    number, unit = _split(text, "a number such as 100k, 25.6M or 7")
    scale = _PREFIXES.get(unit.lower())
    if scale is None:
        raise ValueError(f"{text!r} is not a count: {_seen(unit)}; write k, M, G or T after the number, or nothing")
    return _whole(text, number * scale, "things")


def format_seconds(seconds: float) -> str:
    """Three digits and a fitting unit: 0.00032 → ``320 µs``, 90 → ``1.5 min``."""
    return _fit(seconds, (("h", 3600), ("min", 60), ("s", 1), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)), "s")


def format_bytes(count: float) -> str:
    """Three digits and a fitting unit: 1.3e9 → ``1.3 GB``."""
    return _fit(count, (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1)), "B")


def format_rate(bytes_per_s: float) -> str:
    """Bytes a second as bits a second, the way networks are sold: 1.25e9 → ``10 Gbps``."""
    units = (("Tbps", 1e12), ("Gbps", 1e9), ("Mbps", 1e6), ("kbps", 1e3), ("bps", 1.0))
    return _fit(bytes_per_s * 8, units, "bps")


def format_count(count: float) -> str:
    """Three digits and a prefix: 25_600_000 → ``25.6M``."""
    return _fit(count, (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1)), "").replace(" ", "")


def _split(text: str, wanted: str) -> tuple[Decimal, str]:
    match = _TEXT.fullmatch(text)
    if match is None:
        negative = " (a negative number makes no sense here)" if text.strip().startswith(("-", "−")) else ""
        raise ValueError(f"{text!r} is not {wanted}{negative}")
    return Decimal(match[1] + (match[2] or "")), match[3]


def _seen(unit: str) -> str:
    return f"{unit!r} is not a unit known here" if unit else "it has no unit"


def parse_share(text: str) -> float:
    """``25%`` as 0.25."""
    number, unit = _split(text, "a share such as 25%")
    if unit != "%":
        raise ValueError(f"{text!r} is not a share: {_seen(unit)}; write it as 25%")
    return float(number / 100)


def parse_number_of(text: str, thing: str) -> int:
    """``3 workers``, ``1 worker`` as a whole number, for a ``thing`` that is a worker."""
    number, unit = _split(text, f"a number of {thing}s such as 3 {thing}s")
    if unit not in (thing, f"{thing}s"):
        raise ValueError(f"{text!r} is not a number of {thing}s: {_seen(unit)}; write it as 3 {thing}s")
    return _whole(text, number, f"{thing}s")


def _whole(text: str, number: Decimal, what: str) -> int:
    if number != number.to_integral_value():
        raise ValueError(f"{text!r} is {number.normalize():f} {what}, which is not a whole number; round it")
    return int(number)


def format_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``; ``ranks 0, 1 and 5``; of many only their number."""
    *most, last = map(str, sorted(ranks))
    if len(ranks) > 8:
        return f"{len(ranks)} ranks"
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _fit(value: float, units: tuple[tuple[str, float], ...], base: str) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {base}"
    size = abs(value)
    rounded = float(f"{size:.3g}")  # so that 999.9 ms is shown as 1 s, not as 1e+03 ms
    name, unit = next(((name, unit) for name, unit in units if rounded >= unit), units[-1])
    number = max(size / unit, 1.0) if rounded >= unit else size / unit
    digits = f"{number:.3g}" if number < 999.5 else f"{number:.0f}"
    return f"{'-' if value < 0 else ''}{digits} {name}"
