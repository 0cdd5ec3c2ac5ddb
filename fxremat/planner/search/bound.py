"""A lower bound on the seconds of any schedule, from a relaxation of single moments.

At the loss point, and at each operation of the backward, memory holds some of the tensors that are
read later. The others are computed again after that moment, together with whatever that takes and
is not held either. The relaxation lets storages be held and operations be run in fractions, and
ignores the memory limit at all other moments. So no schedule, persistent or not, takes less time.
The bound is the maximum over a few moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import fx

from fxremat import optional
from fxremat.costs.measured.cost import Measured
from fxremat.passes.joint.graph import is_getitem, values_of
from fxremat.passes.stages.block import BlockCache, Mode, dependencies
from fxremat.passes.stages.linearize import Line
from fxremat.planner.context.context_bytes import ContextBytes
from fxremat.planner.context.handed import staying
from fxremat.planner.decision.charges import Charges


@dataclass(frozen=True, slots=True)
class Recomputation:
    """A forward operation that a schedule may run again.

    Attributes:
        makes: storages that it allocates.
        reads: storages that it reads and that are not always held.
        seconds: the least seconds that it is charged.
    """

    makes: frozenset[int]
    reads: frozenset[int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of the step at which memory is compared with the budget.

    Attributes:
        required: forward storages that the backward reads after it.
        anyway: forward storages that are held at that moment under every schedule.
        occupied_bytes: bytes that are held under every schedule, including ``anyway``.
    """

    required: frozenset[int]
    anyway: frozenset[int]
    occupied_bytes: int


@dataclass(frozen=True, slots=True)
class Relaxation:
    """Linear programs for a lower bound on the seconds that any schedule spends on recomputation.

    Attributes:
        operations: forward operations, in order.
        moments: the moments of the step for which there is a program, the loss point first.
        nbytes: size of each storage.
    """

    operations: tuple[Recomputation, ...]
    moments: tuple[Moment, ...]
    nbytes: tuple[int, ...]

    @staticmethod
    def of(
        measured: Measured, blocks: BlockCache, context_bytes: ContextBytes, most_moments: int
    ) -> Relaxation:
        """Return the programs for the loss point and at most ``most_moments`` moments after it."""
        operations = _operations(measured)
        made = frozenset(s for operation in operations for s in operation.makes)
        moments = _moments(measured, blocks, context_bytes, made, most_moments)
        nbytes = measured.line.joint.storages.nbytes
        return Relaxation(tuple(operations), tuple(moments), nbytes)

    def least_s(self, budget_bytes: int) -> float:
        """Return a lower bound on the seconds that a schedule within the budget recomputes.

        Without ortools the result is 0, which is always a valid bound.
        """
        solvers = optional.find("ortools.linear_solver.pywraplp")
        if solvers is None:
            return 0.0
        programs = _Programs(self, solvers)
        return max(programs.least_s(moment, budget_bytes) for moment in self.moments)


class _Programs:
    """The linear program of a moment: each storage that is read later is held or recomputed.

    The programs of all moments share their variables, and differ in their active constraints and in
    the available bytes.
    """

    def __init__(self, relaxation: Relaxation, pywraplp: ModuleType) -> None:
        self._optimal = pywraplp.Solver.OPTIMAL
        self._solver = solver = pywraplp.Solver.CreateSolver("GLOP")
        operations, nbytes = relaxation.operations, relaxation.nbytes
        maker = {s: i for i, operation in enumerate(operations) for s in operation.makes}
        runs = [solver.NumVar(0.0, 1.0, "") for _ in operations]
        held = {s: solver.NumVar(0.0, 1.0, "") for s in maker}
        self._available = {
            s: self._at_least_0({held[s]: 1.0, runs[i]: 1.0}) for s, i in maker.items()
        }
        self._read = [
            (s, self._at_least_0({held[s]: 1.0, runs[maker[s]]: 1.0, run: -1.0}))
            for operation, run in zip(operations, runs, strict=True)
            for s in sorted(operation.reads & maker.keys())
        ]
        self._unit = max(sum(nbytes[s] for s in maker), 1)  # keeps coefficients near 1
        self._room = self._at_least_0({h: -nbytes[s] / self._unit for s, h in held.items()})
        for operation, run in zip(operations, runs, strict=True):
            solver.Objective().SetCoefficient(run, operation.seconds)
        solver.Objective().SetMinimization()

    def _at_least_0(self, terms: Mapping[Any, float]) -> Any:
        """Add and return the constraint that a weighted sum of variables is at least 0.

        ``terms`` has the weights.
        """
        constraint = self._solver.Constraint(0.0, self._solver.infinity())
        for variable, coefficient in terms.items():
            constraint.SetCoefficient(variable, coefficient)
        return constraint

    def least_s(self, moment: Moment, budget_bytes: int) -> float:
        """Return a lower bound on the seconds to recompute after ``moment`` within the budget."""
        for storage, constraint in self._available.items():
            constraint.SetLb(float(storage in moment.required and storage not in moment.anyway))
        for storage, constraint in self._read:
            constraint.SetLb(-1.0 if storage in moment.anyway else 0.0)
        self._room.SetLb(-max(budget_bytes - moment.occupied_bytes, 0) / self._unit)
        if self._solver.Solve() != self._optimal:
            return 0.0
        return max(float(self._solver.Objective().Value()), 0.0) * (1 - 1e-9)


