"""From decisions to the computations they stand for, and the memory that each needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from fxremat.ir import Activations, Backward, Compute, Forward, Keep, Part
from fxremat.solvers.pofo.intervals import explain
from fxremat.solvers.pofo.search import Decision
from fxremat.solvers.pofo.sweep import Sweep, segment
from fxremat.solvers.quantize import slots_up


@dataclass(frozen=True, slots=True)
class Step:
    """One computation, or a rebuild: two of them.

    Attributes:
        ops: the computations.
        seconds: how long they take.
        nbytes: needed while they run, ``fixed_bytes`` and whatever is moved left out, but
            with the moved value that they read.
        first_s: of a rebuild, how long its forward takes.
    """

    ops: tuple[Compute, ...]
    seconds: float
    nbytes: int
    first_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Moved:
    """A value that is offloaded.

    Attributes:
        what: the value.
        nbytes: its size.
        kept: the step of the first sweep that reads it.
        needed: the step after the turn, counted from there, before which it is back.
    """

    what: Activations
    nbytes: int
    kept: int
    needed: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All computations in their order, and what is moved.

    Attributes:
        sweep: steps before the turn.
        back: steps after it.
        moved: in the order in which it is offloaded; it comes back in the opposite one.
    """

    sweep: tuple[Step, ...]
    back: tuple[Step, ...]
    moved: tuple[Moved, ...]


def plan_of(sweep: Sweep, decisions: tuple[Decision, ...]) -> Plan:
    """The computations of decisions."""
    n = sweep.numbers
    steps: list[Step] = []
    behind: list[list[Step]] = []  # after the turn, of each decision
    kept: list[int] = []
    held, back = sweep.input_bytes, 0.0  # of the label that a decision extends
    own = [0] * len(decisions)
    for at, decision in enumerate(decisions):
        i, cut = decision.stage, decision.cut
        own[at] = int(sweep.moves[i, int(decision.within)]) if decision.moved else 0
        kept.append(len(steps))
        steps += _ahead(sweep, decision, held, own[at])
        if at == len(decisions) - 1:
            behind.append([_last(sweep, cut - i, held)])
            break
        free = sweep.budget - held
        if cut == i:
            behind.append([Step((Backward(i),), float(n.backward_s[i]), held + int(n.back[i]))])
            waits = max(0.0, back - (free - int(n.back[i])) * sweep.back_s)
            backward_s = float(n.backward_s[i]) + waits
            held += int(n.saved[i]) - own[at]
        else:
            choice, backward_s = segment(sweep, i, cut, free, back)
            behind.append(_segment(sweep, (i, cut - 1), free, choice))
            held += int(n.step[i, cut]) - own[at]
        back = max(0.0, back - backward_s) + own[at] * sweep.back_s
    begins = _begins([len(part) for part in reversed(behind)])[::-1]
    moved = [
        Moved(_what(decision), own[at], kept[at], begins[at])
        for at, decision in enumerate(decisions)
        if decision.moved
    ]
    after = [step for part in reversed(behind) for step in part]
    return Plan(tuple(steps), tuple(after), tuple(moved))


def _begins(lengths: list[int]) -> list[int]:
    return [0, *accumulate(lengths)][:-1]


def _what(decision: Decision) -> Activations:
    if decision.within:
        return Activations(Part.SAVED, decision.stage - 1)
    return Activations(Part.INPUT, decision.stage)


def _ahead(sweep: Sweep, decision: Decision, held: int, own: int) -> Iterator[Step]:
    """The forwards of a decision; its input leaves after the first of them if it is moved."""
    n = sweep.numbers
    i, cut = decision.stage, decision.cut
    seconds = np.diff(n.prefix_s[i : max(cut, i + 1) + 1]).tolist()
    turn = int(n.gradient[-1])
    if cut == i:
        yield Step((Forward(i, Keep.ALL),), seconds[0], held + turn + int(n.keep[i]))
        return
    for k in range(i, cut):
        keep = Keep.INPUT if k == i else Keep.NONE
        nbytes = held + turn + int(sweep.peaks[i, k]) - (own if k > i else 0)
        yield Step((Forward(k, keep),), seconds[k - i], nbytes)


def _last(sweep: Sweep, way: int, held: int) -> Step:
    """The last stage after the turn."""
    i = len(sweep.numbers.backward_s) - 1
    ops = (Forward(i, Keep.ALL), Backward(i))[1 - way :]
    nbytes = held + int(sweep.last_bytes[way, 1])
    seconds = float(sweep.last_s[way])
    return Step(ops, seconds, nbytes, first_s=seconds - float(sweep.last_s[0]))


def _segment(sweep: Sweep, interval: tuple[int, int], free: int, choice: int) -> list[Step]:
    """The sequence of an interval, with a stack of its own: chains are deeper than Python's.

    Args:
        sweep: the chain.
        interval: ``(s, t)``.
        free: bytes beside boundary ``s``.
        choice: an entry of its front, -1 for the sequence of least memory.
    """
    fronts, n = sweep.fronts, sweep.numbers
    quantum = fronts.quantum
    m = min(fronts.size.shape[1] - 1, free // quantum)
    steps: list[Step] = []
    # Interval, held with its input, slots and entry; or a step.
    todo: list[tuple[int, int, int, int, int] | Step] = []
    todo.append((*interval, sweep.budget - free, m, choice))
    while todo:
        item = todo.pop()
        if isinstance(item, Step):
            steps.append(item)
            continue
        s, t, held, m, entry = item
        if s == t:
            pair = (Forward(s, Keep.ALL), Backward(s))
            seconds = float(n.leaf_s[s, 0])
            nbytes = held + int(n.leaf_bytes[s, 0])
            steps.append(Step(pair, seconds, nbytes, first_s=seconds - float(n.backward_s[s])))
            continue
        cut, late, early = int(sweep.least.choice[s, t]), -1, -1
        if entry >= 0:
            cut, late, early = explain(fronts, s, t, m, entry)
        if cut < s:
            raise AssertionError(f"nothing explains entry {entry} of ({s}, {t}) at {m} slots")
        turn = int(n.gradient[t])
        if cut == s:
            seconds = float(n.prefix_s[s + 1] - n.prefix_s[s])
            steps.append(Step((Forward(s, Keep.ALL),), seconds, held + turn + int(n.keep[s])))
            todo.append(Step((Backward(s),), float(n.backward_s[s]), held + int(n.back[s])))
            inner = m - slots_up(int(n.saved[s]), quantum=quantum)
            todo.append((s + 1, t, held + int(n.saved[s]), inner, late))
            continue
        for k in range(s, cut):
            seconds = float(n.prefix_s[k + 1] - n.prefix_s[k])
            keep = Keep.INPUT if k == s else Keep.NONE
            nbytes = held + turn + int(sweep.peaks[s, k])
            steps.append(Step((Forward(k, keep),), seconds, nbytes))
        todo.append((s, cut - 1, held, m, early))
        inner = m - int(fronts.step_slots[s, cut])
        todo.append((cut, t, held + int(n.step[s, cut]), inner, late))
    return steps
