"""Attention as a GPU computes it, in a step that is traced where none need be.

``scaled_dot_product_attention`` chooses its kernel by device, and kernels keep other tensors for
the backward. The choice below is torch's own on GPUs since Ampere
(``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``), cuDNN's kernel left out, which keeps
what FlashAttention keeps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch.nn import functional

aten = torch.ops.aten

_Kernel = Callable[..., tuple[Tensor, ...]]

_FLASH: _Kernel = aten._scaled_dot_product_flash_attention
_EFFICIENT: _Kernel = aten._scaled_dot_product_efficient_attention
_PLAIN: _Kernel = aten._scaled_dot_product_attention_math

MOST_HEAD = 256
"""The largest last dimension that FlashAttention takes."""

HEAD_MULTIPLE = 8
"""The last dimension is padded to one for FlashAttention."""

HALVES = (torch.float16, torch.bfloat16)


def as_on_gpu(module: fx.GraphModule) -> None:
    """Let attention in a graph of Dynamo's be that of a GPU; the graph is changed."""
    target = functional.scaled_dot_product_attention
    for node in module.graph.find_nodes(op="call_function", target=target):
        node.target = attention
    module.recompile()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What ``scaled_dot_product_attention`` does with these arguments on a GPU."""
    head = query.shape[-1]
    four = all(t.dim() == 4 for t in (query, key, value))
    if four and query.dtype in HALVES and attn_mask is None and head <= MOST_HEAD:
        scale = head**-0.5 if scale is None else scale
        padded = (_padded(t) for t in (query, key, value))
        made = _FLASH(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return made[..., : value.shape[-1]]
    if four and query.dtype in (*HALVES, torch.float32) and not enable_gqa:
        bias = _bias(attn_mask, query, key)
        return _EFFICIENT(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
    return _PLAIN(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _padded(tensor: Tensor) -> Tensor:
    missing = -tensor.shape[-1] % HEAD_MULTIPLE
    return functional.pad(tensor, (0, missing)) if missing else tensor


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """What is added to the scores, as large as they are; it shares what ``mask`` has."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, zero, float("-inf"))
    return mask.expand(*query.shape[:-1], key.shape[-2])