def _moments(
    measured: Measured,
    blocks: BlockCache,
    context_bytes: ContextBytes,
    rebuildable: frozenset[int],
    most: int,
) -> list[Moment]:
    """Return the loss point, and of the backward of each stage the moment with the most memory.

    Args:
        measured, blocks, context_bytes: the step.
        rebuildable: storages that can be computed again.
        most: number of moments besides the loss point; others are dropped.
    """
    line = measured.line
    table = line.joint.storages
    stays = staying(line, context_bytes)
    given = table.of(line.joint.given)
    pinned = table.of(line.pinned) - given
    # Other pinned storages are freed after their last reader; a recorded state may never exist.
    outputs = table.of(line.joint.results) & pinned
    always = given | outputs | table.of(line.joint.tangents)
    kept = pinned - always
    constant_bytes = context_bytes.given_bytes + table.total(outputs)
    released = context_bytes.releases(line.joint)
    fullest: dict[int, Moment] = {}
    for part in _parts(line):
        later = set(table.of(_read_by(part.after)))
        # The walk goes backwards: it starts with everything that was computed.
        finished = set(table.of(stays.intersection(part.before)) - always)
        live = finished | (later & kept)
        live_bytes = table.total(live)
        for index in part.stages:
            block = blocks(index, Mode.BACKWARD, frozenset(line.stages[index].results))
            for node in reversed(_own_backward(line, index)):
                to_come = finished.intersection(table.of_node[node])
                finished -= to_come
                gone = {s for s in to_come if s not in later or s not in kept}
                live -= gone
                live_bytes -= table.total(gone)
                used = table.of((node, *node.all_input_nodes))
                touched = used - always
                occupied = constant_bytes + context_bytes.backward_bytes
                occupied -= table.total(released - later - used)
                occupied += live_bytes + table.total(touched - live)
                if node in block.nodes and not is_getitem(node):
                    occupied += measured.workspace_bytes(node, block)
                best = fullest.get(index)
                if best is None or occupied > best.occupied_bytes:
                    anyway = touched & rebuildable
                    fullest[index] = Moment(rebuildable & later, anyway, occupied)
                read = table.of(node.all_input_nodes) - later
                later |= read
                new = (read & kept) - live
                live |= new
                live_bytes += table.total(new)
    later = set(table.of(_read_by(line.joint.backward)))
    occupied = constant_bytes + table.total(later & kept) + context_bytes.loss_point_more_bytes
    loss_point = Moment(rebuildable & later, frozenset(), occupied)
    chosen = sorted(fullest.values(), key=lambda m: m.occupied_bytes, reverse=True)
    every = -(-len(chosen) // max(most, 1)) or 1
    return [loss_point, *chosen[::every][:most]]


@dataclass(frozen=True, slots=True)
class _Part:
    """Stages whose backwards run in the same order in every schedule: a branch, or the trunk.

    Attributes:
        stages: indices of the stages.
        before: backward operations of these stages, and those that every schedule runs before them.
        after: backward operations that run after them.
    """

    stages: range
    before: Sequence[fx.Node]
    after: Sequence[fx.Node]


def _parts(line: Line) -> list[_Part]:
    segments = line.segments
    places = [*segments.ends, len(line.stages)]
    ranges = [range(segments.start(segment), end) for segment, end in enumerate(places)]
    parts = []
    for segment, stages in enumerate(ranges):
        path = segments.path(segment)
        before = {i for part in path for i in ranges[part]}
        first = {n for i in before for n in _own_backward(line, i)}
        flows = {i for s in range(segment) if segment in segments.path(s) for i in ranges[s]}
        after = [n for n in line.joint.backward if not flows.isdisjoint(_stages_of(line, n))]
        parts.append(_Part(stages, tuple(first), tuple(after)))
    return parts


def _stages_of(line: Line, node: fx.Node) -> frozenset[int]:
    """Return the stages whose backward runs ``node`` or, for a sum over branches, its inputs."""
    return line.sums.get(node, frozenset({line.stage_of[node]}))


def _own_backward(line: Line, index: int) -> list[fx.Node]:
    """Return the nodes that the backward of stage ``index`` runs under every schedule.

    Sums over branches are left out: they run with the backward that comes last.
    """
    return [n for n in line.stages[index].backward if n not in line.sums]


def _read_by(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    return {source for node in nodes for source in node.all_input_nodes}


def _operations(measured: Measured) -> list[Recomputation]:
    line = measured.line
    table = line.joint.storages
    held = table.of((*line.joint.given, *line.pinned))
    operations = []
    made: set[int] = set()
    for index, stage in enumerate(line.stages):
        charges = Charges.of(measured, index)
        for node in stage.forward:
            if is_getitem(node):
                continue
            values = (node, *values_of(node))
            reads = table.of(dependencies(node, Mode.AGAIN)) - held
            makes = table.of(values) - held - reads - made
            made |= makes
            if makes:
                operations.append(Recomputation(makes, reads, charges.least_s(node)))
    return operations
