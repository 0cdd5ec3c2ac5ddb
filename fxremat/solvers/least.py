"""Least memory of every interval of a chain, in bytes, compiled by numba.

What is left when slots are too coarse.
Eq. (1) and (2) of ``rotor`` with the greatest of the parts' memory in place of the sum of times.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from fxremat.solvers.kernels import all_bytes, at_once_s, ck_bytes, option_bytes
from fxremat.solvers.numbers import Floats, Ints, Numbers


class Least(NamedTuple):
    """Least memory of every interval.

    Attributes:
        numbers: the chain.
        memory: ``(L, L)``, bytes beside boundary ``s``.
        seconds: ``(L, L)``, time of a schedule that needs no more.
    """

    numbers: Numbers
    memory: Ints
    seconds: Floats

    @staticmethod
    def of(numbers: Numbers) -> Least:
        """Of all intervals. ``O(L³)``."""
        count = len(numbers.backward_s)
        shape = count, count
        least = Least(numbers, np.zeros(shape, dtype=np.int64), np.zeros(shape))
        _fill(least)
        return least

    @property
    def root_bytes(self) -> int:
        """Of the whole chain."""
        return int(self.memory[0, -1])


@njit(cache=True, nogil=True)
def _fill(least: Least) -> None:
    """Fill ``memory`` and ``seconds``."""
    n = least.numbers
    memory = least.memory
    seconds = least.seconds
    count = n.backward_s.size
    for s in range(count - 1, -1, -1):
        way = 0 if n.leaf_bytes[s, 0] <= n.leaf_bytes[s, 1] else 1
        memory[s, s] = n.leaf_bytes[s, way]
        seconds[s, s] = n.leaf_s[s, way]
        if s == count - 1:
            for k in range(n.option_s.shape[1]):
                needs = option_bytes(n, s, s, k)
                takes = at_once_s(n, s, k)
                if needs < memory[s, s] and takes < np.inf:
                    memory[s, s] = needs
                    seconds[s, s] = takes
        for t in range(s + 1, count):
            forward_s = n.prefix_s[s + 1] - n.prefix_s[s]
            best = max(all_bytes(n, s, t), n.saved[s] + memory[s + 1, t])
            best_s = forward_s + seconds[s + 1, t] + n.backward_s[s]
            for k in range(n.option_s.shape[1]):
                needs = max(option_bytes(n, s, t, k), n.option_saved[s, k] + memory[s + 1, t])
                takes = forward_s + seconds[s + 1, t] + n.option_s[s, k]
                if takes < np.inf and (needs < best or (needs == best and takes < best_s)):
                    best = needs
                    best_s = takes
            for cut in range(s + 1, t + 1):
                needs = max(ck_bytes(n, s, cut, t), memory[s, cut - 1])
                needs = max(needs, n.step[s, cut] + memory[cut, t])
                if needs > best:
                    continue
                forward_s = n.prefix_s[cut] - n.prefix_s[s]
                takes = forward_s + seconds[cut, t] + seconds[s, cut - 1]
                if needs < best or takes < best_s:
                    best = needs
                    best_s = takes
            memory[s, t] = best
            seconds[s, t] = best_s


@njit(cache=True, nogil=True)
def choose_least(least: Least, s: int, t: int, available: int) -> int:
    """Of the choices that fit ``available`` bytes, the one with the least ``seconds``.

    Returns:
        As ``choose``.
    """
    n = least.numbers
    memory = least.memory
    seconds = least.seconds
    best = -1
    best_s = np.inf
    if s == t:
        for way in range(2):
            if available >= n.leaf_bytes[s, way] and n.leaf_s[s, way] < best_s:
                best = s + way
                best_s = n.leaf_s[s, way]
        if s == n.backward_s.size - 1:
            for k in range(n.option_s.shape[1]):
                fits = available >= option_bytes(n, s, s, k)
                if fits and at_once_s(n, s, k) < best_s:
                    best = -2 - k
                    best_s = at_once_s(n, s, k)
        return best
    if available >= max(all_bytes(n, s, t), n.saved[s] + memory[s + 1, t]):
        best = s
        best_s = n.prefix_s[s + 1] - n.prefix_s[s] + seconds[s + 1, t] + n.backward_s[s]
    for k in range(n.option_s.shape[1]):
        needs = max(option_bytes(n, s, t, k), n.option_saved[s, k] + memory[s + 1, t])
        takes = n.prefix_s[s + 1] - n.prefix_s[s] + seconds[s + 1, t] + n.option_s[s, k]
        if available >= needs and takes < best_s:
            best = -2 - k
            best_s = takes
    for cut in range(s + 1, t + 1):
        needs = max(ck_bytes(n, s, cut, t), memory[s, cut - 1])
        if available < max(needs, n.step[s, cut] + memory[cut, t]):
            continue
        takes = n.prefix_s[cut] - n.prefix_s[s] + seconds[cut, t] + seconds[s, cut - 1]
        if takes < best_s:
            best = cut
            best_s = takes
    return best
