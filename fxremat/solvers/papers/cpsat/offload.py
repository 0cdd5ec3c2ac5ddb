"""What to offload and when, by CP-SAT, with whole or interruptible transfers.

Beaumont, Eyraud-Dubois, Shilova, "Optimal GPU-CPU offloading strategies for deep neural network
training" (2019), Problems 1 and 2; see ``offload.line`` for the terms. Every forward keeps
everything and nothing runs twice. An activation either stays, or goes to the host and comes back
once.

*Whole* (Problem 1, assumption (D)): every offload and prefetch is an interval on its lane. An
activation is absent during an operation if its offload has ended and its prefetch has not begun.
Memory is bounded wherever it grows: at the start of each computation and of each prefetch, and
where a backward ends and a larger gradient remains. See ``whole``.

*Interruptible* (Problem 2): variables say how much of every activation has been offloaded and
prefetched at each start and end of a computation. Between two of these the link carries what its
bandwidth allows, offloads before prefetches. See ``fluid``.

``ordered`` is the paper's restriction: activations are offloaded in the order of the stages and
prefetched in the opposite one, and no offload follows a prefetch. Interruptible transfers are
always searched in order. Lemma 3 says that this costs them nothing, which is wrong (see
``offload.dp``). But a schedule cannot express that one transfer is interrupted for another. A
budget is infeasible exactly if no schedule fits however long it takes
(``OffloadChain.least_budget_bytes``). Complexity: exponential in the worst case.
"""

from __future__ import annotations

from fxremat.ir import Infeasible, Problem, Solution
from fxremat.solvers.papers.cpsat.fluid import FluidModel
from fxremat.solvers.papers.cpsat.search import fastest, new_search
from fxremat.solvers.papers.cpsat.whole import WholeModel
from fxremat.solvers.papers.offload.line import line_of


def solve(
    problem: Problem,
    *,
    interruptible: bool = False,
    ordered: bool = False,
    time_limit_s: float = 60.0,
    workers: int = 1,
) -> Solution:
    """Find the shortest step that offloads activations and recomputes nothing.

    Args:
        problem: the chain, its costs, the budget and the link. Without a link nothing moves.
        interruptible: whether transfers may be interrupted, and memory is freed and allocated byte
            by byte.
        ordered: whether activations are offloaded in the order of the stages and prefetched in the
            opposite one, all after the last offload. Interruptible transfers always are.
        time_limit_s: seconds for the search.
        workers: number of CP-SAT's threads.

    Returns:
        ``Solved``, ``Infeasible`` with the exact least budget, or ``TimedOut`` with the best
        schedule so far and a lower bound in seconds.

    Raises:
        ValueError: a storage crosses two cuts, or the sizes are too large to add up.
    """
    line = line_of(problem)
    if problem.budget_bytes < line.least_budget_bytes:
        return Infeasible(line.least_budget_bytes)
    model = FluidModel(line) if interruptible else WholeModel(line, ordered=ordered)
    solution = fastest(new_search(time_limit_s=time_limit_s, workers=workers), model)
    assert solution is not None  # offloading all that a computation does not need is feasible
    return solution
