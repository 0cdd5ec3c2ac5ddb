from __future__ import annotations

from collections.abc import Iterator
from itertools import compress, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ortools.linear_solver import pywraplp

from fxremat.ir import Chain, Costs, Infeasible, Problem, Solved
from tests.examples import examples
from tests.reference.brute import chain as brute_chain
from tests.reference.brute import pofo as brute
from tests.reference.brute.pofo import Run, Step, Value
from tests.solvers.papers.test_pofo import problems
from tests.strategies import costed_chains


@given(costed_chains(most=5), st.integers(0, 60))
def test_without_a_link_it_is_the_search_of_chains(
    costed: tuple[Chain, Costs], budget_bytes: int
) -> None:
    problem = Problem(*costed, budget_bytes)
    found, expected = brute.solve(problem), brute_chain.solve(problem)
    if isinstance(expected, Infeasible):
        assert found == expected
        return
    assert isinstance(found, Solved)
    assert isinstance(expected, Solved)
    assert found.makespan_s == expected.makespan_s


@examples(0.2)
@given(problems(most=3))
def test_nothing_is_faster_than_following_the_phases(problem: Problem) -> None:
    """A linear program, free to wait and to transfer when it likes, finds the same times."""
    for run in brute.runs(problem.chain, problem.costs):
        for chosen in product((False, True), repeat=len(run.values)):
            moved = tuple(compress(run.values, chosen))
            found = brute.least_seconds(run, moved, problem.budget_bytes, problem.link)
            expected = program_seconds(problem, run, moved)
            assert (found is None) == (expected is None)
            if found is not None:
                assert found == pytest.approx(expected, abs=1e-6)


def program_seconds(problem: Problem, run: Run, moved: tuple[Value, ...]) -> float | None:
    """The least time of both phases; ``None`` if nothing is feasible.

    A variable for the begin and the end of each step, and for how much of each value is
    copied by then. Memory only goes down between two of them on the way to the loss point, and up
    on the way back, so it is enough to look at begins there and at ends here.
    """
    assert problem.link is not None
    steps = run.steps
    sweep_s = _phase(
        list(steps[: run.loss_point]),
        [(v.kept, v.nbytes) for v in moved],
        problem,
        problem.link.offload_bytes_per_s,
        back=False,
    )
    back_s = _phase(
        list(steps[run.loss_point :]),
        [(v.needed - run.loss_point, v.nbytes) for v in reversed(moved)],
        problem,
        problem.link.prefetch_bytes_per_s,
        back=True,
    )
    return None if sweep_s is None or back_s is None else sweep_s + back_s


def _phase(
    steps: list[Step],
    values: list[tuple[int, int]],
    problem: Problem,
    rate: float,
    *,
    back: bool,
) -> float | None:
    solver = pywraplp.Solver.CreateSolver("GLOP")
    inf = solver.infinity()
    # Instants 0 … 2 n + 1: the phase begins, each step begins and ends, the phase ends.
    times = [solver.NumVar(0, inf, "") for _ in range(2 * len(steps) + 2)]
    done = [[solver.NumVar(0, size, "") for _ in times] for _, size in values]
    solver.Add(times[0] == 0)
    for k in range(len(times) - 1):
        solver.Add(times[k + 1] >= times[k])
        moved = [copy[k + 1] - copy[k] for copy in done]
        for amount in moved:
            solver.Add(amount >= 0)
        solver.Add(sum(moved) <= rate * (times[k + 1] - times[k]))
    for at, step in enumerate(steps):
        solver.Add(times[2 * at + 2] == times[2 * at + 1] + step.seconds)
        here = [step.peak_bytes]
        for (reader, size), copy in zip(values, done, strict=True):
            if back and at < reader:
                here.append(copy[2 * at + 2] - size)
            elif not back and at > reader:
                here.append(-copy[2 * at + 1])
        solver.Add(sum(here) <= problem.budget_bytes)
    for constraint in _order(solver, values, done, back=back):
        solver.Add(constraint)
    solver.Minimize(times[-1])
    return solver.Objective().Value() if solver.Solve() == pywraplp.Solver.OPTIMAL else None


def _order(
    solver: pywraplp.Solver,
    values: list[tuple[int, int]],
    done: list[list[pywraplp.Variable]],
    *,
    back: bool,
) -> Iterator[pywraplp.LinearConstraint]:
    """Nothing is copied too early, and all is copied in time."""
    for (reader, size), copy in zip(values, done, strict=True):
        if back:
            yield copy[0] == 0
            yield copy[2 * reader + 1] == size
        else:
            yield copy[2 * reader] == 0  # the step before it has just ended
            yield copy[-1] == size
