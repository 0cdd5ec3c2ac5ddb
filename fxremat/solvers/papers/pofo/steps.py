"""Converts decisions to computations, with the memory that each needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from fxremat.ir import Activations, Backward, Compute, Forward, Keep, Part
from fxremat.solvers.kernels import added_bytes
from fxremat.solvers.papers.pofo.intervals import explain
from fxremat.solvers.papers.pofo.sweep import Sweep, SweepChoice, segment
from fxremat.solvers.quantize import slots_up
from fxremat.solvers.sequences import walk


@dataclass(frozen=True, slots=True)
class Computation:
    """A step of a plan: one computation, or a rebuild, which is a forward and its backward.

    Attributes:
        ops: the computations.
        seconds: their time.
        nbytes: bytes needed while they run, without ``fixed_bytes`` and moved values, but with the
            moved value that they read.
        first_s: for a rebuild, the seconds of its forward.
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
        kept: index of the step of the first sweep that reads it.
        needed: index of the step after the loss point before which it has to be back.
    """

    what: Activations
    nbytes: int
    kept: int
    needed: int


@dataclass(frozen=True, slots=True)
class Computations:
    """All computations in order, and what is moved.

    Attributes:
        sweep: steps before the loss point.
        back: steps after the loss point.
        moved: values in the order in which they are offloaded. They are prefetched in the opposite
            order.
    """

    sweep: tuple[Computation, ...]
    back: tuple[Computation, ...]
    moved: tuple[Moved, ...]


def plan_of(sweep: Sweep, decisions: tuple[SweepChoice, ...]) -> Computations:
    """Return the steps of a plan, and what it moves, from its decisions in order of the stages."""
    n = sweep.numbers
    steps: list[Computation] = []
    behind: list[list[Computation]] = []  # for each decision, its steps after the loss point
    kept: list[int] = []
    held, back = sweep.input_bytes, 0.0  # state of the label that a decision extends
    moved_bytes = [0] * len(decisions)
    for at, decision in enumerate(decisions):
        i, cut = decision.stage, decision.cut
        moved_bytes[at] = int(sweep.moves[i, int(decision.within)]) if decision.moved else 0
        kept.append(len(steps))
        steps += _first_sweep(sweep, decision, held, moved_bytes[at])
        if at == len(decisions) - 1:
            behind.append([_last(sweep, cut - i, held)])
            break
        free = sweep.budget - held
        if cut == i:
            behind.append(
                [Computation((Backward(i),), float(n.backward_s[i, 0]), held + int(n.back[i, 0]))]
            )
            waits = max(0.0, back - (free - int(n.back[i, 0])) * sweep.back_s)
            backward_s = float(n.backward_s[i, 0]) + waits
            held += int(n.saved[i, 0]) - moved_bytes[at]
        else:
            choice, backward_s = segment(sweep, i, cut, free, back)
            behind.append(_segment(sweep, (i, cut - 1), free, choice))
            held += int(n.step[i, cut]) - moved_bytes[at]
        back = max(0.0, back - backward_s) + moved_bytes[at] * sweep.back_s
    begins = _start_indices([len(part) for part in reversed(behind)])[::-1]
    moved = [
        Moved(_activations_of(decision), moved_bytes[at], kept[at], begins[at])
        for at, decision in enumerate(decisions)
        if decision.moved
    ]
    after = [step for part in reversed(behind) for step in part]
    return Computations(tuple(steps), tuple(after), tuple(moved))


def _start_indices(lengths: list[int]) -> list[int]:
    return [0, *accumulate(lengths)][:-1]


def _activations_of(decision: SweepChoice) -> Activations:
    if decision.within:
        return Activations(Part.SAVED, decision.stage - 1)
    return Activations(Part.INPUT, decision.stage)


def _first_sweep(
    sweep: Sweep, decision: SweepChoice, held: int, moved_bytes: int
) -> Iterator[Computation]:
    """Yield the forwards of a decision, before the loss point.

    The first is the last reader of an input that is moved.

    Args:
        held: bytes held when it begins.
        moved_bytes: size of its input if that is moved, else 0.
    """
    n = sweep.numbers
    i, cut = decision.stage, decision.cut
    seconds = np.diff(n.prefix_s[i : max(cut, i + 1) + 1]).tolist()
    gradient = int(n.gradient[-1])
    if cut == i:
        yield Computation((Forward(i, Keep.ALL),), seconds[0], held + gradient + int(n.keep[i, 0]))
        return
    for k in range(i, cut):
        keep = Keep.INPUT if k == i else Keep.NONE
        nbytes = held + gradient + int(sweep.peaks[i, k]) - (moved_bytes if k > i else 0)
        yield Computation((Forward(k, keep),), seconds[k - i], nbytes)


def _last(sweep: Sweep, way: int, held: int) -> Computation:
    """Return the step of the last stage after the loss point.

    Args:
        way: 0 for its backward, 1 for a rebuild and its backward.
        held: bytes held when it begins.
    """
    i = sweep.numbers.gradient.size - 1
    ops = (Forward(i, Keep.ALL), Backward(i))[1 - way :]
    nbytes = held + int(sweep.last_bytes[way, 1])
    seconds = float(sweep.last_s[way])
    return Computation(ops, seconds, nbytes, first_s=seconds - float(sweep.last_s[0]))


def _segment(sweep: Sweep, interval: tuple[int, int], free: int, choice: int) -> list[Computation]:
    """Return the steps of entry ``choice`` of the front of ``interval``.

    Args:
        interval: its first and last stage.
        free: bytes that are free in addition to its first boundary.
        choice: index of the entry; -1 for the sequence of least memory.
    """
    fronts = sweep.fronts
    quantum = fronts.quantum

    def pick(s: int, t: int, at: tuple[int, int]) -> tuple[int, tuple[int, int], tuple[int, int]]:
        m, entry = at  # slots, and index in the front
        if s == t:
            return s, at, at
        cut, late, early = int(fronts.least.choice[s, t]), -1, -1
        if entry >= 0:
            cut, late, early = explain(fronts, s, t, m, entry)
        added = added_bytes(fronts.numbers, s, cut)
        return cut, (m - slots_up(added, quantum), late), (m, early)

    m = min(fronts.size.shape[1] - 1, free // quantum)
    ops = walk(pick, *interval, (m, choice))
    return list(_steps(sweep, ops, interval[1], sweep.budget - free))


def _steps(sweep: Sweep, ops: Sequence[Compute], t: int, held: int) -> Iterator[Computation]:
    """Yield the steps of ``ops``, which run stages up to ``t`` forward and backward.

    ``held`` is the number of bytes held when they begin, including their input.
    """
    n = sweep.numbers
    start = ops[0].stage  # the stage that the current run of forwards began with
    inputs = {start: held}
    for index, op in enumerate(ops):
        before = ops[index - 1] if index else None
        i, gradient = op.stage, int(n.gradient[t])
        if isinstance(op, Backward):
            if before != Forward(i, Keep.ALL):
                yield Computation((op,), float(n.backward_s[i, 0]), inputs[i] + int(n.back[i, 0]))
            t -= 1
            continue
        if op.keep is not Keep.NONE:
            if isinstance(before, Forward):
                added = n.saved[start, 0] if before.keep is Keep.ALL else n.step[start, i]
                inputs[i] = inputs[start] + int(added)
            start = i
        seconds = float(n.prefix_s[i + 1] - n.prefix_s[i])
        if op.keep is not Keep.ALL:
            yield Computation((op,), seconds, inputs[start] + gradient + int(sweep.peaks[start, i]))
        elif ops[index + 1] == Backward(i):
            seconds = float(n.leaf_s[i, 0])
            first_s = seconds - float(n.backward_s[i, 0])
            nbytes = inputs[i] + int(n.leaf_bytes[i, 0])
            yield Computation((op, Backward(i)), seconds, nbytes, first_s)
        else:
            yield Computation((op,), seconds, inputs[i] + gradient + int(n.keep[i, 0]))
