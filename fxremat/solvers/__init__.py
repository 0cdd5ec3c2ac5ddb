"""Numbers in, schedule out. Nothing here imports torch."""

from __future__ import annotations

from typing import Protocol

from fxremat.ir import Problem, Solution
from fxremat.solvers import brute, cpsat, periodic, revolve, rotor, store_all
from fxremat.solvers.offload import conv, dp, greedy, vdnn


class Solver(Protocol):
    """Finds a schedule: ``Solved``, ``Infeasible`` or ``TimedOut``, never an exception."""

    def __call__(self, problem: Problem, /) -> Solution:
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
    "cpsat": cpsat.solve,
    "brute": brute.solve,
}
"""Solvers by name."""
