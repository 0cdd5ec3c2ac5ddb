"""A chain and its costs as arrays of bytes and seconds, for compiled loops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fxremat.ir import Chain, Costs, StageCosts

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MOST_BYTES = 1 << 61
"""Upper bound of sums of sizes, a quarter of what an int64 holds."""


class Numbers(NamedTuple):
    """A chain of ``L`` stages as arrays; all sizes in bytes.

    Arrays of shape ``(L, 1 + O)`` have a column for each of a stage's save options, the whole saved
    set first. Options that a stage does not have take infinite time.

    Attributes:
        prefix_s: ``(L + 1,)``, seconds of the forwards ``0 … i - 1``.
        gradient: ``(L,)``, gradients held while the backward of stage ``i`` comes next.
        backward_s: ``(L, 1 + O)``, seconds of ``B i``.
        saved: ``(L, 1 + O)``, what ``F_all i`` adds to its input.
        keep: ``(L, 1 + O)``, peak of ``F_all i`` beyond its input and the gradient.
        back: ``(L, 1 + O)``, peak of ``B i`` beyond its input.
        step: ``(L, L + 1)``, what boundary ``s'`` adds to boundary ``s < s'``.
        sweep: ``(L, L + 1)``, peak of the forwards ``s … s' - 1`` that keep only boundary ``s``,
            beyond that boundary and the gradient.
        leaf_bytes: ``(L, 2 + O)``, least memory of the interval ``(i, i)`` in each of its ways:
            ``F_all`` and ``B``, or a forward by itself and a rebuild later; and for the last stage,
            ``F_all`` with each save option.
        leaf_s: ``(L, 2 + O)``, their seconds, which are infinite if a stage does not have that way.
    """

    prefix_s: Floats
    gradient: Ints
    backward_s: Floats
    saved: Ints
    keep: Ints
    back: Ints
    step: Ints
    sweep: Ints
    leaf_bytes: Ints
    leaf_s: Floats


def numbers_of(chain: Chain, costs: Costs) -> Numbers:
    """Return a valid chain and its costs as arrays.

    Raises:
        ValueError: the sizes are too large to add up.
    """
    stages = costs.stages
    check_total(most_bytes(stages) + sum(storage.nbytes for storage in chain.storages))
    backward_s, (saved, keep, back) = _by_option(chain, stages)
    step = _steps(chain)
    sweep = np.zeros_like(step)
    sweep[:, 1:] = np.maximum.accumulate(forward_peaks(step, stages), axis=1)
    rebuild = [stage.gradient_bytes + stage.rebuild_bytes for stage in stages]
    prefix_s = np.cumsum([0.0, *(stage.forward_s for stage in stages)])
    more = backward_s.shape[1] - 1
    leaf_bytes = [[nbytes, nbytes, *[0] * more] for nbytes in rebuild]
    leaf_s = [[stage.rebuild_s + stage.backward_s] * 2 + [math.inf] * more for stage in stages]
    last = stages[-1]
    run_bytes = last.gradient_bytes + int(sweep[-1, -1])
    leaf_bytes[-1] = [
        max(last.gradient_bytes + int(keep[-1, 0]), int(back[-1, 0])),
        max(run_bytes, rebuild[-1]),
        *np.maximum(last.gradient_bytes + keep[-1, 1:], back[-1, 1:]).tolist(),
    ]
    leaf_s[-1] = [
        last.forward_s + last.backward_s,
        last.forward_s + last.rebuild_s + last.backward_s,
        *(prefix_s[-1] - prefix_s[-2] + backward_s[-1, 1:]).tolist(),
    ]
    return Numbers(
        prefix_s=prefix_s,
        gradient=np.array([stage.gradient_bytes for stage in stages], dtype=np.int64),
        backward_s=backward_s,
        saved=saved,
        keep=keep,
        back=back,
        step=step,
        sweep=sweep,
        leaf_bytes=np.array(leaf_bytes, dtype=np.int64),
        leaf_s=np.array(leaf_s, dtype=np.float64),
    )


def _by_option(chain: Chain, stages: Sequence[StageCosts]) -> tuple[Floats, Ints]:
    """Return ``backward_s`` of ``Numbers``; and ``saved``, ``keep`` and ``back`` as one array."""
    width = 1 + max(len(stage.options) for stage in stages)
    seconds = np.full((len(stages), width), np.inf)
    sizes = np.zeros((3, len(stages), width), dtype=np.int64)
    for i, stage in enumerate(stages):
        for k, option in enumerate(stage.choices(chain.stages[i].saved)):
            saved = chain.nbytes(chain.added(i, option.kept))
            back = stage.gradient_bytes + saved + option.backward_extra_bytes
            seconds[i, k] = stage.backward_s + option.recompute_s
            sizes[:, i, k] = saved, saved + option.keep_extra_bytes, back
        sizes[:, i, 1 + len(stage.options) :] = sizes[:, i, :1]
    return seconds, sizes


def unit_bytes(numbers: Numbers) -> int:
    """Return the greatest common divisor of all sizes, at least 1.

    Slots of that size round nothing.
    """
    sizes = [array for array in numbers if array.dtype == np.int64]
    return math.gcd(*(int(np.gcd.reduce(array, axis=None)) for array in sizes)) or 1


def without_saved_sets(numbers: Numbers) -> Numbers:
    """Return arrays of the same chain in which no saved set fits while another stage runs."""
    never = np.full((numbers.gradient.size, 1), 2 * MOST_BYTES)
    backward_s = np.ascontiguousarray(numbers.backward_s[:, :1])
    return numbers._replace(
        backward_s=backward_s,
        saved=never,
        keep=never,
        back=never,
        leaf_bytes=np.ascontiguousarray(numbers.leaf_bytes[:, :2]),
        leaf_s=np.ascontiguousarray(numbers.leaf_s[:, :2]),
    )


def most_bytes(stages: Sequence[StageCosts]) -> int:
    """Return an upper bound on the bytes that a stage needs in addition to storages."""
    return max(
        2 * stage.gradient_bytes
        + stage.forward_extra_bytes
        + max(option.keep_extra_bytes for option in stage.choices(()))
        + max(option.backward_extra_bytes for option in stage.choices(()))
        + stage.rebuild_bytes
        for stage in stages
    )


def check_total(nbytes: int, *, most: int = MOST_BYTES) -> None:
    """Raise ``ValueError`` if ``nbytes``, the sum of all sizes, is more than ``most``.

    Larger sums might overflow the integers of compiled loops.
    """
    if nbytes > most:
        raise ValueError(f"the sizes add up to {nbytes} bytes, more than {most}")


def _steps(chain: Chain) -> Ints:
    """Return ``step`` of ``Numbers``: the bytes that boundary ``s'`` adds to boundary ``s``.

    A storage of boundary ``s'`` is not in boundary ``s < s'`` exactly if its run begins after
    ``s``.
    """
    count = len(chain)
    starting = np.zeros((count + 1, count + 1), dtype=np.int64)
    born: dict[int, int] = {}
    for i, boundary in enumerate(chain.boundaries):
        for storage in set(boundary):
            starting[born.setdefault(storage, i), i] += chain.storages[storage].nbytes
    # Sum over the runs that begin after s of their bytes in boundary s'.
    return np.ascontiguousarray(np.cumsum(starting[::-1], axis=0)[::-1][1:])


def forward_peaks(step: Ints, stages: Sequence[StageCosts]) -> Ints:
    """Return an ``(L, L)`` array of the peak of each forward ``k`` beyond each boundary ``s <= k``.

    It is in bytes without gradients. A forward holds boundaries ``k`` and ``k + 1``, and its extra
    bytes.
    """
    peaks = np.diagonal(step, 1) + [stage.forward_extra_bytes for stage in stages]
    return np.triu(peaks + step[:, :-1])
