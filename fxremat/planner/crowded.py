"""Values in the way of a lower peak."""

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
    """Values of each operation that runs while more than ``limit_bytes`` are held.

    What is held meanwhile without being read or made is none of them: an operation in parts would
    hold it as well.

    Args:
        program: the calls of a step.
        context_bytes: what is held beside them.
        footprints: of its line.
        limit_bytes: of all that is held.

    Returns the bytes of the largest value of each operation that made some, by its name.
    """
    line = program.line
    table = line.joint.storages
    given = table.of((*line.joint.given, *line.joint.tangents))
    requests = requests_of_step(program, context_bytes, footprints)
    found: dict[str, int] = {}
    held_bytes = context_bytes.given_bytes
    for index, call in enumerate(program.calls):
        if index == requests.turn_index:
            held_bytes += sum(nbytes for _, nbytes in requests.turn)
        now_bytes = held_bytes
        for step in footprints.steps(call.block):
            now_bytes += table.total(step.allocates)
            if now_bytes + step.workspace_bytes > limit_bytes and step.node is not None:
                read = table.of((step.node, *call.block.sources(step.node)))
                own = {*read, *step.allocates} - given
                for storage in own:
                    name, nbytes = table.owner[storage].name, table.nbytes[storage]
                    found[name] = max(nbytes, found.get(name, 0))
            now_bytes -= table.total(s for s in step.releases if s not in call.kept)
        held_bytes += sum(nbytes for _, nbytes in requests.calls[index])
    return found
