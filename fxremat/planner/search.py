"""All candidate schedules of one step, and the best of them for a budget."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.costs.cache import CostCache
from fxremat.costs.cost import Measured, Progress, measure_line
from fxremat.costs.options import find_options
from fxremat.ir import Chain, Costs, Schedule, Solved
from fxremat.passes.emit.program import keep_all
from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.joint.storage import tensors_of
from fxremat.passes.stages.blocks import BlockCache
from fxremat.passes.stages.linearize import linearize
from fxremat.passes.stages.signature import Key
from fxremat.planner.allocations import Allocations
from fxremat.planner.bound import Relaxation
from fxremat.planner.candidate import Candidate, Sweeps
from fxremat.planner.chain import build_chain, build_costs
from fxremat.planner.effects import Operations
from fxremat.planner.improve import improve
from fxremat.planner.joining import equivalent_schedules, join_schedules
from fxremat.planner.surroundings import Caller, surroundings_of
from fxremat.planner.sweep import Surroundings, Sweeper
from fxremat.planner.turn import Planner, kept_over_turn
from fxremat.simulate import simulate
from fxremat.simulate.allocator import AllocatorSettings
from fxremat.units import Counted

SLOTS = 500
"""Slots of each table; a few tables with ever lower ceilings keep rounding small."""

STARTS = 10
"""Candidates that local search sets out from, evenly over their peaks."""

CLOSER = 4
"""More of them near the least peak, where time falls steeply: each half as far from it."""

POINTS = 32
"""Candidates of a frontier whose peaks are replayed to tell of it."""

COSTS: dict[Key, CostCache] = defaultdict(CostCache)
"""Measurements by the settings under which kernels were chosen."""


@dataclass(frozen=True, slots=True)
class Search:
    """All candidate schedules of one joint graph.

    The solver's model rounds and simplifies; the graphs that would be emitted are swept
    exactly. Solving for many budgets and keeping each schedule's exact peak finds, for
    any budget, the fastest schedule that truly fits, and makes time and peak monotonic
    in the budget.

    Where the device's allocator hands out more than is asked for, the budget is for that. To
    replay a schedule's requests takes as long as making it, so it is done when one is chosen:
    from the fastest down until one fits.

    Attributes:
        chain: the stages.
        measured: what they cost.
        sweeps: makes candidates.
        relaxation: what no schedule can do better than.
        baseline: nothing recomputed.
        solved: the best of the solver's schedules: none beats another in both exact peak
            and time, by ascending peak; the last one is the baseline.
        frontier: the same with what local search found.
        alone: the same for each planner alone, had the others found nothing.
        allocations: what the device's allocator hands out for each.
    """

    chain: Chain
    measured: Measured
    sweeps: Sweeps
    relaxation: Relaxation
    baseline: Candidate
    solved: tuple[Candidate, ...]
    frontier: tuple[Candidate, ...]
    alone: tuple[tuple[Candidate, ...], ...]
    allocations: Allocations

    @staticmethod
    def of(
        joint: JointGraph,
        *,
        real: Mapping[fx.Node, torch.Tensor],
        caller: Caller,
        progress: Progress,
        planners: Sequence[Planner] | None = None,
        allocator: AllocatorSettings | None = None,
    ) -> Search:
        """Linearize, measure and solve, with all planners if none are given.

        ``allocator`` has the rules of the device's; ``None``: it hands out what is asked for.
        """
        line = linearize(joint)
        blocks = BlockCache(line)
        cache = COSTS[tuple(torch_compat.kernel_settings().items())]
        measured = measure_line(line, blocks, real=real, cache=cache, progress=progress)
        surroundings = surroundings_of(measured.line.joint, real, caller)
        return Search.over(
            measured,
            blocks,
            surroundings,
            progress=progress,
            planners=planners or PLANNERS,
            allocator=allocator,
            budget_on=caller.budget_on,
        )

    @staticmethod
    def over(
        measured: Measured,
        blocks: BlockCache,
        surroundings: Surroundings,
        *,
        progress: Progress,
        planners: Sequence[Planner],
        allocator: AllocatorSettings | None = None,
        budget_on: Counted = "allocated",
    ) -> Search:
        """Solve what is measured already."""
        line = measured.line
        sweeper = Sweeper(line, measured.workspace_bytes)
        options = find_options(measured, blocks)
        chain = build_chain(line, blocks, options)
        costs = build_costs(measured, chain, blocks, sweeper, surroundings, options)
        sweeps = Sweeps(line, blocks, options, costs, sweeper, surroundings)
        baseline = sweeps.candidate(keep_all(len(chain)))
        found: dict[Schedule, Candidate] = {}
        climbs = _Climbs(sweeps, Operations.of(line), {})
        alone = []
        for planner in planners:
            own = dict.fromkeys(planner(sweeps, chain, progress))
            found.update({s: sweeps.candidate(s) for s in own if s not in found})
            alone.append(climbs.frontier(baseline, [found[s] for s in own]))
        solved = list(found.values())
        best = [climbs.frontier(baseline, solved), *alone]
        relaxation = Relaxation.of(measured, blocks, surroundings)
        return Search(
            chain,
            measured,
            sweeps,
            relaxation,
            baseline,
            solved=_frontier(baseline, solved),
            frontier=_frontier(baseline, [candidate for own in best for candidate in own]),
            alone=tuple(alone),
            allocations=Allocations(sweeper, surroundings, allocator, budget_on),
        )

    @property
    def costs(self) -> Costs:
        """What the solvers work on."""
        return self.sweeps.costs

    @property
    def settled(self) -> frozenset[int]:
        """Storages that cannot travel: what others hold, what is on another device, and what
        would have to be put together again in another way than it was traced.
        """
        line = self.measured.line
        joint, table = line.joint, line.joint.storages
        results = (*joint.forward_outputs, *joint.backward_outputs)
        returned = (n for n in results if isinstance(n, fx.Node))
        fixed = table.of((*joint.given, *joint.tangents, *line.pinned, *returned))
        device = self.sweeps.surroundings.device
        elsewhere = (n for n in joint.forward if any(t.device != device for t in tensors_of(n)))
        return fixed | table.of(elsewhere) | self.measured.displaced

    def counted_bytes(self, candidate: Candidate) -> int:
        """Of a candidate's peak: what the budget is for."""
        return self.allocations.counted_bytes(candidate.program, candidate.sweep)

    @property
    def least(self) -> Candidate:
        """The schedule of the lowest peak; the fastest among those."""
        best, least_bytes = self.frontier[0], self.counted_bytes(self.frontier[0])
        for candidate in self.frontier[1:]:
            if candidate.peak_bytes > least_bytes:  # what is handed out is never less
                break
            if self.counted_bytes(candidate) <= least_bytes:
                best, least_bytes = candidate, self.counted_bytes(candidate)
        return best

    @property
    def least_bytes(self) -> int:
        """The least feasible budget."""
        return self.counted_bytes(self.least)

    def describe_least(self) -> str:
        """What the least feasible budget is needed for."""
        return self.describe_peak(self.least)

    def fastest_within(self, budget_bytes: int) -> Candidate:
        """The fastest candidate whose exact peak fits.

        Where everything can be kept nothing is recomputed, be it free.

        Requires: the budget is at least the least one's peak.
        """
        return next(self._fitting(self.frontier, budget_bytes))

    def _fitting(self, frontier: tuple[Candidate, ...], budget_bytes: int) -> Iterator[Candidate]:
        """Those that fit, the fastest first, but for the baseline, which is before all."""
        for candidate in reversed(frontier):
            too_much = candidate.peak_bytes > budget_bytes  # as is what is handed out then
            if not too_much and self.counted_bytes(candidate) <= budget_bytes:
                yield candidate

    def points(self) -> list[tuple[int, float]]:
        """Peak and seconds of candidates, one of which is the fastest within any budget.

        Where peaks must be replayed these are some candidates, evenly among all.
        """
        chosen = self.frontier
        if self.allocations.settings is not None:
            last = len(chosen) - 1
            wanted = {last * i // (POINTS - 1) for i in range(POINTS)}
            chosen = tuple(chosen[i] for i in sorted(wanted))
        return [(self.counted_bytes(c), c.total_s) for c in (self.least, *chosen)]

    def gained_s(self, budget_bytes: int) -> float:
        """Seconds by which local search beats the solver within a budget.

        0 where the solver finds nothing within it.
        """
        solved = next(self._fitting(self.solved, budget_bytes), None)
        chosen = self.fastest_within(budget_bytes)
        return solved.total_s - chosen.total_s if solved else 0.0

    def lower_bound_s(self, budget_bytes: int) -> float:
        """No schedule of these stages within the budget takes less."""
        return self.baseline.total_s + self.relaxation.least_s(budget_bytes)

    def describe_peak(self, candidate: Candidate) -> str:
        """Where a schedule's peak is."""
        sweep = candidate.sweep
        peak = sweep.peak_bytes
        if peak == sweep.turn_bytes:
            return "the turn between forward and backward"
        if peak == sweep.end_bytes:
            return "the end of the backward, when all gradients are there"
        return f"operation {candidate.program.calls[sweep.peaks_bytes.index(peak)].op}"


@dataclass(frozen=True, slots=True)
class _Climbs:
    """Local search, once from each schedule.

    It sets out from where it would for each planner alone, so that no other one ever makes the
    step slower.
    """

    sweeps: Sweeps
    operations: Operations
    done: dict[Schedule, list[Candidate]]

    def frontier(self, baseline: Candidate, solved: list[Candidate]) -> tuple[Candidate, ...]:
        """The best of ``solved``, and of what is found from some of them."""
        best = _frontier(baseline, solved)[:-1]
        found = list(best)
        for start in _spread(best):
            if start.schedule not in self.done:
                self.done[start.schedule] = list(improve(start, self.sweeps, self.operations))
            found += self.done[start.schedule]
        return _frontier(baseline, found)


def _frontier(baseline: Candidate, candidates: list[Candidate]) -> tuple[Candidate, ...]:
    """Those that no other beats; nothing beats the baseline where it fits."""
    found: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.peak_bytes, c.total_s)):
        if candidate.peak_bytes >= baseline.peak_bytes:
            break
        if not found or candidate.total_s < found[-1].total_s:
            found.append(candidate)
    return (*found, baseline)


