"""Bytes in slots: sizes round up and budgets round down, so a plan in slots fits in bytes."""

from __future__ import annotations

import numpy as np

from fxremat.errors import ArgumentError


def whole_count(count: object, *, name: str) -> int:
    """What was given as ``name``, which must be a whole number of at least 1.

    Whatever takes ``slots`` asks this before all else: the answer depends on no budget.

    Raises:
        ArgumentError: it is not.
    """
    if isinstance(count, int | np.integer) and not isinstance(count, bool) and count >= 1:
        return int(count)
    raise ArgumentError(
        f"{name} is {count!r}, must be at least 1 and a whole number", argument=name, value=count
    )


def quantum_bytes(available_bytes: int, *, slots: int) -> int:
    """The least slot size for which ``slots`` slots hold ``available_bytes``, at least 1.

    Raises:
        ArgumentError: ``slots`` is no whole number of at least 1.
        ValueError: ``available_bytes`` is negative.
    """
    slots = whole_count(slots, name="slots")
    if available_bytes < 0:
        raise ValueError(f"available_bytes is {available_bytes}, must be at least 0")
    return max(1, -(-available_bytes // slots))


def slots_up(nbytes: int, *, quantum: int) -> int:
    """Slots that a size of ``nbytes`` takes: rounded up."""
    return -(-nbytes // quantum)


def slots_down(nbytes: int, *, quantum: int) -> int:
    """Slots that a budget of ``nbytes`` offers: rounded down."""
    return nbytes // quantum
