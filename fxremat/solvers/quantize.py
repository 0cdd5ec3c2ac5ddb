"""Bytes in slots: sizes round up and budgets round down, so a plan in slots fits in bytes."""

from __future__ import annotations


def quantum_bytes(available_bytes: int, *, slots: int) -> int:
    """The least slot size for which ``slots`` slots hold ``available_bytes``, at least 1.

    Raises:
        ValueError: ``slots`` is less than 1 or ``available_bytes`` is negative.
    """
    if slots < 1:
        raise ValueError(f"slots is {slots}, must be at least 1")
    if available_bytes < 0:
        raise ValueError(f"available_bytes is {available_bytes}, must be at least 0")
    return max(1, -(-available_bytes // slots))


def slots_up(nbytes: int, *, quantum: int) -> int:
    """Slots that a size of ``nbytes`` takes: rounded up."""
    return -(-nbytes // quantum)


def slots_down(nbytes: int, *, quantum: int) -> int:
    """Slots that a budget of ``nbytes`` offers: rounded down."""
    return nbytes // quantum
