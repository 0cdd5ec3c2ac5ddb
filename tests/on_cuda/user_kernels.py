"""Models whose forwards launch kernels that a user has written for Triton.

Each kernel is launched another way: by an operator of ``torch.library`` with a derivative, by a
``torch.autograd.Function``, by plain code, and through ``triton.autotune``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.library import triton_op, wrap_triton

BLOCK = 1024


@triton.jit
def sine_kernel(source, target, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    tl.store(target + place, tl.sin(tl.load(source + place, mask=inside)), mask=inside)


@triton.jit
def other_kernel(source, target, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    tl.store(target + place, tl.cos(tl.load(source + place, mask=inside)), mask=inside)


@triton.jit
def cosine_kernel(gradient, source, target, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    x = tl.load(source + place, mask=inside)
    g = tl.load(gradient + place, mask=inside)
    tl.store(target + place, g * tl.cos(x), mask=inside)


@triton.jit
def norm_kernel(source, weight, target, deviation, width, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    place = tl.arange(0, WIDTH)
    inside = place < width
    x = tl.load(source + row * width + place, mask=inside, other=0.0)
    rstd = 1 / tl.sqrt(tl.sum(x * x) / width + 1e-6)
    w = tl.load(weight + place, mask=inside)
    tl.store(deviation + row, rstd)
    tl.store(target + row * width + place, x * rstd * w, mask=inside)


@triton.jit
def norm_backward_kernel(
    gradient, source, weight, deviation, target, scales, width, WIDTH: tl.constexpr
):
    row = tl.program_id(0)
    place = tl.arange(0, WIDTH)
    inside = place < width
    x = tl.load(source + row * width + place, mask=inside, other=0.0)
    g = tl.load(gradient + row * width + place, mask=inside, other=0.0)
    w = tl.load(weight + place, mask=inside, other=0.0)
    rstd = tl.load(deviation + row)
    gw = g * w
    dx = rstd * (gw - x * rstd * rstd * tl.sum(gw * x) / width)
    tl.store(target + row * width + place, dx, mask=inside)
    tl.store(scales + row * width + place, g * x * rstd, mask=inside)


CONFIGS = [triton.Config({"BLOCK": size}, num_warps=4) for size in (256, 1024)]


def few_runs(launch: Callable[[], object], *, quantiles: Any) -> Any:
    """As Triton times a kernel, with its buffer that empties caches, but a few runs only."""
    return triton.testing.do_bench(launch, warmup=0, rep=0, quantiles=quantiles)


tuned = triton.autotune(CONFIGS, key=["count"], do_bench=few_runs)


@tuned
@triton.jit
def tuned_kernel(source, target, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    x = tl.load(source + place, mask=inside)
    tl.store(target + place, x * tl.sigmoid(x), mask=inside)


@tuned
@triton.jit
def tuned_backward_kernel(gradient, source, target, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    x = tl.load(source + place, mask=inside)
    g = tl.load(gradient + place, mask=inside)
    s = tl.sigmoid(x)
    tl.store(target + place, g * s * (1 + x * (1 - s)), mask=inside)


@triton.jit
def sign_kernel(source, target, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    x = tl.load(source + place, mask=inside)
    tl.store(target + place, tl.where(x > 0, 1.0, 0.5), mask=inside)


@triton.jit
def count_kernel(counts, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    tl.store(counts + place, tl.load(counts + place, mask=inside) + 1, mask=inside)


@triton.jit
def column_sum_kernel(source, target, width, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    place = tl.arange(0, WIDTH)
    inside = place < width
    x = tl.load(source + row * width + place, mask=inside, other=0.0)
    tl.atomic_add(target + place, x, mask=inside)


def grid_of(count: int) -> Callable[[dict[str, Any]], tuple[int]]:
    return lambda meta: (triton.cdiv(count, meta["BLOCK"]),)


@triton_op("fxremat_tests::sine", mutates_args=())
def sine(x: Tensor) -> Tensor:
    target = torch.empty_like(x)
    wrap_triton(sine_kernel)[grid_of(x.numel())](x, target, x.numel(), BLOCK=BLOCK)
    return target


@triton_op("fxremat_tests::other", mutates_args=())
def other(x: Tensor) -> Tensor:
    target = torch.empty_like(x)
    wrap_triton(other_kernel)[grid_of(x.numel())](x, target, x.numel(), BLOCK=BLOCK)
    return target


@triton_op("fxremat_tests::sine_backward", mutates_args=())
def sine_backward(gradient: Tensor, x: Tensor) -> Tensor:
    target = torch.empty_like(x)
    arguments = (gradient, x, target, x.numel())
    wrap_triton(cosine_kernel)[grid_of(x.numel())](*arguments, BLOCK=BLOCK)
    return target


def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _derive(ctx: Any, gradient: Tensor) -> Tensor:
    return sine_backward(gradient.contiguous(), *ctx.saved_tensors)


sine.register_autograd(_derive, setup_context=_keep)
other.register_autograd(_derive, setup_context=_keep)


class Norm(torch.autograd.Function):
    """Root mean square norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows, width = x.shape
        target, deviation = torch.empty_like(x), x.new_empty(rows)
        block = triton.next_power_of_2(width)
        norm_kernel[(rows,)](x, weight, target, deviation, width, WIDTH=block)
        ctx.save_for_backward(x, weight, deviation)
        return target

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, deviation = ctx.saved_tensors
        rows, width = x.shape
        target, scales = torch.empty_like(x), torch.empty_like(x)
        block = triton.next_power_of_2(width)
        norm_backward_kernel[(rows,)](
            gradient.contiguous(), x, weight, deviation, target, scales, width, WIDTH=block
        )
        return target, scales.sum(0)


