"""Attention as a GPU computes it, traced where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxremat
from fxremat.capture.sample import Sample
from fxremat.sizing.fake import FakeCopies, capture

FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"
BF16 = torch.bfloat16


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)


def tensors(
    *, dtype: torch.dtype, head: int = 16, heads: int = 4, rows: int = 12
) -> tuple[Tensor, ...]:
    with torch.device("meta"):
        q = torch.empty(2, 4, rows, head, dtype=dtype, requires_grad=True)
        k, v = (
            torch.empty(2, heads, rows, head, dtype=dtype, requires_grad=True) for _ in range(2)
        )
    return q, k, v


def kernels(sample: tuple[Tensor, ...], *, gpu: bool = True, **options: Any) -> list[str]:
    """Names of the operations of attention in a captured step."""
    copies, model = FakeCopies(), Attention(**options)
    step = capture(model, Sample(sample).map(copies.of), dynamic=False, gpu=gpu)
    (output,) = step.joint.graph.output_node().args
    assert output[0].meta["val"].shape == sample[0].shape  # type: ignore[union-attr, index]
    names = [str(n.target) for n in step.joint.graph.nodes if n.op == "call_function"]
    return [name.split(".")[1] for name in names if "attention" in name]


@pytest.mark.parametrize("head", [16, 20])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.1}])
def test_halves_without_a_mask_are_flash(head: int, options: dict[str, Any]) -> None:
    assert kernels(tensors(dtype=BF16, head=head), **options) == [FLASH, f"{FLASH}_backward"]


def test_shared_keys_are_flash() -> None:
    sample = tensors(dtype=BF16, heads=2)
    assert kernels(sample, enable_gqa=True) == [FLASH, f"{FLASH}_backward"]


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("kind", [torch.bool, None])
def test_a_mask_is_taken_by_the_efficient_kernel(
    dtype: torch.dtype, kind: torch.dtype | None
) -> None:
    mask = torch.empty(12, 12, dtype=kind or dtype, device="meta")
    assert kernels((*tensors(dtype=dtype), mask)) == [EFFICIENT, f"{EFFICIENT}_backward"]


def test_float32_is_taken_by_the_efficient_kernel() -> None:
    assert kernels(tensors(dtype=torch.float32)) == [EFFICIENT, f"{EFFICIENT}_backward"]


def test_float64_is_computed_in_pieces() -> None:
    assert kernels(tensors(dtype=torch.float64)) == []


def test_on_a_cpu_nothing_is_changed() -> None:
    (forward, backward) = kernels(tensors(dtype=torch.float32), gpu=False)
    assert "cpu" in forward
    assert "cpu" in backward


def test_no_scores_are_kept() -> None:
    rows = 4096
    found = fxremat.estimate(Attention(), tensors(dtype=BF16, rows=rows), device="A100")
    assert found.peak_bytes < 2 * 4 * rows**2
