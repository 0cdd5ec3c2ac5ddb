"""Where the forward is cut, by what crosses each cut."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class Crossing:
    """What crosses the cut after each position.

    Attributes:
        weights: bytes of unpinned storages; twice where no backward reads them, because
            then nobody would keep them but for the cut.
        reach: the first position after which none of these storages crosses any more.
        saved_bytes: of unpinned storages computed at the position that a backward reads.
    """

    weights: tuple[int, ...]
    reach: tuple[int, ...]
    saved_bytes: tuple[int, ...]


def cut_segments(crossing: Crossing, ends: tuple[int, ...], most_stages: int) -> list[int]:
    """Cut each branch, and the trunk, as if the others were not there; into ``most_stages``."""
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
    """Return positions after which to cut, so that there are at most ``most_stages``.

    A cut is worth having where no neighbour's is cheaper: at the last position of every
    level run that is a local minimum, and within the run wherever all that crossed at the
    cut before is gone (a plain stack of layers is one level run). Never after the last
    position.
    """
    weights = crossing.weights
    cuts: list[int] = []
    start = 0
    while start < len(weights) - 1:
        end = start
        while end + 1 < len(weights) and weights[end + 1] == weights[start]:
            end += 1
        # Where nothing crosses, the line begins or ends anew.
        before = weights[start - 1] if start else 0
        after = weights[end + 1] if end + 1 < len(weights) else 0
        if all(beside == 0 or beside > weights[start] for beside in (before, after)):
            cuts.extend(_within_run(crossing, start, min(end, len(weights) - 2)))
        start = end + 1
    return _merge_smallest(cuts, crossing.saved_bytes, most_stages)


def _within_run(crossing: Crossing, start: int, end: int) -> list[int]:
    cuts = []
    gone_at = start
    for position in range(start, end + 1):
        renewed = position >= gone_at and crossing.reach[position] > position
        if position == end or renewed:
            cuts.append(position)
            gone_at = crossing.reach[position]
    return cuts


def _merge_smallest(cuts: list[int], saved_bytes: Sequence[int], most_stages: int) -> list[int]:
    """Drop the cuts between the stages that save least, until there are few enough."""
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
        if i not in left or nbytes != merged_bytes(i):  # it has another neighbour since
            continue
        del left[i]
        before[after[i]], after[before[i]] = before[i], after[i]
        for beside in left.keys() & {before[i], after[i]}:
            heapq.heappush(heap, (merged_bytes(beside), beside))
    return [ends[i] for i in left]
