"""The graph of a training step as it goes from pass to pass."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import fx

from fxremat import torch_compat
from fxremat.errors import GraphError
from fxremat.passes.joint.build import rebuilt
from fxremat.passes.joint.graph import JointGraph, copy_of
from fxremat.passes.joint.sizes import Sizes
from fxremat.passes.stages.linearize import Line


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A training step as a graph, with what passes have derived from it. Treat it as immutable.

    Attributes:
        module: owns the fx graph and its constants. Placeholders are the primals, then the
            tangents; results are those of the forward, then a gradient or ``None`` for each primal.
        forward_output_count: how many of its results belong to the forward.
        mutated_primals: indices of the primals whose new value the forward returns.
        sizes: the symbols that the graph follows; none where all sizes are numbers.
        classified: the graph with its operations classified as forward and backward, and with its
            storages; ``None`` before the pass ``build``.
        staged: the graph in stages; ``None`` before ``linearize``, and after a pass that changed
            an operation.
    """

    module: fx.GraphModule
    forward_output_count: int
    mutated_primals: tuple[int, ...] = ()
    sizes: Sizes = field(default_factory=Sizes)
    classified: JointGraph | None = None
    staged: Line | None = None

    @staticmethod
    def captured(module: fx.GraphModule, *, forward_output_count: int) -> StepGraph:
        """Return the step of ``module``, as AOTAutograd traced it, before any pass."""
        mutated = tuple(torch_compat.mutated_primals(module))
        return StepGraph(module, forward_output_count, mutated)

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """All nodes, in graph order."""
        return tuple(self.module.graph.nodes)

    @property
    def joint(self) -> JointGraph:
        """The graph with its operations classified as forward and backward.

        Raises:
            GraphError: the pass ``build`` has not run.
        """
        if self.classified is None:
            raise GraphError(
                "operations are not classified yet: add the pass after 'build'", code="FXR621"
            )
        return self.classified

    @property
    def line(self) -> Line:
        """The graph in stages.

        Raises:
            GraphError: the pass ``linearize`` has not run since the graph was changed.
        """
        if self.staged is None:
            raise GraphError(
                "the graph has no stages: a pass that reads them follows 'linearize', and one that "
                "changes operations precedes it",
                code="FXR621",
            )
        return self.staged

    def copied(self) -> fx.GraphModule:
        """Return a copy of the module, with the same names and metadata, that a pass may change."""
        return torch_compat.graph_module(self.module, copy_of(self.module.graph))

    def changed(self, module: fx.GraphModule, *, sizes: Sizes | None = None) -> StepGraph:
        """Return a step with ``module`` in place of the graph of this one.

        Args:
            module: has the same placeholders and results, in the same order. It must not be used
                for anything else.
            sizes: the symbols that it follows; by default those of this graph.

        Ensures: operations are classified if they were; there are no stages.

        Raises:
            GraphError: a forward operation reads a backward one, or an operation writes into its
                arguments.
        """
        if self.classified is not None:
            return self.as_joint(rebuilt(self.classified, module))
        return replace(self, module=module, sizes=self.sizes if sizes is None else sizes)

    def as_joint(self, joint: JointGraph) -> StepGraph:
        """Return the step with ``joint`` as its classified graph, and without stages."""
        return replace(self, module=joint.module, classified=joint, staged=None)

    def as_line(self, line: Line) -> StepGraph:
        """Return the step with the stages ``line``, and the graph of ``line`` as its graph."""
        return replace(self, module=line.joint.module, classified=line.joint, staged=line)
