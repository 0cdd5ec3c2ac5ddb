"""Sequences of operations of a join as variables of CP-SAT, and what they hold in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from fxremat.ir import JoinProblem
from fxremat.solvers.papers.cpsat.scale import MOST_PRESOLVED, byte_unit
from fxremat.solvers.papers.cpsat.search import new_model

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import IntVar, LinearExpr, LiteralT


@dataclass(frozen=True, slots=True)
class StepVariables:
    """Variables of one step: which operation runs, and what is held before it.

    Each list has one variable per stage if not stated otherwise.

    Attributes:
        none, ck, all, rebuild, back: whether this operation runs; a rebuild is ``F_all`` and ``B``.
        done: whether the stage's backward has run.
        kept, saved: whether its boundary and saved set are held.
        flight: by line and boundary, whether the boundary is held only for the next forward.
            Boundary 0 of the trunk is never held that way, as it consists of the ends of the
            branches.
        ran: whether the trunk's last stage has run.
    """

    none: list[IntVar]
    ck: list[IntVar]
    all: list[IntVar]
    rebuild: list[IntVar]
    back: list[IntVar]
    done: list[IntVar]
    kept: list[IntVar]
    saved: list[IntVar]
    flight: list[list[IntVar]]
    ran: IntVar

    def forward(self, stage: int) -> LinearExpr:
        """Return an expression that is 1 if the stage's forward runs without its backward."""
        return self.none[stage] + self.ck[stage] + self.all[stage]

    def any(self, stage: int) -> LinearExpr:
        """Return an expression that is 1 if the stage runs forward, backward or both."""
        return self.forward(stage) + self.rebuild[stage] + self.back[stage]


