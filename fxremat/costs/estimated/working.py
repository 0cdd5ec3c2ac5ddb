"""Workspaces of operations that are not run, where the source of torch's kernels states them.

Kernels for CUDA of a few operators allocate memory whose size follows from the shapes of their
tensors (``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp`` and
``aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu`` of torch 2.11 to 2.15). A run in parts
needs the memory of one part, with the largest workspace of its operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxremat.ir import RecordedCosts
from fxremat.passes.joint.graph import tensors_of
from fxremat.passes.joint.sizes import Values, layouts_of, number_at
from fxremat.passes.parts.parts import Parts
from fxremat.passes.stages.linearize import Line

aten = torch.ops.aten

Sizes = Mapping[str, int]
Shape = tuple[int, ...]

FLOAT_BYTES, INDEX_BYTES = 4, 8

SPLIT_BYTES = 18 << 20
"""The most that partial results take where a few queries are divided over all keys: two waves of
132 blocks of 128 rows, in float32."""

BLOCKS = 264
"""Where there are more blocks of queries, keys are not divided."""


def has_formula(target: object, device: torch.device) -> bool:
    """Return whether :func:`working_bytes` knows the workspace of an operator on ``device``."""
    return device.type == "cuda" and target in _FORMULAS


def working_bytes(node: fx.Node, sizes: Sizes, device: torch.device) -> int:
    """Return the bytes of an operation's workspace on ``device``; 0 where no formula states them.

    ``sizes`` are the sizes of the step, by name. A run in parts needs the memory of one part.
    """
    run = node.target
    if not isinstance(run, Parts):
        formula = _FORMULAS.get(node.target) if device.type == "cuda" else None
        return formula(node.args, sizes, False) if formula else 0
    count, rows = run.count(sizes), number_at(run.rows, sizes)
    inner = [n for n in run.whole if has_formula(n.target, device)]
    most = max((_FORMULAS[n.target](n.args, sizes, count > 1) for n in inner), default=0)
    return run.part_bytes_at(sizes) + -(-most * min(run.part_rows, rows) // rows)


def with_working_bytes(costs: RecordedCosts, line: Line, values: Values) -> RecordedCosts:
    """Return ``costs``, which were estimated, with the workspaces at the sizes ``values``."""
    nodes, sizes = line.nodes, line.joint.sizes.named(values)
    device = line.joint.device
    workspaces = tuple(
        (index, mode, working_bytes(nodes[index], sizes, device))
        for index, mode, _ in costs.workspace_bytes
    )
    return replace(costs, workspace_bytes=workspaces)


def _shapes(node: fx.Node, sizes: Sizes) -> list[Shape]:
    """Return the shapes of the tensors that ``node`` returns."""
    return [tuple(number_at(n, sizes) for n in layout.shape) for layout in layouts_of(node)]


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _flash(args: Any, sizes: Sizes, in_parts: bool) -> int:
    """Return an upper bound: partial results for as many splits of the keys as there may be."""
    ((batch, heads, queries, width),) = _shapes(args[0], sizes)
    ((_, _, keys, _),) = _shapes(args[1], sizes)
    splits = -(-keys // (256 if width <= 64 else 128 if width <= 128 else 64))
    if splits == 1 or batch * heads * -(-queries // 64) >= BLOCKS:
        return 0
    rows = batch * heads * queries
    return min(SPLIT_BYTES, splits * rows * (_rounded(width, 32) + 1) * FLOAT_BYTES)


def _flash_backward(args: Any, sizes: Sizes, in_parts: bool) -> int:
    """Return the bytes of gradients of queries in float32, of sums, and of dense copies."""
    grad_out, query, key, _, out = args[:5]
    ((batch, heads, queries, width),) = _shapes(query, sizes)
    ((_, key_heads, keys, _),) = _shapes(key, sizes)
    rows = batch * heads * _rounded(queries, 128)
    nbytes = rows * (_rounded(width, 64 if width > 128 else 32) + 1) * FLOAT_BYTES
    element_bytes = next(tensors_of(query)).element_size()
    if key_heads != heads:  # gradients of keys and values for each head of queries
        nbytes += 2 * batch * heads * keys * width * element_bytes
    copied = 2 if in_parts else sum(not _is_dense(n) for n in (grad_out, out))
    return nbytes + copied * batch * heads * queries * width * element_bytes


def _efficient(args: Any, sizes: Sizes, in_parts: bool) -> int:
    """Return the bytes of results in float32, which wide heads do not keep in registers."""
    ((batch, heads, queries, width),) = _shapes(args[0], sizes)
    return batch * heads * queries * width * FLOAT_BYTES if width > 64 else 0


def _efficient_backward(args: Any, sizes: Sizes, in_parts: bool) -> int:
    """Return an upper bound: all gradients in float32, a sum for each query, and dense copies."""
    _, query, key = args[:3]
    ((batch, heads, queries, width),) = _shapes(query, sizes)
    ((_, _, keys, _),) = _shapes(key, sizes)
    element_bytes = next(tensors_of(query)).element_size()
    wide = _rounded(width, 32)
    rows = _rounded(queries, 128) * (wide + 1) + 2 * _rounded(keys, 128) * wide
    copied = 2 * queries * width * element_bytes
    return batch * heads * (rows * FLOAT_BYTES + copied)


def _is_dense(node: fx.Node) -> bool:
    """Return whether the kernel, whose heads are the last dimension but one, need not copy it."""
    (tensor,) = tensors_of(node)
    return tensor.transpose(1, 2).is_contiguous()


def _embedding_backward(args: Any, sizes: Sizes, in_parts: bool) -> int:
    """Return the bytes of sums of ten rows, in float32, and of sorted indices."""
    (shape,) = _shapes(args[0], sizes)
    count = number_at(args[2], sizes)
    rows, width = math.prod(shape[:-1]), shape[-1]
    if rows <= 3072:
        return 0
    sums = rows // 10 + min(rows, count)
    return sums * (_rounded(width, 32) * FLOAT_BYTES + INDEX_BYTES) + 8 * rows * INDEX_BYTES


_FORMULAS: Mapping[object, Callable[[Any, Sizes, bool], int]] = {
    aten._scaled_dot_product_flash_attention.default: _flash,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten.embedding_dense_backward.default: _embedding_backward,
}
"""By operator, what returns its bytes for arguments, sizes of the step, and whether these are more
than a part has."""
