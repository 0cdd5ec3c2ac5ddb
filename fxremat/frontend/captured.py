"""A captured step: its graphs, and what they cost, at the sizes of the capture and at others."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.costs.bits import other_bits
from fxremat.costs.cache import cost_cache
from fxremat.costs.causal import CausalMasks
from fxremat.costs.collectives import late_bytes, speeds_of, with_collectives
from fxremat.costs.cost import Measured, measure_line
from fxremat.costs.devices import Device
from fxremat.costs.layouts import KernelLayouts
from fxremat.costs.roofline import aside_bytes, estimate_line
from fxremat.costs.scaled import ScaledCosts, with_workspaces
from fxremat.costs.tuning import tune_kernels
from fxremat.errors import ArgumentError, CaptureError, CostError, PlanError
from fxremat.frontend.agreed import agreed_costs, agreed_speeds
from fxremat.frontend.dimensions import Dimension, dimensions_of
from fxremat.frontend.forms import large_in, room_bytes, way_of
from fxremat.frontend.ranks import Peers
from fxremat.frontend.record import roles_of
from fxremat.frontend.store import Store, key_of, origin_of_costs
from fxremat.ir import TRACED, Form, Origin, RecordedCosts
from fxremat.passes.fuse.again import computed_twice
from fxremat.passes.fuse.layout import with_channels_last
from fxremat.passes.fuse.rewrite import fuse
from fxremat.passes.fuse.unit import Units
from fxremat.passes.joint.build import build_joint_graph, rebuilt
from fxremat.passes.joint.constraints import Policy, constrain, describe, unconstrained
from fxremat.passes.joint.digest import digest, structure_digest
from fxremat.passes.joint.graph import JointGraph, tensors_of
from fxremat.passes.joint.layouts import as_kernels_leave
from fxremat.passes.joint.settle import place, settle
from fxremat.passes.joint.sizes import Values
from fxremat.passes.joint.user_kernels import with_launches
from fxremat.passes.split.beside import parts_of
from fxremat.passes.split.parts import Changed, Parts
from fxremat.passes.split.rewrite import split
from fxremat.passes.split.run import Looks
from fxremat.passes.stages.block import BlockCache
from fxremat.passes.stages.linearize import Line, linearize
from fxremat.planner.context import StepContext
from fxremat.planner.context_bytes import Caller, ContextBytes, context_bytes_of, settled
from fxremat.progress import LOG, Progress, silent
from fxremat.report.memory import Kind
from fxremat.runtime.expected import Expected

MOST_RESIZED = 512
"""Variants at other sizes whose costs are kept; which was met first goes first."""


@dataclass(slots=True)
class Variant:
    """One way to compute a captured step at one size: as it was traced, with norms undone, or with
    runs of operations in parts.

    Attributes:
        origin: what its costs hold for.
        blocks: of its stages.
        measured: its stages, and what they cost.
        base: what is held beside it at every call.
        form: how its operations are computed.
        scaled: its costs at any sizes; ``None`` before another size is asked for.
    """

    origin: Origin
    blocks: BlockCache
    measured: Measured
    base: ContextBytes
    form: Form
    scaled: ScaledCosts | None = None

    @property
    def line(self) -> Line:
        """Its graph, cut into stages."""
        return self.measured.line

    def around(self, context: StepContext) -> ContextBytes:
        """What is held beside it at a call, in bytes."""
        return context.around(self.base, self.line.joint)


class CapturedStep:
    """What AOTAutograd captured, and what is known of it.

    Args:
        module: its joint graph.
        forward_output_count: how many of its outputs are the forward's.
        inputs: real values of primals, by index; they are held until :meth:`settle`.
        caller: what is needed beside the step at every call.
        progress: told how far measuring and solving have come.
        places: of primals that are arguments of the call, where known.
        costs: of the step as it was traced, to be taken for what was measured.
        store: costs and plans that are known; ``None``: there are none.
        target: the device that the step is to be estimated for, and none that is here: nothing
            is run then.
        fused: operations run as units that Inductor compiles.
        peers: processes that agree on what it costs, until it is settled.
        model: its class, for people.
        from_data: its sizes may follow from data: each may be met once only.
        roles: of primals; ``None``: as ``inputs`` and the caller's tensors tell.
        policy: decides about single operations; see :mod:`fxremat.passes.joint.constraints`.
        travels: whether storages may travel to host memory.

    Attributes:
        sizes: symbols of the capture.
        dimensions: of arguments, whose sizes are symbols.
        inputs, caller, progress, peers: as given; no batch, silent and none once it is settled.
        optimizer_bytes: that the caller holds beside tensors of the model.
        late_bytes: left alone for buffers of collectives that go late.
        measuring_bytes: the most that measuring has held at once since somebody took that number,
            without parameters and inputs.

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
        progress: Progress,
        places: Mapping[int, str] | None = None,
        costs: RecordedCosts | None = None,
        store: Store | None = None,
        target: Device | None = None,
        fused: bool = False,
        peers: Peers | None = None,
        model: str = "",
        from_data: bool = False,
        roles: Mapping[int, Kind] | None = None,
        policy: Policy | None = None,
        travels: bool = False,
    ) -> None:
        self.measuring_bytes = 0
        module = with_launches(module)
        if not fused and target is None:  # else Inductor lays them, or nothing is run
            layouts = KernelLayouts(cost_cache())
            module = as_kernels_leave(module, layouts.left)
            self.measuring_bytes = layouts.measuring_bytes
        self._module, self.sizes = settle(module)
        if fused:
            self._module = with_channels_last(self._module)
        if target is not None and target.kind != "cpu":  # where it was traced
            place(self._module, torch.device(target.kind))
        constrain(self._module, policy, travels=travels)
        primals = self._module.graph.find_nodes(op="placeholder")
        self.places = places or {}
        self.dimensions: tuple[Dimension, ...] = dimensions_of(primals, self.sizes, self.places)
        self.inputs, self.caller, self.progress, self.peers = inputs, caller, progress, peers
        self.roles = roles or roles_of(inputs, caller.resident, self.places)
        self.optimizer_bytes = sum(caller.held_bytes)
        self.model, self._from_data = model, from_data
        self._refused: set[str] = set()
        self.costs = costs
        self.store = store or Store(None)
        self._output_count = forward_output_count
        self._mutated = torch_compat.mutated_primals(self._module)
        self._digests = digest(
            self._module, forward_output_count=forward_output_count, mutated_primals=self._mutated
        )
        self._target = target
        self._units = Units() if fused else None
        if self.has_collectives and peers is None:
            raise CaptureError(
                "this step waits for other processes, which must follow the same plan: give "
                "fxremat.compile ranks=fxremat.Ranks() and a sample, and let all sizes be met at "
                "the first call"
            )
        self.late_bytes = self._more_bytes = 0
        self._variants: list[Variant] = []
        self._expected: dict[str, Expected] = {}
        self._resized: dict[tuple[Values, Form, bool], Variant] = {}

    def is_same(self, other: CapturedStep) -> bool:
        """Whether ``other`` is the same step, captured once more."""
        constants = self._module.graph.find_nodes(op="get_attr")  # their values may differ
        shaping = self.shaping == other.shaping and all(
            self.sizes.hints[i] == other.sizes.hints[i] for i in self.shaping
        )
        return not constants and self._digests == other._digests and shaping

    @functools.cached_property
    def shaping(self) -> frozenset[int]:
        """Symbols that tensors of the graph follow."""
        return self.sizes.shaping(self._module.graph.nodes)

    @functools.cached_property
    def device(self) -> torch.device:
        """The device of the step."""
        placeholders = self._module.graph.find_nodes(op="placeholder")
        devices = {t.device for node in placeholders for t in tensors_of(node)}
        return max(devices, key=lambda device: device.type != "cpu")

    @functools.cached_property
    def has_collectives(self) -> bool:
        """Whether all processes must run the same graphs."""
        return any(map(torch_compat.is_shared, self._module.graph.nodes))

    @property
    def has_units(self) -> bool:
        """Whether operations are compiled as units."""
        return self._units is not None

    @property
    def placeholders(self) -> tuple[fx.Node, ...]:
        """Those of the captured graph, primals first: nothing is measured for them."""
        return tuple(self._module.graph.find_nodes(op="placeholder"))

    @property
    def executor(self) -> str:
        """Who makes the kernels, and what is run without."""
        if self._units is None:
            return "eager"
        failed = [str(unit) for unit in self._units if unit.eager]
        return f"inductor, but not {', '.join(failed)}" if failed else "inductor"

    def origin(self) -> Origin:
        """What costs of it hold for that are measured now."""
        constraints = describe(self._module)
        return origin_of_costs(self._digests, self.device, self.executor, self._target, constraints)

    @property
    def joint(self) -> JointGraph:
        """The graph as it was traced; all variants have the same inputs and results."""
        return self.variants[0].line.joint

    @property
    def variants(self) -> list[Variant]:
        """Those at the sizes of the capture, the traced one first.

        Raises:
            CostError: an operation cannot be measured.
        """
        if not self._variants:
            self.take(self.line(TRACED), TRACED)
        return self._variants

    def variant(self, form: Form) -> Variant:
        """The step in one form.

        Raises:
            PlanError: it has no such form.
        """
        for own in self.variants:
            if own.form == form:
                return own
        line = self.line(form)
        if way_of(line) == way_of(self.variants[0].blocks.line):
            raise PlanError(f"this step is not computed in the form {form}: plan again")
        return self.take(line, form)

    def add(
        self, form: Form, *, below_bytes: int | None = None, looks: Looks | None = None
    ) -> Variant | None:
        """The step in one more form; ``None`` where it is computed like in one that is there, or
        one of its operations takes ``below_bytes`` with the gradients that are there before it, or
        the search for it is out of ``looks``.
        """
        line = self.line(form, looks=looks)
        known = [way_of(own.blocks.line) for own in self.variants]
        if way_of(line) in known:
            return None
        if below_bytes is not None and room_bytes(line.joint) >= below_bytes:
            return None
        return self.take(line, form)

    def drop(self, variant: Variant) -> None:
        """Forget the variant that was added last; what was measured of it stays known."""
        assert self._variants[-1] is variant
        self._variants.pop()

    def refuse(self, run: Parts) -> list[Form]:
        """Let no form compute a run in parts any more; returns the forms that have."""
        self._refused.add(str(run))
        has_run = [own for own in self._variants if any(parts_of(n) is run for n in own.line.nodes)]
        self._variants = [own for own in self._variants if own not in has_run]
        return [own.form for own in has_run]

    def unconstrained(self) -> CapturedStep | None:
        """Return this step with nothing decided by a policy or a tag; ``None``: nothing is."""
        if not describe(self._module):
            return None
        free: CapturedStep = copy.copy(self)
        free._module = unconstrained(self._module)
        vars(free).pop("_as_traced", None)
        free._variants, free._resized, free._expected = [], {}, {}
        free.costs, free.store = None, Store(None)
        return free

    @property
    def correction_key(self) -> str:
        """The key by which corrections of the step are kept."""
        return key_of(self.origin(), loss=(self.caller.loss_bytes, self.caller.loss_small_bytes))

    def settle(self) -> None:
        """Let the values of the captured call go: no batch outlives its step."""
        self.caller = settled(self.caller, self.joint, self._real(self.joint))
        self.inputs, self.progress, self.peers = {}, silent, None

    def _real(self, joint: JointGraph) -> dict[fx.Node, torch.Tensor]:
        """Values of primals, where known."""
        return {joint.primals[i]: tensor for i, tensor in self.inputs.items()}

    def line(self, form: Form, *, looks: Looks | None = None) -> Line:
        """The step's graph in stages, its operations computed in a form; as it was traced where
        the search for that is out of ``looks``.
        """
        exact = form.exact or form.has_parts
        joint = self._as_traced
        if not (exact and form.shared):
            joint = self._built(exact=exact, shared=form.shared)
        if form.has_parts:
            other = self._other_bits if form.exact else None
            found = split(
                joint,
                large_in(form),
                other,
                beside=form.beside,
                expected=self._expected,
                looks=looks or Looks(),
            )
            if found is None and self._variants and self._variants[0].form == TRACED:
                return self._variants[0].blocks.line
            joint = rebuilt(joint, found) if found else joint
        line = linearize(joint)
        return line if self._units is None else self._fused(line, self._units)

    @functools.cached_property
    def _as_traced(self) -> JointGraph:
        """The step's graph, of which no pass changes a node."""
        return self._built(exact=True)

    def _built(self, *, exact: bool, shared: bool = True) -> JointGraph:
        masks = CausalMasks(cost_cache())
        joint = build_joint_graph(
            self._module,
            forward_output_count=self._output_count,
            mutated_primals=self._mutated,
            exact=exact,
            shared=shared,
            sizes=self.sizes,
            can_replace=masks.can_replace if self._target is None else None,
        )
        self._note_measuring(masks.measuring_bytes)
        return joint

    def _other_bits(self, parts: Parts, given: Sequence[torch.Tensor]) -> Changed:
        """What differs where a run is computed in parts.

        Only rules say it for another device, and where sizes follow from data.
        """
        every = Changed(frozenset(range(len(parts.outputs))))
        if str(parts) in self._refused:
            return every
        if self._target is not None or (self._from_data and self.sizes):
            return Changed() if parts.certain else every
        sizes = tuple(parts.hints.values())
        return other_bits(parts, given, sizes, cache=cost_cache(), note=self._note_measuring)

    def _fused(self, line: Line, units: Units) -> Line:
        """``line`` with units, their kernels made.

        Raises:
            ArgumentError: there is no compiler.
        """
        missing = torch_compat.missing_compiler(self.device)
        if missing is not None:
            raise ArgumentError(
                f"executor='inductor' makes kernels for {self.device.type}, but {missing}: install "
                "one, or use executor='eager'",
                argument="executor",
                value="inductor",
            )
        line = linearize(rebuilt(line.joint, computed_twice(line)))
        module = fuse(line, units)
        if self._target is None:
            units.compile(self.progress, note=self._note_measuring)
        return linearize(rebuilt(line.joint, module))

    def take(self, line: Line, form: Form, *, costs: RecordedCosts | None = None) -> Variant:
        """Let ``line``, of a form, be a further variant, at ``costs`` or what is measured."""
        origin, blocks = self.origin(), BlockCache(line)
        known = Measured.of(line, costs) if costs is not None else None
        measured = known or self._measured(origin, blocks, form)
        if self._target is None:
            tune_kernels(line.joint, self._real(line.joint), note=self._note_measuring)
        self._note_measuring(measured.measuring_bytes)
        if self._variants:  # nothing that is around knows how norms are computed
            base = self._variants[0].base
        else:
            base = self._around(measured.line.joint)
            if self.caller.outputs_bytes is None:
                self.caller = replace(self.caller, outputs_bytes=sum(base.tangent_each_bytes))
        variant = Variant(origin, blocks, measured, base, form)
        if self.peers is not None:
            variant = self._agreed(self.peers, variant, new=costs is None)
        self._variants.append(variant)
        return variant

    def _agreed(self, peers: Peers, variant: Variant, *, new: bool) -> Variant:
        """``variant`` at what it costs the slowest of several processes, with the most that is
        around it; ``new``: its collectives are not in its costs yet.
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
        """Forget all blocks: those that are used again are found again."""
        for variant in self._variants:
            variant.blocks.clear()

    def at(self, values: Values, *, run: bool = True, bits: bool = True) -> list[Variant]:
        """The variants at sizes ``values``; not ``run``: with what no law tells of scaled as all
        else, unless it was measured there already; not ``bits``: so where parts keep bits.
        """
        return [
            self.resized(own, values, run=run and (bits or not own.form.keeps_bits))
            for own in self.variants
        ]

    def resized(self, variant: Variant, values: Values, *, run: bool = True) -> Variant:
        """One of the variants at sizes ``values``; ``run`` as for :meth:`at`."""
        if values == self.sizes.hints:
            return variant
        key = values, variant.form
        known = self._resized.get((*key, True)) or self._resized.get((*key, run))
        if known is None:
            if len(self._resized) >= MOST_RESIZED:
                self._resized.pop(next(iter(self._resized)))
            known = self._resized[(*key, run)] = self._resize(variant, values, run=run)
        return known

    def traced(self, values: Values) -> Variant:
        """The step as it was traced at sizes ``values``: storages, and what is around them."""
        return self.resized(self.variants[0], values, run=False)

    def joint_at(self, values: Values) -> JointGraph:
        """The traced graph with its storages as large as they are at sizes ``values``."""
        return self.traced(values).line.joint

    def around(self, context: StepContext) -> ContextBytes:
        """What is beside the step at a call, in bytes."""
        return self.traced(context.sizes).around(context)

    def described(self, context: StepContext) -> tuple[tuple[str, int], ...]:
        """What a call finds and its bytes, for people."""
        traced = self.traced(context.sizes)
        return context.described(traced.base, traced.line.joint)

    def given_bytes(self, context: StepContext) -> int:
        """Bytes that are held throughout a call."""
        traced = self.traced(context.sizes)
        return context.given_bytes(traced.base, traced.line.joint)

    def turn_bytes(self, context: StepContext) -> int:
        """Bytes that the step's own loss needs at a call."""
        return context.turn_bytes(self.traced(context.sizes).base)

    def tangent_bytes(self, values: Values) -> int:
        """Bytes of the gradients of the outputs, at sizes ``values``."""
        return self.traced(values).base.tangent_bytes

    def _note_measuring(self, nbytes: int) -> None:
        self.measuring_bytes = max(self.measuring_bytes, nbytes)

    def _resize(self, variant: Variant, values: Values, *, run: bool) -> Variant:
        """``variant`` at other sizes."""
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
        measured = variant.measured.at(costs)
        base = self._around(measured.line.joint, values)
        base = replace(base, given_bytes=base.given_bytes + self._more_bytes)
        return replace(variant, measured=measured, base=base)

    def aside_bytes(self, values: Values) -> int:
        """Bytes set aside for workspaces at sizes ``values``, where none is known."""
        return self._aside_bytes(self.traced(values).line.joint)

    def _aside_bytes(self, joint: JointGraph) -> int:
        return aside_bytes(joint) if self._target is not None and self.costs is None else 0

    def _around(self, joint: JointGraph, values: Values | None = None) -> ContextBytes:
        """What is beside the step at every call; of another size than the capture's, if given."""
        caller = replace(
            self.caller, reserve_bytes=self.caller.reserve_bytes + self._aside_bytes(joint)
        )
        return context_bytes_of(
            joint, self._real(joint) if values is None else {}, caller, values=values
        )

    def _measured(self, origin: Origin, blocks: BlockCache, form: Form) -> Measured:
        """What a graph costs: given, estimated, known, or measured now."""
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
                LOG.warning("known costs are ignored: %s", error)
        measured = measure_line(
            line,
            blocks,
            real=self._real(line.joint),
            cache=cost_cache(),
            progress=self.progress,
        )
        self.store.put("costs", key, RecordedCosts, measured.costs)
        return measured