class JoinSteps:
    """CP-SAT model of all memory-persistent schedules of a join of at most ``count`` steps.

    A step is one operation of one stage, or a rebuild with its backward. ``rotor`` defines
    memory-persistent.

    A step is one operation, or a rebuild with its backward.

    Attributes:
        cp: the model.
        presolved: whether its coefficients are small enough for presolve, see ``scale``.
        steps: variables of each step.
        budget: variable of the budget in units of ``unit_bytes``.
    """

    def __init__(self, problem: JoinProblem, count: int, *, any_budget: bool = False) -> None:
        join, costs = problem.join, problem.costs
        self.cp = new_model()
        self.problem = problem
        self.first = join.first_stages
        self.stages = self.first[-1]
        self.trunk = len(join.branches)
        self.trunk_start = self.first[self.trunk]
        self.costs = costs.stages
        lines = list(enumerate(join.lines))
        self.written = [
            join.nbytes(line.boundaries[i + 1]) for _, line in lines for i in range(len(line))
        ]
        self.private = [
            join.nbytes(tuple(line.saved_set(i) - set(line.boundaries[i + 1])))
            for _, line in lines
            for i in range(len(line))
        ]
        self.inputs = [join.nbytes(line.boundaries[0]) for line in join.branches]
        sizes = list(self._sizes())
        self.unit_bytes = byte_unit(sizes)
        most = 3 * sum(sizes) // self.unit_bytes  # sum of coefficients of one memory constraint
        self.presolved = most <= MOST_PRESOLVED
        least = 0 if any_budget else min(most, problem.budget_bytes // self.unit_bytes)
        self.steps = [self._step(k, count) for k in range(count + 1)]
        self.budget = self.cp.new_int_var(least, most if any_budget else least, "budget")
        self._add_start(self.steps[0])
        for step, after in pairwise(self.steps):
            self._add_valid(step)
            self._add_persistent(step)
            self._add_next(step, after)
            self._add_memory(step)
        for done in self.steps.pop().done:
            self.cp.add(done == 1)

    def _sizes(self) -> Iterator[int]:
        costs = self.problem.costs
        yield from (*self.written, *self.private, *self.inputs, *costs.left_bytes)
        yield from (costs.fixed_bytes, costs.trunk_done_bytes)
        for stage in self.costs:
            yield stage.gradient_bytes
            yield stage.forward_extra_bytes
            yield stage.keep_extra_bytes
            yield stage.backward_extra_bytes
            yield stage.rebuild_bytes

    def _step(self, k: int, count: int) -> StepVariables:
        """Return new variables of step ``k``; without those of operations if ``k`` is ``count``."""

        def variables(name: str, length: int) -> list[IntVar]:
            return [self.cp.new_bool_var(f"{name}_{k}_{i}") for i in range(length)]

        running = self.stages if k < count else 0
        return StepVariables(
            none=variables("none", running),
            ck=variables("ck", running),
            all=variables("all", running),
            rebuild=variables("rebuild", running),
            back=variables("back", running),
            done=variables("done", self.stages),
            kept=variables("kept", self.stages),
            saved=variables("saved", self.stages),
            flight=[variables(f"flight_{i}", len(line) + 1) for i, line in self._lines()],
            ran=self.cp.new_bool_var(f"ran_{k}"),
        )

    def _lines(self) -> Iterator[tuple[int, range]]:
        """Yield the number of every line and the range of its stages."""
        for line in range(self.trunk + 1):
            yield line, range(self.first[line], self.first[line + 1])

    def _add_start(self, step: StepVariables) -> None:
        for variable in (*step.done, *step.kept, *step.saved, step.ran):
            self.cp.add(variable == 0)
        for line, flight in enumerate(step.flight):
            for at, variable in enumerate(flight):
                self.cp.add(variable == (at == 0 and line < self.trunk))

    def _add_valid(self, step: StepVariables) -> None:
        """Add constraints: one operation whose inputs are held runs, until all are done."""
        cp = self.cp
        cp.add(sum(step.any(i) for i in range(self.stages)) == 1 - self._is_finished(step))
        for line, stages in self._lines():
            for i in stages:
                runs = step.any(i)
                cp.add(runs + step.done[i] <= 1)
                for read in self._sources(step, line, i):
                    cp.add(sum(read) >= runs)
                cp.add(step.saved[i] >= step.back[i])
                for held in self._holders_of_written(step, line, i):
                    cp.add(step.forward(i) + step.rebuild[i] + held <= 1)
                back = step.back[i] + step.rebuild[i]
                if i + 1 < stages.stop:
                    cp.add(back <= step.done[i + 1])
                if line < self.trunk:
                    cp.add(back <= step.done[self.trunk_start])
                elif i + 1 == self.stages:
                    cp.add(step.rebuild[i] <= step.ran)

    def _is_finished(self, step: StepVariables) -> IntVar:
        finished = self.cp.new_bool_var("")
        for done in step.done:
            self.cp.add_implication(finished, done)
        self.cp.add_bool_or(finished, *(~done for done in step.done))
        return finished

    def _sources(self, step: StepVariables, line: int, i: int) -> Iterator[list[IntVar]]:
        """Yield, for each boundary that stage ``i`` reads, variables of the ways it may be held.

        Args:
            line: the line of the stage.
            i: number of the stage.
        """
        if i == self.trunk_start:
            for branch, stages in self._lines():
                if branch < self.trunk:
                    last = step.saved[stages.stop - 1]
                    yield [step.flight[branch][-1], step.kept[i], last]
            return
        place = i - self.first[line]
        before = [step.saved[i - 1]] if place else []
        yield [step.flight[line][place], step.kept[i], *before]

    def _holders_of_written(self, step: StepVariables, line: int, i: int) -> Iterator[IntVar]:
        yield step.saved[i]
        if i + 1 < self.first[line + 1]:
            yield step.kept[i + 1]
        elif line < self.trunk:
            yield step.kept[self.trunk_start]

    def _add_persistent(self, step: StepVariables) -> None:
        """Add the constraints that schedules are memory-persistent, as ``rotor`` defines it."""
        cp = self.cp
        trunk_readable = self._trunk_is_readable(step)
        for line, stages in self._lines():
            for i in stages:
                place = i - stages.start
                # F_none reads no kept boundary, and a later operation reads what it writes.
                flights = [step.flight[line][place]]
                if i == self.trunk_start:
                    flights = [flight[-1] for flight in step.flight[: self.trunk]]
                for flight in flights:
                    cp.add(step.none[i] + step.kept[i] - flight <= 1)
                if i + 1 < stages.stop:
                    cp.add(step.none[i] + step.done[i + 1] <= 1)
                elif line < self.trunk:
                    cp.add(step.none[i] + step.done[self.trunk_start] <= 1)
                else:
                    cp.add(step.none[i] == 0)
                # A second F_all right before its backward is a rebuild.
                ready = self._ready(step, line, i)
                again = [step.ran] if i + 1 == self.stages else []
                cp.add_bool_or(~step.all[i], *(~r for r in (*ready, *again)))
                forward = step.forward(i) + step.rebuild[i]
                if line < self.trunk:
                    cp.add(forward + trunk_readable <= 1)
                # Nothing runs between F_all and B.
                for j in stages:
                    runs_next = self._all_of([step.saved[j], *self._level(step, line, j)])
                    cp.add(forward + runs_next <= 1)
                self._add_only_the_deepest(step, line, i, forward)

    def _ready(self, step: StepVariables, line: int, i: int) -> list[IntVar]:
        """Return variables that are all 1 if the backwards before that of stage ``i`` are done."""
        after = [step.done[i + 1]] if i + 1 < self.first[line + 1] else []
        return after + ([step.done[self.trunk_start]] if line < self.trunk else [])

    def _level(self, step: StepVariables, line: int, j: int) -> list[LiteralT]:
        """Return literals that are all 1 if the backward of stage ``j`` is next in its line."""
        missing: list[LiteralT] = [~step.done[j]]
        return [*missing, *([step.done[j + 1]] if j + 1 < self.first[line + 1] else [])]

    def _add_only_the_deepest(
        self, step: StepVariables, line: int, i: int, forward: LinearExpr
    ) -> None:
        stages = range(self.first[line], self.first[line + 1])
        place = i - stages.start
        in_flight = step.flight[line][place]
        for at, flight in enumerate(step.flight[line]):
            if at == place or (line == self.trunk and at in (0, len(stages))):
                continue
            done = step.done[stages[at]] if at < len(stages) else step.done[self.trunk_start]
            self.cp.add(forward + flight - done <= 1)
        for r in range(i + 1, stages.stop):
            for held in (step.kept[r], step.saved[r - 1]):
                self.cp.add(forward + held - step.done[r] - in_flight <= 1)

    def _trunk_is_readable(self, step: StepVariables) -> IntVar:
        """Return a variable that is 1 if a trunk boundary is held that a backward can still use."""
        cp = self.cp
        readable = cp.new_bool_var("")
        for i in range(self.trunk_start, self.stages):
            place = i - self.trunk_start
            if i > self.trunk_start:
                for held in (step.flight[self.trunk][place], step.kept[i], step.saved[i - 1]):
                    cp.add_bool_or(~held, step.done[i], readable)
            runs_next = self._all_of([step.saved[i], *self._level(step, self.trunk, i)])
            cp.add_implication(runs_next, readable)
        parts = []
        for sources in self._sources(step, self.trunk, self.trunk_start):
            part = cp.new_bool_var("")
            cp.add_max_equality(part, sources)
            parts.append(part)
        cp.add_bool_or(*(~part for part in parts), step.done[self.trunk_start], readable)
        return readable

    def _all_of(self, variables: Sequence[LiteralT]) -> IntVar:
        """Return a variable that is 1 if all of ``variables`` are, and may be 1 otherwise."""
        every = self.cp.new_bool_var("")
        self.cp.add_bool_or(*(~v for v in variables), every)
        return every

    def _add_next(self, step: StepVariables, after: StepVariables) -> None:
        """Add the constraints on what is held in ``after``, the step that follows ``step``."""
        cp = self.cp
        for i in range(self.stages):
            back = step.back[i] + step.rebuild[i]
            cp.add(after.done[i] == step.done[i] + back)
            becomes = step.ck[i] + step.all[i]
            for held, later, more in (
                (step.kept[i], after.kept[i], becomes),
                (step.saved[i], after.saved[i], step.all[i]),
            ):
                cp.add(later >= held - back)
                cp.add(later >= more)
                cp.add(later <= held + more)
                cp.add(later <= 1 - back)
        last = self.stages - 1
        cp.add(after.ran >= step.ran)
        cp.add(after.ran >= step.any(last))
        cp.add(after.ran <= step.ran + step.any(last))
        for line, stages in self._lines():
            moved = sum(step.any(i) for i in stages)
            for at, flight in enumerate(step.flight[line]):
                gone = moved
                if line < self.trunk and at == len(stages):
                    gone = moved + step.any(self.trunk_start)
                written = step.forward(stages[at - 1]) if at else 0
                later = after.flight[line][at]
                cp.add(later >= flight - gone)
                cp.add(later >= written)
                cp.add(later <= flight + written)
                cp.add(later <= 1 - gone + written)

    def _add_memory(self, step: StepVariables) -> None:
        unit, costs = self.unit_bytes, self.problem.costs
        held = []
        for line, stages in self._lines():
            for at in range(len(stages) + 1):
                nbytes = self.written[stages[at - 1]] if at else 0
                if at == 0 and line < self.trunk:
                    nbytes = self.inputs[line]
                if nbytes:
                    held.append(nbytes // unit * self._is_held(step, line, at))
        for i in range(self.stages):
            held.append(self.private[i] // unit * step.saved[i])
        for i, cost in enumerate(self.costs):
            written = self.written[i]
            plain = (written + cost.forward_extra_bytes) // unit
            whole = (written + self.private[i] + cost.keep_extra_bytes) // unit
            held.append(plain * (step.none[i] + step.ck[i]) + whole * step.all[i])
            held.append(cost.rebuild_bytes // unit * step.rebuild[i])
            held.append(cost.backward_extra_bytes // unit * step.back[i])
        total = sum(held) + costs.fixed_bytes // unit + self._gradients(step)
        running = sum(step.any(i) for i in range(self.stages))
        active = self.cp.new_bool_var("")
        self.cp.add(active == running)
        self.cp.add(total <= self.budget).only_enforce_if(active)

    def _is_held(self, step: StepVariables, line: int, at: int) -> IntVar:
        """Return a variable that is 1 if boundary ``at`` of a line is held during the operation.

        It may be 0 while the operation writes that boundary.
        """
        stages = range(self.first[line], self.first[line + 1])
        held = self.cp.new_bool_var("")
        if at:
            self.cp.add(held >= step.saved[stages[at - 1]])
        if at < len(stages):
            self.cp.add(held >= step.kept[stages[at]])
        elif line < self.trunk:
            self.cp.add(held >= step.kept[self.trunk_start])
        others = [step.any(i) for i in stages if i - stages.start != at]
        self.cp.add(held >= step.flight[line][at] - sum(others))
        return held

    def _gradients(self, step: StepVariables) -> LinearExpr:
        unit, costs = self.unit_bytes, self.problem.costs
        trunk_done = step.done[self.trunk_start]
        total = costs.trunk_done_bytes // unit * trunk_done
        for line, stages in self._lines():
            for i in stages:
                after = step.done[i + 1] if i + 1 < stages.stop else 1
                if line < self.trunk and i + 1 == stages.stop:
                    after = trunk_done
                total += self.costs[i].gradient_bytes // unit * (after - step.done[i])
            if line < self.trunk:
                total += costs.left_bytes[line] // unit * step.done[stages.start]
        return total
