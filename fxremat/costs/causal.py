"""Where ``is_causal`` can replace a mask of attention: the mask and both kernels are run."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.costs.bits import comparisons
from fxremat.costs.cache import CostCache
from fxremat.costs.execute import HeldBytes, undisturbed
from fxremat.costs.synthetic import made_up
from fxremat.passes.joint.masks import BACKWARD, FORWARD, causal_arguments
from fxremat.passes.split.parts import are_equal
from fxremat.passes.stages.block import Key, tensor_key

CPU = torch.device("cpu")


class CausalMasks:
    """Finds masks that ``is_causal`` can replace.

    Args:
        cache: answers; new ones are added.

    Attributes:
        measuring_bytes: the most that was held at once for an answer.
    """

    def __init__(self, cache: CostCache) -> None:
        self.measuring_bytes = 0
        self._cache = cache

    def can_replace(self, node: fx.Node) -> bool:
        """Whether ``is_causal`` can replace the mask of ``node``, to the last bit.

        The mask must depend on no input, exclude the keys after each query, and no other. Kernels
        are compared for made-up numbers. Numbers that are not finite reach earlier queries through
        a mask, but not with ``is_causal``.

        Args:
            node: an operation of :data:`fxremat.passes.joint.masks.IS_CAUSAL` that reads a mask.

        Ensures: the random generators are as before.

        Returns ``False`` also where the mask or the kernels cannot be run, for example because
        memory does not suffice.
        """
        mask = node.kwargs["attn_mask"]
        sources = _sources(mask) if isinstance(mask, fx.Node) else None
        if sources is None:
            return False
        return self._answer(_written(sources), lambda: self._is_causal(sources)) and self._answer(
            _key(node), lambda: self._is_same(node)
        )

    def _answer(self, key: Key, run: Callable[[], bool]) -> bool:
        if key not in self._cache.causal:
            try:
                with undisturbed(CPU):
                    self._cache.causal[key] = run()
            except RuntimeError:
                return False
        return self._cache.causal[key]

    def _note(self, held: HeldBytes, value: object) -> None:
        """Count one more value that is held."""
        held.add(value)
        self.measuring_bytes = max(self.measuring_bytes, held.nbytes)

    def _is_causal(self, nodes: Sequence[fx.Node]) -> bool:
        """Whether the last node is a causal mask. No value outlives its last reader."""
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
        """Whether an operation gives the same bits with a causal mask that lies as its own, and
        with ``is_causal``.
        """
        traced = _traced(node.args)
        tensors = [value for value in traced if isinstance(value, torch.Tensor)]
        return all(self._is_same_once(node, traced) for _ in range(comparisons(tensors)))

    def _is_same_once(self, node: fx.Node, traced: Sequence[Any]) -> bool:
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
    """Traced values of nodes among ``values``, and the others."""
    return [value.meta["val"] if isinstance(value, fx.Node) else value for value in values]


def _key(node: fx.Node) -> Key:
    """All that the kernel of ``node`` depends on."""
    values = _traced([*node.args, *node.kwargs.values()])
    return (str(node.target), *node.kwargs, *map(tensor_key, values))


def _sources(mask: fx.Node) -> list[fx.Node] | None:
    """``mask`` and all that it is computed from, in graph order; ``None``: some may change."""
    waiting, met = [mask], set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node not in met:
            if not _is_fixed(node):
                return None
            met.add(node)
            waiting.extend(node.all_input_nodes)
    return sorted(met)


def _is_fixed(node: fx.Node) -> bool:
    """Whether equal arguments give equal results at each call, and running it does nothing else.

    Inputs and constants of the graph are the user's, who can change them. An operation of the user
    may read or do anything, and a collective waits for other processes. What is only allocated has
    no value yet.
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
    """The computation of nodes as text, the same whatever they are called."""
    number = {node: f"%{index}" for index, node in enumerate(nodes)}
    return tuple(
        f"{node.target} {fx.map_arg((node.args, node.kwargs), number.__getitem__)}"
        for node in nodes
    )


def _not_expanded(mask: torch.Tensor) -> torch.Tensor:
    """A mask without repetitions for items and heads."""
    for dim, stride in enumerate(mask.stride()[:-2]):
        if stride == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask


def _causal_like(mask: torch.Tensor) -> torch.Tensor:
    """The causal mask of as many queries and keys, of the same dtype."""
    sees = torch.ones(mask.shape[-2:], dtype=torch.bool).tril_()
    if mask.dtype is torch.bool:
        return sees
    return torch.zeros_like(sees, dtype=mask.dtype).masked_fill_(sees.logical_not_(), -torch.inf)
