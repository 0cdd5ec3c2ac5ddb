"""A step of several calls: as it goes on, and as those that were watched have shown it to be."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Protocol

from fxremat.frontend.pipeline import Planner
from fxremat.passes.joint.sizes import Values
from fxremat.planner.situation import Beside, Situation
from fxremat.report.plan import Plan
from fxremat.runtime.levels import Levels
from fxremat.runtime.steps import Step
from fxremat.solvers.knapsack import Call, Choice, peak_bytes

WATCHED = 2
"""Steps that are watched after plans for them were chosen together."""

LONGEST = 2
"""An envelope is at most so many times as long as the longest step in it."""

Key = tuple[int, Values, frozenset[int]]
"""Of a call: its graph, sizes, and the gradients that exist."""

Row = tuple[int, ...]
"""Of a call: bytes at its forward, after it, at its backward and after that, beyond what is there
when the step begins and what calls hold; as ``knapsack.Call`` has them."""


@dataclass(slots=True)
class Called:
    """A call of the step that goes on.

    Attributes:
        planner: of its graph.
        situation: what it found, with nothing that steps before have shown.
        ended_by: the user's line after which the step leaves the graph, and why.
        held_bytes: that its forward has left.
        back_bytes: what all calls held when its backward began; ``None``: it has not.
        levels: what was seen of it.
        times_s: of its forward's begin and end, and its backward's.
    """

    planner: Planner
    situation: Situation
    ended_by: str = ""
    held_bytes: int = 0
    back_bytes: int | None = None
    levels: Levels | None = None
    times_s: list[float] = field(default_factory=list)

    @property
    def key(self) -> Key:
        """What makes it the call of a step that is known."""
        return id(self.planner), self.situation.sizes, self.situation.existing

    def covers(self, key: Key) -> bool:
        """Whether a call is one like this, of sizes that are no larger."""
        planner, sizes, existing = self.key
        no_larger = all(own >= other for own, other in zip(sizes, key[1], strict=False))
        return (planner, existing) == (key[0], key[2]) and no_larger

    def or_larger(self, other: Called) -> Called:
        """A call of the same graph as both, that covers them."""
        sizes = tuple(map(max, self.situation.sizes, other.situation.sizes))
        return Called(self.planner, replace(self.situation, sizes=sizes), self.ended_by)


@dataclass(slots=True, eq=False)
class Known:
    """A step that was watched, or an envelope: a step that leads to each of several such steps
    where some of its calls are left out, and others are smaller.

    Attributes:
        calls: of it.
        levels: of each call.
        envelope: whether it is one.
        first_bytes: most before the first call.
        more_bytes: seen at a peak, beyond what levels and plans explain.
        besides: what is beside each call where plans are chosen together; none if that is to be
            done.
        choices: these plans.
        there_bytes: for what is there when the step begins they were chosen.
        least_bytes, full_bytes: peak of the least plans, and of those that keep everything.
        host_bytes: for so much host memory they were chosen; ``None``: as much as they take.
        later_host_bytes: of it, what the calls after each are to take.
        watches: so many further steps of it are watched.
        told: what breaks it was said.
        seconds: between calls, as a step that was not watched has taken them.
        seen_bytes: the peak of the one that was watched last.
        seen: so many were watched.
    """

    calls: tuple[Called, ...]
    levels: list[Row]
    envelope: bool = False
    first_bytes: int = 0
    more_bytes: int = 0
    besides: list[Beside] = field(default_factory=list)
    choices: tuple[Choice, ...] = ()
    there_bytes: int = 0
    least_bytes: int = 0
    full_bytes: int = 0
    host_bytes: int | None = None
    later_host_bytes: list[int] = field(default_factory=list)
    watches: int = WATCHED
    told: bool = False
    seconds: tuple[float, ...] = ()
    seen_bytes: int | None = None
    seen: int = 1

    @property
    def keys(self) -> tuple[Key, ...]:
        """Of its calls."""
        return tuple(call.key for call in self.calls)

    @property
    def rows(self) -> tuple[Row, ...]:
        """All that was seen of it, for others to know."""
        return (*self.levels, (self.first_bytes, self.more_bytes))

    def see_again(self, levels: Sequence[Row]) -> None:
        """It was watched once more.

        The first one may have taken what none takes again: libraries set themselves up.
        """
        if self.is_sure:
            pairs = zip(self.levels, levels, strict=True)
            self.levels = [tuple(map(max, *pair)) for pair in pairs]
        else:
            self.levels, self.first_bytes, self.more_bytes = list(levels), 0, 0
        self.watches -= bool(self.watches)
        self.seen += 1

    @property
    def is_sure(self) -> bool:
        """Whether it was watched often enough for a budget to be refused."""
        return self.seen > 1

    def see(self, rows: Sequence[Row]) -> None:
        """Take what was seen: plans are to be chosen for it."""
        *levels, (self.first_bytes, self.more_bytes) = rows
        self.levels, self.besides = list(levels), []

    @property
    def planned_bytes(self) -> int:
        """Most that these plans take, beyond what is there when the step begins."""
        calls = [Call((own,), *at) for own, at in zip(self.choices, self.levels, strict=True)]
        return max(self.first_bytes, peak_bytes(calls, [0] * len(calls))) + self.more_bytes

    def leaves_room(self, there_bytes: int, much_bytes: float) -> bool:
        """Whether plans were chosen for what is there when a step begins, or for little more."""
        return bool(self.besides) and 0 <= self.there_bytes - there_bytes <= much_bytes

    def is_alike(self, calls: Sequence[Called]) -> bool:
        """Whether a step runs graphs of this one, as this one finds them.

        A graph that finds gradients in one of them, and none in the other, is another
        microbatch's.
        """
        own, other = _found_by(self.calls), _found_by(calls)
        shared = own.keys() & other.keys()
        return bool(shared) and all(own[graph] == other[graph] for graph in shared)

    def around(self, calls: Sequence[Called], levels: Sequence[Row]) -> Known | None:
        """The envelope of this step and another one; ``None``: they are too different.

        Args:
            calls: of the other.
            levels: of each of its calls.
        """
        own = [(call.key[0], call.key[2]) for call in self.calls]
        others = [(call.key[0], call.key[2]) for call in calls]
        found: list[tuple[Called, Row]] = []
        at, then = 0, 0
        for begin, other_begin, size in SequenceMatcher(
            None, own, others, autojunk=False
        ).get_matching_blocks():
            found += zip(self.calls[at:begin], self.levels[at:begin], strict=True)
            found += zip(calls[then:other_begin], levels[then:other_begin], strict=True)
            at, then = begin + size, other_begin + size
            for i, k in zip(range(begin, at), range(other_begin, then), strict=True):
                row = tuple(map(max, self.levels[i], levels[k]))
                found.append((self.calls[i].or_larger(calls[k]), row))
        if len(found) > LONGEST * max(len(own), len(others)):
            return None
        merged, rows = zip(*found, strict=True)
        return Known(tuple(merged), list(rows), True, self.first_bytes, self.more_bytes)


def _found_by(calls: Sequence[Called]) -> dict[int, set[frozenset[int]]]:
    """By graph, the gradients that its calls have found."""
    found: dict[int, set[frozenset[int]]] = {}
    for graph, _, existing in (call.key for call in calls):
        found.setdefault(graph, set()).add(existing)
    return found


class HasPlan(Protocol):
    """What a call has followed."""

    @property
    def plan(self) -> Plan:
        """The plan, for people."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A call that a step has made, for people.

    Attributes:
        compiled: what it followed.
        places: the known steps that it was taken for a call of, and its places in them.
        parameters: that it reads, by ``id``.
        held_bytes: that its forward has left.
    """

    compiled: HasPlan
    places: tuple[tuple[Known, int], ...]
    parameters: tuple[int, ...]
    held_bytes: int


@dataclass(slots=True, eq=False)
class Walk:
    """The calls of one step, in the order of their forwards.

    Attributes:
        base_bytes: what is there when the step begins.
        calls: so far.
        steps: what their forwards have left, while it is there.
        begun: known steps that begin with the same calls.
        places: where it has come to in other known steps, with some of their calls left out.
        open: a call of the model goes on.
        last: the call whose backward began last.
        done: a backward of it was seen to end.
        unknown: a call of it is none of a known step's at that place, or had no room there.
        watched: it is.
        unseen: why nothing was learned from it.
        failed: a call of the model has raised: no further one goes on with it.
        found: of the last call, its places in known steps and the parameters that it reads.
        ran: calls whose forward has ended.
    """

    base_bytes: int | None = None
    calls: list[Called] = field(default_factory=list)
    steps: weakref.WeakKeyDictionary[Step, int] = field(default_factory=weakref.WeakKeyDictionary)
    begun: list[Known] = field(default_factory=list)
    places: dict[Known, int] = field(default_factory=dict)
    open: bool = False
    last: int | None = None
    done: bool = False
    unknown: bool = False
    watched: bool = False
    unseen: str = ""
    failed: bool = False
    found: tuple[tuple[tuple[Known, int], ...], tuple[int, ...]] = ((), ())
    ran: list[Ran] = field(default_factory=list)

    @property
    def keys(self) -> tuple[Key, ...]:
        """Of its calls."""
        return tuple(call.key for call in self.calls)

    def begin(self, known: Sequence[Known]) -> None:
        """Let it be compared with steps that are known."""
        self.begun, self.places = list(known), dict.fromkeys(known, -1)

    def follow(self, key: Key) -> list[tuple[Known, int]]:
        """A call begins: the known steps in which it comes next, and its places in them.

        Those that were called alike so far, if there are any; else those that have room for it.
        """
        at = len(self.calls)
        self.begun = [k for k in self.begun if at < len(k.calls) and k.calls[at].key == key]
        found: list[tuple[Known, int]] = []
        for known, place in self.places.items():
            later = range(place + 1, len(known.calls))
            at_next = next((i for i in later if known.calls[i].covers(key)), None)
            if at_next is not None:
                self.places[known] = at_next
                found.append((known, at_next))
        return [(known, at) for known in self.begun] or found


def seen_levels(walk: Walk) -> list[Row] | None:
    """Levels of each call of a step that was watched; ``None``: not to its end."""
    found: list[Row] = []
    for call in walk.calls:
        seen = call.levels
        if seen is None or not (walk.done or walk.last is not None):
            return None
        first, *_ = walk.calls
        held_bytes = call.situation.waiting_bytes - first.situation.waiting_bytes
        forward = seen.begin_bytes - held_bytes
        after = seen.begin_bytes + seen.after_bytes - held_bytes - call.held_bytes
        back, before = after, forward
        if seen.taken_bytes is not None and call.back_bytes is not None:
            back = seen.begin_bytes + seen.taken_bytes - call.back_bytes
            before = seen.begin_bytes + seen.before_bytes - held_bytes
        found.append((forward, after, back, before))
    return found


def between(walk: Walk) -> Iterator[float]:
    """Of each call but the last of a step that has ended, the seconds from there to the next one
    and back.
    """
    for call, after in zip(walk.calls, walk.calls[1:], strict=False):
        yield after.times_s[0] - call.times_s[1] + call.times_s[2] - after.times_s[3]
