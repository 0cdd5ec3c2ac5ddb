"""Generators: each yields the schedules of one solver, for all budgets at once.

Solvers work on the chain of a measured line: bytes and seconds of each stage, as if its calls ran
by themselves. This rounds and simplifies, so every schedule is evaluated exactly afterwards.
Solving for many budgets and keeping the exact peak of each schedule gives, for any budget, the
fastest schedule that really fits, and makes time and peak monotonic in the budget.

If the loss is outside the model, the loss point is a separate stage, and the solver chooses what
is held there. Most often that is all that the last stage keeps, which takes no time to compute
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from fxremat.costs.measured.cost import Measured, boundary_after, stage_blocks
from fxremat.effort import Effort
from fxremat.ir import (
    Chain,
    Costs,
    Infeasible,
    Problem,
    SaveOption,
    Solved,
    Stage,
    StageCosts,
    Storage,
)
from fxremat.ir.schedule import Codes, coded
from fxremat.passes.joint.graph import is_tensor
from fxremat.passes.stages.block import BlockCache, Mode
from fxremat.passes.stages.linearize import Line, StageNodes
from fxremat.planner.context.context_bytes import ContextBytes
from fxremat.planner.context.handed import staying
from fxremat.planner.decision.candidates import Evaluation
from fxremat.planner.decision.save_options import Options
from fxremat.planner.search.evaluator import CallFootprint, Evaluator


def build_chain(line: Line, blocks: BlockCache, options: Options | None = None) -> Chain:
    """Return the stages of ``line`` as the chain for which solvers find schedules.

    The chain has the storages of boundaries, of saved sets, and of what ``options`` keep.
    """
    table = line.joint.storages
    number = _numbering(line, options)

    def ids(nodes: Iterable[fx.Node]) -> tuple[int, ...]:
        return tuple(number[s] for s in sorted(table.of(nodes)) if s in number)

    kinds: dict[object, int] = {}
    unsaved = {number[s] for s in line.unsaved if s in number}
    stages = []
    for index, stage in enumerate(line.stages):
        key = tuple(map(blocks.key, stage_blocks(line, blocks, index)))
        kind = kinds.setdefault(key, len(kinds))
        saved = tuple(i for i in ids(stage.saved) if i not in unsaved)
        stages.append(Stage(line.name_of(index), saved, kind))
    boundaries = [ids(stage.boundary) for stage in line.stages]
    storages = [Storage(table.nbytes[s], table.owner[s].name) for s in number]
    return Chain(tuple(storages), (*boundaries, ()), tuple(stages))


def _numbering(line: Line, options: Options | None) -> dict[int, int]:
    """Return a number, from 0 on, for each storage that a stage may keep or pass on, by its id."""
    table = line.joint.storages
    given = table.of((*line.joint.given, *line.pinned))
    number: dict[int, int] = {}
    for index, stage in enumerate(line.stages):
        held = table.of((*stage.boundary, *stage.saved))
        if options is not None:
            held |= frozenset(options.parts[index].storages)
        for storage in sorted(held - given):
            number.setdefault(storage, len(number))
    return number


def build_costs(
    measured: Measured, chain: Chain, evaluator: Evaluator, *, options: bool = True
) -> Costs:
    """Return the costs of ``chain`` for solvers: seconds, and bytes as if each call ran by itself.

    What is held at the loss point, or from there on, is charged to the backward of the last stage,
    and to the gradients of the other stages as far as it is still held when their backwards begin.
    Save options are included if ``options`` is set.
    """
    line = measured.line
    gradients = _gradient_bytes(line, evaluator.context_bytes)
    number = _numbering(line, evaluator.options if options else None)
    stages = []
    for index in range(len(chain)):
        stage = _Stage(measured, chain, evaluator, index)
        save_options: list[SaveOption] = []
        parts = evaluator.options.parts[index]
        for mask in evaluator.options.masks[index] if options else ():
            kept = tuple(number[s] for s in parts.kept_storages(mask))
            # An option may hold what no backward reads, and so rebuild the rest sooner.
            more_s = max(0.0, parts.recompute_s(mask) - parts.forced_s)
            save_options.append(stage.option(len(save_options) + 1, kept, more_s))
        stages.append(stage.costs(gradients[index], tuple(save_options)))
    fixed_bytes = evaluator.context_bytes.given_bytes + _pinned_bytes(line)
    return Costs(tuple(stages), fixed_bytes)


@dataclass(frozen=True, slots=True)
class _Stage:
    """One stage of a chain whose costs are computed."""

    measured: Measured
    chain: Chain
    evaluator: Evaluator
    index: int

    def costs(self, gradient_bytes: int, options: tuple[SaveOption, ...]) -> StageCosts:
        """Return the seconds and bytes of the stage, with ``options`` as its save options.

        ``gradient_bytes`` are in memory after its backward.
        """
        chain, index = self.chain, self.index
        seconds, saved = self.measured.stages[index], self._nodes.saved
        new_boundary = chain.nbytes({*chain.boundaries[index + 1]} - {*chain.boundaries[index]})
        passed_on = self._passed_on
        rebuild = self.evaluator.call_footprint(index, Mode.AGAIN, saved, kept=True)
        alone_bytes = self._backward_extra(0)
        last = index == len(chain) - 1
        return StageCosts(
            forward_s=seconds.forward_s,
            backward_s=seconds.backward_s + self.evaluator.options.parts[index].forced_s,
            rebuild_s=seconds.rebuild_s,
            gradient_bytes=0 if last else max(0, gradient_bytes),
            forward_extra_bytes=self._forward_extra(passed_on, new_boundary),
            keep_extra_bytes=self._forward_extra(
                passed_on.union(saved), chain.nbytes(chain.saved_set(index))
            ),
            backward_extra_bytes=alone_bytes,
            rebuild_bytes=max(rebuild.peak_bytes, rebuild.change_bytes + alone_bytes),
            options=options,
        )

    def option(self, option: int, kept: tuple[int, ...], recompute_s: float) -> SaveOption:
        """Return save option number ``option``, which keeps ``kept``, with the bytes that it needs.

        ``recompute_s`` are the seconds to recompute the rest.
        """
        # The first forward keeps what the backward reads of this stage.
        inputs = self._backward_footprint(option).inputs
        read = frozenset(inputs).intersection(n for n in self._nodes.forward if is_tensor(n))
        held_bytes = self.chain.nbytes(self.chain.added(self.index, kept))
        return SaveOption(
            kept,
            recompute_s,
            self._forward_extra(read | self._passed_on, held_bytes),
            self._backward_extra(option),
        )

    @property
    def _nodes(self) -> StageNodes:
        return self.measured.line.stages[self.index]

    @property
    def _passed_on(self) -> frozenset[fx.Node]:
        """Tensors that every first forward of the stage returns: its boundary and pinned ones."""
        line, nodes = self.measured.line, self._nodes
        boundary = frozenset(nodes.forward).intersection(boundary_after(line, self.index))
        return boundary.union(nodes.pinned, (n for n in nodes.saved if n in line.pinned))

    def _forward_extra(self, asked: Iterable[fx.Node], held_bytes: int) -> int:
        """Return the bytes that a first forward takes at its peak beyond what it leaves in memory.

        It returns the tensors ``asked``, and leaves ``held_bytes`` besides its input and pinned
        tensors.
        """
        line = self.measured.line
        table = line.joint.storages
        pinned = table.total(table.of(self._nodes.pinned) - table.of(line.joint.given))
        forward = self.evaluator.call_footprint(self.index, Mode.FIRST, asked, kept=True)
        return max(forward.peak_bytes - held_bytes - pinned, 0)

    def _backward_footprint(self, option: int) -> CallFootprint:
        asked = self._nodes.results
        return self.evaluator.call_footprint(
            self.index, Mode.BACKWARD, asked, option=option, kept=False
        )

    def _backward_extra(self, option: int) -> int:
        extra = self._backward_footprint(option).peak_bytes
        if self.index == len(self.chain) - 1:
            context = self.evaluator.context_bytes
            extra = max(0, extra + context.backward_bytes, context.loss_point_more_bytes)
        return extra


def _pinned_bytes(line: Line) -> int:
    table = line.joint.storages
    return table.total(table.of(line.pinned) - table.of(line.joint.given))


def _gradient_bytes(line: Line, context_bytes: ContextBytes) -> Sequence[int]:
    """Return, for each stage, the bytes of gradients that are held when its backward begins.

    They include what else is held from the loss point on.
    """
    table = line.joint.storages
    returned = table.of(staying(line, context_bytes))
    change = [context_bytes.backward_bytes] * (len(line.stages) + 1)

    def lowest_reader(storage: int, default: int) -> int:
        readers = (line.stage_of[u] for u in table.readers[storage] if u in line.stage_of)
        return min(readers, default=default)

    for storage in line.joint.made_backward:
        born = line.stage_of[table.owner[storage]]
        end = 0 if storage in returned else lowest_reader(storage, born)
        for index in range(end, born):  # alive when the backwards of these stages begin
            change[index] += table.nbytes[storage]
    for storage in context_bytes.releases(line.joint):
        for index in range(lowest_reader(storage, 0)):
            change[index] -= table.nbytes[storage]
    return change


@dataclass(frozen=True, slots=True)
class Setting:
    """A step as generators of schedules see it.

    Attributes:
        line: the stages.
        chain: the stages and their storages, for solvers.
        costs: costs of the stages.
        context_bytes: memory of the step that no block allocates.
        kept: the evaluation of the schedule that keeps everything.
        effort: numbers that steer the generators.
    """

    line: Line
    chain: Chain
    costs: Costs
    context_bytes: ContextBytes
    kept: Evaluation
    effort: Effort


Generator = Callable[[Setting], Iterator[Codes]]
"""Yields schedules for budgets from the least feasible one to the largest useful one."""


def chain_schedules(setting: Setting) -> Iterator[Codes]:
    """Yield optimal persistent schedules of the stages for many budgets, by the solver rotor.

    In a persistent schedule, what is kept stays in memory until the backward of its stage. The
    first schedule is that of the least budget.
    """
    # Loading numba takes longer than all else in the package: not at import.
    from fxremat.solvers import store_all  # noqa: PLC0415
    from fxremat.solvers.rotor import RotorTable, least_budget  # noqa: PLC0415

    chain, costs, slots = setting.chain, setting.costs, setting.effort.slots
    full_bytes = store_all.peak_bytes(chain, costs)
    least_bytes, least = least_budget(chain, costs)
    yield coded(least)
    for ceiling in ceilings(full_bytes, least_bytes, costs.fixed_bytes):
        table = RotorTable.build(chain, costs, max_budget_bytes=ceiling, slots=slots)
        yield from map(table.codes, table.distinct_budgets())


def solved_by(name: str) -> Generator:
    """Return a generator of schedules that calls the solver ``name`` of ``fxremat.solvers.named``.

    It calls the solver for ``Effort.budgets`` budgets, evenly spaced from the least that it can
    meet to that of keeping everything.
    """

    def schedules(setting: Setting) -> Iterator[Codes]:
        from fxremat.solvers import store_all  # noqa: PLC0415
        from fxremat.solvers.named import solve  # noqa: PLC0415

        chain, costs = setting.chain, setting.costs
        least = solve(name, Problem(chain, costs, 0))
        least_bytes = least.least_budget_bytes if isinstance(least, Infeasible) else 0
        more_bytes = max(0, store_all.peak_bytes(chain, costs) - least_bytes)
        count = setting.effort.budgets
        for step in range(count):
            budget_bytes = least_bytes + more_bytes * step // max(count - 1, 1)
            solution = solve(name, Problem(chain, costs, budget_bytes))
            if isinstance(solution, Solved):
                yield coded(solution.schedule)

    return schedules


def ceilings(full_bytes: int, least_bytes: int, floor_bytes: int) -> Iterator[int]:
    """Yield decreasing budgets, one for each table of a solver, from ``full_bytes`` on.

    They end above ``least_bytes``. A table rounds bytes to a share of its budget. The part of a
    budget above ``floor_bytes`` is a quarter of that of the one before, so rounding errors stay
    small relative to each.
    """
    ceiling = full_bytes
    while ceiling > least_bytes:
        yield ceiling
        ceiling = floor_bytes + (ceiling - floor_bytes) // 4
