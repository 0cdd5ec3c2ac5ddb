"""Workspaces that estimates compute from shapes are what torch's kernels allocate."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from fxremat.costs.estimated.working import working_bytes
from tests.costs.estimated.test_working import node_of

aten = torch.ops.aten
CUDA = torch.device("cuda")

pytestmark = pytest.mark.cuda

SHAPES = [
    (4, 4, 64, 64), (4, 4, 512, 64), (8, 8, 1000, 64), (8, 2, 1024, 128), (2, 2, 4096, 64),
    (32, 8, 640, 128), (1, 1, 512, 64),
]  # fmt: skip
"""Heads of queries, heads of keys, tokens, and width."""


def heads(count: int, tokens: int, width: int) -> Tensor:
    made = torch.zeros(1, tokens, count, width, dtype=torch.bfloat16, device=CUDA)
    return made.transpose(1, 2)


def measured(target: Any, *args: Any) -> tuple[int, Any]:
    """The bytes that an operator allocates and frees, and its results."""
    gc.collect()  # tensors of earlier tests
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # blocks that are cached would be handed out whole
    torch.cuda.reset_peak_memory_stats()
    results = target(*args)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated(), results


def expected(target: Any, *args: Any) -> int:
    return working_bytes(node_of(target, *args), {}, CUDA)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("queries", "keys", "tokens", "width"), SHAPES)
def test_flash_attention(queries: int, keys: int, tokens: int, width: int, causal: bool):
    forward = aten._scaled_dot_product_flash_attention.default
    backward = aten._scaled_dot_product_flash_attention_backward.default
    q, k = heads(queries, tokens, width), heads(keys, tokens, width)
    nbytes, results = measured(forward, q, k, k, 0.0, causal, False)
    assert nbytes <= expected(forward, q, k, k, 0.0, causal, False)
    out, lse, cum_q, cum_k, max_q, max_k, state, unused, _ = results
    given = (out, q, k, k, out, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, state, unused)
    nbytes, _ = measured(backward, *given)
    assert nbytes == expected(backward, *given)


@pytest.mark.parametrize(
    ("count", "tokens", "width"), [(q, t, w) for q, k, t, w in SHAPES if q == k]
)
def test_efficient_attention(count: int, tokens: int, width: int):
    forward = aten._scaled_dot_product_efficient_attention.default
    backward = aten._scaled_dot_product_efficient_attention_backward.default
    x = heads(count, tokens, width)
    nbytes, results = measured(forward, x, x, x, None, True, 0.0, True)
    assert nbytes <= expected(forward, x, x, x, None, True, 0.0, True)
    out, lse, seed, offset = results
    given = (out, x, x, x, None, out, lse, seed, offset, 0.0, [True, True, True, False], True)
    nbytes, _ = measured(backward, *given)
    assert nbytes <= expected(backward, *given)


@pytest.mark.parametrize(
    ("rows", "count", "width"), [(200, 500, 64), (5000, 5000, 64), (20000, 1000, 128)]
)
def test_the_gradient_of_an_embedding(rows: int, count: int, width: int):
    target = aten.embedding_dense_backward.default
    grad = torch.zeros(1, rows, width, dtype=torch.bfloat16, device=CUDA)
    ids = torch.randint(0, count, (1, rows), device=CUDA)
    nbytes, _ = measured(target, grad, ids, count, -1, False)
    assert nbytes <= expected(target, grad, ids, count, -1, False)
