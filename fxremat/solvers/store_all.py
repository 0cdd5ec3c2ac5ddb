"""Keeps everything, as PyTorch does.

Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains"
(2019), section 5.3, strategy *PyTorch*: ``F_all 0 … F_all L - 1, B L - 1 … B 0``. There is only one
such schedule, so nothing is optimized: it fits or it does not. ``O(L)``.
"""

from __future__ import annotations

from fxremat.ir import Chain, Costs, Infeasible, Problem, Schedule, Solved
from fxremat.solvers.numbers import numbers_of
from fxremat.solvers.sequences import base_bytes, seconds_of, span, span_bytes


def solve(problem: Problem) -> Solved | Infeasible:
    """Return the schedule without recomputation, or ``Infeasible`` with its exact peak.

    Raises:
        ValueError: the sizes are too large to add up.
    """
    needed_bytes = peak_bytes(problem.chain, problem.costs)
    if needed_bytes > problem.budget_bytes:
        return Infeasible(needed_bytes)
    ops = span(0, len(problem.chain) - 1)
    return Solved(Schedule(tuple(ops)), seconds_of(problem.costs.stages, ops))


def peak_bytes(chain: Chain, costs: Costs) -> int:
    """Return the exact peak of the schedule without recomputation, including ``fixed_bytes``.

    ``O(L)``.

    Raises:
        ValueError: the sizes are too large to add up.
    """
    last = len(chain) - 1
    return base_bytes(chain, costs) + span_bytes(numbers_of(chain, costs), 0, last)
