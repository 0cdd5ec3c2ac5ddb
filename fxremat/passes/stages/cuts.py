"""Choose where the forward is cut, by the bytes that cross each cut."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class Crossing:
    """The bytes that cross the cut after each position. Each attribute has one item per position.

    Attributes:
        weights: bytes of unpinned storages that cross. A storage that no backward reads counts
            twice, because it is kept for the cut only.
        reach: the first position after which none of these storages crosses a cut.
        saved_bytes: bytes of unpinned storages computed at the position that a backward reads.
    """

    weights: tuple[int, ...]
    reach: tuple[int, ...]
    saved_bytes: tuple[int, ...]


def cut_segments(crossing: Crossing, ends: tuple[int, ...], most_stages: int) -> list[int]:
    """Return the positions after which to cut, with each branch and the trunk cut by itself.

    Args:
        crossing: what crosses each cut.
        ends: the position after each segment but the trunk. There is a cut before it in any case.
        most_stages: the most stages of all segments together.
    """
    cuts: list[int] = []
    for first, end in pairwise((0, *ends, len(crossing.weights))):
        part = Crossing(
            crossing.weights[first:end],
            tuple(reach - first for reach in crossing.reach[first:end]),
            crossing.saved_bytes[first:end],
        )
        cuts += [first + cut for cut in choose_cuts(part, most_stages)]
    cuts = sorted({*cuts, *(end - 1 for end in ends)})
    left = _merge_smallest(cuts, crossing.saved_bytes, most_stages)
    return sorted({*left, *(end - 1 for end in ends)})


def choose_cuts(crossing: Crossing, most_stages: int) -> list[int]:
    """Return the positions after which to cut a segment into at most ``most_stages``.

    A cut is chosen where no adjacent one is cheaper: at the last position of every run of equal
    weights that is a local minimum. Within such a run there is a cut wherever nothing crosses any
    more that crossed the cut before; a plain stack of layers is one run. The last position is never
    chosen.
    """
    weights = crossing.weights
    cuts: list[int] = []
    start = 0
    while start < len(weights) - 1:
        end = start
        while end + 1 < len(weights) and weights[end + 1] == weights[start]:
            end += 1
        # A position that nothing crosses separates runs, and is no cheaper cut.
        before = weights[start - 1] if start else 0
        after = weights[end + 1] if end + 1 < len(weights) else 0
        if all(weight == 0 or weight > weights[start] for weight in (before, after)):
            cuts.extend(_within_run(crossing, start, min(end, len(weights) - 2)))
        start = end + 1
    return _merge_smallest(cuts, crossing.saved_bytes, most_stages)


def _within_run(crossing: Crossing, start: int, end: int) -> list[int]:
    """Return the positions after which to cut from ``start`` to ``end``, a run of equal weights.

    These are ``end``, and positions where nothing crosses any more that crossed the cut before.
    """
    cuts = []
    crossed_until = start
    for position in range(start, end + 1):
        all_new = position >= crossed_until and crossing.reach[position] > position
        if position == end or all_new:
            cuts.append(position)
            crossed_until = crossing.reach[position]
    return cuts


def _merge_smallest(cuts: list[int], saved_bytes: Sequence[int], most_stages: int) -> list[int]:
    """Return at most ``most_stages - 1`` of the positions ``cuts``.

    Cuts between the stages that save fewest bytes together are dropped first.
    """
    total = [0, *accumulate(saved_bytes)]
    ends = [-1, *cuts, len(saved_bytes) - 1]
    before, after = list(range(-1, len(ends) - 1)), list(range(1, len(ends) + 1))

    def merged_bytes(i: int) -> int:
        return total[ends[after[i]] + 1] - total[ends[before[i]] + 1]

    heap = [(merged_bytes(i), i) for i in range(1, len(ends) - 1)]
    heapq.heapify(heap)
    left = dict.fromkeys(range(1, len(ends) - 1))
    while len(left) > most_stages - 1:
        nbytes, i = heapq.heappop(heap)
        if i not in left or nbytes != merged_bytes(i):  # an adjacent cut was dropped since
            continue
        del left[i]
        before[after[i]], after[before[i]] = before[i], after[i]
        for adjacent in left.keys() & {before[i], after[i]}:
            heapq.heappush(heap, (merged_bytes(adjacent), adjacent))
    return [ends[i] for i in left]
