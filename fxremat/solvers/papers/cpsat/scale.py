"""Seconds and bytes as integers that CP-SAT can add without overflow.

CP-SAT computes with 64-bit integers, and requires sums well below ``2**63``.

Seconds. Every float is a multiple of a power of two. When all durations of a problem are multiples
of one tick, and ``total_s`` is at most ``2**50`` ticks, the scale is exact and so is the optimum.
Otherwise a tick is a power of two with ``total_s`` between ``2**49`` and ``2**50`` ticks, and
durations are rounded to the nearest tick. The error of a sum of ``n`` durations is at most ``n /
2`` ticks, which is ``n total_s / 2**50``: 8 microseconds for ten hours and 500 operations.
``Ticks.exact`` says which case holds.

Bytes. Sizes are divided by their greatest common divisor and budgets rounded down, which is exact.
Sums must stay below ``2**61`` (``numbers.MOST_BYTES``). Where they exceed ``2**31``, CP-SAT's
presolve is disabled: in version 9.15 it adds the coefficients of conditional constraints in 32
bits, and then reports feasible models as infeasible (google/or-tools#5293).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

MOST_TICKS = 1 << 50
"""Upper bound of any sum of durations."""

MOST_PRESOLVED = (1 << 31) - 1
"""Upper bound of the sum of coefficients in a conditional constraint that presolve may process."""


@dataclass(frozen=True, slots=True)
class Ticks:
    """An integer unit of time.

    Attributes:
        per_s: ticks per second.
        exact: whether all durations that it was made for are multiples of it.
    """

    per_s: Fraction
    exact: bool

    @staticmethod
    def of(durations_s: Iterable[float | Fraction], *, total_s: float | Fraction) -> Ticks:
        """Return the greatest unit that all durations are multiples of, or a coarser one.

        It is coarser, and durations are rounded, where ``total_s`` would be too many ticks.

        Args:
            durations_s: durations in seconds, finite and at least 0.
            total_s: upper bound in seconds of any sum that is computed.
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
        """Return the number of ticks that ``seconds`` are, rounded to the nearest."""
        return round(Fraction(seconds) * self.per_s)

    def at_least(self, ticks: float, *, durations: int) -> float:
        """Return a lower bound in seconds on the sum of durations whose ticks add up to ``ticks``.

        Args:
            ticks: sum of the ticks.
            durations: number of durations.
        """
        return max(0.0, self.seconds(ticks if self.exact else ticks - durations / 2))

    def seconds(self, ticks: float) -> float:
        """Return the seconds that a number of ticks are."""
        return float(Fraction(ticks) / self.per_s)


def byte_unit(sizes: Iterable[int]) -> int:
    """Return the greatest common divisor of ``sizes``, at least 1."""
    return math.gcd(*sizes) or 1
