"""Replay a schedule: is it valid, how much memory does it need, how long does it take?

Written from the models alone. It shares no code with the solvers, so that one can be held
against the other.
"""

from __future__ import annotations

from fxremat.ir import Infeasible, Problem, Solution, Solved
from tests.reference.simulate.lanes import check, simulate

__all__ = ["check", "check_equal", "simulate"]


def check_equal(problem: Problem, found: Solution, expected: Solution) -> None:
    """Both take the same time, also when replayed, or name the same least budget."""
    if isinstance(expected, Infeasible):
        assert found == expected
        return
    assert isinstance(found, Solved)
    assert isinstance(expected, Solved)
    assert found.makespan_s == expected.makespan_s
    assert check(problem, found.schedule).makespan_s == found.makespan_s
    assert check(problem, expected.schedule).makespan_s == expected.makespan_s
