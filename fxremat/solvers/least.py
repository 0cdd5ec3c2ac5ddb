"""Least memory of every interval of a chain in bytes, for budgets that slots are too coarse for.

These are Equations (1) and (2) of ``rotor`` with the maximum of the parts' memory in place of the
sum of times, compiled by numba. Choices are numbers as in ``kernels``.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np

from fxremat.jit import entry, helper
from fxremat.solvers.kernels import NO_CHOICE, all_bytes, ck_bytes, leaf_choice
from fxremat.solvers.numbers import Floats, Ints, Numbers

ANY_BYTES = cast(int, np.int64(-1))  # a literal would make numba compile its callers again
"""Number of available bytes that asks for the choice of least memory."""

_MOST = np.iinfo(np.int64).max


class Least(NamedTuple):
    """Least memory of every interval ``(s, t)`` of a chain.

    Attributes:
        numbers: the chain.
        memory: ``(L, L)``, bytes in addition to boundary ``s``.
        seconds: ``(L, L)``, time of a schedule that needs no more memory.
        choice: ``(L, L)``, the first choice of that schedule, numbered as in ``kernels``.
    """

    numbers: Numbers
    memory: Ints
    seconds: Floats
    choice: Ints

    @staticmethod
    def of(numbers: Numbers) -> Least:
        """Return the least memory of all intervals of a chain. ``O(L³)``."""
        shape = numbers.gradient.size, numbers.gradient.size
        memory, choice = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        least = Least(numbers, memory, np.zeros(shape), choice)
        _fill(least)
        return least

    @property
    def root_bytes(self) -> int:
        """Least memory of the whole chain in bytes, in addition to boundary 0."""
        return int(self.memory[0, -1])


@helper
def is_better(needs: int, takes: float, limit: int, best_s: float, tightens: bool) -> bool:
    """Return whether ``needs`` bytes and ``takes`` seconds are better than the best so far.

    Args:
        needs, takes: bytes and seconds of the choice; infinite seconds are never better.
        limit: bytes that it may need; if ``tightens``, the bytes of the best so far.
        best_s: seconds of the best so far.
        tightens: whether less memory is better than less time.
    """
    if takes == np.inf:
        return False
    return (tightens and needs < limit) or (needs <= limit and takes < best_s)


@entry
def choose_least(least: Least, s: int, t: int, available: int) -> tuple[int, int, float]:
    """Choose the fastest way to run interval ``(s, t)`` within ``available`` bytes.

    For ``ANY_BYTES``, choose a way of least memory, and of these the fastest.

    Returns:
        The choice as numbered in ``kernels``, ``NO_CHOICE`` if none fits; its bytes in addition to
        boundary ``s``; and its seconds.
    """
    n, memory, seconds = least.numbers, least.memory, least.seconds
    tightens = available == ANY_BYTES
    limit = _MOST if tightens else available
    best, best_bytes, best_s = NO_CHOICE, limit, np.inf
    if s == t:
        for way in range(n.leaf_s.shape[1]):
            needs, takes = n.leaf_bytes[s, way], n.leaf_s[s, way]
            # Of ways of equal memory, the first is chosen.
            if is_better(needs, takes, limit, -np.inf if tightens else best_s, tightens):
                best, best_bytes, best_s = leaf_choice(s, way), needs, takes
                limit = needs if tightens else limit
        return best, best_bytes, best_s
    for k in range(n.backward_s.shape[1]):
        needs = max(all_bytes(n, s, t, k), n.saved[s, k] + memory[s + 1, t])
        takes = n.prefix_s[s + 1] - n.prefix_s[s] + seconds[s + 1, t] + n.backward_s[s, k]
        if is_better(needs, takes, limit, best_s, tightens):
            best, best_bytes, best_s = -1 - k if k else s, needs, takes
            limit = needs if tightens else limit
    for cut in range(s + 1, t + 1):
        needs = max(ck_bytes(n, s, cut, t), memory[s, cut - 1])
        needs = max(needs, n.step[s, cut] + memory[cut, t])
        if needs > limit:
            continue
        takes = n.prefix_s[cut] - n.prefix_s[s] + seconds[cut, t] + seconds[s, cut - 1]
        if is_better(needs, takes, limit, best_s, tightens):
            best, best_bytes, best_s = cut, needs, takes
            limit = needs if tightens else limit
    return best, best_bytes, best_s


@entry
def _fill(least: Least) -> None:
    count = least.numbers.gradient.size
    for s in range(count - 1, -1, -1):
        for t in range(s, count):
            choice, needs, takes = choose_least(least, s, t, ANY_BYTES)
            least.choice[s, t] = choice
            least.memory[s, t] = needs
            least.seconds[s, t] = takes
