"""Schedules of a step whose forward joins several branches, by the solvers of joins.

The solvers know branches and a trunk. If branches meet inside a branch, the line is such a join in
several ways: with the outermost branches, each as a separate line; with all branches, and what they
flow into as one trunk; and with the branches of each depth in between.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import numpy as np
from torch import fx

from fxremat.effort import Effort
from fxremat.ir import (
    Chain,
    Compute,
    Costs,
    Forward,
    Join,
    JoinCosts,
    JoinProblem,
    Schedule,
    StageCosts,
)
from fxremat.ir.schedule import BACKWARD, KINDS, Codes, coded, decoded
from fxremat.passes.stages.linearize import Line
from fxremat.passes.stages.order import any_order
from fxremat.planner.context.context_bytes import ContextBytes
from fxremat.planner.context.handed import staying
from fxremat.planner.search.generators import Setting, ceilings

TRUNK = -1
"""Stands for the trunk in place of the number of a branch."""


@dataclass(frozen=True, slots=True)
class Branching:
    """One way to see the stages of a line as branches that join in a trunk.

    Attributes:
        stages: stages of the line in the order of the join: branch by branch, then the trunk.
        ends: for each branch, the place in ``stages`` after its last stage.
    """

    stages: tuple[int, ...]
    ends: tuple[int, ...]

    def branch_at(self, place: int) -> int:
        """Return the index of the branch that ``stages[place]`` belongs to, or ``TRUNK``."""
        branch = bisect_right(self.ends, place)
        return branch if branch < len(self.ends) else TRUNK

    @property
    def places(self) -> dict[int, int]:
        """The index in :attr:`stages` of each stage of the line."""
        return {stage: place for place, stage in enumerate(self.stages)}

    def on_line(self, schedule: Schedule) -> Schedule:
        """Return ``schedule`` with stage numbers of the line in place of indices in ``stages``."""
        return Schedule(
            tuple(replace(op, stage=self.stages[op.stage]) for op in schedule.computations)
        )


def branchings_of(line: Line) -> list[Branching]:
    """Return all ways to see ``line`` as branches that join in a trunk, outermost branches first.

    The list is empty if the line has no branches.
    """
    branchings = []
    for depth in range(1, line.segments.depth + 1):
        branches = line.segments.branches(depth)
        stages = [stage for branch in branches for stage in branch]
        trunk = sorted(set(range(len(line.stages))).difference(stages))
        branchings.append(Branching((*stages, *trunk), tuple(accumulate(map(len, branches)))))
    return branchings


def build_join(chain: Chain, branching: Branching) -> Join:
    """Return the stages of ``chain`` as branches and a trunk; storages keep their numbers.

    Storages that cross a branch from an earlier one are not part of the branch's boundaries.

    Requires: ``chain`` and ``branching`` belong to the same line.
    """
    places = branching.places
    lives: dict[int, tuple[int, int]] = {}
    for stage, boundary in enumerate(chain.boundaries):
        for storage in boundary:
            first, _ = lives.get(storage, (places[max(stage - 1, 0)], 0))
            lives[storage] = first, places[stage]

    def crossing(place: int, branch: int | None = None) -> tuple[int, ...]:
        return tuple(
            storage
            for storage, (first, last) in lives.items()
            if first < place <= last and branch in (None, branching.branch_at(first))
        )

    stages = [chain.stages[stage] for stage in branching.stages]
    branches = []
    for branch, (first, end) in enumerate(pairwise((0, *branching.ends))):
        boundaries = [crossing(place, branch) for place in range(first, end + 1)]
        branches.append(Chain(chain.storages, tuple(boundaries), tuple(stages[first:end])))
    ends = tuple(s for branch in branches for s in branch.boundaries[-1])
    start, count = branching.ends[-1], len(stages)
    boundaries = [ends, *map(crossing, range(start + 1, count)), ()]
    return Join(tuple(branches), Chain(chain.storages, tuple(boundaries), tuple(stages[start:])))


def build_join_costs(
    costs: Costs, line: Line, branching: Branching, context_bytes: ContextBytes
) -> JoinCosts:
    """Return ``costs``, those of the stages of ``line`` as a chain, as costs of a join.

    They include the bytes of gradients that each branch holds.
    """
    gradients = _Gradients.of(line, branching, staying(line, context_bytes))
    stages = [costs.stages[stage] for stage in branching.stages]
    branches: list[tuple[StageCosts, ...]] = []
    done = []
    for branch, (first, end) in enumerate(pairwise((0, *branching.ends))):
        levels = gradients.of_branch(branch, first, end)
        done.append(levels[0])
        branches.append(
            tuple(
                replace(stage, gradient_bytes=nbytes)
                for stage, nbytes in zip(stages[first:end], levels[1:], strict=True)
            )
        )
    return JoinCosts(
        branches=tuple(branches),
        trunk=tuple(stages[branching.ends[-1] :]),
        fixed_bytes=costs.fixed_bytes,
        done_bytes=tuple(done),
        trunk_done_bytes=max(
            0,
            context_bytes.backward_bytes
            - line.joint.storages.total(_released_by_trunk(line, branching, context_bytes))
            + gradients.left_by_trunk(),
        ),
    )


def _released_by_trunk(
    line: Line, branching: Branching, context_bytes: ContextBytes
) -> frozenset[int]:
    """Return the storages of output gradients that the backward frees and no branch reads."""
    table, places, start = line.joint.storages, branching.places, branching.ends[-1]
    return frozenset(
        storage
        for storage in context_bytes.releases(line.joint)
        if all(
            places[line.stage_of[n]] >= start for n in table.readers[storage] if n in line.stage_of
        )
    )


@dataclass(frozen=True, slots=True)
class _Gradient:
    """A storage that the backward allocates. Places are indices in ``Branching.stages``.

    Attributes:
        born: the place of the stage whose backward allocates it.
        readers: for each branch that reads it, the lowest place of a reader.
        nbytes: its size, divided among the branches that hold it.
        stays: whether it is held until the end of the step.
    """

    born: int
    readers: dict[int, int]
    nbytes: int
    stays: bool


@dataclass(frozen=True, slots=True)
class _Gradients:
    """All storages that the backward of a join allocates."""

    gradients: tuple[_Gradient, ...]
    branching: Branching

    @staticmethod
    def of(line: Line, branching: Branching, stays: frozenset[fx.Node]) -> _Gradients:
        """Return the storages that the backward of a line allocates.

        Those of the gradients ``stays`` are held to the end of the step. If several branches share
        a parameter, each branch holds its part of the gradient: when all of them have run there is
        one gradient, and before that at most one, as long as the backwards of branches run one at a
        time.
        """
        table, places = line.joint.storages, branching.places
        outside = table.of((*line.joint.given, *line.joint.tangents, *line.joint.forward))
        returned = table.of(stays)
        nodes: dict[int, list[fx.Node]] = {}
        for node in line.joint.backward:
            if node not in line.sums:
                for storage in set(table.of_node[node]) - outside:
                    nodes.setdefault(storage, []).append(node)
        gradients = []
        for storage, makers in nodes.items():
            users = [u for node in makers for u in node.users]
            summed = [line.sums[u] for u in users if u in line.sums]
            readers: dict[int, int] = {}
            for place in (places[line.stage_of[u]] for u in users if u in line.stage_of):
                branch = branching.branch_at(place)
                readers[branch] = min(place, readers.get(branch, place))
            parts = max((_branch_count(stages, branching) for stages in summed), default=1)
            lasts = storage in returned or bool(summed)
            if not lasts:
                parts = max(len(readers.keys() - {TRUNK}), 1)
            nbytes = -(-table.nbytes[storage] // parts)
            born = places[line.stage_of[makers[0]]]
            gradients.append(_Gradient(born, readers, nbytes, lasts))
        return _Gradients(tuple(gradients), branching)

    def of_branch(self, branch: int, first: int, end: int) -> Sequence[int]:
        """Return the bytes of gradients that a branch holds as its backward proceeds.

        The branch has the places from ``first`` to before ``end``. Entry ``i`` is for the moment
        when the backwards from its last place down to ``first + i`` have run.
        """
        return [self._held_bytes(branch, level) for level in range(first, end + 1)]

    def _held_bytes(self, branch: int, level: int) -> int:
        total = 0
        for gradient in self.gradients:
            owner = self.branching.branch_at(gradient.born)
            if owner not in (branch, TRUNK) or (owner == branch and gradient.born < level):
                continue
            if gradient.stays:
                total += gradient.nbytes if owner == branch else 0
            elif gradient.readers.get(branch, level) < level:
                total += gradient.nbytes
        return total

    def left_by_trunk(self) -> int:
        """Return the bytes of gradients that the trunk's backward leaves until the step ends."""
        trunk = (g for g in self.gradients if self.branching.branch_at(g.born) == TRUNK)
        return sum(gradient.nbytes for gradient in trunk if gradient.stays)


