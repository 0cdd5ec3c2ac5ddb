"""Which steps of several regions are watched, and what is learned from them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_leaves

from fxremat import torch_compat
from fxremat.loop.loop import Loop
from fxremat.planner.context.context_bytes import SCALARS
from fxremat.ranks.combine import AGREED
from fxremat.regions.call_trace import CallTrace
from fxremat.regions.step_profiles import StepProfile, StepProfiles
from fxremat.regions.warnings import RegionWarnings
from fxremat.runtime.steps import SCALAR_BYTES

MOST_WITHOUT_GRAPH = 4
"""First steps that are watched where nothing is captured."""

NEAR_BUDGET = 0.75
"""Share of the budget: steps that differ and are planned to take more are all watched."""


@dataclass(slots=True)
class StepWatch:
    """Decides which steps have their memory measured (are watched), and learns their profiles.

    Attributes:
        profiles: the profiles of all measured steps.
        warnings: issues warnings to the user of the model.
        watches_left: how many of the next steps are measured, whichever they are.
    """

    profiles: StepProfiles
    warnings: RegionWarnings
    watches_left: int = 1

    def is_due(self, loop: Loop, number: int) -> bool:
        """Return whether the next step is measured.

        Args:
            loop: the training loop of the model.
            number: the number of the latest step.
        """
        exchanged = loop.peers is None or number < AGREED  # only then peers get its profile
        return bool(self.watches_left) or (
            exchanged and any(_teaches(loop, profile) for profile in self.profiles)
        )

    def end(self, trace: CallTrace, number: int) -> None:
        """Note that a step has ended; decide how many more are measured, and warn if needed.

        Args:
            trace: the calls of the step.
            number: the number of the next step.
        """
        if trace.is_unplanned or (not trace.calls and number <= MOST_WITHOUT_GRAPH):
            self.watches_left = 2  # one more, as the next may be another one
        elif trace.is_watched:
            self.watches_left -= bool(self.watches_left)
        if trace.has_failed or not trace.has_backward:
            return
        self.warnings.note_end(trace)
        is_timed = all(len(call.times_s) == 4 for call in trace.calls)
        if is_timed and not trace.is_watched and not trace.is_unplanned:
            for profile in trace.matching:
                if len(profile.calls) == len(trace.calls):
                    profile.between_s = profile.between_s or tuple(trace.between_s())
                    self.warnings.warn_breaks(profile)

    def learn(
        self,
        loop: Loop,
        trace: CallTrace,
        first_bytes: int,
        peak_bytes: int,
        *,
        aside_bytes: int,
        envelopes: bool,
    ) -> None:
        """Update step profiles by a measured step; warn if it exceeded the budget.

        Args:
            loop: the training loop of the model.
            trace: the calls of the step.
            first_bytes: the most bytes before its first call, beyond those held when it began.
            peak_bytes: the most bytes until its last backward ended, beyond those held when it
                began.
            aside_bytes: bytes of the budget that are set aside.
            envelopes: whether similar steps may be merged into one profile that covers them.
        """
        base_bytes = trace.base_bytes or 0
        if trace.calls:
            base_bytes += trace.first_waiting_bytes
        else:  # no first call has counted outputs that are held, nor the last loss
            base_bytes += trace.kept_bytes + SCALARS * SCALAR_BYTES
        if self.warnings.note_peak(base_bytes + peak_bytes, loop.budget, trace):
            self.watches_left = 2  # as long as steps exceed the budget, they are watched
        loop.check_outside(base_bytes + peak_bytes)
        rows = trace.profiles()
        if not rows:
            reason = "their backwards had not ended when the next steps began"
            trace.why_unobserved = trace.why_unobserved or reason
            return
        if trace.why_unobserved:
            self.warnings.warn_unobserved_backward(trace)
        self.profiles.has_news = True
        followed = [] if trace.is_unplanned else trace.matching or list(trace.positions)
        for profile in self.profiles.learn(trace.calls, rows, envelopes=envelopes):
            profile.first_bytes = max(profile.first_bytes, first_bytes)
            profile.peak_bytes = base_bytes + peak_bytes
            if profile in followed and profile.choices:
                explained_bytes = profile.planned_bytes - profile.more_bytes
                explained_bytes = max([explained_bytes, *trace.planned_bytes()])
                profile.more_bytes = max(profile.more_bytes, peak_bytes - explained_bytes)
            room_bytes = (loop.budget.nbytes or 0) - aside_bytes - base_bytes
            if not profile.choices or profile.planned_bytes > room_bytes:
                profile.corrections = []


def watch_backward(loop: Loop, trace: CallTrace, outputs: object) -> None:
    """Keep measuring a step through its backward, after a call of the model has returned.

    Args:
        loop: the training loop of the model.
        trace: the calls of the step.
        outputs: what the model has returned.
    """
    tensors = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor)]
    trace.returned_bytes = sum(torch_compat.storages_on(loop.device, tensors).values())
    lifetime = _GraphLifetime()
    begin = functools.partial(_begin_backward, loop, trace, lifetime)
    if torch_compat.before_each_backward(outputs, begin):
        loop.watcher.close(lifetime)
    else:
        trace.has_no_backward = True


def _begin_backward(loop: Loop, trace: CallTrace, _lifetime: object) -> None:
    """Have measuring end after a backward of the step, which begins in whatever thread."""
    if loop.watcher.is_on and not torch_compat.is_profiled():
        trace.why_unobserved = "it runs in another thread than the forward"
    torch_compat.after_backward(loop.watcher.done)


def _teaches(loop: Loop, profile: StepProfile) -> bool:
    """Return whether steps like ``profile`` are still measured.

    If steps differ, all those are that may come near the budget.
    """
    if not profile.is_envelope or not profile.choices:
        return bool(profile.watches_left) or profile.is_envelope
    peak_bytes = profile.base_bytes + profile.planned_bytes
    return bool(profile.watches_left) or peak_bytes > NEAR_BUDGET * (loop.budget.nbytes or 0)


class _GraphLifetime:
    """An object that lives as long as the autograd graph of a call of the model."""
