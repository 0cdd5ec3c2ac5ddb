"""A chain and its costs as arrays of bytes and seconds, for compiled loops."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fxremat.ir import Chain, Costs, SaveOption

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MOST_BYTES = 1 << 61
"""Sums of sizes stay below this, a quarter of what an int64 holds."""


_NO_SECONDS: Floats = np.zeros((0, 0))
_NO_SIZES: Ints = np.zeros((0, 0), dtype=np.int64)


class Numbers(NamedTuple):
    """A chain of ``L`` stages as arrays; all sizes in bytes.

    Attributes:
        prefix_s: ``(L + 1,)``, seconds of the forwards ``0 … i - 1``.
        backward_s: ``(L,)``.
        gradient: ``(L,)``, ``δ`` while the backward of stage ``i`` comes next.
        saved: ``(L,)``, saved set ``i``.
        keep: ``(L,)``, peak of ``F_all i`` beyond its input and the gradient.
        back: ``(L,)``, peak of ``B i`` beyond its input.
        step: ``(L, L + 1)``, what boundary ``s'`` adds to boundary ``s < s'``.
        sweep: ``(L, L + 1)``, peak of the forwards ``s … s' - 1``, only boundary ``s``
            kept, beyond that boundary and the gradient.
        leaf_bytes: ``(L, 2)``, least memory of the interval ``(i, i)`` in each of its
            two ways: at once, or the forward alone first and then a rebuild.
        leaf_s: ``(L, 2)``, their seconds.
        option_s, option_saved, option_keep, option_back: ``(L, O)``, ``backward_s``,
            ``saved``, ``keep`` and ``back`` for each save option beside the whole saved
            set; a stage with fewer has some that take for ever.
    """

    prefix_s: Floats
    backward_s: Floats
    gradient: Ints
    saved: Ints
    keep: Ints
    back: Ints
    step: Ints
    sweep: Ints
    leaf_bytes: Ints
    leaf_s: Floats
    option_s: Floats = _NO_SECONDS
    option_saved: Ints = _NO_SIZES
    option_keep: Ints = _NO_SIZES
    option_back: Ints = _NO_SIZES


def numbers_of(chain: Chain, costs: Costs) -> Numbers:
    """The arrays of a valid chain.

    Raises:
        ValueError: the sizes are too large to add up.
    """
    stages = costs.stages
    count = len(stages)
    _check_total(chain, costs)
    saved = [chain.nbytes(chain.saved_set(i)) for i in range(count)]
    keep = [saved[i] + stage.keep_extra_bytes for i, stage in enumerate(stages)]
    back = [
        stage.gradient_bytes + saved[i] + stage.backward_extra_bytes
        for i, stage in enumerate(stages)
    ]
    step, sweep = _boundary_bytes(chain, [stage.forward_extra_bytes for stage in stages])
    rebuild = [stage.gradient_bytes + stage.rebuild_bytes for stage in stages]
    leaf_bytes = [[nbytes, nbytes] for nbytes in rebuild]
    leaf_s = [[stage.rebuild_s + stage.backward_s] * 2 for stage in stages]
    last = stages[-1]
    run_bytes = last.gradient_bytes + int(sweep[count - 1, count])
    leaf_bytes[-1] = [
        max(last.gradient_bytes + keep[-1], back[-1]),
        max(run_bytes, rebuild[-1]),
    ]
    leaf_s[-1] = [
        last.forward_s + last.backward_s,
        last.forward_s + last.rebuild_s + last.backward_s,
    ]
    return Numbers(
        prefix_s=np.cumsum([0.0, *(stage.forward_s for stage in stages)]),
        backward_s=np.array([stage.backward_s for stage in stages], dtype=np.float64),
        gradient=np.array([stage.gradient_bytes for stage in stages], dtype=np.int64),
        saved=np.array(saved, dtype=np.int64),
        keep=np.array(keep, dtype=np.int64),
        back=np.array(back, dtype=np.int64),
        step=step,
        sweep=sweep,
        leaf_bytes=np.array(leaf_bytes, dtype=np.int64),
        leaf_s=np.array(leaf_s, dtype=np.float64),
        **_option_arrays(chain, costs),
    )


def _option_arrays(chain: Chain, costs: Costs) -> dict[str, Any]:
    """The last four fields of ``Numbers``; what fills them up takes for ever."""
    width = max(len(stage.options) for stage in costs.stages)
    seconds = np.full((len(chain), width), np.inf)
    sizes = np.zeros((3, len(chain), width), dtype=np.int64)
    for i, stage in enumerate(costs.stages):
        whole = SaveOption(
            chain.stages[i].saved, np.inf, stage.keep_extra_bytes, stage.backward_extra_bytes
        )
        for k, option in enumerate((*stage.options, *[whole] * (width - len(stage.options)))):
            saved = chain.nbytes(chain.added(i, option.kept))
            seconds[i, k] = stage.backward_s + option.recompute_s
            sizes[:, i, k] = (
                saved,
                saved + option.keep_extra_bytes,
                stage.gradient_bytes + saved + option.backward_extra_bytes,
            )
    return {
        "option_s": seconds,
        "option_saved": sizes[0],
        "option_keep": sizes[1],
        "option_back": sizes[2],
    }


def choices_of(numbers: Numbers) -> tuple[Floats, Ints]:
    """What ``F_all`` may keep, the whole saved set first, then each option.

    Returns ``(L, 1 + O)`` seconds, ``backward_s``, and ``(3, L, 1 + O)`` bytes: ``saved``,
    ``keep`` and ``back``.
    """
    n = numbers
    pairs = (n.saved, n.option_saved), (n.keep, n.option_keep), (n.back, n.option_back)
    seconds = np.ascontiguousarray(np.column_stack([n.backward_s, n.option_s]))
    return seconds, np.array([np.column_stack(pair) for pair in pairs], order="C")


def unit_bytes(numbers: Numbers) -> int:
    """The greatest common divisor of all sizes, at least 1: slots of it round nothing."""
    sizes = (
        numbers.gradient,
        numbers.saved,
        numbers.keep,
        numbers.back,
        numbers.step,
        numbers.sweep,
        numbers.leaf_bytes,
        numbers.option_saved,
        numbers.option_keep,
        numbers.option_back,
    )
    return math.gcd(*(int(np.gcd.reduce(array, axis=None)) for array in sizes)) or 1


def without_saved_sets(numbers: Numbers) -> Numbers:
    """The same chain where no saved set can be held while another stage runs."""
    never = np.full_like(numbers.saved, 2 * MOST_BYTES)
    return numbers._replace(
        saved=never,
        keep=never,
        back=never,
        option_s=numbers.option_s[:, :0],
        option_saved=numbers.option_saved[:, :0],
        option_keep=numbers.option_keep[:, :0],
        option_back=numbers.option_back[:, :0],
    )


def _check_total(chain: Chain, costs: Costs) -> None:
    most = max(
        2 * stage.gradient_bytes
        + stage.forward_extra_bytes
        + max([stage.keep_extra_bytes, *(o.keep_extra_bytes for o in stage.options)])
        + max([stage.backward_extra_bytes, *(o.backward_extra_bytes for o in stage.options)])
        + stage.rebuild_bytes
        for stage in costs.stages
    )
    total = most + sum(storage.nbytes for storage in chain.storages)
    if total > MOST_BYTES:
        raise ValueError(f"the sizes add up to {total} bytes, more than {MOST_BYTES}")


def _boundary_bytes(chain: Chain, forward_extra: list[int]) -> tuple[Ints, Ints]:
    """``step`` and ``sweep`` of ``Numbers``.

    A storage of boundary ``s'`` is not in boundary ``s < s'`` exactly if its run begins
    after ``s``.
    """
    count = len(chain)
    starting = np.zeros((count + 1, count + 1), dtype=np.int64)
    born: dict[int, int] = {}
    for i, boundary in enumerate(chain.boundaries):
        for storage in set(boundary):
            starting[born.setdefault(storage, i), i] += chain.storages[storage].nbytes
    # step[s, s'] = Σ over runs that begin after s of what they have in boundary s'.
    step = np.cumsum(starting[::-1], axis=0)[::-1][1:]
    new = np.diagonal(starting)
    sweep = np.zeros((count, count + 1), dtype=np.int64)
    for s in range(count):
        # Forward j holds boundaries j and j + 1; the second adds what begins there.
        peaks = step[s, s:count] + new[s + 1 :] + forward_extra[s:]
        sweep[s, s + 1 :] = np.maximum.accumulate(peaks)
    return np.ascontiguousarray(step), sweep
