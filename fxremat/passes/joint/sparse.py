"""Make operations that take and return dense tensors of those that make sparse ones.

The storages of a sparse tensor, and their sizes, are not in a trace. So each dense value that is
computed from sparse ones is one operation, which computes the sparse ones as well, and each sparse
gradient is one. Sparse inputs remain: they exist before the step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxremat import torch_compat
from fxremat.errors import CaptureError
from fxremat.passes.joint.graph import copy_of
from fxremat.passes.joint.nested import graph_digest
from fxremat.runtime.sparse import SparseOperation, in_place_of


def with_sparse(module: fx.GraphModule) -> fx.GraphModule:
    """Return a joint graph in which no operation returns a sparse tensor.

    Args:
        module: the joint graph; it is not changed.

    Ensures: a ``SparseOperation`` in place of a sparse result has bytes as its traced value.

    Returns ``module`` itself where no operation returns one.

    Raises:
        CaptureError: the gradient of an output is sparse, or an operation that returns a sparse
            tensor draws random numbers.
    """
    made = set(filter(makes_sparse, module.graph.nodes))
    for node in made:
        if node.op == "placeholder" or torch_compat.draws_random_numbers(node):
            raise CaptureError(
                f"{node.name} ({node.target}) is a sparse tensor, whose memory cannot be planned: "
                "return dense tensors, and draw random numbers into dense ones",
                code="FXR310",
            )
    if not made:
        return module
    graph = copy_of(module.graph)
    by_name = {node.name for node in made}
    sparse = {node for node in graph.nodes if node.name in by_name}
    returned = sparse.intersection(graph.output_node().all_input_nodes)
    for node in list(graph.nodes):
        reads = node.op == "call_function" and not sparse.isdisjoint(node.all_input_nodes)
        if node in returned or (reads and node not in sparse):
            _replace(node, sparse)
    for node in reversed(list(graph.nodes)):
        if node in sparse and not node.users:
            graph.erase_node(node)
    graph.lint()
    return torch_compat.graph_module(module, graph)


def _replace(result: fx.Node, sparse: set[fx.Node]) -> None:
    """Make ``result`` one operation with the sparse tensors that it is computed from.

    Args:
        result: it is changed.
        sparse: nodes that return sparse tensors.
    """
    inside = {result}
    waiting = [result]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source in sparse and source not in inside:
                inside.add(source)
                waiting.append(source)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    ordered = [node for node in result.graph.nodes if node in inside]
    reads = [source for node in ordered for source in node.all_input_nodes]
    outside = [node for node in dict.fromkeys(reads) if node not in inside]
    for node in outside:
        copies[node] = graph.placeholder(node.name)
    for node in ordered:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[result])
    made = torch_compat.graph_module(torch.nn.Module(), graph)
    value: Any = result.meta["val"]
    result.target = SparseOperation(made, graph_digest(made))
    result.args, result.kwargs = tuple(outside), {}
    if makes_sparse(result):
        mode = torch_compat.fake_mode_of([value])
        with mode, torch.no_grad():
            result.meta["val"] = in_place_of(value, [node.meta.get("val") for node in outside])
        result.meta.pop("tensor_meta", None)


def makes_sparse(node: fx.Node) -> bool:
    """Return whether a result of ``node``, which no caller of the forward gives, is sparse."""
    given = node.op == "placeholder" and not torch_compat.is_tangent(node)
    if given or node.op in ("get_attr", "output"):
        return False
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(x, torch.Tensor) and x.layout is not torch.strided for x in leaves)
