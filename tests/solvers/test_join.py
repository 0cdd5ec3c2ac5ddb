"""The join solver: canonical schedules of heterogeneous joins."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.ir import (
    Chain,
    Costs,
    Forward,
    Infeasible,
    Join,
    JoinCosts,
    JoinProblem,
    Keep,
    Problem,
    Solved,
)
from fxremat.passes.emit.program import keep_all
from fxremat.solvers import join as solver
from fxremat.solvers import rotor
from fxremat.solvers.join.numbers import kept_bytes
from fxremat.solvers.named import JOIN_SOLVERS
from fxremat.solvers.named import solver as named
from tests.examples import examples
from tests.joins import (
    chain_of,
    costed_joins,
    ends_dropped,
    interrupted,
    join_costs,
    join_of,
    joins,
    joins_with_options,
    same_branch_first,
    sharing_joins,
    two_towers,
)
from tests.paper_terms import join_from_sizes
from tests.reference.brute import join as brute
from tests.reference.simulate.join import check, simulate
from tests.strategies import HUGE_SECONDS, HUGE_SIZES, chains_with_options, costed_chains


@given(costed_joins() | joins_with_options())
def test_the_peak_of_everything_kept_is_that_of_its_replay(costed: tuple[Join, JoinCosts]):
    join, costs = costed
    assert kept_bytes(join, costs) == simulate(join, costs, keep_all(len(join))).peak_bytes


def exact(problem: JoinProblem) -> Solved | Infeasible:
    """Solve with slots of one byte."""
    return solver.solve(problem, slots=max(1, problem.budget_bytes))


def equals_the_exhaustive_search(costed: tuple[Join, JoinCosts], spare: int) -> None:
    join, costs = costed
    least_bytes, _ = solver.least_budget(join, costs)
    problem = JoinProblem(join, costs, max(0, least_bytes + spare))
    found, expected = exact(problem), brute.solve(problem)
    if isinstance(expected, Infeasible):
        assert found == expected
        return
    assert isinstance(found, Solved)
    assert found.makespan_s == expected.makespan_s
    assert check(problem, found.schedule).makespan_s == found.makespan_s
    assert check(problem, expected.schedule).makespan_s == expected.makespan_s


@examples(0.5)
@given(costed_joins(), st.integers(-1, 12))
def test_equals_the_exhaustive_search(costed: tuple[Join, JoinCosts], spare: int) -> None:
    equals_the_exhaustive_search(costed, spare)


FEW = st.sampled_from([(1,), (2,), (3,), (1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (1, 1, 1)])


@given(joins_with_options(lengths=FEW), st.integers(-1, 12))
def test_options_equal_the_exhaustive_search(costed: tuple[Join, JoinCosts], spare: int) -> None:
    equals_the_exhaustive_search(costed, spare)


@given(chains_with_options(), st.integers(-1, 20))
def test_a_single_branch_is_rotor_with_options(costed: tuple[Chain, Costs], spare: int) -> None:
    chain, costs = costed
    if len(chain) < 2:
        return
    least_bytes, _ = rotor.least_budget(chain, costs)
    problem = Problem(chain, costs, max(0, least_bytes + spare))
    found = exact(join_of(problem))
    expected = rotor.solve(problem, slots=max(1, problem.budget_bytes))
    if isinstance(expected, Infeasible):
        assert found == expected
    else:
        assert isinstance(found, Solved)
        assert isinstance(expected, Solved)
        assert found.makespan_s == pytest.approx(expected.makespan_s, abs=1e-9)
        assert check(join_of(problem), found.schedule).makespan_s == found.makespan_s


LONG = st.sampled_from([(3, 3, 2), (4, 2, 1), (4, 3, 1), (2, 2, 3), (3, 1, 4)])


@pytest.mark.slow
@examples(0.02)
@given(costed_joins(lengths=LONG, most_trunk=2), st.integers(-1, 6))
def test_equals_the_exhaustive_search_on_longer_branches(
    costed: tuple[Join, JoinCosts], spare: int
) -> None:
    equals_the_exhaustive_search(costed, spare)


@given(
    costed_joins(lengths=st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (1, 1, 1)])), st.data()
)
def test_is_not_always_the_best_persistent_one_but_never_better(
    costed: tuple[Join, JoinCosts], data: st.DataObject
) -> None:
    least_bytes, _ = solver.least_budget(*costed)
    problem = JoinProblem(*costed, least_bytes + data.draw(st.integers(0, 9)))
    found, best = exact(problem), brute.solve(problem, kind=brute.Kind.PERSISTENT)
    assert isinstance(found, Solved)
    assert isinstance(best, Solved)
    assert best.makespan_s <= found.makespan_s
    assert check(problem, best.schedule).makespan_s == best.makespan_s


@given(costed_joins())
def test_least_budget_is_what_its_schedule_needs(costed: tuple[Join, JoinCosts]) -> None:
    least_bytes, schedule = solver.least_budget(*costed)
    assert simulate(*costed, schedule).peak_bytes == least_bytes
    assert isinstance(exact(JoinProblem(*costed, least_bytes)), Solved)
    if least_bytes:
        assert exact(JoinProblem(*costed, least_bytes - 1)) == Infeasible(least_bytes)


@given(costed_chains(), st.integers(-1, 20))
def test_a_single_branch_is_rotor(costed: tuple[Chain, Costs], spare: int) -> None:
    chain, costs = costed
    if len(chain) < 2:
        return
    least_bytes, _ = rotor.least_budget(chain, costs)
    whole = Problem(chain, costs, max(0, least_bytes + spare))
    problem = join_of(whole)
    assert chain_of(problem) == whole
    found, expected = exact(problem), rotor.solve(whole, slots=max(1, whole.budget_bytes))
    if isinstance(expected, Solved):
        assert isinstance(found, Solved)
        assert found.makespan_s == expected.makespan_s
        check(problem, found.schedule)
    else:
        assert found == expected
    assert solver.solve(whole) == rotor.solve(whole, slots=200)


@given(sharing_joins(), st.data())
def test_shared_storages_are_safe(join: Join, data: st.DataObject) -> None:
    costs = data.draw(join_costs(join))
    least_bytes, schedule = solver.least_budget(join, costs)
    assert simulate(join, costs, schedule).peak_bytes <= least_bytes
    problem = JoinProblem(join, costs, least_bytes + data.draw(st.integers(0, 9)))
    found, best = exact(problem), brute.solve(problem)
    assert isinstance(found, Solved)
    assert isinstance(best, Solved)
    assert check(problem, found.schedule).makespan_s == found.makespan_s >= best.makespan_s


LONGER = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


@given(st.data(), st.integers(1, 60), st.floats(0, 1))
def test_any_magnitude(data: st.DataObject, slots: int, share: float) -> None:
    join = data.draw(joins(lengths=LONGER, sizes=HUGE_SIZES))
    costs = data.draw(join_costs(join, sizes=HUGE_SIZES, seconds=HUGE_SECONDS))
    least_bytes, _ = solver.least_budget(join, costs)
    total = sum(storage.nbytes for storage in join.storages)
    problem = JoinProblem(join, costs, least_bytes + int(share * total))
    found = solver.solve(problem, slots=slots)
    assert isinstance(found, Solved)
    timeline = check(problem, found.schedule)
    assert math.isclose(timeline.makespan_s, found.makespan_s, rel_tol=1e-12)
    assert 0 <= found.makespan_s < math.inf
    if least_bytes:
        less = JoinProblem(join, costs, least_bytes - 1)
        assert solver.solve(less, slots=slots) == Infeasible(least_bytes)


@given(costed_joins(), st.integers(5, 40))
def test_one_table_answers_every_smaller_budget(costed: tuple[Join, JoinCosts], spare: int) -> None:
    least_bytes, _ = solver.least_budget(*costed)
    most = least_bytes + spare
    plans = solver.JoinPlans.build(*costed, max_budget_bytes=most, slots=max(1, most))
    assert plans.quantum_bytes == 1
    for budget_bytes in range(max(0, least_bytes - 1), most + 1):
        found, alone = plans.schedule(budget_bytes), exact(JoinProblem(*costed, budget_bytes))
        if isinstance(alone, Infeasible):
            assert found == alone
        else:
            assert isinstance(found, Solved)
            assert found.makespan_s == alone.makespan_s
    better = plans.distinct_budgets()
    assert better[0] == max(least_bytes, plans.base_bytes)
    assert list(better) == sorted(set(better))
    with pytest.raises(ValueError, match=f"budget_bytes is {most + 1}, the table ends at {most}"):
        plans.schedule(most + 1)


def test_the_order_forward_is_the_reverse_of_the_order_back() -> None:
    problem = same_branch_first()
    assert exact(problem) == brute.solve(problem) == Infeasible(3)
    best = brute.solve(problem, kind=brute.Kind.PERSISTENT)
    assert isinstance(best, Solved)
    assert str(best.schedule) == "F_ck 1, F_ck 0, F_all 2, B 2, F_all 1, B 1, F_all 0, B 0"


def test_no_segment_is_interrupted() -> None:
    problem = interrupted()
    found, searched = exact(problem), brute.solve(problem)
    best = brute.solve(problem, kind=brute.Kind.PERSISTENT)
    assert isinstance(found, Solved)
    assert isinstance(searched, Solved)
    assert isinstance(best, Solved)
    assert (found.makespan_s, searched.makespan_s, best.makespan_s) == (2.0, 2.0, 1.0)
    assert [str(op) for op in best.schedule][:3] == ["F_ck 0", "F_all 2", "F_none 1"]


def test_the_branches_run_again_where_their_ends_were_dropped() -> None:
    problem = ends_dropped()
    found, expected = exact(problem), brute.solve(problem)
    assert isinstance(found, Solved)
    assert isinstance(expected, Solved)
    assert found.makespan_s == expected.makespan_s
    assert check(problem, found.schedule).makespan_s == found.makespan_s
    assert [str(op) for op in found.schedule][:3] == ["F_ck 1", "F_ck 0", "F_none 2"]
    assert exact(replace(problem, budget_bytes=3)) == Infeasible(4)
    assert brute.solve(replace(problem, budget_bytes=3)) == Infeasible(4)


def test_a_budget_that_fits_all_recomputes_nothing() -> None:
    problem = two_towers()
    found = solver.solve(problem)
    assert isinstance(found, Solved)
    forwards = [op for op in found.schedule if isinstance(op, Forward)]
    assert len(forwards) == len(problem.join)
    assert all(op.keep is Keep.ALL for op in forwards)
    assert found.makespan_s == 3.0 * len(problem.join)


def test_few_slots_are_still_answered() -> None:
    """A budget that fits only without rounding gets a schedule from the least memory."""
    problem = two_towers()
    least_bytes, _ = solver.least_budget(problem.join, problem.costs)
    found = solver.solve(replace(problem, budget_bytes=least_bytes), slots=1)
    assert isinstance(found, Solved)
    check(replace(problem, budget_bytes=least_bytes), found.schedule)


@pytest.mark.parametrize("name", JOIN_SOLVERS)
def test_every_solver_of_joins_answers(name: str) -> None:
    problem = interrupted()
    found = named(name)(replace(problem, budget_bytes=20))
    assert isinstance(found, Solved)
    assert found.makespan_s == 1.0
    check(replace(problem, budget_bytes=20), found.schedule)
    assert isinstance(named(name)(replace(problem, budget_bytes=1)), Infeasible)


def test_malformed_arguments_are_named() -> None:
    long = join_from_sizes([[0] * 301] * 3, [[0] * 300] * 3, [0], [0])
    step = two_towers().costs.trunk[1]
    costs = JoinCosts(((step,) * 300,) * 3, (step,))
    with pytest.raises(ValueError, match=r"\[300, 300, 300\] stages .* merge stages"):
        solver.solve(JoinProblem(long, costs, 1))
    with pytest.raises(ValueError, match="slots is 0, but must be"):
        solver.solve(two_towers(), slots=0)
    join = join_from_sizes([[1 << 61, 1 << 61]], [[1 << 61]], [0], [0])
    problem = JoinProblem(join, JoinCosts(((step,),), (step,)), 1)
    with pytest.raises(ValueError, match="the sizes add up to"):
        solver.solve(problem)
