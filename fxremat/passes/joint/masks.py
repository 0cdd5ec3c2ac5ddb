"""Attention that reads a causal mask is causal attention.

Code that is traced often computes a causal mask where it would otherwise ask for causal attention:
transformers does so in each of its language models. The kernel of a CPU then visits the keys that
the mask excludes, and the mask takes bytes for every pair of a query and a key. A mask that depends
on no input is computed while the graph is built. If it is the causal one, ``is_causal`` replaces
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat

aten = torch.ops.aten

FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

IS_CAUSAL = {FORWARD: 4, BACKWARD: 7}
"""Operations that take a mask, and the position of ``is_causal``; ``dropout_p`` precedes it."""

SameBits = Callable[[fx.Node], bool]
"""Whether an operation gives the same bits with a causal mask and with ``is_causal``."""


def replace_causal_masks(graph: fx.Graph, same_bits: SameBits) -> None:
    """Replace causal masks of attention by ``is_causal``, in place.

    Requires: all sizes are numbers.
    Ensures: results of finite queries, keys and values have the same bits. A number that is not
        finite also reaches the queries before it through a mask, but not with ``is_causal``.
    """
    masks = _Masks()
    for node in list(graph.nodes):
        mask = node.kwargs.get("attn_mask") if node.target in IS_CAUSAL else None
        if not isinstance(mask, fx.Node):
            continue
        at = IS_CAUSAL[node.target]
        drops_or_is_causal = any(node.args[at - 1 : at + 1])
        if not drops_or_is_causal and masks.is_causal(mask) and same_bits(node):
            node.args = causal_arguments(node.target, node.args)
            node.kwargs = {name: v for name, v in node.kwargs.items() if name != "attn_mask"}


def causal_arguments(operation: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """``args`` of one of :data:`IS_CAUSAL`, with ``is_causal`` in place of a mask."""
    at = IS_CAUSAL[operation]
    return (*(*args, 0.0)[:at], True)


def causal_mask(mask: torch.Tensor) -> torch.Tensor:
    """The causal mask of the dtype, queries, keys and device of ``mask``."""
    sees = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril_()
    if mask.dtype is torch.bool:
        return sees
    return torch.zeros_like(sees, dtype=mask.dtype).masked_fill_(sees.logical_not_(), -torch.inf)


class _Masks:
    """Masks that depend on no input. Those that are computed alike are computed once."""

    def __init__(self) -> None:
        self._numbers: dict[fx.Node, int | None] = {}
        self._number_of: dict[object, int] = {}
        self._causal: dict[int, bool] = {}

    def is_causal(self, mask: fx.Node) -> bool:
        """Whether a mask depends on no input and excludes exactly the keys after each query."""
        for node in _with_sources(mask, without=self._numbers):
            self._numbers[node] = self._number(node)
        number = self._numbers[mask]
        if number is None:
            return False
        if number not in self._causal:
            with torch_compat.real_execution(), torch.no_grad():
                self._causal[number] = _excludes_later_keys(self._value(mask))
        return self._causal[number]

    def _number(self, node: fx.Node) -> int | None:
        """A number that nodes share which are computed alike; ``None`` where an input is read."""
        sources = {source: self._numbers[source] for source in node.all_input_nodes}
        # A constant of the graph may be a tensor of the user, who can change it.
        reads_input = node.op != "call_function" or None in sources.values()
        if reads_input or torch_compat.draws_random_numbers(node):
            return None
        written = fx.map_arg((node.args, node.kwargs), lambda source: f"%{sources[source]}")
        key = (node.target, repr(written))
        return self._number_of.setdefault(key, len(self._number_of))

    @staticmethod
    def _value(mask: fx.Node) -> torch.Tensor:
        """The value of a node that depends on no input. Values go after their last reader."""
        nodes = _with_sources(mask)
        last_reader = {source: node for node in nodes for source in node.all_input_nodes}
        values: dict[fx.Node, Any] = {}
        for node in nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            for source in node.all_input_nodes:
                if last_reader[source] is node:
                    del values[source]
        mask_value: torch.Tensor = values[mask]
        return mask_value


def _with_sources(node: fx.Node, *, without: Any = ()) -> list[fx.Node]:
    """``node`` and all that it is computed from, in graph order, but for those in ``without``."""
    waiting, met = [node], set[fx.Node]()
    while waiting:
        source = waiting.pop()
        if source not in met and source not in without:
            met.add(source)
            waiting.extend(source.all_input_nodes)
    return sorted(met)


def _excludes_later_keys(mask: torch.Tensor) -> bool:
    """Whether a mask excludes the keys after each query, and no other."""
    queries, keys = mask.shape[-2:]
    if queries != keys:
        return False
    for dim, stride in enumerate(mask.stride()[:-2]):
        if stride == 0:  # expanded
            mask = mask.narrow(dim, 0, 1)
    causal = causal_mask(mask)
    return all(torch.equal(each, causal) for each in mask.reshape(-1, queries, keys))
