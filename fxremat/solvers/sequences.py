"""Sequences of computations: their time, and how they follow from choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from fxremat.ir import Backward, Chain, Compute, Costs, Forward, Keep, StageCosts
from fxremat.solvers.numbers import Numbers

T = TypeVar("T")

Pick = Callable[[int, int, T], tuple[int, T, T]]
"""Returns the choice for interval ``(s, t)``, numbered as in ``kernels``, within what is available;
and what is then available to the interval after its forwards, and to the one before the cut."""


def walk(pick: Pick[T], s: int, t: int, available: T, *, first: int = 0) -> list[Compute]:
    """Return the operations that run stages ``s … t`` forward and backward as ``pick`` chooses.

    Algorithm 2 of Beaumont et al. (2019), see ``rotor``. It uses an explicit stack, since chains
    can be longer than Python's recursion limit.

    Args:
        pick: returns the choice for an interval, see ``Pick``.
        s, t: first and last stage.
        available: what is available to the interval, as ``pick`` counts it.
        first: number of the stage that ``pick`` calls 0.
    """
    ops: list[Compute] = []
    todo: list[tuple[int, int, T] | Compute] = [(s, t, available)]
    while todo:
        item = todo.pop()
        if not isinstance(item, tuple):
            ops.append(item)
            continue
        s, t, available = item
        choice, inner, outer = pick(s, t, available)
        if choice == -1:
            raise AssertionError(f"interval ({s}, {t}) has no choice within {available}")
        if choice <= s:
            ops.append(Forward(first + s, Keep.ALL, 0 if choice == s else -1 - choice))
            todo.append(Backward(first + s))
            if s < t:
                todo.append((s + 1, t, inner))
        elif s == t:
            ops += [Forward(first + s, Keep.INPUT), Forward(first + s, Keep.ALL)]
            ops.append(Backward(first + s))
        else:
            ops += sweep(first + s, first + choice)
            todo.append((s, choice - 1, outer))
            todo.append((choice, t, inner))
    return ops


def sweep(s: int, cut: int) -> list[Compute]:
    """Return the forwards of stages ``s … cut - 1``, which keep only the input of stage ``s``."""
    return [Forward(s, Keep.INPUT), *(Forward(i, Keep.NONE) for i in range(s + 1, cut))]


def span(s: int, t: int) -> list[Compute]:
    """Return the forwards of stages ``s … t`` with everything kept, and their backwards."""
    forwards = [Forward(i, Keep.ALL) for i in range(s, t + 1)]
    return [*forwards, *(Backward(i) for i in range(t, s - 1, -1))]


def span_bytes(numbers: Numbers, s: int, t: int) -> int:
    """Return the peak bytes of ``span`` beyond boundary ``s``, including the gradient after ``t``.

    Theorem 1 of Beaumont et al. (2019) with ``C_all`` at every stage. After the loss point the
    innermost pair is a rebuild. ``O(t - s)``.
    """
    nbytes = int(numbers.leaf_bytes[t, 0])
    for i in range(t - 1, s - 1, -1):
        ends = max(int(numbers.gradient[t] + numbers.keep[i, 0]), int(numbers.back[i, 0]))
        nbytes = max(ends, int(numbers.saved[i, 0]) + nbytes)
    return nbytes


def seconds_of(stages: Sequence[StageCosts], ops: Sequence[Compute]) -> float:
    """Return the total seconds of ``ops``, added in order.

    An ``F_all`` that runs again right before its ``B`` is a rebuild, and takes ``rebuild_s``.
    """
    ran: set[int] = set()
    rebuilt_s: dict[int, float] = {}  # seconds that a stage's backward rebuilds, after an option
    total = 0.0
    for index, op in enumerate(ops):
        cost = stages[op.stage]
        if isinstance(op, Backward):
            total += cost.backward_s + rebuilt_s.pop(op.stage, 0.0)
            continue
        pair = op.keep is Keep.ALL and ops[index + 1] == Backward(op.stage)
        rebuilds = pair and op.stage in ran
        total += cost.rebuild_s if rebuilds else cost.forward_s
        rebuilt_s.pop(op.stage, None)
        if op.option and not rebuilds:
            rebuilt_s[op.stage] = cost.options[op.option - 1].recompute_s
        ran.add(op.stage)
    return total


def base_bytes(chain: Chain, costs: Costs) -> int:
    """Return the bytes held under any schedule: ``fixed_bytes`` and boundary 0."""
    return costs.fixed_bytes + chain.nbytes(chain.boundaries[0])
