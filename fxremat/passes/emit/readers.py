"""Which calls of a step read its tensors, and what recomputing a single tensor takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container
from dataclasses import dataclass

from torch import fx

from fxremat.passes.emit.program import Program
from fxremat.passes.joint import rng
from fxremat.passes.joint.graph import is_getitem
from fxremat.passes.stages.block import Mode, dependencies
from fxremat.passes.stages.linearize import Line


def readers_of(program: Program) -> dict[int, tuple[int, ...]]:
    """Return, for each storage, the indices of the calls of ``program`` that read it."""
    of_node = program.line.joint.storages.of_node
    found: defaultdict[int, dict[int, None]] = defaultdict(dict)
    for index, call in enumerate(program.calls):
        for node in call.block.nodes:
            for source in node.all_input_nodes:
                for storage in of_node.get(source, ()):
                    found[storage][index] = None
    return {storage: tuple(calls) for storage, calls in found.items()}


@dataclass(frozen=True, slots=True)
class Recomputation:
    """What recomputing a storage takes.

    Attributes:
        runs: the operations that run again.
        needs: storages that would have to be held from the forward on, and are not.
    """

    runs: tuple[fx.Node, ...]
    needs: frozenset[int]


def recomputation_of(
    line: Line, storage: int, held: frozenset[int], again: Container[fx.Node]
) -> Recomputation | None:
    """Return what it takes to recompute a storage from others that the backward has.

    ``None``: it is kept in any plan, or an operation that is needed for it must not run again.

    Args:
        line: the stages of a graph.
        storage: a storage that its forward allocates.
        held: the storages that are held between forward and backward, without this one.
        again: the operations that a recomputation may run.
    """
    table, pinned = line.joint.storages, line.joint.storages.of(line.pinned)
    if storage in pinned:
        return None
    wanted = [table.owner[storage]]
    runs: dict[fx.Node, None] = {}
    needs: set[int] = set()
    while wanted:
        node = wanted.pop()
        storages = table.of_node.get(node, ())
        if node in runs or rng.is_state(node) or (storages and held.issuperset(storages)):
            continue
        if node not in line.stage_of:  # a parameter or an input, or a view of one
            continue
        if storages and pinned.issuperset(storages):
            needs.update(set(storages) - held)
            continue
        takes_time = bool(storages) and not is_getitem(node) and not table.is_view(node)
        if takes_time and node not in again:
            return None
        runs[node] = None
        wanted += dependencies(node, Mode.AGAIN)
    return Recomputation(tuple(node for node in runs if node in again), frozenset(needs))
