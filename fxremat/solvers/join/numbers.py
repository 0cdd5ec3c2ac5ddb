"""A join and its costs as arrays of bytes and seconds, for compiled loops."""

from __future__ import annotations

from itertools import chain as chained
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fxremat.ir import Chain, Costs, Join, JoinCosts
from fxremat.solvers.numbers import Floats, Ints, Numbers, numbers_of

_Number = TypeVar("_Number", np.int64, np.float64)

_MOST_BYTES = 1 << 61
"""All sizes together stay below this."""


class JoinNumbers(NamedTuple):
    """A join of ``k`` branches, the longest of ``n`` stages, and a trunk of ``T`` stages.

    The first index is the branch; entries beyond its length are 0. A branch's *head* at
    ``p`` is its boundary ``p`` in memory. All sizes are in bytes.

    Attributes:
        lengths: ``(k,)``, stages of each branch.
        strides: ``(k,)``; heads ``p`` are number ``Σ p[b] strides[b]`` of ``heads``.
        heads: how many vectors of heads there are.
        prefix_s: ``(k, n + 1)``, seconds of a branch's forwards ``0 … i - 1``.
        backward_s: ``(k, n, 1 + O)``, after each of a stage's save options, from that of
            keeping everything; those that a stage has not take for ever.
        saved, keep, back: ``(k, n, 1 + O)``, see ``Numbers``, for each of them.
        step: ``(k, n + 1, n + 1)``, what boundary ``s'`` of a branch adds to ``s``.
        sweep: ``(k, n + 1, n + 1)``, see ``Numbers``, without any gradient.
        freed: ``(k, n + 1)``, what is given back with a head at ``p`` that no saved set
            holds: boundary ``p`` without boundary ``p - 1``, which may still be held.
        held: ``(k, n + 1)``, gradients that a branch holds when its level is ``p``.
        done: gradients that the trunk leaves.
        turn_gradient: ``(T,)``, ``δ`` while the backward of trunk stage ``t`` comes next.
        turn_s: ``(T + 1,)``, seconds of the trunk's forwards ``0 … i - 1``.
        turn_born: ``(T + 1,)``, what boundary ``q`` of the trunk has that began in the trunk.
        turn_crossed: ``(k, n + 1, T + 1)``, what boundary ``q`` of the trunk has that began
            in a branch after its boundary ``p``.
        turn_peak: ``(T,)``, peak of the trunk's forward ``j`` beyond its input.
    """

    lengths: Ints
    strides: Ints
    heads: int
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
    turn_gradient: Ints
    turn_s: Floats
    turn_born: Ints
    turn_crossed: Ints
    turn_peak: Ints


def line_numbers(join: Join, costs: JoinCosts) -> tuple[Numbers, ...]:
    """Arrays of every line as a chain of its own; the last stage of a branch is no turn.

    Nor can it be run with a save option and go back at once: that would be a rebuild.

    Raises:
        ValueError: the sizes are too large to add up.
    """
    _check_total(join, costs)
    lines = [
        numbers_of(chain, Costs(stages))
        for chain, stages in zip(join.lines, costs.lines, strict=True)
    ]
    for line, stages in zip(lines[:-1], costs.branches, strict=True):
        # By then its first execution is past: the trunk has run.
        last = stages[-1]
        line.leaf_bytes[-1] = last.gradient_bytes + last.rebuild_bytes
        line.leaf_s[-1] = last.rebuild_s + last.backward_s
        line.option_s[-1] = np.inf
    return tuple(lines)


def join_numbers(join: Join, costs: JoinCosts, lines: tuple[Numbers, ...]) -> JoinNumbers:
    """The arrays of a valid join whose lines' arrays are ``lines``."""
    branches, trunk = lines[:-1], lines[-1]
    lengths = [len(branch) for branch in join.branches]
    sizes = [length + 1 for length in lengths]
    strides = [int(np.prod(sizes[b + 1 :], dtype=np.int64)) for b in range(len(sizes))]
    end = len(join.trunk)
    born, crossed = _turn_bytes(join)
    new = np.zeros(end + 1, dtype=np.int64)
    for q in range(1, end + 1):
        before, at = join.trunk.boundaries[q - 1], join.trunk.boundaries[q]
        new[q] = join.trunk.nbytes(set(at) - set(before))
    extra = [stage.forward_extra_bytes for stage in costs.trunk]
    whole = [  # with the options of the last stages
        numbers_of(chain, Costs(stages))
        for chain, stages in zip(join.branches, costs.branches, strict=True)
    ]
    return JoinNumbers(
        lengths=np.array(lengths, dtype=np.int64),
        strides=np.array(strides, dtype=np.int64),
        heads=strides[0] * sizes[0],
        prefix_s=_padded([branch.prefix_s for branch in branches]),
        backward_s=_padded(
            [np.column_stack([n.backward_s, n.option_s]) for n in whole], fill=np.inf
        ),
        saved=_padded([np.column_stack([n.saved, n.option_saved]) for n in whole]),
        keep=_padded([np.column_stack([n.keep, n.option_keep]) for n in whole]),
        back=_padded([np.column_stack([n.back, n.option_back]) for n in whole]),
        step=_padded([branch.step for branch in branches]),
        sweep=_padded([branch.sweep for branch in branches]),
        freed=_padded([_freed(chain) for chain in join.branches]),
        held=_padded(
            [
                np.array([left, *(stage.gradient_bytes for stage in stages)], dtype=np.int64)
                for left, stages in zip(costs.left_bytes, costs.branches, strict=True)
            ]
        ),
        done=costs.trunk_done_bytes,
        turn_gradient=trunk.gradient,
        turn_s=trunk.prefix_s,
        turn_born=born,
        turn_crossed=crossed,
        turn_peak=new[1:] + np.array(extra, dtype=np.int64),
    )


