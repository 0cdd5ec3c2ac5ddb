"""Run FlexAttention as kernels that Inductor generates, whatever runs the other operations.

Without these kernels torch computes the whole matrix of scores, with operation after operation.
"""

from __future__ import annotations

from torch import fx

from fxremat import torch_compat
from fxremat.passes.fuse.rewrite import call_unit
from fxremat.passes.fuse.unit import Units
from fxremat.passes.joint.graph import add_call, copy_of, is_getitem, is_tensor, tensors_of
from fxremat.passes.joint.sizes import LAYOUTS
from fxremat.runtime.nested import Nested

FUNCTIONS = ("flex_attention", "flex_attention_backward")
"""Names of the operators, which are templates for kernels."""


def with_attention_kernels(module: fx.GraphModule, units: Units) -> fx.GraphModule:
    """Return a joint graph in which each FlexAttention on a GPU is a unit.

    Args:
        module: the joint graph; it is not changed.
        units: the table that new units are added to.

    Requires: no size is a symbol, and each operator that runs graphs is a ``Nested`` node.

    Returns ``module`` itself where there is none, or where no compiler makes kernels.
    """
    if not any(map(is_attention, module.graph.nodes)):
        return module
    graph = copy_of(module.graph)
    for node in list(graph.nodes):
        if is_attention(node):
            _replace(node, units)
    graph.lint()
    return torch_compat.graph_module(module, graph)


def is_attention(node: fx.Node) -> bool:
    """Return whether ``node`` is a FlexAttention that Inductor can generate kernels for."""
    if not isinstance(node.target, Nested) or node.target.function.__name__ not in FUNCTIONS:
        return False
    device = next(tensors_of(node)).device
    return device.type != "cpu" and torch_compat.missing_compiler(device) is None


def _replace(node: fx.Node, units: Units) -> None:
    """Replace ``node``, and the nodes that pick its results, by those of a unit."""
    graph = fx.Graph()
    inputs = list(dict.fromkeys(n for n in node.all_input_nodes if is_tensor(n)))
    inside = {n: graph.placeholder(f"in{i}") for i, n in enumerate(inputs)}
    for n, placeholder in inside.items():
        placeholder.meta = {k: n.meta[k] for k in ("val", LAYOUTS) if k in n.meta}
    call = add_call(graph, (node.target, node.args, node.kwargs), inside)
    call.meta = dict(node.meta)
    given = [user for user in node.users if is_getitem(user) and is_tensor(user)]
    graph.output(tuple(graph.node_copy(user, lambda _node: call) for user in given))
    unit = units.of(graph, [False] * len(inputs), next(tensors_of(node)).device)
    with node.graph.inserting_before(node):
        made, values = call_unit(node.graph, unit, inputs, given)
    for new in (made, *values.values()):
        new.meta["seq_nr"] = node.meta.get("seq_nr")
    for user in list(node.users):
        if user in values:
            user.replace_all_uses_with(values[user])
        user.graph.erase_node(user)
    node.graph.erase_node(node)
