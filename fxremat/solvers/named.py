"""All solvers by name. What plans a step loads only those that it uses, never this file."""

from __future__ import annotations

from typing import Protocol

from fxremat.ir import JoinProblem, Problem, Solution
from fxremat.solvers import cpsat, join, periodic, pofo, revolve, rotor, store_all
from fxremat.solvers.cpsat import join as cpsat_join
from fxremat.solvers.join import equiv
from fxremat.solvers.offload import conv, dp, greedy, vdnn


class Solver(Protocol):
    """Finds a schedule: ``Solved``, ``Infeasible`` or ``TimedOut``, never an exception."""

    def __call__(self, problem: Problem, /) -> Solution:
        """Solve ``problem``."""


class JoinSolver(Protocol):
    """As ``Solver``, for branches that meet in a trunk."""

    def __call__(self, problem: JoinProblem, /) -> Solution:
        """Solve ``problem``."""


SOLVERS: dict[str, Solver] = {
    "store_all": store_all.solve,
    "periodic": periodic.solve,
    "revolve": revolve.solve,
    "rotor": rotor.solve,
    "offload_greedy": greedy.solve,
    "offload_dp": dp.solve,
    "vdnn": vdnn.solve,
    "offload_conv": conv.solve,
    "join": join.solve,
    "equiv_chain": equiv.solve,
    "pofo": pofo.solve,
    "cpsat": cpsat.solve,
    "cpsat_offload": cpsat.offload.solve,
}
"""Solvers by name. Those of joins answer a chain as rotor does."""

JOIN_SOLVERS: dict[str, JoinSolver] = {
    "join": join.solve,
    "equiv_chain": equiv.solve,
    "cpsat": cpsat_join.solve,
}
"""Solvers of joins by name."""