def _branch_count(stages: Iterable[int], branching: Branching) -> int:
    places = branching.places
    return max(len({branching.branch_at(places[stage]) for stage in stages} - {TRUNK}), 1)


def join_schedules(setting: Setting) -> Iterator[Codes]:
    """Yield schedules, as codes, that the solver of joins finds for many budgets.

    They have the stage numbers of the line. Nothing is yielded if the line is not a join. If
    ``Effort.join_choices`` are too few to fill a table for all stages, adjacent stages are merged.
    """
    line, effort = setting.line, setting.effort
    for branching in branchings_of(line):
        # Loading numba takes longer than all else in the package: not at import.
        from fxremat.solvers.join.coarse import with_loss_point  # noqa: PLC0415

        join, costs = _join_of(setting, branching)
        yield from _in_orders(line, _solve_join(join, costs, branching, effort))
        if len(join.trunk) > 1 and branching.ends[-1] == line.branch_ends[-1]:
            loss_point = with_loss_point(join, costs, extra_bytes=_loss_point_bytes(setting))
            schedules = _solve_join(
                loss_point.join, loss_point.costs, branching, effort, refine=loss_point.refine
            )
            yield from _in_orders(line, schedules)


def equivalent_schedules(setting: Setting) -> Iterator[Codes]:
    """Yield schedules, as codes, that rotor finds for the equivalent chain of a join.

    The equivalent chain merges stages equally far from the trunk. Nothing is yielded if the line is
    not a join.
    """
    line = setting.line
    for branching in branchings_of(line):
        join, costs = _join_of(setting, branching)
        writer = _CodeWriter(branching.on_line)
        solved = _solve_equivalent(join, costs, setting.effort.equiv_slots)
        yield from _in_orders(line, map(writer.codes, solved))


