"""A chain and its costs as arrays of bytes and seconds, for compiled loops."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fxremat.ir import Chain, Costs, SaveOption, StageCosts

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MOST_BYTES = 1 << 61
"""Sums of sizes stay below this, a quarter of what an int64 holds."""


class Numbers(NamedTuple):
    """A chain of ``L`` stages with up to ``O`` save options as arrays; all sizes in bytes.

    Option 0 keeps the whole saved set. Columns past a stage's own options repeat option 0.

    Attributes:
        prefix_s: ``(L + 1,)``, seconds of the forwards ``0 … i - 1``.
        backward_s: ``(L, O)``, rebuilding what was not kept included.
        gradient: ``(L,)``, ``δ`` while the backward of stage ``i`` comes next.
        saved: ``(L, O)``, what ``F_all i`` adds to its input.
        keep: ``(L, O)``, peak of ``F_all i`` beyond its input and the gradient.
        back: ``(L, O)``, peak of ``B i`` beyond its input.
        options: ``(L,)``, number of options of each stage.
        step: ``(L, L + 1)``, what boundary ``s'`` adds to boundary ``s < s'``.
        sweep: ``(L, L + 1)``, peak of the forwards ``s … s' - 1``, only boundary ``s``
            kept, beyond that boundary and the gradient.
        leaf_bytes: ``(L, O + 1)``, least memory of the interval ``(i, i)`` in each of its
            ways. For the last stage: ``F_all`` and ``B`` at once with an option, or, in
            the last column, the forward alone first and then a rebuild. For the others a
            rebuild, whatever the column.
        leaf_s: ``(L, O + 1)``, their seconds.
    """

    prefix_s: Floats
    backward_s: Floats
    gradient: Ints
    saved: Ints
    keep: Ints
    back: Ints
    options: Ints
    step: Ints
    sweep: Ints
    leaf_bytes: Ints
    leaf_s: Floats


def numbers_of(chain: Chain, costs: Costs) -> Numbers:
    """The arrays of a valid chain.

    Raises:
        ValueError: the sizes are too large to add up.
    """
    stages = costs.stages
    _check_total(chain, costs)
    choices = [_choices(chain, i, stage) for i, stage in enumerate(stages)]
    width = max(map(len, choices))
    padded = [own + own[:1] * (width - len(own)) for own in choices]
    step, sweep = _boundary_bytes(chain, [stage.forward_extra_bytes for stage in stages])
    leaf_bytes = [[stage.gradient_bytes + stage.rebuild_bytes] * (width + 1) for stage in stages]
    leaf_s = [[stage.rebuild_s + stage.backward_s] * (width + 1) for stage in stages]
    last = stages[-1]
    run_bytes = last.gradient_bytes + int(sweep[-1, -1])
    leaf_bytes[-1] = [
        *(max(last.gradient_bytes + c.keep_bytes, c.back_bytes) for c in padded[-1]),
        max(run_bytes, leaf_bytes[-1][-1]),
    ]
    leaf_s[-1] = [
        *(last.forward_s + c.backward_s for c in padded[-1]),
        last.forward_s + leaf_s[-1][-1],
    ]
    return Numbers(
        prefix_s=np.cumsum([0.0, *(stage.forward_s for stage in stages)]),
        backward_s=np.array([[c.backward_s for c in own] for own in padded], dtype=np.float64),
        gradient=np.array([stage.gradient_bytes for stage in stages], dtype=np.int64),
        saved=np.array([[c.saved_bytes for c in own] for own in padded], dtype=np.int64),
        keep=np.array([[c.keep_bytes for c in own] for own in padded], dtype=np.int64),
        back=np.array([[c.back_bytes for c in own] for own in padded], dtype=np.int64),
        options=np.array([len(own) for own in choices], dtype=np.int64),
        step=step,
        sweep=sweep,
        leaf_bytes=np.array(leaf_bytes, dtype=np.int64),
        leaf_s=np.array(leaf_s, dtype=np.float64),
    )


class _Choice(NamedTuple):
    """``F_all`` and ``B`` of a stage with one of its options; see ``Numbers``."""

    saved_bytes: int
    keep_bytes: int
    back_bytes: int
    backward_s: float


def _choices(chain: Chain, index: int, stage: StageCosts) -> list[_Choice]:
    whole = SaveOption(
        chain.stages[index].saved, 0.0, stage.keep_extra_bytes, stage.backward_extra_bytes
    )
    found = []
    for option in (whole, *stage.options):
        saved = chain.nbytes(chain.added(index, option.kept))
        found.append(
            _Choice(
                saved,
                saved + option.keep_extra_bytes,
                stage.gradient_bytes + saved + option.backward_extra_bytes,
                stage.backward_s + option.recompute_s,
            )
        )
    return found


def without_saved_sets(numbers: Numbers) -> Numbers:
    """The same chain where no saved set can be held while another stage runs."""
    never = np.full_like(numbers.saved, 2 * MOST_BYTES)
    return numbers._replace(saved=never, keep=never, back=never)


def _check_total(chain: Chain, costs: Costs) -> None:
    most = max(
        2 * stage.gradient_bytes
        + stage.forward_extra_bytes
        + max(stage.keep_extra_bytes, *(o.keep_extra_bytes for o in stage.options), 0)
        + max(stage.backward_extra_bytes, *(o.backward_extra_bytes for o in stage.options), 0)
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
