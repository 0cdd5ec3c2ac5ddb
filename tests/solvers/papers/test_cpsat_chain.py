from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from fxremat.ir import Chain, Costs, Infeasible, Problem, Solved, TimedOut
from fxremat.solvers.papers import cpsat
from fxremat.solvers.papers.cpsat.runs import add_hint, add_runs
from fxremat.solvers.rotor import RotorTable, least_budget
from fxremat.solvers.rotor import solve as solve_rotor
from tests.examples import examples
from tests.problems import NAMED, Named, figure_2, keep_all, revolve
from tests.reference import brute
from tests.reference.simulate import check, check_equal
from tests.strategies import chains_with_options, costed_chains, huge_chains


def check_optimum(problem: Problem, *, persistent: bool) -> None:
    """Equal to the search, and the schedule to its replay."""
    found = cpsat.solve(problem, persistent=persistent)
    check_equal(problem, found, brute.solve(problem, persistent=persistent))


def near_the_least(costed: tuple[Chain, Costs], spare: int) -> Problem:
    return Problem(*costed, max(0, least_budget(*costed)[0] + spare))


@given(costed_chains(most=5), st.integers(-2, 20))
def test_persistent_equals_the_exhaustive_search(costed: tuple[Chain, Costs], spare: int) -> None:
    check_optimum(near_the_least(costed, spare), persistent=True)


@given(costed_chains(most=3), st.integers(-4, 20))
def test_any_equals_the_exhaustive_search(costed: tuple[Chain, Costs], spare: int) -> None:
    check_optimum(near_the_least(costed, spare), persistent=False)


@given(chains_with_options(most=3), st.integers(-2, 20))
def test_options_equal_the_exhaustive_search_and_rotor(
    costed: tuple[Chain, Costs], spare: int
) -> None:
    check_options(near_the_least(costed, spare))


def check_options(problem: Problem) -> None:
    check_optimum(problem, persistent=True)
    found, rotor = cpsat.solve(problem), solve_rotor(problem)
    if isinstance(found, Solved) and isinstance(rotor, Solved):
        assert rotor.makespan_s >= found.makespan_s  # rotor rounds sizes up
        exact = RotorTable.build(
            problem.chain, problem.costs, max_budget_bytes=problem.budget_bytes,
            slots=max(problem.budget_bytes, 1),
        ).schedule(problem.budget_bytes)  # fmt: skip
        assert isinstance(exact, Solved)
        assert exact.makespan_s == pytest.approx(found.makespan_s)


@pytest.mark.slow
@examples(0.2)
@given(chains_with_options(most=4), st.integers(-2, 20))
def test_options_on_many(costed: tuple[Chain, Costs], spare: int) -> None:
    check_options(near_the_least(costed, spare))


@pytest.mark.slow
@given(costed_chains(), st.integers(-2, 20))
def test_persistent_on_many(costed: tuple[Chain, Costs], spare: int) -> None:
    check_optimum(near_the_least(costed, spare), persistent=True)


@pytest.mark.slow
@given(costed_chains(most=4), st.integers(-4, 20))
def test_any_on_many(costed: tuple[Chain, Costs], spare: int) -> None:
    check_optimum(near_the_least(costed, spare), persistent=False)


@pytest.mark.parametrize("n", [3, 4, 5, 6])
def test_figure_2(n: int) -> None:
    """Section 4.1 of the rotor paper: 3n + 1 persistent, 2n + 2 otherwise."""
    problem = figure_2(n).problem
    for persistent, expected_s in ((True, 3 * n + 1), (False, 2 * n + 2)):
        found = cpsat.solve(problem, persistent=persistent)
        assert isinstance(found, Solved)
        assert found.makespan_s == expected_s
        assert check(problem, found.schedule).makespan_s == expected_s


@pytest.mark.parametrize("named", NAMED, ids=lambda named: named.name)
def test_named(named: Named) -> None:
    found = cpsat.solve(named.problem)
    if named.persistent_s is None:
        assert found == Infeasible(named.least_budget_bytes)
        return
    assert isinstance(found, Solved)
    assert found.makespan_s == named.persistent_s
    check(named.problem, found.schedule)


@pytest.mark.parametrize(
    "named", [n for n in NAMED if len(n.problem.chain) <= 4], ids=lambda named: named.name
)
def test_named_not_persistent(named: Named) -> None:
    found = cpsat.solve(named.problem, persistent=False)
    assert isinstance(found, Solved)
    assert found.makespan_s == named.any_s
    check(named.problem, found.schedule)


