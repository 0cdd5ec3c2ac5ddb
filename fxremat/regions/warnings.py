"""What the user of a model that is captured in pieces hears of its steps."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from fxremat import torch_compat
from fxremat.errors import BudgetError, CaptureError, GraphBreakWarning
from fxremat.graph.shortfall import excess_bytes, warn
from fxremat.options.budget import TrainingBudget
from fxremat.regions.call_trace import Walk
from fxremat.regions.step_profiles import KnownStep
from fxremat.units import format_bytes, format_seconds, plural

MOST_OVER = 3
"""Steps in a row that may take more than the budget, each told, before the next one is refused."""

MOST_UNLEARNED = 4
"""Steps in a row that follow their least plans before that is told."""


MOST_LINES = 3
"""Lines of the user's that a message about something else names."""

NOT_CAPTURED = "is not captured with it"
"""Told of a line whose function Dynamo has left to Python, while it captures what that calls."""


@dataclass(slots=True)
class Notices:
    """What the user of one model hears of its steps, and what was said already.

    Attributes:
        breaks: the user's lines after which steps leave graphs, and why; ``None``: that was asked
            for.
        why: the model could not be captured as one graph; empty: that was not tried.
    """

    breaks: dict[str, None] | None = field(default_factory=dict)
    why: str = ""
    _over: int = 0
    _peak_bytes: int = 0
    _unlearned: int = 0
    _said: set[str] = field(default_factory=set)

    def broken_at(self, why: str) -> None:
        """Note the user's line after which a step leaves a graph, and why."""
        if self.breaks is not None:
            self.breaks[why] = None

    def left(self, error: CaptureError) -> None:
        """Say that a graph of the model cannot be planned, and runs as it is."""
        self._once(
            f"left {error}",
            f"a graph of this model is not planned and runs as it is, with what it takes: {error}",
        )

    def captured_again(self, function: str, times: int) -> None:
        """Say that a function is not captured any more, as each step captured it again."""
        self._once(
            function,
            f"{function} was captured in {times} steps though its graph was the same: it is "
            "guarded by what changes at each step, such as the length of a list. From now on it "
            "runs as it is, and what it calls is captured for itself",
        )

    def peak(self, peak_bytes: int, budget: TrainingBudget, walk: Walk) -> bool:
        """Note the peak of a watched step; returns whether it is more than the budget.

        Args:
            peak_bytes: of it.
            budget: of the model.
            walk: its calls.
        """
        if not walk.calls:
            self._once(
                "nothing",
                "nothing of this model that has a gradient can be captured, so nothing is planned: "
                f"it runs as it is, and a step took {peak_bytes} bytes "
                f"({format_bytes(peak_bytes)}). Move what can be captured into modules of its own",
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
        what = f"{plural(len(walk.calls), 'region')}" if walk.calls else "which nothing is captured"
        where = f" at {walk.line}" if walk.line else ""
        planned_bytes = max(walk.planned_bytes(), default=0) + (walk.base_bytes or 0)
        later_bytes = max(0, walk.returned_bytes - walk.kept_bytes)  # held in the steps to come
        then = "The next step's plans leave room for that"
        if not walk.calls or (self._over > 1 and planned_bytes <= budget_bytes):
            then = (
                f"The plans take {planned_bytes} of them; the rest is allocated by code that is "
                f"not captured{self._lines()}, which no plan changes. A budget of "
                f"{peak_bytes + later_bytes} would do"
            )
        warn(
            f"the step{where}, of {what}, took {peak_bytes} bytes, {over} ({format_bytes(over)}) "
            f"more than its budget of {budget_bytes}. {then}"
        )
        return True

    def refuse(self, budget: TrainingBudget) -> None:
        """Refuse a step that begins, where those before took too much in a row.

        Raises:
            BudgetError: ``strict=True``, and those before took more than the budget, whatever was
                planned.
        """
        if self._over < MOST_OVER or not budget.strict or budget.grows:
            return
        self._over -= 1  # who goes on meets it again
        nbytes = self._peak_bytes
        raise BudgetError(
            f"budget {budget.written.written!r} is {budget.nbytes} bytes, but steps took up to "
            f"{nbytes} bytes ({format_bytes(nbytes)}) with what their code between regions "
            f"allocates, which is not planned{self._lines()}. Give at least "
            f"{budget.written.again(nbytes)}, or budget='min'",
            least_budget_bytes=nbytes,
        )

    def short(self, error: BudgetError, line: str) -> None:
        """Say that no plans of a step's regions fit together, so it follows those of least memory.

        Args:
            error: that choosing them raised.
            line: of the user's code that runs the step.
        """
        where = f" at {line}" if line else ""
        warn(
            f"the step{where} takes more than its budget: {error}. It runs with the plans of least "
            "memory until there is room again; strict=True raises instead"
        )

    def followed(self, walk: Walk) -> None:
        """Note that a step with a backward has ended, and say so where too many learned nothing."""
        self._unlearned = self._unlearned + 1 if walk.unknown else 0
        blind = walk.unknown and walk.unseen and walk.places
        if self._unlearned == MOST_UNLEARNED or blind:
            why = walk.unseen or "each called regions, or sizes, that none had called before"
            self._once(
                "blind" if blind else "unlearned",
                f"{plural(max(self._unlearned, 1), 'step')} in a row followed plans that leave the "
                "least memory, whatever the time, and are not known to keep to the budget: "
                f"{why}{self._lines()}",
            )

    def half_seen(self, walk: Walk) -> None:
        """Say that the backward of a watched step was not seen."""
        self._once(
            "half",
            f"what a step takes in its backward, between regions, is not known: {walk.unseen}. "
            f"It is taken to be what its forward took{self._lines()}",
        )

    def broken(self, known: KnownStep) -> None:
        """Say what breaks the graph and what it costs, once a step has run as it was planned."""
        if self.breaks is None or known.told:
            return
        known.told = True
        found: list[tuple[str, int, float | None]] = []
        times_s = (*known.seconds, None)
        for call, row, seconds in zip(known.calls, known.profiles, times_s, strict=True):
            why = call.ended_by
            if not why.endswith(NOT_CAPTURED) or seconds is not None:  # else it ends the step
                told = why or "it returns to code that is not captured"
                found.append((told, max(row[1], 0), seconds))
        rows = []
        for why, group in itertools.groupby(found, key=lambda one: one[0]):
            alike = list(group)
            seconds_s = sum(seconds for _, _, seconds in alike if seconds is not None)
            times = f"{len(alike)} times, " if len(alike) > 1 else ""
            most = format_bytes(max(nbytes for _, nbytes, _ in alike))
            rows.append(f"  {times}{format_seconds(seconds_s)}, {most}: {why}")
        self._break(
            f"a step runs {plural(len(known.calls), 'graph')}, each planned for what is beside it. "
            "What comes after each is not planned: the seconds it takes, in both directions, and "
            "its bytes:\n" + "\n".join(rows)
        )

    def _lines(self) -> str:
        """The user's lines at which the model breaks, for a message."""
        lines = sorted(self.breaks or ())
        more = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
        told = "; ".join([*lines[:MOST_LINES], *more])
        return f" (captured in pieces: {told})" if lines else ""

    def _once(self, what: str, message: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._break(message)

    def _break(self, message: str) -> None:
        torch_compat.warn(message, GraphBreakWarning)
