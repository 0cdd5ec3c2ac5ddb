"""Plans for all calls of a step, chosen together within one budget."""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fxremat.errors import BudgetError, CostError
from fxremat.graph.further import grow
from fxremat.graph.graph import Graph
from fxremat.loop.loop import Loop
from fxremat.options.budget import TrainingBudget
from fxremat.planner.context.step_context import Correction, StepContext
from fxremat.ranks.combine import Chosen
from fxremat.ranks.peers import Peers
from fxremat.regions.call_trace import CallTrace
from fxremat.regions.joint_choice import choices_of, choose_together, region_context
from fxremat.regions.step_profiles import CallKey, RegionCall, StepProfile, StepProfiles
from fxremat.solvers.knapsack import Call, Choice, least

MARGIN = 0.02
"""Share of the budget: where so much less is held than plans were chosen for, they are chosen
again."""


def margin_bytes(budget: TrainingBudget) -> float:
    """Return how many bytes less than planned for may be held before plans are chosen again."""
    return MARGIN * (budget.nbytes or 0)


AMPLE = 1.2
"""The budget over the peak of steps that keep everything, from which new calls keep everything."""


def is_ample(budget: TrainingBudget, profiles: StepProfiles) -> bool:
    """Return whether all steps that were planned so far could keep everything, with room to spare.

    Then a step that is like none of them keeps everything, too.
    """
    full = [profile.full_bytes for profile in profiles if profile.choices]
    return bool(full) and AMPLE * max(full) <= (budget.nbytes or 0)


@dataclass(slots=True)
class JointPlans:
    """Chooses plans for all calls of a step together, within one budget.

    In all methods ``base_bytes`` is what is held when a step begins, with what is set aside.
    """

    _planned_bytes: int = 0  # the least "min" that made plans have needed
    _choices: dict[tuple[CallKey, bool], tuple[Choice, ...]] = field(default_factory=dict)

    def leaves_room(self, loop: Loop, profile: StepProfile, base_bytes: int) -> bool:
        """Return whether the plans of a step may be followed where ``base_bytes`` are held.

        They may if they were chosen for as many bytes or slightly more, and for as much host memory
        or slightly less than is free.
        """
        host_bytes = loop.free_host_bytes()
        more_bytes = (host_bytes or 0) - (profile.host_bytes or 0)
        is_near = 0 <= more_bytes <= MARGIN * (host_bytes or 0)
        return is_near and profile.leaves_room(base_bytes, margin_bytes(loop.budget))

    def leave_room(
        self, loop: Loop, profiles: StepProfiles, key: CallKey, base_bytes: int
    ) -> bool | None:
        """Return whether the plans of all steps that begin with the call ``key`` may be followed.

        ``None``: no step begins with it. See :meth:`leaves_room`.
        """
        begun = [profile for profile in profiles if profile.keys[:1] == (key,)]
        fit = (self.leaves_room(loop, profile, base_bytes) for profile in begun)
        return all(fit) if begun else None

    def grow_budget(self, budget: TrainingBudget, nbytes: int | None) -> bool:
        """Raise ``"min"`` to ``nbytes``, which an emitted plan takes; return whether it has grown.

        Plans are chosen together by what each call takes by itself. An allocator may need a little
        more for the plan that is made of them.
        """
        if not budget.grows or nbytes is None or nbytes <= (budget.nbytes or 0):
            return False
        self._planned_bytes = nbytes
        budget.set(nbytes)
        return True

    def matches(
        self,
        loop: Loop,
        profiles: StepProfiles,
        trace: CallTrace,
        key: CallKey,
        base_bytes: int,
        *,
        followed_by: Peers | None,
    ) -> tuple[list[tuple[StepProfile, int]], BudgetError | None]:
        """Return the profiles whose plans have room for a call, and its position in each.

        Plans are chosen for profiles that have none. If no profile that the step matches has plans
        that fit the calls so far, the error of the first is returned as well.

        Args:
            loop: the training loop of the model.
            profiles: the profiles of all steps.
            trace: the step before the call.
            key: the key of the call.
            base_bytes: see :class:`JointPlans`.
            followed_by: processes that must follow the same plans; ``None``: there are none.
        """
        matches: list[tuple[StepProfile, int]] = []
        failed, may_fit = None, False
        for profile, position in trace.advance(key):
            if followed_by is not None and profile not in trace.matching:
                continue  # ranks have the same profiles, but not the same sizes
            try:
                # As chosen when the step began.
                fits = bool(trace.calls and profile.corrections) or self._choose(
                    loop,
                    profiles,
                    profile,
                    base_bytes,
                    begun=position + 1,
                    followed_by=followed_by,
                )
            except BudgetError as error:
                failed = failed or error.with_traceback(None)  # with frames it would hold the step
                continue
            if fits:
                matches.append((profile, position))
            else:
                may_fit = True
        same = [own for own in trace.matching if not own.is_envelope] or trace.matching
        is_sure = followed_by is not None or all(own.is_sure for own in same)
        is_final = not (matches or may_fit) and bool(trace.matching) and is_sure
        return matches, failed if is_final else None

    def _choose(
        self,
        loop: Loop,
        profiles: StepProfiles,
        profile: StepProfile,
        base_bytes: int,
        *,
        begun: int,
        followed_by: Peers | None,
    ) -> bool:
        """Choose plans for all calls of a step, unless those that it has leave room.

        If not all calls fit, the step may still follow this profile: it may end before those that
        do not.

        Args:
            loop: the training loop of the model.
            profiles: the profiles of all steps.
            profile: the profile of the step.
            base_bytes: see :class:`JointPlans`.
            begun: how many of its calls have begun.
            followed_by: processes that must follow the same plans; ``None``: there are none.

        Returns whether plans fit for all calls; if not, some fit for the calls that have begun.

        Raises:
            BudgetError: no plans fit for the calls that have begun.
        """
        if self.leaves_room(loop, profile, base_bytes):
            return True
        asked = base_bytes, loop.budget.nbytes, profile.shared_profiles
        fitting = profile.fitting
        if fitting is not None and fitting[1] == asked and begun <= fitting[0]:
            return False
        if not profile.choices and loop.host is not None:
            loop.host.drop_idle()  # no step follows the plans of the first steps again
        host_bytes = loop.free_host_bytes()
        made: list[Chosen] = []

        def make() -> Chosen:
            try:
                made.append(self._chosen(loop, profile, base_bytes, host_bytes))
            except BudgetError:
                count = self._fitting_count(loop.budget, profile, base_bytes, host_bytes)
                if count < begun:
                    raise
                made.append(Chosen((), (), 0, 0, 0, count))
            return made[0]

        if followed_by is None:
            chosen = make()
        else:
            chosen = followed_by.follow("plans of regions", Chosen, make) or made[0]
        if not chosen.choices:
            profile.fitting = chosen.fitting, asked
            return False
        profile.follow(chosen, base_bytes, host_bytes)
        self._set_budget(loop.budget, profiles, chosen)
        return True

    def _chosen(
        self, loop: Loop, profile: StepProfile, base_bytes: int, host_bytes: int | None
    ) -> Chosen:
        """Return plans chosen together; search further forms of each graph until some fit."""
        while True:
            calls = self._calls(profile)
            try:
                chosen = choose_together(
                    calls,
                    loop.budget.now,
                    base_bytes=base_bytes + profile.more_bytes,
                    most_states=profile.effort.region_states,
                    first_bytes=profile.first_bytes,
                    host_bytes=host_bytes,
                )
            except BudgetError:
                if not self._grow(profile):
                    raise
            else:
                # "min" is the least of all forms; in a profiler, of those that are measured.
                with contextlib.suppress(CostError):
                    if loop.budget.grows and self._grow(profile):
                        continue
                return chosen

    def _fitting_count(
        self,
        budget: TrainingBudget,
        profile: StepProfile,
        base_bytes: int,
        host_bytes: int | None,
    ) -> int:
        """Return how many first calls of a step, less than all, fit the budget with some plans."""
        limit_bytes = budget.nbytes
        if limit_bytes is None or budget.grows:
            return 0
        calls = self._calls(profile)

        def exceeds(count: int) -> bool:
            last = replace(calls[count - 1], after_bytes=0, before_bytes=0)  # it may be the last
            first = [*calls[: count - 1], last]
            states = profile.effort.region_states
            plans = least(first, most_states=states, host_bytes=host_bytes)
            return base_bytes + max(profile.first_bytes, plans.peak_bytes) > limit_bytes

        return bisect_left(range(1, len(calls)), True, key=exceeds)

    def _set_budget(self, budget: TrainingBudget, profiles: StepProfiles, chosen: Chosen) -> None:
        """Set the budget to that of the chosen plans; ``"min"`` to the most that a step needs."""
        nbytes = chosen.budget_bytes
        if budget.grows:
            planned = (own.least_bytes for own in profiles if own.choices)
            nbytes = max(self._planned_bytes, max(planned, default=nbytes))
        budget.set(nbytes)

    def _grow(self, profile: StepProfile) -> bool:
        """Search plans of one more form of each graph of a step; return whether there was one."""
        contexts = {call.graph: call.context for call in profile.calls}
        grown = [grow(graph, context) for graph, context in contexts.items()]
        if any(grown):
            self._choices.clear()
        return any(grown)

    def _calls(self, profile: StepProfile) -> list[Call]:
        return [
            Call(self._choices_of(call), *row)
            for call, row in zip(profile.calls, profile.profiles, strict=True)
        ]

    def _choices_of(self, call: RegionCall) -> tuple[Choice, ...]:
        tangents_stay = call.graph.feedback.tangents_stay
        key = call.key, tangents_stay
        if key not in self._choices:
            context = replace(call.context, tangents_stay=tangents_stay)
            self._choices[key] = choices_of(call.graph, context)
        return self._choices[key]


