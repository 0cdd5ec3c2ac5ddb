"""From what is offloaded to a solution: a schedule that a no-wait replay runs as planned."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from fxremat.ir import (
    Backward,
    Forward,
    Free,
    Infeasible,
    Keep,
    Offload,
    Op,
    Prefetch,
    Schedule,
    Solved,
    Wait,
)
from fxremat.solvers.offload import phases
from fxremat.solvers.offload.line import Line, activations
from fxremat.solvers.offload.phases import Plan, Transferred

_TOLERANCE = 2.0**-46
"""Relative to the makespan: times that are nearer than this are taken to be the same.

What the link moves meanwhile has to stay below what a fluid replay takes for rounding."""


def answer(line: Line, amounts: Sequence[float], *, whole: bool) -> Solved:
    """The ordered no-wait schedule that offloads ``amounts``, which must be enough."""
    planned = phases.plan(line, amounts, whole=whole)
    assert planned is not None
    return Solved(emit(line, planned), planned.makespan_s)


def infeasible(line: Line) -> Infeasible | None:
    """Whether no amount of offloading is enough."""
    least = line.least_budget_bytes
    return Infeasible(least) if line.budget < least else None


def emit(line: Line, plan: Plan) -> Schedule:
    """The schedule of ``plan``.

    ``x_i`` is offloaded and freed after ``F_i`` in the sequence. Prefetches follow the last
    computation that starts before them: so they take no memory that was meant for it, and the
    next one need not wait for them to start. A fluid prefetch is cut where a computation
    starts. Then nothing starts later than planned: when its planned time comes, all that is
    before it in the sequence has started, and has moved as much as planned.
    """
    count = len(line)
    starts = [*plan.forwards, *reversed(plan.backwards)]
    slack = _TOLERANCE * plan.makespan_s
    back: list[list[Op]] = [[] for _ in starts]
    for t in plan.prefetches:
        size = line.sizes[t.index]
        latest = 2 * count - 2 - t.index  # the computation before B_index
        for begin_s, nbytes in _cuts(t, starts, slack) if not plan.whole else [(t.begin_s, None)]:
            after = min(latest, bisect_right(starts, begin_s + slack) - 1)
            back[after].append(Prefetch(activations(t.index), nbytes))
        assert t.nbytes <= size
    moved = {t.index: t.nbytes for t in plan.offloads}
    ops: list[Op] = []
    for i in range(count):
        ops.append(Forward(i, Keep.ALL))
        if i in moved:
            value = activations(i)
            ops.append(Offload(value, None if moved[i] == line.sizes[i] else moved[i]))
            ops.append(Free(value))
        ops += back[i]
    for i in reversed(range(count)):
        if i in moved:
            ops.append(Wait(activations(i)))
        ops += [Backward(i), *back[2 * count - 1 - i]]
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
