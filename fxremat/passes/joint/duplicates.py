"""Operations that a forward runs twice with the same arguments, such as a mask per layer.

Both give the same bits, so one can stand for both, wherever that takes no memory: where its
result is a view, a few bytes, or kept for the backward anyway. Then there is one storage for
the whole step where there was one for each layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint import batchnorm
from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.joint.storage import tensors_of

SMALL_BYTES = 512
"""Results up to this size may live longer than they had to."""


def merge_duplicates(joint: JointGraph) -> bool:
    """Let the first of equal forward operations stand for all.

    Requires: the graph of ``joint`` is its own, and nothing else refers to its nodes.
    Ensures: in ``joint``'s graph, which is changed, every tensor has the bits it had; no
        result is another's alias that was not; no forward allocates more than before. Views of
        what is gone share the storage of what stands for it.

    Returns whether anything changed.
    """
    table = joint.storages
    given = table.of(joint.given)
    kept = table.of(n for node in joint.backward for n in node.all_input_nodes)
    results = (*joint.forward_outputs, *joint.backward_outputs)
    returned = table.of(n for n in results if isinstance(n, fx.Node))
    first_of: dict[object, fx.Node] = {}
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
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
            for gone, stays in zip(tensors_of(node), tensors_of(first), strict=True):
                if torch_compat.storage_key(gone) != torch_compat.storage_key(stays):
                    moved[torch_compat.storage_key(gone)] = gone, stays
            changed = True
    if moved:
        _move(joint.module.graph, moved)
    return changed


def _move(graph: fx.Graph, moved: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Let what lies in a storage that is gone lie in the one that stands for it.

    Args:
        graph: it is changed.
        moved: by storage, a tensor in it and one in the storage that stays.
    """

    def placed(item: object) -> object:
        if not isinstance(item, torch.Tensor):
            return item
        base = item
        while torch_compat.storage_key(base) in moved:
            base = moved[torch_compat.storage_key(base)][1]
        if base is item:
            return item
        storage, offset = base.untyped_storage(), int(item.storage_offset())
        return torch_compat.fake_tensor(item, storage, item.shape, item.stride(), offset)

    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, (tuple, list)):
            node.meta["val"] = type(value)(map(placed, value))
        elif node.op != "output" and value is not None:
            node.meta["val"] = placed(value)
