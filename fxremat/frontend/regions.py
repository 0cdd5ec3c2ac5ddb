"""Regions: graphs that one step runs, one after the other, within one budget.

Where a model is captured in pieces, each of them is planned by itself, but what a region leaves for
its backward is there while others run, and so is what code between them allocates. A first step
runs what leaves least of each region and is watched: from then on it is known what is there at each
call beside what regions hold, and one plan for each is chosen together.
"""

from __future__ import annotations

import itertools
import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch

from fxremat.errors import GraphBreakWarning
from fxremat.frontend.budget import Budget
from fxremat.frontend.lessons import warn
from fxremat.frontend.pipeline import Planner
from fxremat.passes.joint.sizes import Values
from fxremat.planner.pool import Candidate
from fxremat.planner.search import Search
from fxremat.planner.situation import Beside, Situation
from fxremat.runtime.levels import Levels, Watcher
from fxremat.runtime.steps import Step
from fxremat.solvers import knapsack
from fxremat.solvers.knapsack import Call, Choice
from fxremat.units import format_bytes, format_seconds

LOG = logging.getLogger("fxremat")

WATCHED = 2
"""Steps that are watched after plans for them were chosen together."""

MOST_KNOWN = 64
"""Steps that are known; the one that was watched first goes first."""

MUCH = 0.02
"""Of the budget: where so much less is there than before, plans are chosen again."""

SHARES = (1.0, 0.5, 0.25, 0.125, 0.0)
"""Of all that a region ever allocates: so much else is at the turn where plans are looked for."""

_Key = tuple[int, Values, frozenset[int]]
"""Of a call: its graph, sizes, and the gradients that exist."""


@dataclass(slots=True)
class _Called:
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
    def key(self) -> _Key:
        return id(self.planner), self.situation.sizes, self.situation.existing


@dataclass(slots=True)
class _Walk:
    """The calls of one step, in the order of their forwards.

    Attributes:
        base_bytes: what is there when the step begins.
        calls: so far.
        steps: what their forwards have left, while it is there.
        last: the call whose backward began last.
        plain: it is known, and not watched.
    """

    base_bytes: int | None = None
    calls: list[_Called] = field(default_factory=list)
    steps: weakref.WeakKeyDictionary[Step, int] = field(default_factory=weakref.WeakKeyDictionary)
    last: int | None = None
    plain: bool = False

    @property
    def keys(self) -> tuple[_Key, ...]:
        return tuple(call.key for call in self.calls)


@dataclass(slots=True)
class _Known:
    """A step that was watched.

    Attributes:
        calls: of it.
        besides: what is beside each where plans are chosen together; none if that is to be done.
        chosen: these plans.
        there_bytes: for what is there when the step begins they were chosen.
        levels: of each call: at its forward, after it, at its backward and after that, beyond what
            is there at the step's begin and what calls hold.
        watches: so many further steps of it are watched.
        told: what breaks it was said.
    """

    calls: tuple[_Called, ...]
    levels: list[tuple[int, ...]]
    besides: list[Beside] = field(default_factory=list)
    chosen: tuple[int, ...] = ()
    there_bytes: int = 0
    watches: int = WATCHED
    told: bool = False

    @property
    def keys(self) -> tuple[_Key, ...]:
        return tuple(call.key for call in self.calls)