def planned_context(
    loop: Loop,
    graph: Graph,
    context: StepContext,
    matches: Sequence[tuple[StepProfile, int]],
    held_bytes: int,
) -> StepContext:
    """Return the context that a call is planned for, with room for each step that it may belong to.

    Args:
        loop: the training loop of the model.
        graph: the graph that is called.
        context: the context of the call by itself.
        matches: the profiles of these steps, and the position of the call in each.
        held_bytes: what earlier calls of its step have left.
    """
    later_bytes = max(profile.later_host_bytes[i] for profile, i in matches)
    host_bytes = loop.free_host_bytes(later_bytes)
    profile, position = matches[0]
    now = context, held_bytes, profile.base_bytes + profile.more_bytes, host_bytes
    before = profile.contexts.get(position) if len(matches) == 1 else None
    if before is not None and before[0] is profile.corrections and before[1] == now:
        return before[2]
    own_bytes = graph.held(context).given_bytes - context.others_there_bytes
    corrections = [profile.corrections[i] for profile, i in matches]
    begin_bytes = max(
        profile.base_bytes + profile.more_bytes + profile.corrections[i].more_bytes
        for profile, i in matches
    )
    correction = Correction(
        more_bytes=held_bytes - own_bytes + begin_bytes,
        loss_point_bytes=max(own.loss_point_bytes for own in corrections),
        left_bytes=max(own.left_bytes for own in corrections),
    )
    planned = region_context(context, correction, host_bytes)
    if len(matches) == 1:
        profile.contexts[position] = profile.corrections, now, planned
    return planned
