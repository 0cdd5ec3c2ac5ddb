"""Workspaces that no law tells of: those of convolutions, measured at each size.

A library chooses a convolution's algorithm by its sizes, and one that takes no workspace for a
batch of 8 may take one for 16 (oneDNN does, cuDNN does). So each distinct convolution of a step is
run once at a new size, alone, with nothing of the step beside it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.costs.cache import CostCache
from fxremat.costs.execute import NodeKeys, Operations
from fxremat.costs.synthetic import Synthesizer
from fxremat.ir import RecordedCosts
from fxremat.passes.joint.sizes import Values
from fxremat.passes.stages.block import Block, Mode
from fxremat.passes.stages.linearize import Line
from fxremat.passes.stages.resize import resize

aten = torch.ops.aten


def with_convolutions(
    costs: RecordedCosts, line: Line, values: Values, cache: CostCache
) -> RecordedCosts:
    """``costs`` with the workspaces that convolutions really take; the same where there are none.

    It takes about as long as all distinct convolutions of the step together.

    Args:
        costs: of ``line`` at sizes ``values``.
        line: at the size of the capture.
        values: the sizes.
        cache: measurements; new ones are added, known ones are not made again.

    Raises:
        CostError: a convolution cannot be run.
    """
    if not _convolutions(line):
        return costs
    at = resize(line, values)
    nodes, convolutions = tuple(at.joint.module.graph.nodes), _convolutions(at)
    synthesizer, keys = Synthesizer(at.joint, {}), NodeKeys()
    operations = Operations(cache, device=at.joint.device, keys=keys)
    found = []
    with torch_compat.real_execution(), torch.no_grad():
        for index, mode, nbytes in costs.workspace_bytes:
            node = nodes[index]
            if node in convolutions:
                block = _alone(node, Mode(mode), at)
                if keys(node, block) not in cache.workspace_bytes:
                    operations.run(block, synthesizer.of(block.inputs))
                nbytes = cache.workspace_bytes[keys(node, block)]
            found.append((index, mode, nbytes))
    return replace(costs, workspace_bytes=tuple(found))


def _convolutions(line: Line) -> frozenset[fx.Node]:
    graph = line.joint.module.graph
    found = (graph.find_nodes(op="call_function", target=target) for target in _TARGETS)
    return frozenset(node for nodes in found for node in nodes)


_TARGETS = (aten.convolution.default, aten.convolution_backward.default)


def _alone(node: fx.Node, mode: Mode, line: Line) -> Block:
    """A block of one operation."""
    inputs = tuple(node.all_input_nodes)
    reads = line.joint.storages.of(inputs)
    return Block(line.stage_of[node], mode, (node,), inputs, (), reads)
