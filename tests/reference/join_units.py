"""The join of the paper: every step takes the same time, every activation one slot.

Beaumont, Herrmann, Pallez, Shilova, "Optimal memory-aware backpropagation of deep join
networks" (2019), section 3. Branch ``j`` has ``l[j]`` steps, and memory ``c`` slots. A
step may write its output over its input, the loss point replaces the ends by their gradients, and
a step's backward needs its input alone. Theorem 2 is ``least_slots``; Theorem 3:

    Opt(l, c) = ∞ for c < c_min(l);  Opt(0, c) = u_t for c >= k
    Opt(l, c) = min over m, 0 < i <= l[m] of
                i u_f + Opt(l - i e_m, c - 1) + Opt_0(i - 1, c - (k - 1))

``Opt_0(l, c)`` is the time of *revolve* (Griewank and Walther 2000) to go ``l`` steps forward
from an input in memory, beside the gradient after step ``l + 1``, and ``l + 1`` steps back:

    Opt_0(0, c) = u_b for c >= 2
    Opt_0(l, c) = min over 0 < i <= l of i u_f + Opt_0(l - i, c - 1) + Opt_0(i - 1, c)

The paper's own base ``Opt(e_j, c) = u_f + u_t + u_b`` follows from the second line. Its time
for one branch is not ``Opt_0(l, c)``: the loss point works in place while ``Opt_0`` has a
gradient in memory from the start. The steps of one branch are ``t(l, c - 2) + 1``, with
``t(l, s)`` those of Griewank and Walther for ``l`` steps, the last of which is taped at once,
and ``s`` checkpoints.

``O(c k max(l)^(k + 1))`` time, ``O(c Π(l + 1))`` memory. One table has the optimum of every
join of shorter branches and of every smaller memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from fxremat.ir import (
    Backward,
    Compute,
    Forward,
    Infeasible,
    JoinCosts,
    JoinProblem,
    Keep,
    Schedule,
    Solved,
    StageCosts,
)
from fxremat.solvers.numbers import Floats, Ints
from tests.paper_terms import join_from_sizes

Solution = Solved | Infeasible


def least_slots(lengths: Sequence[int]) -> int:
    """``c_min``, the fewest slots in which the join can be run: Theorem 2."""
    k = len(lengths)
    if not any(lengths):
        return k
    needs = k + sum(length > 0 for length in lengths)
    return needs if 1 in lengths else needs + 1


def unit_problem(
    lengths: Sequence[int],
    slots: int,
    *,
    forward_s: float = 1.0,
    backward_s: float = 1.0,
    turn_s: float = 1.0,
) -> JoinProblem:
    """The paper's join in the words of ``JoinProblem``, a byte for a slot.

    There a forward never writes over its input. The budget has one byte more, and the
    turn and every backward need one more: what is held when one of them starts is held
    within ``slots``, and the forwards before it work in place.

    Raises:
        ValueError: a branch has no step.
    """
    step = StageCosts(
        forward_s=forward_s,
        backward_s=backward_s,
        rebuild_s=0.0,
        gradient_bytes=1,
        forward_extra_bytes=0,
        keep_extra_bytes=0,
        backward_extra_bytes=1,
        rebuild_bytes=1,
    )
    loss_point = StageCosts(turn_s, 0.0, turn_s, 0, 1, 1, 1, 1)
    join = join_from_sizes(
        [[1] * (length + 1) for length in lengths], [[1] * length for length in lengths], [0], [0]
    )
    costs = JoinCosts(
        tuple((step,) * length for length in lengths), (loss_point,), done_bytes=(1,) * len(lengths)
    )
    return JoinProblem(join, costs, slots + 1)


@dataclass(frozen=True, slots=True, eq=False)
class UnitTable:
    """``Opt`` of every join of at most ``lengths`` steps and at most ``slots`` slots.

    Attributes:
        lengths: of the branches.
        slots: the most memory.
        forward_s, backward_s, turn_s: ``u_f``, ``u_b`` and ``u_t``.
    """

    lengths: tuple[int, ...]
    slots: int
    forward_s: float
    backward_s: float
    turn_s: float
    _strides: tuple[int, ...]
    _opt: Floats
    _opt0: Floats

    @staticmethod
    def build(
        lengths: Sequence[int],
        slots: int,
        *,
        forward_s: float = 1.0,
        backward_s: float = 1.0,
        turn_s: float = 1.0,
    ) -> UnitTable:
        """Fill the table.

        Raises:
            ValueError: no branch, a negative length, negative slots, or a time that is
                negative or not finite.
        """
        if not lengths:
            raise ValueError("lengths is empty")
        for i, length in enumerate(lengths):
            if length < 0:
                raise ValueError(f"lengths[{i}] is {length}, must be at least 0")
        if slots < 0:
            raise ValueError(f"slots is {slots}, must be at least 0")
        for name, value in (
            ("forward_s", forward_s),
            ("backward_s", backward_s),
            ("turn_s", turn_s),
        ):
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} is {value}, must be finite and at least 0")
        strides = [math.prod(n + 1 for n in lengths[b + 1 :]) for b in range(len(lengths))]
        opt0 = np.empty((max(lengths) + 1, slots + 1))
        _fill_chain(opt0, forward_s, backward_s)
        opt = np.empty((strides[0] * (lengths[0] + 1), slots + 1))
        ints = np.array(lengths, dtype=np.int64), np.array(strides, dtype=np.int64)
        _fill(opt, opt0, *ints, forward_s, turn_s)
        return UnitTable(
            tuple(lengths), slots, forward_s, backward_s, turn_s, tuple(strides), opt, opt0
        )

    def makespan_s(self, lengths: Sequence[int], slots: int) -> float:
        """``Opt(lengths, slots)``, infinite where memory does not suffice."""
        return float(self._opt[np.dot(lengths, self._strides), slots])

    def solve(self, lengths: Sequence[int] | None = None, slots: int | None = None) -> Solution:
        """An optimal schedule for a join of at most ``self.lengths``, ``self.slots``.

        Returns:
            ``Solved``, whose stages are numbered as in ``unit_problem(lengths, …)``, or
            ``Infeasible`` with the least slots.
        """
        lengths = self.lengths if lengths is None else tuple(lengths)
        slots = self.slots if slots is None else slots
        makespan_s = self.makespan_s(lengths, slots)
        if makespan_s == math.inf:
            return Infeasible(least_slots(lengths))
        return Solved(Schedule(tuple(self._walk(lengths, slots))), makespan_s)

    def _walk(self, lengths: tuple[int, ...], slots: int) -> list[Compute]:
        ends = [sum(lengths[: b + 1]) for b in range(len(lengths))]
        loss_point = ends[-1]
        ops: list[Compute] = []
        later: list[tuple[int, int, int]] = []  # stage, steps and slots of revolve
        left = list(lengths)
        while any(left):
            m, i = self._choice(left, slots)
            first = ends[m] - left[m]
            ops += _sweep(first, i)
            later.append((first, i - 1, slots - (len(lengths) - 1)))
            left[m] -= i
            slots -= 1
        ops += [Forward(loss_point, Keep.ALL), Backward(loss_point)]
        while later:
            first, steps, free = later.pop()
            if steps == 0:
                ops += [Forward(first, Keep.ALL), Backward(first)]
                continue
            i = self._cut(steps, free)
            ops += _sweep(first, i)
            later += [(first, i - 1, free), (first + i, steps - i, free - 1)]
        return ops

    def _choice(self, left: list[int], slots: int) -> tuple[int, int]:
        number = int(np.dot(left, self._strides))
        want = self._opt[number, slots]
        free = slots - (len(left) - 1)
        for m, stride in enumerate(self._strides):
            for i in range(1, left[m] + 1):
                inner = self._opt[number - i * stride, slots - 1]
                if i * self.forward_s + inner + self._opt0[i - 1, free] == want:
                    return m, i
        raise AssertionError(f"no choice explains Opt({left}, {slots})")

    def _cut(self, steps: int, slots: int) -> int:
        want = self._opt0[steps, slots]
        for i in range(1, steps + 1):
            inner = self._opt0[steps - i, slots - 1]
            if i * self.forward_s + inner + self._opt0[i - 1, slots] == want:
                return i
        raise AssertionError(f"no choice explains Opt_0({steps}, {slots})")


def equiv_chain(
    length: int,
    branches: int,
    slots: int,
    *,
    forward_s: float = 1.0,
    backward_s: float = 1.0,
    turn_s: float = 1.0,
) -> Solution:
    """Section 4: ``branches`` equal branches run in step, as one chain of ``length`` levels.

    A level takes ``branches`` times as long, and its checkpoint that many slots; the chain is
    solved by revolve with ``slots // branches`` of them. The schedule is one of the join.
    """
    table = UnitTable.build(
        [length],
        slots // branches,
        forward_s=branches * forward_s,
        backward_s=branches * backward_s,
        turn_s=turn_s,
    )
    found = table.solve()
    if isinstance(found, Infeasible):
        return Infeasible(found.least_budget_bytes * branches)
    return Solved(Schedule(tuple(_in_step(found.schedule, length, branches))), found.makespan_s)


def _in_step(schedule: Schedule, length: int, branches: int) -> list[Compute]:
    """Every operation of a chain, branch after branch; a rebuild stays with its branch."""
    ops: list[Compute] = []
    chain = schedule.computations
    for index, op in enumerate(chain):
        if op.stage == length:
            loss_point = length * branches
            ops.append(
                Forward(loss_point, op.keep) if isinstance(op, Forward) else Backward(loss_point)
            )
            continue
        if isinstance(op, Backward):
            continue  # went with the forward before it
        pair = index + 1 < len(chain) and chain[index + 1] == Backward(op.stage)
        for b in range(branches):
            stage = op.stage + b * length
            ops.append(Forward(stage, op.keep))
            if pair:
                ops.append(Backward(stage))
    return ops


def _sweep(first: int, steps: int) -> list[Compute]:
    return [Forward(first + j, Keep.NONE if j else Keep.INPUT) for j in range(steps)]


@njit(cache=True, nogil=True)
def _fill_chain(opt0: Floats, forward_s: float, backward_s: float) -> None:
    """``Opt_0(l, c)``."""
    opt0[:] = np.inf
    opt0[0, 2:] = backward_s
    for steps in range(1, opt0.shape[0]):
        for c in range(3, opt0.shape[1]):
            best = np.inf
            for i in range(1, steps + 1):
                takes = i * forward_s + opt0[steps - i, c - 1] + opt0[i - 1, c]
                best = min(takes, best)
            opt0[steps, c] = best


@njit(cache=True, nogil=True)
def _fill(
    opt: Floats, opt0: Floats, lengths: Ints, strides: Ints, forward_s: float, turn_s: float
) -> None:
    """``Opt(l, c)``."""
    k = lengths.size
    opt[:] = np.inf
    opt[0, k:] = turn_s
    for number in range(1, opt.shape[0]):
        for m in range(k):
            left = number // strides[m] % (lengths[m] + 1)
            for i in range(1, left + 1):
                inner = opt[number - i * strides[m]]
                for c in range(k, opt.shape[1]):
                    takes = i * forward_s + inner[c - 1] + opt0[i - 1, c - (k - 1)]
                    opt[number, c] = min(takes, opt[number, c])
