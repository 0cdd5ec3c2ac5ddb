"""Seconds and bytes as integers that CP-SAT can add without overflow.

CP-SAT computes with 64-bit integers and wants sums well below ``2**63``.

Seconds. Every float is a multiple of a power of two. When all durations of a problem are
multiples of one tick, and ``total_s`` is at most ``2**50`` ticks, the scale is exact and so
is the optimum found. Otherwise a tick is a power of two with ``total_s`` between ``2**49`` and
``2**50`` ticks, and durations are rounded to the nearest: a sum of ``n`` durations is off by
at most ``n / 2`` ticks, that is ``n total_s / 2**50``; for ten hours and 500 operations
8 microseconds. ``Ticks.exact`` says which.

Bytes. Sizes are divided by their greatest common divisor, budgets rounded down: exact. Sums
must stay below ``2**61`` (``numbers.MOST_BYTES``). Where they pass ``2**31``, CP-SAT's
presolve is left out: that of 9.15 adds up the coefficients of conditional constraints in 32
bits and then calls feasible models infeasible (google/or-tools#5293).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

MOST_TICKS = 1 << 50
"""Of any sum of durations."""

MOST_PRESOLVED = (1 << 31) - 1
"""Of any sum of coefficients in a conditional constraint that presolve may see."""


@dataclass(frozen=True, slots=True)
class Ticks:
    """An integer unit of time.

    Attributes:
        per_s: ticks in a second.
        exact: all durations it was made for are multiples of it.
    """

    per_s: Fraction
    exact: bool

    @staticmethod
    def of(durations_s: Iterable[float | Fraction], *, total_s: float | Fraction) -> Ticks:
        """The unit for these durations.

        Args:
            durations_s: finite and at least 0.
            total_s: no sum that matters is greater.
        """
        fractions = [Fraction(seconds) for seconds in durations_s if seconds > 0]
        if not fractions:
            return Ticks(Fraction(1), True)
        most = max(Fraction(total_s), *fractions)
        denominator = math.lcm(*(f.denominator for f in fractions))
        common = math.gcd(*(int(f * denominator) for f in fractions))
        per_s = Fraction(denominator, common)
        if most * per_s <= MOST_TICKS:
            return Ticks(per_s, True)
        exponent = math.floor(math.log2(MOST_TICKS)) - math.frexp(float(most))[1]
        return Ticks(Fraction(2) ** exponent, False)

    def count(self, seconds: float | Fraction) -> int:
        """Ticks in a duration, to the nearest."""
        return round(Fraction(seconds) * self.per_s)

    def at_least(self, ticks: float, *, durations: int) -> float:
        """Seconds that so many durations take at least if their ticks add up to this."""
        return max(0.0, self.seconds(ticks if self.exact else ticks - durations / 2))

    def seconds(self, ticks: float) -> float:
        """Seconds of a number of ticks."""
        return float(Fraction(ticks) / self.per_s)


def byte_unit(sizes: Iterable[int]) -> int:
    """The greatest common divisor of ``sizes``, at least 1."""
    return math.gcd(*sizes) or 1
