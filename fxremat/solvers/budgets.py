"""What the tables of all budgets have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from fxremat.solvers.numbers import Floats
from fxremat.solvers.quantize import slots_down


class BudgetTable(ABC):
    """A table with the least time for every number of slots that are free.

    Attributes:
        max_budget_bytes: the greatest budget it answers for.
        quantum_bytes: size of a slot.
    """

    __slots__ = ()

    max_budget_bytes: int
    quantum_bytes: int

    @property
    @abstractmethod
    def base_bytes(self) -> int:
        """What is held whatever the schedule."""

    @property
    @abstractmethod
    def root(self) -> Floats:
        """``(slots + 1,)``, the least time for every number of slots free beside that."""

    def fits(self, budget_bytes: int) -> bool:
        """Whether the table itself, sizes rounded up, has a schedule for a budget.

        Raises:
            ValueError: the budget is above ``max_budget_bytes``.
        """
        slots = self.slots_of(budget_bytes)
        return slots >= 0 and bool(np.isfinite(self.root[slots]))

    def distinct_budgets(self) -> tuple[int, ...]:
        """The budgets in bytes, ascending, at which the table's optimum improves.

        The first is the least that ``fits``; from each to the next the optimum stays.
        """
        row = self.root
        better = np.flatnonzero(row[1:] < row[:-1]) + 1
        starts = [0, *better.tolist()] if np.isfinite(row[0]) else better.tolist()
        return tuple(self.base_bytes + m * self.quantum_bytes for m in starts)

    def slots_of(self, budget_bytes: int) -> int:
        """The slots that a budget leaves free, negative if it leaves none.

        Raises:
            ValueError: the budget is above ``max_budget_bytes``.
        """
        if budget_bytes > self.max_budget_bytes:
            raise ValueError(
                f"budget_bytes is {budget_bytes}, the table ends at {self.max_budget_bytes}"
            )
        slots = slots_down(budget_bytes - self.base_bytes, quantum=self.quantum_bytes)
        return min(slots, self.root.size - 1)
