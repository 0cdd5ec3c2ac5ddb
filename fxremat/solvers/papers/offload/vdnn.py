"""Offloading what is computed on for a long time relative to its size.

VDNN of Beaumont, Eyraud-Dubois, Shilova, "Optimal GPU-CPU offloading strategies for deep neural
network training" (2019), section 6.1, after vDNN++ (Shriram et al. 2019), which offloads the inputs
of all convolutions, or of every other one. Stages do not say whether they are convolutions. So for
every threshold on ``u_F(i) / |x_i|`` two no-wait, ordered schedules of whole transfers are tried:
one offloads all ``x_i`` whose ratio is at least the threshold, the other every other of them. The
fastest that fits is the result. Complexity: ``O(L² log L)``.

Activations that are never worth moving (see ``OffloadChain.movable``) are left out. The lowest
threshold takes all others, so there is a schedule whenever any exists.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxremat.ir import Problem, Solution
from fxremat.solvers.papers.offload.line import OffloadChain
from fxremat.solvers.papers.offload.phases import plan, solve_by


def solve(problem: Problem) -> Solution:
    """Offload the activations whose forwards take longest per byte.

    It finds the fastest schedule among all thresholds of seconds per byte.

    Args:
        problem: the chain, its costs, the budget and the link. Without a link nothing moves.

    Returns:
        ``Solved`` with a schedule of whole transfers, or ``Infeasible`` with the exact least
        budget, which is that of all schedules without recomputation.

    Raises:
        ValueError: a storage crosses two cuts, or the sizes are too large to add up.
    """
    return solve_by(problem, _fastest, whole=True)


def _fastest(line: OffloadChain) -> list[int]:
    best_s, best = float("inf"), [0] * len(line.sizes)
    for amounts in _choices_by_threshold(line):
        planned = plan(line, amounts, whole=True)
        if planned is not None and planned.makespan_s < best_s:
            best_s, best = planned.makespan_s, amounts
    return best


def ratios(line: OffloadChain) -> dict[int, float]:
    """Return, by movable activation, the seconds of the forward that reads it next, per byte."""
    return {i: line.forward_s[i] / line.sizes[i] for i in line.movable if line.sizes[i]}


def _choices_by_threshold(line: OffloadChain) -> Iterator[list[int]]:
    yield [0] * len(line.sizes)
    by_ratio = ratios(line)
    for threshold in sorted(set(by_ratio.values()), reverse=True):
        chosen = [i for i, ratio in by_ratio.items() if ratio >= threshold]
        for moved in (chosen, chosen[::2]):
            yield [size if i in moved else 0 for i, size in enumerate(line.sizes)]
