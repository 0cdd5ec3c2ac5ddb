from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.ir import Chain, Costs, Infeasible, Problem, Solved
from tests.problems import NAMED, Named
from tests.reference import brute
from tests.reference.simulate import check
from tests.strategies import costed_chains


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("named", NAMED, ids=lambda named: named.name)
def test_named(named: Named, persistent: bool) -> None:
    expected = named.persistent_s if persistent else named.any_s
    found = brute.solve(named.problem, persistent=persistent)
    if expected is None:
        assert isinstance(found, Infeasible)
        return
    assert isinstance(found, Solved)
    assert found.makespan_s == expected
    assert check(named.problem, found.schedule).makespan_s == expected


@given(costed_chains(most=3), st.integers(0, 40))
def test_every_sequence_beats_the_persistent_ones(costed: tuple[Chain, Costs], budget: int) -> None:
    """And what the search calls valid, in time and within the budget, the replay does too."""
    problem = Problem(*costed, budget)
    wide = brute.solve(problem, persistent=False)
    narrow = brute.solve(problem)
    if isinstance(wide, Infeasible):
        assert isinstance(narrow, Infeasible)
        assert budget < wide.least_budget_bytes <= narrow.least_budget_bytes
        enough = Problem(*costed, wide.least_budget_bytes)
        assert isinstance(brute.solve(enough, persistent=False), Solved)
        return
    assert isinstance(wide, Solved)
    assert check(problem, wide.schedule).makespan_s == wide.makespan_s
    if isinstance(narrow, Solved):
        assert wide.makespan_s <= narrow.makespan_s
    else:
        assert isinstance(narrow, Infeasible)
        assert narrow.least_budget_bytes > budget
