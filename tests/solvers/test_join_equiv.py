from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fxremat.ir import Infeasible, Join, JoinCosts, JoinProblem, Solved
from fxremat.solvers import join as solver
from fxremat.solvers import rotor
from fxremat.solvers.join import equiv
from tests.joins import chain_of, costed_joins, join_of, two_towers
from tests.problems import keep_all
from tests.reference.simulate import simulate as simulate_chain
from tests.reference.simulate.join import check, simulate

LONGER = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@given(costed_joins(lengths=LONGER), st.integers(0, 40))
def test_its_schedules_fit_and_are_no_better_than_the_join(
    costed: tuple[Join, JoinCosts], spare: int
) -> None:
    least_bytes, _ = solver.least_budget(*costed)
    problem = JoinProblem(*costed, least_bytes + spare)
    slots = max(1, problem.budget_bytes)
    found = equiv.solve(problem, slots=slots)
    if isinstance(found, Infeasible):
        assert found.least_budget_bytes > problem.budget_bytes
        problem = JoinProblem(*costed, found.least_budget_bytes)
        found = equiv.solve(problem, slots=max(1, found.least_budget_bytes))
    assert isinstance(found, Solved)
    assert check(problem, found.schedule).makespan_s == found.makespan_s
    best = solver.solve(problem, slots=max(1, problem.budget_bytes))
    assert isinstance(best, Solved)
    assert best.makespan_s <= found.makespan_s


@given(costed_joins(lengths=LONGER))
def test_the_chain_needs_at_least_what_the_join_does(costed: tuple[Join, JoinCosts]) -> None:
    problem = JoinProblem(*costed, 0)
    line = equiv.equivalent_chain(problem)
    least_bytes, schedule = rotor.least_budget(line.chain, line.costs)
    peak_bytes = simulate(*costed, equiv.as_join_schedule(problem, schedule)).peak_bytes
    assert peak_bytes <= simulate_chain(line.chain, line.costs, schedule).peak_bytes == least_bytes


def test_a_chain_is_its_own_equivalent() -> None:
    problem = keep_all().problem
    assert equiv.solve(problem) == rotor.solve(problem, slots=200)
    join = join_of(problem)
    assert equiv.equivalent_chain(join).costs == chain_of(join).costs
    assert equiv.solve(join, slots=problem.budget_bytes) == rotor.solve(
        problem, slots=problem.budget_bytes
    )


def test_shorter_branches_wait_with_their_input() -> None:
    line = equiv.equivalent_chain(two_towers())
    assert [line.chain.nbytes(b) for b in line.chain.boundaries] == [11, 21, 32, 43, 100, 0]
    assert [stage.forward_s for stage in line.costs.stages] == [1.0, 2.0, 2.0, 1.0, 1.0]
    # While branch 1 goes back to its input, branch 0 has left 300 bytes and the trunk a million.
    assert [stage.gradient_bytes for stage in line.costs.stages] == [
        1_000_000 + 300 + 10_000,
        1_000_000 + 1000 + 20_000,
        1_000_000 + 2000 + 30_000,
        100_000,
        0,
    ]
