"""Tables of keys of 128 bits: compiled loops."""

from __future__ import annotations

import numpy as np
from numba import njit

from fxremat.planner.places import TABLE, Ints


@njit(inline="always")
def mixed(a: int, b: int) -> int:
    """A hash of two numbers."""
    x = np.uint64(a) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(b)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int(np.int64(x ^ (x >> np.uint64(31))))


@njit(inline="always")
def find(data: Ints, table: int, one: int, two: int) -> int:
    """The entry of a table of keys with this one, or the free one where it belongs."""
    i = one & (TABLE - 1)
    while data[table + 2 * i] != 0 and (
        data[table + 2 * i] != one or data[table + 2 * i + 1] != two
    ):
        i = (i + 1) & (TABLE - 1)
    return i
