"""A step of several calls, as it goes on and as it was watched."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

from fxremat.frontend.pipeline import Planner
from fxremat.passes.joint.sizes import Values
from fxremat.planner.situation import Beside, Situation
from fxremat.runtime.levels import Levels
from fxremat.runtime.steps import Step
from fxremat.solvers.knapsack import Call, Choice, peak_bytes

WATCHED = 2
"""Steps that are watched after plans for them were chosen together."""

Key = tuple[int, Values, frozenset[int]]
"""Of a call: its graph, sizes, and the gradients that exist."""


@dataclass(slots=True)
class Called:
    """A call of the step that goes on.

    Attributes:
        planner: of its graph.
        situation: what it found, with nothing that steps before have shown.
        held_bytes: that its forward has left.
        back_bytes: what all calls held when its backward began; ``None``: it has not.
        levels: what was seen of it.
        times_s: of its forward's begin and end, and its backward's.
    """

    planner: Planner
    situation: Situation
    held_bytes: int = 0
    back_bytes: int | None = None
    levels: Levels | None = None
    times_s: list[float] = field(default_factory=list)

    @property
    def key(self) -> Key:
        """What makes it the call of a step that is known."""
        return id(self.planner), self.situation.sizes, self.situation.existing


@dataclass(slots=True)
class Walk:
    """The calls of one step, in the order of their forwards.

    Attributes:
        base_bytes: what is there when the step begins.
        calls: so far.
        steps: what their forwards have left, while it is there.
        last: the call whose backward began last.
        plain: it is known, and not watched.
        failed: a call of the model has raised: no further one goes on with it.
    """

    base_bytes: int | None = None
    calls: list[Called] = field(default_factory=list)
    steps: weakref.WeakKeyDictionary[Step, int] = field(default_factory=weakref.WeakKeyDictionary)
    last: int | None = None
    plain: bool = False
    failed: bool = False

    @property
    def keys(self) -> tuple[Key, ...]:
        """Of its calls."""
        return tuple(call.key for call in self.calls)


@dataclass(slots=True)
class Known:
    """A step that was watched.

    Attributes:
        calls: of it.
        besides: what is beside each where plans are chosen together; none if that is to be done.
        choices: these plans.
        there_bytes: for what is there when the step begins they were chosen.
        host_bytes: for so much host memory they were chosen; ``None``: as much as they take.
        later_host_bytes: of it, what the calls after each are to take.
        levels: of each call: at its forward, after it, at its backward and after that, beyond what
            is there at the step's begin and what calls hold.
        watches: so many further steps of it are watched.
        told: what breaks it was said.
    """

    calls: tuple[Called, ...]
    levels: list[tuple[int, ...]]
    besides: list[Beside] = field(default_factory=list)
    choices: tuple[Choice, ...] = ()
    there_bytes: int = 0
    host_bytes: int | None = None
    later_host_bytes: list[int] = field(default_factory=list)
    watches: int = WATCHED
    told: bool = False

    @property
    def keys(self) -> tuple[Key, ...]:
        """Of its calls."""
        return tuple(call.key for call in self.calls)

    @property
    def planned_bytes(self) -> int:
        """Most that these plans take, beyond what is there when the step begins."""
        calls = [Call((own,), *at) for own, at in zip(self.choices, self.levels, strict=True)]
        return peak_bytes(calls, [0] * len(calls))

    def leaves_room(self, there_bytes: int, much_bytes: float) -> bool:
        """Whether plans were chosen for what is there when a step begins, or for little more."""
        return bool(self.besides) and 0 <= self.there_bytes - there_bytes <= much_bytes


def seen_levels(walk: Walk) -> list[tuple[int, ...]] | None:
    """What was there at each call of a step beyond what calls hold, as ``knapsack.Call`` has it.

    ``None``: it was not seen to its end.
    """
    found: list[tuple[int, ...]] = []
    first, *_ = walk.calls
    for place, call in enumerate(walk.calls):
        seen = call.levels
        if seen is None or walk.last is None:
            return None
        held_bytes = call.situation.waiting_bytes - first.situation.waiting_bytes
        forward = seen.begin_bytes - held_bytes
        after = seen.begin_bytes + seen.after_bytes - held_bytes - call.held_bytes
        back, before = after, forward
        if seen.taken_bytes is not None and call.back_bytes is not None:
            back = seen.begin_bytes + seen.taken_bytes - call.back_bytes
            if place != walk.last:
                before = seen.begin_bytes + seen.before_bytes - held_bytes
        found.append((forward, after, back, before))
    return found


def most_bytes(walk: Walk) -> int:
    """Most that a step had allocated, over what was there at its begin."""
    levels = (call.levels for call in walk.calls)
    return max(seen.begin_bytes + seen.peak_bytes for seen in levels if seen is not None)


def between(walk: Walk) -> Iterator[tuple[Called, float]]:
    """Each call but the last of a step that has ended, and the seconds from there to the next one
    and back.
    """
    for call, after in itertools.pairwise(walk.calls):
        seconds = after.times_s[0] - call.times_s[1] + call.times_s[2] - after.times_s[3]
        yield call, seconds
