"""Bytes in slots: sizes round up and budgets round down, so a plan in slots fits in bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from fxremat.errors import ArgumentError
from fxremat.solvers.numbers import Floats


def whole_count(count: object, *, name: str) -> int:
    """What was given as ``name``, which must be a whole number of at least 1.

    Whatever takes ``slots`` asks this before all else: the answer depends on no budget.

    Raises:
        ArgumentError: it is not.
    """
    if isinstance(count, int | np.integer) and not isinstance(count, bool) and count >= 1:
        return int(count)
    raise ArgumentError(
        f"{name} is {count!r}, must be at least 1 and a whole number", argument=name, value=count
    )


def quantum_bytes(available_bytes: int, *, slots: int) -> int:
    """The least slot size for which ``slots`` slots hold ``available_bytes``, at least 1.

    Raises:
        ArgumentError: ``slots`` is no whole number of at least 1.
        ValueError: ``available_bytes`` is negative.
    """
    slots = whole_count(slots, name="slots")
    if available_bytes < 0:
        raise ValueError(f"available_bytes is {available_bytes}, must be at least 0")
    return max(1, -(-available_bytes // slots))


def slots_up(nbytes: int, quantum: int) -> int:
    """Slots that a size takes: rounded up."""
    return -(-nbytes // quantum)


def slots_down(nbytes: int, quantum: int) -> int:
    """Slots that a budget offers: rounded down."""
    return nbytes // quantum


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


_Table = TypeVar("_Table", bound=BudgetTable)


def fitting(
    build: Callable[[int], _Table], budget_bytes: int, *, slots: int, most_slots: int
) -> _Table:
    """The first of some tables with ever more slots, up to eight times, that fits a budget.

    The last, if none does; with slots of a byte more would not help.
    """
    for factor in (1, 2, 4, 8):
        if factor > 1 and slots * factor > most_slots:
            break
        table = build(min(slots * factor, most_slots))
        if table.fits(budget_bytes) or table.quantum_bytes == 1:
            break
    return table
