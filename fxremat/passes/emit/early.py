"""Copies of parameters from host memory that start before the call that reads them.

A call copies what it reads of host memory, and waits. Where the calls before it leave room below
the peak of the plan, the copy can start earlier and run at the same time as these calls. Only bytes
decide where it starts, so the peak stays the same whatever the speed of the link is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from fxremat.passes.emit.program import Program
from fxremat.passes.joint.graph import JointGraph
from fxremat.runtime.host_parameter import fetch

DEPTH = 4
"""A copy starts at the earliest with the call that reads this many copies before."""

ROUNDING_BYTES = 1 << 20
"""Bytes by which a block of CUDA's allocator may be larger than a request of more than these."""


@dataclass(frozen=True, slots=True)
class Early:
    """A copy from host memory that starts early.

    Attributes:
        begin: the index of the call before which it starts.
        call: the index of the call that reads it.
        source: the primal that is copied.
        node: the operation that reads the copy.
        nbytes: its bytes.
    """

    begin: int
    call: int
    source: fx.Node
    node: fx.Node
    nbytes: int


def early_fetches(program: Program, peaks_bytes: Sequence[int]) -> tuple[Early, ...]:
    """Return the copies that can start early, in the order in which they are read.

    Args:
        program: the calls of a step.
        peaks_bytes: the peak of each call.

    Ensures: with these copies, no call exceeds the largest of ``peaks_bytes``. At most one copy of
        a primal is under way. No copy is under way between forward and backward.
    """
    joint = program.line.joint
    limit, more = max(peaks_bytes, default=0), [0] * len(program.calls)
    on_cuda = joint.device.type == "cuda"
    made: list[Early] = []
    last_read: dict[fx.Node, int] = {}
    reads: list[int] = []
    for index, call in enumerate(program.calls):
        is_first = True  # whether the call has allocated nothing yet
        for node in call.block.nodes:
            source = _source(node, joint) if node.target is fetch else None
            if source is None:
                is_first &= joint.storages.is_view(node)
                continue
            nbytes = joint.storages.total(joint.storages.of_node[node])
            rounded = on_cuda and nbytes > ROUNDING_BYTES
            taken = nbytes + ROUNDING_BYTES * rounded
            least = program.loss_point if index >= program.loss_point else 0
            least = max(least, last_read.get(source, -1) + 1, *reads[-DEPTH : 1 - DEPTH])

            def has_room(at: int, taken: int = taken) -> bool:
                return peaks_bytes[at] + more[at] + taken <= limit

            begin = index
            if is_first or has_room(index):
                while begin > least and has_room(begin - 1):
                    begin -= 1
                if begin < index or not is_first:
                    made.append(Early(begin, index, source, node, nbytes))
                    for at in range(begin, index + (not is_first)):
                        more[at] += taken
            last_read[source] = index
            reads.append(index)
            is_first = False
    return tuple(made)


def _source(node: fx.Node, joint: JointGraph) -> fx.Node | None:
    """Return the primal that ``node`` fetches the whole of; ``None`` if it fetches a part."""
    source = node.args[0]
    while isinstance(source, fx.Node) and source.op == "call_function":
        source = source.args[0] if source.args else None
    if not isinstance(source, fx.Node) or source not in joint.primals:
        return None
    value, whole = node.meta["val"], source.meta["val"]
    fills = value.untyped_storage().nbytes() == value.nbytes
    return source if fills and value.nbytes == whole.nbytes else None
