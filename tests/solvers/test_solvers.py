"""Every solver in the table, on named and on random chains."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from inspect import signature
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fxremat
from fxremat.errors import ArgumentError
from fxremat.ir import (
    Chain,
    Costs,
    Infeasible,
    Link,
    Problem,
    Solution,
    Solved,
    StageCosts,
    TimedOut,
)
from fxremat.solvers import named as registry
from fxremat.solvers.join import JoinPlans
from fxremat.solvers.named import solver
from fxremat.solvers.rotor import RotorTable
from tests.examples import examples
from tests.joins import two_towers
from tests.paper_terms import chain_from_sizes, symmetric_link
from tests.problems import NAMED, Named, keep_all
from tests.reference.simulate import check
from tests.strategies import HUGE_SECONDS, HUGE_SIZES, SIZES, any_costs, paper_costs

PERSISTENT = ("rotor", "join", "equiv_chain", "pofo", "cpsat")
"""Optimal among memory-persistent schedules of a chain without a link."""

KEEPING = ("store_all", "greedy", "dynprog", "vdnn", "conv", "cpsat_offload")
"""They recompute nothing: without a link there is one schedule."""

OTHERS = ("periodic", "revolve")
"""Memory-persistent, of a narrower kind."""

SOLVERS = {name: solver(name) for name in registry.SOLVERS if name != "cpsat_join"}
"""Of chains."""

JOIN_SOLVERS = {name: solver(name) for name in registry.JOIN_SOLVERS}

EXPONENTIAL = ("cpsat", "cpsat_offload")
"""Too slow for anything but small problems."""


@st.composite
def lines(
    draw: st.DrawFn,
    *,
    most: int = 5,
    sizes: st.SearchStrategy[int] = SIZES,
    seconds: st.SearchStrategy[float] | None = None,
) -> tuple[Chain, Costs]:
    """Chains whose boundaries share nothing, as solvers that offload want them."""
    count = draw(st.integers(1, most))
    boundaries = [draw(sizes) for _ in range(count + 1)]
    chain = chain_from_sizes(boundaries, [size + draw(sizes) for size in boundaries[1:]])
    if seconds is not None:
        return chain, draw(any_costs(chain, sizes=sizes, seconds=seconds))
    return chain, draw(draw(st.sampled_from([any_costs, paper_costs]))(chain))


def replayed(problem: Problem, found: Solution) -> float:
    """Seconds of a schedule, which must be valid and within the budget, as it says."""
    assert isinstance(found, Solved)
    assert math.isfinite(found.makespan_s)
    assert found.makespan_s >= 0
    timeline = check(problem, found.schedule)
    assert timeline.peak_bytes <= problem.budget_bytes
    return timeline.makespan_s


def test_every_solver_is_of_some_kind() -> None:
    assert sorted((*PERSISTENT, *KEEPING, *OTHERS)) == sorted(SOLVERS)


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("named", NAMED, ids=lambda named: named.name)
def test_named(named: Named, name: str) -> None:
    found = SOLVERS[name](named.problem)
    if isinstance(found, Infeasible):
        assert found.least_budget_bytes > named.problem.budget_bytes
        assert found.least_budget_bytes >= named.least_budget_bytes
        if name in PERSISTENT:
            assert found.least_budget_bytes == named.least_budget_bytes
            assert named.persistent_s is None
        return
    assert named.persistent_s is not None
    assert replayed(named.problem, found) == found.makespan_s >= named.persistent_s
    if name in PERSISTENT:
        assert found.makespan_s == named.persistent_s


@pytest.mark.parametrize("name", SOLVERS)
@examples(0.2)
@given(lines(), st.integers(0, 60))
def test_without_a_link(name: str, costed: tuple[Chain, Costs], budget_bytes: int) -> None:
    problem = Problem(*costed, budget_bytes)
    kept, best = SOLVERS["store_all"](problem), SOLVERS["rotor"](problem)
    found = SOLVERS[name](problem)
    if name in KEEPING:
        assert found == kept
    if name in PERSISTENT and isinstance(best, Infeasible):
        assert found == best
    if isinstance(found, Infeasible):
        assert found.least_budget_bytes > budget_bytes
        assert isinstance(best, Infeasible) or name not in PERSISTENT
        enough = Problem(*costed, found.least_budget_bytes)
        replayed(enough, SOLVERS[name](enough))
        assert found.least_budget_bytes >= _least(SOLVERS["rotor"](Problem(*costed, 0)))
        return
    assert isinstance(best, Solved)
    assert isinstance(found, Solved)
    assert replayed(problem, found) == found.makespan_s >= best.makespan_s
    if name in PERSISTENT:
        assert found.makespan_s == best.makespan_s


def _least(found: Solution) -> int:
    return found.least_budget_bytes if isinstance(found, Infeasible) else 0


LINKS = st.builds(symmetric_link, st.sampled_from([0.5, 1.0, 4.0]), shared=st.booleans())


@pytest.mark.parametrize("name", SOLVERS)
@examples(0.2)
@given(lines(), LINKS, st.integers(0, 60))
def test_with_a_link(name: str, costed: tuple[Chain, Costs], link: Link, budget_bytes: int) -> None:
    problem = Problem(*costed, budget_bytes, link)
    found = SOLVERS[name](problem)
    if isinstance(found, Infeasible):
        assert found.least_budget_bytes > budget_bytes
        enough = Problem(*costed, found.least_budget_bytes, link)
        replayed(enough, SOLVERS[name](enough))
        return
    assert isinstance(found, Solved)
    assert replayed(problem, found) == pytest.approx(found.makespan_s, rel=1e-12)
    if name in KEEPING:
        shortest = SOLVERS["cpsat_offload"](problem)
        assert isinstance(shortest, Solved)
        assert found.makespan_s >= shortest.makespan_s * (1 - 1e-12)


@pytest.mark.parametrize("name", [name for name in SOLVERS if name not in EXPONENTIAL])
@examples(0.2)
@given(
    lines(most=12, sizes=HUGE_SIZES, seconds=HUGE_SECONDS),
    st.none() | st.builds(symmetric_link, st.floats(1e6, 1e12), shared=st.booleans()),
    st.floats(0, 1),
)
def test_sizes_and_times_of_any_magnitude(
    name: str, costed: tuple[Chain, Costs], link: Link | None, position: float
) -> None:
    least_bytes = _least(SOLVERS[name](Problem(*costed, 0, link)))
    problem = Problem(*costed, least_bytes + int(position**8 * 2**52), link)
    found = SOLVERS[name](problem)
    assert not isinstance(found, TimedOut)
    assert replayed(problem, found) >= 0


TAKES_SLOTS = ("rotor", "revolve", "join", "equiv_chain", "dynprog", "pofo")
"""They round sizes."""


def test_all_that_take_slots_are_listed() -> None:
    takes = [name for name, solve in SOLVERS.items() if "slots" in signature(solve).parameters]
    assert sorted(takes) == sorted(TAKES_SLOTS)


@pytest.mark.parametrize("name", TAKES_SLOTS)
@pytest.mark.parametrize("slots", [0, -1, 1.5, math.nan, math.inf, True])
@pytest.mark.parametrize("budget_bytes", [0, 1 << 20])
def test_slots_are_checked_whatever_the_budget(name: str, slots: float, budget_bytes: int) -> None:
    """With a budget that nothing fits into, and with one that needs no slots."""
    solve: Any = SOLVERS[name]
    problem = replace(keep_all().problem, budget_bytes=budget_bytes)
    with pytest.raises(ArgumentError, match="slots is"):
        solve(problem, slots=slots)


@pytest.mark.parametrize("name", ["join", "equiv_chain"])
@pytest.mark.parametrize("slots", [0, -1, 1.5, math.nan])
@pytest.mark.parametrize("budget_bytes", [0, 1 << 40])
def test_slots_of_joins_are_checked_whatever_the_budget(
    name: str, slots: float, budget_bytes: int
) -> None:
    solve: Any = JOIN_SOLVERS[name]
    with pytest.raises(ArgumentError, match="slots is"):
        solve(replace(two_towers(), budget_bytes=budget_bytes), slots=slots)


@pytest.mark.parametrize("slots", [0, -1, 1.5, math.nan])
def test_slots_of_tables_are_checked_first(slots: Any) -> None:
    """Before the chain, which has a mistake of its own."""
    problem, join = keep_all().problem, two_towers()
    with pytest.raises(ArgumentError, match="slots is"):
        RotorTable.build(problem.chain, problem.costs, max_budget_bytes=-1, slots=slots)
    with pytest.raises(ArgumentError, match="slots is"):
        JoinPlans.build(join.join, join.costs, max_budget_bytes=-1, slots=slots)


def test_importing_the_table_is_quick() -> None:
    """Neither torch nor ortools is loaded with it."""
    code = "import sys, fxremat.solvers; sys.exit({'torch', 'ortools'} & set(sys.modules) != set())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_solver_is_asked_by_its_name() -> None:
    problem = keep_all().problem
    assert fxremat.solve("rotor", problem, slots=50) == SOLVERS["rotor"](problem, slots=50)
    assert fxremat.solve("dynprog", problem) == SOLVERS["dynprog"](problem)
    join = replace(two_towers(), budget_bytes=1 << 40)
    assert fxremat.solve("join", join) == JOIN_SOLVERS["join"](join)


TOO_LARGE = Problem(
    chain_from_sizes([1 << 61] * 2, [1 << 61]),
    Costs((StageCosts(1.0, 1.0, 1.0, 0, 0, 0, 0, 0),)),
    1,
)
"""Its sizes cannot be added up."""


@pytest.mark.parametrize(
    ("name", "problem", "options", "argument"),
    [
        ("rockmate", keep_all().problem, {}, "solver"),
        ("rotor", two_towers(), {}, "problem"),
        ("cpsat_join", keep_all().problem, {}, "problem"),
        ("rotor", 3, {}, "problem"),
        ("vdnn", keep_all().problem, {"slots": 5}, "slots"),
        ("revolve", TOO_LARGE, {}, "problem"),
    ],
)  # fmt: skip
def test_what_is_not_solved_is_told(
    name: str, problem: Any, options: dict[str, int], argument: str
) -> None:
    with pytest.raises(ArgumentError) as told:
        fxremat.solve(name, problem, **options)
    assert told.value.argument == argument
