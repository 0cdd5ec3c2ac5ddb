"""The graphs of a step, their schedules, and from the chosen one to a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import fx

from fxremat.costs.cost import Measured
from fxremat.frontend.emission import Graphs, write_graphs
from fxremat.frontend.record import describe_peak, record_memory
from fxremat.ir import Decision, MeasuredLink, Origin, RecordedCosts
from fxremat.ir.schedule import decoded
from fxremat.passes.emit.program import Program
from fxremat.passes.emit.rewrite import BlockModules
from fxremat.passes.fuse.unit import Unit
from fxremat.passes.joint.sizes import Values
from fxremat.passes.stages.block import BlockCache
from fxremat.passes.stages.linearize import Line
from fxremat.planner.allocator import AllocatorSettings
from fxremat.planner.context_bytes import ContextBytes
from fxremat.planner.evaluation import Evaluation
from fxremat.planner.overlap import may_overlap, overlap_within
from fxremat.planner.pool import Candidate
from fxremat.planner.resized import search_at
from fxremat.planner.search import Search, generators_of
from fxremat.planner.transfers import HostMemory, Transfers
from fxremat.progress import Progress
from fxremat.report.facts import Fused
from fxremat.report.frontier import frontier_of
from fxremat.report.memory import Kind, Outline, StepMemory
from fxremat.report.plan import Plan
from fxremat.units import Counted

MOST_BASES = 16
"""Schedules of which storages travel, where all that a graph may come to is looked at."""


@dataclass(frozen=True, slots=True)
class StepGraph:
    """One way to compute the step.

    Attributes:
        line: its graph, cut into stages.
        blocks: of ``line``.
        real: values of primals, where known.
        exact: every value is computed as it was traced.
        origin: what costs of it hold for.
    """

    line: Line
    blocks: BlockCache
    real: Mapping[fx.Node, torch.Tensor]
    exact: bool
    origin: Origin

    @property
    def device(self) -> torch.device:
        """The device of the step."""
        return self.line.joint.device


@dataclass(frozen=True, slots=True)
class Variant:
    """Schedules of one graph of the step.

    Attributes:
        search: all of them.
        transfers: those with storages that travel; ``None``: none may.
        exact: the graph computes every value as it was traced.
    """

    search: Search
    transfers: Transfers | None
    exact: bool

    @staticmethod
    def of(
        graph: StepGraph,
        measured: Measured,
        context_bytes: ContextBytes,
        *,
        host: HostMemory | None,
        progress: Progress,
        allocator: AllocatorSettings | None,
        budget_on: Counted,
        generators: Iterable[str],
        known: Variant | None = None,
        link: MeasuredLink | None = None,
    ) -> Variant:
        """The variant that computes ``graph``, with its schedules.

        Args:
            graph: what to schedule.
            measured: what it costs.
            context_bytes: what is held beside it.
            host: memory to which storages may travel; ``None``: none may.
            progress: told how far solving has come.
            allocator: the rules of the device's.
            budget_on: what the budget is for.
            generators: names of solvers whose schedules are looked at.
            known: those of the same graph at another size, which are to know what is found.
            link: how fast storages travel; ``None``: that is measured.

        Raises:
            HostMemoryError: the host memory cannot be had.
        """
        search = Search.over(
            measured,
            graph.blocks,
            context_bytes,
            progress=progress,
            generators=generators_of(generators),
            allocator=allocator,
            budget_on=budget_on,
            known=known.search if known else None,
        )
        return Variant(search, Transfers.of(search, host, link) if host else None, graph.exact)

    def within(self, context_bytes: ContextBytes) -> Variant:
        """This variant, where something else is held beside the graph."""
        if self.search.setting.context_bytes == context_bytes:
            return self
        search = self.search.within(context_bytes)
        return Variant(search, self._transfers(search), self.exact)

    def at(self, measured: Measured, context_bytes: ContextBytes, *, budget_bytes: int) -> Variant:
        """This variant at another size, with the schedules that can matter within a budget."""
        search = search_at(self.search, measured, context_bytes, budget_bytes=budget_bytes)
        return Variant(search, self._transfers(search), self.exact)

    def _transfers(self, search: Search) -> Transfers | None:
        """Transfers of another search of the graph."""
        own = self.transfers
        return Transfers.of(search, own.host, own.link) if own is not None else None

    def knowing(self, other: Variant) -> Variant:
        """This variant, knowing the schedules that ``other`` has for other context bytes."""
        return replace(self, search=self.search.knowing(other.search))

    def with_sent(self, found: Iterable[Candidate]) -> Variant:
        """This variant, knowing what travels in plans for other context bytes."""
        if self.transfers is None:
            return self
        return replace(self, transfers=self.transfers.knowing(found))

    def graded(self) -> Iterator[Candidate]:
        """Schedules from least bytes to least seconds; with transfers, ever more is away."""
        pool = self.search.pool
        if self.transfers is None:
            return iter(pool.members)
        only = self.transfers.host.only
        return self.transfers.graded((pool.baseline,) if only else pool.thinned(MOST_BASES))

    @property
    def host_limited(self) -> bool:
        """Whether there is a limit to the host memory that schedules may take."""
        return self.transfers is not None and self.transfers.host.limit_bytes is not None

    @property
    def least_bytes(self) -> int:
        """The least feasible budget."""
        return (self.transfers or self.search).least_bytes

    @property
    def costs(self) -> RecordedCosts:
        """All measurements that the schedules rest on."""
        link = self.transfers.link if self.transfers else None
        return replace(self.search.measured.costs, link=link)

    def describe_least(self) -> str:
        """What the least feasible budget is needed for."""
        if self.transfers is not None:
            return self.transfers.describe_least()
        search = self.search
        return describe_peak(
            search.evaluator.program(search.least),
            search.setting.context_bytes,
            search.allocations.footprints,
        )

    def fastest_within(self, budget_bytes: int) -> Candidate:
        """The fastest that fits."""
        return (self.transfers or self.search).fastest_within(budget_bytes)


def fastest(variants: Sequence[Variant], budget_bytes: int) -> tuple[Variant, Candidate]:
    """The fastest within a budget, and its variant; the exact one where it is as fast."""
    fitting = [variant for variant in variants if variant.least_bytes <= budget_bytes]
    found = [(variant, variant.fastest_within(budget_bytes)) for variant in fitting]
    first, chosen = found[0]
    if chosen is first.search.baseline:
        return first, chosen  # everything fits
    return min(found, key=lambda pair: pair[1].total_s)


def emit(
    variant: Variant,
    found: Candidate,
    budget_bytes: int,
    modules: BlockModules,
    *,
    least_bytes: int,
    traced: Search,
    baseline_bytes: int,
    host: HostMemory | None,
    origin: Origin,
    beside: tuple[tuple[str, int], ...],
    sizes: Values = (),
    roles: Mapping[int, Kind] | None = None,
    held: Mapping[Kind, int] | None = None,
) -> tuple[Plan, Graphs, Callable[[Plan], Plan]]:
    """Write the graphs of a schedule, the plan that tells of them, and what completes that.

    The step's memory, and how near the plan comes to any other, are found when they are asked for:
    the bound on these is that of the baseline before.

    Args:
        variant: where the schedule was found.
        found: the schedule, and what travels.
        budget_bytes: what it keeps to.
        modules: blocks that are compiled already.
        least_bytes: the least feasible budget.
        traced: has the baseline: nothing recomputed, everything computed as it was traced.
        baseline_bytes: its peak, of what the budget is for.
        host: memory to which storages travel.
        origin: what the plan holds for.
        beside: what the call found beside the graphs, and its bytes.
        sizes: a number for each symbol of the graph.
        roles: what primals are, where known.
        held: what is there before the step beside primals, and its bytes, as far as it is known.
    """
    search, baseline = variant.search, traced.baseline
    line = search.measured.line
    around = search.setting.context_bytes
    link = variant.transfers.link if variant.transfers else None
    chosen = overlap_within(
        search,
        found,
        link=link,
        budget_bytes=budget_bytes,
        allowed=may_overlap(around.device),
    )
    program, evaluation, taken = chosen.program, chosen.evaluation, chosen.allocated
    found = chosen.candidate
    decision = search.evaluator.decision(found)
    graphs = write_graphs(
        program,
        evaluation.peaks_bytes,
        found.moves,
        modules,
        sizes=sizes,
        device=around.device,
        host=host,
    )
    plan = Plan(
        budget_bytes=budget_bytes,
        least_budget_bytes=least_bytes,
        predicted_peak_bytes=taken.allocated_bytes,
        predicted_reserved_bytes=taken.reserved_bytes,
        predicted_held_bytes=evaluation.peak_bytes,
        predicted_s=found.total_s,
        baseline_peak_bytes=baseline_bytes,
        baseline_s=baseline.total_s,
        lower_bound_s=min(baseline.total_s, found.total_s),
        local_search_s=0.0 if host else search.gained_s(budget_bytes),
        host_bytes=graphs.host_bytes,
        schedule=decoded(found.codes),
        held_bytes=_held_bytes(line, decision),
        timeline=chosen.timeline,
        chain=search.chain,
        costs=search.costs,
        frontier=frontier_of(search.points()),
        forward_code=graphs.forward.code,
        backward_code=graphs.backward.code,
        branch_ends=line.segments.ends,
        exact=variant.exact,
        budget_on=search.allocations.budget_on,
        decision=decision,
        origin=origin,
        beside=beside,
        sizes=tuple(zip(line.joint.sizes.names, sizes, strict=True)),
        fused=_fused(program),
        waiting_bytes=evaluation.turn_bytes - around.given_bytes - around.turn_bytes,
        measured=variant.costs,
    )
    record = partial(
        record_memory,
        program,
        around,
        search.allocations.footprints,
        found.moves,
        roles=roles or {},
        beside=held or {},
    )

    # The bound is one of recomputation alone, of the operations as they were traced.
    bound = search.bound(budget_bytes) if variant.exact and not host else None
    kept = partial(traced.evaluator.evaluation, baseline)
    complete = partial(_completed, record=record, bound=bound, kept=kept, total_s=found.total_s)
    return plan, graphs, complete


def _completed(
    plan: Plan,
    *,
    record: Callable[[], StepMemory],
    bound: Callable[[], float] | None,
    kept: Callable[[], Evaluation],
    total_s: float,
) -> Plan:
    """``plan``, whose calls take ``total_s``, with what takes long to find."""
    if bound is not None:
        plan = replace(plan, lower_bound_s=min(bound(), total_s) + plan.overhead_s)
    found = kept()
    baseline = Outline(found.seconds, found.peaks_bytes, found.turn, found.turn_bytes)
    return replace(plan, memory=record(), kept=baseline)


def _fused(program: Program) -> tuple[Fused, ...]:
    """The units that a step runs, as it meets them."""
    targets = (node.target for call in program.calls for node in call.block.nodes)
    count = Counter(target for target in targets if isinstance(target, Unit))
    return tuple(Fused(u.__name__, u.operations, calls) for u, calls in count.items())


def _held_bytes(line: Line, decision: Decision) -> tuple[int, ...]:
    table, held, nodes = line.joint.storages, dict(decision.held), line.nodes
    each = ([nodes[i] for i in held.get(stage, ())] for stage in range(len(line.stages)))
    return tuple(table.total(table.of(own)) for own in each)
