"""What collectives of a graph cost: the work of this process alone, and a law for the rest.

Processes that timed them by their own clocks would wait for each other for ever. So what is
measured runs as if there were no other process, and each collective takes the seconds of a message
in addition, and those of its bytes, by a few messages that all processes send alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.costs.cost import stage_blocks
from fxremat.ir import RecordedCosts, StageSeconds
from fxremat.passes.joint.graph import tensors_of
from fxremat.passes.stages.block import Block, BlockCache
from fxremat.passes.stages.linearize import Line

LATE = 6
"""Buffers that threads of a CPU's process group may hold longer than the graph does. Two or three
are usual, seven were seen once, with three times as many busy threads as cores."""

Speeds = Mapping[str, tuple[float, float]]
"""By group: seconds of a message, and of each of its bytes."""


def speeds_of(line: Line, device: torch.device) -> dict[str, tuple[float, float]]:
    """Speeds of the process groups in a graph, in its order; all processes must call this."""
    groups = dict.fromkeys(map(torch_compat.group_of, line.joint.module.graph.nodes))
    return {name: torch_compat.ping_s(name, device) for name in groups if name is not None}


def with_collectives(
    costs: RecordedCosts, line: Line, blocks: BlockCache, speeds: Speeds
) -> RecordedCosts:
    """``costs`` of a line whose collectives were run by this process alone, with their messages."""

    def more_s(block: Block) -> float:
        return sum(_seconds(node, speeds) for node in block.nodes)

    nodes = tuple(line.joint.module.graph.nodes)
    stages = []
    for index, stage in enumerate(costs.stages):
        first, again, backward = map(more_s, stage_blocks(line, blocks, index))
        stages.append(
            StageSeconds(
                stage.forward_s + first, stage.rebuild_s + again, stage.backward_s + backward
            )
        )
    again_s = tuple((i, seconds + _seconds(nodes[i], speeds)) for i, seconds in costs.again_s)
    return replace(costs, stages=tuple(stages), again_s=again_s)


def late_bytes(line: Line, device: torch.device) -> int:
    """Bytes of buffers that a CPU's process group may hold longer than the graph does."""
    if device.type != "cpu":
        return 0
    collectives = (n for n in line.joint.module.graph.nodes if torch_compat.group_of(n))
    largest = max(max(_nbytes(n), *map(_nbytes, n.all_input_nodes)) for n in collectives)
    return LATE * largest


def _seconds(node: fx.Node, speeds: Speeds) -> float:
    group = torch_compat.group_of(node)
    if group is None:
        return 0.0
    message_s, byte_s = speeds[group]
    return message_s + byte_s * max(_nbytes(node), *map(_nbytes, node.all_input_nodes))


def _nbytes(node: fx.Node) -> int:
    return sum(int(t.numel()) * t.element_size() for t in tensors_of(node))
