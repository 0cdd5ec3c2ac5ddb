"""Workspaces that no law tells of, measured at each size.

A library chooses a convolution's algorithm by its sizes, and one that takes no workspace for a
batch of 8 may take one for 16 (oneDNN does, cuDNN does). Kernels that a compiler makes for all
sizes hold other buffers than those that it made for one. So each distinct operation of these is
run once at a new size, alone, with nothing of the step beside it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from fxremat.costs.cache import CostCache
from fxremat.costs.execute import NodeKeys, Operations, undisturbed
from fxremat.costs.synthetic import Synthesizer
from fxremat.ir import RecordedCosts
from fxremat.passes.fuse.unit import Unit
from fxremat.passes.joint.sizes import Values
from fxremat.passes.stages.block import Block, Mode
from fxremat.passes.stages.linearize import Line
from fxremat.passes.stages.resize import resize

aten = torch.ops.aten


_TARGETS = (aten.convolution.default, aten.convolution_backward.default)


def with_workspaces(
    costs: RecordedCosts, line: Line, values: Values, cache: CostCache
) -> RecordedCosts:
    """``costs`` with the workspaces that convolutions and units really take.

    It takes about as long as all that are distinct together, and as making kernels for units at
    their first other size; where there are none, it is ``costs``.

    Args:
        costs: of ``line`` at sizes ``values``.
        line: at the size of the capture.
        values: the sizes.
        cache: measurements; new ones are added, known ones are not made again.

    Ensures: the random generators are as before.

    Raises:
        CostError: one of them cannot be run.
    """
    if not any(map(_is_lawless, line.joint.module.graph.nodes)):
        return costs
    at = resize(line, values)
    nodes = tuple(at.joint.module.graph.nodes)
    runs = _Alone(at, cache)
    with undisturbed(at.joint.device):
        found = tuple(
            (index, mode, runs.workspace_bytes(nodes[index], Mode(mode)))
            if _is_lawless(nodes[index])
            else (index, mode, nbytes)
            for index, mode, nbytes in costs.workspace_bytes
        )
    return replace(costs, workspace_bytes=found)


def _is_lawless(node: fx.Node) -> bool:
    return node.target in _TARGETS or isinstance(node.target, Unit)


class _Alone:
    """Runs operations of a line one by one."""

    def __init__(self, line: Line, cache: CostCache) -> None:
        self._line, self._cache = line, cache
        self._inputs = Synthesizer(line.joint, {})
        self._keys = NodeKeys()

    def workspace_bytes(self, node: fx.Node, mode: Mode) -> int:
        """What ``node`` takes, measured if nobody has."""
        inputs = tuple(node.all_input_nodes)
        reads = self._line.joint.storages.of(inputs)
        block = Block(self._line.stage_of[node], mode, (node,), inputs, (), reads)
        key = self._keys(node, block)
        if key not in self._cache.workspace_bytes:
            values = self._inputs.of(inputs)
            # Where kernels are made for a unit, that takes memory once.
            caches = [CostCache()] if isinstance(node.target, Unit) else []
            for cache in (*caches, self._cache):
                device = self._line.joint.device
                Operations(cache, device=device, keys=self._keys).run(block, values)
        return self._cache.workspace_bytes[key]
