"""What no offloading schedule can beat.

Beaumont et al. 2019, Propositions 2 and 3. While the operation that needs most memory runs,
all but ``budget`` of it is on the host. That much went there before and comes back after, so
the bound holds for every kind of transfer, on one link for both directions and on two.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxremat.ir import Problem
from fxremat.solvers.papers.offload.line import line_of


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds of a feasible problem.

    Attributes:
        offloaded_bytes: Proposition 2, ``M_peak - M``.
        makespan_s: Proposition 3, the greater of all computations and both transfers.
    """

    offloaded_bytes: int
    makespan_s: float


def lower_bounds(problem: Problem) -> Bounds:
    """The bounds of any schedule that keeps everything and recomputes nothing. ``O(L)``.

    Raises:
        ValueError: as ``line_of``.
    """
    line = line_of(problem)
    least = max(0, line.peak_bytes - line.budget)
    both_s = least / line.offload_rate + least / line.prefetch_rate
    return Bounds(least, max(line.compute_s, both_s if line.linked else 0.0))
