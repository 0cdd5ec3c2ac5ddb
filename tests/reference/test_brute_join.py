from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.ir import (
    Chain,
    Costs,
    Infeasible,
    Join,
    JoinCosts,
    JoinProblem,
    Problem,
    Solved,
)
from tests.joins import costed_joins, join_costs, join_of, same_branch_first, sharing_joins
from tests.problems import NAMED, Named
from tests.reference import brute
from tests.reference.brute.join import Kind, solve
from tests.reference.simulate.join import check
from tests.strategies import costed_chains

TINY = st.sampled_from([(1,), (3,), (1, 1), (2, 1)])
COMPARED = {Kind.CANONICAL: True, Kind.PERSISTENT: True, Kind.ANY: False}
"""``persistent`` of the search on chains that finds the same with a single branch."""


def without_end(chain: Chain) -> Chain:
    """Nothing comes out of the last stage.

    A chain lets go of it as soon as another stage runs, a join when the trunk goes on. That
    matters to sequences that run the trunk once more only to make its next run a rebuild.
    """
    return Chain(chain.storages, (*chain.boundaries[:-1], ()), chain.stages)


@pytest.mark.parametrize("kind", list(Kind))
@given(costed_chains(most=4), st.integers(0, 12))
def test_one_branch_is_a_chain(kind: Kind, costed: tuple[Chain, Costs], spare: int) -> None:
    if len(costed[0]) < 2:
        return
    if kind is Kind.ANY:
        costed = without_end(costed[0]), costed[1]
    persistent = COMPARED[kind]
    least = brute.solve(Problem(*costed, 0), persistent=persistent)
    least_bytes = least.least_budget_bytes if isinstance(least, Infeasible) else 0
    problem = Problem(*costed, least_bytes + spare)
    if least_bytes:
        less = Problem(*costed, least_bytes - 1)
        assert solve(join_of(less), kind=kind) == Infeasible(least_bytes)
    found, expected = (
        solve(join_of(problem), kind=kind),
        brute.solve(problem, persistent=persistent),
    )
    assert isinstance(found, Solved)
    assert isinstance(expected, Solved)
    assert found.makespan_s == expected.makespan_s
    assert check(join_of(problem), found.schedule).makespan_s == found.makespan_s


@pytest.mark.parametrize(
    "named", [n for n in NAMED if len(n.problem.chain) < 7], ids=lambda n: n.name
)
def test_named_chains(named: Named) -> None:
    if len(named.problem.chain) < 2:
        return
    for kind, expected_s in ((Kind.PERSISTENT, named.persistent_s), (Kind.ANY, named.any_s)):
        found = solve(join_of(named.problem), kind=kind)
        assert (found.makespan_s if isinstance(found, Solved) else None) == expected_s


@given(costed_joins(lengths=TINY, most_trunk=2), st.data())
def test_fewer_rules_are_never_worse(costed: tuple[Join, JoinCosts], data: st.DataObject) -> None:
    least = solve(JoinProblem(*costed, 0))
    least_bytes = least.least_budget_bytes if isinstance(least, Infeasible) else 0
    problem = JoinProblem(*costed, least_bytes + data.draw(st.integers(0, 6)))
    times = []
    for kind in (Kind.CANONICAL, Kind.PERSISTENT, Kind.ANY):
        found = solve(problem, kind=kind)
        assert isinstance(found, Solved)
        assert check(problem, found.schedule).makespan_s == found.makespan_s
        times.append(found.makespan_s)
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("kind", [Kind.CANONICAL, Kind.PERSISTENT])
@given(sharing_joins(most=2, most_trunk=2), st.data())
def test_shared_storages_replay_as_planned(kind: Kind, join: Join, data: st.DataObject) -> None:
    costs = data.draw(join_costs(join))
    least = solve(JoinProblem(join, costs, 0), kind=kind)
    least_bytes = least.least_budget_bytes if isinstance(least, Infeasible) else 0
    problem = JoinProblem(join, costs, least_bytes)
    found = solve(problem, kind=kind)
    assert isinstance(found, Solved)
    timeline = check(problem, found.schedule)
    assert timeline.makespan_s == found.makespan_s
    assert timeline.peak_bytes == least_bytes


def test_a_branch_that_must_go_first_both_ways() -> None:
    problem = same_branch_first()
    assert solve(problem) == Infeasible(3)
    assert isinstance(solve(problem, kind=Kind.PERSISTENT), Solved)
    for kind in Kind:
        assert isinstance(solve(replace(problem, budget_bytes=3), kind=kind), Solved)
