from __future__ import annotations

import warnings

import pytest
import torch

from fxremat.errors import BudgetWarning
from fxremat.loop import outside
from fxremat.loop.outside import Outside
from fxremat.options.budget import Budget, TrainingBudget
from fxremat.runtime.profile import WATCH_EVERY
from fxremat.torch_compat import storage_key

CPU = torch.device("cpu")


def test_what_came_since_it_began_counts_once():
    before = torch.randn(1000)
    loop = Outside()
    loop.begin(CPU)
    known, target = torch.randn(500), torch.randn(40, 10)
    views = [target[0], target.t()]
    number = torch.zeros(2)
    loop.look(CPU, [storage_key(known)], 0)
    assert loop.nbytes == target.nbytes
    loop.look(CPU, [storage_key(known)], 400)  # counted as target= or reserve=
    assert loop.nbytes == target.nbytes - 400
    loop.look(CPU, [storage_key(known)], 1 << 20)
    assert loop.nbytes == 0
    del views, target, number
    loop.look(CPU, [], 0)
    assert loop.nbytes == known.nbytes
    assert before.numel() == 1000


def test_memory_that_is_used_again_is_not_taken_for_what_was_there():
    before = [torch.randn(1000) for _ in range(8)]
    loop = Outside()
    loop.begin(CPU)
    before.clear()
    after = [torch.randn(1000) for _ in range(8)]
    loop.look(CPU, [], 0)
    assert loop.nbytes == 8 * after[0].nbytes


def test_first_calls_are_looked_at_and_later_few_where_that_is_cheap():
    loop = Outside()
    assert not loop.is_due()  # it has not begun
    loop = Outside()
    loop.begin(CPU)
    due = [call for call in range(1, 3 * WATCH_EVERY) if loop.is_due()]
    assert due == [*range(1, outside.FIRST + 1), WATCH_EVERY, 2 * WATCH_EVERY]
    loop.look(CPU, [], 0)
    assert not any(loop.is_due() for _ in range(WATCH_EVERY)), "a look takes more than its share"


@pytest.mark.parametrize("peak_bytes", [9_700, 10_000, 10_040, 10_540])
def test_a_step_within_its_budget_but_for_what_the_loop_holds_is_warned_of(peak_bytes: int):
    """Up to 40 bytes above it are the step's own scalars, which the peak counts twice, and 512
    more are not worth a warning by themselves.
    """
    loop = Outside(nbytes=1024)
    with pytest.warns(BudgetWarning, match="the loop held 1024 bytes"):
        loop.check(peak_bytes, TrainingBudget(Budget(1.0), 10_000), 0)


@pytest.mark.parametrize(
    ("peak_bytes", "nbytes"), [(10_000, 0), (9_400, 512), (10_000, 512), (10_600, 1024)]
)
def test_other_steps_are_not(peak_bytes: int, nbytes: int):
    """They keep to the budget, or do not by themselves, which has a warning of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Outside(nbytes=nbytes).check(peak_bytes, TrainingBudget(Budget(1.0), 10_000), 0)


def test_a_step_of_which_a_part_was_measured_is_held_to_its_plan():
    with pytest.warns(BudgetWarning, match="this step takes 9900 bytes"):
        loop = Outside(nbytes=1024)
        loop.check(9_940, TrainingBudget(Budget(1.0), 10_000), 0, planned=True)
