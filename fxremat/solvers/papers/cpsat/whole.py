"""Model of whole transfers as intervals; see ``offload``."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import TYPE_CHECKING

from fxremat.ir import (
    Activations,
    Backward,
    Forward,
    Free,
    Keep,
    Offload,
    Op,
    Prefetch,
    Schedule,
    Solved,
    Wait,
)
from fxremat.solvers.papers.cpsat.scale import MOST_PRESOLVED, Ticks, byte_unit
from fxremat.solvers.papers.cpsat.search import new_model
from fxremat.solvers.papers.offload.line import OffloadChain, activations

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpSolver, IntVar, LinearExpr


class WholeModel:
    """CP-SAT model of the shortest step whose transfers free and allocate all memory at once.

    The objective is the end of the last backward.
    """

    def __init__(self, line: OffloadChain, *, ordered: bool) -> None:
        self.cp = new_model()
        self.line = line
        self.count = len(line)
        seconds = [*line.forward_s, *reversed(line.backward_s)]
        out = [Fraction(n) / Fraction(line.offload_rate) for n in line.sizes]
        back = [Fraction(n) / Fraction(line.prefetch_rate) for n in line.sizes]
        total = sum(map(Fraction, seconds)) + sum(out) + sum(back)
        self.ticks = Ticks.of([*map(Fraction, seconds), *out, *back], total_s=total)
        sizes = [*line.sizes, line.budget, *line.running, *line.after]
        self.unit_bytes = byte_unit(sizes)
        self.presolved = sum(sizes) // self.unit_bytes <= MOST_PRESOLVED
        self.horizon = self.ticks.count(total) + 4 * self.count + 8
        self.moved = [i for i in line.movable if line.sizes[i]]
        self._add_times(seconds, out, back)
        self._add_lanes(ordered)
        self._add_memory()
        self.cp.minimize(self.end[-1])

    def bound_s(self, search: CpSolver) -> float:
        """Return the lower bound in seconds that a search found for the time of any schedule."""
        durations = 4 * (self.count + len(self.moved))
        bound_s = self.ticks.at_least(search.best_objective_bound, durations=durations)
        return max(self.line.compute_s, bound_s)

    def solution(self, search: CpSolver) -> Solved:
        """Return a schedule whose replay has the times of the search, or earlier ones.

        Prefetches follow the computation in or after which the search placed them. Offloads precede
        whatever acquires memory after they begin.
        """
        start = {c: search.value(v) for c, v in enumerate(self.start)}
        gone = [i for i in self.moved if search.boolean_value(self.goes[i])]
        acquirers: list[tuple[int, Op]] = []
        for c in range(2 * self.count):
            acquirers.append((start[c], self._computation(c)))
            here = [i for i in gone if any(search.boolean_value(v) for v in self.place[i][c])]
            here.sort(key=lambda i: search.value(self.back[i]))
            acquirers += [(search.value(self.back[i]), Prefetch(activations(i))) for i in here]
        ops: list[Op] = []
        waiting = sorted(gone, key=lambda i: search.value(self.out[i]))
        for at, op in acquirers:
            while waiting and search.value(self.out[waiting[0]]) < at:
                ops.append(Offload(activations(waiting.pop(0))))
            ops.append(op)
        ops = _with_frees([*ops, *(Offload(activations(i)) for i in waiting)])
        return Solved(Schedule(tuple(ops)), self.ticks.seconds(search.value(self.end[-1])))

    def _computation(self, c: int) -> Op:
        return Forward(c, Keep.ALL) if c < self.count else Backward(2 * self.count - 1 - c)

    def _add_times(self, seconds: list[float], out: list[Fraction], back: list[Fraction]) -> None:
        model, horizon = self.cp, self.horizon
        self.start = [model.new_int_var(0, horizon, f"start_{c}") for c in range(len(seconds))]
        self.end: list[LinearExpr] = [
            start + self.ticks.count(s) for start, s in zip(self.start, seconds, strict=True)
        ]
        model.add(self.start[0] == 0)  # nothing can be offloaded before, since it reads all
        for c in range(1, len(seconds)):
            model.add(self.start[c] >= self.end[c - 1])
        self.goes = {i: model.new_bool_var(f"goes_{i}") for i in self.moved}
        self.out = {i: model.new_int_var(0, horizon, f"out_{i}") for i in self.moved}
        self.back = {i: model.new_int_var(0, horizon, f"back_{i}") for i in self.moved}
        self.out_ticks = {i: max(1, self.ticks.count(out[i])) for i in self.moved}
        self.back_ticks = {i: max(1, self.ticks.count(back[i])) for i in self.moved}
        self.gone = {i: self.out[i] + self.out_ticks[i] for i in self.moved}
        for i in self.moved:
            if i:
                model.add(self.out[i] >= self.end[i - 1])
            model.add(self.back[i] >= self.gone[i])
            model.add(self.back[i] >= self.end[i])
            model.add(
                self.back[i] + self.back_ticks[i] <= self.start[2 * self.count - 1 - i]
            ).only_enforce_if(self.goes[i])

    def _add_lanes(self, ordered: bool) -> None:
        model = self.cp
        lanes = []
        for begin, ticks in ((self.out, self.out_ticks), (self.back, self.back_ticks)):
            lanes.append(
                [
                    model.new_optional_fixed_size_interval_var(begin[i], ticks[i], self.goes[i], "")
                    for i in self.moved
                ]
            )
        if self.line.shared:
            lanes = [lanes[0] + lanes[1]]
        for lane in lanes:
            model.add_no_overlap(lane)
        if not ordered:
            return
        # So the last offloaded is the first prefetched, and no offload follows a prefetch.
        for i, j in itertools.combinations(self.moved, 2):
            both = (self.goes[i], self.goes[j])
            model.add(self.gone[i] <= self.out[j]).only_enforce_if(*both)
            model.add(self.back[j] + self.back_ticks[j] <= self.back[i]).only_enforce_if(*both)

    def _add_memory(self) -> None:
        """Bound the memory at starts and ends of computations, and at starts of prefetches."""
        steps = 2 * self.count
        # Where a prefetch begins: while computation c runs, or between it and the next.
        self.place: dict[int, list[tuple[IntVar, IntVar]]] = {}
        for i in self.moved:
            self.place[i] = []
            for c in range(steps):
                during, later = (self.cp.new_bool_var(f"{n}_{i}_{c}") for n in ("in", "after"))
                self.place[i].append((during, later))
                self.cp.add(self.back[i] >= self.start[c]).only_enforce_if(during)
                self.cp.add(self.back[i] <= self.end[c]).only_enforce_if(during)
                self.cp.add(self.back[i] >= self.end[c]).only_enforce_if(later)
                if c + 1 < steps:
                    self.cp.add(self.back[i] <= self.start[c + 1]).only_enforce_if(later)
            every = [v for pair in self.place[i] for v in pair]
            self.cp.add(sum(every) == self.goes[i])
        for c in range(steps):
            away = [(i, self._away_at(i, c, running=True)) for i in self.moved if i < c]
            self._bound(self.line.running[c], away)
            if c + 1 < steps:
                away = [(i, self._away_at(i, c, running=False)) for i in self.moved if i <= c]
                self._bound(self.line.after[c], away)
        for i in self.moved:
            away = [(j, self._away_during(j, i)) for j in self.moved if j != i]
            for c, (during, later) in enumerate(self.place[i]):
                self._bound(self.line.running[c], [(j, v) for j, v in away if j < c], during)
                if c + 1 < steps:
                    self._bound(self.line.after[c], [(j, v) for j, v in away if j <= c], later)

    def _bound(
        self, everything: int, away: list[tuple[int, IntVar]], where: IntVar | None = None
    ) -> None:
        """Require that enough activations are absent for the memory at some time to fit the budget.

        Args:
            everything: bytes held at that time if nothing were offloaded.
            away: activations, each with a variable that is 1 if it is absent.
            where: variable that is 1 if the constraint holds; ``None``: it always does.
        """
        need = -(-(everything - self.line.budget) // self.unit_bytes)
        if need <= 0:
            return
        room = self.cp.add(sum(self.line.sizes[j] // self.unit_bytes * v for j, v in away) >= need)
        if where is not None:
            room.only_enforce_if(where)

    def _away_at(self, i: int, c: int, *, running: bool) -> IntVar:
        """Return a variable that implies that activation ``i`` is absent at computation ``c``.

        It is absent when the computation starts if ``running``, else when it ends.
        """
        at = self.start[c] if running else self.end[c]
        away = self.cp.new_bool_var(f"away_{i}_{c}_{running}")
        self.cp.add_implication(away, self.goes[i])
        self.cp.add(self.gone[i] <= at).only_enforce_if(away)
        # Where times are equal, the sequence decides: the prefetch begins after c, or its end.
        places = [pair[0 if running else 1] for pair in self.place[i][c : c + 1]]
        places += [self.place[i][c][1]] if running else []
        places += [v for pair in self.place[i][c + 1 :] for v in pair]
        self.cp.add_bool_or(~away, *places)
        return away

    def _away_during(self, j: int, i: int) -> IntVar:
        """Return a variable that implies that activation ``j`` is absent while ``i`` comes back."""
        away = self.cp.new_bool_var(f"away_during_{j}_{i}")
        self.cp.add_implication(away, self.goes[j])
        self.cp.add_implication(away, self.goes[i])
        self.cp.add(self.gone[j] <= self.back[i]).only_enforce_if(away)
        self.cp.add(self.back[j] >= self.back[i] + self.back_ticks[i]).only_enforce_if(away)
        return away


def _with_frees(ops: list[Op]) -> list[Op]:
    """Return ``ops`` with a ``Free`` and a ``Wait`` for each activation that is offloaded.

    It is freed once it has been read and its offload issued, and waited for before its backward.
    """
    moved = {op.what for op in ops if isinstance(op, Offload)}
    halves: set[Activations] = set()
    done: list[Op] = []
    for op in ops:
        if isinstance(op, Backward) and activations(op.stage) in moved:
            done.append(Wait(activations(op.stage)))
        done.append(op)
        if isinstance(op, Forward | Offload):
            what = activations(op.stage) if isinstance(op, Forward) else op.what
            if what in halves and what in moved:
                done.append(Free(what))
            halves.add(what)
    return done
