"""Steps that are known because they were watched, and the calls that they consist of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any

from fxremat.graph.graph import Graph
from fxremat.passes.joint.sizes import Values
from fxremat.planner.context import Correction, StepContext
from fxremat.ranks.combine import MeasuredStep, agreed_profiles, agreed_step
from fxremat.ranks.peers import Peers
from fxremat.runtime.profile import MemoryProfile
from fxremat.solvers.knapsack import Call, Choice, peak_bytes

MOST_KNOWN = 64
"""Steps that are known; the one that was watched first goes first."""

FEW = 4
"""Steps that are alike and known each by itself; of further ones the envelope is."""

WATCHED = 2
"""Steps that are watched after plans for them were chosen together."""

LONGEST = 2
"""An envelope is at most so many times as long as the longest step in it."""

Key = tuple[int, Values, frozenset[int]]
"""What calls are told apart by: graph, sizes, and the gradients that exist."""

Row = tuple[int, ...]
"""Of a call: bytes at its forward, after it, at its backward and after that, beyond what is there
when the step begins and what calls hold; as ``knapsack.Call`` has them."""


@dataclass(slots=True)
class Called:
    """A call of the step that goes on.

    Attributes:
        graph: that is called.
        context: what it found, with nothing that steps before have shown.
        ended_by: the user's line after which the step leaves the graph, and why.
        places: the known steps that it was taken for a call of, and its places in them.
        parameters: that it reads, by ``id``.
        compiled: what its forward has followed; ``None``: it has not ended.
        held_bytes: that its forward has left.
        back_bytes: what all calls held when its backward began; ``None``: it has not.
        profile: what was seen of it.
        times_s: of its forward's begin and end, and its backward's.
    """

    graph: Graph
    context: StepContext
    ended_by: str = ""
    places: tuple[tuple[KnownStep, int], ...] = ()
    parameters: tuple[int, ...] = ()
    compiled: Any = None
    held_bytes: int = 0
    back_bytes: int | None = None
    profile: MemoryProfile | None = None
    times_s: list[float] = field(default_factory=list)

    def remembered(self) -> Called:
        """What is known of it once its step is over: no plan, nor what that holds."""
        return Called(self.graph, self.context, self.ended_by)

    @property
    def key(self) -> Key:
        """What makes it the call of a step that is known."""
        return id(self.graph), self.context.sizes, self.context.existing

    def covers(self, key: Key) -> bool:
        """Whether the call that ``key`` makes is one like this, of sizes that are no larger."""
        planner, sizes, existing = self.key
        no_larger = all(own >= other for own, other in zip(sizes, key[1], strict=False))
        return (planner, existing) == (key[0], key[2]) and no_larger

    def or_larger(self, other: Called) -> Called:
        """A call of the graph that covers this one and ``other``."""
        sizes = tuple(map(max, self.context.sizes, other.context.sizes))
        return Called(self.graph, replace(self.context, sizes=sizes), self.ended_by)


@dataclass(slots=True, eq=False)
class KnownStep:
    """A step that was watched, or an envelope: a step that leads to each of several such steps
    where some of its calls are left out, and others are smaller.

    Attributes:
        calls: of it.
        profiles: of each call.
        envelope: whether it is one.
        first_bytes: most before the first call.
        more_bytes: seen at a peak, beyond what profiles and plans explain.
        besides: what is beside each call where plans are chosen together; none if that is to be
            done.
        choices: these plans.
        there_bytes: for what is there when the step begins they were chosen.
        least_bytes, full_bytes: peak of the least plans, and of those that keep everything.
        host_bytes: for so much host memory they were chosen; ``None``: as much as they take.
        fitting: so many first calls that fit where all do not, and for what that was found.
        later_host_bytes: of it, what the calls after each are to take.
        watches: so many further steps of it are watched.
        contexts: what a call was planned for at each place when it came last, and for what it found
            and what was beside it.
        told: what breaks it was said.
        seconds: between calls, as a step that was not watched has taken them.
        peak_bytes: the peak of the one that was watched last.
        seen: so many were watched.
        mixed: some of its calls have sizes that no call had, each the largest of several calls'.
    """

    calls: tuple[Called, ...]
    profiles: list[Row]
    envelope: bool = False
    first_bytes: int = 0
    more_bytes: int = 0
    besides: list[Correction] = field(default_factory=list)
    choices: tuple[Choice, ...] = ()
    there_bytes: int = 0
    least_bytes: int = 0
    full_bytes: int = 0
    host_bytes: int | None = None
    fitting: tuple[int, tuple[object, ...]] | None = None
    later_host_bytes: list[int] = field(default_factory=list)
    watches: int = WATCHED
    contexts: dict[int, tuple[object, tuple[object, ...], StepContext]] = field(
        default_factory=dict
    )
    told: bool = False
    seconds: tuple[float, ...] = ()
    peak_bytes: int | None = None
    seen: int = 1
    mixed: bool = False

    @property
    def keys(self) -> tuple[Key, ...]:
        """The keys of the step's calls, in order."""
        return tuple(call.key for call in self.calls)

    @property
    def rows(self) -> tuple[Row, ...]:
        """All that was seen of the step, for other processes to know."""
        return (*self.profiles, (self.first_bytes, self.more_bytes))

    def see_again(self, profiles: Sequence[Row]) -> None:
        """Take what was seen of the step when it was watched once more.

        The first one may have taken what none takes again: libraries set themselves up.
        """
        if self.seen > 1:
            pairs = zip(self.profiles, profiles, strict=True)
            self.profiles = [tuple(map(max, *pair)) for pair in pairs]
        else:
            self.profiles, self.first_bytes, self.more_bytes = list(profiles), 0, 0
        self.watches -= bool(self.watches)
        self.seen += 1

    @property
    def is_sure(self) -> bool:
        """Whether it is a step that was watched often enough for a budget to be refused."""
        return self.seen > 1 and not self.mixed

    def see(self, rows: Sequence[Row]) -> None:
        """Take what was seen: plans are to be chosen for it."""
        *profiles, (self.first_bytes, self.more_bytes) = rows
        self.profiles, self.besides = list(profiles), []

    @property
    def planned_bytes(self) -> int:
        """Most that these plans take, beyond what is there when the step begins."""
        calls = [Call((own,), *at) for own, at in zip(self.choices, self.profiles, strict=True)]
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

    def around(self, calls: Sequence[Called], profiles: Sequence[Row]) -> KnownStep | None:
        """The envelope of this step and another one; ``None``: they are too different.

        Args:
            calls: of the other.
            profiles: of each of its calls.
        """
        own = [(call.key[0], call.key[2]) for call in self.calls]
        others = [(call.key[0], call.key[2]) for call in calls]
        found: list[tuple[Called, Row]] = []
        at, then, mixed = 0, 0, self.mixed
        for begin, other_begin, size in SequenceMatcher(
            None, own, others, autojunk=False
        ).get_matching_blocks():
            found += zip(self.calls[at:begin], self.profiles[at:begin], strict=True)
            found += zip(calls[then:other_begin], profiles[then:other_begin], strict=True)
            at, then = begin + size, other_begin + size
            for i, k in zip(range(begin, at), range(other_begin, then), strict=True):
                row = tuple(map(max, self.profiles[i], profiles[k]))
                larger = self.calls[i].or_larger(calls[k])
                mixed |= larger.key not in (self.calls[i].key, calls[k].key)
                found.append((larger, row))
        if len(found) > LONGEST * max(len(own), len(others)):
            return None
        merged, rows = zip(*found, strict=True)
        return KnownStep(
            tuple(merged), list(rows), True, self.first_bytes, self.more_bytes, mixed=mixed
        )