class Tuned(torch.autograd.Function):
    """A SiLU by kernels that are tuned at their first launch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        target = torch.empty_like(x)
        tuned_kernel[grid_of(x.numel())](x, target, x.numel())
        ctx.save_for_backward(x)
        return target

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        target = torch.empty_like(x)
        tuned_backward_kernel[grid_of(x.numel())](gradient.contiguous(), x, target, x.numel())
        return target


WIDTH, ROWS, BLOCKS = 256, 1024, 4


class Operator(nn.Module):
    """An operator of ``torch.library`` with a derivative."""

    def forward(self, x: Tensor) -> Tensor:
        return sine(x)


class OtherOperator(nn.Module):
    """Another one, of the same arguments."""

    def forward(self, x: Tensor) -> Tensor:
        return other(x)


class Function(nn.Module):
    """A function of autograd's that launches kernels itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return Norm.apply(x, self.weight)


class AutoTuned(nn.Module):
    """A function of autograd's that launches tuned kernels."""

    def forward(self, x: Tensor) -> Tensor:
        return Tuned.apply(x)


class NotCaptured(nn.Module):
    """Runs as it is, between two regions."""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return Tuned.apply(x)


class Plain(nn.Module):
    """Kernels in plain code: of a detached tensor, and of a buffer that they write to."""

    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        slopes = torch.empty_like(x)
        sign_kernel[grid_of(x.numel())](x.detach(), slopes, x.numel(), BLOCK=BLOCK)
        count_kernel[grid_of(WIDTH)](self.counts, WIDTH, BLOCK=BLOCK)
        return x * slopes


class Atomic(nn.Module):
    """A kernel whose sums are in no certain order."""

    def forward(self, x: Tensor) -> Tensor:
        sums = torch.zeros(WIDTH, device=x.device)
        column_sum_kernel[(len(x),)](x.detach(), sums, WIDTH, WIDTH=WIDTH)
        return torch.tanh(x + sums)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "operator": Operator,
    "function": Function,
    "tuned": AutoTuned,
    "plain": Plain,
    "atomic": Atomic,
}

FORWARDS = {
    "operator": "sine_kernel",
    "function": "norm_kernel",
    "tuned": "tuned_kernel",
    "plain": "sign_kernel",
}
BACKWARDS = {
    "operator": "cosine_kernel",
    "function": "norm_backward_kernel",
    "tuned": "tuned_backward_kernel",
}
"""Names of kernels, as they are launched."""

TUNED = (tuned_kernel, tuned_backward_kernel)


def model_of(kind: str) -> nn.Module:
    """The same numbers each time."""
    torch.manual_seed(0)
    layer = OtherOperator if kind == "other_operator" else KINDS[kind]
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), layer()) for _ in range(BLOCKS)]
    return nn.Sequential(*blocks)


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


WORDS, LIGER_BLOCKS = 2048, 2


class LigerBlock(nn.Module):
    """Norm, rotation and gated layers, all of Liger's kernels."""

    def __init__(self) -> None:
        super().__init__()
        from liger_kernel.transformers import LigerRMSNorm, LigerSwiGLUMLP

        config = SimpleNamespace(hidden_size=WIDTH, intermediate_size=2 * WIDTH, hidden_act="silu")
        self.norm, self.inner = LigerRMSNorm(WIDTH), LigerSwiGLUMLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        from liger_kernel.transformers.functional import liger_rope

        heads = self.norm(x).view(1, len(x), 4, -1).transpose(1, 2)
        one, two = liger_rope(heads, heads.clone(), cos, sin)
        return x + self.inner((one + two).transpose(1, 2).reshape(x.shape))


class LigerModel(nn.Module):
    """Blocks, and a loss that never has all logits, or none."""

    cos: Tensor
    sin: Tensor

    def __init__(self, *, fused_loss: bool) -> None:
        super().__init__()
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        self.blocks = nn.ModuleList([LigerBlock() for _ in range(LIGER_BLOCKS)])
        self.loss = LigerFusedLinearCrossEntropyLoss() if fused_loss else None
        self.head = nn.Linear(WIDTH, WORDS, bias=False) if fused_loss else None
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.rand(1, ROWS, WIDTH // 4))

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        if self.loss is None or self.head is None:
            return x
        return self.loss(self.head.weight, x, target)


def liger_model(*, fused_loss: bool) -> nn.Module:
    """The same numbers each time."""
    torch.manual_seed(0)
    return LigerModel(fused_loss=fused_loss)


@triton.jit
def whole_sum_kernel(source, target, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.atomic_add(target + place, tl.load(source + place))


@triton.jit
def ticket_kernel(source, target, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    ticket = tl.atomic_add(target, 1)
    tl.store(target + 1 + place, tl.load(source + place) + ticket)


@triton.jit
def exchange_kernel(source, target, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.atomic_xchg(target + place, tl.load(source + place))


@triton.jit
def _added(target, value):
    tl.atomic_add(target, value)


@triton.jit
def calling_kernel(source, target, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    _added(target + place, tl.load(source + place))
