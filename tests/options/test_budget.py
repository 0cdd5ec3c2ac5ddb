"""What a budget may be, and what it means."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from fxremat.errors import BudgetError
from fxremat.options.budget import Budget, TrainingBudget

FULL, LEAST = 1000, 300


def _resolve(written):
    return Budget.read(written).resolve(
        full_bytes=FULL, least_bytes=LEAST, needed_by=lambda: "operation B 7"
    )


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        (300, 300),
        (999, 999),
        (5000, 5000),
        ("0.5 KB", 500),
        ("1 KiB", 1024),
        ("400", 400),
        (0.5, 500),
        (1.0, 1000),
        (0.3, 300),
        ("50%", 500),
        (" 37.5 % ", 375),
        ("0.5", 500),
        (".3", 300),
        ("1.0", 1000),
        ("100%", 1000),
        ("1K", 1000),
        ("min", LEAST),
        (" MIN ", LEAST),
        (np.int64(999), 999),
        (np.uint16(300), 300),
        (np.float64(0.5), 500),
        (np.float32(0.5), 500),
    ],
)
def test_feasible_budgets(written, nbytes):
    assert _resolve(written) == nbytes


def test_a_share_is_rounded_down():
    assert Budget.read(0.9999).resolve(full_bytes=1001, least_bytes=1, needed_by=str) == 1000


def test_an_int_is_bytes_and_a_float_a_share():
    assert Budget.read(1).nbytes == 1
    assert Budget.read(1).share is None
    assert Budget.read(1.0).share == 1.0
    assert Budget.read(1.0).nbytes is None
    assert Budget.read(np.int64(1)).nbytes == 1
    assert Budget.read(np.float32(1)).share == 1.0


def test_what_is_read_is_of_python():
    """Sums of bytes must not overflow."""
    nbytes = Budget.read(np.uint8(200)).nbytes
    assert type(nbytes) is int
    assert type(Budget.read(np.float32(0.5)).share) is float


@pytest.mark.parametrize(
    "written",
    [
        0, -1, "0", "0 GiB", "0.1 B", 0.0, -0.5, 1.5, math.nan, math.inf,
        "lots", "-3 MiB", "", True, None, [1], 1 + 0j, np.True_, np.False_, np.int64(0),
        np.int32(-4), np.float64(1.5), np.float32("nan"), b"1 GiB", Decimal(1), Fraction(1, 2),
        np.array(4), np.array(0.5), "0%", "101%", "1.5", "0.0", "-5%", "%", "6 %%",
    ],
)  # fmt: skip
def test_unreadable_budgets_are_named(written):
    with pytest.raises(BudgetError) as caught:
        Budget.read(written)
    assert (f"{written}" if isinstance(written, (float, np.floating)) else repr(written)) in str(
        caught.value
    )
    assert "budget is" in str(caught.value)
    assert caught.value.least_budget_bytes is None


@pytest.mark.parametrize("written", [299, 1, "299 B", 0.299])
def test_an_infeasible_budget_gives_the_numbers_and_the_remedy(written):
    with pytest.raises(BudgetError) as caught:
        _resolve(written)
    message = str(caught.value)
    assert caught.value.least_budget_bytes == LEAST
    assert repr(written) in message
    assert "300 bytes" in message
    assert "1000 bytes" in message
    assert "operation B 7" in message
    assert "budget='min'" in message


@pytest.mark.parametrize(
    ("full_bytes", "least_bytes"), [(1000, 300), (181445672, 66137128), (7, 7)]
)
def test_a_share_that_is_too_small_is_answered_with_one_that_is_not(full_bytes, least_bytes):
    sizes = {"full_bytes": full_bytes, "least_bytes": least_bytes, "needed_by": str}
    with pytest.raises(BudgetError) as caught:
        Budget.read(0.01).resolve(**sizes)
    found = re.search(r"at least (0?\.?[0-9.]+), which is", str(caught.value))
    assert found
    share = float(found[1])
    assert Budget.read(share).resolve(**sizes) >= least_bytes
    assert share - least_bytes / full_bytes < 0.002


def test_the_least_budget_itself_is_feasible():
    assert _resolve(LEAST) == LEAST


def test_the_least_grows_by_new_workspaces_once():
    least, fixed = (TrainingBudget(Budget(written), 1000) for written in ("min", 1000))
    for nbytes in (0, 300, 300, 500, 400):
        least.add_workspaces(nbytes)
        fixed.add_workspaces(nbytes)
    assert (least.nbytes, fixed.nbytes) == (1500, 1000)
