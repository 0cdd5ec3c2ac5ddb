"""Steps of a running job that do not fit: what has grown, and what the user can do about it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from fxremat import torch_compat
from fxremat.errors import BudgetError, BudgetWarning
from fxremat.options.budget import TrainingBudget
from fxremat.units import format_bytes

TOLERATED_BYTES = 512
"""How much more than its budget a step may take without a warning. It is the smallest block of an
allocator: a scalar of the loop that is not counted, such as its last loss, needs one."""

user_line = torch_compat.user_line

OTHER = "sizes, or a graph, that the budget was not resolved for"


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A step that no plan keeps within the budget.

    Attributes:
        budget_bytes: the budget of the model.
        least_bytes: what the plan of least memory takes.
        grown: what takes more than when the budget was resolved, and by how much.
        line: the line of the user's code that runs the step.
    """

    budget_bytes: int
    least_bytes: int
    grown: tuple[tuple[str, int], ...]
    line: str

    @staticmethod
    def of(
        budget: TrainingBudget, held: Mapping[str, int], error: BudgetError, *, is_new: bool
    ) -> Shortfall:
        """Return why a call does not fit the budget.

        Args:
            budget: the budget of the model.
            held: what is held at the call, and its bytes.
            error: raised by planning.
            is_new: whether the budget was resolved for another graph, or for other sizes.
        """
        least_bytes = error.least_budget_bytes or 0
        grown = _most_of(growth(budget.counted, held), least_bytes - (budget.nbytes or 0))
        if is_new:
            grown = (*grown, (OTHER, 0))
        return Shortfall(budget.nbytes or 0, least_bytes, grown, user_line())

    def __str__(self) -> str:
        """Return the message of the warning."""
        over = self.least_bytes - self.budget_bytes
        what = ", ".join(
            f"{name} ({nbytes} bytes, {format_bytes(nbytes)}, more)" if nbytes else name
            for name, nbytes in self.grown
        )
        where = f" at {self.line}" if self.line else ""
        return (
            f"the step{where} takes at least {self.least_bytes} bytes "
            f"({format_bytes(self.least_bytes)}), {over} ({format_bytes(over)}) more than the "
            f"budget of {self.budget_bytes}, because of {what or 'what it holds'}. It runs with "
            f"the plan of least memory until one fits again. A budget of {self.least_bytes} "
            "suffices; strict=True raises instead"
        )

    def warn(self) -> None:
        """Issue the warning if the budget is exceeded by more than ``TOLERATED_BYTES``."""
        if excess_bytes(self.least_bytes, self.budget_bytes):
            warn(str(self), code="FXR102")


def growth(before: Mapping[str, int], now: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Return what takes more bytes ``now`` than ``before``, and by how much, the most first."""
    more = ((what, nbytes - before.get(what, 0)) for what, nbytes in now.items())
    return tuple(sorted(((w, n) for w, n in more if n > 0), key=lambda one: -one[1]))


def _most_of(grown: tuple[tuple[str, int], ...], over: int) -> tuple[tuple[str, int], ...]:
    """Return the first entries of ``grown``, up to those that together exceed ``over`` bytes."""
    sums = [0, *itertools.accumulate(nbytes for _, nbytes in grown)]
    return tuple(one for one, before in zip(grown, sums, strict=False) if before <= over)


def warn_of_measuring(peak_bytes: int, budget_bytes: int) -> None:
    """Warn that measuring operations inside a training step took more than the step's budget.

    Args:
        peak_bytes: the peak while operations were measured, with what the model holds.
        budget_bytes: the budget of the model.
    """
    over = peak_bytes - budget_bytes
    line = user_line()
    warn(
        f"the step{f' at {line}' if line else ''} was planned as it began, and measuring its "
        f"operations took at least {peak_bytes} bytes ({format_bytes(peak_bytes)}), {over} "
        f"({format_bytes(over)}) more than the budget of {budget_bytes}. Steps that follow the "
        "same plan measure nothing. To measure before training, register hooks and then pass "
        f"fxremat.compile a sample. For new sizes, a budget of {peak_bytes} suffices",
        code="FXR104",
    )


def warn_counted(peak_bytes: int, budget_bytes: int) -> None:
    """Warn that a step exceeded its budget by the peak that CUDA's allocator has counted."""
    over = excess_bytes(peak_bytes, budget_bytes)
    if not over:
        return
    warn(
        f"this step took {peak_bytes} bytes, {over} ({format_bytes(over)}) more than its budget of "
        f"{budget_bytes}, as counted by CUDA's allocator, with allocations of other threads. "
        "The next step will be observed",
        code="FXR101",
    )


def excess_bytes(nbytes: int, budget_bytes: int) -> int:
    """Return by how many bytes a step exceeds its budget; 0 up to ``TOLERATED_BYTES``."""
    over = nbytes - budget_bytes
    return over if over > TOLERATED_BYTES else 0


def warn(message: str, *, code: str) -> None:
    """Issue ``message`` as a :class:`BudgetWarning`."""
    torch_compat.warn(BudgetWarning(message, code=code))
