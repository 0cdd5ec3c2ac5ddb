"""From a captured step and a budget to a plan and the graphs that carry it out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.costs.devices import Device
from fxremat.costs.overhead import Rehearsal
from fxremat.costs.synthetic import Synthesizer
from fxremat.errors import BudgetError, PlanError
from fxremat.frontend.agreed import agreed_context, agreed_graphs
from fxremat.frontend.budget import Budget
from fxremat.frontend.captured import CapturedStep, Costed
from fxremat.frontend.dimensions import arguments_of
from fxremat.frontend.emission import Graphs, carry_out, follow
from fxremat.frontend.origin import differences, key_of, origin_of_plan, version_of
from fxremat.frontend.ranks import Peers
from fxremat.frontend.record import roles_of
from fxremat.frontend.schedules import Schedules
from fxremat.frontend.store import Store
from fxremat.frontend.variants import StepGraph, emit, fastest
from fxremat.ir import Origin, RecordedCosts
from fxremat.passes.emit.rewrite import BlockModules
from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.stages.block import tensor_key
from fxremat.planner.allocator import AllocatorSettings
from fxremat.planner.context import NO_CORRECTION, Correction, StepContext
from fxremat.planner.context_bytes import Caller
from fxremat.planner.search import DEFAULT_GENERATORS
from fxremat.planner.transfers import HostMemory
from fxremat.progress import WRITE, Progress
from fxremat.report.memory import Kind
from fxremat.report.plan import Plan
from fxremat.units import format_bytes

LOG = logging.getLogger("fxremat")

LEAST = Budget("min")

MOST_BLOCKS = 4096
"""Distinct blocks whose code is kept."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and its graphs.

    Attributes:
        rehearsal: tells what the step takes beside its calls; it holds the step's inputs.
            ``None`` where that is known, or will not be.
        note_overhead: keeps what was told.
        complete: finds what a step holds in memory, and how fast it could be; ``None`` where the
            plan says that.
    """

    plan: Plan
    graphs: Graphs
    rehearsal: Rehearsal | None = None
    note_overhead: Callable[[float], None] = lambda _seconds: None
    complete: Callable[[Plan], Plan] | None = None

    def with_overhead(self, seconds: float) -> Planned:
        """This plan, of a step that takes ``seconds`` beside its calls."""
        return replace(self, plan=self.plan.with_overhead(seconds), rehearsal=None)

    def completed(self) -> Planned:
        """This plan with all that it tells people."""
        if self.complete is None:
            return self
        return replace(self, plan=self.complete(self.plan), complete=None)


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
        fused: operations run as units that Inductor compiles.
        allocator: rules that hold in place of those of the device's allocator.
        costs: of the step as it was traced, to be taken for what was measured.
        store: costs and plans that are known; ``None``: there are none.
        target: the device that the step is to be estimated for; ``None``: its own.
        peers: processes that follow the same first plan.
        model: its class, for people.
        roles: of primals; ``None``: as ``inputs`` and the caller's tensors tell.
        generators: names of solvers whose schedules are looked at.

    Attributes:
        budget: as given; a share means the bytes of the first plan from then on.
        step: what was captured.
        schedules: of it.

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
        fused: bool = False,
        allocator: AllocatorSettings | None = None,
        costs: RecordedCosts | None = None,
        store: Store | None = None,
        target: Device | None = None,
        peers: Peers | None = None,
        model: str = "",
        roles: Mapping[int, Kind] | None = None,
        generators: tuple[str, ...] = DEFAULT_GENERATORS,
    ) -> None:
        self.budget = budget
        self._model, self._places = model, places or {}
        self._roles = roles or roles_of(inputs, caller.resident, self._places)
        self._optimizer_bytes = sum(caller.held_bytes)  # before what no primal is, too, is there
        self._peers = peers
        self._started = self._bound = False
        self._store = store or Store(None)
        self.step = CapturedStep(
            module,
            forward_output_count=forward_output_count,
            inputs=inputs,
            caller=caller,
            progress=progress,
            places=self._places,
            costs=costs,
            store=self._store,
            target=target,
            fused=fused,
            peers=peers,
        )
        self.schedules = Schedules(self.step, host, exact, allocator, self._store, generators)
        self._host = host
        self._exact = exact
        self._modules = BlockModules()

    def first(
        self,
        context: StepContext,
        *,
        kept: Plan | None = None,
        rehearse: bool = True,
        least: bool = False,
    ) -> Planned:
        """The plan for the call that was captured.

        Args:
            context: what that call finds.
            kept: a plan to follow.
            rehearse: tell how to find what the step takes beside its calls.
            least: that of the least peak; what the budget means is not known yet.

        Raises:
            BudgetError: no schedule that was found fits the budget.
            PlanError: ``kept`` is not of this step.
            HostMemoryError: the host memory cannot be had.
            CostError: an operation cannot be measured.
        """
        if kept:
            planned = self._followed(kept, context)
        else:
            if self._peers is not None:
                self.schedules.agree_link(self._peers)
            planned = self._shared(lambda: self._found(context, least=least))
        self._started = True
        if kept is None and rehearse:
            planned = self._with_overhead(planned)
        if not least:
            self.budget = replace(self.budget, nbytes=planned.plan.budget_bytes, share=None)
        self.step.settle()
        return planned

    def _found(self, context: StepContext, *, least: bool) -> Planned:
        """The plan for the captured call, looked for."""
        try:
            return self.again(context, least=least)
        except BudgetError as error:
            if not self.grown(error):
                self.step.settle()
                raise self.schedules.advised(error, context, self.budget.nbytes) from None
            return self.again(context)

    def _shared(self, find: Callable[[], Planned]) -> Planned:
        """What ``find`` leads to in the first of several processes.

        Raises:
            RankError: it did not come, or fails.
            BudgetError: no schedule that was found there fits.
        """
        if self._peers is None:
            return find()
        graph = self.step.graphs[0].graph
        if not self._exact:
            self.step.undo_norms()
        found: list[Planned] = []

        def make() -> Plan:
            found.append(find().completed())  # others cannot
            return found[0].plan

        with self._peers.telling():
            plan = self._peers.follow("a plan", Plan, make)
            planned = found[0] if plan is None else self._as_first(plan, graph)
            agreed_graphs(self._peers, planned.graphs.structure_digest if planned else "none")
        assert planned is not None  # the others' differ from none
        return planned

    def _as_first(self, plan: Plan, traced: StepGraph) -> Planned | None:
        """What the plan of the first process comes to here, with constants of this one.

        ``None``: it cannot be carried out.
        """
        graph = self._graph_of(plan, traced)
        try:
            graphs = self._emitted(carry_out, plan, graph)
        except PlanError:
            return None
        origin = plan.origin and replace(plan.origin, code=graph.origin.code)
        forward_code, backward_code = graphs.forward.code, graphs.backward.code
        plan = replace(plan, origin=origin, forward_code=forward_code, backward_code=backward_code)
        return Planned(plan, graphs)

    def _graph_of(self, plan: Plan, traced: StepGraph) -> StepGraph:
        """The graph that a plan is of: as it was traced, or with norms undone."""
        return traced if plan.exact == traced.exact else self.step.graph(exact=plan.exact)

    @property
    def together(self) -> Peers | None:
        """Processes that must follow the same plans at all calls; ``None``: there are none."""
        return self._peers if self._bound or self.step.has_collectives else None

    def bind(self, peers: Peers | None) -> None:
        """Let processes follow the same plans at all calls, as another graph of the step makes
        them.
        """
        self._peers, self._bound = peers, True

    def again(self, context: StepContext, *, least: bool = False) -> Planned:
        """The plan for a later call.

        Args:
            context: what the call finds.
            least: that of the least peak, be it above the budget.

        Raises:
            BudgetError: no schedule that was found fits the budget.
            HostMemoryError: the host memory cannot be had.
            RankError: the graph has collectives, and other processes find something else.
        """
        budget = LEAST if least else self.budget
        if self.together is None or not self._started:
            return self._planned(context, budget)
        agreed_context(self.together, repr((context, least)))
        return self._shared(lambda: self._planned(context, budget))

    def shared_out(self, context: StepContext) -> StepContext:
        """A call, with what is left alone for others that may wait beside it.

        What the budget leaves beside the model is the same for each of so many steps in flight, so
        that each may be the next whose backward runs.
        """
        count = self.step.caller.in_flight
        if count == 1 or context.waiting >= count:
            return context
        given_bytes = self.step.given_bytes(context) - context.waiting_bytes
        if self.budget.nbytes is None:  # a share of what so many take, or the least of it
            first, *_ = variants = self.schedules.within(context, None)
            full_bytes = first.search.counted_bytes(first.search.baseline)
            least_bytes = min(variant.least_bytes for variant in variants)
            nbytes = self.budget.bytes_of(
                full_bytes=self._of_all(context, full_bytes),
                least_bytes=self._of_all(context, least_bytes),
            )
            if self._peers is not None:
                nbytes = self._peers.agree("the budget", int, nbytes, lambda n: max(n.values()))
            self.budget = replace(self.budget, nbytes=nbytes, share=None)
        assert self.budget.nbytes is not None
        others_bytes = (count - 1) * ((self.budget.nbytes - given_bytes) // count)
        return replace(context, others_bytes=max(0, others_bytes - context.waiting_bytes))

    def _of_all(self, context: StepContext, nbytes: int) -> int:
        """The peak of all that may be in flight, where that of one with all else is ``nbytes``."""
        count = self.step.caller.in_flight
        if count == 1 or context.waiting >= count:
            return nbytes
        given_bytes = self.step.given_bytes(context)
        beside_bytes = context.waiting_bytes + context.others_bytes
        alike_bytes = given_bytes - beside_bytes + count * (nbytes - given_bytes)
        return max(nbytes, alike_bytes)  # those that wait may hold more than this one

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

    def fits(self, context: StepContext, *, thorough: bool = True) -> bool:
        """Whether a call can keep to the budget: see :meth:`Schedules.fits`."""
        assert self.budget.nbytes is not None
        return self.schedules.fits(context, self.budget.nbytes, thorough=thorough)

    def known_correction(self) -> Correction:
        """The correction that steps of the capture's sizes have taught another process."""
        return self._store.get("correction", self.step.correction_key, Correction) or NO_CORRECTION

    def keep_correction(self, correction: Correction) -> None:
        """Let other processes know a correction for the sizes of the capture."""
        self._store.put("correction", self.step.correction_key, Correction, correction)

    def _planned(self, context: StepContext, budget: Budget) -> Planned:
        """Find the best plan, or know it."""
        origin = self._origin(self.step.at(context.sizes)[0], context)
        searched = self.schedules.known or context.sizes != self.step.sizes.hints
        found = None if searched else self._known(origin, budget)
        found = found or self._made(context, origin, budget)
        step = self.step
        sizes = step.sizes.named(context.sizes)
        arguments = arguments_of(step.joint.primals, sizes, self._places)
        return replace(found, plan=replace(found.plan, model=self._model, arguments=arguments))

    def _followed(self, kept: Plan, context: StepContext) -> Planned:
        """Follow a plan that was kept.

        Raises:
            PlanError: it is of another step.
        """
        graph = self.step.graph(exact=kept.exact)
        if kept.origin is None or kept.measured is None:
            raise PlanError("this plan was not made of a model: compile without plan=")
        now = replace(graph.origin, options=kept.origin.options, held=kept.origin.held)
        if now == kept.origin:
            self.step.take(graph, kept.measured)
            now = self._origin(self.step.graphs[0], context)
        told = tuple(differences(kept.origin, now))
        if told:
            raise PlanError(
                f"the plan is not one of this step: {'; '.join(told)}. Compile as the plan was "
                "made, or leave plan= out to plan again",
                differs=told,
            )
        kept = replace(kept, measured_peak_bytes=None)  # it was that of another process
        return Planned(kept, self._emitted(follow, kept, graph))

    def _emitted(self, emit_as: Callable[..., Graphs], plan: Plan, graph: StepGraph) -> Graphs:
        return emit_as(
            plan, graph.line, graph.blocks, self._modules, device=graph.device, host=self._host
        )

    def _origin(self, costed: Costed, context: StepContext) -> Origin:
        """What a plan would hold for."""
        host, caller = self._host, self.step.caller
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
        if self.schedules.generators != DEFAULT_GENERATORS:
            options["generators"] = ", ".join(self.schedules.generators)
        return origin_of_plan(
            costed.graph.origin,
            options=options,
            context_bytes=costed.around(context),
            allocator=self.schedules.rules(costed.graph),
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
        if self.step.costs is not None:
            return None
        plan = self._store.get("plan", self._plan_key(origin, budget), Plan)
        if plan is None:
            return None
        graph = self._graph_of(plan, self.step.graphs[0].graph)
        try:
            return Planned(plan, self._emitted(follow, plan, graph))
        except PlanError as error:
            LOG.warning("a known plan is ignored: %s", error)
            return None

    def _make_room(self) -> None:
        """Forget blocks of plans that may be gone: what is used again is found again."""
        if len(self._modules.modules) > MOST_BLOCKS:
            self._modules = BlockModules()
            self.step.forget_blocks()

    def _made(self, context: StepContext, origin: Origin, budget: Budget) -> Planned:
        """Search for the best plan, among schedules that are known where there are some."""
        self._make_room()
        known = bool(self.schedules.known)
        variants = self.schedules.within(context, budget.nbytes)
        first = variants[0].search
        full_bytes = first.counted_bytes(first.baseline)
        least = min(variants, key=lambda variant: variant.least_bytes)
        least_bytes = self._of_all(context, least.least_bytes)
        resolved = budget.resolve(
            full_bytes=self._of_all(context, full_bytes),
            least_bytes=least_bytes,
            needed_by=least.describe_least,
            beside=context.described(self.step.joint),
        )
        variant, found = fastest(variants, resolved)
        self.step.progress(WRITE)
        plan, emitted, complete = emit(
            variant,
            found,
            resolved,
            self._modules,
            least_bytes=least_bytes,
            traced=first,
            baseline_bytes=full_bytes,
            host=self._host,
            origin=origin,
            beside=context.described(self.step.joint),
            sizes=context.sizes,
            roles=self._roles,
            held={
                Kind.GRADIENTS: sum(context.gradient_bytes(self.step.joint)),
                Kind.OPTIMIZER: self._optimizer_bytes + context.state_bytes,
                Kind.RESERVE: self.step.caller.reserve_bytes,
            },
        )
        if self.step.joint.device.type == "cuda" and self.step.inputs:
            torch.cuda.empty_cache()  # blocks that measuring has left would be handed out whole
        planned = Planned(plan, emitted, complete=complete)
        if self.step.costs is None and not known and context.sizes == self.step.sizes.hints:
            planned = planned.completed()
            self._store.put("plan", self._plan_key(origin, budget), Plan, planned.plan)
        return planned

    def _with_overhead(self, planned: Planned) -> Planned:
        """``planned`` with what the step takes beside its calls, or a way to find that."""
        graph = self.step.graphs[0].graph
        key = key_of(graph.origin, overhead_of=planned.graphs.arena is not None)
        known = self._store.get("overhead", key, float)
        if known is not None:
            return planned.with_overhead(known)
        return replace(
            planned,
            rehearsal=_rehearsal(planned, graph.line.joint, self.step.inputs),
            note_overhead=lambda seconds: self._store.put("overhead", key, float, seconds),
        )


def _rehearsal(
    planned: Planned, joint: JointGraph, inputs: Mapping[int, torch.Tensor]
) -> Rehearsal:
    """How to run the planned step without its caller."""
    with torch_compat.real_execution():
        values = Synthesizer(joint, {joint.primals[i]: t for i, t in inputs.items()})
        primals, tangents = values.of(joint.primals), values.of(joint.tangents)
    gradients = sum(isinstance(g, fx.Node) for g in joint.backward_outputs)
    ins = tuple(tensor_key(n.meta["val"]) for n in joint.primals)
    operations = tuple(str(n.target) for n in (*joint.forward, *joint.backward))
    return Rehearsal(
        joint.device,
        (joint.device, ins, operations, gradients, planned.graphs.arena is not None),
        gradients,
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
