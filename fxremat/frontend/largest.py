"""The largest size that fits: the first guess from how bytes grow, the answer by trying."""

from __future__ import annotations

from collections.abc import Callable

MOST_GUESSED = 12
"""Sizes whose bytes are asked for before any is tried."""


def largest_fitting(
    roughly_at: Callable[[int], int],
    least_at: Callable[[int], int],
    *,
    first: int,
    budget_bytes: int,
    most: int,
) -> int | None:
    """The largest size that fits; ``None`` where not even 1 does.

    Args:
        roughly_at: least bytes at a size, roughly, growing with it.
        least_at: least bytes at a size; what fits does so at every smaller size, too.
        first: where to begin.
        budget_bytes: what must not be exceeded.
        most: the largest size that may be answered.

    Ensures: the answer fits, and one more does not, or is above ``most``.
    """
    low, high = 0, most + 1
    up = down = 0
    share = 1.0  # of what was guessed of a size, that it takes
    known: dict[int, int] = {}  # what sizes take, by the same schedules

    def corrected(size: int) -> int:
        return int(share * roughly_at(size))

    while high - low > 1:
        middle = (low + high) // 2 if high <= most else most
        if len(known) > 1:
            guess = _crossing(known, budget_bytes, most)
        else:
            guess = _guessed(
                corrected, first=min(low or first, most), budget_bytes=budget_bytes, most=most
            )
        if guess <= low:
            guess = min(low + _step(up), middle)
            up += 1
        elif guess >= high:
            guess = max(high - _step(down), middle)
            down += 1
        else:
            up = down = 0
        beside = guess + 1 if guess < most else max(1, guess - 1)
        expected, before = roughly_at(guess), roughly_at(beside)
        least_bytes = least_at(guess)
        if roughly_at(beside) == before:
            share = least_bytes / max(expected, 1)
        else:  # trying has shown how to do with less
            known.clear()
        known[guess] = least_bytes
        low, high = (guess, high) if least_bytes <= budget_bytes else (low, guess)
    return low or None


def _step(tries: int) -> int:
    """How far to go from a bound that guesses do not move: 1, 1, 2, 4, …"""
    return 1 << max(0, tries - 1)


def _guessed(bytes_at: Callable[[int], int], *, first: int, budget_bytes: int, most: int) -> int:
    """The largest size within a budget, if bytes grow as they should; at least 1.

    They are nearly linear, so the next size asked for is where the line through two known ones
    meets the budget; in the end the middle, where they are not.
    """
    known = {first: bytes_at(first)}
    size = 2 * first if known[first] <= budget_bytes else first // 2
    while len(known) < MOST_GUESSED:
        size = min(max(size, 1), most)
        if size in known:
            break
        known[size] = bytes_at(size)
        low = max((n for n in known if known[n] <= budget_bytes), default=0)
        high = min((n for n in known if known[n] > budget_bytes and n > low), default=most + 1)
        if high - low <= 1:
            break
        size = _crossing(known, budget_bytes, most)
        if len(known) > MOST_GUESSED // 2 and low and high <= most:
            size = (low + high) // 2
        size = min(max(size, low + 1), high - 1)
    return max((n for n in known if known[n] <= budget_bytes), default=1)


def _crossing(known: dict[int, int], budget_bytes: int, most: int) -> int:
    """Where the line through the two sizes nearest to the budget meets it."""
    one, other = sorted(known, key=lambda n: abs(known[n] - budget_bytes))[:2]
    grown = known[other] - known[one]
    if grown * (other - one) <= 0:
        return most
    return one + (budget_bytes - known[one]) * (other - one) // grown
