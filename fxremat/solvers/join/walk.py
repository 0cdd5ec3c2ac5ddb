"""Reads schedules of a join from its tables. It uses a stack, since branches may be long."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from fxremat.ir import Backward, Compute, Forward, Join, Keep
from fxremat.solvers import kernels, least
from fxremat.solvers.join import tables
from fxremat.solvers.join.numbers import JoinNumbers
from fxremat.solvers.join.tables import Choices, JoinLeast, JoinTable, State
from fxremat.solvers.kernels import Table
from fxremat.solvers.least import Least
from fxremat.solvers.numbers import Ints
from fxremat.solvers.quantize import slots_up
from fxremat.solvers.sequences import sweep, walk


class _State(NamedTuple):
    """A task to schedule what remains of the join when each branch has run to boundary ``p[b]``.

    That is ``J(p, h, t, available)`` of ``general``: mask ``h`` has a bit for each branch whose
    boundary is in a saved set, and ``t`` is the last stage of the trunk.
    """

    p: tuple[int, ...]
    h: int
    t: int
    available: int


class _Segment(NamedTuple):
    """A task to schedule stages ``s … t`` of a line with ``available`` free slots or bytes."""

    line: int
    s: int
    t: int
    available: int


_Choose = Callable[[State, int], Ints | None]
"""Returns the integers of the choice for a state and what is available to it; see ``tables``."""

_Pick = Callable[[int, int, int, int], tuple[int, int, int]]
"""Is ``sequences.Pick`` of a line, whose number is the first argument."""


def table_ops(
    join: Join, lines: tuple[Table, ...], table: JoinTable, slots: int
) -> tuple[Compute, ...]:
    """Return the operations of the fastest schedule of a join with ``slots`` free slots.

    ``lines`` are rotor's tables of the branches and the trunk.
    """
    choices, last = Choices.room(table.numbers), table.segments.shape[1] - 1

    def choose(state: State, m: int) -> Ints | None:
        index = tables.choose(table, state, m, choices)
        return choices.sizes[index] if index >= 0 else None

    def pick(line: int, s: int, t: int, m: int) -> tuple[int, int, int]:
        choice = kernels.choose(lines[line], s, t, min(m, last))
        added = kernels.added_bytes(lines[line].numbers, s, choice)
        return choice, m - slots_up(added, table.quantum), m

    return _ops(join, table.numbers, choose, pick, slots, quantum=table.quantum)


def least_ops(
    join: Join, lines: tuple[Least, ...], states: JoinLeast, available_bytes: int
) -> tuple[Compute, ...]:
    """Return the operations of a schedule of a join within ``available_bytes``.

    These are in addition to the inputs, and at least the least memory. ``lines`` and ``states``
    have the least memory of each line and of the join.
    """
    choices = Choices.room(states.numbers)

    def choose(state: State, m: int) -> Ints | None:
        index, _, _ = tables.choose_least(states, state, m, choices)
        return choices.sizes[index] if index >= 0 else None

    def pick(line: int, s: int, t: int, m: int) -> tuple[int, int, int]:
        choice, _, _ = least.choose_least(lines[line], s, t, m)
        return choice, m - kernels.added_bytes(lines[line].numbers, s, choice), m

    return _ops(join, states.numbers, choose, pick, available_bytes, quantum=1)


def _ops(
    join: Join, n: JoinNumbers, choose: _Choose, pick: _Pick, available: int, *, quantum: int
) -> tuple[Compute, ...]:
    """Return the operations of the whole join, as ``choose`` and ``pick`` choose.

    Args:
        n: its arrays.
        choose: returns the choice for a state.
        pick: returns the choice for an interval of a line.
        available: number of free units.
        quantum: bytes of a unit.
    """
    first, trunk = join.first_stages, len(join.branches)
    ops: list[Compute] = []
    todo: list[_State | _Segment | Compute]
    todo = [_State((0,) * trunk, 0, len(join.trunk) - 1, available)]
    while todo:
        item = todo.pop()
        if isinstance(item, _Segment):
            line, s, t, available = item
            ops += walk(partial(pick, line), s, t, available, first=first[line])
            continue
        if not isinstance(item, _State):
            ops.append(item)
            continue
        p, h, t, available = item
        choice = choose((int(np.dot(p, n.strides)), h, t), available)
        if choice is None:
            raise AssertionError(f"no choice gives the value of {item}")
        kind, b, cut = choice[[tables.KIND, tables.BRANCH, tables.CUT_AT]].tolist()
        state_free = available - slots_up(int(choice[tables.STATE_BYTES]), quantum)
        segment_free = available - slots_up(int(choice[tables.SEGMENT_BYTES]), quantum)
        if kind == tables.KEEP:
            ops.append(Forward(first[b] + p[b], Keep.ALL, option=cut))
            moved = (*p[:b], p[b] + 1, *p[b + 1 :])
            todo += [Backward(first[b] + p[b]), _State(moved, h | 1 << b, t, state_free)]
        elif kind == tables.CUT:
            ops += sweep(first[b] + p[b], first[b] + cut)
            moved = (*p[:b], cut, *p[b + 1 :])
            todo += [
                _Segment(b, p[b], cut - 1, segment_free),
                _State(moved, h & ~(1 << b), t, state_free),
            ]
        elif kind == tables.TRUNK_CUT:
            for branch in tables.sweep_order(n, np.array(p, dtype=np.int64)).tolist():
                if p[branch] < n.lengths[branch]:
                    ops += sweep(first[branch] + p[branch], first[branch + 1])
            ops += [Forward(first[trunk] + j, Keep.NONE) for j in range(cut)]
            todo += [_State(p, h, cut - 1, state_free), _Segment(trunk, cut, t, segment_free)]
        else:
            todo.append(_Segment(trunk, 0, t, segment_free))
    return tuple(ops)
