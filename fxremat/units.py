"""Conversion of byte counts and durations to and from text."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal

import numpy as np

Counted = Literal["allocated", "reserved"]
"""What a budget limits: the bytes of allocated blocks, or the bytes reserved from the device."""

_FACTORS = {"": 1} | {
    prefix + binary: (1024 if binary else 1000) ** power
    for power, prefix in enumerate("KMGT", start=1)
    for binary in ("", "I")
}
"""Bytes per unit, by the unit's prefix in upper case; the ``B`` may be missing."""

_BYTES = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str) -> int | None:
    """Parse a number of bytes such as ``"6 GiB"``, ``"512MB"`` or ``"1048576"``, rounded down.

    Prefixes are decimal, as in ``"6 GB"`` and ``"6G"``, or binary, as in ``"6 GiB"`` and ``"6Gi"``.

    Returns:
        The number of bytes, or ``None`` if the text is not one.
    """
    match = _BYTES.fullmatch(text)
    factor = None if match is None else _FACTORS.get(match[2].upper().removesuffix("B"))
    if match is None or factor is None:
        return None
    return int(Fraction(match[1].rstrip(".")) * factor)


def bytes_in(value: object) -> int | None:
    """Return the bytes that ``value`` says, an integer of Python or numpy or a text; else ``None``.

    For the form of a text see :func:`parse_bytes`.
    """
    if isinstance(value, str):
        return parse_bytes(value)
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    return None


def format_bytes(nbytes: int) -> str:
    """Format a number of bytes in binary units, such as ``"1.5 GiB"``."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """Format a duration with three significant digits, such as ``"12.5 ms"``."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1 or unit == "µs":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError


def plural(number: int, noun: str) -> str:
    """Format a count with its noun: ``"1 region"``, ``"2 regions"``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
