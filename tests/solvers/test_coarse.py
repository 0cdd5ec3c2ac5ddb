"""Merging neighbouring stages of a join."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fxremat.ir import Infeasible, Join, JoinCosts, JoinProblem, Solved
from fxremat.solvers import join as solver
from fxremat.solvers.join.coarse import coarsen, work_of
from tests.joins import costed_joins, join_costs, joins_with_options, sharing_joins
from tests.reference.simulate.join import check


def refined_schedules_fit(costed: tuple[Join, JoinCosts], most_work: int, spare: int) -> None:
    join, costs = costed
    coarse = coarsen(join, costs, most_work=most_work)
    least_bytes, schedule = solver.least_budget(coarse.join, coarse.costs)
    assert check(JoinProblem(join, costs, least_bytes), coarse.refine(schedule))
    problem = JoinProblem(coarse.join, coarse.costs, least_bytes + spare)
    found = solver.solve(problem, slots=problem.budget_bytes + 1)
    assert isinstance(found, Solved)
    timeline = check(JoinProblem(join, costs, problem.budget_bytes), coarse.refine(found.schedule))
    assert abs(timeline.makespan_s - found.makespan_s) < 1e-9


@given(costed_joins(), st.integers(1, 400), st.integers(0, 12))
def test_schedules_fit_and_take_as_long(
    costed: tuple[Join, JoinCosts], most_work: int, spare: int
) -> None:
    refined_schedules_fit(costed, most_work, spare)


@given(joins_with_options(), st.integers(1, 400), st.integers(0, 12))
def test_schedules_with_options_fit_and_take_as_long(
    costed: tuple[Join, JoinCosts], most_work: int, spare: int
) -> None:
    refined_schedules_fit(costed, most_work, spare)


@given(sharing_joins(), st.integers(1, 400), st.integers(0, 12), st.data())
def test_schedules_of_sharing_stages_fit(
    join: Join, most_work: int, spare: int, data: st.DataObject
) -> None:
    refined_schedules_fit((join, data.draw(join_costs(join))), most_work, spare)


@given(costed_joins(), st.integers(1, 400))
def test_work_is_limited_where_it_can_be(costed: tuple[Join, JoinCosts], most_work: int) -> None:
    coarse = coarsen(*costed, most_work=most_work)
    lengths = [len(line) for line in coarse.join.lines]
    assert work_of(lengths) <= most_work or set(lengths) == {1}
    assert [i for part in coarse.members for i in part] == list(range(len(costed[0])))


@given(costed_joins())
def test_a_small_join_stays_as_it_is(costed: tuple[Join, JoinCosts]) -> None:
    join, costs = costed
    coarse = coarsen(join, costs, most_work=1 << 40)
    assert coarse.costs == costs
    found = solver.solve(JoinProblem(coarse.join, coarse.costs, 40), slots=40)
    expected = solver.solve(JoinProblem(join, costs, 40), slots=40)
    assert isinstance(found, Infeasible) == isinstance(expected, Infeasible)
