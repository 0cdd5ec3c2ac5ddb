from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.errors import ArgumentError
from fxremat.solvers.numbers import Floats
from fxremat.solvers.quantize import (
    BudgetTable,
    quantum_bytes,
    slots_down,
    slots_up,
    whole_count,
)

NBYTES = st.integers(0, 1 << 60)


@given(NBYTES, st.integers(1, 1 << 40))
def test_sizes_round_up_and_budgets_down(nbytes: int, quantum: int) -> None:
    up, down = slots_up(nbytes, quantum=quantum), slots_down(nbytes, quantum=quantum)
    assert (up - 1) * quantum < nbytes <= up * quantum
    assert down * quantum <= nbytes < (down + 1) * quantum


@given(NBYTES, st.integers(1, 5000))
def test_the_quantum_is_the_least_that_spans_the_budget(available: int, slots: int) -> None:
    quantum = quantum_bytes(available, slots=slots)
    assert quantum * slots >= available
    assert quantum == 1 or (quantum - 1) * slots < available


@given(st.lists(NBYTES, max_size=8), st.integers(1, 1 << 40))
def test_what_fits_in_slots_fits_in_bytes(sizes: list[int], quantum: int) -> None:
    slots = sum(slots_up(nbytes, quantum=quantum) for nbytes in sizes)
    assert slots <= slots_down(slots * quantum, quantum=quantum)
    assert sum(sizes) <= slots * quantum


@pytest.mark.parametrize("slots", [0, -1, 1.5, 1.0, math.nan, math.inf, True, None, "9"])
def test_slots_are_a_whole_number_of_at_least_1(slots: object) -> None:
    with pytest.raises(ArgumentError, match=r"slots is .*, but must be a whole number") as refused:
        whole_count(slots, name="slots")
    assert refused.value.argument == "slots"
    assert refused.value.value is slots


@pytest.mark.parametrize("slots", [1, 500, np.int64(3), np.uint8(7)])
def test_numbers_of_slots(slots: int) -> None:
    assert type(whole_count(slots, name="slots")) is int
    assert quantum_bytes(10, slots=slots) == max(1, math.ceil(10 / slots))


def test_malformed() -> None:
    with pytest.raises(ValueError, match="slots is 0, but must be"):
        quantum_bytes(5, slots=0)
    with pytest.raises(ValueError, match="available_bytes is -1, must be at least 0"):
        quantum_bytes(-1, slots=5)


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