@dataclass(slots=True)
class Regions:
    """Those of one model.

    Attributes:
        watcher: of the model's steps.
        budget: what the peak of a step may reach.
        settle_budget: is told what the budget means in bytes once that is known.
        several: steps are known to run several graphs.
        called: calls of the model are told.
        breaks: why a planner's graph is not all of the model, by the planner's ``id``; ``None``:
            that was asked for.
        known: steps that were watched.
        parameters: that calls have read, by ``id``, where nobody tells of calls of the model.
    """

    watcher: Watcher
    budget: Callable[[], Budget]
    settle_budget: Callable[[Budget], None]
    several: bool = False
    called: bool = False
    breaks: dict[int, str] | None = field(default_factory=dict)
    known: list[_Known] = field(default_factory=list)
    parameters: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    _unsure: bool = True
    _choices: dict[_Key, tuple[Choice, ...]] = field(default_factory=dict)
    _now: threading.local = field(default_factory=threading.local)
    _walks: weakref.WeakKeyDictionary[Step, _Walk] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def call(self, device: torch.device, there_bytes: Callable[[], int]) -> None:
        """A call of the model begins, or goes on with a step whose backward has not begun.

        Args:
            device: of the model.
            there_bytes: tells what is there then: what the model holds, gradients, arguments.
        """
        self.called = True
        walk = self._going_on()
        if self.several and (walk is None or not walk.calls):
            self._next().base_bytes = there_bytes()
            self._begin_watch(device)

    def enter(
        self, planner: Planner, situation: Situation, values: Sequence[object]
    ) -> tuple[Situation, bool]:
        """A call of a region begins.

        Args:
            planner: of its graph.
            situation: what it finds.
            values: with which.

        Returns the same with what is beside it, and whether that is known: if not, the plan that
        leaves least is to be followed.

        Raises:
            BudgetError: no plans of the regions fit together.
        """
        if not self.called:
            read = (p for p in values if isinstance(p, torch.nn.Parameter))
            self.parameters.update({id(p): weakref.ref(p) for p in read})
        walk, called = self._going_on() or self._next(), _Called(planner, situation)
        around_bytes = planner.step.around(situation).given_bytes
        if walk.base_bytes is None:  # nobody tells of calls of the model
            walk.base_bytes = around_bytes - situation.waiting_bytes + self._others_bytes(values)
            if not self.called:
                self._begin_watch(planner.step.joint.device)
        elif not walk.calls:  # what else was found, beside what the model holds
            walk.base_bytes += situation.kept_bytes + situation.state_bytes
            walk.base_bytes += sum(situation.bucket_bytes)
        place, keys = len(walk.calls), (*walk.keys, called.key)
        known = [own for own in self.known if own.keys[: place + 1] == keys]
        if not place:
            for own in known:
                self._choose(own, walk.base_bytes + situation.waiting_bytes)
        watched = self._watch(called, walk)
        walk.plain = bool(known) and not watched
        walk.calls.append(called)
        self._unsure = not known
        if not known:
            return replace(situation, beside=least_beside(planner, situation)), False
        besides = [own.besides[place] for own in known]
        before_bytes = walk.base_bytes + situation.waiting_bytes - around_bytes
        beside = Beside(
            before_bytes + max(beside.more_bytes for beside in besides),
            max(beside.turn_bytes for beside in besides),
            max(beside.tangent_bytes for beside in besides),
        )
        return replace(situation, beside=beside), True

    def begin(self) -> None:
        """The forward of the call that was entered last begins."""
        self._now.walk.calls[-1].times_s.append(perf_counter())

    def left(self, step: Step) -> None:
        """It has ended."""
        walk: _Walk = self._now.walk
        walk.steps[step] = len(walk.calls) - 1
        self._walks[step] = walk
        walk.calls[-1].held_bytes = step.held_bytes
        walk.calls[-1].times_s.append(perf_counter())
        self.watcher.left(step)

    def back(self, step: Step, in_flight: Iterable[Step]) -> None:
        """A backward begins, in whatever thread.

        Args:
            step: of which call.
            in_flight: steps of the model that wait for their backward, this one included.
        """
        walk = self._walks.get(step)
        if walk is None:
            return
        called = walk.calls[walk.steps[step]]
        walk.last = walk.steps[step]
        waiting_bytes = walk.calls[0].situation.waiting_bytes
        called.back_bytes = sum(other.held_bytes for other in in_flight) - waiting_bytes
        called.times_s.append(perf_counter())

    def done(self, step: Step) -> None:
        """It has ended."""
        walk = self._walks.get(step)
        if walk is not None:
            walk.calls[walk.steps[step]].times_s.append(perf_counter())

    def _others_bytes(self, values: Sequence[object]) -> int:
        """Of parameters that only other calls read, and of their gradients."""
        own = {id(p): p for p in values if isinstance(p, torch.nn.Parameter)}
        alive = {place: p for place, found in self.parameters.items() if (p := found()) is not None}
        others = [p for place, p in alive.items() if place not in own]
        gradients = [p.grad for p in others if p.grad is not None]
        return sum(tensor.untyped_storage().nbytes() for tensor in (*others, *gradients))

    def _begin_watch(self, device: torch.device) -> None:
        """Watch a step that begins, where it may teach."""
        if self._unsure or any(own.watches for own in self.known):
            self.watcher.begin(device)

    def _going_on(self) -> _Walk | None:
        """The step of this thread, if it is none whose backward has begun, or can be no more."""
        walk: _Walk | None = getattr(self._now, "walk", None)
        if walk is None or walk.last is not None:
            return None
        return walk if not walk.calls or any(step.held_bytes for step in walk.steps) else None

    def _next(self) -> _Walk:
        """A new step."""
        self.watcher.end()
        walk: _Walk | None = getattr(self._now, "walk", None)
        if walk is not None and walk.plain:
            self._tell_breaks(walk)
        walk = self._now.walk = _Walk()
        return walk

    def _tell_breaks(self, walk: _Walk) -> None:
        """Warn of what breaks a step that has run as planned, once."""
        alike = (own for own in self.known if own.keys[: len(walk.calls)] == walk.keys)
        known = next(alike, None)
        if self.breaks is None or known is None:
            return
        if known.told or any(len(call.times_s) != 4 for call in walk.calls):
            return
        known.told = True
        lines = []
        for call, after in itertools.pairwise(walk.calls):
            seconds = after.times_s[0] - call.times_s[1] + call.times_s[2] - after.times_s[3]
            reason = self.breaks.get(id(call.planner), "it returns to what is not captured")
            lines.append(f"  {format_seconds(seconds)}: {reason}")
        warnings.warn(
            f"a step runs {len(walk.calls)} graphs, each planned for what is beside it. Seconds "
            "between them, in both directions, which are not planned:\n" + "\n".join(lines),
            GraphBreakWarning,
            stacklevel=2,
        )

    def _watch(self, called: _Called, walk: _Walk) -> bool:
        """Have a call watched where its step is; whether it is."""
        place = len(walk.calls)

        def tell(seen: Levels) -> None:
            called.levels = seen
            if place == len(walk.calls) - 1:
                self._learn(walk)

        return self.watcher.join(tell)

    def _learn(self, walk: _Walk) -> None:
        """A step was watched to its end."""
        seen = _seen(walk)
        if seen is None:
            return
        keys = walk.keys
        first, *_ = walk.calls
        assert walk.base_bytes is not None
        peak_bytes = walk.base_bytes + first.situation.waiting_bytes + _peak_bytes(walk)
        over = peak_bytes - (self.budget().nbytes or peak_bytes)
        if over > 0:
            warn(
                f"this step of {len(keys)} regions took {peak_bytes} bytes, {over} "
                f"({format_bytes(over)}) more than its budget of {self.budget().nbytes}. The next "
                "step's plans leave room for that"
            )
        known = next((own for own in self.known if own.keys == keys), None)
        if known is None:
            self.known = [_Known(tuple(walk.calls), seen), *self.known[: MOST_KNOWN - 1]]
            return
        known.watches -= 1
        known.levels = [
            tuple(max(pair) + max(over, 0) for pair in zip(before, now, strict=True))
            for before, now in zip(known.levels, seen, strict=True)
        ]
        planned_bytes = knapsack.peak_bytes(self._calls(known), known.chosen)
        there_bytes = walk.base_bytes + first.situation.waiting_bytes
        if there_bytes + planned_bytes > (self.budget().nbytes or 0):
            known.besides = []

    def _calls(self, known: _Known) -> list[Call]:
        """A step as the knapsack has it."""
        return [
            Call(self._choices_of(call), *levels)
            for call, levels in zip(known.calls, known.levels, strict=True)
        ]

    def _choose(self, known: _Known, there_bytes: int) -> None:
        """Choose plans for all calls of a step together, if that is to be done.

        Args:
            known: the step.
            there_bytes: what is there at its begin.

        Raises:
            BudgetError: none fit.
        """
        spare_bytes = known.there_bytes - there_bytes
        if known.besides and 0 <= spare_bytes <= MUCH * (self.budget().nbytes or 0):
            return
        known.there_bytes = there_bytes
        calls = self._calls(known)
        least = knapsack.least(calls)
        kept_bytes = knapsack.peak_bytes(calls, [len(call.choices) - 1 for call in calls])
        budget_bytes = self._resolved(
            full_bytes=there_bytes + kept_bytes,
            least_bytes=there_bytes + least.peak_bytes,
            count=len(calls),
        )
        found = knapsack.solve(calls, budget_bytes=budget_bytes - there_bytes)
        assert found is not None  # the least one fits
        LOG.info(
            "%d regions: peak %s of %s",
            len(calls),
            format_bytes(there_bytes + found.peak_bytes),
            format_bytes(budget_bytes),
        )
        known.chosen = found.chosen
        rooms = knapsack.rooms(calls, found.chosen)
        known.besides = [
            Beside(
                call.forward_bytes,
                room - call.forward_bytes,
                call.backward_bytes - call.forward_bytes,
            )
            for call, room in zip(calls, rooms, strict=True)
        ]

    def _choices_of(self, call: _Called) -> tuple[Choice, ...]:
        if call.key not in self._choices:
            self._choices[call.key] = choices_of(call.planner, call.situation)
        return self._choices[call.key]

    def _resolved(self, *, full_bytes: int, least_bytes: int, count: int) -> int:
        """Bytes that the budget means from now on.

        Raises:
            BudgetError: below ``least_bytes``.
        """
        budget = self.budget()
        if budget.grows and least_bytes > (budget.nbytes or 0):
            budget = replace(budget, nbytes=least_bytes)
        nbytes = budget.resolve(
            full_bytes=full_bytes, least_bytes=least_bytes, needed_by=f"{count} regions together"
        )
        self.settle_budget(replace(budget, nbytes=nbytes, share=None))
        return nbytes


