"""Large values of operations that run while memory is short."""

from __future__ import annotations

from fxremat.passes.emit.program import Program
from fxremat.planner.allocations import requests_of_step
from fxremat.planner.context_bytes import ContextBytes
from fxremat.planner.footprints import Footprints


def crowded(
    program: Program,
    context_bytes: ContextBytes,
    footprints: Footprints,
    *,
    limit_bytes: int,
) -> dict[str, int]:
    """Return values of the operations that run while more than ``limit_bytes`` are held.

    Values that are held at that time but neither read nor made are left out: the operation would
    hold them as well if it ran in parts.

    Args:
        program: the calls of a step.
        context_bytes: memory of the step that no block allocates.
        footprints: footprints of the line's blocks.
        limit_bytes: limit on all memory that is held.

    Returns:
        By the name of the operation that made them, the bytes of the largest such value.
    """
    line = program.line
    table = line.joint.storages
    given = table.of((*line.joint.given, *line.joint.tangents))
    requests = requests_of_step(program, context_bytes, footprints)
    largest: dict[str, int] = {}
    held_bytes = context_bytes.given_bytes
    for index, call in enumerate(program.calls):
        if index == requests.turn_index:
            held_bytes += sum(nbytes for _, nbytes in requests.turn)
        now_bytes = held_bytes
        for step in footprints.steps(call.block):
            now_bytes += table.total(step.allocates)
            if now_bytes + step.workspace_bytes > limit_bytes and step.node is not None:
                read = table.of((step.node, *call.block.sources(step.node)))
                for storage in {*read, *step.allocates} - given:
                    name, nbytes = table.owner[storage].name, table.nbytes[storage]
                    largest[name] = max(nbytes, largest.get(name, 0))
            now_bytes -= table.total(s for s in step.releases if s not in call.kept)
        held_bytes += sum(nbytes for _, nbytes in requests.calls[index])
    return largest
