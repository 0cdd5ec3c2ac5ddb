"""All candidate schedules of a step, and the best of them for a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from fxremat.costs.measured.cost import Measured
from fxremat.effort import USUAL, Effort
from fxremat.ir import Chain, Costs
from fxremat.passes.joint.data_sizes import is_bundle
from fxremat.passes.joint.graph import tensors_of
from fxremat.passes.stages.block import BlockCache
from fxremat.planner.allocator.allocations import Allocated, Allocations
from fxremat.planner.allocator.allocator import AllocatorSettings
from fxremat.planner.allocator.footprints import Footprints
from fxremat.planner.context.context_bytes import ContextBytes
from fxremat.planner.decision.candidates import Candidate, Pool
from fxremat.planner.decision.save_options import find_options
from fxremat.planner.search.bound import Relaxation
from fxremat.planner.search.evaluator import Evaluator
from fxremat.planner.search.generators import (
    Generator,
    Setting,
    build_chain,
    build_costs,
    chain_schedules,
    solved_by,
)
from fxremat.planner.search.join import equivalent_schedules, join_schedules
from fxremat.progress import PLAN, Progress
from fxremat.units import Counted

GENERATORS_BY_NAME: Mapping[str, Generator] = {
    "rotor": chain_schedules,
    "equiv_chain": equivalent_schedules,
    "join": join_schedules,
    **{name: solved_by(name) for name in ("store_all", "periodic", "revolve", "pofo")},
}
"""Generators of schedules by the names of their solvers."""


def generators_of(names: Iterable[str]) -> tuple[Generator, ...]:
    """Return the generators of schedules of the solvers with these names."""
    return tuple(GENERATORS_BY_NAME[name] for name in names)


@dataclass(frozen=True, slots=True)
class Search:
    """All candidate schedules of one joint graph, from which one is chosen for a budget.

    The schedules of each generator are evaluated exactly, and local search starts from those that
    it would start from if there were no other generator. So an additional generator never makes the
    step slower. Local search does not depend on the budget, so a larger budget never makes the step
    slower either.

    If the device's allocator hands out more than is requested, the budget limits what it hands out.
    Replaying the requests of a schedule takes as long as emitting it, so it is done when a schedule
    is chosen: from the fastest one down until one fits.

    Attributes:
        measured: the costs of the step.
        setting: the problem that generators solve.
        evaluator: evaluates schedules of the step.
        relaxation: makes the lower bound on seconds; ``None`` if there is none.
        solved: the best of the generators' schedules.
        pool: the best of these and of the results of local search.
        separate: for each generator, the pool that it would have without the others.
        allocations: peaks of candidates as the allocator counts them.
        effort: numbers that steer this search, and those that start from it.
        spare: pools of other contexts, the latest first.
    """

    measured: Measured
    setting: Setting
    evaluator: Evaluator
    relaxation: Callable[[], Relaxation] | None
    solved: Pool
    pool: Pool
    separate: tuple[Pool, ...]
    allocations: Allocations
    effort: Effort
    spare: tuple[Pool, ...] = ()

    @staticmethod
    def over(
        measured: Measured,
        blocks: BlockCache,
        context_bytes: ContextBytes,
        *,
        progress: Progress,
        effort: Effort = USUAL,
        generators: Sequence[Generator] | None = None,
        allocator: AllocatorSettings | None = None,
        budget_on: Counted = "allocated",
        known: Search | None = None,
    ) -> Search:
        """Generate and evaluate schedules of a measured step, and return the search that has them.

        Args:
            measured: the stages and their costs.
            blocks: blocks of operations of the stages.
            context_bytes: memory of the step that no block allocates.
            progress: called as the search advances.
            effort: numbers that steer the search.
            generators: generators of schedules; ``None``: those that ``effort`` names.
            allocator: settings of the device's allocator; ``None`` if it hands out exactly what is
                requested.
            budget_on: which peak the budget limits.
            known: a search of the same step at another size, whose save options are used so that
                its decisions are possible here.
        """
        if generators is None:
            generators = generators_of(effort.generators)
        parts = 2 * len(generators) + 1
        progress(PLAN, 0, parts)
        line = measured.line
        footprints = Footprints(line, measured.workspace_bytes, measured.asked)
        masks = known.evaluator.options.masks if known else None
        options = find_options(measured, blocks, effort, masks=masks)
        chain = build_chain(line, blocks, options)
        evaluator = Evaluator.of(measured, blocks, options, context_bytes)
        costs = build_costs(measured, chain, evaluator)
        baseline = evaluator.keep_all()
        kept = evaluator.evaluation(baseline)
        setting = Setting(line, chain, costs, context_bytes, kept, effort)
        climbs = _Climbs(evaluator, baseline, effort)
        by_generator = []
        for generator in generators:
            by_generator.append(climbs.candidates(generator, setting))
            progress(PLAN, len(by_generator), parts)
        every = list(dict.fromkeys(c for candidates in by_generator for c in candidates))
        pools = []
        for candidates in (every, *by_generator):
            pools.append(climbs.pool(candidates))
            progress(PLAN, len(by_generator) + len(pools), parts)
        return Search(
            measured,
            setting,
            evaluator,
            partial(Relaxation.of, measured, blocks, context_bytes, effort.moments),
            solved=Pool.of(baseline, every),
            pool=Pool.of(baseline, (c for pool in pools for c in pool.members)),
            separate=tuple(pools[1:]),
            allocations=Allocations(footprints, context_bytes, allocator, budget_on),
            effort=effort,
        )

    def knowing(self, other: Search) -> Search:
        """Return a copy that also has the candidates of ``other``, a search in another context.

        They are kept in :attr:`spare`.
        """
        return replace(self, spare=(other.pool, *self.spare)[: self.effort.spare_pools])

    @property
    def chain(self) -> Chain:
        """The chain of stages and storages that solvers find schedules for."""
        return self.setting.chain

    @property
    def costs(self) -> Costs:
        """The seconds and bytes of each stage of the chain that solvers find schedules for."""
        return self.setting.costs

    @property
    def baseline(self) -> Candidate:
        """The candidate that recomputes nothing."""
        return self.pool.baseline

    @property
    def immovable(self) -> frozenset[int]:
        """Ids of the storages that cannot be offloaded to host memory.

        They are those that are held elsewhere, those on another device, those of bundles, and those
        that a copy would lay out otherwise than they were traced.
        """
        line = self.measured.line
        joint, table = line.joint, line.joint.storages
        returned = (*joint.results, *joint.gradients, *filter(is_bundle, joint.forward))
        fixed = table.of((*joint.given, *joint.tangents, *line.pinned)) - line.offloaded
        fixed |= table.of(returned)
        device = self.setting.context_bytes.device
        elsewhere = (n for n in joint.forward if any(t.device != device for t in tensors_of(n)))
        return fixed | table.of(elsewhere) | self.measured.displaced

    def allocated(self, candidate: Candidate) -> Allocated:
        """Return the peaks of allocated and of reserved bytes of a candidate."""
        return self.allocations.of(candidate, lambda: self.evaluator.program(candidate))

    def counted_bytes(self, candidate: Candidate) -> int:
        """Return the peak of a candidate that the budget limits: allocated or reserved bytes."""
        return self.allocated(candidate).counted_bytes(self.allocations.budget_on)

    @property
    def least(self) -> Candidate:
        """The candidate with the lowest peak; of several, the fastest."""
        first, *others = self.pool.members
        best, least_bytes = first, self.counted_bytes(first)
        for candidate in others:
            if candidate.peak_bytes > least_bytes:  # the allocator never hands out less
                break
            if self.counted_bytes(candidate) <= least_bytes:
                best, least_bytes = candidate, self.counted_bytes(candidate)
        return best

    @property
    def least_bytes(self) -> int:
        """The least budget, in bytes, that any candidate fits in."""
        return self.counted_bytes(self.least)

    def fits(self, budget_bytes: int) -> bool:
        """Return whether any candidate has a peak of at most ``budget_bytes``."""
        return any(True for _ in self._fitting(self.pool, budget_bytes))

    def fastest_within(self, budget_bytes: int) -> Candidate:
        """Return the fastest candidate within a budget, but the baseline if that fits.

        Requires: the budget is at least ``least_bytes``.
        """
        return next(self._fitting(self.pool, budget_bytes))

    def _fitting(self, pool: Pool, budget_bytes: int) -> Iterator[Candidate]:
        """Yield the members of ``pool`` within a budget: the baseline, then the fastest first."""
        for candidate in reversed(pool.members):
            if candidate.peak_bytes > budget_bytes:  # the allocator never hands out less
                continue
            if self.counted_bytes(candidate) <= budget_bytes:
                yield candidate

    def points(self, better: Sequence[tuple[int, float]] = ()) -> list[tuple[int, float]]:
        """Return ``(peak bytes, seconds)`` of candidates, including the fastest for any budget.

        If the allocator must be simulated, only ``Effort.frontier_points`` of them are returned,
        evenly spaced. Candidates that one of the points ``better`` beats in both are left out.
        """
        chosen = self.pool.members
        if self.allocations.settings is not None:
            chosen = self.pool.thinned(self.effort.frontier_points)

        def is_beaten(candidate: Candidate) -> bool:
            least_bytes, total_s = candidate.peak_bytes, candidate.total_s
            return any(nbytes <= least_bytes and s <= total_s for nbytes, s in better)

        left = (c for c in (self.least, *chosen) if not is_beaten(c))
        return [(self.counted_bytes(c), c.total_s) for c in left]

    def gained_s(self, budget_bytes: int) -> float:
        """Return the seconds of a step that local search saves within a budget.

        They are the difference between the fastest schedule of the solvers and the fastest
        candidate; 0 if the solvers have no schedule within the budget.
        """
        solved = next(self._fitting(self.solved, budget_bytes), None)
        chosen = self.fastest_within(budget_bytes)
        return solved.total_s - chosen.total_s if solved else 0.0

    def bound(self, budget_bytes: int) -> Callable[[], float]:
        """Return a function that computes a lower bound on the seconds of a step within a budget.

        No schedule of these stages takes less. The function holds no references to candidates.
        """
        forced_s = sum(parts.forced_s for parts in self.evaluator.options.parts)
        return partial(_bound_s, self.relaxation, self.baseline.total_s, forced_s, budget_bytes)


def _bound_s(
    relaxation: Callable[[], Relaxation] | None,
    baseline_s: float,
    forced_s: float,
    budget_bytes: int,
) -> float:
    """Return a lower bound on the seconds of a step within a budget.

    Args:
        relaxation: makes the linear programs; ``None``: the bound is ``baseline_s``.
        baseline_s: seconds of the step with everything kept.
        forced_s: those of them that are spent on recomputation, as by every schedule.
        budget_bytes: the budget.
    """
    least_s = relaxation().least_s(budget_bytes) if relaxation else 0.0
    return baseline_s + max(0.0, least_s - forced_s)


@dataclass(frozen=True, slots=True)
class _Climbs:
    """Evaluates schedules and runs local searches, each only once."""

    evaluator: Evaluator
    baseline: Candidate
    effort: Effort
    evaluated: dict[bytes, Candidate] = field(default_factory=dict)
    climbed: dict[Candidate, list[Candidate]] = field(default_factory=dict)

    def candidates(self, generator: Generator, setting: Setting) -> list[Candidate]:
        """Return the distinct schedules of a generator, evaluated."""
        candidates: dict[Candidate, None] = {}
        for codes in generator(setting):
            key = codes.tobytes()
            if key not in self.evaluated:
                self.evaluated[key] = self.evaluator.candidate(codes)
            candidates[self.evaluated[key]] = None
        return list(candidates)

    def pool(self, solved: Sequence[Candidate]) -> Pool:
        """Return the pool of ``solved`` and of what local search from some of its members finds."""
        best = Pool.of(self.baseline, solved)
        candidates = list(best.members)
        for start in best.starts(self.effort.starts, self.effort.closer_starts):
            if start not in self.climbed:
                self.climbed[start] = self.evaluator.climb(start, self.effort)
            candidates += self.climbed[start]
        return Pool.of(self.baseline, candidates)
