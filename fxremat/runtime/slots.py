"""Where in host memory each moved tensor lives: slots shared by lives that do not overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT_BYTES = 512
"""Offsets and sizes are multiples of it: what the CUDA allocator aligns its blocks to."""


@dataclass(frozen=True, slots=True)
class Life:
    """When a tensor occupies host memory.

    Attributes:
        nbytes: its size.
        begin: the position in the plan where it is first there.
        end: the first position at which it is no longer there; ``begin < end``.
    """

    nbytes: int
    begin: int
    end: int

    def overlaps(self, other: Life) -> bool:
        """Whether there is a position at which both are there."""
        return self.begin < other.end and other.begin < self.end


@dataclass(frozen=True, slots=True)
class Slots:
    """Places for some lives.

    Attributes:
        offsets: of each life its first byte, in the order the lives were given.
        total_bytes: what all of them together need.
    """

    offsets: tuple[int, ...]
    total_bytes: int


def slot_bytes(nbytes: int, *, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """What a tensor of ``nbytes`` takes in host memory."""
    return -(-nbytes // alignment_bytes) * alignment_bytes


def assign_slots(lives: Sequence[Life], *, alignment_bytes: int = ALIGNMENT_BYTES) -> Slots:
    """Place ``lives`` so that no two that overlap in time overlap in bytes.

    Largest first, of equal ones the earliest first, each into the smallest gap that
    holds it between the lives it overlaps; O(n²). No more bytes than the sum of the
    rounded sizes, and the most that is ever there at once if all sizes are equal: then
    it is the greedy colouring of an interval graph, which is optimal.

    Raises:
        ValueError: a life has negative size, or ends before it begins.
    """
    for index, life in enumerate(lives):
        if life.nbytes < 0 or life.end <= life.begin:
            raise ValueError(
                f"life {index} has {life.nbytes} bytes from {life.begin} to {life.end}: "
                "the size must not be negative, and the end must be after the begin"
            )
    sizes = [slot_bytes(life.nbytes, alignment_bytes=alignment_bytes) for life in lives]
    order = sorted(range(len(lives)), key=lambda i: (-sizes[i], lives[i].begin, i))
    offsets = [0] * len(lives)
    placed: list[int] = []
    for i in order:
        taken = sorted(
            (offsets[j], offsets[j] + sizes[j]) for j in placed if lives[i].overlaps(lives[j])
        )
        offsets[i] = _best_gap(taken, sizes[i])
        placed.append(i)
    total = max((offsets[i] + sizes[i] for i in order), default=0)
    return Slots(tuple(offsets), total)


def _best_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    """The begin of the smallest gap of at least ``size`` bytes; past the last if there is none."""
    best: tuple[int, int] | None = None
    free = 0
    for begin, end in taken:
        gap = begin - free
        if gap >= size and (best is None or gap < best[0]):
            best = (gap, free)
        free = max(free, end)
    return free if best is None else best[1]
