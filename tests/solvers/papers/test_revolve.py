from __future__ import annotations

import math

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from fxremat.ir import Chain, Costs, Forward, Infeasible, Keep, Problem, Solved, StageCosts
from fxremat.solvers import rotor
from fxremat.solvers.numbers import numbers_of
from fxremat.solvers.papers import revolve
from fxremat.solvers.sequences import base_bytes
from tests import problems
from tests.paper_terms import chain_from_sizes
from tests.problems import NAMED, Named
from tests.reference import brute, griewank
from tests.reference.simulate import check, check_equal
from tests.strategies import SECONDS, costed_chains, huge_chains


def exact(problem: Problem) -> Solved | Infeasible:
    """Solve with slots of one byte."""
    solution = revolve.solve(problem, slots=max(1, problem.budget_bytes))
    assert isinstance(solution, Solved | Infeasible)
    return solution


def least_budget(chain: Chain, costs: Costs) -> int:
    found = exact(Problem(chain, costs, 0))
    return found.least_budget_bytes if isinstance(found, Infeasible) else 0


def check_optimum(chain: Chain, costs: Costs, spare: int) -> None:
    """Equal to the search, to its own replay, and not faster than rotor."""
    problem = Problem(chain, costs, max(0, least_budget(chain, costs) + spare))
    found = exact(problem)
    check_equal(problem, found, brute.solve(problem, tapes_late=True))
    best = rotor.solve(problem, slots=max(1, problem.budget_bytes))
    if isinstance(found, Solved):
        assert isinstance(best, Solved)
        assert best.makespan_s <= found.makespan_s


@given(costed_chains(), st.integers(-1, 20))
def test_equals_the_exhaustive_search(costed: tuple[Chain, Costs], spare: int) -> None:
    check_optimum(*costed, spare)


@st.composite
def equal_stages(draw: st.DrawFn, most: int) -> tuple[Chain, Costs]:
    """Stages that are equal where it matters, or nearly so."""
    count = draw(st.integers(1, most))
    sizes = st.integers(0, 4)
    size, extra, gradient = draw(st.integers(1, 4)), draw(sizes), draw(sizes)
    forward_s = draw(SECONDS)
    rebuild = max(0, size + extra + draw(st.integers(-3, 2)))
    near = draw(st.sampled_from([0, 0, 1]))
    stages = []
    for _ in range(count - 1):
        stages.append(
            StageCosts(
                forward_s=forward_s,
                backward_s=draw(SECONDS),
                rebuild_s=draw(SECONDS),
                gradient_bytes=gradient,
                forward_extra_bytes=extra,
                keep_extra_bytes=draw(sizes),
                backward_extra_bytes=draw(sizes),
                rebuild_bytes=rebuild + draw(st.integers(0, near)),
            )
        )
    # Nothing is kept of the last stage, and its backward needs what a rebuild needs.
    needs = max(0, rebuild + draw(st.integers(-near, near)))
    last_s = draw(SECONDS)
    stages.append(StageCosts(last_s, last_s, last_s, gradient, extra, needs, needs, needs))
    boundaries = [draw(sizes), *[size] * (count - 1), 0]
    chain = chain_from_sizes(boundaries, [*[size + 9] * (count - 1), 0])
    return chain, Costs(tuple(stages), draw(sizes))


def closed(problem: Problem) -> int | None:
    """Checkpoints of the closed form, where it is used."""
    numbers = numbers_of(problem.chain, problem.costs)
    free_bytes = problem.budget_bytes - base_bytes(problem.chain, problem.costs)
    return revolve._checkpoints(problem.costs, numbers, free_bytes)


@given(equal_stages(6), st.integers(-1, 30))
def test_equal_stages_equal_the_exhaustive_search(costed: tuple[Chain, Costs], spare: int) -> None:
    check_optimum(*costed, spare)


@given(equal_stages(30), st.integers(0, 40))
def test_the_closed_form_equals_the_recurrence(costed: tuple[Chain, Costs], spare: int) -> None:
    problem = Problem(*costed, least_budget(*costed) + spare)
    found = exact(problem)
    checkpoints = closed(problem)
    event("closed form" if checkpoints else "table")
    event(f"fewer checkpoints than stages: {checkpoints and checkpoints < len(problem.chain)}")
    table = rotor.solve(problem, slots=problem.budget_bytes + 1, tapes_late=True)
    assert isinstance(found, Solved)
    assert isinstance(table, Solved)
    assert found.makespan_s == pytest.approx(table.makespan_s, rel=1e-12)
    check(problem, found.schedule)


def forwards(count: int, checkpoints: int) -> int:
    """Forwards of the schedule for ``count`` equal stages, without any table."""
    problem = problems.revolve(count, checkpoints).problem
    found = revolve.solve(problem, slots=1)
    assert isinstance(found, Solved)
    check(problem, found.schedule)
    ran = [op for op in found.schedule if isinstance(op, Forward)]
    assert sum(op.keep is Keep.ALL for op in ran) == count
    return len(ran)


def test_step_counts_for_orientation() -> None:
    assert [forwards(*of) for of in ((10, 3), (50, 5), (100, 5))] == [25, 172, 416]


@pytest.mark.parametrize("checkpoints", range(1, 13))
def test_schedules_have_these_step_counts(checkpoints: int) -> None:
    known = griewank.checkpoint_schedules_steps, griewank.pyrevolve_steps
    for count in range(1, 61):
        expected = griewank.forward_steps(count, checkpoints)
        assert [steps(count, checkpoints) for steps in known] == [expected] * 2
        assert forwards(count, checkpoints) == expected


def test_a_long_chain_needs_no_table() -> None:
    problem = problems.revolve(3000, 10).problem
    found = revolve.solve(problem)
    assert isinstance(found, Solved)
    assert len(found.schedule) - 3000 == griewank.forward_steps(3000, 10)
    check(problem, found.schedule)


@given(huge_chains(), st.integers(1, 60), st.floats(0, 1))
def test_rounding_keeps_the_promise(
    costed: tuple[Chain, Costs], slots: int, position: float
) -> None:
    chain, costs = costed
    least_bytes = revolve.solve(Problem(chain, costs, 0))
    least = least_bytes.least_budget_bytes if isinstance(least_bytes, Infeasible) else 0
    everything = sum(storage.nbytes for storage in chain.storages) + (1 << 51)
    problem = Problem(chain, costs, least + int(position**8 * everything))
    found = revolve.solve(problem, slots=slots)
    assert isinstance(found, Solved)
    assert math.isfinite(found.makespan_s)
    assert check(problem, found.schedule).makespan_s == found.makespan_s
    if least:
        assert revolve.solve(Problem(chain, costs, least - 1), slots=slots) == Infeasible(least)


@pytest.mark.parametrize("named", NAMED, ids=lambda named: named.name)
def test_named(named: Named) -> None:
    found = exact(named.problem)
    if isinstance(found, Infeasible):
        assert found.least_budget_bytes >= named.least_budget_bytes
        assert found.least_budget_bytes > named.problem.budget_bytes
        return
    assert named.persistent_s is not None
    assert found.makespan_s >= named.persistent_s
    check(named.problem, found.schedule)


def test_malformed_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="slots is 0"):
        revolve.solve(problems.keep_all().problem, slots=0)
