"""A captured step: its graphs, and what they cost, at the sizes of the capture and at others."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.costs.cache import cost_cache
from fxremat.costs.collectives import late_bytes, speeds_of, with_collectives
from fxremat.costs.cost import Measured, measure_line
from fxremat.costs.devices import Device
from fxremat.costs.roofline import aside_bytes, estimate_line
from fxremat.costs.scaled import ScaledCosts, with_workspaces
from fxremat.errors import ArgumentError, CaptureError, CostError
from fxremat.frontend.agreed import agreed_costs, agreed_speeds
from fxremat.frontend.dimensions import Dimension, dimensions_of
from fxremat.frontend.origin import key_of, origin_of_costs
from fxremat.frontend.ranks import Peers
from fxremat.frontend.store import Store
from fxremat.frontend.variants import StepGraph
from fxremat.ir import RecordedCosts
from fxremat.passes.fuse.again import computed_twice
from fxremat.passes.fuse.layout import with_channels_last
from fxremat.passes.fuse.rewrite import fuse
from fxremat.passes.fuse.unit import Units
from fxremat.passes.joint.batchnorm import is_inverse
from fxremat.passes.joint.build import build_joint_graph, rebuilt
from fxremat.passes.joint.digest import digest, structure_digest
from fxremat.passes.joint.graph import JointGraph, tensors_of
from fxremat.passes.joint.settle import place, settle
from fxremat.passes.joint.sizes import Values
from fxremat.passes.stages.block import BlockCache
from fxremat.passes.stages.linearize import Line, linearize
from fxremat.planner.context import StepContext
from fxremat.planner.context_bytes import Caller, ContextBytes, context_bytes_of, settled
from fxremat.progress import Progress, silent

LOG = logging.getLogger("fxremat")

MOST_SIZES = 128
"""Sizes whose costs are kept; which was met first goes first."""


@dataclass(slots=True)
class Costed:
    """A graph of the step at one size, what it costs, and what is beside it at every call."""

    graph: StepGraph
    measured: Measured
    base: ContextBytes
    scaled: ScaledCosts | None = None

    def around(self, context: StepContext) -> ContextBytes:
        """What is beside the graph at a call, in bytes."""
        return context.around(self.base, self.measured.line.joint)


class CapturedStep:
    """What AOTAutograd captured.

    Args:
        module: its joint graph.
        forward_output_count: how many of its outputs are the forward's.
        inputs: real values of primals, by index; they are held until :meth:`settle`.
        caller: what is needed beside the step at every call.
        progress: told how far measuring has come.
        places: of primals that are arguments of the call, where known.
        costs: of the step as it was traced, to be taken for what was measured.
        store: costs that are known.
        target: the device that the step is to be estimated for, and none that is here: nothing
            is run then.
        fused: operations run as units that Inductor compiles.
        peers: processes that agree on what it costs, until it is settled.

    Attributes:
        sizes: symbols of the capture.
        dimensions: of arguments, whose sizes are symbols.
        inputs, caller, progress: as given; no batch and silent once it is settled.
        costs: as given.
        late_bytes: left alone for buffers of collectives that go late.

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
        places: Mapping[int, str],
        costs: RecordedCosts | None,
        store: Store,
        target: Device | None = None,
        fused: bool = False,
        peers: Peers | None = None,
    ) -> None:
        self._module, self.sizes = settle(module)
        if fused:
            self._module = with_channels_last(self._module)
        if target is not None and target.kind != "cpu":  # where it was traced
            place(self._module, torch.device(target.kind))
        primals = self._module.graph.find_nodes(op="placeholder")
        self.dimensions: tuple[Dimension, ...] = dimensions_of(primals, self.sizes, places)
        self.inputs = inputs
        self.caller = caller
        self.costs = costs
        self._output_count = forward_output_count
        self._mutated = torch_compat.mutated_primals(self._module)
        self._digests = digest(
            self._module, forward_output_count=forward_output_count, mutated_primals=self._mutated
        )
        self.progress = progress
        self._store = store
        self._target = target
        self._peers = peers
        self._units = Units() if fused else None
        if self.has_collectives and peers is None:
            raise CaptureError(
                "this step waits for other processes, which must follow the same plan: give "
                "fxremat.compile ranks=fxremat.Ranks() and a sample, and let all sizes be met at "
                "the first call"
            )
        self.late_bytes = self._more_bytes = 0
        self._graphs: list[Costed] = []
        self._resized: dict[Values, list[Costed]] = {}

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
        return any(map(torch_compat.is_collective, self._module.graph.nodes))

    @property
    def executor(self) -> str:
        """Who makes the kernels, and what is run without."""
        if self._units is None:
            return "eager"
        failed = [str(unit) for unit in self._units if unit.eager]
        return f"inductor, but not {', '.join(failed)}" if failed else "inductor"

    @property
    def joint(self) -> JointGraph:
        """The graph as it was traced; all have the same inputs and results."""
        return self.graphs[0].graph.line.joint

    @property
    def graphs(self) -> list[Costed]:
        """Ways to compute the step, at the sizes of the capture, the traced one first.

        Raises:
            CostError: an operation cannot be measured.
        """
        if not self._graphs:
            self.take(self.graph(exact=True))
        return self._graphs

    @property
    def correction_key(self) -> str:
        """The key by which corrections of the step are kept."""
        origin = origin_of_costs(self._digests, self.device, self.executor, self._target)
        return key_of(origin, loss=(self.caller.loss_bytes, self.caller.loss_small_bytes))

    def settle(self) -> None:
        """Let the values of the captured call go: no batch outlives its step."""
        traced = self.graphs[0].graph
        self.caller = settled(self.caller, traced.line.joint, traced.real)
        self.inputs = {}
        self._graphs = [replace(own, graph=replace(own.graph, real={})) for own in self._graphs]
        self.progress = silent
        self._peers = None

    def graph(self, *, exact: bool) -> StepGraph:
        """The step's graph as it was traced, or, not ``exact``, with norms undone."""
        joint = build_joint_graph(
            self._module,
            forward_output_count=self._output_count,
            mutated_primals=self._mutated,
            exact=exact,
            sizes=self.sizes,
        )
        line = linearize(joint)
        if self._units is not None:
            line = self._fused(line, self._units)
            joint = line.joint
        real = {joint.primals[i]: tensor for i, tensor in self.inputs.items()}
        origin = origin_of_costs(self._digests, joint.device, self.executor, self._target)
        return StepGraph(line, BlockCache(line), real, exact, origin)

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
        line = linearize(rebuilt(line.joint, computed_twice(line), mutated_primals=self._mutated))
        module = fuse(line, units)
        if self._target is None:
            for done, unit in enumerate(units):
                self.progress("compile kernels", done, len(units))
                unit.compile()
            self.progress("compile kernels", len(units), len(units))
        return linearize(rebuilt(line.joint, module, mutated_primals=self._mutated))

    def take(self, graph: StepGraph, costs: RecordedCosts | None = None) -> None:
        """Let ``graph`` be a further way to compute the step, at ``costs`` or what is measured."""
        measured = Measured.of(graph.line, costs) if costs else self._measured(graph)
        if self._graphs:  # nothing that is around knows how norms are computed
            base = self._graphs[0].base
        else:
            base = self._around(measured.line.joint, graph.real, self.caller)
            if self.caller.outputs_bytes is None:
                self.caller = replace(self.caller, outputs_bytes=base.tangent_bytes)
        if self._peers is not None:
            measured, base = self._agreed(self._peers, graph, measured, base, new=costs is None)
        self._graphs.append(Costed(graph, measured, base))
        self._resized.clear()

    def _agreed(
        self, peers: Peers, graph: StepGraph, measured: Measured, base: ContextBytes, *, new: bool
    ) -> tuple[Measured, ContextBytes]:
        """What ``graph`` costs the slowest of several processes, and the most that is around it.

        Args:
            peers: the processes.
            graph: the graph.
            measured: by this one.
            base: around it here.
            new: collectives are not in it yet.
        """
        own_bytes = base.given_bytes
        costs, most = agreed_costs(
            peers, graph.origin, structure_digest(graph.line.joint.module), measured.costs, base
        )
        if not self._graphs:
            if self.has_collectives:
                self.late_bytes = late_bytes(graph.line, self.device)
            base = replace(most, given_bytes=most.given_bytes + self.late_bytes)
            self._more_bytes = base.given_bytes - own_bytes
        if self.has_collectives and new:
            speeds = agreed_speeds(peers, speeds_of(graph.line, self.device))
            costs = with_collectives(costs, graph.line, graph.blocks, speeds)
        return Measured.of(graph.line, costs), base

    def undo_norms(self) -> None:
        """Let there be a way that rebuilds inputs of norms, if any can be rebuilt."""
        if len(self.graphs) == 1:
            undone = self.graph(exact=False)
            if any(map(is_inverse, undone.line.joint.forward)):
                self.take(undone)

    def forget_blocks(self) -> None:
        """Forget all blocks: those that are used again are found again."""
        for costed in self._graphs:
            costed.graph.blocks.clear()

    def at(self, values: Values) -> list[Costed]:
        """The graphs at sizes ``values``, and what they cost there."""
        if values == self.sizes.hints:
            return self.graphs
        if values not in self._resized:
            if len(self._resized) >= MOST_SIZES:
                self._resized.pop(next(iter(self._resized)))
            self._resized[values] = [self._resize(own, values, run=True) for own in self.graphs]
        return self._resized[values]

    def roughly_at(self, values: Values) -> list[Costed]:
        """As :meth:`at`, but kept for nobody and without running what no law tells of."""
        if values == self.sizes.hints or values in self._resized:
            return self.at(values)
        return [self._resize(own, values, run=False) for own in self.graphs]

    def around(self, context: StepContext) -> ContextBytes:
        """What is beside the step at a call, in bytes."""
        return self.at(context.sizes)[0].around(context)

    def given_bytes(self, context: StepContext) -> int:
        """Bytes that are held throughout a call."""
        costed = self.at(context.sizes)[0]
        return context.given_bytes(costed.base, costed.measured.line.joint)

    def turn_bytes(self, context: StepContext) -> int:
        """Bytes that the step's own loss needs at a call."""
        return context.turn_bytes(self.at(context.sizes)[0].base)

    def tangent_bytes(self, values: Values) -> int:
        """Bytes of the gradients of the outputs, at sizes ``values``."""
        return self.at(values)[0].base.tangent_bytes

    def _resize(self, costed: Costed, values: Values, *, run: bool) -> Costed:
        """``costed`` at sizes ``values``; what no law tells of is measured there if ``run``."""
        graph = costed.graph
        if costed.scaled is None:
            costed.scaled = ScaledCosts(graph.line, graph.blocks, costed.measured.costs)
        costs = costed.scaled.at(values)
        if run and self._target is None:
            costs = with_workspaces(costs, graph.line, values, cost_cache())
        measured = costed.measured.at(costs)
        base = self._around(measured.line.joint, {}, self.caller, values)
        base = replace(base, given_bytes=base.given_bytes + self._more_bytes)
        return Costed(replace(graph, line=measured.line), measured, base)

    def aside_bytes(self, values: Values) -> int:
        """Bytes set aside for workspaces at sizes ``values``, where none is known."""
        if self._target is None or self.costs is not None:
            return 0
        return aside_bytes(self.at(values)[0].measured.line.joint)

    def _around(
        self,
        joint: JointGraph,
        real: Mapping[fx.Node, torch.Tensor],
        caller: Caller,
        values: Values | None = None,
    ) -> ContextBytes:
        if self._target is not None and self.costs is None:
            caller = replace(caller, reserve_bytes=caller.reserve_bytes + aside_bytes(joint))
        return context_bytes_of(joint, real, caller, values=values)

    def _measured(self, graph: StepGraph) -> Measured:
        """What ``graph`` costs: given, known, or measured now."""
        key = key_of(graph.origin, exact=graph.exact)
        known = self.costs if graph.exact else None
        if known is not None:
            return Measured.of(graph.line, known)
        if self._target is not None:
            return estimate_line(graph.line, graph.blocks, self._target)
        known = self._store.get("costs", key, RecordedCosts)
        if known is not None:
            try:
                return Measured.of(graph.line, known)
            except CostError as error:
                LOG.warning("known costs are ignored: %s", error)
        measured = measure_line(
            graph.line, graph.blocks, real=graph.real, cache=cost_cache(), progress=self.progress
        )
        self._store.put("costs", key, RecordedCosts, measured.costs)
        return measured