def _found_by(calls: Sequence[Called]) -> dict[int, set[frozenset[int]]]:
    """Gradients that calls have found, by graph."""
    found: dict[int, set[frozenset[int]]] = {}
    for graph, _, existing in (call.key for call in calls):
        found.setdefault(graph, set()).add(existing)
    return found


class KnownSteps:
    """The known steps of one model, the one that was watched last at the front.

    Args:
        peers: processes that run the same steps, and tell each other what they have seen;
            ``None``: this one has nobody to tell.

    Attributes:
        elsewhere_bytes: that the process that has most has more than this one when a step begins.
        has_news: the step before has taught this one something that it has not told.
    """

    def __init__(self, peers: Peers | None = None) -> None:
        self.elsewhere_bytes = 0
        self.has_news = False
        self._peers = peers
        self._steps: list[KnownStep] = []
        self._numbers: dict[int, int] = {}

    def __iter__(self) -> Iterator[KnownStep]:
        return iter(self._steps)

    @property
    def latest(self) -> KnownStep | None:
        """The step that was watched last."""
        return next(iter(self), None)

    def find(self, keys: tuple[Key, ...]) -> KnownStep | None:
        """The step that has just these calls."""
        return next((own for own in self if own.keys == keys and not own.envelope), None)

    def add(self, known: KnownStep) -> None:
        """Know a step, as the latest; more than there may be are forgotten."""
        others = [own for own in self if own is not known]
        self._steps = [known, *others[: MOST_KNOWN - 1]]

    def learn(
        self, calls: Sequence[Called], profiles: Sequence[Row], *, envelopes: bool
    ) -> list[KnownStep]:
        """Know a step that was watched; returns the known steps of which it was one.

        Args:
            calls: of it.
            profiles: of each.
            envelopes: they may be made.
        """
        calls = [call.remembered() for call in calls]
        own = self.find(tuple(call.key for call in calls))
        if own is not None:
            own.see_again(profiles)
            self.add(own)
            return [own]
        alike = [known for known in self if envelopes and known.is_alike(calls)]
        found: list[KnownStep] = []
        if alike:
            wide = next((known for known in alike if known.envelope), alike[0])
            envelope = wide.around(calls, profiles)
            if envelope is not None:
                if wide.envelope:
                    self._steps.remove(wide)
                    if envelope.keys == wide.keys:
                        envelope.watches = max(0, wide.watches - 1)
                self.add(envelope)
                found.append(envelope)
        if len(alike) < FEW or not found:
            own = KnownStep(tuple(calls), list(profiles))
            self.add(own)
            found.append(own)
        return found

    def number(self, graph: Graph) -> None:
        """A graph is called, for the first time or again: all processes number graphs alike."""
        self._numbers.setdefault(id(graph), len(self._numbers))

    def agree_with_any(self, there_bytes: int) -> None:
        """Let all processes know of the latest step what any of them has seen of it.

        Args:
            there_bytes: what is there at the begin of the next one.
        """
        if self._peers is None:
            return
        own, latest = MeasuredStep(there_bytes), self.latest
        if latest is not None:
            own = replace(own, calls=self._described(latest.keys), profiles=latest.rows)
        most = agreed_profiles(self._peers, own)
        self.elsewhere_bytes = most.base_bytes - there_bytes
        if latest is not None and most.profiles:
            latest.see(most.profiles)

    def agree_with_all(
        self, before: Sequence[Called], called: Called, there_bytes: int, *, fits: bool
    ) -> None:
        """Know what all processes have seen, where all must go on alike and so know the same steps.

        Where none has news, each of them only says so.

        Args:
            before: calls of the step before; what others have seen of it is taken over.
            called: the first call of the step that begins.
            there_bytes: what is there at its begin.
            fits: plans that were chosen for steps that begin so leave room for that.

        Raises:
            RankError: other processes make other calls.
        """
        if self._peers is None:
            return
        keys = tuple(call.key for call in before)
        latest = self.find(keys)
        (begins,) = self._described((called.key,))
        own = MeasuredStep(there_bytes, self._described(keys), begins=begins)
        if self.has_news and latest is not None:
            own = replace(own, profiles=latest.rows)
        most = agreed_step(self._peers, own, unchanged=not self.has_news and fits)
        self.has_news = False
        if most is None:
            return
        self.elsewhere_bytes = most.base_bytes - there_bytes
        for step in self:
            step.besides = []
        if most.profiles:
            if latest is None:
                latest = KnownStep(tuple(call.remembered() for call in before), [])
                self.add(latest)
            latest.see(most.profiles)

    def _described(self, keys: Sequence[Key]) -> tuple[str, ...]:
        """Calls as every process has them."""
        return tuple(
            f"{self._numbers[planner]} {values} {sorted(existing)}"
            for planner, values, existing in keys
        )
