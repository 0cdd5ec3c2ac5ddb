"""From a joint graph and a budget to a plan and the graphs that carry it out."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.costs.bandwidth import know_link, link_key, measure_link
from fxremat.costs.cache import cost_cache
from fxremat.costs.cost import Measured, Progress, measure_line
from fxremat.costs.library import with_convolutions
from fxremat.costs.overhead import Around, Rehearsal
from fxremat.costs.scaled import Anchor, ScaledCosts
from fxremat.costs.synthetic import Synthesizer
from fxremat.errors import BudgetError, CostError, PlanError
from fxremat.frontend.budget import Budget
from fxremat.frontend.dimensions import Dimension, dimensions_of, groups_of, resized
from fxremat.frontend.emission import Graphs, follow
from fxremat.frontend.largest import largest_fitting
from fxremat.frontend.origin import differences, key_of, origin_of_costs, origin_of_plan, version_of
from fxremat.frontend.store import Store
from fxremat.frontend.ways import StepGraph, Way, emit, fastest
from fxremat.ir import MeasuredLink, Origin, RecordedCosts
from fxremat.passes.emit.rewrite import BlockModules
from fxremat.passes.joint.build import build_joint_graph
from fxremat.passes.joint.digest import digest
from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.joint.invert import is_inverse
from fxremat.passes.joint.sizes import Values, settle
from fxremat.passes.joint.storage import tensors_of
from fxremat.passes.stages.blocks import BlockCache
from fxremat.passes.stages.linearize import linearize
from fxremat.passes.stages.signature import tensor_key
from fxremat.planner.allocations import settings_of
from fxremat.planner.resized import least_bytes_at
from fxremat.planner.situation import NO_LESSON, Lesson, Situation
from fxremat.planner.surroundings import Caller, Surroundings, settled, surroundings_of
from fxremat.planner.transfers import HostMemory
from fxremat.report.plan import Plan
from fxremat.simulate.allocator import AllocatorSettings
from fxremat.units import format_bytes

LOG = logging.getLogger("fxremat")

LEAST = Budget("min")

MOST_BLOCKS = 4096
"""Distinct blocks whose code is kept."""

MOST_SIZES = 128
"""Sizes whose costs are kept; which was met first goes first."""

MOST_SIZE = 1 << 20
"""Of a dimension: more is not tried."""

MOST_BYTES = 1 << 60
"""More than any budget."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and its graphs.

    Attributes:
        rehearsal: tells what the step takes beside its calls; it holds the step's inputs.
            ``None`` where that is known, or will not be.
        note_overhead: keeps what was told.
    """

    plan: Plan
    graphs: Graphs
    rehearsal: Rehearsal | None = None
    note_overhead: Callable[[float], None] = lambda _seconds: None

    def with_overhead(self, seconds: float) -> Planned:
        """The same, of a step that takes ``seconds`` beside its calls."""
        return replace(self, plan=self.plan.with_overhead(seconds), rehearsal=None)


class Planner:
    """Plans one captured step, for whatever a call finds.

    Args:
        module: AOTAutograd's joint graph.
        forward_output_count: how many of its outputs are the forward's.
        inputs: real values of primals, by index; they are held until the first plan is made.
        budget: what the peak may reach.
        caller: what is needed beside the step at every call.
        progress: told how far measuring and solving have come.
        places: of primals that are arguments of the call, where known.
        host: memory to which storages may travel; ``None``: none may.
        exact: gradients must be bitwise those without a plan; else inputs of norms may be
            rebuilt from outputs where that is faster, or fits where nothing else does.
        allocator: rules that hold in place of those of the device's allocator.
        costs: of the step as it was traced, to be taken for what was measured.
        store: costs and plans that are known; ``None``: there are none.

    Attributes:
        budget: as given; a share means the bytes of the first plan from then on.
        joint: the graph that plans are made for.
        dimensions: of arguments, whose sizes are symbols.

    Raises:
        CaptureError, GraphError, CostError: as the passes raise them.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        *,
        forward_output_count: int,
        inputs: Mapping[int, torch.Tensor],
        budget: Budget,
        caller: Caller,
        progress: Progress,
        places: Mapping[int, str] | None = None,
        host: HostMemory | None = None,
        exact: bool = True,
        allocator: AllocatorSettings | None = None,
        costs: RecordedCosts | None = None,
        store: Store | None = None,
    ) -> None:
        self.budget = budget
        module, self.sizes = settle(module)
        primals = [n for n in module.graph.nodes if n.op == "placeholder"]
        self.dimensions = dimensions_of(primals, self.sizes, places or {})
        self._module = module
        self._output_count = forward_output_count
        self._mutated = torch_compat.mutated_primals(module)
        self._digests = digest(
            module, forward_output_count=forward_output_count, mutated_primals=self._mutated
        )
        self._inputs = inputs
        self._caller = caller
        self._progress = progress
        self._host = host
        self._exact = exact
        self._allocator = allocator
        self._costs = costs
        self._store = store or Store(None)
        self._modules = BlockModules()
        self._graphs: list[_Costed] = []
        self._resized: dict[Values, list[_Costed]] = {}
        self._ways: list[Way] = []

    @functools.cached_property
    def shaping(self) -> frozenset[int]:
        """Symbols that tensors of the graph follow."""
        return self.sizes.shaping(self._module.graph.nodes)

    @property
    def joint(self) -> JointGraph:
        """The graph that the latest plan is of; all have the same inputs and results."""
        return self._graphs[0].graph.line.joint

    def first(
        self, situation: Situation, *, kept: Plan | None = None, rehearse: bool = True
    ) -> Planned:
        """The plan for the call that was captured.

        Args:
            situation: what that call finds.
            kept: a plan to follow.
            rehearse: tell how to find what the step takes beside its calls.

        Raises:
            BudgetError: no schedule that was found fits the budget.
            PlanError: ``kept`` is not of this step.
            HostMemoryError: the host memory cannot be had.
            CostError: an operation cannot be measured.
        """
        try:
            planned = self._followed(kept, situation) if kept else self.again(situation)
        except BudgetError as error:
            if not self.grown(error):
                self._settle()
                raise self.advised(error, situation) from None
            planned = self.again(situation)
        if kept is None and rehearse:
            planned = self._with_overhead(planned)
        self.budget = replace(self.budget, nbytes=planned.plan.budget_bytes, share=None)
        self._settle()
        return planned

    def _settle(self) -> None:
        """Let the values of the captured call go: no batch outlives its step."""
        traced = self._graphs[0].graph
        self._caller = settled(self._caller, traced.line.joint, traced.real)
        self._inputs = {}
        self._graphs = [replace(own, graph=replace(own.graph, real={})) for own in self._graphs]
        self._progress = _silent

    def again(self, situation: Situation, *, least: bool = False) -> Planned:
        """The plan for a later call.

        Args:
            situation: what the call finds.
            least: that of the least peak, be it above the budget.

        Raises:
            BudgetError: no schedule that was found fits the budget.
            HostMemoryError: the host memory cannot be had.
        """
        return self._planned(situation, LEAST if least else self.budget)

    def grown(self, error: BudgetError) -> bool:
        """Whether the budget is ``"min"``, and then lets it be what a call needs at the least."""
        nbytes = error.least_budget_bytes
        if nbytes is None or not self.budget.grows:
            return False
        LOG.info(
            "the budget %r is %s from now on: a call needs that at the least",
            self.budget.written,
            format_bytes(nbytes),
        )
        self.budget = replace(self.budget, nbytes=nbytes)
        return True

    def known_lesson(self) -> Lesson:
        """What steps of the sizes of the capture have taught another process."""
        return self._store.get("lesson", self._lesson_key(), Lesson) or NO_LESSON

    def keep_lesson(self, lesson: Lesson) -> None:
        """Let other processes know it."""
        self._store.put("lesson", self._lesson_key(), Lesson, lesson)

    def _lesson_key(self) -> str:
        placeholders = self._module.graph.find_nodes(op="placeholder")
        devices = {t.device for node in placeholders for t in tensors_of(node)}
        device = max(devices, key=lambda device: device.type != "cpu")
        return key_of(origin_of_costs(self._digests, device), loss=self._caller.loss_bytes)

    def around(self, situation: Situation) -> Surroundings:
        """What is beside the step at a call."""
        return self._costed_at(situation.sizes)[0].around(situation)

    def turn_bytes(self, situation: Situation) -> int:
        """What the step's own loss needs at a call."""
        return situation.turn_bytes(self._costed_at(situation.sizes)[0].base)

    def tangent_bytes(self, values: Values) -> int:
        """Of the gradients of the outputs, at sizes ``values``."""
        return self._costed_at(values)[0].base.tangent_bytes

    def fits(self, situation: Situation, *, thorough: bool = True) -> bool:
        """Whether any schedule does at a call: of those that are known, or ``thorough``, any."""
        assert self.budget.nbytes is not None
        ways = self._within(situation, self.budget if thorough else LEAST)
        return min(way.least_bytes for way in ways) <= self.budget.nbytes

    def advised(self, error: BudgetError, situation: Situation) -> BudgetError:
        """``error``, that a call does not fit, with the largest sizes that do."""
        if error.least_budget_bytes is None or self.budget.nbytes is None:
            return error
        largest: dict[str, int] = {}
        told = []
        for group in groups_of(self.dimensions, self.sizes.hints, situation.sizes):
            most = min(self.sizes.most[d.symbol] or MOST_SIZE for d in group)
            found = self.largest(situation, group, most=most)
            if found is not None:
                largest |= {d.name: found for d in group}
                told.append(f"{found} for {' = '.join(d.name for d in group)}")
        if not told:
            return error
        return BudgetError(
            f"{error}. The largest sizes that fit, each while others stay: {'; '.join(told)}",
            least_budget_bytes=error.least_budget_bytes,
            largest=largest,
        )

    def largest(
        self,
        situation: Situation,
        group: Sequence[Dimension],
        *,
        most: int,
    ) -> int | None:
        """The largest size of some dimensions that follow each other that fits.

        Args:
            situation: what a call finds beside it.
            group: the dimensions.
            most: the largest that is tried.

        Returns ``None`` where not even 1 fits.
        """
        assert self.budget.nbytes is not None

        def at(size: int) -> Situation:
            return replace(situation, sizes=resized(situation.sizes, group, size))

        return largest_fitting(
            lambda size: self.least_bytes(at(size)),
            lambda size: self.fits(at(size)),
            first=situation.sizes[group[0].symbol],
            budget_bytes=self.budget.nbytes,
            most=most,
        )

    def least_bytes(self, situation: Situation) -> int:
        """The least budget of a call, by schedules that are known; nothing is run for it."""
        self._know_ways(situation)
        found = []
        for way, costed in zip(self._ways, self._graphs, strict=True):
            if situation.sizes == self.sizes.hints:
                own = costed
            else:
                own = self._resize(costed, situation.sizes, run=False)
            around = own.around(situation)
            if way.transfers is None:
                found.append(least_bytes_at(way.search, own.measured, around))
            else:
                found.append(way.at(own.measured, around, budget_bytes=MOST_BYTES).least_bytes)
        return min(found)

    def predicted(self, situation: Situation) -> tuple[int, float]:
        """The least budget of a call that fits, and the seconds of its plan's calls."""
        assert self.budget.nbytes is not None
        ways = self._within(situation, self.budget)
        _, found = fastest(ways, self.budget.nbytes)
        return min(way.least_bytes for way in ways), found.total_s

    def room_bytes(self, situation: Situation) -> int:
        """The least that a step allocates beyond what is there whatever its plan."""
        ways = self._within(situation, LEAST)
        return min(w.least_bytes - w.search.setting.surroundings.given_bytes for w in ways)

    def _graph(self, *, exact: bool) -> StepGraph:
        """The step's graph as it was traced, or, not ``exact``, with norms undone."""
        joint = build_joint_graph(
            self._module,
            forward_output_count=self._output_count,
            mutated_primals=self._mutated,
            exact=exact,
            sizes=self.sizes,
        )
        line = linearize(joint)
        real = {joint.primals[i]: tensor for i, tensor in self._inputs.items()}
        origin = origin_of_costs(self._digests, joint.device)
        return StepGraph(line, BlockCache(line), real, exact, origin)

    def _costed(self, graph: StepGraph, measured: Measured) -> _Costed:
        if self._graphs:  # nothing that is around knows how norms are computed
            base = self._graphs[0].base
        else:
            base = surroundings_of(measured.line.joint, graph.real, self._caller)
        return _Costed(graph, measured, base)

    def _costed_at(self, values: Values) -> list[_Costed]:
        """The graphs at sizes ``values``, and what they cost there."""
        if values == self.sizes.hints:
            return self._graphs
        if values not in self._resized:
            if len(self._resized) >= MOST_SIZES:
                self._resized.pop(next(iter(self._resized)))
            self._resized[values] = [self._resize(costed, values) for costed in self._graphs]
        return self._resized[values]

    def _resize(self, costed: _Costed, values: Values, *, run: bool = True) -> _Costed:
        """``costed`` at sizes ``values``; what no law tells of is measured there if ``run``."""
        graph = costed.graph
        if costed.scaled is None:
            anchor = Anchor(self.sizes.hints, costed.measured.costs)
            costed.scaled = ScaledCosts.of(graph.line, graph.blocks, (anchor,))
        costs = costed.scaled.at(values)
        if run:
            costs = with_convolutions(costs, graph.line, values, cost_cache())
        measured = costed.measured.at(costs)
        joint, caller = measured.line.joint, self._caller
        if caller.loss_bytes is not None:  # as the outputs that it is computed from
            table, first = joint.storages, costed.base.tangent_bytes
            share = table.total(table.of(joint.tangents)) / first if first else 1.0
            caller = replace(caller, loss_bytes=math.ceil(caller.loss_bytes * share))
        base = surroundings_of(joint, {}, caller, values=values)
        return _Costed(replace(graph, line=measured.line), measured, base)

    def _planned(self, situation: Situation, budget: Budget) -> Planned:
        """Find the best plan, or know it."""
        if not self._graphs:
            traced = self._graph(exact=True)
            self._graphs.append(self._costed(traced, self._measured(traced)))
        origin = self._origin(self._costed_at(situation.sizes)[0], situation)
        searched = self._ways or situation.sizes != self.sizes.hints
        found = None if searched else self._known(origin, budget)
        return found or self._made(situation, origin, budget)

    def _followed(self, kept: Plan, situation: Situation) -> Planned:
        """Follow a plan that was kept.

        Raises:
            PlanError: it is of another step.
        """
        graph = self._graph(exact=kept.exact)
        if kept.origin is None or kept.measured is None:
            raise PlanError("this plan was not made of a model: compile without plan=")
        now = replace(graph.origin, options=kept.origin.options, held=kept.origin.held)
        if now == kept.origin:
            self._graphs.append(self._costed(graph, Measured.of(graph.line, kept.measured)))
            now = self._origin(self._graphs[0], situation)
        told = tuple(differences(kept.origin, now))
        if told:
            raise PlanError(
                f"the plan is not one of this step: {'; '.join(told)}. Compile as the plan was "
                "made, or leave plan= out to plan again",
                differs=told,
            )
        return Planned(kept, self._follow(kept, graph))

    def _follow(self, plan: Plan, graph: StepGraph) -> Graphs:
        return follow(
            plan, graph.line, graph.blocks, self._modules, device=graph.device, host=self._host
        )

    def _measured(self, graph: StepGraph) -> Measured:
        """What ``graph`` costs: given, known, or measured now."""
        key = key_of(graph.origin, exact=graph.exact)
        known = self._costs if graph.exact else None
        if known is not None:
            return Measured.of(graph.line, known)
        known = self._store.get("costs", key, RecordedCosts)
        if known is not None:
            try:
                return Measured.of(graph.line, known)
            except CostError as error:
                LOG.warning("known costs are ignored: %s", error)
        measured = measure_line(
            graph.line, graph.blocks, real=graph.real, cache=cost_cache(), progress=self._progress
        )
        self._store.put("costs", key, RecordedCosts, measured.costs)
        return measured

    def _rules(self, graph: StepGraph) -> AllocatorSettings | None:
        return self._allocator or settings_of(graph.device)

    def _origin(self, costed: _Costed, situation: Situation) -> Origin:
        """What a plan would hold for."""
        host, caller = self._host, self._caller
        options = {
            "exact": self._exact,
            "offload": _offload_of(host),
            "host_limit": host.limit_bytes if host else None,
            "budget_on": caller.budget_on,
            "reserve": caller.reserve_bytes,
            "accumulate": caller.accumulate,
            "optimizer": f"{sum(caller.held_bytes)} bytes",
            "loss": None if caller.loss_bytes is None else f"{caller.loss_bytes} bytes",
        }
        return origin_of_plan(
            costed.graph.origin,
            options=options,
            surroundings=costed.around(situation),
            allocator=self._rules(costed.graph),
        )

    def _plan_key(self, origin: Origin, budget: Budget) -> str:
        return key_of(
            origin,
            budget=(budget.nbytes, budget.share),
            host_dir=self._host.folder if self._host else None,
            ortools=version_of("ortools"),
        )

    def _known(self, origin: Origin, budget: Budget) -> Planned | None:
        """A plan that was made before of such a step."""
        if self._costs is not None:
            return None
        plan = self._store.get("plan", self._plan_key(origin, budget), Plan)
        if plan is None:
            return None
        traced = self._graphs[0].graph
        graph = traced if plan.exact == traced.exact else self._graph(exact=plan.exact)
        try:
            return Planned(plan, self._follow(plan, graph))
        except PlanError as error:
            LOG.warning("a known plan is ignored: %s", error)
            return None

    def _within(self, situation: Situation, budget: Budget) -> list[Way]:
        """All ways of the step, with what a call finds beside it.

        Schedules that are known are taken; where none fits, others are looked for.
        """
        new = self._know_ways(situation) and situation.sizes == self.sizes.hints
        costed = self._costed_at(situation.sizes)
        most = MOST_BYTES if budget.nbytes is None else budget.nbytes
        ways = []
        for way, own in zip(self._ways, costed, strict=True):
            around = own.around(situation)
            if situation.sizes == self.sizes.hints:
                ways.append(way.within(around))
            else:
                ways.append(way.at(own.measured, around, budget_bytes=most))
        if new or budget.nbytes is None or min(w.least_bytes for w in ways) <= budget.nbytes:
            return ways
        found = self._search(situation)
        self._ways = [way.knowing(own) for way, own in zip(self._ways, found, strict=True)]
        return found

    def _make_room(self) -> None:
        """Forget blocks of plans that may be gone: what is used again is found again."""
        if len(self._modules.modules) > MOST_BLOCKS:
            self._modules = BlockModules()
            for costed in self._graphs:
                costed.graph.blocks.clear()

    def _know_ways(self, situation: Situation) -> bool:
        """Let some schedules be known, those at the sizes of the capture; were none?"""
        new = not self._ways
        if new:
            self._ways = self._search(replace(situation, sizes=self.sizes.hints))
        return new

    def _made(self, situation: Situation, origin: Origin, budget: Budget) -> Planned:
        """Search for the best plan, among schedules that are known where there are some."""
        self._make_room()
        ways = self._within(situation, budget)
        first = ways[0].search
        full_bytes = first.counted_bytes(first.baseline)
        least = min(ways, key=lambda way: way.least_bytes)
        resolved = budget.resolve(
            full_bytes=full_bytes,
            least_bytes=least.least_bytes,
            needed_by=least.describe_least(),
            beside=situation.described(self.joint),
        )
        way, found = fastest(ways, resolved)
        plan, emitted = emit(
            way,
            found,
            resolved,
            self._modules,
            least_bytes=least.least_bytes,
            baseline=first.baseline,
            baseline_bytes=full_bytes,
            host=self._host,
            origin=origin,
            beside=situation.described(self.joint),
            sizes=situation.sizes,
        )
        if self._graphs[0].graph.device.type == "cuda" and self._inputs:
            torch.cuda.empty_cache()  # blocks that measuring has left would be handed out whole
        if self._costs is None and situation.sizes == self.sizes.hints:
            self._store.put("plan", self._plan_key(origin, budget), Plan, plan)
        return Planned(plan, emitted)

    def _search(self, situation: Situation) -> list[Way]:
        """All ways of the step."""
        if not self._exact and len(self._graphs) == 1:
            undone = self._graph(exact=False)
            if any(map(is_inverse, undone.line.joint.forward)):
                self._graphs.append(self._costed(undone, self._measured(undone)))
        return [self._way(costed, situation) for costed in self._costed_at(situation.sizes)]

    def _way(self, costed: _Costed, situation: Situation) -> Way:
        if self._host is not None:
            self._find_link(costed.graph, self._host)
        return Way.of(
            costed.graph,
            costed.measured,
            costed.around(situation),
            host=self._host,
            progress=self._progress,
            allocator=self._rules(costed.graph),
            budget_on=self._caller.budget_on,
        )

    def _find_link(self, graph: StepGraph, host: HostMemory) -> None:
        """Let the link to ``host`` be known: given, kept, or measured now."""
        folder, limit = host.folder, host.limit_bytes
        key = link_key(graph.device, host_dir=folder, host_limit_bytes=limit)
        name = key_of(replace(graph.origin, operations="", code="", inputs=()), link=key[1:])
        link = self._costs.link if self._costs else self._store.get("link", name, MeasuredLink)
        if link is not None:
            know_link(key, link)
            return
        with torch_compat.real_execution(), torch.no_grad():
            link = measure_link(graph.device, host_dir=folder, host_limit_bytes=limit)
        self._store.put("link", name, MeasuredLink, link)

    def _with_overhead(self, planned: Planned) -> Planned:
        """``planned`` with what the step takes beside its calls, or a way to find that."""
        graph = self._graphs[0].graph
        key = key_of(graph.origin, overhead_of=planned.graphs.arena is not None)
        known = self._store.get("overhead", key, float)
        if known is not None:
            return planned.with_overhead(known)
        return replace(
            planned,
            rehearsal=_rehearsal(planned, graph.line.joint, self._inputs),
            note_overhead=lambda seconds: self._store.put("overhead", key, float, seconds),
        )


