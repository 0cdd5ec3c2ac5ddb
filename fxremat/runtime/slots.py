"""Where in host memory each tensor that travels over the turn lives."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

ALIGNMENT_BYTES = 512
"""Offsets and sizes are multiples of it: what the CUDA allocator aligns its blocks to."""


def slot_bytes(nbytes: int) -> int:
    """What a tensor of ``nbytes`` takes in host memory."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def assign_slots(sizes_bytes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Place tensors of these sizes one after the other: offset of each, bytes of all together.

    Whatever travels is on the host at the turn, so no two tensors of a step can share a byte,
    and the sum of the rounded sizes is the least that holds them.
    """
    *offsets, total_bytes = accumulate(map(slot_bytes, sizes_bytes), initial=0)
    return tuple(offsets), total_bytes
