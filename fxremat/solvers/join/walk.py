"""Schedules of a join read off the tables, with a stack since branches are deep."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from fxremat.ir import Backward, Compute, Forward, Join, JoinCosts, Keep
from fxremat.solvers import choices
from fxremat.solvers import least as chain_least
from fxremat.solvers.join import kernels
from fxremat.solvers.join.kernels import JoinTable
from fxremat.solvers.join.least import JoinLeast, choose_least
from fxremat.solvers.join.numbers import JoinNumbers
from fxremat.solvers.join.states import CUT, KEEP, TRUNK, TURN, turn_order
from fxremat.solvers.kernels import Table
from fxremat.solvers.least import Least
from fxremat.solvers.numbers import Floats, Ints, Numbers


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


_Choice = tuple[int, int, int]


class _Walk(NamedTuple):
    """What a walk reads off: all sizes in bytes, or all in slots.

    Attributes:
        first: of each line, the number of its first stage, and that of all stages.
        lengths: of the branches.
        numbers: the join's arrays.
        choose: the choice for a state and what is available to it.
        pick: the choice for a segment, as ``choices.choose`` of the chain solvers.
        saved: of each line's stages, for each of its save options from 0.
        step: of each line, see ``Numbers``.
        turn: what cut ``q`` of the trunk adds to the heads.
        more: what branch ``b``'s backward has more than its forward, see ``general``.
    """

    first: tuple[int, ...]
    lengths: tuple[int, ...]
    numbers: JoinNumbers
    choose: Callable[[_State], _Choice]
    pick: Callable[[_Segment], int]
    saved: list[list[list[int]]]
    step: list[list[list[int]]]
    turn: Callable[[_State, int], int]
    more: Callable[[_State, int], int]


def table_ops(
    join: Join,
    lines: tuple[Numbers, ...],
    tables: tuple[Table, ...],
    table: JoinTable,
    slots: int,
) -> tuple[Compute, ...]:
    """The schedule behind entry ``slots`` of the whole join."""
    quantum = table.quantum
    last = table.branch.shape[1] - 1
    numbers = table.numbers

    def choose(state: _State) -> _Choice:
        number = int(np.dot(state.p, numbers.strides))
        return kernels.choose(table, (number, state.h, state.t), state.available)

    def pick(item: _Segment) -> int:
        return choices.choose(tables[item.line], item.s, item.t, min(item.available, last))

    walk = _Walk(
        join.first_stages,
        tuple(map(len, join.branches)),
        numbers,
        choose,
        pick,
        saved=[(-(-_saved(line) // quantum)).tolist() for line in lines],
        step=[(-(-line.step // quantum)).tolist() for line in lines],
        turn=lambda state, q: -(-_turn_bytes(table, state, q) // quantum),
        more=lambda state, b: _more_bytes(table, state, b) // quantum,
    )
    return _ops(walk, slots)


def least_ops(
    join: Join, lines: tuple[Numbers, ...], least: JoinLeast, available_bytes: int
) -> tuple[Compute, ...]:
    """A schedule within ``available_bytes``, which are at least what is needed."""
    numbers = least.numbers
    parts = [Least(line, *_line_least(least, i, len(lines))) for i, line in enumerate(lines)]

    def choose(state: _State) -> _Choice:
        number = int(np.dot(state.p, numbers.strides))
        return choose_least(least, (number, state.h, state.t), state.available)[:3]

    def pick(item: _Segment) -> int:
        return chain_least.choose_least(parts[item.line], item.s, item.t, item.available)

    walk = _Walk(
        join.first_stages,
        tuple(map(len, join.branches)),
        numbers,
        choose,
        pick,
        saved=[_saved(line).tolist() for line in lines],
        step=[line.step.tolist() for line in lines],
        turn=partial(_turn_bytes, least),
        more=partial(_more_bytes, least),
    )
    return _ops(walk, available_bytes)


def seconds(join: Join, costs: JoinCosts, ops: tuple[Compute, ...]) -> float:
    """Time of ``ops``, summed in their order."""
    flat = [cost for stages in costs.lines for cost in stages]
    ran: set[int] = set()
    rest_s: dict[int, float] = {}  # what the backward takes longer after a save option
    total = 0.0
    for index, op in enumerate(ops):
        cost = flat[op.stage]
        if isinstance(op, Backward):
            total += cost.backward_s + rest_s.get(op.stage, 0.0)
            continue
        pair = op.keep is Keep.ALL and ops[index + 1] == Backward(op.stage)
        rebuilds = pair and op.stage in ran
        total += cost.rebuild_s if rebuilds else cost.forward_s
        ran.add(op.stage)
        if op.keep is Keep.ALL:
            chosen = op.option and not rebuilds
            rest_s[op.stage] = cost.options[op.option - 1].recompute_s if chosen else 0.0
    return total


def _saved(line: Numbers) -> Ints:
    return np.column_stack([line.saved, line.option_saved])


def _line_least(least: JoinLeast, line: int, count: int) -> tuple[Ints, Floats]:
    if line == count - 1:
        return least.trunk_memory, least.trunk_s
    return least.branch_memory[line], least.branch_s[line]


def _turn_bytes(table: JoinTable | JoinLeast, state: _State, q: int) -> int:
    n = table.numbers
    crossed = sum(int(n.turn_crossed[b, p, q]) for b, p in enumerate(state.p))
    return int(n.turn_born[q]) + crossed


def _more_bytes(table: JoinTable | JoinLeast, state: _State, b: int) -> int:
    n = table.numbers
    more = -n.done
    for other, p in enumerate(state.p):
        if other != b:
            more -= int(n.held[other, p])
            more += 0 if state.h >> other & 1 else int(n.freed[other, p])
    return more


def _ops(walk: _Walk, available: int) -> tuple[Compute, ...]:
    ops: list[Compute] = []
    start, trunk = (0,) * len(walk.lengths), walk.first[-1] - walk.first[-2]
    todo: list[_State | _Segment | Compute] = [_State(start, 0, trunk - 1, available)]
    while todo:
        item = todo.pop()
        if isinstance(item, _State):
            todo += reversed(_expand_state(walk, item, ops))
        elif isinstance(item, _Segment):
            todo += reversed(_expand_segment(walk, item, ops))
        else:
            ops.append(item)
    return tuple(ops)


def _expand_state(
    walk: _Walk, state: _State, ops: list[Compute]
) -> list[_State | _Segment | Compute]:
    """Append the forwards of a state's choice; returns what follows them, in order."""
    choice, b, cut = walk.choose(state)
    first = walk.first
    trunk = len(walk.lengths)
    p, h, t, available = state
    if choice == TRUNK:
        return [_Segment(trunk, 0, t, available)]
    if choice == TURN:
        _append_turn(walk, state, cut, ops)
        inner = _Segment(trunk, cut, t, available - walk.turn(state, cut))
        return [inner, _State(p, h, cut - 1, available)]
    if choice == KEEP:
        stage = first[b] + p[b]
        ops.append(Forward(stage, Keep.ALL, option=cut))
        moved = (*p[:b], p[b] + 1, *p[b + 1 :])
        rest = available - walk.saved[b][p[b]][cut]
        return [_State(moved, h | 1 << b, t, rest), Backward(stage)]
    if choice == CUT:
        _append_sweep(first[b], p[b], cut, ops)
        moved = (*p[:b], cut, *p[b + 1 :])
        rest = available - walk.step[b][p[b]][cut]
        segment = _Segment(b, p[b], cut - 1, available + walk.more(state, b))
        return [_State(moved, h & ~(1 << b), t, rest), segment]
    raise AssertionError(f"no choice explains the value of {state}")


