"""Operations that a forward runs twice with the same arguments, such as a mask per layer.

Both give the same bits, so one can stand for both, wherever that takes no memory: where its
result is a view, a few bytes, or kept for the backward anyway. Then there is one storage for
the whole step where there was one for each layer.
"""

from __future__ import annotations

from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint import batchnorm
from fxremat.passes.joint.graph import JointGraph

SMALL_BYTES = 512
"""Results up to this size may live longer than they had to."""


def merge_duplicates(joint: JointGraph) -> bool:
    """Let the first of equal forward operations stand for all.

    Requires: the graph of ``joint`` is its own, and nothing else refers to its nodes.
    Ensures: in ``joint``'s graph, which is changed, every tensor has the bits it had; no
        result is another's alias that was not; no forward allocates more than before.

    Returns whether anything changed.
    """
    table = joint.storages
    given = table.of(joint.given)
    kept = table.of(n for node in joint.backward for n in node.all_input_nodes)
    results = (*joint.forward_outputs, *joint.backward_outputs)
    returned = table.of(n for n in results if isinstance(n, fx.Node))
    first_of: dict[object, fx.Node] = {}
    changed = False
    for node in joint.forward:
        if torch_compat.draws_random_numbers(node) or batchnorm.updates_statistics(node):
            continue
        # As they are written, so that 1, 1.0 and True, or 0.0 and -0.0, differ.
        first = first_of.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if first is node:
            continue
        storages = frozenset(table.of_node[first]) - given
        views = storages <= table.of(first.all_input_nodes)
        small = table.total(storages) <= SMALL_BYTES
        alone = returned.isdisjoint({*storages, *table.of_node[node]})
        if alone and (views or small or storages <= kept):
            node.replace_all_uses_with(first)
            joint.module.graph.erase_node(node)
            changed = True
    return changed