def _within(frontier: tuple[Candidate, ...], budget_bytes: int) -> Candidate:
    return [c for c in frontier if c.peak_bytes <= budget_bytes][-1]


def _spread(frontier: tuple[Candidate, ...]) -> list[Candidate]:
    """A few of them."""
    if len(frontier) <= STARTS + CLOSER:
        return list(frontier)
    low, high = frontier[0].peak_bytes, frontier[-1].peak_bytes
    wanted = [low + (high - low) * i // (STARTS - 1) for i in range(STARTS)]
    wanted += [low + ((wanted[1] - low) >> halved) for halved in range(1, CLOSER + 1)]
    return list({id(c): c for c in (_within(frontier, nbytes) for nbytes in wanted)}.values())


def line_schedules(sweeps: Sweeps, chain: Chain, progress: Progress) -> Iterator[Schedule]:
    """Optimal persistent schedules for budgets from the least to all that can be used."""
    costs = sweeps.costs
    # Loading numba takes longer than all else in the package: not at import.
    from fxremat.solvers.rotor import RotorTable, least_budget  # noqa: PLC0415

    full_bytes = simulate(chain, costs, keep_all(len(chain))).peak_bytes
    least_bytes, least = least_budget(chain, costs)
    yield least
    ceiling, done = full_bytes, 0
    while ceiling > least_bytes:
        progress("solving", done, done + 1)
        table = RotorTable.build(chain, costs, max_budget_bytes=ceiling, slots=SLOTS)
        for budget_bytes in table.distinct_budgets():
            solution = table.schedule(budget_bytes)
            if isinstance(solution, Solved):
                yield solution.schedule
        floor = costs.fixed_bytes
        ceiling, done = floor + (ceiling - floor) // 4, done + 1
    progress("solving", done, done)


_EACH: tuple[Planner, ...] = (line_schedules, equivalent_schedules, join_schedules)

PLANNERS: tuple[Planner, ...] = (*_EACH, *map(kept_over_turn, _EACH))
