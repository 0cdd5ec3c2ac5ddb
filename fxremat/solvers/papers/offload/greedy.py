"""Eager offloading: the first activations, as many as must be moved.

Beaumont, Eyraud-Dubois, Shilova, "Optimal GPU-CPU offloading strategies for deep neural network
training" (2019), section 4. In the fluid model of docs/design/0007, activations may be moved in
part and transfers interrupted. Theorem 2 says that the no-wait, ordered schedule that offloads the
first ``Q = M_peak - M`` bytes is optimal: a schedule ``S`` that ever has more than ``Q`` on the
host can move less, and what it has there may as well be the bytes that were computed first. Rounded
up to whole activations, this is their heuristic GREEDY for whole transfers.

Complexity: ``O(L²)``. The paper has one link for both directions. With two, the argument is the
same: what is on the host grows until the operation of the peak, and shrinks after it.
"""

from __future__ import annotations

from functools import partial

from fxremat.ir import Problem, Solution
from fxremat.solvers.papers.offload.line import OffloadChain
from fxremat.solvers.papers.offload.phases import solve_by


def solve(problem: Problem, *, relaxed: bool = False) -> Solution:
    """Offload the first activations whose total size suffices.

    Args:
        problem: the chain, its costs, the budget and the link. Without a link nothing moves.
        relaxed: if true, the last of them is moved in part, and the schedule is optimal where
            transfers free and allocate memory byte by byte. Else it is moved entirely, and each
            transfer frees or allocates all its memory at once.

    Returns:
        ``Solved``, or ``Infeasible`` with the exact least budget, which is that of all schedules
        without recomputation.

    Raises:
        ValueError: a storage crosses two cuts, or the sizes are too large to add up.
    """
    return solve_by(problem, partial(eager, rounded=not relaxed), whole=not relaxed)


def eager(line: OffloadChain, *, rounded: bool) -> list[int]:
    """Return the bytes to offload of each activation: the first ones, as many as the budget lacks.

    If ``rounded``, the last of them is offloaded entirely, else in part.
    """
    left = line.peak_bytes - line.budget
    amounts = []
    for size in line.sizes:
        take = max(0, min(size, left))
        amounts.append(size if rounded and take else take)
        left -= take
    return amounts
