"""What happens to a stage and why, in words."""

from __future__ import annotations

from fxremat.ir import Keep
from fxremat.report.stages import StageStory
from fxremat.units import format_bytes, format_seconds


def describe(*stories: StageStory) -> str:
    """What happens to a stage, or to several that are told as one, in words."""
    words = _describe_computations(stories[0]) if len(stories) == 1 else _describe_all(stories)
    moved_bytes = sum(story.moved_bytes for story in stories)
    return words + f", {format_bytes(moved_bytes)} on the host meanwhile" * (moved_bytes > 0)


def _describe_all(stories: tuple[StageStory, ...]) -> str:
    saved, held = sum(s.saved_bytes for s in stories), sum(s.held_bytes for s in stories)
    again = [story for story in stories if story.extra_s > 0]
    if not again:
        return "kept" if held == saved else f"{_of(held, saved)} kept" if held else "nothing kept"
    most = max(len(story.again) for story in again)
    words = "computed again" if most else "rebuilt"
    words += f" up to {most} times" * (most > 1)
    if len(again) < len(stories):
        words += f" in {len(again)} of {len(stories)} stages"
    return f"{_of(held, saved)} kept, rest {words}" if held else words


def _of(part: int, whole: int) -> str:
    return f"{format_bytes(part)} of {format_bytes(whole)}"


def _describe_computations(story: StageStory) -> str:
    keeps_input = story.runs[0].keep is Keep.INPUT
    if not story.runs[0].executed:
        return "nothing"
    if story.is_kept:
        return "kept"
    if not story.again:
        return _describe_part(story, keeps_input=keeps_input)
    last = story.again[-1]
    if len(story.again) == 1:
        words = "rebuilt right before its backward" if last.rebuilds else "recomputed once"
    else:
        words = f"recomputed {len(story.again)} times"
    words += _sources(story)
    if story.single_bytes:
        words += f", {format_bytes(story.single_bytes)} of it kept"
    return f"checkpoint, {words}" if keeps_input else words


def _describe_part(story: StageStory, *, keeps_input: bool) -> str:
    """Of a stage that runs forward once, and of which not all is held."""
    if story.is_kept_in_part:
        kept = f"{_of(story.held_bytes, story.saved_bytes)} kept" if story.held_bytes else ""
        return f"{kept}, rest rebuilt" if kept else "nothing kept, rebuilt in its backward"
    if keeps_input:
        return "checkpoint"
    return (
        f"{_of(story.held_bytes, story.saved_bytes)} kept" if story.held_bytes else "nothing kept"
    )


def _sources(story: StageStory) -> str:
    """Whose inputs its recomputations set out from, where not its own."""
    starts = sorted({run.start for run in story.again})
    if starts == [story.index]:
        return ""
    if len(starts) == 1:
        return f" from stage {starts[0]}'s checkpoint"
    listed = f"{', '.join(map(str, starts[:-1]))} and {starts[-1]}"
    return f" from the checkpoints of stages {listed}"


def explain(*stories: StageStory) -> str:
    """Why, in words; of several stages, what all of them take and free."""
    saved, freed = sum(s.saved_bytes for s in stories), sum(s.freed_bytes for s in stories)
    extra_s = sum(story.extra_s for story in stories)
    if not any(story.runs[0].executed for story in stories):
        return "its forward computes nothing"
    if all(story.is_kept for story in stories):
        if saved == 0:
            return "keeping it takes no memory"
        rebuild_s = sum(story.rebuild_s for story in stories)
        cost = f", {format_seconds(rebuild_s)} to recompute" if rebuild_s else ""
        return f"room for {format_bytes(saved)}{cost}"
    if not any(story.again or story.is_kept_in_part for story in stories):
        return "its backward needs nothing more"
    cost = f"costs {format_seconds(extra_s)}" if extra_s else "costs no time"
    return (
        f"frees {format_bytes(freed)}, {cost}" if freed else f"on the way to later stages, {cost}"
    )
