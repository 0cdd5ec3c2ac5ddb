"""All solvers by name, and one way to call them; each is loaded when it is first asked for."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, cast

from fxremat.errors import ArgumentError, FxrematError, refuse
from fxremat.ir import JoinProblem, Problem, Solution

SOLVERS = {
    "store_all": "store_all",
    "periodic": "periodic",
    "revolve": "revolve",
    "rotor": "rotor",
    "join": "join",
    "equiv_chain": "join.equiv",
    "pofo": "pofo",
    "greedy": "offload.greedy",
    "dynprog": "offload.dp",
    "vdnn": "offload.vdnn",
    "conv": "offload.conv",
    "cpsat": "cpsat.chain",
    "cpsat_join": "cpsat.join",
    "cpsat_offload": "cpsat.offload",
}
"""Names of solvers, and the module of each in ``fxremat.solvers``, which says what it finds."""

JOIN_SOLVERS = ("join", "equiv_chain", "cpsat_join")
"""Solvers of a ``JoinProblem``; ``join`` and ``equiv_chain`` take a ``Problem`` as well."""


def solver(name: str) -> Callable[..., Solution]:
    """The solver of a name: of a problem, and options by name.

    Raises:
        ArgumentError: there is none.
    """
    if name not in SOLVERS:
        refuse("solver", name, f"one of {', '.join(SOLVERS)}")
    module = importlib.import_module(f"fxremat.solvers.{SOLVERS[name]}")
    return cast(Callable[..., Solution], module.solve)


def solve(name: str, problem: Problem | JoinProblem, /, **options: Any) -> Solution:
    """Find a schedule by one of the papers' algorithms; torch is not needed.

    Args:
        name: ``"rotor"``, ``"revolve"``, ``"pofo"``, ``"join"``, ``"dynprog"`` or another name in
            ``fxremat.solvers.named.SOLVERS``.
        problem: an ``fxremat.ir.Problem``: a chain of stages, their costs in bytes and seconds, and
            a budget in bytes, as ``Problem(plan.chain, plan.costs, budget_bytes)`` has them of a
            plan; or an ``fxremat.ir.JoinProblem`` of branches that meet in a trunk.
        **options: of that solver, such as ``slots=2000``; ``fxremat.solvers`` has what each takes.

    Returns ``Solved`` with a schedule and its seconds, ``Infeasible`` with the least budget of such
    schedules in bytes, or ``TimedOut`` with the best schedule so far and a bound in seconds.

    Raises:
        ArgumentError: there is no such solver, it solves no such problem, has no such option, or
            sizes are too large to add up.
    """
    found = solver(name)
    _check_kind(name, problem)
    known = inspect.signature(found).parameters
    for option, value in options.items():
        if option not in known:
            raise ArgumentError(
                f"{name} has no option {option!r}: it takes {', '.join([*known][1:]) or 'none'}",
                argument=option,
                value=value,
            )
    try:
        return found(problem, **options)
    except ValueError as error:
        if isinstance(error, FxrematError):
            raise
        raise ArgumentError(str(error), argument="problem", value=problem) from error


def _check_kind(name: str, problem: object) -> None:
    """Raise ``ArgumentError`` unless the solver ``name`` solves problems such as ``problem``."""
    if isinstance(problem, JoinProblem):
        able = list(JOIN_SOLVERS)
    elif isinstance(problem, Problem):
        able = [other for other in SOLVERS if other != "cpsat_join"]
    else:
        able = []
    if name not in able:
        remedy = f"ask one of {', '.join(able)}" if able else "give an fxremat.ir.Problem"
        raise ArgumentError(
            f"problem is a {type(problem).__name__}, which {name} does not solve: {remedy}",
            argument="problem",
            value=problem,
        )