@dataclass(slots=True)
class _Costed:
    """A graph of the step at one size, what it costs, and what is beside it at every call."""

    graph: StepGraph
    measured: Measured
    base: Surroundings
    scaled: ScaledCosts | None = None

    def around(self, situation: Situation) -> Surroundings:
        """What is beside it at a call."""
        return situation.around(self.base, self.measured.line.joint)


def _silent(_what: str, _done: int, _total: int) -> None:
    """No progress: later plans are made inside a training step."""


def _rehearsal(
    planned: Planned, joint: JointGraph, inputs: Mapping[int, torch.Tensor]
) -> Rehearsal:
    """How to run the planned step without its caller."""
    with torch_compat.real_execution():
        values = Synthesizer(joint, {joint.primals[i]: t for i, t in inputs.items()})
        primals, tangents = values.of(joint.primals), values.of(joint.tangents)
    around = Around(
        device=joint.device,
        inputs=tuple(tensor_key(n.meta["val"]) for n in joint.primals),
        operations=tuple(str(n.target) for n in (*joint.forward, *joint.backward)),
        gradients=sum(isinstance(g, fx.Node) for g in joint.backward_outputs),
        travels=planned.graphs.arena is not None,
    )
    return Rehearsal(
        around,
        planned.graphs.forward.forward,
        planned.graphs.backward.forward,
        outputs=len(joint.forward_outputs),
        primals=tuple(primals.values()),
        tangents=tuple(tangents.values()),
        calls_s=planned.plan.timeline.makespan_s,
    )


def _offload_of(host: HostMemory | None) -> str | bool:
    """What ``offload=`` was."""
    if host is None:
        return False
    if host.conv:
        return "conv"
    return "only" if host.only else "auto"
