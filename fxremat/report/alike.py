"""Stages that a plan treats alike, in runs within a block of the model and over its blocks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby

from fxremat.report.modules import blocks_of, common_module, named, pattern_of, span
from fxremat.report.stages import StageStory

LONGEST_PATTERN = 32
"""Runs of a pattern that is looked for."""

MOST_ROWS = 40
"""If there were more, a block is told as one."""

PARTS = 4
"""Shares that are kept are alike if they are the same in such parts of the whole."""


@dataclass(frozen=True, slots=True)
class Alike:
    """Stages of which the same is done.

    Attributes:
        runs: one, or one for each repetition of a pattern. Each is of stages that follow each
            other, in forward order.
        module: where in the model they are.
    """

    runs: tuple[tuple[StageStory, ...], ...]
    module: str

    @property
    def stories(self) -> tuple[StageStory, ...]:
        """Of all stages."""
        return tuple(story for run in self.runs for story in run)

    @property
    def label(self) -> str:
        """``"3"``, ``"3–14"``, or ``"3, 7 … 43"``."""
        names = [span(run[0].index, run[-1].index) for run in self.runs]
        first, last = self.stories[0].index, self.stories[-1].index
        if last - first == len(self.stories) - 1:
            return span(first, last)
        return ", ".join(names) if len(names) < 3 else f"{names[0]} … {names[-1]}"


def alike(stories: Sequence[StageStory], modules: Sequence[str]) -> tuple[Alike, ...]:
    """All of ``stories``, in the order of each group's first stage.

    Args:
        stories: of the stages that run.
        modules: of each stage, where in the model it is; none if that is not known.

    Stages of one block that follow each other are a run if they are treated alike. Where runs
    repeat in the same order, each is told with those at its place in the other repetitions.
    """
    blocks = blocks_of(modules) if modules else [""] * (stories[-1].index + 1 if stories else 0)
    rows = _grouped(_runs(stories, blocks), modules)
    if len(rows) > MOST_ROWS:
        whole = groupby(stories, key=lambda story: blocks[story.index])
        rows = _grouped([tuple(own) for _, own in whole], modules)
    return rows


def _runs(stories: Sequence[StageStory], blocks: Sequence[str]) -> list[tuple[StageStory, ...]]:
    """Stages of one block that follow each other and are treated alike.

    One of which nothing is kept or computed again goes with those before it.
    """
    found: list[list[StageStory]] = []
    last = None
    for story in stories:
        block, way = blocks[story.index], _way(story)
        if last is None or last[0] != block or way not in (last[1], None):
            found.append([])
            last = block, way
        if last[1] is None:
            last = block, way
        found[-1].append(story)
    return [tuple(run) for run in found]


def _way(story: StageStory) -> Hashable:
    """How a stage is treated; ``None``: nothing of it is kept, or computed again."""
    if story.extra_s == 0 and story.held_bytes == 0:
        return None
    in_part = 0 < story.held_bytes < story.saved_bytes
    return story.extra_s > 0, in_part, story.moved_bytes > 0


def _grouped(runs: Sequence[tuple[StageStory, ...]], modules: Sequence[str]) -> tuple[Alike, ...]:
    """Runs with their repetitions."""
    places = [
        common_module(modules[story.index] for story in run) if modules else "" for run in runs
    ]
    keys = [(pattern_of(place), _share(run)) for place, run in zip(places, runs, strict=True)]
    found = []
    begin = 0
    while begin < len(runs):
        length, count = _repetition(keys, begin)
        for place in range(begin, begin + length):
            own = slice(place, begin + length * count, length)
            found.append(Alike(tuple(runs[own]), named(places[own])))
        begin += length * count
    return tuple(found)


def _share(run: tuple[StageStory, ...]) -> Hashable:
    """How a run is treated, and roughly how much of it."""
    ways = frozenset(map(_way, run)) - {None}
    saved = sum(story.saved_bytes for story in run) or 1
    held = sum(story.held_bytes for story in run)
    return ways, round(PARTS * held / saved)


def _repetition(keys: Sequence[Hashable], begin: int) -> tuple[int, int]:
    """Length of the pattern at ``begin`` that is repeated furthest, and how often it is there."""
    best, furthest = (1, 1), 1
    for length in range(1, min(LONGEST_PATTERN, (len(keys) - begin) // 2) + 1):
        same = 0
        while begin + length + same < len(keys) and (
            keys[begin + same] == keys[begin + length + same]
        ):
            same += 1
        count = same // length + 1
        if count > 1 and length * count > furthest:
            best, furthest = (length, count), length * count
    return best