def _join_of(setting: Setting, branching: Branching) -> tuple[Join, JoinCosts]:
    costs = build_join_costs(setting.costs, setting.line, branching, setting.context_bytes)
    return build_join(setting.chain, branching), costs


def _loss_point_bytes(setting: Setting) -> int:
    """Return the bytes that the trunk adds at its peak to what the branches hold.

    Everything is kept, and the peak includes the loss.
    """
    start, kept = setting.line.branch_ends[-1], setting.kept
    held_bytes, peaks = setting.context_bytes.given_bytes, [kept.loss_point_bytes]
    for op, peak, held in zip(kept.ops, kept.peaks_bytes, kept.held_bytes, strict=True):
        if op.stage >= start:
            peaks.append(peak)
        elif isinstance(op, Forward):
            held_bytes = held
    return max(peaks) - held_bytes


@dataclass(frozen=True, slots=True)
class _CodeWriter:
    """Translates operations of a join's schedule to codes of the line, each operation once."""

    on_line: Callable[[Schedule], Schedule]
    cache: dict[Compute, list[int]] = field(default_factory=dict)

    def codes(self, ops: Iterable[Compute]) -> Codes:
        codes: list[int] = []
        for op in ops:
            translated = self.cache.get(op)
            if translated is None:
                translated = self.cache[op] = coded(self.on_line(Schedule((op,)))).tolist()
            codes += translated
        return np.array(codes, dtype=np.int64)


