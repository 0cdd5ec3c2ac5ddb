"""From a joint graph and a budget to a plan and the graphs that carry it out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.costs.bandwidth import know_link, link_key, measure_link
from fxremat.costs.cache import cost_cache
from fxremat.costs.cost import Measured, Progress, measure_line
from fxremat.costs.overhead import Around, Rehearsal
from fxremat.costs.synthetic import Synthesizer
from fxremat.errors import CostError, PlanError
from fxremat.frontend.budget import Budget
from fxremat.frontend.emission import Graphs, follow
from fxremat.frontend.origin import differences, key_of, origin_of_costs, origin_of_plan, version_of
from fxremat.frontend.store import Store
from fxremat.frontend.ways import StepGraph, Way, emit, fastest
from fxremat.ir import MeasuredLink, Origin, RecordedCosts
from fxremat.passes.joint.build import build_joint_graph
from fxremat.passes.joint.digest import Digests, digest
from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.joint.invert import is_inverse
from fxremat.passes.stages.blocks import BlockCache
from fxremat.passes.stages.linearize import linearize
from fxremat.passes.stages.signature import tensor_key
from fxremat.planner.allocations import settings_of
from fxremat.planner.surroundings import Caller, Surroundings, surroundings_of
from fxremat.planner.transfers import HostMemory
from fxremat.report.plan import Plan
from fxremat.simulate.allocator import AllocatorSettings

LOG = logging.getLogger("fxremat")


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


def plan_step(
    module: fx.GraphModule,
    *,
    forward_output_count: int,
    inputs: Mapping[int, torch.Tensor],
    budget: Budget,
    caller: Caller,
    progress: Progress,
    host: HostMemory | None = None,
    exact: bool = True,
    allocator: AllocatorSettings | None = None,
    costs: RecordedCosts | None = None,
    kept: Plan | None = None,
    store: Store | None = None,
) -> Planned:
    """Plan one captured step.

    Args:
        module: AOTAutograd's joint graph.
        forward_output_count: how many of its outputs are the forward's.
        inputs: real values of primals, by index.
        budget: what the peak may reach.
        caller: what is needed beside the step.
        progress: told how far measuring and solving have come.
        host: memory to which storages may travel; ``None``: none may.
        exact: gradients must be bitwise those without a plan; else inputs of norms may be
            rebuilt from outputs where that is faster, or fits where nothing else does.
        allocator: rules that hold in place of those of the device's allocator.
        costs: of the step as it was traced, to be taken for what was measured.
        kept: a plan to follow, instead of making one.
        store: costs and plans that are known; ``None``: there are none.

    Raises:
        BudgetError: no schedule that was found fits the budget.
        PlanError: ``kept`` is not of this step.
        HostMemoryError: the host memory cannot be had.
        CaptureError, GraphError, CostError: as the passes raise them.
    """
    mutated = torch_compat.mutated_primals(module)
    step = _Step(
        module,
        forward_output_count,
        inputs,
        mutated,
        digest(module, forward_output_count=forward_output_count, mutated_primals=mutated),
        budget,
        caller,
        progress,
        host,
        exact,
        allocator,
        costs,
        store or Store(None),
    )
    return step.planned() if kept is None else step.followed(kept)


@dataclass(frozen=True, slots=True)
class _Step:
    """A captured step, and what it is planned for; see :func:`plan_step`."""

    module: fx.GraphModule
    forward_output_count: int
    inputs: Mapping[int, torch.Tensor]
    mutated: Sequence[int]
    digests: Digests
    budget: Budget
    caller: Caller
    progress: Progress
    host: HostMemory | None
    exact: bool
    allocator: AllocatorSettings | None
    costs: RecordedCosts | None
    store: Store

    def graph(self, *, exact: bool) -> StepGraph:
        """The step's graph as it was traced, or, not ``exact``, with norms undone."""
        joint = build_joint_graph(
            self.module,
            forward_output_count=self.forward_output_count,
            mutated_primals=self.mutated,
            exact=exact,
        )
        line = linearize(joint)
        real = {joint.primals[i]: tensor for i, tensor in self.inputs.items()}
        origin = origin_of_costs(self.digests, joint.device)
        return StepGraph(line, BlockCache(line), real, exact, origin)

    def planned(self) -> Planned:
        """Find the best plan, or know it."""
        traced = self.graph(exact=True)
        measured = self._measured(traced)
        surroundings = self._surroundings(traced, measured)
        origin = self._origin(traced, surroundings)
        found = self._known(traced, origin)
        if found is None:
            found = self._made(traced, measured, surroundings, origin)
        return self._with_overhead(found, traced)

    def followed(self, kept: Plan) -> Planned:
        """Follow a plan that was kept.

        Raises:
            PlanError: it is of another step.
        """
        graph = self.graph(exact=kept.exact)
        if kept.origin is None or kept.measured is None:
            raise PlanError("this plan was not made of a model: compile without plan=")
        now = replace(graph.origin, options=kept.origin.options, held=kept.origin.held)
        if now == kept.origin:
            surroundings = self._surroundings(graph, Measured.of(graph.line, kept.measured))
            now = self._origin(graph, surroundings)
        told = tuple(differences(kept.origin, now))
        if told:
            raise PlanError(
                f"the plan is not one of this step: {'; '.join(told)}. Compile as the plan was "
                "made, or leave plan= out to plan again",
                differs=told,
            )
        return Planned(kept, self._follow(kept, graph))

    def _follow(self, plan: Plan, graph: StepGraph) -> Graphs:
        return follow(plan, graph.line, graph.blocks, device=graph.device, host=self.host)

    def _measured(self, graph: StepGraph) -> Measured:
        """What ``graph`` costs: given, known, or measured now."""
        key = key_of(graph.origin, exact=graph.exact)
        known = self.costs if graph.exact else None
        if known is not None:
            return Measured.of(graph.line, known)
        known = self.store.get("costs", key, RecordedCosts)
        if known is not None:
            try:
                return Measured.of(graph.line, known)
            except CostError as error:
                LOG.warning("known costs are ignored: %s", error)
        measured = measure_line(
            graph.line, graph.blocks, real=graph.real, cache=cost_cache(), progress=self.progress
        )
        self.store.put("costs", key, RecordedCosts, measured.costs)
        return measured

    def _surroundings(self, graph: StepGraph, measured: Measured) -> Surroundings:
        return surroundings_of(measured.line.joint, graph.real, self.caller)

    def _rules(self, graph: StepGraph) -> AllocatorSettings | None:
        return self.allocator or settings_of(graph.device)

    def _origin(self, graph: StepGraph, surroundings: Surroundings) -> Origin:
        """What a plan would hold for."""
        host, caller = self.host, self.caller
        options = {
            "exact": self.exact,
            "offload": _offload_of(host),
            "host_limit": host.limit_bytes if host else None,
            "budget_on": caller.budget_on,
            "reserve": caller.reserve_bytes,
            "accumulate": caller.accumulate,
            "optimizer": f"{sum(caller.held_bytes)} bytes",
            "loss": None if caller.loss_bytes is None else f"{caller.loss_bytes} bytes",
        }
        return origin_of_plan(
            graph.origin,
            options=options,
            surroundings=surroundings,
            allocator=self._rules(graph),
        )

    def _plan_key(self, origin: Origin) -> str:
        return key_of(
            origin,
            budget=(self.budget.nbytes, self.budget.share),
            host_dir=self.host.folder if self.host else None,
            ortools=version_of("ortools"),
        )

    def _known(self, traced: StepGraph, origin: Origin) -> Planned | None:
        """A plan that was made before of such a step."""
        if self.costs is not None:
            return None
        plan = self.store.get("plan", self._plan_key(origin), Plan)
        if plan is None:
            return None
        graph = traced if plan.exact else self.graph(exact=False)
        try:
            return Planned(plan, self._follow(plan, graph))
        except PlanError as error:
            LOG.warning("a known plan is ignored: %s", error)
            return None

    def _made(
        self, traced: StepGraph, measured: Measured, surroundings: Surroundings, origin: Origin
    ) -> Planned:
        """Search for the best plan."""
        ways = [self._way(traced, measured, surroundings)]
        if not self.exact:
            undone = self.graph(exact=False)
            if any(map(is_inverse, undone.line.joint.forward)):
                measured = self._measured(undone)
                ways.append(self._way(undone, measured, self._surroundings(undone, measured)))
        first = ways[0].search
        full_bytes = first.counted_bytes(first.baseline)
        least = min(ways, key=lambda way: way.least_bytes)
        resolved = self.budget.resolve(
            full_bytes=full_bytes,
            least_bytes=least.least_bytes,
            needed_by=least.describe_least(),
        )
        way, found = fastest(ways, resolved)
        plan, graphs = emit(
            way,
            found,
            resolved,
            least_bytes=least.least_bytes,
            baseline=first.baseline,
            baseline_bytes=full_bytes,
            host=self.host,
            origin=origin,
        )
        if traced.device.type == "cuda":
            torch.cuda.empty_cache()  # blocks that measuring has left would be handed out whole
        if self.costs is None:
            self.store.put("plan", self._plan_key(origin), Plan, plan)
        return Planned(plan, graphs)

    def _way(self, graph: StepGraph, measured: Measured, surroundings: Surroundings) -> Way:
        if self.host is not None:
            self._find_link(graph, self.host)
        return Way.of(
            graph,
            measured,
            surroundings,
            host=self.host,
            progress=self.progress,
            allocator=self._rules(graph),
            budget_on=self.caller.budget_on,
        )

    def _find_link(self, graph: StepGraph, host: HostMemory) -> None:
        """Let the link to ``host`` be known: given, kept, or measured now."""
        folder, limit = host.folder, host.limit_bytes
        key = link_key(graph.device, host_dir=folder, host_limit_bytes=limit)
        name = key_of(replace(graph.origin, operations="", code="", inputs=()), link=key[1:])
        link = self.costs.link if self.costs else self.store.get("link", name, MeasuredLink)
        if link is not None:
            know_link(key, link)
            return
        with torch_compat.real_execution(), torch.no_grad():
            link = measure_link(graph.device, host_dir=folder, host_limit_bytes=limit)
        self.store.put("link", name, MeasuredLink, link)

    def _with_overhead(self, planned: Planned, graph: StepGraph) -> Planned:
        """``planned`` with what the step takes beside its calls, or a way to find that."""
        key = key_of(graph.origin, overhead_of=planned.graphs.arena is not None)
        known = self.store.get("overhead", key, float)
        if known is not None:
            return planned.with_overhead(known)
        store = self.store  # ``self`` holds a batch, and what is returned stays
        return replace(
            planned,
            rehearsal=_rehearsal(planned, graph.line.joint, self.inputs),
            note_overhead=lambda seconds: store.put("overhead", key, float, seconds),
        )


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