def _append_sweep(first: int, s: int, cut: int, ops: list[Compute]) -> None:
    ops.append(Forward(first + s, Keep.INPUT))
    ops += [Forward(first + j, Keep.NONE) for j in range(s + 1, cut)]


def _append_turn(walk: _Walk, state: _State, cut: int, ops: list[Compute]) -> None:
    """From the heads to the branches' ends, in the order that needs least, and to the cut."""
    first = walk.first
    for b in turn_order(walk.numbers, np.array(state.p, dtype=np.int64)).tolist():
        end = walk.lengths[b]
        if state.p[b] < end:
            _append_sweep(first[b], state.p[b], end, ops)
    ops += [Forward(first[-2] + j, Keep.NONE) for j in range(cut)]


def _expand_segment(
    walk: _Walk, item: _Segment, ops: list[Compute]
) -> list[_State | _Segment | Compute]:
    """As ``_expand_state``, for an interval of a line: Algorithm 2 of the rotor paper."""
    line, s, t, available = item
    first = walk.first[line]
    cut = walk.pick(item)
    if cut == -1:
        raise AssertionError(f"no choice explains the value of {item}")
    if cut <= s:
        option = 0 if cut == s else -1 - cut
        ops.append(Forward(first + s, Keep.ALL, option))
        rest = available - walk.saved[line][s][option]
        return [*([_Segment(line, s + 1, t, rest)] if s < t else []), Backward(first + s)]
    if s == t:
        ops += [Forward(first + s, Keep.INPUT), Forward(first + s, Keep.ALL)]
        return [Backward(first + s)]
    _append_sweep(first, s, cut, ops)
    late = _Segment(line, cut, t, available - walk.step[line][s][cut])
    return [late, _Segment(line, s, cut - 1, available)]
