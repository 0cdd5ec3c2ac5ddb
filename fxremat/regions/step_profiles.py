"""Profiles of watched steps, and the calls of regions that these consist of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any

from fxremat.effort import Effort
from fxremat.graph.graph import Graph
from fxremat.passes.joint.sizes import Values
from fxremat.planner.context.step_context import Correction, StepContext
from fxremat.ranks.combine import Chosen, MeasuredStep, agreed_profiles, agreed_step
from fxremat.ranks.peers import Peers
from fxremat.runtime.profile import MemoryProfile
from fxremat.solvers.knapsack import Call, Choice, peak_bytes

MOST_PROFILES = 64
"""Profiles that are kept; the one that was made first goes first."""

MOST_SIMILAR = 4
"""Similar steps that each have a separate profile; further ones widen an envelope."""

WATCHES = 2
"""Steps that are watched after plans for them were chosen together."""

LONGEST_ENVELOPE = 2
"""An envelope has at most this many times the calls of the longest step in it."""

CallKey = tuple[int, Values, frozenset[int]]
"""What distinguishes calls: the ``id`` of the graph, sizes, and the gradients that exist."""

CallProfile = tuple[int, ...]
"""Bytes at the forward of a call, after it, at its backward and after that, in the order of
``knapsack.Call``: beyond what is held when the step begins and what calls hold."""


@dataclass(slots=True)
class RegionCall:
    """A call of a region, which is one of several graphs of a step.

    Attributes:
        graph: the graph that is called.
        context: the context of the call, without feedback of earlier steps.
        ended_by: the user's line after which the step leaves the graph, and why.
        matches: the profiles whose plans the call has room in, and its position in each.
        parameters: the parameters that it reads, by ``id``.
        compiled: the plan that its forward followed; ``None``: the forward has not ended.
        held_bytes: bytes that its forward has left for its backward.
        held_at_backward_bytes: bytes that all calls held when its backward began; ``None``: it has
            not.
        profile: the measured memory of the call; ``None``: it was not measured.
        times_s: when its forward began and ended, and when its backward did.
    """

    graph: Graph
    context: StepContext
    ended_by: str = ""
    matches: tuple[tuple[StepProfile, int], ...] = ()
    parameters: tuple[int, ...] = ()
    compiled: Any = None
    held_bytes: int = 0
    held_at_backward_bytes: int | None = None
    profile: MemoryProfile | None = None
    times_s: list[float] = field(default_factory=list)

    def note_profile(self, profile: MemoryProfile) -> None:
        """Store the measured memory of the call."""
        self.profile = profile

    def without_plan(self) -> RegionCall:
        """Return a copy without plan and measurements, to be kept after its step."""
        return RegionCall(self.graph, self.context, self.ended_by)

    @property
    def key(self) -> CallKey:
        """What identifies the call in a step: its graph, sizes, and the existing gradients."""
        return id(self.graph), self.context.sizes, self.context.existing

    def covers(self, key: CallKey) -> bool:
        """Return whether ``key`` is of a call of the same graph, with sizes that are no larger.

        The same gradients must exist at both.
        """
        graph, sizes, existing = self.key
        no_larger = all(own >= other for own, other in zip(sizes, key[1], strict=False))
        return (graph, existing) == (key[0], key[2]) and no_larger

    def merged_with(self, other: RegionCall) -> RegionCall:
        """Return a call of the graph with the larger of this one's and ``other``'s sizes."""
        sizes = tuple(map(max, self.context.sizes, other.context.sizes))
        return RegionCall(self.graph, replace(self.context, sizes=sizes), self.ended_by)


@dataclass(slots=True, eq=False)
class StepProfile:
    """The profile of a measured step: bytes at each call; or the envelope of several steps.

    An envelope has the calls of all of them, with the largest sizes: each step follows if calls are
    left out and others made smaller.

    Attributes:
        calls: the calls of the step.
        profiles: bytes of each call.
        is_envelope: whether it is an envelope.
        first_bytes: the most bytes before the first call.
        more_bytes: bytes measured at a peak beyond what profiles and plans explain.
        corrections: what else is allocated at each call, if plans are chosen together; empty: they
            are to be chosen.
        choices: the plans that were chosen together.
        base_bytes: the bytes held when the step begins that these were chosen for.
        least_bytes, full_bytes: peak of the least plans, and of those that keep everything.
        host_bytes: the host memory that they were chosen for; ``None``: no limit.
        fitting: how many first calls fit if not all do, and for what that was computed.
        later_host_bytes: host memory that the calls after each one take.
        watches_left: how many further steps like it are measured.
        contexts: by position, the context that a call was last planned for, and what that was
            computed from.
        is_reported: whether the user was warned of what breaks the graph in it.
        between_s: seconds of the code between calls, in a step whose memory was not measured.
        peak_bytes: the peak of the step that was measured last.
        watched_count: how many steps were measured.
        is_mixed: whether a call has sizes that no call had, each the largest of several calls'.
    """

    calls: tuple[RegionCall, ...]
    profiles: list[CallProfile]
    is_envelope: bool = False
    first_bytes: int = 0
    more_bytes: int = 0
    corrections: list[Correction] = field(default_factory=list)
    choices: tuple[Choice, ...] = ()
    base_bytes: int = 0
    least_bytes: int = 0
    full_bytes: int = 0
    host_bytes: int | None = None
    fitting: tuple[int, tuple[object, ...]] | None = None
    later_host_bytes: list[int] = field(default_factory=list)
    watches_left: int = WATCHES
    contexts: dict[int, tuple[object, tuple[object, ...], StepContext]] = field(
        default_factory=dict
    )
    is_reported: bool = False
    between_s: tuple[float, ...] = ()
    peak_bytes: int | None = None
    watched_count: int = 1
    is_mixed: bool = False

    @property
    def effort(self) -> Effort:
        """The settings that bound the choice of plans; all graphs of a step have the same."""
        return self.calls[0].graph.options.effort

    @property
    def keys(self) -> tuple[CallKey, ...]:
        """The keys of the step's calls, in order."""
        return tuple(call.key for call in self.calls)

    @property
    def shared_profiles(self) -> tuple[CallProfile, ...]:
        """All measurements of the step: the bytes of each call, then those of the whole step."""
        return (*self.profiles, (self.first_bytes, self.more_bytes))

    def widen(self, profiles: Sequence[CallProfile]) -> None:
        """Raise the bytes of each call to ``profiles``, measured in the same step run once more.

        The second measurement replaces the first, in which libraries may have allocated what no
        later step does.
        """
        if self.watched_count > 1:
            pairs = zip(self.profiles, profiles, strict=True)
            self.profiles = [tuple(map(max, *pair)) for pair in pairs]
        else:
            self.profiles, self.first_bytes, self.more_bytes = list(profiles), 0, 0
        self.watches_left -= bool(self.watches_left)
        self.watched_count += 1

    @property
    def is_sure(self) -> bool:
        """Whether the step was measured often enough for an error that the budget is too small."""
        return self.watched_count > 1 and not self.is_mixed

    def take(self, shared: Sequence[CallProfile]) -> None:
        """Replace all measurements by ``shared`` ones; plans are then to be chosen again."""
        *profiles, (self.first_bytes, self.more_bytes) = shared
        self.profiles, self.corrections = list(profiles), []

    def follow(self, chosen: Chosen, base_bytes: int, host_bytes: int | None) -> None:
        """Store plans that were chosen together, for later steps to follow.

        Args:
            chosen: the plans.
            base_bytes: the bytes held when the step begins that they were chosen for.
            host_bytes: the host memory that they were chosen for; ``None``: no limit.
        """
        self.peak_bytes = None
        self.base_bytes, self.host_bytes = base_bytes, host_bytes
        self.least_bytes, self.full_bytes = chosen.least_bytes, chosen.full_bytes
        self.choices, self.corrections = chosen.choices, list(chosen.besides)
        takes_bytes = [choice.host_bytes for choice in chosen.choices]
        self.later_host_bytes = [sum(takes_bytes[i + 1 :]) for i in range(len(takes_bytes))]

    @property
    def planned_bytes(self) -> int:
        """Peak bytes of the chosen plans, beyond those held when the step begins."""
        calls = [Call((own,), *at) for own, at in zip(self.choices, self.profiles, strict=True)]
        return max(self.first_bytes, peak_bytes(calls, [0] * len(calls))) + self.more_bytes

    def leaves_room(self, base_bytes: int, margin_bytes: float) -> bool:
        """Return whether plans were chosen for ``base_bytes``, or up to ``margin_bytes`` more.

        Both are bytes held when the step begins.
        """
        return bool(self.corrections) and 0 <= self.base_bytes - base_bytes <= margin_bytes

    def is_similar(self, calls: Sequence[RegionCall]) -> bool:
        """Return whether ``calls`` share graphs with this step and find the same gradients there.

        A graph that finds gradients in one of the steps, and none in the other, belongs to another
        microbatch.
        """
        own, other = _existing_gradients(self.calls), _existing_gradients(calls)
        shared = own.keys() & other.keys()
        return bool(shared) and all(own[graph] == other[graph] for graph in shared)

    def envelope_with(
        self, calls: Sequence[RegionCall], profiles: Sequence[CallProfile]
    ) -> StepProfile | None:
        """Return a profile that covers this step and another one; ``None``: they differ too much.

        It has the calls of both, each with the larger sizes and bytes.

        Args:
            calls: the calls of the other step.
            profiles: the profiles of each of its calls.
        """
        own = [(call.key[0], call.key[2]) for call in self.calls]
        others = [(call.key[0], call.key[2]) for call in calls]
        merged: list[tuple[RegionCall, CallProfile]] = []
        at, other_at, is_mixed = 0, 0, self.is_mixed
        for begin, other_begin, size in SequenceMatcher(
            None, own, others, autojunk=False
        ).get_matching_blocks():
            merged += zip(self.calls[at:begin], self.profiles[at:begin], strict=True)
            merged += zip(calls[other_at:other_begin], profiles[other_at:other_begin], strict=True)
            at, other_at = begin + size, other_begin + size
            for i, k in zip(range(begin, at), range(other_begin, other_at), strict=True):
                profile = tuple(map(max, self.profiles[i], profiles[k]))
                larger = self.calls[i].merged_with(calls[k])
                is_mixed |= larger.key not in (self.calls[i].key, calls[k].key)
                merged.append((larger, profile))
        if len(merged) > LONGEST_ENVELOPE * max(len(own), len(others)):
            return None
        merged_calls, merged_profiles = zip(*merged, strict=True)
        return StepProfile(
            tuple(merged_calls),
            list(merged_profiles),
            is_envelope=True,
            first_bytes=self.first_bytes,
            more_bytes=self.more_bytes,
            is_mixed=is_mixed,
        )


