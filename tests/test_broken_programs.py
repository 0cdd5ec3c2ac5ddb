"""Random models that break the graph keep to their budget, and train as without one."""

from __future__ import annotations

import pytest

from tests.broken_check import BUDGETS, Budget, check
from tests.broken_programs import KINDS, program
from tests.models.bits import bitwise_equal

QUICK = (6, 11, 39, 52, 54, 93, 107, 116, 129, 133, 143, 169)
"""Seeds whose programs have items of all kinds between them."""

REGRESSIONS: tuple[int, ...] = (2, 3, 39, 43, 79, 133)
"""Seeds that failed once."""

MANY = 300


def hold(seed: int, budget: Budget) -> None:
    found = check(seed, budget)
    if found.failures:
        model, _ = program(seed)
        model.forget()
        told = "\n".join((*found.failures, *found.notes))
        pytest.fail(f"program {seed}, budget {budget}:\n{model.source}\n{told}", pytrace=False)


@pytest.mark.parametrize(
    "index",
    [
        index if seed == 143 else pytest.param(index, marks=pytest.mark.slow)
        for index, seed in enumerate(QUICK)
    ],
    ids=lambda index: str(QUICK[index]),
)
def test_few_programs(index: int):
    hold(QUICK[index], BUDGETS[index % len(BUDGETS)])


@pytest.mark.slow
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("seed", REGRESSIONS)
def test_programs_that_failed_once(seed: int, budget: Budget):
    hold(seed, budget)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(MANY))
def test_many_programs(seed: int):
    for budget in BUDGETS:
        hold(seed, budget)


def test_the_few_have_items_of_all_kinds():
    made = [program(seed)[0] for seed in QUICK]
    for model in made:
        model.forget()
    assert frozenset[str]().union(*(model.kinds for model in made)) == KINDS


def test_programs_are_the_same_each_time():
    for seed in QUICK:
        (first, sample), (second, other) = program(seed), program(seed)
        first.forget()
        assert first.source == second.source
        assert bitwise_equal(sample, other)
        assert bitwise_equal(first.state_dict(), second.state_dict())
