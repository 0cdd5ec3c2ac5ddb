"""What the tables of all budgets have in common."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from fxremat.solvers.numbers import Floats
from fxremat.solvers.quantize import BudgetTable


@dataclass(frozen=True, slots=True, eq=False)
class Row(BudgetTable):
    """A table of one row."""

    max_budget_bytes: int
    quantum_bytes: int
    values: tuple[float, ...]

    @property
    def base_bytes(self) -> int:
        return 100

    @property
    def root(self) -> Floats:
        return np.array(self.values)


TABLE = Row(139, 10, (np.inf, 5.0, 5.0, 3.0))


@pytest.mark.parametrize(
    ("budget", "fits"), [(0, False), (99, False), (109, False), (110, True), (139, True)]
)
def test_fits(budget: int, fits: bool):
    assert TABLE.fits(budget) == fits


def test_the_optimum_improves_at_these():
    assert TABLE.distinct_budgets() == (110, 130)
    assert Row(139, 10, (1.0, 1.0)).distinct_budgets() == (100,)
    assert Row(139, 10, (np.inf,)).distinct_budgets() == ()


def test_slots_are_those_of_the_table_at_most():
    assert TABLE.slots_of(129) == 2
    assert Row(500, 10, (9.0, 8.0)).slots_of(500) == 1


def test_no_answer_above_the_greatest_budget():
    with pytest.raises(ValueError, match="budget_bytes is 140, the table ends at 139"):
        TABLE.fits(140)
