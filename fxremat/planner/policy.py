"""Which storages a policy lets travel."""

from __future__ import annotations

import torch
from torch import fx

from fxremat.passes.joint.graph import JointGraph


def conv_inputs(joint: JointGraph) -> frozenset[int]:
    """Storages that a convolution or a pooling of the forward reads.

    The policy of Hascoet et al., "Reducing the memory cost of training convolutional neural
    networks by CPU offloading": they are large, and take long enough to be copied beside.
    """
    read = (n for node in joint.forward if _slides(node) for n in node.all_input_nodes)
    return joint.storages.of(read)


def _slides(node: fx.Node) -> bool:
    """Whether ``node`` moves a window over its input."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = str(node.target)
    return "conv" in name or "pool" in name
