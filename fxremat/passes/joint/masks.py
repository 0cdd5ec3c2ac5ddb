"""Replace causal masks of attention by ``is_causal``.

Traced code often computes a causal mask where eager code asks for causal attention: transformers
does so in each of its language models. The kernel of a CPU then also visits the keys that the mask
excludes, and the mask takes bytes for every pair of a query and a key.
``fxremat.costs.measured.causal`` says where ``is_causal`` can replace such a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

IS_CAUSAL = {FORWARD: 4, BACKWARD: 7}
"""Operations that take a mask, and the position of ``is_causal``; ``dropout_p`` precedes it."""

CanReplace = Callable[[fx.Node], bool]
"""Returns whether ``is_causal`` can replace the mask that a node of attention reads."""


def replace_causal_masks(graph: fx.Graph, can_replace: CanReplace) -> None:
    """Replace masks of attention by ``is_causal=True`` where ``can_replace`` returns true.

    ``graph`` is changed. Nodes with dropout, or with ``is_causal`` already, stay as they are.
    """
    for node in graph.nodes:
        if node.target not in IS_CAUSAL or not node.kwargs.keys() <= {"attn_mask", "scale"}:
            continue
        at = IS_CAUSAL[node.target]
        has_mask = isinstance(node.kwargs.get("attn_mask"), fx.Node)
        if has_mask and not any(node.args[at - 1 : at + 1]) and can_replace(node):
            node.args = causal_arguments(node.target, node.args)
            node.kwargs = {name: v for name, v in node.kwargs.items() if name != "attn_mask"}


def causal_arguments(operation: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``args``, positional arguments of ``operation``, with ``is_causal`` set to ``True``.

    Args:
        operation: one of :data:`IS_CAUSAL`.
        args: its arguments, with or without ``dropout_p`` and ``is_causal``.
    """
    return (*(*args, 0.0)[: IS_CAUSAL[operation]], True)
