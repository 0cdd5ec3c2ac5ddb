"""Detects attention masks that ``is_causal`` can replace, by running the mask and both kernels."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.costs.measured.bits import comparisons
from fxremat.costs.measured.cache import CostCache
from fxremat.costs.measured.execute import HeldBytes, undisturbed
from fxremat.costs.measured.synthetic import made_up
from fxremat.passes.joint.masks import BACKWARD, FORWARD, causal_arguments
from fxremat.passes.parts.bits import are_equal
from fxremat.passes.stages.block import Key, tensor_key

CPU = torch.device("cpu")


class CausalMasks:
    """Detects attention masks that ``is_causal=True`` can replace.

    Args:
        cache: results of former calls. New ones are added.

    Attributes:
        measuring_bytes: most bytes that were held at once to detect a mask.
    """

    def __init__(self, cache: CostCache) -> None:
        self.measuring_bytes = 0
        self._cache = cache

    def can_replace(self, node: fx.Node) -> bool:
        """Return whether ``is_causal`` can replace the mask of ``node`` with identical bits.

        The mask must not depend on any input, and must exclude the keys after each query and no
        others. Kernels are compared for made-up numbers. Numbers that are not finite reach earlier
        queries through a mask, but not with ``is_causal``.

        Args:
            node: an operation of :data:`fxremat.passes.joint.masks.IS_CAUSAL` that reads a mask.

        Returns:
            Whether it can. ``False`` also where the mask or the kernels cannot be run, for example
            for lack of memory.

        Ensures:
            The random generators are as before.
        """
        mask = node.kwargs["attn_mask"]
        sources = _sources(mask) if isinstance(mask, fx.Node) else None
        if sources is None:
            return False
        return self._cached(_written(sources), lambda: self._is_causal(sources)) and self._cached(
            _key(node), lambda: self._is_same(node)
        )

    def _cached(self, key: Key, run: Callable[[], bool]) -> bool:
        if key not in self._cache.causal:
            try:
                with undisturbed(CPU):
                    self._cache.causal[key] = run()
            except RuntimeError:
                return False
        return self._cache.causal[key]

    def _note(self, held: HeldBytes, value: object) -> None:
        """Count the bytes of ``value`` as held, and update ``measuring_bytes``."""
        held.add(value)
        self.measuring_bytes = max(self.measuring_bytes, held.nbytes)

    def _is_causal(self, nodes: Sequence[fx.Node]) -> bool:
        """Run ``nodes``, and return whether the value of the last one is a causal mask.

        Other values are freed after their last reader.
        """
        last_reader = {source: node for node in nodes for source in node.all_input_nodes}
        values: dict[fx.Node, Any] = {}
        held = HeldBytes(CPU)
        for node in nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            self._note(held, values[node])
            for source in node.all_input_nodes:
                if last_reader[source] is node:
                    held.drop(values.pop(source))
        del args, kwargs
        mask = _not_expanded(values[nodes[-1]])
        queries, keys = mask.shape[-2:]
        if queries != keys:
            return False
        causal = _causal_like(mask)
        self._note(held, causal)
        return all(torch.equal(each, causal) for each in mask.reshape(-1, queries, keys))

    def _is_same(self, node: fx.Node) -> bool:
        """Return whether an attention gives the same bits with a causal mask as with ``is_causal``.

        The causal mask has the layout of the attention's mask.

        Args:
            node: the attention, or its backward.
        """
        traced = _traced(node.args)
        tensors = [value for value in traced if isinstance(value, torch.Tensor)]
        return all(
            self._is_same_for_random_values(node, traced) for _ in range(comparisons(tensors))
        )

    def _is_same_for_random_values(self, node: fx.Node, traced: Sequence[Any]) -> bool:
        operation: Any = node.target
        options = {name: value for name, value in node.kwargs.items() if name != "attn_mask"}
        args = [made_up(value) if isinstance(value, torch.Tensor) else value for value in traced]
        (mask,) = map(made_up, _traced([node.kwargs["attn_mask"]]))
        each = _not_expanded(mask)
        each.copy_(_causal_like(each))
        if operation is BACKWARD:
            args[4:6] = FORWARD(*args[1:4], attn_mask=mask, **options)
        results = operation(*args, attn_mask=mask, **options)
        of_causal = operation(*causal_arguments(operation, tuple(args)), **options)
        self._note(HeldBytes(CPU), [*args, mask, *results, *of_causal])
        return all(map(are_equal, results, of_causal))


def _traced(values: Sequence[Any]) -> list[Any]:
    """Return ``values`` with each node replaced by the value that it was traced with."""
    return [value.meta["val"] if isinstance(value, fx.Node) else value for value in values]


def _key(node: fx.Node) -> Key:
    """Return a cache key: the operation of ``node``, and layouts and values of its arguments."""
    values = _traced([*node.args, *node.kwargs.values()])
    return (str(node.target), *node.kwargs, *map(tensor_key, values))


def _sources(mask: fx.Node) -> list[fx.Node] | None:
    """Return ``mask`` and all nodes that it is computed from, in graph order.

    Returns ``None`` if the value of any of them may change.
    """
    waiting, sources = [mask], set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node not in sources:
            if not _is_fixed(node):
                return None
            sources.add(node)
            waiting.extend(node.all_input_nodes)
    return sorted(sources)


def _is_fixed(node: fx.Node) -> bool:
    """Return whether a node gives equal results at each call, and has no side effect.

    Inputs and constants of the graph are the user's, who can change them. A custom operation may
    read or do anything, and a collective waits for other processes. Memory that is only allocated
    has no defined value.
    """
    target = node.target
    if node.op != "call_function":
        return False
    if target is operator.getitem:
        return True
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    return "empty" not in target._schema.name and not torch_compat.draws_random_numbers(node)


def _written(nodes: Sequence[fx.Node]) -> Key:
    """Return the calls of ``nodes`` as text that does not depend on the names of nodes."""
    label = {node: f"%{index}" for index, node in enumerate(nodes)}
    return tuple(
        f"{node.target} {fx.map_arg((node.args, node.kwargs), label.__getitem__)}" for node in nodes
    )


def _not_expanded(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask with one entry for each batch or head dimension over which it is expanded."""
    for dim, stride in enumerate(mask.stride()[:-2]):
        if stride == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask


def _causal_like(mask: torch.Tensor) -> torch.Tensor:
    """Return a causal mask with the dtype of ``mask``, for as many queries and keys.

    It is Boolean, or has 0 where a key is visible and negative infinity elsewhere.
    """
    visible = torch.ones(mask.shape[-2:], dtype=torch.bool).tril_()
    if mask.dtype is torch.bool:
        return visible
    return torch.zeros_like(visible, dtype=mask.dtype).masked_fill_(
        visible.logical_not_(), -torch.inf
    )
