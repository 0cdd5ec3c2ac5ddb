"""Least memory of every interval of a chain, in bytes, compiled by numba.

What is left when slots are too coarse.
Eq. (1) and (2) of ``rotor`` with the greatest of the parts' memory in place of the sum of times.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from fxremat.solvers.kernels import BACK, KEEP, SAVED, choice_needs
from fxremat.solvers.numbers import Floats, Ints, Numbers, choices_of


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
        n, count = numbers, len(numbers.backward_s)
        least = Least(n, np.zeros((count, count), dtype=np.int64), np.zeros((count, count)))
        choices = choices_of(n)
        for s in range(count):
            ways = _leaf_ways(n, s)
            least.memory[s, s], least.seconds[s, s] = min((way[1:] for way in ways), key=_first)
        _fill(n.prefix_s, *choices, n.gradient, n.step, n.sweep, least.memory, least.seconds)
        return least

    @property
    def root_bytes(self) -> int:
        """Of the whole chain."""
        return int(self.memory[0, -1])


def _first(way: tuple[int, float]) -> int:
    """Bytes of a way: of those that need as much the first is taken."""
    return way[0]


def _leaf_ways(n: Numbers, s: int) -> list[tuple[int, int, float]]:
    """Choices for the interval ``(s, s)``, each with its bytes and seconds."""
    ways = [(s + way, int(n.leaf_bytes[s, way]), float(n.leaf_s[s, way])) for way in range(2)]
    if s == n.backward_s.size - 1:
        forward_s = n.prefix_s[s + 1] - n.prefix_s[s]
        for k, takes in enumerate(forward_s + n.option_s[s]):
            needs = max(n.gradient[s] + n.option_keep[s, k], n.option_back[s, k])
            if takes < np.inf:
                ways.append((-2 - k, int(needs), float(takes)))
    return ways


@njit(cache=True, nogil=True)
def _fill(
    prefix_s: Floats,
    choice_s: Floats,
    choice_bytes: Ints,
    gradient: Ints,
    step: Ints,
    sweep: Ints,
    memory: Ints,
    seconds: Floats,
) -> None:
    """Fill ``memory`` and ``seconds``, of which the diagonal is filled."""
    count = gradient.size
    for s in range(count - 2, -1, -1):
        for t in range(s + 1, count):
            best, best_s = 0, np.inf
            for k in range(choice_s.shape[1]):
                kept = choice_bytes[SAVED, s, k] + memory[s + 1, t]
                needs = max(choice_needs(gradient, choice_bytes, s, t, k), kept)
                takes = prefix_s[s + 1] - prefix_s[s] + seconds[s + 1, t] + choice_s[s, k]
                less = needs < best or (needs == best and takes < best_s)
                if k == 0 or (takes < np.inf and less):
                    best = needs
                    best_s = takes
            for cut in range(s + 1, t + 1):
                needs = max(gradient[t] + sweep[s, cut], memory[s, cut - 1])
                needs = max(needs, step[s, cut] + memory[cut, t])
                if needs > best:
                    continue
                takes = prefix_s[cut] - prefix_s[s] + seconds[cut, t] + seconds[s, cut - 1]
                if needs < best or takes < best_s:
                    best = needs
                    best_s = takes
            memory[s, t] = best
            seconds[s, t] = best_s


def choose_least(least: Least, s: int, t: int, available: int) -> int:
    """Of the choices that fit ``available`` bytes, the one with the least ``seconds``.

    Returns:
        As ``choices.choose``.
    """
    n, memory, seconds = least.numbers, least.memory, least.seconds
    if s == t:
        ways = _leaf_ways(n, s)
    else:
        choice_s, choice_bytes = _choices(n, s)
        needs = np.maximum(n.gradient[t] + choice_bytes[KEEP], choice_bytes[BACK])
        needs = np.maximum(needs, choice_bytes[SAVED] + memory[s + 1, t])
        takes = n.prefix_s[s + 1] - n.prefix_s[s] + seconds[s + 1, t] + choice_s
        names = [s, *range(-2, -1 - choice_s.size, -1)]
        ways = list(zip(names, needs.tolist(), takes.tolist(), strict=True))
        cuts, before = slice(s + 1, t + 1), slice(s, t)
        needs = np.maximum(n.gradient[t] + n.sweep[s, cuts], memory[s, before])
        needs = np.maximum(needs, n.step[s, cuts] + memory[cuts, t])
        takes = n.prefix_s[cuts] - n.prefix_s[s] + seconds[cuts, t] + seconds[s, before]
        ways += zip(range(s + 1, t + 1), needs.tolist(), takes.tolist(), strict=True)
    best, best_s = -1, np.inf
    for choice, needs_bytes, takes_s in ways:
        if available >= needs_bytes and takes_s < best_s:
            best, best_s = choice, takes_s
    return best


def _choices(n: Numbers, s: int) -> tuple[Floats, Ints]:
    """``choices_of`` one stage."""
    whole, options = (n.saved, n.keep, n.back), (n.option_saved, n.option_keep, n.option_back)
    nbytes = [np.append(a[s], b[s]) for a, b in zip(whole, options, strict=True)]
    return np.append(n.backward_s[s], n.option_s[s]), np.array(nbytes)
