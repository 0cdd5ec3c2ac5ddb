"""A join and its costs as arrays of bytes and seconds, for compiled loops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain as chained
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fxremat.ir import Chain, Costs, Join, JoinCosts, StageCosts
from fxremat.solvers.numbers import Floats, Ints, Numbers, check_total, most_bytes, numbers_of

_Number = TypeVar("_Number", np.int64, np.float64)


class JoinNumbers(NamedTuple):
    """A join of ``k`` branches of at most ``n`` stages, and of ``T`` trunk stages, as arrays.

    The first index is the branch; entries beyond its length are 0 or, for seconds of a backward,
    infinite. A branch's *head* at ``p`` is its boundary ``p`` in memory. All sizes are in bytes.

    Attributes:
        lengths: ``(k,)``, number of stages of each branch.
        strides: ``(k,)``; heads ``p`` have the number ``Σ p[b] strides[b]``, below ``heads``.
        heads: number of vectors of heads.
        line_row: ``(k + 1,)``, where the intervals of each line begin among those of all lines,
            each line's packed as in ``solvers.kernels``, the trunk's last.
        prefix_s: ``(k, n + 1)``, seconds of a branch's forwards ``0 … i - 1``.
        backward_s, saved, keep, back: ``(k, n, 1 + O)``, see ``Numbers``.
        step: ``(k, n + 1, n + 1)``, what boundary ``s'`` of a branch adds to ``s``.
        sweep: ``(k, n + 1, n + 1)``, see ``Numbers``, without any gradient.
        freed: ``(k, n + 1)``, what is freed with a head at ``p`` that is in no saved set: boundary
            ``p`` without boundary ``p - 1``, which may still be held.
        held: ``(k, n + 1)``, gradients that a branch holds when its head is at ``p``.
        done: gradients that the trunk leaves until the step ends.
        trunk_gradient: ``(T,)``, gradients held while the backward of trunk stage ``t`` comes next.
        trunk_s: ``(T + 1,)``, seconds of the trunk's forwards ``0 … i - 1``.
        trunk_born: ``(T + 1,)``, bytes of the trunk's boundary ``q`` that were allocated in the
            trunk.
        trunk_crossed: ``(k, n + 1, T + 1)``, bytes of the trunk's boundary ``q`` that were
            allocated in a branch after its boundary ``p``.
        trunk_peak: ``(T,)``, peak of the trunk's forward ``j`` beyond its input.
    """

    lengths: Ints
    strides: Ints
    heads: int
    line_row: Ints
    prefix_s: Floats
    backward_s: Floats
    saved: Ints
    keep: Ints
    back: Ints
    step: Ints
    sweep: Ints
    freed: Ints
    held: Ints
    done: int
    trunk_gradient: Ints
    trunk_s: Floats
    trunk_born: Ints
    trunk_crossed: Ints
    trunk_peak: Ints


def join_numbers(join: Join, costs: JoinCosts) -> tuple[JoinNumbers, tuple[Numbers, ...]]:
    """Return a valid join as arrays, and each of its lines (branches, then trunk) as a chain's.

    Raises:
        ValueError: the sizes are too large to add up.
    """
    total = costs.trunk_done_bytes + sum(costs.left_bytes)
    total += sum(storage.nbytes for storage in join.storages) + sum(map(most_bytes, costs.lines))
    check_total(total)
    *branches, trunk = (
        numbers_of(chain, Costs(stages))
        for chain, stages in zip(join.lines, costs.lines, strict=True)
    )
    lengths = [len(line) for line in join.lines]
    sizes = [length + 1 for length in lengths[:-1]]
    strides = [int(np.prod(sizes[b + 1 :], dtype=np.int64)) for b in range(len(sizes))]
    born, crossed = _trunk_bytes(join)
    new = [
        join.trunk.nbytes(set(at) - set(before)) + stage.forward_extra_bytes
        for (before, at), stage in zip(pairwise(join.trunk.boundaries), costs.trunk, strict=True)
    ]
    held = [
        np.array([left, *(stage.gradient_bytes for stage in stages)], dtype=np.int64)
        for left, stages in zip(costs.left_bytes, costs.branches, strict=True)
    ]
    rows = [length * (length + 1) // 2 for length in lengths[:-1]]
    numbers = JoinNumbers(
        lengths=np.array(lengths[:-1], dtype=np.int64),
        strides=np.array(strides, dtype=np.int64),
        heads=strides[0] * sizes[0],
        line_row=np.cumsum([0, *rows], dtype=np.int64),
        prefix_s=_padded([branch.prefix_s for branch in branches]),
        backward_s=_padded([branch.backward_s for branch in branches], fill=np.inf),
        saved=_padded([branch.saved for branch in branches]),
        keep=_padded([branch.keep for branch in branches]),
        back=_padded([branch.back for branch in branches]),
        step=_padded([branch.step for branch in branches]),
        sweep=_padded([branch.sweep for branch in branches]),
        freed=_padded([_freed(chain) for chain in join.branches]),
        held=_padded(held),
        done=costs.trunk_done_bytes,
        trunk_gradient=trunk.gradient,
        trunk_s=trunk.prefix_s,
        trunk_born=born,
        trunk_crossed=crossed,
        trunk_peak=np.array(new, dtype=np.int64),
    )
    return numbers, (*map(_after_trunk, branches, costs.branches), trunk)


def _after_trunk(branch: Numbers, stages: tuple[StageCosts, ...]) -> Numbers:
    """Return the arrays of a branch in which the last stage has run before the trunk did.

    So before its backward it is rebuilt, and cannot run with a save option instead. ``branch`` is
    changed.
    """
    last = stages[-1]
    branch.leaf_bytes[-1] = last.gradient_bytes + last.rebuild_bytes
    branch.leaf_s[-1, :2] = last.rebuild_s + last.backward_s
    branch.leaf_s[-1, 2:] = np.inf
    backward_s = branch.backward_s.copy()
    backward_s[-1, 1:] = np.inf
    return branch._replace(backward_s=backward_s)


def state_count(lengths: Sequence[int]) -> int:
    """Return the number of states in the table of the solver ``join``.

    Args:
        lengths: number of stages of each branch, then of the trunk.
    """
    *branches, trunk = lengths
    return math.prod([length + 1 for length in branches]) * trunk << len(branches)


def base_bytes(join: Join, costs: JoinCosts) -> int:
    """Return the bytes held at the start: ``fixed_bytes`` and every branch's input."""
    return costs.fixed_bytes + sum(chain.nbytes(chain.boundaries[0]) for chain in join.branches)


