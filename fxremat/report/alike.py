"""Runs of stages, or of blocks of stages, that a plan treats alike."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from fxremat.report.stages import StageStory

LONGEST_BLOCK = 64
"""Stages of a block that is looked for."""


@dataclass(frozen=True, slots=True)
class Alike:
    """Stages of equal bytes of which the same is done, every ``step`` stages.

    Attributes:
        stories: at least one, in forward order.
        step: from each to the next; 1 where there is one alone.
    """

    stories: tuple[StageStory, ...]
    step: int = 1

    @property
    def label(self) -> str:
        """``"3"``, ``"3–14"``, or ``"3, 7 … 43"``."""
        first, last = self.stories[0].index, self.stories[-1].index
        if first == last:
            return str(first)
        if self.step == 1:
            return f"{first}–{last}"
        second = self.stories[1].index
        return f"{first}, {second}" if second == last else f"{first}, {second} … {last}"


def alike(stories: Sequence[StageStory]) -> Iterator[Alike]:
    """All of ``stories``, in the order of each group's first stage.

    Where a block of stages is repeated, each of its stages is a group with those at its place in
    the other repetitions: the longest repetition first, of the shortest block.
    """
    keys = [_key(story) for story in stories]
    begin = 0
    while begin < len(stories):
        length, count = _repetition(keys, begin)
        for place in range(length):
            own = tuple(stories[begin + place + i * length] for i in range(count))
            yield Alike(own, own[1].index - own[0].index if count > 1 else 1)
        begin += length * count


def _repetition(keys: Sequence[Hashable], begin: int) -> tuple[int, int]:
    """Length of the block at ``begin`` whose repetitions go furthest, and how many there are."""
    best, furthest = (1, 1), 1
    for length in range(1, min(LONGEST_BLOCK, (len(keys) - begin) // 2) + 1):
        same = 0
        while begin + length + same < len(keys) and (
            keys[begin + same] == keys[begin + length + same]
        ):
            same += 1
        count = same // length + 1
        if count > 1 and length * count > furthest:
            best, furthest = (length, count), length * count
    return best


def _key(story: StageStory) -> Hashable:
    """What alike stages share. Stages are told by how far away they are."""
    runs = tuple(
        (run.keep, run.option, run.executed, run.rebuilds, run.start - story.index)
        for run in story.runs
    )
    return (
        runs,
        story.boundary_bytes,
        story.saved_bytes,
        story.freed_bytes,
        story.single_bytes,
        story.moved_bytes,
        story.rebuilt_s > 0,
    )
