"""Replace each operator that runs inner graphs, such as ``torch.cond``, by one operation.

Such a node reads its graphs as attributes of the module that it is in. Here it calls a
:class:`fxremat.runtime.nested.Nested`, which has the graphs, and reads tensors and numbers only. So
it can be copied for a recomputation, and its name does not depend on the module.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxremat import torch_compat
from fxremat.passes.joint.digest import target_name, written
from fxremat.passes.joint.graph import attribute_of, copy_of
from fxremat.runtime.nested import NESTED, Nested, flat


def with_nested(module: fx.GraphModule) -> fx.GraphModule:
    """Return a joint graph in which each operator that runs graphs is a ``Nested`` node.

    An operator that reads another object that is no tensor, such as a function, becomes one too.

    Args:
        module: the joint graph; it is not changed.

    Ensures: attributes that a node reads are tensors.

    Returns ``module`` itself where this is so already.
    """
    reads_objects = [bool(torch_compat.objects_of(node)) for node in module.graph.nodes]
    if not any(reads_objects):
        return module
    graph = copy_of(module.graph)
    for node, reads in zip(list(graph.nodes), reads_objects, strict=True):
        if reads:
            _replace(module, node)
    for node in list(graph.find_nodes(op="get_attr")):
        if not node.users:
            graph.erase_node(node)
    graph.lint()
    return torch_compat.graph_module(module, graph)


def _replace(module: fx.GraphModule, node: fx.Node) -> None:
    leaves, structure = pytree.tree_flatten((tuple(node.args), dict(node.kwargs)))
    template: list[Any] = []
    places: list[int] = []
    for place, leaf in enumerate(leaves):
        value = leaf
        if isinstance(leaf, fx.Node) and leaf.op == "get_attr":
            value = attribute_of(module, leaf)
        if isinstance(value, (fx.Node, torch.Tensor)):
            places.append(place)
            value = None
        template.append(value)
    node.target = _nested(node.target, template, structure, places)
    node.args, node.kwargs = tuple(leaves[place] for place in places), {}
    _read_flat(node, node, node.meta["val"], 0)
    node.meta["val"] = flat(node.meta["val"])


def _read_flat(operation: fx.Node, group: fx.Node, value: Any, first: int) -> None:
    """Make nodes that read a result in a group read it from ``operation`` directly.

    Args:
        operation: it returns its results in one sequence.
        group: ``operation``, or a node that picks a group of its results.
        value: the traced value of ``group``.
        first: the index of the first result of ``group`` among all.
    """
    if not isinstance(value, (tuple, list)):
        return
    places = list(itertools.accumulate((_count(item) for item in value), initial=first))
    for user in list(group.users):
        picked: Any = user.args[1]
        user.args = (operation, places[picked])
        if isinstance(value[picked], (tuple, list)):
            _read_flat(operation, user, value[picked], places[picked])
            user.graph.erase_node(user)


def _count(value: Any) -> int:
    """Return the number of results in ``value``, one result or a group."""
    return sum(map(_count, value)) if isinstance(value, (tuple, list)) else 1


def _nested(
    operator: Any, template: list[Any], structure: pytree.TreeSpec, places: list[int]
) -> Nested:
    """Return the operation for an operator with these arguments; equal operations are one."""
    items = [
        graph_digest(item) if isinstance(item, fx.GraphModule) else written(item, str)
        for item in template
    ]
    text = "\n".join([target_name(operator), str(structure), str(places), *items])
    digest = hashlib.sha256(text.encode()).hexdigest()
    shared: Nested | None = NESTED.of(digest)
    return shared or Nested(operator, digest, template, structure, places)


def graph_digest(module: fx.GraphModule) -> str:
    """Return a digest of what a graph computes, including the graphs and constants that it reads.

    It is the same in all processes, unless a function or an object is among these, and does not
    depend on the graph's inputs.
    """
    return hashlib.sha256("\n".join(_lines(module)).encode()).hexdigest()


def _lines(module: fx.GraphModule) -> Iterator[str]:
    numbers: dict[fx.Node, int] = {}

    def numbered(node: fx.Node) -> str:
        return f"%{numbers.setdefault(node, len(numbers))}"

    for node in module.graph.nodes:
        name = target_name(node.target) if node.op == "call_function" else node.op
        arguments = written(node.args, numbered), written(dict(node.kwargs), numbered)
        yield f"{numbered(node)} {name} {arguments}"
        if node.op == "get_attr":
            value = attribute_of(module, node)
            if isinstance(value, fx.GraphModule):
                yield graph_digest(value)
            else:
                yield _content_digest(value) if isinstance(value, torch.Tensor) else str(value)


def _content_digest(tensor: torch.Tensor) -> str:
    """Return a digest of a constant of a graph: of its values, if it has any."""
    layout = f"{tensor.dtype} {tuple(tensor.shape)} {tuple(tensor.stride())}"
    if torch_compat.is_fake(tensor):
        return layout
    with torch_compat.real_execution(), torch.no_grad():
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return f"{layout} {hashlib.sha256(data.numpy().tobytes()).hexdigest()}"
