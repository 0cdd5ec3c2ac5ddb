"""What happens to a stage and why, in words."""

from __future__ import annotations

from fxremat.ir import Keep
from fxremat.report.stages import StageStory
from fxremat.units import format_bytes, format_seconds


def describe(*stories: StageStory) -> str:
    """What happens to a stage, or to each of several alike ones, in words."""
    story = stories[0]
    words = _describe_computations(story, alone=len(stories) == 1)
    if story.moved_bytes:
        words += f", {format_bytes(story.moved_bytes)} on the host meanwhile"
    return words


def _describe_computations(story: StageStory, *, alone: bool) -> str:
    if not story.runs[0].executed:
        return "nothing"
    if story.is_kept:
        return "kept"
    if story.is_kept_in_part:
        part = f"{format_bytes(story.held_bytes)} of {format_bytes(story.saved_bytes)}"
        return f"{part} kept, rest rebuilt"
    keeps_input = story.runs[0].keep is Keep.INPUT
    if not story.again:
        return "checkpoint" if keeps_input else "nothing kept"
    last = story.again[-1]
    if len(story.again) == 1:
        words = "rebuilt right before its backward" if last.rebuilds else "recomputed once"
    else:
        words = f"recomputed {len(story.again)} times"
    words += _sources(story) if alone else _distances(story)
    if story.single_bytes:
        words += f", {format_bytes(story.single_bytes)} of it kept"
    return f"checkpoint, {words}" if keeps_input else words


def _sources(story: StageStory) -> str:
    """Whose inputs its recomputations set out from, where not its own."""
    starts = sorted({run.start for run in story.again})
    if starts == [story.index]:
        return ""
    if len(starts) == 1:
        return f" from stage {starts[0]}'s checkpoint"
    listed = f"{', '.join(map(str, starts[:-1]))} and {starts[-1]}"
    return f" from the checkpoints of stages {listed}"


def _distances(story: StageStory) -> str:
    """The same of one among alike stages."""
    away = max(story.index - run.start for run in story.again)
    if not away:
        return ""
    return f" from a checkpoint {away} stage{'s' * (away > 1)} before"


def explain(*stories: StageStory) -> str:
    """Why, in words; of alike stages, what all of them take and free."""
    story = stories[0]
    if not story.runs[0].executed:
        return "its forward computes nothing"
    if story.is_kept:
        if story.saved_bytes == 0:
            return "keeping it takes no memory"
        taken = format_bytes(sum(s.saved_bytes for s in stories))
        return f"room for {taken}, {format_seconds(sum(s.rebuild_s for s in stories))} to recompute"
    if not story.again and not story.is_kept_in_part:
        return "its backward needs nothing that it computes"
    cost = f"costs {format_seconds(sum(s.extra_s for s in stories))}"
    if story.freed_bytes == 0:
        return f"on the way to later stages, {cost}"
    return f"frees {format_bytes(sum(s.freed_bytes for s in stories))}, {cost}"
