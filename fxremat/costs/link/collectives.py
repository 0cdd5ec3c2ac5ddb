"""Costs of a graph with collectives: the work of this process, and a law for messages.

Processes that timed collectives by their own clocks would wait for each other forever. So
operations are measured as if there were no other process. Each collective takes the seconds of a
message and of its bytes in addition, which a few messages measure that all processes send together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.costs.measured.cost import stage_blocks
from fxremat.ir import RecordedCosts, StageSeconds
from fxremat.passes.joint.graph import tensors_of
from fxremat.passes.stages.block import Block, BlockCache
from fxremat.passes.stages.linearize import Line

LATE = 6
"""Largest number of buffers that the threads of a CPU's process group hold longer than the graph
does. Two or three are usual; seven were observed once, with three times as many busy threads as
cores."""

Speeds = Mapping[str, tuple[float, float]]
"""For each process group, the seconds of a message and the seconds of each of its bytes."""


def speeds_of(line: Line, device: torch.device) -> dict[str, tuple[float, float]]:
    """Return, for each process group of a graph, the seconds of a message and of each of its bytes.

    They are measured in the order of the graph, and all processes must call this.
    """
    groups = dict.fromkeys(map(torch_compat.group_of, line.joint.module.graph.nodes))
    return {name: torch_compat.ping_s(name, device) for name in groups if name is not None}


def with_collectives(
    costs: RecordedCosts, line: Line, blocks: BlockCache, speeds: Speeds
) -> RecordedCosts:
    """Return ``costs``, measured without other processes, plus the seconds of messages."""

    def total_message_s(block: Block) -> float:
        return sum(_message_s(node, speeds) for node in block.nodes)

    nodes = tuple(line.joint.module.graph.nodes)
    stages = []
    for index, stage in enumerate(costs.stages):
        first, again, backward = map(total_message_s, stage_blocks(line, blocks, index))
        stages.append(
            StageSeconds(
                stage.forward_s + first, stage.rebuild_s + again, stage.backward_s + backward
            )
        )
    again_s = tuple((i, seconds + _message_s(nodes[i], speeds)) for i, seconds in costs.again_s)
    return replace(costs, stages=tuple(stages), again_s=again_s)


def late_bytes(line: Line, device: torch.device) -> int:
    """Return the bytes of buffers that a CPU's process group may hold longer than the graph.

    Returns 0 for other devices.
    """
    if device.type != "cpu":
        return 0
    collectives = (n for n in line.joint.module.graph.nodes if torch_compat.group_of(n))
    largest = max(max(_nbytes(n), *map(_nbytes, n.all_input_nodes)) for n in collectives)
    return LATE * largest


def _message_s(node: fx.Node, speeds: Speeds) -> float:
    group = torch_compat.group_of(node)
    if group is None:
        return 0.0
    message_s, byte_s = speeds[group]
    return message_s + byte_s * max(_nbytes(node), *map(_nbytes, node.all_input_nodes))


def _nbytes(node: fx.Node) -> int:
    return sum(int(t.numel()) * t.element_size() for t in tensors_of(node))
