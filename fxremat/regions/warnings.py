"""Warnings about the steps of a model that is captured in pieces."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from fxremat import torch_compat
from fxremat.errors import BudgetError, CaptureError, GraphBreakWarning
from fxremat.graph.shortfall import excess_bytes, warn
from fxremat.options.budget import TrainingBudget
from fxremat.regions.call_trace import CallTrace
from fxremat.regions.step_profiles import StepProfile
from fxremat.units import format_bytes, format_seconds, plural

MOST_OVER = 3
"""Steps in a row that may exceed the budget with a warning each, before the next one is refused."""

MOST_UNPLANNED = 4
"""Steps in a row that follow plans of least memory before a warning is given."""

MOST_LINES = 3
"""The user's lines that a message about something else names."""

NOT_CAPTURED = "is not captured with it"
"""Said of a line whose function Dynamo has left to Python, while it captures what that calls."""


@dataclass(slots=True)
class RegionWarnings:
    """Warnings to the user of one model that is captured as several graphs, most only once.

    Attributes:
        breaks: the user's lines after which steps leave graphs, and why; ``None``: the user asked
            for several graphs.
        why: why the model could not be captured as one graph; empty: that was not tried.
        only_views: whether the model was captured, but returns only views of what it is given.
    """

    breaks: dict[str, None] | None = field(default_factory=dict)
    why: str = ""
    only_views: bool = False
    _over: int = 0
    _peak_bytes: int = 0
    _unplanned: int = 0
    _warned: set[str] = field(default_factory=set)

    def note_break(self, why: str) -> None:
        """Record after which line of the user's a step leaves a graph, and why, for messages."""
        if self.breaks is not None:
            self.breaks[why] = None

    def warn_not_planned(self, error: CaptureError) -> None:
        """Warn that a graph of the model cannot be planned, so it runs unchanged."""
        self._warn_once(
            f"left {error.message}",
            "a graph of this model cannot be planned, so it runs unchanged with all the memory "
            f"that it needs: {error.message}",
            code="FXR203",
        )

    def warn_captured_again(self, function: str, times: int) -> None:
        """Warn that a function is no longer captured, because ``times`` steps captured it again."""
        self._warn_once(
            function,
            f"{function} was captured in {times} steps although its graph was the same, because "
            "its guards depend on values that change at each step, such as the length of a list. "
            "From now on it runs unchanged, and functions that it calls are captured separately",
            code="FXR202",
        )

    def note_peak(self, peak_bytes: int, budget: TrainingBudget, trace: CallTrace) -> bool:
        """Warn if a measured step exceeds the budget; return whether it does.

        Args:
            peak_bytes: the peak of the step.
            budget: the budget of the model.
            trace: the calls of the step.
        """
        if not trace.calls:
            what = "nothing of this model that has a gradient can be captured"
            remedy = ". Move code that can be captured into separate modules"
            if self.only_views:
                what = "this model returns only views of its parameters and inputs"
                remedy = ""
            self._warn_once(
                "nothing",
                f"{what}, so nothing is planned. The model runs unchanged, and a step took "
                f"{peak_bytes} bytes ({format_bytes(peak_bytes)}){remedy}",
                code="FXR204",
            )
        budget_bytes = budget.nbytes or budget.written.bytes_of(
            full_bytes=peak_bytes, least_bytes=peak_bytes
        )
        over = excess_bytes(peak_bytes, budget_bytes)
        if not over:
            self._over = 0
            return False
        self._over += 1
        self._peak_bytes = max(self._peak_bytes, peak_bytes)
        what = f", of {plural(len(trace.calls), 'region')}," if trace.calls else ""
        where = f" at {trace.line}" if trace.line else ""
        planned_bytes = max(trace.planned_bytes(), default=0) + (trace.base_bytes or 0)
        later_bytes = max(0, trace.returned_bytes - trace.kept_bytes)  # held in later steps
        remedy = "The next step's plans leave room for that"
        if not trace.calls or (self._over > 1 and planned_bytes <= budget_bytes):
            remedy = (
                f"The plans take {planned_bytes} of them; the rest is allocated by code that is "
                f"not captured{self._captured_in_pieces()}, which no plan changes. A budget of "
                f"{peak_bytes + later_bytes} suffices"
            )
        warn(
            f"the step{where}{what} took {peak_bytes} bytes, {over} ({format_bytes(over)}) "
            f"more than its budget of {budget_bytes}. {remedy}",
            code="FXR110",
        )
        return True

    def check_budget(self, budget: TrainingBudget) -> None:
        """Raise if, under ``strict=True``, too many steps in a row exceeded the budget.

        Raises:
            BudgetError: they did, whatever was planned.
        """
        if self._over < MOST_OVER or not budget.strict or budget.grows:
            return
        self._over -= 1  # a caller that goes on gets the error again
        nbytes = self._peak_bytes
        raise BudgetError(
            f"budget {budget.written.written!r} is {budget.nbytes} bytes, but steps took up to "
            f"{nbytes} bytes ({format_bytes(nbytes)}), including code between regions, which is "
            f"not planned{self._captured_in_pieces()}. Give at least "
            f"{budget.written.again(nbytes)}, or budget='min'",
            least_budget_bytes=nbytes,
            code="FXR004",
        )

    def warn_short(self, error: BudgetError, line: str) -> None:
        """Warn that no plans of a step's regions fit together, so it follows those of least memory.

        Args:
            error: raised by the choice of plans.
            line: the line of the user's code that runs the step.
        """
        where = f" at {line}" if line else ""
        warn(
            f"the step{where} takes more than its budget: {error.message}. It runs with the "
            "plans of least memory until they fit again; strict=True raises instead",
            code="FXR102",
        )

    def note_end(self, trace: CallTrace) -> None:
        """Count steps in a row that were not planned; warn if ``trace`` ends too many of them."""
        self._unplanned = self._unplanned + 1 if trace.is_unplanned else 0
        blind = trace.is_unplanned and trace.why_unobserved and trace.positions
        if self._unplanned == MOST_UNPLANNED or blind:
            why = trace.why_unobserved or "each one called new regions or had new sizes"
            self._warn_once(
                "blind" if blind else "unplanned",
                f"{plural(max(self._unplanned, 1), 'step')} in a row followed the plans of least "
                "memory, which are slower, and may exceed the budget: "
                f"{why}{self._captured_in_pieces()}",
                code="FXR205",
            )

    def warn_unobserved_backward(self, trace: CallTrace) -> None:
        """Warn that the memory of a measured step could not be observed in its backward."""
        self._warn_once(
            "backward",
            "the memory of code between regions could not be measured in the backward: "
            f"{trace.why_unobserved}. It is assumed to equal that of the "
            f"forward{self._captured_in_pieces()}",
            code="FXR205",
        )

    def warn_breaks(self, profile: StepProfile) -> None:
        """Warn of each graph break of a step, and the time and memory that it costs; only once."""
        if self.breaks is None or profile.is_reported:
            return
        profile.is_reported = True
        breaks: list[tuple[str, int, float | None]] = []
        times_s = (*profile.between_s, None)
        for call, row, seconds in zip(profile.calls, profile.profiles, times_s, strict=True):
            why = call.ended_by
            if not why.endswith(NOT_CAPTURED) or seconds is not None:  # else it ends the step
                why = why or "it returns to code that is not captured"
                breaks.append((why, max(row[1], 0), seconds))
        lines = []
        for why, group in itertools.groupby(breaks, key=lambda one: one[0]):
            same = list(group)
            seconds_s = sum(seconds for _, _, seconds in same if seconds is not None)
            times = f"{len(same)} times, " if len(same) > 1 else ""
            most = format_bytes(max(nbytes for _, nbytes, _ in same))
            lines.append(f"  {times}{format_seconds(seconds_s)}, {most}: {why}")
        self._warn(
            f"a step runs {plural(len(profile.calls), 'graph')} that are planned together. The "
            "code after each of them is not planned. Its seconds in both directions, its bytes, "
            "and the reason why the graph ends:\n" + "\n".join(lines),
            code="FXR201",
        )

    def _captured_in_pieces(self) -> str:
        """Return the user's lines that break the graph, as part of a message; may be empty."""
        lines = sorted(self.breaks or ())
        more = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
        return f" (graph breaks: {'; '.join([*lines[:MOST_LINES], *more])})" if lines else ""

    def _warn_once(self, what: str, message: str, *, code: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            self._warn(message, code=code)

    def _warn(self, message: str, *, code: str) -> None:
        torch_compat.warn(GraphBreakWarning(message, code=code))