def base_bytes(join: Join, costs: JoinCosts) -> int:
    """What is held at the start: ``fixed_bytes`` and every branch's input."""
    return costs.fixed_bytes + sum(chain.nbytes(chain.boundaries[0]) for chain in join.branches)


def kept_bytes(join: Join, costs: JoinCosts) -> int:
    """Exact peak of the schedule without recomputation, ``fixed_bytes`` included.

    Lines run forward one after the other, the trunk last, and back in the reverse order; every
    stage keeps its whole saved set.
    """
    stages = [
        [(stage, chain.nbytes(chain.saved_set(i))) for i, stage in enumerate(own)]
        for chain, own in zip(join.lines, costs.lines, strict=True)
    ]
    held_bytes, peak_bytes = base_bytes(join, costs), 0
    gradient_bytes = costs.trunk[-1].gradient_bytes  # until the first backward is done
    for stage, saved_bytes in chained.from_iterable(stages):
        held_bytes += saved_bytes
        peak_bytes = max(peak_bytes, held_bytes + gradient_bytes + stage.keep_extra_bytes)
    beside_bytes = 0  # gradients of the lines that do not run
    for line in reversed(range(len(stages))):
        for stage, saved_bytes in reversed(stages[line]):
            needed_bytes = stage.gradient_bytes + stage.backward_extra_bytes
            peak_bytes = max(peak_bytes, held_bytes + beside_bytes + needed_bytes)
            held_bytes -= saved_bytes
        if line == len(join.branches):
            beside_bytes = costs.trunk_done_bytes
            beside_bytes += sum(own[-1].gradient_bytes for own in costs.branches[:-1])
        else:
            held_bytes -= join.nbytes(join.branches[line].boundaries[0])
            beside_bytes += costs.left_bytes[line]
            beside_bytes -= costs.branches[line - 1][-1].gradient_bytes if line else 0
    return peak_bytes


def _check_total(join: Join, costs: JoinCosts) -> None:
    total = costs.trunk_done_bytes + sum(costs.left_bytes)
    total += sum(storage.nbytes for storage in join.storages)
    for stages in costs.lines:
        total += max(
            2 * stage.gradient_bytes
            + stage.forward_extra_bytes
            + max([stage.keep_extra_bytes, *(o.keep_extra_bytes for o in stage.options)])
            + max([stage.backward_extra_bytes, *(o.backward_extra_bytes for o in stage.options)])
            + stage.rebuild_bytes
            for stage in stages
        )
    if total > _MOST_BYTES:
        raise ValueError(f"the sizes add up to {total} bytes, more than {_MOST_BYTES}")


def _padded(arrays: list[NDArray[_Number]], *, fill: float = 0) -> NDArray[_Number]:
    """Arrays of unlike shapes in one, filled up with ``fill``."""
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


def _turn_bytes(join: Join) -> tuple[Ints, Ints]:
    """``turn_born`` and ``turn_crossed`` of ``JoinNumbers``."""
    end = len(join.trunk)
    ends = set(join.trunk.boundaries[0])
    most = max(map(len, join.branches))
    born = np.zeros(end + 1, dtype=np.int64)
    crossed = np.zeros((len(join.branches), most + 1, end + 1), dtype=np.int64)
    for q, boundary in enumerate(join.trunk.boundaries):
        born[q] = join.nbytes([i for i in boundary if i not in ends])
        for b, chain in enumerate(join.branches):
            mine = set(boundary) & set(chain.boundaries[-1])
            for p in range(len(chain) + 1):
                crossed[b, p, q] = chain.nbytes(mine - set(chain.boundaries[p]))
    return born, crossed
