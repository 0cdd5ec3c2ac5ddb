"""Keep everything: what PyTorch does by itself.

Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for
heterogeneous chains" (2019), section 5.3, strategy *PyTorch*:
``F_all 0 … F_all L - 1, B L - 1 … B 0``. There is one such schedule, so nothing is
optimized: it fits or it does not. ``O(L)``.
"""

from __future__ import annotations

from fxremat.ir import (
    Backward,
    Chain,
    Compute,
    Costs,
    Forward,
    Infeasible,
    Keep,
    Problem,
    Schedule,
    Solved,
)
from fxremat.solvers.numbers import Numbers, numbers_of
from fxremat.solvers.sequences import base_bytes, seconds_of


def solve(problem: Problem) -> Solved | Infeasible:
    """The schedule without recomputation, or ``Infeasible`` with its exact peak.

    Raises:
        ValueError: the sizes are too large to add up.
    """
    needed_bytes = peak_bytes(problem.chain, problem.costs)
    if needed_bytes > problem.budget_bytes:
        return Infeasible(needed_bytes)
    ops = span_ops(0, len(problem.chain) - 1)
    return Solved(Schedule(ops), seconds_of(problem.costs, ops))


def peak_bytes(chain: Chain, costs: Costs) -> int:
    """Exact peak of the schedule without recomputation, ``fixed_bytes`` included. ``O(L)``.

    Raises:
        ValueError: the sizes are too large to add up.
    """
    last = len(chain) - 1
    return base_bytes(chain, costs) + span_bytes(numbers_of(chain, costs), 0, last)


def span_ops(s: int, t: int) -> tuple[Compute, ...]:
    """Stages ``s … t`` forward, all kept, and back."""
    there = [Forward(i, Keep.ALL) for i in range(s, t + 1)]
    return (*there, *(Backward(i) for i in range(t, s - 1, -1)))


def span_bytes(numbers: Numbers, s: int, t: int) -> int:
    """Peak of ``span_ops`` beside boundary ``s`` while the gradient after ``t`` is held.

    Theorem 1 of the paper with ``C_all`` at every stage. Past the turn the innermost pair
    is a rebuild. ``O(t - s)``.
    """
    nbytes = int(numbers.leaf_bytes[t, 0])
    for i in range(t - 1, s - 1, -1):
        ends = max(int(numbers.gradient[t] + numbers.keep[i]), int(numbers.back[i]))
        nbytes = max(ends, int(numbers.saved[i]) + nbytes)
    return nbytes