def test_a_time_limit_leaves_a_bound_and_the_best_so_far() -> None:
    named = revolve(12, 2)
    assert named.any_s is not None
    found = cpsat.solve(named.problem, persistent=False, time_limit_s=5.0)
    assert isinstance(found, TimedOut)
    assert 0 <= found.bound_s <= named.any_s
    assert found.incumbent is not None
    replayed = check(named.problem, found.incumbent.schedule)
    assert replayed.makespan_s == found.incumbent.makespan_s >= named.any_s


@given(chains_with_options(), st.integers(-2, 20), st.booleans(), st.sampled_from([0.0, 0.01]))
def test_with_hardly_any_time_it_is_as_good_as_rotor(
    costed: tuple[Chain, Costs], spare: int, persistent: bool, time_limit_s: float
) -> None:
    problem = near_the_least(costed, spare)
    found = cpsat.solve(problem, persistent=persistent, time_limit_s=time_limit_s)
    rotor = solve_rotor(problem)
    best = found.incumbent if isinstance(found, TimedOut) else found
    if isinstance(rotor, Solved):
        assert isinstance(best, Solved)
        assert best.makespan_s <= rotor.makespan_s
        assert check(problem, best.schedule).makespan_s == best.makespan_s
    if isinstance(found, TimedOut):
        assert found.incumbent is None or found.bound_s <= found.incumbent.makespan_s


def test_no_time_at_all_for_what_fits_no_budget() -> None:
    problem = revolve(8, 2).problem
    found = cpsat.solve(replace(problem, budget_bytes=0), time_limit_s=0.0)
    assert isinstance(found, TimedOut)
    assert found.incumbent is None


@given(chains_with_options(), st.integers(0, 20), st.booleans())
def test_every_schedule_of_rotor_is_one_of_the_runs(
    costed: tuple[Chain, Costs], spare: int, persistent: bool
) -> None:
    """What is hinted is all that is needed, and valid: nothing is left to repair."""
    rotor = solve_rotor(near_the_least(costed, spare))
    assert isinstance(rotor, Solved)
    model, search = cp_model.CpModel(), cp_model.CpSolver()
    ways = [len(stage.options) + 1 for stage in costed[1].stages]
    runs = add_runs(model, ways, len(ways) + 1, persistent=persistent)
    assert add_hint(model, runs, rotor.schedule.computations)
    search.parameters.fix_variables_to_their_hinted_value = True
    assert search.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)


def test_a_schedule_of_too_many_runs_is_no_hint() -> None:
    rotor = solve_rotor(revolve(4, 1).problem)
    assert isinstance(rotor, Solved)
    model = cp_model.CpModel()
    runs = add_runs(model, [1] * 4, 2, persistent=True)
    assert not add_hint(model, runs, rotor.schedule.computations)


@given(huge_chains(most=4), st.floats(0, 1), st.booleans())
def test_sizes_and_times_of_any_magnitude(
    costed: tuple[Chain, Costs], position: float, persistent: bool
) -> None:
    """Up to rounding to less than a nanosecond an operation, within the bytes always."""
    chain, costs = costed
    least_bytes, _ = least_budget(chain, costs)
    problem = Problem(chain, costs, least_bytes + int(position**8 * least_bytes))
    found = cpsat.solve(problem, persistent=persistent)
    expected = brute.solve(problem, persistent=persistent)
    assert isinstance(found, Solved)
    assert isinstance(expected, Solved)
    assert check(problem, found.schedule).makespan_s == found.makespan_s
    assert found.makespan_s == pytest.approx(expected.makespan_s, rel=1e-12, abs=1e-8)
    if persistent and least_bytes:
        less = Problem(chain, costs, least_bytes - 1)
        assert cpsat.solve(less) == Infeasible(least_bytes)


def test_without_runs_to_spare_less_is_found() -> None:
    """What ``more_runs`` is for: early recomputation takes a run that no backward ends."""
    problem = next(n for n in NAMED if n.name == "early-recomputation").problem
    found = cpsat.solve(problem, persistent=False, more_runs=0)
    assert isinstance(found, Infeasible)
    assert found.least_budget_bytes > problem.budget_bytes


def test_two_threads_find_the_same() -> None:
    found = cpsat.solve(keep_all().problem, workers=2)
    assert isinstance(found, Solved)
    assert found.makespan_s == keep_all().persistent_s
