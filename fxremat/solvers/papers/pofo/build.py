"""Converts a problem to the arrays of the compiled loops."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fxremat.ir import Chain, Problem
from fxremat.solvers.least import Least
from fxremat.solvers.numbers import MOST_BYTES, Floats, Ints, Numbers, forward_peaks, numbers_of
from fxremat.solvers.papers.pofo.intervals import Fronts, fill_fronts, fill_least_lags
from fxremat.solvers.papers.pofo.sweep import Sweep
from fxremat.solvers.quantize import quantum_bytes, slots_down
from fxremat.solvers.threads import Crew

_Number = TypeVar("_Number", np.int64, np.float64)

_ENTRIES = 1 << 20
"""Number of entries of all fronts, which determines their width within bounds."""

_SHARED_STAGES = 16
"""Number of stages from which on threads share the work."""

_MOST_THREADS = 8
"""Maximum number of threads; more help little."""


def build(problem: Problem, *, slots: int) -> Sweep:
    """Return a problem as the arrays that the search works on, without its labels.

    Labels are the partial plans of a search.

    ``O(L³ slots width²)`` time, less where fronts are short.

    Raises:
        ValueError: the sizes are too large to add up.
    """
    numbers = numbers_of(problem.chain, problem.costs)
    budget = available(problem)
    link = problem.link
    out_s = 1.0 / link.offload_bytes_per_s if link else 0.0
    back_s = 1.0 / link.prefetch_bytes_per_s if link else 0.0
    peaks = forward_peaks(numbers.step, problem.costs.stages)
    sweep_lag, out_lag, rest = _lags(numbers, peaks, out_s=out_s, back_s=back_s)
    moves = movable_bytes(problem.chain, numbers)
    if link is None:
        moves = np.full_like(moves, -1)
    inner = _without_last(numbers)
    last = problem.costs.stages[-1]
    rebuild = last.gradient_bytes + last.rebuild_bytes
    forward_only = last.gradient_bytes + int(peaks[-1, -1])
    return Sweep(
        numbers=numbers,
        fronts=_filled_fronts(inner, sweep_lag, moves, budget=budget, byte_s=back_s, slots=slots),
        budget=budget,
        input_bytes=problem.chain.nbytes(problem.chain.boundaries[0]),
        out_s=out_s,
        back_s=back_s,
        moves=moves,
        rest=rest,
        peaks=peaks,
        out_lag=out_lag,
        last_bytes=np.array(
            [
                [last.gradient_bytes + numbers.keep[-1, 0], numbers.back[-1, 0]],
                [forward_only, rebuild],
            ],
            dtype=np.int64,
        ),
        last_s=np.array([last.backward_s, last.rebuild_s + last.backward_s]),
    )


def available(problem: Problem) -> int:
    """Return the bytes of the budget that are left after ``fixed_bytes``."""
    return max(0, min(problem.budget_bytes - problem.costs.fixed_bytes, MOST_BYTES))


def movable_bytes(chain: Chain, numbers: Numbers) -> Ints:
    """Return the bytes of each stage's input that may be offloaded, -1 where it has to stay.

    They are ``Sweep.moves``. Only what shares no storage with another boundary may move: such a
    value is disjoint from everything else that is held, so moving it frees all of it.
    """
    count = len(chain)
    boundaries = [set(ids) for ids in chain.boundaries]
    holders = Counter(storage for ids in boundaries for storage in ids)
    moves = np.full((count, 2), -1, dtype=np.int64)
    for i in range(count):
        if all(holders[storage] == 1 for storage in boundaries[i]):
            moves[i, 0] = chain.nbytes(boundaries[i])
            if i:
                moves[i, 1] = numbers.saved[i - 1, 0]
    return moves


def _lags(
    numbers: Numbers, peaks: Ints, *, out_s: float, back_s: float
) -> tuple[Floats, Floats, Ints]:
    """Return the arrays ``Fronts.sweep_lag``, ``Sweep.out_lag`` and ``Sweep.rest``.

    Args:
        peaks: ``Sweep.peaks``.
        out_s, back_s: seconds to offload and to prefetch a byte.
    """
    count = numbers.gradient.size
    prefix = numbers.prefix_s
    sweep_lag = np.zeros((count, count + 1))
    out_lag = np.zeros((count, count + 1))
    rest = np.zeros((count, count + 1), dtype=np.int64)
    for s in range(count):
        ends = prefix[s + 1 :] - prefix[s] + peaks[s, s:] * back_s
        sweep_lag[s, s + 1 :] = np.maximum.accumulate(ends)
        begins = peaks[s, s:] * out_s - (prefix[s:count] - prefix[s])
        out_lag[s, s + 1 :] = np.maximum.accumulate(begins)
        rest[s, s + 2 :] = np.maximum.accumulate(peaks[s, s + 1 :])
    return sweep_lag, out_lag, rest


def _without_last(numbers: Numbers) -> Numbers:
    """Return a chain's arrays without its last stage, which never reruns after the loss point.

    Save options are left out as well.
    """
    n, count = numbers, numbers.gradient.size - 1
    return Numbers(
        prefix_s=n.prefix_s[: count + 1],
        gradient=n.gradient[:count],
        backward_s=_contiguous_corner(n.backward_s, count, 1),
        saved=_contiguous_corner(n.saved, count, 1),
        keep=_contiguous_corner(n.keep, count, 1),
        back=_contiguous_corner(n.back, count, 1),
        step=_contiguous_corner(n.step, count, count + 1),
        sweep=_contiguous_corner(n.sweep, count, count + 1),
        leaf_bytes=_contiguous_corner(n.leaf_bytes, count, 2),
        leaf_s=_contiguous_corner(n.leaf_s, count, 2),
    )


def _contiguous_corner(array: NDArray[_Number], rows: int, columns: int) -> NDArray[_Number]:
    return np.ascontiguousarray(array[:rows, :columns])


def _filled_fronts(
    numbers: Numbers,
    sweep_lag: Floats,
    moves: Ints,
    *,
    budget: int,
    byte_s: float,
    slots: int,
) -> Fronts:
    count = numbers.gradient.size
    quantum = quantum_bytes(budget, slots=slots)
    used = slots_down(budget, quantum=quantum)
    rows = count * (count + 1) // 2
    width = min(64, max(8, _ENTRIES // max(1, rows * (used + 1))))
    missing = np.cumsum([0, *np.maximum(moves.max(axis=1), 0).tolist()])[:count]
    fronts = Fronts(
        numbers,
        quantum=quantum,
        byte_s=byte_s,
        sweep_lag=_contiguous_corner(sweep_lag, count, count + 1),
        most_s=missing * byte_s,
        work=np.empty((rows, used + 1, width)),
        lag=np.empty((rows, used + 1, width)),
        size=np.zeros((rows, used + 1), dtype=np.int64),
        lost=np.zeros(rows, dtype=np.int64),
        least=Least.of(numbers),
        least_lag=np.zeros((count, count)),
    )
    fill_least_lags(fronts)
    with crew_of(count) as crew:
        for distance in range(count):
            share = min(crew.size, count - distance)
            crew.run([partial(fill_fronts, fronts, distance, k, share) for k in range(share)])
    return fronts


def crew_of(stages: int) -> Crew:
    """Return threads for a chain of this many stages.

    A short chain has none, since they would cost more than they save.
    """
    return Crew(most=_MOST_THREADS if stages >= _SHARED_STAGES else 1)
