"""A step of several calls, as it goes on."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fxremat.regions.step_profiles import Called, Key, KnownStep, Row
from fxremat.runtime.counted import Count
from fxremat.runtime.steps import Step


@dataclass(slots=True, eq=False)
class Walk:
    """The calls of one step, in the order of their forwards.

    Attributes:
        base_bytes: what is there when the step begins.
        found_bytes: of that, what its first call has found beside what the model holds.
        calls: so far.
        steps: what their forwards have left, while it is there; each knows its place.
        begun: known steps that begin with the same calls.
        places: where it has come to in other known steps, with some of their calls left out.
        open: a call of the model goes on.
        last: the call whose backward began last.
        done: a backward of it was seen to end.
        unknown: a call of it is none of a known step's at that place, or had no room there.
        watched: it is.
        count: of what it takes, where it is not watched.
        unseen: why nothing was learned from it.
        failed: a call of the model has raised: no further one goes on with it.
        line: of the user's code that calls the model.
        kept_bytes: outputs of earlier steps that somebody holds when it begins.
        returned_bytes: outputs of the model, which the usual loop holds into the next step.
        short: it was said that no plans of it fit.
        unended: nothing that the model returned leads to a backward, so the step is watched until
            the next call, or the optimizer's step.
    """

    base_bytes: int | None = None
    found_bytes: int = 0
    calls: list[Called] = field(default_factory=list)
    steps: list[weakref.ref[Step]] = field(default_factory=list)
    begun: list[KnownStep] = field(default_factory=list)
    places: dict[KnownStep, int] = field(default_factory=dict)
    open: bool = False
    last: int | None = None
    done: bool = False
    unknown: bool = False
    watched: bool = False
    count: Count | None = None
    unseen: str = ""
    failed: bool = False
    line: str = ""
    kept_bytes: int = 0
    returned_bytes: int = 0
    short: bool = False
    unended: bool = False

    @property
    def waits(self) -> bool:
        """Whether a backward of it has not run, or may run again."""
        return any(step is not None and step.waits for step in (own() for own in self.steps))

    @property
    def ran(self) -> list[Called]:
        """Calls whose forward has ended."""
        return [call for call in self.calls if call.compiled is not None]

    def planned_bytes(self) -> Iterator[int]:
        """Peak of each call that followed a plan, beyond what is there when the step begins.

        Plans have room for any of the steps that it may have been one of.
        """
        for call in self.ran:
            if call.places:
                there_bytes = max(known.there_bytes + known.more_bytes for known, _ in call.places)
                yield call.compiled.record.predicted_peak_bytes - there_bytes

    def begin(self, known: Iterable[KnownStep]) -> None:
        """Let it be compared with steps that are known."""
        self.begun = list(known)
        self.places = dict.fromkeys(self.begun, -1)

    def follow(self, key: Key) -> list[tuple[KnownStep, int]]:
        """A call begins: the known steps in which it comes next, and its places in them.

        Those that were called alike so far, if there are any; else those that have room for it.
        """
        at = len(self.calls)
        self.begun = [k for k in self.begun if at < len(k.calls) and k.calls[at].key == key]
        found: list[tuple[KnownStep, int]] = []
        for known, place in self.places.items():
            later = range(place + 1, len(known.calls))
            at_next = next((i for i in later if known.calls[i].covers(key)), None)
            if at_next is not None:
                self.places[known] = at_next
                found.append((known, at_next))
        return [(known, at) for known in self.begun] or found


def seen_profiles(walk: Walk) -> list[Row] | None:
    """What was seen of each call of a watched step; ``None``: it was not seen to its end."""
    found: list[Row] = []
    for call in walk.calls:
        seen = call.profile
        if seen is None or not (walk.done or walk.last is not None):
            return None
        first, *_ = walk.calls
        held_bytes = call.context.waiting_bytes - first.context.waiting_bytes
        forward = seen.begin_bytes - held_bytes
        after = seen.begin_bytes + seen.after_bytes - held_bytes - call.held_bytes
        back, before = after, forward
        if seen.taken_bytes is not None and call.back_bytes is not None:
            back = seen.begin_bytes + seen.taken_bytes - call.back_bytes
            before = seen.begin_bytes + seen.before_bytes - held_bytes
        found.append((forward, after, back, before))
    return found


def between(walk: Walk) -> Iterator[float]:
    """Seconds from each call to the next one and back, of a step that has ended."""
    for call, after in zip(walk.calls, walk.calls[1:], strict=False):
        yield after.times_s[0] - call.times_s[1] + call.times_s[2] - after.times_s[3]
