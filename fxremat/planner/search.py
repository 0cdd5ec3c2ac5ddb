"""All candidate schedules of one step, and the best of them for a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from fxremat.costs.cost import Measured
from fxremat.costs.options import find_options
from fxremat.ir import Chain, Costs
from fxremat.passes.joint.graph import tensors_of
from fxremat.passes.stages.block import BlockCache
from fxremat.planner.allocations import Allocated, Allocations
from fxremat.planner.allocator import AllocatorSettings
from fxremat.planner.bound import Relaxation
from fxremat.planner.candidates import Candidate, Pool
from fxremat.planner.context_bytes import ContextBytes
from fxremat.planner.effort import DEFAULT_GENERATORS
from fxremat.planner.evaluator import Evaluator
from fxremat.planner.footprints import Footprints
from fxremat.planner.generators import (
    Generator,
    Setting,
    build_chain,
    build_costs,
    chain_schedules,
    solved_by,
)
from fxremat.planner.join import equivalent_schedules, join_schedules
from fxremat.progress import PLAN, Progress
from fxremat.units import Counted

POINTS = 32
"""Candidates of a frontier whose peaks are replayed to tell of it."""

MOST_SPARE = 4
"""Pools of other contexts that are known."""

GENERATORS_BY_NAME: Mapping[str, Generator] = {
    "rotor": chain_schedules,
    "equiv_chain": equivalent_schedules,
    "join": join_schedules,
    **{name: solved_by(name) for name in ("store_all", "periodic", "revolve", "pofo")},
}
"""Generators of schedules by the names of their solvers."""


def generators_of(names: Iterable[str]) -> tuple[Generator, ...]:
    """Generators by their names."""
    return tuple(GENERATORS_BY_NAME[name] for name in names)


GENERATORS = generators_of(DEFAULT_GENERATORS)


@dataclass(frozen=True, slots=True)
class Search:
    """All candidate schedules of one joint graph.

    Each generator's schedules are evaluated exactly, and local search sets out from where it
    would for each of them alone, so that no other one ever makes the step slower. It goes by the
    schedules alone, whatever the budget, so a larger budget never makes it slower either.

    Where the device's allocator hands out more than is asked for, the budget is for that. To
    replay a schedule's requests takes as long as making it, so it is done when one is chosen:
    from the fastest down until one fits.

    Attributes:
        measured: what the step costs.
        setting: what schedules are asked for.
        evaluator: of them.
        relaxation: finds what no schedule can do better than; ``None`` where nobody asks.
        solved: the best of the generators' schedules.
        pool: the same with what local search found.
        alone: the same for each generator alone, had the others found nothing.
        allocations: what the device's allocator hands out for each.
        spare: of what was found in other contexts, the latest first.
    """

    measured: Measured
    setting: Setting
    evaluator: Evaluator
    relaxation: Callable[[], Relaxation] | None
    solved: Pool
    pool: Pool
    alone: tuple[Pool, ...]
    allocations: Allocations
    spare: tuple[Pool, ...] = ()

    @staticmethod
    def over(
        measured: Measured,
        blocks: BlockCache,
        context_bytes: ContextBytes,
        *,
        progress: Progress,
        generators: Sequence[Generator] = GENERATORS,
        allocator: AllocatorSettings | None = None,
        budget_on: Counted = "allocated",
        known: Search | None = None,
    ) -> Search:
        """Solve what is measured.

        Args:
            measured: the line and its costs.
            blocks: of the line.
            context_bytes: memory beside the graphs.
            progress: told how far the search has come.
            generators: of schedules.
            allocator: the rules of the device's; ``None``: it hands out what is asked for.
            budget_on: what the budget is for.
            known: a search of the same step at another size, which is to know what is found.
        """
        parts = 2 * len(generators) + 1
        progress(PLAN, 0, parts)
        line = measured.line
        footprints = Footprints(line, measured.workspace_bytes, measured.asked)
        masks = known.evaluator.options.masks if known else None
        options = find_options(measured, blocks, masks=masks)
        chain = build_chain(line, blocks, options)
        evaluator = Evaluator.of(measured, blocks, options, context_bytes)
        costs = build_costs(measured, chain, evaluator)
        baseline = evaluator.keep_all()
        kept = evaluator.evaluation(baseline)
        setting = Setting(line, chain, costs, context_bytes, kept)
        climbs = _Climbs(evaluator, baseline)
        found = []
        for generator in generators:
            found.append(climbs.candidates(generator, setting))
            progress(PLAN, len(found), parts)
        every = list(dict.fromkeys(candidate for own in found for candidate in own))
        pools = []
        for own in (every, *found):
            pools.append(climbs.pool(own))
            progress(PLAN, len(found) + len(pools), parts)
        best, *alone = pools
        return Search(
            measured,
            setting,
            evaluator,
            partial(Relaxation.of, measured, blocks, context_bytes),
            solved=Pool.of(baseline, every),
            pool=Pool.of(baseline, (c for own in (best, *alone) for c in own.members)),
            alone=tuple(alone),
            allocations=Allocations(footprints, context_bytes, allocator, budget_on),
        )

    def knowing(self, other: Search) -> Search:
        """This search, knowing the schedules of ``other``, of the step in another context."""
        return replace(self, spare=(other.pool, *self.spare)[:MOST_SPARE])

    @property
    def chain(self) -> Chain:
        """The stages."""
        return self.setting.chain

    @property
    def costs(self) -> Costs:
        """What the solvers work on."""
        return self.setting.costs

    @property
    def baseline(self) -> Candidate:
        """Nothing recomputed."""
        return self.pool.baseline

    @property
    def settled(self) -> frozenset[int]:
        """Storages that cannot travel: what others hold, what is on another device, and what
        would have to be put together again in another way than it was traced.
        """
        line = self.measured.line
        joint, table = line.joint, line.joint.storages
        returned = (*joint.results, *joint.gradients)
        fixed = table.of((*joint.given, *joint.tangents, *line.pinned)) - line.offloaded
        fixed |= table.of(returned)
        device = self.setting.context_bytes.device
        elsewhere = (n for n in joint.forward if any(t.device != device for t in tensors_of(n)))
        return fixed | table.of(elsewhere) | self.measured.displaced

    def allocated(self, candidate: Candidate) -> Allocated:
        """What a candidate takes of the device."""
        return self.allocations.of(candidate, lambda: self.evaluator.program(candidate))

    def counted_bytes(self, candidate: Candidate) -> int:
        """Of a candidate's peak: what the budget is for."""
        return self.allocated(candidate).counted_bytes(self.allocations.budget_on)

    @property
    def least(self) -> Candidate:
        """The schedule of the lowest peak; the fastest among those."""
        first, *others = self.pool.members
        best, least_bytes = first, self.counted_bytes(first)
        for candidate in others:
            if candidate.peak_bytes > least_bytes:  # what is handed out is never less
                break
            if self.counted_bytes(candidate) <= least_bytes:
                best, least_bytes = candidate, self.counted_bytes(candidate)
        return best

    @property
    def least_bytes(self) -> int:
        """The least feasible budget."""
        return self.counted_bytes(self.least)

    def fits(self, budget_bytes: int) -> bool:
        """Whether a candidate fits."""
        return any(True for _ in self._fitting(self.pool, budget_bytes))

    def fastest_within(self, budget_bytes: int) -> Candidate:
        """The fastest candidate whose exact peak fits.

        Where everything can be kept nothing is recomputed, be it free.

        Requires: the budget is at least the least one's peak.
        """
        return next(self._fitting(self.pool, budget_bytes))

    def _fitting(self, pool: Pool, budget_bytes: int) -> Iterator[Candidate]:
        """Those that fit, the fastest first, but for the baseline, which is before all."""
        for candidate in reversed(pool.members):
            too_much = candidate.peak_bytes > budget_bytes  # as is what is handed out then
            if not too_much and self.counted_bytes(candidate) <= budget_bytes:
                yield candidate

    def points(self, better: Sequence[tuple[int, float]] = ()) -> list[tuple[int, float]]:
        """Peak and seconds of candidates, one of which is the fastest within any budget.

        Where peaks must be replayed these are some candidates, evenly among all. Those that one of
        the points ``better`` beats in both are left out.
        """
        chosen = self.pool.members
        if self.allocations.settings is not None:
            chosen = self.pool.thinned(POINTS)

        def is_beaten(candidate: Candidate) -> bool:
            least_bytes, total_s = candidate.peak_bytes, candidate.total_s  # it takes no less
            return any(nbytes <= least_bytes and s <= total_s for nbytes, s in better)

        left = (c for c in (self.least, *chosen) if not is_beaten(c))
        return [(self.counted_bytes(c), c.total_s) for c in left]

    def gained_s(self, budget_bytes: int) -> float:
        """Seconds by which local search beats the solvers within a budget.

        0 where they find nothing within it.
        """
        solved = next(self._fitting(self.solved, budget_bytes), None)
        chosen = self.fastest_within(budget_bytes)
        return solved.total_s - chosen.total_s if solved else 0.0

    def bound(self, budget_bytes: int) -> Callable[[], float]:
        """Finds seconds: no schedule of these stages within the budget takes less.

        It holds none of the candidates.
        """
        forced_s = sum(parts.forced_s for parts in self.evaluator.options.parts)
        return partial(_bound_s, self.relaxation, self.baseline.total_s, forced_s, budget_bytes)