def kept_bytes(join: Join, costs: JoinCosts) -> int:
    """Return the exact peak in bytes of the schedule that keeps everything, with ``fixed_bytes``.

    Forwards of the lines run one after the other, the trunk last, and backwards in the reverse
    order. Every stage keeps its whole saved set.
    """
    stages = [
        [(stage, chain.nbytes(chain.saved_set(i))) for i, stage in enumerate(line_costs)]
        for chain, line_costs in zip(join.lines, costs.lines, strict=True)
    ]
    held_bytes, peak_bytes = base_bytes(join, costs), 0
    gradient_bytes = costs.trunk[-1].gradient_bytes  # until the first backward is done
    for stage, saved_bytes in chained.from_iterable(stages):
        held_bytes += saved_bytes
        peak_bytes = max(peak_bytes, held_bytes + gradient_bytes + stage.keep_extra_bytes)
    waiting_bytes = 0  # gradients of the lines that are not running
    for line in reversed(range(len(stages))):
        for stage, saved_bytes in reversed(stages[line]):
            needed_bytes = stage.gradient_bytes + stage.backward_extra_bytes
            peak_bytes = max(peak_bytes, held_bytes + waiting_bytes + needed_bytes)
            held_bytes -= saved_bytes
        if line == len(join.branches):
            waiting_bytes = costs.trunk_done_bytes
            waiting_bytes += sum(branch[-1].gradient_bytes for branch in costs.branches[:-1])
        else:
            held_bytes -= join.nbytes(join.branches[line].boundaries[0])
            waiting_bytes += costs.left_bytes[line]
            waiting_bytes -= costs.branches[line - 1][-1].gradient_bytes if line else 0
    return peak_bytes


def _padded(arrays: list[NDArray[_Number]], *, fill: float = 0) -> NDArray[_Number]:
    """Stack arrays of different shapes along a new first axis, padded with ``fill``."""
    shape: list[int] = [
        max(sizes) for sizes in zip(*(array.shape for array in arrays), strict=True)
    ]
    out = np.full((len(arrays), *shape), fill, dtype=arrays[0].dtype)
    for i, array in enumerate(arrays):
        out[i][tuple(map(slice, array.shape))] = array
    return out


def _freed(chain: Chain) -> Ints:
    sets = [set(boundary) for boundary in chain.boundaries]
    freed = [chain.nbytes(sets[0])]
    freed += [chain.nbytes(at - before) for before, at in pairwise(sets)]
    return np.array(freed, dtype=np.int64)


def _trunk_bytes(join: Join) -> tuple[Ints, Ints]:
    """Return the arrays ``trunk_born`` and ``trunk_crossed`` of ``JoinNumbers``."""
    end = len(join.trunk)
    ends = set(join.trunk.boundaries[0])
    most = max(map(len, join.branches))
    born = np.zeros(end + 1, dtype=np.int64)
    crossed = np.zeros((len(join.branches), most + 1, end + 1), dtype=np.int64)
    for q, boundary in enumerate(join.trunk.boundaries):
        born[q] = join.nbytes([i for i in boundary if i not in ends])
        for b, chain in enumerate(join.branches):
            crossing = set(boundary) & set(chain.boundaries[-1])
            for p in range(len(chain) + 1):
                crossed[b, p, q] = chain.nbytes(crossing - set(chain.boundaries[p]))
    return born, crossed
