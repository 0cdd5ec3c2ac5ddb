"""Model of interruptible transfers, as amounts at starts and ends of computations; see ``offload``.

An amount is a number of grains, and a tick moves a whole number of them in either direction. With
decisions fixed and one bandwidth, the rest is a system of differences with integer right sides,
half-integer ones where both directions share the link. So a tick is half of the greatest common
divisor of all durations, and the result is optimal if the scale is exact (``Grains``). Otherwise
sizes are rounded up to multiples of a ``2**20``-th of their sum, and the choice of what to offload
is optimal up to that. The final schedule is computed from that choice with exact sizes and times.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from fxremat.ir import Solved
from fxremat.solvers.papers.cpsat.scale import MOST_PRESOLVED, MOST_TICKS, Ticks
from fxremat.solvers.papers.cpsat.search import new_model
from fxremat.solvers.papers.offload.line import OffloadChain
from fxremat.solvers.papers.offload.phases import schedule_offloads

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpSolver, IntVar, LinearExpr

_COARSE = 1 << 20
"""Number of units in the sum of sizes, and the square root of the number of ticks in a step, where
the scale is not exact."""


@dataclass(frozen=True, slots=True)
class Grains:
    """A unit of time, the tick, and one of bytes, the grain, of which a tick moves a whole number.

    Attributes:
        ticks: the unit of time.
        nbytes: bytes of a grain.
        out, back: grains that a tick moves to the host and from the host.
    """

    ticks: Ticks
    nbytes: Fraction
    out: int
    back: int

    @staticmethod
    def of(line: OffloadChain, seconds: Sequence[float], sizes: Sequence[int]) -> Grains:
        """Return units that ``seconds`` and ``sizes`` are multiples of, or coarse ones.

        They are coarse where sums would be too large.
        """
        rates = (Fraction(line.offload_rate), Fraction(line.prefetch_rate))
        common = math.gcd(*sizes) or 1
        moves = [common / rate for rate in rates]
        total_s = sum(map(Fraction, seconds)) + sum(line.sizes) * (1 / rates[0] + 1 / rates[1])
        half = Ticks.of([*map(Fraction, seconds), *moves], total_s=2 * total_s)
        ticks = Ticks(2 * half.per_s, half.exact)
        per_unit = [int(move * ticks.per_s) for move in moves]
        if ticks.exact:
            grains = math.lcm(*per_unit)
            sums = max(sum(sizes) // common, math.ceil(ticks.per_s * total_s) // min(per_unit))
            if sums * grains <= MOST_TICKS:
                return Grains._from_units(ticks, Fraction(common), per_unit)
        unit = Fraction(-(-sum(line.sizes) // _COARSE) or 1)
        per_s = 64 * min(rates) / unit
        if per_s * total_s > _COARSE**2:
            per_s = _COARSE**2 / total_s
        per_unit = [max(1, round(unit / rate * per_s)) for rate in rates]
        return Grains._from_units(Ticks(per_s, False), unit, per_unit)

    @staticmethod
    def _from_units(ticks: Ticks, unit_bytes: Fraction, per_unit: Sequence[int]) -> Grains:
        grains = math.lcm(*per_unit)
        return Grains(ticks, unit_bytes / grains, *(grains // each for each in per_unit))

    def up(self, nbytes: int) -> int:
        """Return the number of grains that ``nbytes`` take, rounded up."""
        return math.ceil(nbytes / self.nbytes)


class FluidModel:
    """CP-SAT model of the shortest step with transfers that may be interrupted.

    Transfers are ordered, and no offload follows a prefetch.
    """

    def __init__(self, line: OffloadChain) -> None:
        self.cp = model = new_model()
        self.line = line
        self.count = len(line)
        # For each start, and before and after each end: how much must be on the host only, and
        # how many activations may be.
        needs = [
            (2 * c + late, everything - line.budget, c + after)
            for c in range(2 * self.count)
            for late, everything, after in (
                (0, line.running[c], 0),
                (1, line.running[c], 0),
                (1, line.after[c], 1),
            )
            if everything > line.budget and (c + 1 < 2 * self.count or not after)
        ]
        seconds = [*line.forward_s, *reversed(line.backward_s)]
        self.moved = [i for i in line.movable if line.sizes[i]]
        sizes = [line.sizes[i] for i in self.moved] + [need for _, need, _ in needs]
        self.grains = Grains.of(line, seconds, sizes or [1])
        self.sizes = {i: self.grains.up(line.sizes[i]) for i in self.moved}
        self.presolved = 8 * max(sum(self.sizes.values()), sum(line.sizes)) <= MOST_PRESOLVED
        self._add_times(seconds)
        self.goes = {i: model.new_bool_var(f"goes_{i}") for i in self.moved}
        self.out = {i: self._new_amounts(i) for i in self.moved}
        self.back = {i: self._new_amounts(i) for i in self.moved}
        self.all_out, self.all_back = (
            {i: [model.new_bool_var("") for _ in range(4 * self.count)] for i in self.moved}
            for _ in range(2)
        )
        for i in self.moved:
            self._add_transfer(i)
        self._add_order()
        self._add_link()
        for at, need, done in needs:
            away = [self.out[i][at] - self.back[i][at] for i in self.moved if i < done]
            model.add(sum(away) >= self.grains.up(need))
            # Sizes in grains are rounded up, so check the sizes in bytes too.
            whole = [
                line.sizes[i] * self.goes[i]
                for i in self.moved
                if i < done and at < 2 * (2 * self.count - 1 - i)
            ]
            model.add(sum(whole) >= need)
        model.minimize(self.times[-1])

    def bound_s(self, search: CpSolver) -> float:
        """Return the lower bound in seconds that a search found for the time of any schedule.

        It is the time of the computations if that is greater, or if the scale is not exact.
        """
        ticks = self.grains.ticks
        bound_s = ticks.seconds(search.best_objective_bound) if ticks.exact else 0.0
        return max(self.line.compute_s, bound_s)

    def solution(self, search: CpSolver) -> Solved:
        """Return the schedule that offloads what the search chose, with the least time for that.

        It is ordered and no-wait, see ``offload.phases``. Its time is the minimum of the search, if
        the scale is exact (Proposition 1 of Beaumont, Eyraud-Dubois, Shilova, 2019).
        """
        amounts = [0.0] * len(self.line.sizes)
        for i in self.moved:
            if search.boolean_value(self.goes[i]):
                amounts[i] = float(self.line.sizes[i])
        solved, ticks = schedule_offloads(self.line, amounts, whole=False), self.grains.ticks
        if not ticks.exact:
            return solved
        return replace(solved, makespan_s=ticks.seconds(search.value(self.times[-1])))

    def _add_times(self, seconds: Sequence[float]) -> None:
        """Add variables for the times of events, in order.

        Event ``2 c`` is the start of computation ``c``; event ``2 c + 1`` is its end.
        """
        ticks = self.grains.ticks
        grains = sum(self.sizes.values())
        moving = grains // self.grains.out + grains // self.grains.back + 2 * len(self.moved)
        horizon = sum(map(ticks.count, seconds)) + moving
        starts = [self.cp.new_int_var(0, horizon, f"start_{c}") for c in range(len(seconds))]
        self.times: list[LinearExpr | IntVar] = []
        for start, duration in zip(starts, seconds, strict=True):
            if self.times:
                self.cp.add(start >= self.times[-1])
            self.times += [start, start + ticks.count(duration)]

    def _new_amounts(self, i: int) -> list[IntVar]:
        size = self.sizes[i]
        return [self.cp.new_int_var(0, size, "") for _ in range(4 * self.count)]

    def _add_transfer(self, i: int) -> None:
        """Offload all or nothing of activation ``i``.

        It is offloaded after it is computed, and prefetched before it is read again.
        """
        model, size, goes = self.cp, self.sizes[i], self.goes[i]
        computed, read = 2 * i - 1, 2 * i + 1
        read_again = 2 * (2 * self.count - 1 - i)
        for at in range(4 * self.count):
            out, back = self.out[i][at], self.back[i][at]
            model.add(back <= size * self.all_out[i][at])
            model.add(out >= size * self.all_out[i][at])
            model.add(back >= size * self.all_back[i][at])
            model.add(out <= size * goes)
            if at <= computed or at == 0:
                model.add(out == 0)
            if at <= read:
                model.add(back == 0)
            if at >= read_again:
                model.add(back == out)
                model.add(out == size * goes)
            if at:
                model.add(out >= self.out[i][at - 1])
                model.add(back >= self.back[i][at - 1])

    def _add_order(self) -> None:
        """Add constraints: offloads are ordered as the stages, prefetches the opposite way.

        So the last activation offloaded is the first prefetched, and no offload follows a prefetch.
        """
        for i, j in itertools.combinations(self.moved, 2):
            for at in range(4 * self.count):
                first = self.all_out[i][at] + 1 - self.goes[i]
                self.cp.add(self.out[j][at] <= self.sizes[j] * first)
                last = self.all_back[j][at] + 1 - self.goes[j]
                self.cp.add(self.back[i][at] <= self.sizes[i] * last)

    def _add_link(self) -> None:
        """Bound the amounts moved between two events by what the link can move in that time.

        One lane suffices, since all offloads precede all prefetches.
        """
        model, grains = self.cp, self.grains
        most = math.lcm(grains.out, grains.back)
        for at in range(1, 4 * self.count):
            out = sum(v[at] - v[at - 1] for v in self.out.values())
            back = sum(v[at] - v[at - 1] for v in self.back.values())
            ticks = self.times[at] - self.times[at - 1]
            model.add(most // grains.out * out + most // grains.back * back <= most * ticks)
