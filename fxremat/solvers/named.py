"""All solvers by name, and one way to call them. Each is imported when it is first requested."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, cast

from fxremat.errors import ArgumentError, FxrematError, refuse
from fxremat.ir import JoinProblem, Problem, Solution

SOLVERS = {
    "store_all": "store_all",
    "periodic": "papers.periodic",
    "revolve": "papers.revolve",
    "rotor": "rotor",
    "join": "join",
    "equiv_chain": "join.equiv",
    "pofo": "papers.pofo",
    "greedy": "papers.offload.greedy",
    "dynprog": "papers.offload.dp",
    "vdnn": "papers.offload.vdnn",
    "conv": "papers.offload.conv",
    "cpsat": "papers.cpsat.chain",
    "cpsat_join": "papers.cpsat.join",
    "cpsat_offload": "papers.cpsat.offload",
}
"""For each name of a solver, its module in ``fxremat.solvers``, whose docstring says what it
finds. The docstring of :func:`solve` lists the names."""

JOIN_SOLVERS = ("join", "equiv_chain", "cpsat_join")
"""Solvers of a ``JoinProblem``; ``join`` and ``equiv_chain`` accept a ``Problem`` as well."""


def solver(name: str) -> Callable[..., Solution]:
    """Return the solver called ``name``, a function of a problem and keyword options.

    Raises:
        ArgumentError: there is no such solver.
    """
    if name not in SOLVERS:
        refuse("solver", name, f"one of {', '.join(SOLVERS)}")
    module = importlib.import_module(f"fxremat.solvers.{SOLVERS[name]}")
    return cast(Callable[..., Solution], module.solve)


def solve(name: str, problem: Problem | JoinProblem, /, **options: Any) -> Solution:
    """Find a schedule with one of the papers' algorithms, without torch.

    Args:
        name: ``"store_all"``, ``"periodic"``, ``"revolve"``, ``"rotor"``, ``"join"``,
            ``"equiv_chain"``, ``"pofo"``, ``"greedy"``, ``"dynprog"``, ``"vdnn"``, ``"conv"``,
            ``"cpsat"``, ``"cpsat_join"`` or ``"cpsat_offload"``. Each solver's module describes
            which schedules it finds.
        problem: an ``fxremat.ir.Problem``: a chain of stages, their costs in bytes and seconds, and
            a budget in bytes. ``Problem(plan.chain, plan.costs, budget_bytes)`` is that of a plan.
            Or an ``fxremat.ir.JoinProblem`` of branches that meet in a trunk.
        **options: options of that solver, such as ``slots=2000``; see its module.

    Returns:
        ``Solved`` has a schedule and its seconds. ``Infeasible`` has the least budget of such
        schedules in bytes. ``TimedOut`` has the best schedule so far, and a lower bound in seconds.

    Raises:
        ArgumentError: there is no such solver, it does not solve such a problem or has no such
            option, or sizes are too large to add up.
    """
    solve_named = solver(name)
    _check_kind(name, problem)
    parameters = inspect.signature(solve_named).parameters
    for option, value in options.items():
        if option not in parameters:
            names = ", ".join([*parameters][1:]) or "none"
            message = f"{name} has no option {option!r}: it takes {names}"
            raise ArgumentError(message, argument=option, value=value)
    try:
        return solve_named(problem, **options)
    except ValueError as error:
        if isinstance(error, FxrematError):
            raise
        raise ArgumentError(str(error), argument="problem", value=problem) from error


def _check_kind(name: str, problem: object) -> None:
    """Raise ``ArgumentError`` unless solver ``name`` solves problems of this type."""
    if isinstance(problem, JoinProblem):
        able = list(JOIN_SOLVERS)
    elif isinstance(problem, Problem):
        able = [other for other in SOLVERS if other != "cpsat_join"]
    else:
        able = []
    if name not in able:
        remedy = f"use one of {', '.join(able)}" if able else "pass an fxremat.ir.Problem"
        raise ArgumentError(
            f"problem is a {type(problem).__name__}, which {name} does not solve: {remedy}",
            argument="problem",
            value=problem,
        )
