"""The joint forward and backward graph of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from fxremat.passes.joint.sizes import Sizes
from fxremat.passes.joint.storage import StorageTable, tensors_of


@dataclass(frozen=True, slots=True)
class JointGraph:
    """One training step as a functional graph. Treat it, and its nodes, as immutable.

    Attributes:
        module: owns the graph and its constants (``get_attr``).
        primals: placeholders of the forward: parameters, buffers and inputs.
        tangents: placeholders of the backward: gradients of the outputs.
        constants: ``get_attr`` nodes.
        forward, backward: operations in graph order; the outputs of an operation with
            several (``getitem`` nodes) follow it directly.
        forward_outputs: what the forward returns: new values of mutated inputs, then
            the model's outputs. Each a node or a plain value, which may be a ``Size``.
        backward_outputs: the gradient of each primal, or None.
        mutated: primals whose new value is among ``forward_outputs``; their old value
            is gone once the forward has returned.
        storages: who shares memory with whom.
        sizes: what the graph follows, where its sizes are not the same in every call.
        device: where the step runs: a single input, such as a generator's state, may lie
            elsewhere.
    """

    module: fx.GraphModule
    primals: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    constants: tuple[fx.Node, ...]
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    forward_outputs: tuple[object, ...]
    backward_outputs: tuple[object, ...]
    mutated: frozenset[fx.Node]
    storages: StorageTable
    sizes: Sizes = field(default_factory=Sizes)
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        tensors = [t for node in (*self.tangents, *self.primals) for t in tensors_of(node)]
        devices = [t.device for t in tensors] or [torch.device("cpu")]
        own = next((device for device in devices if device.type != "cpu"), devices[0])
        object.__setattr__(self, "device", own)

    @property
    def given(self) -> frozenset[fx.Node]:
        """Nodes whose value exists before the step: primals and constants."""
        return frozenset((*self.primals, *self.constants))
