"""What to offload and when, by CP-SAT: whole transfers, or interrupted at will.

Beaumont, Eyraud-Dubois, Shilova, "Optimal GPU-CPU offloading strategies for deep neural
network training" (2019), Problems 1 and 2; see ``offload.line`` for the terms. Every forward
keeps everything, nothing runs twice, and an activation either stays or goes to the host and
comes back once.

*Whole* (Problem 1, assumption (D)): every offload and prefetch is an interval on its lane. An
activation is away at an operation if its offload ended and its prefetch has not begun. Memory
is bounded wherever it grows: at the start of each computation and of each prefetch, and where a
backward gives way to a greater gradient. See ``whole``.

*Interruptible* (Problem 2): how much of every activation has gone and come back at each start
and end of a computation. Between two of them the link carries what its bandwidth allows, out
before back. See ``fluid``.

``ordered`` is the paper's restriction: activations go in the order of the stages, come back in
the opposite one, and nothing goes once something came back. Interruptible transfers are
searched that way alone. Lemma 3 says that it costs them nothing, which is not so (see
``offload.dp``); but a schedule cannot say where one transfer stops for another. A budget is
infeasible exactly where not even all the time in the world helps (``Line.least_budget_bytes``).
"""

from __future__ import annotations

from fxremat.ir import Infeasible, Problem, Solution
from fxremat.solvers.cpsat.fluid import FluidModel
from fxremat.solvers.cpsat.search import fastest, new_search
from fxremat.solvers.cpsat.whole import WholeModel
from fxremat.solvers.offload.line import line_of


def solve(
    problem: Problem,
    *,
    interruptible: bool = False,
    ordered: bool = False,
    time_limit_s: float = 60.0,
    workers: int = 1,
) -> Solution:
    """The shortest step that offloads activations and recomputes nothing.

    Args:
        problem: the chain, its costs, the budget and the link; without a link nothing moves.
        interruptible: transfers may stop and go on, and memory comes and goes with every byte.
        ordered: see the module; always so if interruptible.
        time_limit_s: for the search.
        workers: threads of CP-SAT.

    Returns:
        ``Solved``, ``Infeasible`` with the exact least budget, or ``TimedOut`` with the best
        schedule so far and a bound.

    Raises:
        ValueError: a storage crosses two cuts, or the sizes are too large to add up.
    """
    line = line_of(problem)
    if problem.budget_bytes < line.least_budget_bytes:
        return Infeasible(line.least_budget_bytes)
    model = FluidModel(line) if interruptible else WholeModel(line, ordered=ordered)
    found = fastest(new_search(time_limit_s=time_limit_s, workers=workers), model)
    assert found is not None  # all can be on the host that no computation needs
    return found