def _bound_s(
    relaxation: Callable[[], Relaxation] | None,
    baseline_s: float,
    forced_s: float,
    budget_bytes: int,
) -> float:
    """Return a lower bound of a step's seconds.

    The baseline spends ``forced_s`` on recomputation, as every schedule does.
    """
    least_s = relaxation().least_s(budget_bytes) if relaxation else 0.0
    return baseline_s + max(0.0, least_s - forced_s)


@dataclass(frozen=True, slots=True)
class _Climbs:
    """Evaluates each schedule once, and sets out from it for local search once."""

    evaluator: Evaluator
    baseline: Candidate
    known: dict[bytes, Candidate] = field(default_factory=dict)
    done: dict[Candidate, list[Candidate]] = field(default_factory=dict)

    def candidates(self, generator: Generator, setting: Setting) -> list[Candidate]:
        """Those of a generator, each once."""
        found: dict[Candidate, None] = {}
        for codes in generator(setting):
            key = codes.tobytes()
            if key not in self.known:
                self.known[key] = self.evaluator.candidate(codes)
            found[self.known[key]] = None
        return list(found)

    def pool(self, solved: Sequence[Candidate]) -> Pool:
        """The best of ``solved``, and of what is found from some of them."""
        best = Pool.of(self.baseline, solved)
        found = list(best.members)
        for start in best.starts():
            if start not in self.done:
                self.done[start] = self.evaluator.climb(start)
            found += self.done[start]
        return Pool.of(self.baseline, found)
