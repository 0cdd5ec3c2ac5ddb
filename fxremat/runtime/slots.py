"""Where in host memory each tensor that travels over the turn lives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

ALIGNMENT_BYTES = 512
"""Offsets and sizes are multiples of it: what the CUDA allocator aligns its blocks to."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Places for tensors that are on the host at the same time.

    Attributes:
        offsets: of each tensor its first byte, in the order the sizes were given.
        total_bytes: what all of them together need.
    """

    offsets: tuple[int, ...]
    total_bytes: int


def slot_bytes(nbytes: int) -> int:
    """What a tensor of ``nbytes`` takes in host memory."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def assign_slots(sizes_bytes: Sequence[int]) -> Slots:
    """Place tensors of these sizes one after the other.

    Whatever travels is on the host at the turn, so no two tensors of a step can share a byte,
    and the sum of the rounded sizes is the least that holds them.

    Raises:
        ValueError: a size is negative.
    """
    for index, nbytes in enumerate(sizes_bytes):
        if nbytes < 0:
            raise ValueError(f"size {index} is {nbytes} bytes: it must not be negative")
    *offsets, total_bytes = accumulate(map(slot_bytes, sizes_bytes), initial=0)
    return Slots(tuple(offsets), total_bytes)
