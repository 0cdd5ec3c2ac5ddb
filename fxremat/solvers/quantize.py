"""Conversion of bytes to slots: sizes round up and budgets round down.

So a plan that fits in slots fits in bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from fxremat.errors import ArgumentError
from fxremat.solvers.numbers import Floats


def whole_count(count: object, *, name: str) -> int:
    """Return ``count`` if it is a whole number of at least 1.

    Functions with an argument ``slots`` call this first, so that errors do not depend on the
    budget.

    Raises:
        ArgumentError: it is not, and is called ``name`` in the message.
    """
    if isinstance(count, int | np.integer) and not isinstance(count, bool) and count >= 1:
        return int(count)
    raise ArgumentError(
        f"{name} is {count!r}, but must be a whole number of at least 1",
        argument=name,
        value=count,
    )


def quantum_bytes(available_bytes: int, *, slots: int) -> int:
    """Return the least slot size, at least 1, for which ``slots`` slots hold ``available_bytes``.

    Raises:
        ArgumentError: ``slots`` is not a whole number of at least 1.
        ValueError: ``available_bytes`` is negative.
    """
    slots = whole_count(slots, name="slots")
    if available_bytes < 0:
        raise ValueError(f"available_bytes is {available_bytes}, must be at least 0")
    return max(1, -(-available_bytes // slots))


def slots_up(nbytes: int, quantum: int) -> int:
    """Return the number of slots of ``quantum`` bytes that ``nbytes`` take, rounded up."""
    return -(-nbytes // quantum)


def slots_down(nbytes: int, quantum: int) -> int:
    """Return the number of slots of ``quantum`` bytes that ``nbytes`` suffice for, rounded down."""
    return nbytes // quantum


class BudgetTable(ABC):
    """A table of the least time of a step for every number of free slots of memory.

    Attributes:
        max_budget_bytes: the greatest budget that the table covers.
        quantum_bytes: size of a slot.
    """

    __slots__ = ()

    max_budget_bytes: int
    quantum_bytes: int

    @property
    @abstractmethod
    def base_bytes(self) -> int:
        """Bytes held under any schedule."""

    @property
    @abstractmethod
    def root(self) -> Floats:
        """Least seconds of a step for every number of free slots, ``(slots + 1,)``.

        ``base_bytes`` are not counted among the free slots.
        """

    def fits(self, budget_bytes: int) -> bool:
        """Return whether the table, with sizes rounded up, has a schedule for a budget.

        Raises:
            ValueError: the budget is above ``max_budget_bytes``.
        """
        slots = self.slots_of(budget_bytes)
        return slots >= 0 and bool(np.isfinite(self.root[slots]))

    def distinct_budgets(self) -> tuple[int, ...]:
        """Return the budgets in bytes, ascending, at which the table's optimum improves.

        The first is the least budget that ``fits``. From each to the next the optimum is constant.
        """
        row = self.root
        better = np.flatnonzero(row[1:] < row[:-1]) + 1
        starts = [0, *better.tolist()] if np.isfinite(row[0]) else better.tolist()
        return tuple(self.base_bytes + m * self.quantum_bytes for m in starts)

    def slots_of(self, budget_bytes: int) -> int:
        """Return the number of slots that a budget leaves free, negative if it is too small.

        Raises:
            ValueError: the budget is above ``max_budget_bytes``.
        """
        if budget_bytes > self.max_budget_bytes:
            raise ValueError(
                f"budget_bytes is {budget_bytes}, the table ends at {self.max_budget_bytes}"
            )
        slots = slots_down(budget_bytes - self.base_bytes, quantum=self.quantum_bytes)
        return min(slots, self.root.size - 1)


_Table = TypeVar("_Table", bound=BudgetTable)


def fitting(
    build: Callable[[int], _Table], budget_bytes: int, *, slots: int, most_slots: int
) -> _Table:
    """Return a table that fits the budget, with one, two, four or eight times ``slots`` slots.

    Args:
        build: returns the table with a number of slots.
        budget_bytes: the budget.
        slots: number of slots to begin with.
        most_slots: maximum number of slots. With slots of one byte, more would not help.

    Returns:
        The first table that fits, or the last one built.
    """
    for factor in (1, 2, 4, 8):
        if factor > 1 and slots * factor > most_slots:
            break
        table = build(min(slots * factor, most_slots))
        if table.fits(budget_bytes) or table.quantum_bytes == 1:
            break
    return table
