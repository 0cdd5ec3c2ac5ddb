"""A captured graph: its variants and what they cost, at the sizes of the capture and at others."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import fx

from fxremat import torch_compat
from fxremat.cache.folder import Store
from fxremat.cache.origins import key_of, origin_of_costs
from fxremat.costs.estimated.devices import Device
from fxremat.costs.estimated.roofline import aside_bytes, estimate_line
from fxremat.costs.estimated.scaled import ScaledCosts, with_workspaces
from fxremat.costs.estimated.working import with_working_bytes
from fxremat.costs.link.collectives import late_bytes, speeds_of, with_collectives
from fxremat.costs.measured.bits import other_bits
from fxremat.costs.measured.cache import cost_cache
from fxremat.costs.measured.causal import MaskBits
from fxremat.costs.measured.cost import Measured
from fxremat.costs.measured.layouts import KernelLayouts
from fxremat.costs.measured.stages import measure_line
from fxremat.costs.measured.tuning import tune_kernels
from fxremat.errors import CaptureError, CostError, PlanError
from fxremat.graph.calls import Calls
from fxremat.graph.dimensions import Dimension, dimensions_of
from fxremat.graph.feedback import Feedback
from fxremat.graph.forms import NO_OPTIONS, FurtherForms, PlanOptions, room_bytes, way_of
from fxremat.graph.memory_record import roles_of
from fxremat.graph.signature import Signature
from fxremat.graph.spending import Spending
from fxremat.graph.variant import Variant
from fxremat.ir import TRACED, Form, MeasuredLink, Origin, RecordedCosts, TrainingState
from fxremat.passes.contract import PassConfig
from fxremat.passes.emit.rewrite import BlockModules
from fxremat.passes.fuse.unit import Units
from fxremat.passes.joint.constraints import constrain, describe, unconstrained
from fxremat.passes.joint.data_sizes import is_bundle, is_composite
from fxremat.passes.joint.digest import digest, structure_digest
from fxremat.passes.joint.graph import JointGraph, tensors_of
from fxremat.passes.joint.masks.replace import always
from fxremat.passes.joint.sizes import Values
from fxremat.passes.parts.early_gradients import parts_of
from fxremat.passes.parts.parts import Changed, Parts
from fxremat.passes.pipeline import run_passes
from fxremat.passes.split.run import Looks
from fxremat.passes.stages.block import BlockCache
from fxremat.passes.stages.linearize import Line
from fxremat.passes.step_graph import StepGraph
from fxremat.planner.context.context_bytes import (
    Caller,
    ContextBytes,
    as_bytes,
    context_bytes_of,
    made_outputs,
    own_gradients,
    taken_as_made,
)
from fxremat.planner.context.step_context import StepContext
from fxremat.planner.decision.candidates import Candidate
from fxremat.progress import LOG, Progress, silent
from fxremat.ranks.combine import agreed_costs, agreed_speeds
from fxremat.ranks.peers import Peers
from fxremat.report.memory import Kind
from fxremat.runtime.expected import Expected

MOST_RESIZED = 512
"""Variants at other sizes whose costs are kept; which was met first goes first."""

DATA_SHARE = 0.125
"""Share of the largest bundle that is set aside: how many rows data choose varies by step."""


class Graph:
    """One captured graph: what it computes, its sizes, its variants, plans and feedback.

    It knows no budget, no training loop and no other graph: what it needs of them is an argument.

    Args:
        module: its joint graph.
        forward_output_count: how many of its outputs are the forward's.
        inputs: real values of primals, by index; held until :meth:`release`.
        caller: what is held at every call by the caller of the graph.
        progress: receives how far measuring and solving have come.
        options: the user's options that plans depend on.
        places: where each primal that is an argument of the call is passed, by index.
        costs: costs of the graph as it was traced, used in place of measured ones.
        store: the cache folder of costs and plans; ``None``: nothing is cached.
        target: a device that the graph is estimated for; nothing is run then.
        fused: whether operations run as units that Inductor compiles.
        peers: processes that follow the same first plan.
        model: the class of the model, as plans name it.
        may_break: whether the model may be captured in several graphs instead.
        from_data: whether sizes may follow from data, so that each may occur only once.
        roles: the roles of primals; ``None``: they follow from ``inputs`` and the caller's tensors.

    Attributes:
        sizes: symbols of the capture.
        dimensions: dimensions of arguments that are symbols.
        signature: inputs and results, as calls see them.
        inputs, progress: as given; empty and silent once they are released.
        caller, options, store, places, roles, model: as given.
        peers: processes that follow the same plans; see :attr:`together`.
        optimizer_bytes: bytes of optimizer state that the caller holds.
        late_bytes: bytes set aside for buffers of collectives that are freed late.
        measuring_bytes: the most bytes that measuring has held at once, without parameters and
            inputs; callers reset it.
        further: forms that were not searched yet.
        feedback: what its steps have shown.
        calls: its plans, and what its calls leave for the next ones.
        link: the bandwidths to host memory, once they are measured.
        training_state: the gradients and the optimizer state in host memory, for reports.
        parameters_in_host: the parameters in host memory, by their place among those of the model.
        sent: by sizes, for each variant, candidates of other contexts that move storages to host
            memory.
        modules: emitted blocks, shared by all plans.
        has_wrappers: the model has tensors of wrapper subclasses.
        started: the plan of the captured call has been made.
        bound: its processes follow the same plans at all calls.
        estimated: sizes whose workspaces could not be measured.

    Raises:
        CaptureError, GraphError: as the passes raise them.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        *,
        forward_output_count: int,
        inputs: Mapping[int, torch.Tensor],
        caller: Caller,
        progress: Progress = silent,
        options: PlanOptions = NO_OPTIONS,
        places: Mapping[int, str] | None = None,
        costs: RecordedCosts | None = None,
        store: Store | None = None,
        target: Device | None = None,
        fused: bool = False,
        peers: Peers | None = None,
        model: str = "",
        from_data: bool = False,
        may_break: bool = False,
        roles: Mapping[int, Kind] | None = None,
    ) -> None:
        self.measuring_bytes = 0
        joint = module
        self._expected: dict[str, Expected] = {}
        self._target = target
        self._units = Units() if fused else None
        self._attention_units = Units()
        self.progress = progress
        layouts = KernelLayouts(cost_cache())
        self.options = options
        self._graph = run_passes(
            StepGraph.captured(module, forward_output_count=forward_output_count),
            config=replace(self._pass_config(TRACED), left=layouts.left, may_break=may_break),
            before="build",
        )
        self._note_measuring(layouts.measuring_bytes)
        self._module, self.sizes = self._graph.module, self._graph.sizes
        constrain(self._module, options.policy, travels=options.host is not None)
        primals = self._module.graph.find_nodes(op="placeholder")
        self.places = places or {}
        self.dimensions: tuple[Dimension, ...] = dimensions_of(primals, self.sizes, self.places)
        self.inputs, self.caller, self.peers = inputs, caller, peers
        self.has_wrappers = any(map(torch_compat.is_wrapper, caller.resident))
        self.roles = roles or roles_of(inputs, caller.resident, self.places)
        self.optimizer_bytes = sum(caller.held_bytes)
        self.training_state: TrainingState | None = None
        self.parameters_in_host: tuple[int, ...] = ()
        self.model, self._from_data = model, from_data
        self._refused: set[str] = set()
        self._uncompared: set[str] = set()
        self.costs = costs
        self.store = store or Store(None)
        self._digests = digest(
            self._module,
            forward_output_count=forward_output_count,
            mutated_primals=self._graph.mutated_primals,
        )
        if self.has_collectives and peers is None:
            raise CaptureError(
                "this step waits for other processes, which must follow the same plan. Pass "
                "fxremat.compile ranks=fxremat.Ranks() and a sample, and use all sizes in the "
                "first call",
                code="FXR307",
            )
        self.late_bytes = self._more_bytes = 0
        self._variants: list[Variant] = []
        self._resized: dict[tuple[Values, Form, bool], Variant] = {}
        self.signature = Signature.of(joint, self.placeholders, output_count=forward_output_count)
        self.further = FurtherForms(Spending(options.effort))
        self.feedback = Feedback()
        on_cuda = self.device.type == "cuda"
        counts = target is None and torch_compat.counted_bytes(self.device) is not None
        self.calls = Calls(on_cuda=on_cuda, counts=counts)
        self.link: MeasuredLink | None = None
        self.sent: dict[Values, tuple[tuple[Candidate, ...], ...]] = {}
        self.modules = BlockModules()
        self._integers: dict[int, NDArray[Any]] = {}
        self.started = self.bound = self._released = False
        self.estimated: set[Values] = set()

    def is_same(self, other: Graph) -> bool:
        """Return whether ``other`` is the same step captured again, so that plans of this apply."""
        constants = self._module.graph.find_nodes(op="get_attr")  # their values may differ
        shaping = self.shaping == other.shaping and all(
            self.sizes.hints[i] == other.sizes.hints[i] for i in self.shaping
        )
        return not constants and self._digests == other._digests and shaping

    @functools.cached_property
    def shaping(self) -> frozenset[int]:
        """Indices of the symbols that shapes of the graph's tensors depend on."""
        return self.sizes.shaping(self._module.graph.nodes)

    @functools.cached_property
    def device(self) -> torch.device:
        """The device of the graph's inputs; if they are on several, one that is not the CPU."""
        placeholders = self._module.graph.find_nodes(op="placeholder")
        devices = {t.device for node in placeholders for t in tensors_of(node)}
        return max(devices, key=lambda device: device.type != "cpu")

    @functools.cached_property
    def own_gradients(self) -> frozenset[int]:
        """Primals whose gradient fills a storage that the backward allocates for it only."""
        return own_gradients(self.joint)

    @functools.cached_property
    def taken_as_made(self) -> frozenset[int]:
        """Primals whose gradient a post-accumulate hook can take away once it is computed."""
        return taken_as_made(self.joint)

    @functools.cached_property
    def made_outputs(self) -> tuple[int, ...]:
        """Indices of results of the forward, one for each storage that it makes for its caller."""
        return made_outputs(self.joint)

    @functools.cached_property
    def has_collectives(self) -> bool:
        """Whether the graph has collectives, so that all processes must run the same graphs."""
        return any(map(torch_compat.is_shared, self._module.graph.nodes))

    @property
    def has_units(self) -> bool:
        """Whether operations are fused into units that Inductor compiles."""
        return self._units is not None

    @property
    def placeholders(self) -> tuple[fx.Node, ...]:
        """Placeholders of the captured graph, primals first; reading them measures nothing."""
        return tuple(self._module.graph.find_nodes(op="placeholder"))

    @property
    def executor(self) -> str:
        """What runs operations: ``"eager"``, or ``"inductor"``, with units that stay eager."""
        if self._units is None:
            return "eager"
        failed = [str(unit) for unit in self._units if unit.eager]
        return f"inductor, but not {', '.join(failed)}" if failed else "inductor"

    def origin(self) -> Origin:
        """Return what measured costs of the graph depend on: operations, device, settings."""
        return origin_of_costs(
            self._digests,
            self.device,
            self.executor,
            self.options.effort,
            self._target,
            describe(self._module),
        )

    @property
    def joint(self) -> JointGraph:
        """The joint graph as it was traced; all variants have its inputs and results."""
        return self.variants[0].line.joint

    @property
    def variants(self) -> list[Variant]:
        """The variants at the sizes of the capture, first the one as traced, measured at first use.

        Raises:
            CostError: an operation cannot be measured.
        """
        if not self._variants:
            self.take(self.line(TRACED), TRACED)
        return self._variants

    def variant(self, form: Form) -> Variant:
        """Return the graph computed in ``form``, as a variant that is measured if it is new.

        Raises:
            PlanError: no operation of the graph can be computed as the form says.
        """
        for own in self.variants:
            if own.form == form:
                return own
        line = self.line(form)
        if way_of(line) == way_of(self.variants[0].blocks.line):
            raise PlanError(
                f"this step cannot be computed in the form {form}: plan again", code="FXR603"
            )
        return self.take(line, form)

    def add(
        self, form: Form, *, below_bytes: int | None = None, looks: Looks | None = None
    ) -> Variant | None:
        """Rewrite the graph as a form says and add it as a measured variant, unless it cannot help.

        Args:
            form: how operations are computed.
            below_bytes: a variant does not help if an operation, with the gradients before it,
                takes as much.
            looks: counts and limits the work of finding runs of operations; ``None``: no limit.

        Returns the new variant; ``None`` if it does not help, or is computed like another one.
        """
        line = self.line(form, looks=looks)
        if way_of(line) in [way_of(own.blocks.line) for own in self.variants]:
            return None
        if below_bytes is not None and room_bytes(line.joint) >= below_bytes:
            return None
        return self.take(line, form)

    def drop(self, variant: Variant) -> None:
        """Remove the variant that was added last; its measurements stay in the cache."""
        assert self._variants[-1] is variant
        self._variants.pop()

    def refuse(self, run: Parts) -> list[Form]:
        """Exclude ``run`` from being computed in parts; return the forms of variants that did.

        These variants are removed.
        """
        self._refused.add(str(run))
        has_run = [own for own in self._variants if any(parts_of(n) is run for n in own.line.nodes)]
        self._variants = [own for own in self._variants if own not in has_run]
        return [own.form for own in has_run]

    @property
    def has_constraints(self) -> bool:
        """Whether a policy or a tag decides if some operation is recomputed."""
        return bool(describe(self._module))

    def unconstrained(self) -> Graph | None:
        """Return a copy without the decisions of a policy or tags; ``None``: there are none."""
        if not self.has_constraints:
            return None
        free: Graph = copy.copy(self)
        free._module = unconstrained(self._module)
        free._graph = self._graph.changed(free._module)
        free.__dict__.pop("_as_traced", None)
        free._variants, free._resized, free._expected = [], {}, {}
        free.further = FurtherForms(Spending(self.options.effort))
        free.costs, free.store = None, Store(None)
        return free

    @property
    def correction_key(self) -> str:
        """Key of the cache entry with the corrections that steps of this graph have shown."""
        return key_of(self.origin(), loss=(self.caller.loss_bytes, self.caller.loss_small_bytes))

    def release(self) -> None:
        """Drop the tensors of the captured call, so that no batch is kept alive after its step.

        If sizes depend on data, integers among them are kept in memory that no allocator counts:
        lengths that are made up do not fit.
        """
        self.caller = as_bytes(self.caller, self.joint, self._real(self.joint))
        if any(map(is_composite, self._module.graph.nodes)):
            with torch_compat.real_execution():
                self._integers = {
                    i: t.numpy(force=True).copy() for i, t in self.inputs.items() if _is_whole(t)
                }
        self.inputs, self.progress, self._released = {}, silent, True

    @property
    def together(self) -> Peers | None:
        """Processes that must follow the same plans at all calls; ``None``: there are none."""
        return self.peers if self.bound or self.has_collectives else None

    def bind(self, peers: Peers | None) -> None:
        """Make ``peers`` follow the same plans at all calls, as another graph of the step needs."""
        self.peers, self.bound = peers, True

    def _real(self, joint: JointGraph) -> dict[fx.Node, torch.Tensor]:
        """Return the tensors of the primals that have a real value, by their nodes in ``joint``."""
        with torch_compat.real_execution():
            kept = {i: torch.from_numpy(own).to(self.device) for i, own in self._integers.items()}
        return {joint.primals[i]: tensor for i, tensor in {**kept, **self.inputs}.items()}

    def line(self, form: Form, *, looks: Looks | None = None) -> Line:
        """Return the graph rewritten as a form says, and cut into stages.

        If the search for runs of operations exceeds its limit of work, ``looks``, it is the graph
        as traced.
        """
        config = self._pass_config(form, looks=looks)
        is_traced = config.is_exact and form.shared
        graph = self._as_traced if is_traced else self._built(config)
        parted = run_passes(graph, config=config, first="split", before="linearize")
        if form.has_parts and parted is graph and self._variants:
            traced = self._variants[0]
            if traced.form == TRACED:
                return traced.blocks.line
        return run_passes(parted, config=config, first="linearize").line

    @functools.cached_property
    def _as_traced(self) -> StepGraph:
        """The graph before operations are split, for forms that rewrite no single operation."""
        return self._built(self._pass_config(TRACED))

    def _built(self, config: PassConfig) -> StepGraph:
        """Return the captured graph after the passes that come before operations are split."""
        bits = MaskBits(cost_cache())
        if self.options.split is True:  # what differs is the order in which kernels add
            config = replace(config, can_replace=always)
        elif self._target is None or self._target.kind == "cpu":
            config = replace(config, can_replace=bits.are_kept)
        graph = run_passes(self._graph, config=config, first="build", before="split")
        self._note_measuring(bits.measuring_bytes)
        if self.costs is None or len(graph.joint.storages.nbytes) == len(self.costs.storage_bytes):
            return graph
        # Costs that were measured on the device say that its kernels keep bits without masks.
        config = replace(config, can_replace=always)
        other = run_passes(self._graph, config=config, first="build", before="split")
        agrees = len(other.joint.storages.nbytes) == len(self.costs.storage_bytes)
        return other if agrees else graph

    def _pass_config(self, form: Form, *, looks: Looks | None = None) -> PassConfig:
        """Return the configuration of the passes that rewrite the graph in ``form``."""
        return PassConfig(
            form=form,
            effort=self.options.effort,
            units=self._units,
            attention_units=self._attention_units,
            target=None if self._target is None else torch.device(self._target.kind),
            other_bits=self._other_bits,
            expected=self._expected,
            looks=looks or Looks(),
            progress=self.progress,
            note=self._note_measuring,
        )

    def _other_bits(self, parts: Parts, given: Sequence[torch.Tensor]) -> Changed:
        """Return which results of a run have other bits if it is computed in parts.

        They are compared by running both, with tensors of the layouts of ``given``. Where nothing
        can be run, for another device or for sizes that follow from data, rules decide.
        """
        every = Changed(frozenset(range(len(parts.outputs))))
        if str(parts) in self._refused:
            return every
        if self._target is not None or (self._from_data and self.sizes):
            return Changed() if parts.certain else every
        sizes = tuple(parts.hints.values())
        try:
            return other_bits(parts, given, sizes, cache=cost_cache(), note=self._note_measuring)
        except torch.OutOfMemoryError:
            self._uncompared.add(str(parts))
            return every

    @property
    def hint(self) -> str:
        """A further remedy for an error that says that the budget is too small; often empty."""
        if not self._uncompared:
            return ""
        return (
            f". The device's free memory is too small to compute {len(self._uncompared)} runs of "
            "operations at once, so nothing shows that they have the same bits in parts: "
            "bits='rounding' allows parts without that"
        )

    def take(self, line: Line, form: Form, *, costs: RecordedCosts | None = None) -> Variant:
        """Add a variant of the graph, and return it.

        Args:
            line: the graph rewritten in ``form``, in stages.
            form: how its operations are computed.
            costs: its costs; ``None``: they are estimated, cached, or measured.
        """
        origin, blocks = self.origin(), BlockCache(line)
        known = Measured.of(line, costs) if costs is not None else None
        measured = known or self._measured(origin, blocks, form)
        if self._target is None:
            tune_kernels(line.joint, self._real(line.joint), note=self._note_measuring)
        self._note_measuring(measured.measuring_bytes)
        if self._variants:  # what is held does not depend on the form
            base = self._variants[0].base
        else:
            base = self._base_bytes(measured.line.joint)
            if self.caller.outputs_bytes is None:
                self.caller = replace(self.caller, outputs_bytes=sum(base.tangent_each_bytes))
        variant = Variant(origin, blocks, measured, base, form)
        if self.peers is not None and not self._released:
            variant = self._agreed(self.peers, variant, new=costs is None)
        self._variants.append(variant)
        return variant

    def _agreed(self, peers: Peers, variant: Variant, *, new: bool) -> Variant:
        """Return ``variant`` with the costs of the slowest process and the most bytes held by any.

        Args:
            peers: the processes.
            variant: as this process has measured it.
            new: whether its costs do not include its collectives yet.
        """
        line, base = variant.blocks.line, variant.base
        costs, most = agreed_costs(
            peers, variant.origin, structure_digest(line.joint.module), variant.measured.costs, base
        )
        if not self._variants:
            if self.has_collectives:
                self.late_bytes = late_bytes(line, self.device)
            most = replace(most, given_bytes=most.given_bytes + self.late_bytes)
            self._more_bytes = most.given_bytes - base.given_bytes
            base = most
        if self.has_collectives and new:
            speeds = agreed_speeds(peers, speeds_of(line, self.device))
            costs = with_collectives(costs, line, variant.blocks, speeds)
        return replace(variant, measured=Measured.of(line, costs), base=base)

    def forget_blocks(self) -> None:
        """Drop the cached blocks of all variants; they are built again when they are needed."""
        for variant in self._variants:
            variant.blocks.clear()

    def at(self, values: Values, *, run: bool = True, bits: bool = True) -> list[Variant]:
        """Return the variants, each with its costs and held bytes, at sizes ``values``.

        Args:
            values: numbers of the symbols.
            run: whether to measure what does not follow from the capture's sizes; otherwise it is
                scaled, unless it was measured there before.
            bits: whether to measure also variants in parts that must keep bits, which compares
                the parts; otherwise the costs of these variants are scaled.
        """
        return [
            self.resized(own, values, run=run and (bits or not own.form.keeps_bits))
            for own in self.variants
        ]

    def resized(self, variant: Variant, values: Values, *, run: bool = True) -> Variant:
        """Return ``variant`` with its costs at sizes ``values``; for ``run`` see :meth:`at`."""
        if values == self.sizes.hints:
            return variant
        key = values, variant.form
        resized = self._resized.get((*key, True)) or self._resized.get((*key, run))
        if resized is None:
            if len(self._resized) >= MOST_RESIZED:
                self._resized.pop(next(iter(self._resized)))
            resized = self._resized[(*key, run)] = self._resize(variant, values, run=run)
        return resized

    def traced(self, values: Values) -> Variant:
        """Return the variant as it was traced, with costs scaled to sizes ``values``."""
        return self.resized(self.variants[0], values, run=False)

    def held(self, context: StepContext) -> ContextBytes:
        """Return the bytes held at a call in ``context`` besides what the graph allocates."""
        return context.around(self.traced(context.sizes).base)

    def described(self, context: StepContext) -> tuple[tuple[str, int], ...]:
        """Return what is held when a call in ``context`` begins, as descriptions with bytes."""
        return context.described(self.traced(context.sizes).base)

    def gradient_bytes(self, values: Values, primals: Iterable[int]) -> list[int]:
        """Return the bytes of the gradients of ``primals``, in ascending order of their indices."""
        each = self.traced(values).base.gradient_each_bytes
        return [each[i] for i in sorted(primals)]

    def loss_point_bytes(self, context: StepContext) -> int:
        """Return the bytes that the step's own loss needs between forward and backward."""
        return context.loss_point_bytes(self.traced(context.sizes).base)

    def tangent_bytes(self, values: Values) -> int:
        """Return the bytes of the gradients of the outputs at sizes ``values``."""
        return self.traced(values).base.tangent_bytes

    def _note_measuring(self, nbytes: int) -> None:
        """Raise ``measuring_bytes``, the most that measuring held at once, to ``nbytes``."""
        self.measuring_bytes = max(self.measuring_bytes, nbytes)

    def _resize(self, variant: Variant, values: Values, *, run: bool) -> Variant:
        """Return ``variant`` with its costs measured at, or scaled to, sizes ``values``."""
        line, blocks = variant.blocks.line, variant.blocks  # as traced
        if run and self._target is None:
            scaled = self.resized(variant, values, run=False)
            known = scaled.measured.costs
            note = self._note_measuring
            costs = with_workspaces(known, line, values, cost_cache(), note=note)
            if costs is known:
                return scaled
        else:
            if variant.scaled is None:
                variant.scaled = ScaledCosts(line, blocks, variant.measured.costs)
            costs = variant.scaled.at(values)
            if self._target is not None and self.costs is None:
                costs = with_working_bytes(costs, line, values)
        measured = variant.measured.at(costs)
        base = self._base_bytes(measured.line.joint, values)
        base = replace(base, given_bytes=base.given_bytes + self._more_bytes)
        return replace(variant, measured=measured, base=base)

    def aside_bytes(self, values: Values) -> int:
        """Return the bytes set aside for what is not measured, at sizes ``values``.

        That is for workspaces, and for values whose sizes depend on data, and differ by step.
        """
        return self._aside_bytes(self.traced(values).line.joint)

    def _aside_bytes(self, joint: JointGraph) -> int:
        unmeasured = self._target is not None and self.costs is None
        bundles = joint.storages.of(filter(is_bundle, (*joint.forward, *joint.backward)))
        largest_bytes = max((joint.storages.nbytes[i] for i in bundles), default=0)
        return int(DATA_SHARE * largest_bytes) + (aside_bytes(joint) if unmeasured else 0)

    def _base_bytes(self, joint: JointGraph, values: Values | None = None) -> ContextBytes:
        """Return the bytes held at every call, at ``values`` or at the sizes of the capture."""
        caller = replace(
            self.caller, reserve_bytes=self.caller.reserve_bytes + self._aside_bytes(joint)
        )
        return context_bytes_of(
            joint, self._real(joint) if values is None else {}, caller, values=values
        )

    def _measured(self, origin: Origin, blocks: BlockCache, form: Form) -> Measured:
        """Return the costs of the graph in ``form``: given, estimated, cached, or measured now."""
        line = blocks.line
        if self.costs is not None and form == TRACED:
            return Measured.of(line, self.costs)
        if self._target is not None:
            return estimate_line(line, blocks, self._target)
        runs = sorted({str(parts) for node in line.nodes if (parts := parts_of(node))})
        key = key_of(origin, form=form, runs=runs)
        known = self.store.get("costs", key, RecordedCosts)
        if known is not None:
            try:
                return Measured.of(line, known)
            except CostError as error:
                LOG.warning("cached costs are ignored: %s", error)
        measured = measure_line(
            line,
            blocks,
            real=self._real(line.joint),
            cache=cost_cache(),
            progress=self.progress,
        )
        if measured.too_large:
            LOG.info(
                "%d operations do not fit in the device's free memory by themselves (%s …): no "
                "plan runs them whole",
                len(measured.too_large),
                measured.too_large[0],
            )
        else:
            self.store.put("costs", key, RecordedCosts, measured.costs)
        return measured


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is dense and has whole numbers, or truth values, as elements."""
    numbers = not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized)
    return (
        numbers
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
    )
