"""Operations that run inner graphs, such as ``torch.cond``, as functions of tensors."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxremat import torch_compat
from fxremat.runtime.operation import Operation, SharedOperations


class Nested(Operation):
    """Calls a higher-order operator with graphs and constants that are always the same.

    The arguments of a call are what differs: tensors and numbers. Equal operations are one object,
    see :data:`NESTED`.

    Args:
        function: the operator.
        digest: a digest of the operator, its graphs and its constants, equal in all processes.
        template: its arguments and keywords, flattened, with anything where a call has an argument.
        structure: how ``template`` is unflattened.
        places: the indices of the arguments of a call in ``template``.
    """

    def __init__(
        self,
        function: Any,
        digest: str,
        template: Sequence[Any],
        structure: pytree.TreeSpec,
        places: Sequence[int],
    ) -> None:
        super().__init__(function.__name__, digest, "nested")
        self.function = function
        self.graphs = tuple(item for item in template if isinstance(item, fx.GraphModule))
        self._template, self._structure, self._places = tuple(template), structure, tuple(places)
        NESTED.add(self)

    def __call__(self, *values: Any) -> Any:
        """Return the results of the operator for these arguments: one, or several in order.

        Results in groups, such as the gradients of captured tensors, are in one sequence.
        """
        args, kwargs = self.arguments(values)
        return flat(self.function(*args, **kwargs))

    def arguments(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments and keywords of the operator, given the arguments of a call."""
        leaves = list(self._template)
        for place, value in zip(self._places, values, strict=True):
            leaves[place] = value
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return args, kwargs

    @functools.cached_property
    def stand_in(self) -> Nested:
        """An operation with the same results that runs each branch, and takes the most memory.

        Made-up arguments would otherwise choose the branches that run, or never end a loop.
        """
        template = [
            with_all_branches(item) if isinstance(item, fx.GraphModule) else item
            for item in self._template
        ]
        function = torch_compat.with_all_branches(self.function)
        digest = f"all_{self.digest}"
        return Nested(function, digest, template, self._structure, self._places)


def flat(results: Any) -> Any:
    """Return results with those of inner tuples and lists in their place, or a single result."""
    if not isinstance(results, (tuple, list)):
        return results
    if not any(isinstance(item, (tuple, list)) for item in results):
        return results
    nested = (flat(item) if isinstance(item, (tuple, list)) else (item,) for item in results)
    return tuple(item for items in nested for item in items)


def with_all_branches(module: fx.GraphModule) -> fx.GraphModule:
    """Return a graph in which operators that run graphs run each of their branches once."""
    if not any(map(torch_compat.is_higher_order, (node.target for node in module.graph.nodes))):
        return module
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    root = torch.nn.Module()
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].target = torch_compat.with_all_branches(node.target)
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(module)
            inner = with_all_branches(value) if isinstance(value, fx.GraphModule) else value
            copies[node].target = copies[node].name
            setattr(root, copies[node].name, inner)
    return fx.GraphModule(root, graph)


NESTED = SharedOperations()
"""The operations of this process."""
