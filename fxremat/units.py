"""Byte counts and durations, from and for people."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal

Counted = Literal["allocated", "reserved"]
"""What a budget may be for: blocks that are handed out, or what is taken from the device."""

_FACTORS = {"": 1} | {
    prefix + binary: (1024 if binary else 1000) ** power
    for power, prefix in enumerate("KMGT", start=1)
    for binary in ("", "I")
}
"""By what stands before the ``B``, which may be left out."""

_BYTES = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str) -> int | None:
    """``"6 GiB"``, ``"512MB"`` or ``"1048576"`` in bytes, rounded down.

    Prefixes are decimal, as in ``"6 GB"`` and ``"6G"``, or binary, as in ``"6 GiB"`` and ``"6Gi"``.

    Returns ``None`` for text that is no number of bytes.
    """
    match = _BYTES.fullmatch(text)
    factor = None if match is None else _FACTORS.get(match[2].upper().removesuffix("B"))
    if match is None or factor is None:
        return None
    return int(Fraction(match[1].rstrip(".")) * factor)


def format_bytes(nbytes: int) -> str:
    """A byte count for people, in binary units."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """A duration for people."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1 or unit == "µs":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError


def plural(number: int, noun: str) -> str:
    """``"1 region"``, ``"2 regions"``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
