from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.ir import Infeasible, Join, JoinCosts, JoinProblem, Solved, TimedOut
from fxremat.solvers import join as solver
from fxremat.solvers.papers import cpsat
from fxremat.solvers.papers.cpsat.join import default_steps, solve
from tests.examples import examples
from tests.joins import (
    costed_joins,
    interrupted,
    join_costs,
    join_of,
    joins,
    same_branch_first,
    sharing_joins,
    two_towers,
)
from tests.problems import early_recomputation, keep_all
from tests.reference.brute import join as brute
from tests.reference.join_units import UnitTable, unit_problem
from tests.reference.simulate.join import check
from tests.strategies import HUGE_SECONDS, HUGE_SIZES

SHORT = st.sampled_from([(1,), (3,), (1, 1), (2, 1), (1, 2), (2, 2), (1, 1, 1)])
LONGER = st.sampled_from([(4,), (3, 1), (2, 3), (3, 3), (2, 1, 1), (2, 2, 1)])


def equals_the_exhaustive_search(
    costed: tuple[Join, JoinCosts], spare: int, *, may_time_out: bool = False
) -> None:
    least_bytes, _ = solver.least_budget(*costed)
    problem = JoinProblem(*costed, max(0, least_bytes + spare))
    found, expected = solve(problem), brute.solve(problem, kind=brute.Kind.PERSISTENT)
    if isinstance(expected, Infeasible):
        assert found == expected or (may_time_out and found == TimedOut(None, math.inf))
        return
    if isinstance(found, TimedOut) and may_time_out:
        assert found.incumbent is not None
        assert found.bound_s <= expected.makespan_s <= found.incumbent.makespan_s
        check(problem, found.incumbent.schedule)
        return
    assert isinstance(found, Solved)
    assert found.makespan_s == expected.makespan_s
    assert check(problem, found.schedule).makespan_s == found.makespan_s


@examples(0.2)
@given(costed_joins(lengths=SHORT, most_trunk=2), st.integers(-2, 8))
def test_equals_the_exhaustive_search(costed: tuple[Join, JoinCosts], spare: int) -> None:
    equals_the_exhaustive_search(costed, spare)


@pytest.mark.slow
@examples(0.02)
@given(costed_joins(lengths=LONGER, most_trunk=2), st.integers(-2, 8))
def test_equals_the_exhaustive_search_on_longer_branches(
    costed: tuple[Join, JoinCosts], spare: int
) -> None:
    equals_the_exhaustive_search(costed, spare, may_time_out=True)


def test_finds_what_is_not_canonical() -> None:
    for problem, expected_s in ((same_branch_first(), 8.0), (interrupted(), 1.0)):
        found = solve(problem)
        assert isinstance(found, Solved)
        assert found.makespan_s == expected_s
        check(problem, found.schedule)


def test_one_branch_is_a_chain() -> None:
    for named in (keep_all(), early_recomputation()):
        found, chain = solve(join_of(named.problem)), cpsat.solve(named.problem)
        if isinstance(chain, Solved):
            assert isinstance(found, Solved)
            assert found.makespan_s == chain.makespan_s
        else:
            assert found == chain


@pytest.mark.parametrize("lengths", [(2, 2), (1, 3), (1, 1, 1)], ids=str)
def test_unit_costs(lengths: tuple[int, ...]) -> None:
    most = sum(lengths) + len(lengths)
    table = UnitTable.build(lengths, most)
    for slots in range(most + 1):
        found, expected = solve(unit_problem(lengths, slots)), table.solve(slots=slots)
        if isinstance(expected, Infeasible):
            assert found == Infeasible(expected.least_budget_bytes + 1)
        else:
            assert isinstance(found, Solved)
            assert found.makespan_s == expected.makespan_s


@examples(0.4)
@given(st.data(), st.floats(0, 1))
def test_any_magnitude(data: st.DataObject, share: float) -> None:
    join = data.draw(joins(lengths=st.sampled_from([(1, 1), (2,)]), most_trunk=1, sizes=HUGE_SIZES))
    costs = data.draw(join_costs(join, sizes=HUGE_SIZES, seconds=HUGE_SECONDS))
    least_bytes, _ = solver.least_budget(join, costs)
    total = sum(storage.nbytes for storage in join.storages)
    problem = JoinProblem(join, costs, least_bytes + int(share * total))
    found = solve(problem)
    assert isinstance(found, Solved)
    assert math.isclose(check(problem, found.schedule).makespan_s, found.makespan_s)
    expected = brute.solve(problem, kind=brute.Kind.PERSISTENT)
    assert isinstance(expected, Solved)
    assert math.isclose(found.makespan_s, expected.makespan_s, rel_tol=1e-12)


def test_a_time_limit_returns_the_canonical_schedule_and_a_bound() -> None:
    problem = two_towers()
    tight = JoinProblem(
        problem.join, problem.costs, solver.least_budget(problem.join, problem.costs)[0]
    )
    found = solve(tight, time_limit_s=0.0)
    assert isinstance(found, TimedOut)
    assert found.incumbent is not None
    canonical = solver.solve(tight)
    assert isinstance(canonical, Solved)
    assert 0 <= found.bound_s <= found.incumbent.makespan_s <= canonical.makespan_s
    check(tight, found.incumbent.schedule)


def test_too_few_steps_are_not_called_infeasible() -> None:
    problem = same_branch_first()
    roomy = JoinProblem(problem.join, problem.costs, 3)
    assert default_steps(problem.join) == 7
    found = solve(roomy, steps=3)
    assert isinstance(found, TimedOut)
    assert found.bound_s == 0.0
    assert isinstance(found.incumbent, Solved)


@given(sharing_joins(most=2, most_trunk=2), st.data())
def test_shared_storages_are_refused(join: Join, data: st.DataObject) -> None:
    problem = JoinProblem(join, data.draw(join_costs(join)), 5)
    shared = any(
        len({i for ids in line.boundaries for i in ids}) < sum(map(len, line.boundaries))
        for line in join.lines
    )
    if shared:
        with pytest.raises(ValueError, match=r"storage \d+ lies in two boundaries of line"):
            solve(problem)
