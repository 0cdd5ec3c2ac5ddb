"""The place in host memory of each tensor that travels across the loss point."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

ALIGNMENT_BYTES = 512
"""Offsets and sizes are multiples of this, the alignment of the CUDA allocator."""


def slot_bytes(nbytes: int) -> int:
    """Return the bytes that a tensor of ``nbytes`` takes in host memory, which are aligned."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def assign_slots(sizes_bytes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Place tensors of these sizes one after the other in host memory.

    At the loss point all of them are on the host, so no two of them can share a byte, and the sum
    of the rounded sizes is the least that holds them.

    Returns:
        Their offsets, and the total bytes.
    """
    *offsets, total_bytes = accumulate(map(slot_bytes, sizes_bytes), initial=0)
    return tuple(offsets), total_bytes
