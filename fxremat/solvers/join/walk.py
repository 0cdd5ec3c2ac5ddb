"""Schedules of a join read off the tables, with a stack since branches are deep."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from fxremat.ir import Backward, Compute, Forward, Join, Keep
from fxremat.solvers import kernels, least
from fxremat.solvers.join import tables
from fxremat.solvers.join.numbers import JoinNumbers
from fxremat.solvers.join.tables import Choices, JoinLeast, JoinTable
from fxremat.solvers.kernels import Table
from fxremat.solvers.least import Least
from fxremat.solvers.numbers import Ints
from fxremat.solvers.quantize import slots_up
from fxremat.solvers.sequences import sweep, walk


class _State(NamedTuple):
    """``J(p, h, t, available)`` is to be scheduled."""

    p: tuple[int, ...]
    h: int
    t: int
    available: int


class _Segment(NamedTuple):
    """``C(s, t, available)`` of a line is to be scheduled."""

    line: int
    s: int
    t: int
    available: int


class _Walk(NamedTuple):
    """What a walk reads off.

    Attributes:
        numbers: the join's arrays.
        first: of each line, the number of its first stage, and that of all stages.
        quantum: bytes of a unit of what is available.
        choose: the index among ``choices`` of that for a state, by its number.
        choices: those of the state asked for last.
        pick: the choice for a segment, see ``sequences.walk``.
    """

    numbers: JoinNumbers
    first: tuple[int, ...]
    quantum: int
    choose: Callable[[tuple[int, int, int], int], int]
    choices: Choices
    pick: Callable[[int, int, int, int], tuple[int, int, int]]


def table_ops(
    join: Join, lines: tuple[Table, ...], table: JoinTable, slots: int
) -> tuple[Compute, ...]:
    """The schedule behind entry ``slots`` of the whole join; ``lines`` are rotor's tables."""
    choices, last = Choices.room(table.numbers), table.segments.shape[1] - 1

    def choose(state: tuple[int, int, int], m: int) -> int:
        return tables.choose(table, state, m, choices)

    def pick(line: int, s: int, t: int, m: int) -> tuple[int, int, int]:
        choice = kernels.choose(lines[line], s, t, min(m, last))
        added = kernels.added_bytes(lines[line].numbers, s, choice)
        return choice, m - slots_up(added, table.quantum), m

    walked = _Walk(table.numbers, join.first_stages, table.quantum, choose, choices, pick)
    return _ops(walked, slots)


def least_ops(
    join: Join, lines: tuple[Least, ...], states: JoinLeast, available_bytes: int
) -> tuple[Compute, ...]:
    """A schedule within ``available_bytes``, which are at least what is needed."""
    choices = Choices.room(states.numbers)

    def choose(state: tuple[int, int, int], m: int) -> int:
        return tables.choose_least(states, state, m, choices)[0]

    def pick(line: int, s: int, t: int, m: int) -> tuple[int, int, int]:
        choice = least.choose_least(lines[line], s, t, m)[0]
        return choice, m - kernels.added_bytes(lines[line].numbers, s, choice), m

    walked = _Walk(states.numbers, join.first_stages, 1, choose, choices, pick)
    return _ops(walked, available_bytes)


def _ops(walked: _Walk, available: int) -> tuple[Compute, ...]:
    ops: list[Compute] = []
    n = walked.numbers
    start = (0,) * n.lengths.size
    todo: list[_State | _Segment | Compute] = [
        _State(start, 0, n.turn_gradient.size - 1, available)
    ]
    while todo:
        item = todo.pop()
        if isinstance(item, _State):
            todo += reversed(_expand(walked, item, ops))
        elif isinstance(item, _Segment):
            line, s, t, m = item
            ops += walk(partial(walked.pick, line), s, t, m, first=walked.first[line])
        else:
            ops.append(item)
    return tuple(ops)


def _expand(walked: _Walk, state: _State, ops: list[Compute]) -> list[_State | _Segment | Compute]:
    """Append the forwards of a state's choice; returns what follows them, in order."""
    p, h, t, available = state
    number = int(np.dot(p, walked.numbers.strides))
    found = walked.choose((number, h, t), available)
    if found < 0:
        raise AssertionError(f"no choice explains the value of {state}")
    choice: Ints = walked.choices.sizes[found]
    kind, b, cut = choice[[tables.KIND, tables.BRANCH, tables.CUT_AT]].tolist()
    rest = available - slots_up(int(choice[tables.STATE_BYTES]), walked.quantum)
    beside = available - slots_up(int(choice[tables.SEGMENT_BYTES]), walked.quantum)
    first, trunk = walked.first, len(p)
    if kind == tables.KEEP:
        ops.append(Forward(first[b] + p[b], Keep.ALL, option=cut))
        moved = (*p[:b], p[b] + 1, *p[b + 1 :])
        return [_State(moved, h | 1 << b, t, rest), Backward(first[b] + p[b])]
    if kind == tables.CUT:
        ops += sweep(first[b] + p[b], first[b] + cut)
        moved = (*p[:b], cut, *p[b + 1 :])
        return [_State(moved, h & ~(1 << b), t, rest), _Segment(b, p[b], cut - 1, beside)]
    if kind == tables.TURN:
        _append_turn(walked, p, cut, ops)
        return [_Segment(trunk, cut, t, beside), _State(p, h, cut - 1, rest)]
    return [_Segment(trunk, 0, t, beside)]


def _append_turn(walked: _Walk, p: tuple[int, ...], cut: int, ops: list[Compute]) -> None:
    """From the heads to the branches' ends, in the order that needs least, and to the cut."""
    n, first = walked.numbers, walked.first
    for b in tables.turn_order(n, np.array(p, dtype=np.int64)).tolist():
        if p[b] < n.lengths[b]:
            ops += sweep(first[b] + p[b], first[b + 1])
    ops += [Forward(first[-2] + j, Keep.NONE) for j in range(cut)]
