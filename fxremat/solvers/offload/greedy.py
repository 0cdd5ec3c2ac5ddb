"""Eager offloading: the first activations, as much as must go and no more.

Beaumont, Eyraud-Dubois, Shilova, "Optimal GPU-CPU offloading strategies for deep neural
network training" (2019), section 4. Where activations may be moved in part and transfers
interrupted (the fluid model of docs/design/0007), Theorem 2 says that the no-wait, ordered
schedule that offloads the first ``Q = M_peak - M`` bytes is optimal: a schedule ``S`` that ever
has more than ``Q`` on the host can move less, and what it has there may as well be the first
bytes that were computed. Rounded up to whole activations, that is their heuristic GREEDY for
transfers that are whole.

``O(L²)``. The paper has one link for both directions; with two, the argument is the same:
what is on the host grows until the operation of the peak, and shrinks after it.
"""

from __future__ import annotations

from functools import partial

from fxremat.ir import Problem, Solution
from fxremat.solvers.offload.line import OffloadChain
from fxremat.solvers.offload.phases import solved


def solve(problem: Problem, *, relaxed: bool = False) -> Solution:
    """Offload the first activations that are large enough together.

    Args:
        problem: the chain, its costs, the budget and the link. Without a link nothing moves.
        relaxed: the last of them in part, and a schedule for a fluid replay, optimal there;
            else rounded up, and a schedule of whole transfers.

    Returns:
        ``Solved``, or ``Infeasible`` with the exact least budget, which is that of all
        schedules that recompute nothing.

    Raises:
        ValueError: a storage crosses two cuts, or the sizes are too large to add up.
    """
    return solved(problem, partial(eager, rounded=not relaxed), whole=not relaxed)


def eager(line: OffloadChain, *, rounded: bool) -> list[int]:
    """What to offload of each activation."""
    left = line.peak_bytes - line.budget
    amounts = []
    for size in line.sizes:
        take = max(0, min(size, left))
        amounts.append(size if rounded and take else take)
        left -= take
    return amounts
