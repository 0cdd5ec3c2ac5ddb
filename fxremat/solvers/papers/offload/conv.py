"""Offloading the inputs of compute-heavy stages, each prefetched one backward ahead.

Hascoet, Zhuang, Febvre, Ariki, Takiguchi, "Reducing the memory cost of training convolutional
neural networks by CPU offloading", section 4. They move the inputs of convolutions and poolings,
because those compute long for their size, and start to prefetch the input of a stage when the
backward of the next stage starts. They give no recurrence. This is their fixed policy, with as many
stages taking part as the budget requires, those first that compute longest for the size of their
input. Invertible layers, their other method, are not a schedule.

Transfers are whole, and no-wait: a forward waits for memory as long as it must, and a prefetch for
which there is no memory during the backward starts when the backward is done. Complexity: ``O(L²
log L)``.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxremat.ir import Infeasible, Op, Prefetch, Problem, Solution, Solved
from fxremat.solvers.papers.offload.line import OffloadChain, activations, line_of
from fxremat.solvers.papers.offload.phases import (
    first_prefetch_s,
    forward_phase,
    sequence,
    suffices,
)
from fxremat.solvers.papers.offload.vdnn import ratios


def solve(problem: Problem) -> Solution:
    """Offload the inputs of the fewest stages that free enough memory.

    Args:
        problem: the chain, its costs, the budget and the link. Without a link nothing moves.

    Returns:
        ``Solved`` with a schedule of whole transfers, or ``Infeasible`` with the exact least
        budget, which is that of all schedules without recomputation.

    Raises:
        ValueError: a storage crosses two cuts, or the sizes are too large to add up.
    """
    line = line_of(problem)
    if line.budget < line.least_budget_bytes:
        return Infeasible(line.least_budget_bytes)
    amounts = [0] * len(line.sizes)
    by_ratio = ratios(line)
    for i in sorted(by_ratio, key=lambda i: -by_ratio[i]):
        if suffices(line, amounts):
            break
        amounts[i] = line.sizes[i]
    back: list[list[Op]] = [[] for _ in range(2 * len(line))]
    for i in range(len(line) - 1):
        if amounts[i]:
            back[2 * len(line) - 2 - i].append(Prefetch(activations(i)))
    return Solved(sequence(line, amounts, back), _seconds(line, amounts))


def _seconds(line: OffloadChain, amounts: Sequence[int]) -> float:
    """Return the makespan of the schedule that offloads ``amounts[i]`` bytes of ``x_i``."""
    forth = forward_phase(line, amounts, whole=True)
    moved = sum(amounts)
    copied = {t.index: t.end_s for t in forth.transfers}
    during, after = line.away(line.backward_bytes), line.away(line.after_backward_bytes)
    now, back_s = forth.end_s, 0.0
    link_s = first_prefetch_s(line, forth) if line.shared else 0.0
    home = 0  # bytes that are back, or whose memory is allocated
    for i in reversed(range(len(line))):
        takes = line.backward_s[i]
        start = max(now, back_s, forth.reaches(during[i] + home))
        start = max(start, forth.reaches(after[i] + home) - takes)
        now = start + takes
        if not i or not amounts[i - 1]:
            continue
        home += amounts[i - 1]
        begin = max(start, link_s, copied[i - 1])
        if max(during[i], after[i]) + home <= moved:  # the prefetch fits during B_i eventually
            begin = max(begin, forth.reaches(during[i] + home))
        else:
            begin = max(begin, now)
        if max(begin, forth.reaches(after[i] + home)) >= now:
            begin = max(begin, now, forth.reaches(after[i] + home))
        back_s = link_s = begin + amounts[i - 1] / line.prefetch_rate
    return now
