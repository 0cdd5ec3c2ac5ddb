"""Joins at unit costs: Theorems 2 and 3 of the paper, and the chain it compares with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.ir import Forward, Infeasible, Keep, Solved
from fxremat.solvers import join as general
from tests.reference.brute import join as brute
from tests.reference.griewank import checkpoint_schedules_steps, forward_steps, pyrevolve_steps
from tests.reference.join_units import UnitTable, equiv_chain, least_slots, unit_problem
from tests.reference.simulate.join import check, simulate

MOST_STEPS, MOST_CHECKPOINTS = 60, 12


def solve(lengths: tuple[int, ...], slots: int) -> Solved | Infeasible:
    return UnitTable.build(lengths, slots).solve()


def solved(solution: Solved | Infeasible) -> Solved:
    assert isinstance(solution, Solved)
    return solution


def one_branch_steps(table: UnitTable, steps: int, checkpoints: int) -> int:
    """Forward steps as Griewank and Walther count them.

    A slot is for the gradient and one for the step at hand. The last step is taped as it is
    run; all others are run once more to be taped, which ``F_all`` before ``B`` is.
    """
    schedule = solved(table.solve([steps], checkpoints + 2)).schedule
    forwards = [op for op in schedule if isinstance(op, Forward) and op.stage < steps]
    last = Forward(steps - 1, Keep.ALL)
    assert forwards.count(last) == 1
    return len(forwards) - 1


@pytest.fixture(scope="module")
def one_branch() -> UnitTable:
    return UnitTable.build([MOST_STEPS], MOST_CHECKPOINTS + 2)


ALL_COUNTS = list(itertools.product(range(1, MOST_STEPS + 1), range(1, MOST_CHECKPOINTS + 1)))


def test_one_branch_takes_the_steps_of_the_closed_form(one_branch: UnitTable) -> None:
    for steps, checkpoints in ALL_COUNTS:
        found = one_branch_steps(one_branch, steps, checkpoints)
        assert found == forward_steps(steps, checkpoints), (steps, checkpoints)
        # The loss point, steps backwards, and forwards that are not counted as taping.
        makespan_s = one_branch.makespan_s([steps], checkpoints + 2)
        assert makespan_s == 1 + steps + (found - (steps - 1))


@pytest.mark.parametrize("package", [checkpoint_schedules_steps, pyrevolve_steps])
def test_one_branch_takes_the_steps_of_public_packages(
    one_branch: UnitTable, package: Callable[[int, int], int]
) -> None:
    for steps, checkpoints in ALL_COUNTS:
        found = one_branch_steps(one_branch, steps, checkpoints)
        assert found == package(steps, checkpoints), (steps, checkpoints)


@pytest.mark.parametrize(("branches", "most"), [(1, 8), (2, 5), (3, 3)])
def test_equals_the_general_solver_and_the_replay(branches: int, most: int) -> None:
    slots = branches * (most + 2)
    table = UnitTable.build([most] * branches, slots)
    for lengths in itertools.product(range(1, most + 1), repeat=branches):
        for count in range(sum(lengths) + branches + 2):
            found = table.solve(lengths, count)
            problem = unit_problem(lengths, count)
            expected = general.solve(problem, slots=count + 1)
            if isinstance(found, Infeasible):
                assert count < found.least_budget_bytes == least_slots(lengths)
                assert expected == Infeasible(least_slots(lengths) + 1)
                continue
            assert isinstance(expected, Solved)
            assert found.makespan_s == expected.makespan_s
            assert check(problem, found.schedule).makespan_s == found.makespan_s


SMALL = [(1,), (3,), (4,), (1, 1), (1, 2), (2, 2), (1, 3), (2, 3), (1, 1, 1), (1, 1, 2)]


@pytest.mark.parametrize("lengths", SMALL, ids=str)
def test_no_schedule_whatever_is_better(lengths: tuple[int, ...]) -> None:
    """Theorem 1: among all schedules, not only the canonical ones."""
    least = least_slots(lengths)
    for slots in range(least - 1, sum(lengths) + len(lengths) + 1):
        found = solve(lengths, slots)
        best = brute.solve(unit_problem(lengths, slots), kind=brute.Kind.ANY)
        if slots < least:
            assert found == Infeasible(least)
            assert best == Infeasible(least + 1)
        else:
            assert solved(found).makespan_s == solved(best).makespan_s


def test_theorem_2() -> None:
    assert [least_slots(n) for n in [(0,), (1,), (2,), (9,)]] == [1, 2, 3, 3]
    assert [least_slots(n) for n in [(0, 0), (0, 1), (1, 5), (2, 2), (0, 3)]] == [2, 3, 4, 5, 4]
    assert least_slots((10, 50)) == 5  # cross-modal
    assert least_slots((10, 10, 10)) == 7  # siamese with triplet loss
    table = UnitTable.build([3, 4, 2], 10)
    for lengths in itertools.product(range(4), range(5), range(3)):
        finite = [slots for slots in range(11) if table.makespan_s(lengths, slots) < math.inf]
        assert finite[0] == least_slots(lengths)


TIMES = st.integers(0, 9).map(lambda n: n / 4)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.data())
def test_any_times(lengths: list[int], data: st.DataObject) -> None:
    forward_s, backward_s, turn_s = (data.draw(TIMES) for _ in range(3))
    slots = data.draw(st.integers(least_slots(lengths), sum(lengths) + len(lengths)))
    times = {"forward_s": forward_s, "backward_s": backward_s, "turn_s": turn_s}
    found = solved(UnitTable.build(lengths, slots, **times).solve())
    timeline = check(unit_problem(lengths, slots, **times), found.schedule)
    assert timeline.makespan_s == found.makespan_s


def test_enough_slots_recompute_nothing() -> None:
    for size in (1, 5, 15):
        for lengths in ((2 * size,) * 3, (size, 5 * size), (6 * size,)):
            enough = 6 * size + len(lengths)
            table = UnitTable.build(lengths, enough)
            assert table.makespan_s(lengths, enough) == 12 * size + 1
            assert table.makespan_s(lengths, enough - 1) > 12 * size + 1


@pytest.mark.parametrize("size", [5, 15])
def test_half_of_the_memory_costs_about_a_quarter(size: int) -> None:
    """Section 4, Figure 7."""
    for lengths in ((2 * size,) * 3, (size, 5 * size), (6 * size,)):
        half = (6 * size + len(lengths)) // 2
        makespan_s = UnitTable.build(lengths, half).makespan_s(lengths, half)
        assert 1.24 < makespan_s / (12 * size + 1) < 1.29


@pytest.mark.parametrize("branches", [1, 2, 3])
def test_the_equivalent_chain_fits_and_is_never_better(branches: int) -> None:
    for length, slots in itertools.product((1, 2, 5, 8), range(branches * 11)):
        found = equiv_chain(length, branches, slots)
        best = solve((length,) * branches, slots)
        if isinstance(found, Infeasible):
            assert slots < found.least_budget_bytes == branches * least_slots((length,))
            continue
        problem = unit_problem((length,) * branches, slots)
        assert check(problem, found.schedule).makespan_s == found.makespan_s
        assert found.makespan_s >= solved(best).makespan_s
        if branches == 1:
            assert found.makespan_s == solved(best).makespan_s


def test_the_equivalent_chain_rounds_slots_down_to_whole_levels() -> None:
    found = solved(equiv_chain(6, 3, 14))
    problem = unit_problem((6, 6, 6), 14)
    assert simulate(problem.join, problem.costs, found.schedule).peak_bytes <= 12 + 1
    assert found == equiv_chain(6, 3, 12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 3), "lengths is empty"),
        (([1, -2], 3), r"lengths\[1\] is -2, must be at least 0"),
        (([1], -1), "slots is -1, must be at least 0"),
        (([1], 2, math.nan), "forward_s is nan, must be finite and at least 0"),
        (([1], 2, 1.0, -1.0), "backward_s is -1.0"),
        (([1], 2, 1.0, 1.0, math.inf), "turn_s is inf"),
    ],
)
def test_malformed_arguments_are_named(arguments: tuple[Any, ...], message: str) -> None:
    names = ("forward_s", "backward_s", "turn_s")
    with pytest.raises(ValueError, match=message):
        UnitTable.build(*arguments[:2], **dict(zip(names, arguments[2:], strict=False)))
