"""The sequences of least memory, in bytes: what is left when slots are too coarse."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from fxremat.solvers.kernels import all_bytes, ck_bytes
from fxremat.solvers.numbers import Floats, Ints, Numbers


class LeastRuns(NamedTuple):
    """One sequence of each interval ``(s, t)`` after the turn: the least memory, then work.

    Attributes:
        memory: ``(L, L)``, bytes beside boundary ``s``.
        work: ``(L, L)``, seconds.
        lag: ``(L, L)``, see ``intervals``.
        choice: ``(L, L)``, ``s`` for ``F_all s``, else the cut.
    """

    memory: Ints
    work: Floats
    lag: Floats
    choice: Ints


@njit(cache=True, nogil=True)
def _fill(numbers: Numbers, sweep_lag: Floats, byte_s: float, runs: LeastRuns) -> None:
    n = numbers
    count = n.backward_s.size
    for s in range(count - 1, -1, -1):
        runs.memory[s, s] = n.leaf_bytes[s, 0]
        runs.work[s, s] = n.leaf_s[s, 0]
        runs.lag[s, s] = n.leaf_s[s, 0] + n.leaf_bytes[s, 0] * byte_s
        runs.choice[s, s] = s
        for t in range(s + 1, count):
            forward_s = n.prefix_s[s + 1] - n.prefix_s[s]
            best = max(all_bytes(n, s, t), n.saved[s] + runs.memory[s + 1, t])
            work = forward_s + runs.work[s + 1, t] + n.backward_s[s]
            lag = forward_s + (n.gradient[t] + n.keep[s]) * byte_s
            lag = max(lag, forward_s + runs.lag[s + 1, t] + n.saved[s] * byte_s)
            lag = max(lag, work + n.back[s] * byte_s)
            choice = s
            for cut in range(s + 1, t + 1):
                needs = max(ck_bytes(n, s, cut, t), runs.memory[s, cut - 1])
                needs = max(needs, n.step[s, cut] + runs.memory[cut, t])
                sweep_s = n.prefix_s[cut] - n.prefix_s[s]
                before = sweep_s + runs.work[cut, t]
                takes = before + runs.work[s, cut - 1]
                if needs < best or (needs == best and takes < work):
                    best = needs
                    work = takes
                    lag = sweep_lag[s, cut] + n.gradient[t] * byte_s
                    lag = max(lag, sweep_s + runs.lag[cut, t] + n.step[s, cut] * byte_s)
                    lag = max(lag, before + runs.lag[s, cut - 1])
                    choice = cut
            runs.memory[s, t] = best
            runs.work[s, t] = work
            runs.lag[s, t] = lag
            runs.choice[s, t] = choice


def least_runs(numbers: Numbers, sweep_lag: Floats, byte_s: float) -> LeastRuns:
    """Fill the table. ``O(L³)``."""
    count = len(numbers.backward_s)
    runs = LeastRuns(
        np.zeros((count, count), dtype=np.int64),
        np.zeros((count, count)),
        np.zeros((count, count)),
        np.zeros((count, count), dtype=np.int64),
    )
    _fill(numbers, sweep_lag, byte_s, runs)
    return runs
