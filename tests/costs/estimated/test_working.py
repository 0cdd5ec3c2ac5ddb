"""Workspaces that follow from the sources of torch's kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxremat.costs.estimated.working import has_formula, working_bytes

aten = torch.ops.aten
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def node_of(target: Any, *args: Any) -> fx.Node:
    """A call of ``target`` with tensors without data."""
    graph = fx.Graph()

    def lifted(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder("x")
        node.meta["val"] = value
        return node

    return graph.call_function(target, tuple(map(lifted, args)))


def heads(count: int, tokens: int, width: int = 128) -> Tensor:
    made = torch.empty(1, tokens, count, width, dtype=torch.bfloat16, device="meta")
    return made.transpose(1, 2)


def attention_backward(*, queries: int, keys: int, tokens: int) -> fx.Node:
    q, k = heads(queries, tokens), heads(keys, tokens)
    lse = torch.empty(1, queries, tokens, device="meta")
    target = aten._scaled_dot_product_flash_attention_backward.default
    return node_of(target, q, q, k, k, q, lse, None, None, tokens, tokens, 0.0, True)


def test_an_attention_has_gradients_of_queries_in_float32():
    node = attention_backward(queries=32, keys=32, tokens=1 << 16)
    rows = 32 << 16
    assert working_bytes(node, {}, CUDA) == rows * (128 + 1) * 4


def test_shared_keys_have_gradients_for_each_head_of_queries():
    one = working_bytes(attention_backward(queries=32, keys=32, tokens=1 << 16), {}, CUDA)
    shared = working_bytes(attention_backward(queries=32, keys=8, tokens=1 << 16), {}, CUDA)
    assert shared - one == 2 * (32 << 16) * 128 * 2


def test_the_gradient_of_an_embedding_has_sums_of_ten_rows():
    rows, words, width = 200_000, 5000, 64
    grad = torch.empty(1, rows, width, dtype=torch.bfloat16, device="meta")
    ids = torch.empty(1, rows, dtype=torch.int64, device="meta")
    node = node_of(aten.embedding_dense_backward.default, grad, ids, words, -1, False)
    sums = rows // 10 + words
    assert working_bytes(node, {}, CUDA) >= sums * width * 4
    assert working_bytes(node, {}, CUDA) <= sums * width * 4 + 16 * 8 * rows


def test_kernels_of_a_cpu_have_none():
    node = attention_backward(queries=4, keys=4, tokens=64)
    assert has_formula(node.target, CUDA)
    assert not has_formula(node.target, CPU)
    assert working_bytes(node, {}, CPU) == 0
