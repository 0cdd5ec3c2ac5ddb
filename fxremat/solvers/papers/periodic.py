"""Checkpoints at equal distances, as in ``torch.utils.checkpoint.checkpoint_sequential``.

Chen, Xu, Zhang, Guestrin, "Training deep nets with sublinear memory cost" (2016); Beaumont,
Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains" (2019),
section 5.3, strategy *sequential*.

The chain is cut as PyTorch cuts it: into ``s - 1`` segments of ``L // s`` stages, and a last one
with the rest. The forward keeps the input of every segment but the last, and everything of the
last. In the backward each other segment is run again with everything kept:

    F_ck c_1, F_none …, F_ck c_2, F_none …, …, F_all c_s … F_all L - 1, B L - 1 … B c_s,
    F_all c_(s-1) … B c_(s-1), …, F_all 0 … B 0

In rotor's terms these are the cuts ``c_2 < … < c_s``, and ``C_all`` everywhere else, so rotor is
never slower within the same bytes. The paper counts ``L`` stages and the loss. Here every stage
counts, and the last one includes the loss. With one segment this is ``store_all``.

Complexity: ``O(L)`` for a number of segments, ``O(L²)`` for the best one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from fxremat.ir import Compute, Costs, Infeasible, Problem, Schedule, Solution, Solved
from fxremat.solvers.numbers import Numbers, numbers_of
from fxremat.solvers.sequences import base_bytes, seconds_of, span, span_bytes, sweep


def solve(problem: Problem, *, segments: int | None = None) -> Solution:
    """Return the schedule that keeps the inputs of ``segments`` equal segments, if it fits.

    Args:
        problem: the chain, its costs and the budget.
        segments: number of segments, from 1 to the number of stages; ``None``: the number whose
            schedule is the fastest that fits, the least of equally fast ones.

    Returns:
        ``Solved``, or ``Infeasible`` with the exact peak; if ``segments`` is ``None``, with the
        least of all peaks.

    Raises:
        ValueError: ``segments`` is out of range, or the sizes are too large to add up.
    """
    chain, costs = problem.chain, problem.costs
    count = len(chain)
    if segments is not None and not 1 <= segments <= count:
        raise ValueError(f"segments is {segments}, must be from 1 to {count}, the stages")
    numbers = numbers_of(chain, costs)
    base = base_bytes(chain, costs)
    best: Solved | None = None
    least_bytes: int | None = None
    for number in range(1, count + 1) if segments is None else (segments,):
        starts = _starts(count, number)
        peak_bytes = base + _peak_bytes(numbers, starts)
        least_bytes = peak_bytes if least_bytes is None else min(least_bytes, peak_bytes)
        if peak_bytes <= problem.budget_bytes:
            solved = _schedule(costs, starts)
            best = solved if best is None or solved.makespan_s < best.makespan_s else best
    assert least_bytes is not None
    return Infeasible(least_bytes) if best is None else best


def _starts(count: int, segments: int) -> range:
    """Return the first stage of each of ``segments`` segments of ``count`` stages."""
    size = count // segments
    return range(0, size * segments, size)


def _schedule(costs: Costs, starts: Sequence[int]) -> Solved:
    count = len(costs.stages)
    ops: list[Compute] = []
    for start, end in itertools.pairwise(starts):
        ops += sweep(start, end)
    ends = [*starts[1:], count]
    for start, end in zip(reversed(starts), reversed(ends), strict=True):
        ops += span(start, end - 1)
    return Solved(Schedule(tuple(ops)), seconds_of(costs.stages, ops))


def _peak_bytes(numbers: Numbers, starts: Sequence[int]) -> int:
    """Return the peak in addition to boundary 0 of segments that start at stages ``starts``.

    It is computed by ``rotor``'s recurrence.
    """
    last = numbers.gradient.size - 1
    nbytes = span_bytes(numbers, starts[-1], last)
    for start, end in reversed(list(itertools.pairwise(starts))):
        ahead = int(numbers.gradient[last] + numbers.sweep[start, end])
        late = int(numbers.step[start, end]) + nbytes
        nbytes = max(ahead, late, span_bytes(numbers, start, end - 1))
    return nbytes