def least_beside(planner: Planner, situation: Situation) -> Beside:
    """Beside a call that is to leave least, whatever else that takes."""
    table = planner.step.at(situation.sizes)[0].measured.line.joint.storages
    return Beside(0, sum(table.nbytes), 0)


def choices_of(planner: Planner, situation: Situation) -> tuple[Choice, ...]:
    """Plans of a graph that no other beats in all of bytes held, both peaks and seconds.

    The last one keeps everything.
    """
    whole_bytes = least_beside(planner, situation).turn_bytes
    found: dict[Choice, None] = {}
    for share in SHARES:
        beside = Beside(0, int(share * whole_bytes), 0)
        ways = planner.schedules.searched(replace(situation, waiting_bytes=0, beside=beside))
        for way in ways:
            found.update(dict.fromkeys(_choice(way.search, c) for c in way.search.pool.members))
        kept = _choice(ways[0].search, ways[0].search.baseline)
    found.pop(kept)
    best = [choice for choice in found if not any(_beats(other, choice) for other in found)]
    return (*best, kept)


def _choice(search: Search, candidate: Candidate) -> Choice:
    evaluation, around = search.evaluator.evaluation(candidate), search.setting.surroundings
    turn, peaks_bytes = evaluation.turn, evaluation.peaks_bytes
    return Choice(
        evaluation.turn_bytes - around.given_bytes - around.turn_bytes,
        max(peaks_bytes[:turn]) - around.given_bytes,
        max((*peaks_bytes[turn:], evaluation.end_bytes)) - around.given_bytes,
        candidate.total_s,
    )


def _beats(one: Choice, other: Choice) -> bool:
    return one != other and (
        one.held_bytes <= other.held_bytes
        and one.forward_bytes <= other.forward_bytes
        and one.backward_bytes <= other.backward_bytes
        and one.seconds <= other.seconds
    )


def _seen(walk: _Walk) -> list[tuple[int, ...]] | None:
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


def _peak_bytes(walk: _Walk) -> int:
    """Most that a step had allocated, over what was there at its begin."""
    levels = (call.levels for call in walk.calls)
    return max(seen.begin_bytes + seen.peak_bytes for seen in levels if seen is not None)
