"""Call attention without its mask where a rule of positions says what the mask is.

Traced code often computes a causal mask where eager code asks for causal attention: transformers
does so in each of its language models. Such a mask takes bytes for every pair of a query and a key,
and the kernel of a CPU also visits the keys that it excludes. A mask that excludes nothing is
computed, too. Which keys a mask lets a query see follows from its formula
(:mod:`fxremat.passes.joint.masks.formulas`), for all sizes and on all devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxremat.passes.joint.masks.formulas import Formulas
from fxremat.passes.joint.masks.positions import EVERYWHERE, Affine, Area, Chosen
from fxremat.passes.joint.masks.rules import arguments_of
from fxremat.passes.joint.sizes import Sizes, layouts_of

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Kernel:
    """An operator of attention that takes a mask.

    Attributes:
        mask: the name of the mask's argument.
        forward: the operator of the forward, for one of the backward.
        results: which result of the forward an argument of the backward is, by its name.
    """

    mask: str
    forward: Any = None
    results: tuple[tuple[str, int], ...] = ()


_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
_EFFICIENT = aten._scaled_dot_product_efficient_attention.default
_CUDNN = aten._scaled_dot_product_cudnn_attention.default

KERNELS: Mapping[Any, Kernel] = {
    _CPU: Kernel("attn_mask"),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: Kernel(
        "attn_mask", _CPU, (("out", 0), ("logsumexp", 1))
    ),
    _EFFICIENT: Kernel("attn_bias"),
    aten._scaled_dot_product_efficient_attention_backward.default: Kernel(
        "attn_bias",
        _EFFICIENT,
        (("out", 0), ("logsumexp", 1), ("philox_seed", 2), ("philox_offset", 3)),
    ),
    _CUDNN: Kernel("attn_bias"),
    aten._scaled_dot_product_cudnn_attention_backward.default: Kernel(
        "attn_bias",
        _CUDNN,
        (
            *(("out", 0), ("logsumexp", 1), ("cum_seq_q", 2), ("cum_seq_k", 3), ("max_q", 4)),
            *(("max_k", 5), ("philox_seed", 6), ("philox_offset", 7)),
        ),
    ),
}
"""The operators that are called without a mask, where possible."""

CanReplace = Callable[[fx.Node, bool], bool]
"""Returns whether a node of attention can be called without the mask that it reads.

The second argument says whether the mask is causal; otherwise it excludes nothing."""


def always(_node: fx.Node, _causal: bool) -> bool:
    """Let every mask be replaced whose rule allows it: bits may differ.

    A CanReplace. Returns ``True``.
    """
    return True


def replace_masks(graph: fx.Graph, sizes: Sizes, can_replace: CanReplace) -> None:
    """Call attention without its mask where the mask is causal, or excludes nothing.

    Args:
        graph: a graph with numbers in place of symbolic sizes. It is changed; what computed the
            masks stays, but nothing may read it any more.
        sizes: the symbols of the graph.
        can_replace: returns whether a node can be called without its mask.

    Nodes with dropout, with ``is_causal`` already, or with a gradient of the mask stay as they are.
    """
    formulas = Formulas(sizes)
    for node in graph.nodes:
        causal = _is_causal(node, formulas)
        if causal is not None and can_replace(node, causal):
            node.args, node.kwargs = _without_mask(node, causal)


def _is_causal(node: fx.Node, formulas: Formulas) -> bool | None:
    """Return whether the mask of attention is causal; ``None``: there is no mask, or another one.

    ``False`` says that the mask excludes nothing.
    """
    mask = mask_of(node)
    if mask is None:
        return None
    given = arguments_of(node)
    grads_mask = (given.get("grad_input_mask") or [False])[-1]
    if given["dropout_p"] or given["is_causal"] or grads_mask:
        return None
    area = visible(formulas, mask)
    if area == EVERYWHERE:
        return False
    queries, keys = (layouts_of(given[name])[0].shape[-2] for name in ("query", "key"))
    shape = layouts_of(mask)[0].shape
    slopes = (*(0,) * (len(shape) - 2), 1, -1)  # keys up to the query: 0 <= query - key
    is_square = queries == keys == shape[-2] == shape[-1]
    return True if is_square and area == Area(frozenset([Affine(0, slopes)])) else None


def mask_of(node: fx.Node) -> fx.Node | None:
    """Return the mask that ``node`` reads if it is an operator of attention in ``KERNELS``."""
    kernel = KERNELS.get(node.target)
    mask = arguments_of(node)[kernel.mask] if kernel is not None else None
    return mask if isinstance(mask, fx.Node) else None


def only_for_masks(graph: fx.Graph) -> set[fx.Node]:
    """Return the masks of attention, and the values that only these are computed from."""
    made: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.users and all(user in made or mask_of(user) is node for user in node.users):
            made.add(node)
    return made


def visible(formulas: Formulas, mask: fx.Node) -> Area | None:
    """Return where a mask lets queries see keys; ``None`` if no rule of positions says so.

    The mask is Boolean, or has 0 where a key is visible and negative infinity elsewhere.
    """
    value = formulas.of(mask)
    if not isinstance(value, Chosen):
        return None
    shown, hidden = (True, False) if mask.meta["val"].dtype is torch.bool else (0.0, -math.inf)
    if value.inside == shown and (value.outside == hidden or value.area == EVERYWHERE):
        return value.area
    if value.inside == hidden and value.outside == shown:
        return formulas.box(mask).complement(value.area)
    return None


def _without_mask(node: fx.Node, causal: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of attention without its mask, and with ``is_causal`` if it is causal.

    All arguments are positional, except those that must be named.
    """
    given = arguments_of(node) | {KERNELS[node.target].mask: None, "is_causal": causal}
    schema = node.target._schema  # type: ignore[union-attr]
    args = [given[a.name] for a in schema.arguments if not a.kwarg_only]
    named = [a.name for a in schema.arguments if a.kwarg_only and given[a.name] is not None]
    return tuple(args), {name: given[name] for name in named}