def _existing_gradients(calls: Sequence[RegionCall]) -> dict[int, set[frozenset[int]]]:
    """Return, by the ``id`` of a graph, the sets of primals that had a gradient at its calls."""
    sets: dict[int, set[frozenset[int]]] = {}
    for graph, _, existing in (call.key for call in calls):
        sets.setdefault(graph, set()).add(existing)
    return sets


class StepProfiles:
    """The step profiles of one model, the one that was measured last at the front.

    Args:
        peers: processes that run the same steps and exchange their profiles; ``None``: this process
            trains by itself.

    Attributes:
        peer_excess_bytes: by how much the process that holds most holds more than this one when a
            step begins.
        has_news: whether the step before has changed a profile that peers have not received.
    """

    def __init__(self, peers: Peers | None = None) -> None:
        self.peer_excess_bytes = 0
        self.has_news = False
        self._peers = peers
        self._steps: list[StepProfile] = []
        self._numbers: dict[int, int] = {}

    def __iter__(self) -> Iterator[StepProfile]:
        return iter(self._steps)

    @property
    def latest(self) -> StepProfile | None:
        """The profile of the step that was measured last; ``None``: there is none."""
        return next(iter(self), None)

    def find(self, keys: tuple[CallKey, ...]) -> StepProfile | None:
        """Return the profile, no envelope, of a step with exactly these calls; ``None``: none."""
        return next((own for own in self if own.keys == keys and not own.is_envelope), None)

    def add(self, profile: StepProfile) -> None:
        """Put a profile at the front, and drop the oldest ones beyond the limit."""
        others = [own for own in self if own is not profile]
        self._steps = [profile, *others[: MOST_PROFILES - 1]]

    def learn(
        self, calls: Sequence[RegionCall], profiles: Sequence[CallProfile], *, envelopes: bool
    ) -> list[StepProfile]:
        """Add a measured step to the profiles; return the profiles changed or added.

        Args:
            calls: the calls of the step.
            profiles: the profiles of each call.
            envelopes: whether similar steps may be merged into one profile that covers them.
        """
        calls = [call.without_plan() for call in calls]
        own = self.find(tuple(call.key for call in calls))
        if own is not None:
            own.widen(profiles)
            self.add(own)
            return [own]
        similar = [profile for profile in self if envelopes and profile.is_similar(calls)]
        changed: list[StepProfile] = []
        if similar:
            wide = next((profile for profile in similar if profile.is_envelope), similar[0])
            envelope = wide.envelope_with(calls, profiles)
            if envelope is not None:
                if wide.is_envelope:
                    self._steps.remove(wide)
                    if envelope.keys == wide.keys:
                        envelope.watches_left = max(0, wide.watches_left - 1)
                self.add(envelope)
                changed.append(envelope)
        if len(similar) < MOST_SIMILAR or not changed:
            own = StepProfile(tuple(calls), list(profiles))
            self.add(own)
            changed.append(own)
        return changed

    def number(self, graph: Graph) -> None:
        """Give a graph the next number, at its first call; all processes number graphs alike."""
        self._numbers.setdefault(id(graph), len(self._numbers))

    def agree_with_any(self, base_bytes: int) -> None:
        """Raise the latest profile to the most bytes of any process, if all have the same calls.

        Args:
            base_bytes: what is held when the next step begins.
        """
        if self._peers is None:
            return
        own, latest = MeasuredStep(base_bytes), self.latest
        if latest is not None:
            own = replace(own, calls=self._described(latest.keys), profiles=latest.shared_profiles)
        most = agreed_profiles(self._peers, own)
        self.peer_excess_bytes = most.base_bytes - base_bytes
        if latest is not None and most.profiles:
            latest.take(most.profiles)

    def agree_with_all(
        self, before: Sequence[RegionCall], call: RegionCall, base_bytes: int, *, fits: bool
    ) -> None:
        """Raise the profile of the step before to the most bytes of any process.

        All processes must follow the same plans, which are then chosen again. If in none of them a
        profile has changed or plans leave no room, they only compare their calls.

        Args:
            before: calls of the step before; its profile in other processes is included.
            call: the first call of the step that begins.
            base_bytes: what is held when that begins.
            fits: whether plans that were chosen for steps that begin with ``call`` leave room for
                ``base_bytes``.

        Raises:
            RankError: other processes make other calls.
        """
        if self._peers is None:
            return
        keys = tuple(call.key for call in before)
        latest = self.find(keys)
        (begins,) = self._described((call.key,))
        own = MeasuredStep(base_bytes, self._described(keys), begins=begins)
        if self.has_news and latest is not None:
            own = replace(own, profiles=latest.shared_profiles)
        most = agreed_step(self._peers, own, unchanged=not self.has_news and fits)
        self.has_news = False
        if most is None:
            return
        self.peer_excess_bytes = most.base_bytes - base_bytes
        for step in self:
            step.corrections = []
        if most.profiles:
            if latest is None:
                latest = StepProfile(tuple(call.without_plan() for call in before), [])
                self.add(latest)
            latest.take(most.profiles)

    def _described(self, keys: Sequence[CallKey]) -> tuple[str, ...]:
        """Return calls as text that is equal in every process."""
        return tuple(
            f"{self._numbers[graph]} {values} {sorted(existing)}"
            for graph, values, existing in keys
        )
