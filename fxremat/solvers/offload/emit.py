"""From what is offloaded to a solution: a schedule that a no-wait replay runs as planned."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

from fxremat.ir import (
    Backward,
    Forward,
    Free,
    Infeasible,
    Keep,
    Offload,
    Op,
    Prefetch,
    Problem,
    Schedule,
    Solved,
    Wait,
)
from fxremat.solvers.offload import phases
from fxremat.solvers.offload.line import Line, activations, line_of
from fxremat.solvers.offload.phases import Transferred

_TOLERANCE = 2.0**-46
"""Relative to the makespan: times that are nearer than this are taken to be the same.

What the link moves meanwhile has to stay below what a fluid replay takes for rounding."""


def solved(
    problem: Problem, amounts_of: Callable[[Line], Sequence[float]], *, whole: bool
) -> Solved | Infeasible:
    """The ordered no-wait schedule that offloads what is chosen for the chain of a problem.

    Args:
        problem: the chain, its costs, the budget and the link.
        amounts_of: chooses bytes of each activation, enough if the budget is one that can be kept.
        whole: transfers are.

    Raises:
        ValueError: a storage crosses two cuts, or the sizes are too large to add up.
    """
    line = line_of(problem)
    if line.budget < line.least_budget_bytes:
        return Infeasible(line.least_budget_bytes)
    return answer(line, amounts_of(line), whole=whole)


def answer(line: Line, amounts: Sequence[float], *, whole: bool) -> Solved:
    """The ordered no-wait schedule that offloads ``amounts``, which must be enough.

    Prefetches follow the last computation that starts before them: so they take no memory that
    was meant for it, and the next one need not wait for them to start. A fluid prefetch is cut
    where a computation starts. Then nothing starts later than planned: when its planned time
    comes, all that is before it in the sequence has started, and has moved as much as planned.
    """
    plan = phases.plan(line, amounts, whole=whole)
    assert plan is not None
    starts = [*plan.forwards, *reversed(plan.backwards)]
    slack = _TOLERANCE * plan.makespan_s
    back: list[list[Op]] = [[] for _ in starts]
    for t in plan.prefetches:
        latest = 2 * len(line) - 2 - t.index  # the computation before B_index
        for begin_s, nbytes in _cuts(t, starts, slack) if not whole else [(t.begin_s, None)]:
            after = min(latest, bisect_right(starts, begin_s + slack) - 1)
            back[after].append(Prefetch(activations(t.index), nbytes))
    return Solved(sequence(line, amounts, back), plan.makespan_s)


def sequence(line: Line, amounts: Sequence[float], back: Sequence[Sequence[Op]]) -> Schedule:
    """All computations with ``back`` after each; ``x_i`` is offloaded and freed after ``F_i``."""
    ops: list[Op] = []
    for i in range(len(line)):
        ops.append(Forward(i, Keep.ALL))
        if amounts[i]:
            nbytes = None if amounts[i] == line.sizes[i] else amounts[i]
            ops += [Offload(activations(i), nbytes), Free(activations(i))]
        ops += back[i]
    for i in reversed(range(len(line))):
        if amounts[i]:
            ops.append(Wait(activations(i)))
        ops += [Backward(i), *back[2 * len(line) - 1 - i]]
    return Schedule(tuple(ops))


def _cuts(
    t: Transferred, starts: list[float], slack: float
) -> Iterator[tuple[float, float | None]]:
    """Parts of a prefetch between starts of computations: begin, and bytes but for the last."""
    begin_s = t.begin_s
    for start in starts[bisect_right(starts, begin_s + slack) :]:
        if start >= t.end_s - slack:
            break
        if start > begin_s + slack:
            yield begin_s, t.nbytes * ((start - begin_s) / (t.end_s - t.begin_s))
            begin_s = start
    yield begin_s, None
