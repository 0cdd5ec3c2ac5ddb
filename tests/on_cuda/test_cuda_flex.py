"""FlexAttention within a budget, over the stand-in: kernels that Inductor generates, real bytes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import fxremat
from fxremat.module.compiled import CompiledModule
from tests.cuda import CUDA, forget
from tests.models.zoo import sum_of_squares
from tests.on_cuda.stood_in import needs_stand_in

pytest.importorskip("triton")

pytestmark = needs_stand_in

WIDTH, HEADS, LENGTH, LAYERS = 64, 4, 512, 6


class Block(nn.Module):
    """Attention with a learned slope for each head, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.read, self.write = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.slope = nn.Parameter(torch.zeros(HEADS))

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        batch, length, _ = x.shape
        heads = self.read(self.norm(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)

        def sloped(score: Tensor, _b: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score + self.slope[head] * (q - k)

        mixed = flex_attention(*heads, score_mod=sloped, block_mask=mask)
        x = x + self.write(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(functional.gelu(self.up(x)))


class Attention(nn.Module):
    """Blocks that share a mask."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x


def causal(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def sample(length: int = LENGTH) -> tuple[Tensor, BlockMask]:
    mask = create_block_mask(causal, None, None, length, length, device=CUDA)
    return torch.randn(2, length, WIDTH, device=CUDA), mask


@pytest.fixture(autouse=True)
def _nothing_else_is_there() -> Iterator[None]:
    forget(CUDA)
    yield
    forget(CUDA)


def peak_of_step(model: CompiledModule, args: tuple[Any, ...]) -> int:
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    sum_of_squares(model(*args)).backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@pytest.mark.cuda
@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_peaks_are_within_each_budget_without_a_warning(executor: str) -> None:
    args = sample()
    for budget in (1.0, 0.6, "min"):
        torch._dynamo.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            warnings.filterwarnings("ignore", "(?s).*Online softmax")
            model = fxremat.compile(
                Attention().to(CUDA), args, budget, executor=executor, loss=sum_of_squares
            )
            peaks = [peak_of_step(model, args) for _ in range(3)]
        plan = model.plan
        assert max(peaks) <= plan.budget_bytes
        operations = {name for unit in plan.fused for name in unit.operations}
        assert operations >= {"flex_attention", "flex_attention_backward"}
        del model
        forget(CUDA)
    scores_bytes = 2 * HEADS * LENGTH * LENGTH * 4  # of one layer, which no kernel holds
    assert plan.baseline_peak_bytes < LAYERS * 2 * scores_bytes


@pytest.mark.cuda
def test_other_lengths_are_within_the_budget() -> None:
    args = sample()
    model = fxremat.compile(Attention().to(CUDA), args, 1.0, loss=sum_of_squares, dynamic=True)
    budget = model.plan.budget_bytes
    for length in (LENGTH, 384, 256):
        del args
        args = sample(length)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*was planned as it began")
            # A step shows the tensors of a mask that no kernel reads: they are not in the graph.
            peaks = [peak_of_step(model, args) for _ in range(3)]
        assert peaks[-1] <= budget