def _solve_join(
    join: Join,
    costs: JoinCosts,
    branching: Branching,
    effort: Effort,
    *,
    refine: Callable[[Schedule], Schedule] = lambda schedule: schedule,
) -> Iterator[Codes]:
    """Yield schedules of ``join`` for many budgets, as codes with the stage numbers of the line.

    ``refine`` turns a schedule of ``join`` into one of the stages of ``branching``.
    """
    from fxremat.solvers.join import JoinPlans, least_budget  # noqa: PLC0415
    from fxremat.solvers.join.coarse import coarsen  # noqa: PLC0415
    from fxremat.solvers.join.numbers import kept_bytes  # noqa: PLC0415

    most_work = effort.join_choices // effort.least_join_slots
    coarse = coarsen(join, costs, most_work=most_work)
    slots = _slots(coarse.join, effort)
    writer = _CodeWriter(lambda schedule: branching.on_line(refine(coarse.refine(schedule))))
    least_bytes, least = least_budget(coarse.join, coarse.costs)
    yield writer.codes(least.computations)
    full_bytes = kept_bytes(join, costs)
    for ceiling in ceilings(full_bytes, least_bytes, costs.fixed_bytes):
        plans = JoinPlans.build(coarse.join, coarse.costs, max_budget_bytes=ceiling, slots=slots)
        for budget_bytes in plans.distinct_budgets():
            yield writer.codes(plans.operations(budget_bytes))


def _slots(join: Join, effort: Effort) -> int:
    """Return the number of slots (units of memory) that a solver's table can have.

    It is limited by the table's size in bytes and by the work to fill it.
    """
    from fxremat.solvers.join.coarse import work_of  # noqa: PLC0415
    from fxremat.solvers.join.numbers import state_count  # noqa: PLC0415

    lengths = [len(line) for line in join.lines]
    room = effort.join_bytes // (8 * state_count(lengths))
    most = min(room, effort.join_choices // work_of(lengths), effort.most_join_slots)
    return max(most, min(effort.least_join_slots, room), 1)


def _solve_equivalent(join: Join, costs: JoinCosts, slots: int) -> Iterator[Sequence[Compute]]:
    from fxremat.solvers import store_all  # noqa: PLC0415
    from fxremat.solvers.join.equiv import as_join_schedule, equivalent_chain  # noqa: PLC0415
    from fxremat.solvers.rotor import RotorTable, least_budget  # noqa: PLC0415

    problem = JoinProblem(join, costs, 0)
    level = equivalent_chain(problem)
    least_bytes, least = least_budget(level.chain, level.costs)
    yield as_join_schedule(problem, least).computations
    full_bytes = store_all.peak_bytes(level.chain, level.costs)
    for ceiling in ceilings(full_bytes, least_bytes, costs.fixed_bytes):
        table = RotorTable.build(level.chain, level.costs, max_budget_bytes=ceiling, slots=slots)
        for budget_bytes in table.distinct_budgets():
            schedule = decoded(table.codes(budget_bytes))
            yield as_join_schedule(problem, schedule).computations


def _in_orders(line: Line, schedules: Iterable[Codes]) -> Iterator[Codes]:
    """Yield each schedule with the forwards of branches in graph order, and also as it is.

    Branches are independent of each other, so until the backward begins their forwards may run in
    any order that keeps the order within each branch. A schedule is yielded as it is only if the
    line allows any order. The same storages are held at the loss point.
    """
    free = any_order(line)
    segment = np.array([line.segments.at(stage) for stage in range(len(line.stages))])
    for codes in schedules:
        yield in_graph_order(segment, codes)
        if free:
            yield codes


def in_graph_order(segment: Codes, codes: Codes) -> Codes:
    """Return a schedule whose forwards before the first backward run in the order of the line.

    ``segment`` has, for each stage, the number of its branch, or of the trunk. These run one after
    the other.
    """
    loss_point = int(np.argmax(codes % KINDS == BACKWARD))
    order = np.argsort(segment[codes[:loss_point] // KINDS], kind="stable")
    return np.concatenate([codes[:loss_point][order], codes[loss_point:]])
