"""What ``benchmarks.gpu_llama`` trains: a Llama of the shape of Llama-3.2-1B, and ResNet-50.

Both return their loss. A contender is a function over the same module: nothing here changes the
module, so one set of parameters serves all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from benchmarks.gpu_networks import Classifier
from benchmarks.gpu_peers import NotHereError
from tests.models.resnet import ResNet

Call = Callable[..., Tensor]
RunBlock = Callable[..., Tensor]
"""Calls a block with its arguments."""
Head = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The loss of hidden states, given the weight of the vocabulary and the labels."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama and of its batch; those of Llama-3.2-1B by default.

    Attributes:
        width, hidden: numbers of a token between blocks, and inside of an MLP.
        heads, key_heads: of queries, and of keys and values.
        vocabulary: words; the embedding is also the last projection.
        batch, length: sequences of a step, and tokens of each.
    """

    layers: int = 16
    width: int = 2048
    heads: int = 32
    key_heads: int = 8
    hidden: int = 8192
    vocabulary: int = 128256
    batch: int = 4
    length: int = 2048

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.length


SMALL = Shape(4, width=64, heads=4, key_heads=2, hidden=256, vocabulary=128, batch=12, length=256)


class Attention(nn.Module):
    """Causal attention of grouped queries, with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.size = shape.width // shape.heads
        projection = functools.partial(nn.Linear, bias=False, dtype=torch.bfloat16)
        self.queries = projection(shape.width, shape.width)
        self.keys = projection(shape.width, shape.key_heads * self.size)
        self.values = projection(shape.width, shape.key_heads * self.size)
        self.result = projection(shape.width, shape.width)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Of ``(batch, length, width)``."""
        batch, length, width = x.shape

        def by_heads(projected: Tensor) -> Tensor:
            return projected.view(batch, length, -1, self.size).transpose(1, 2)

        queries = _rotated(by_heads(self.queries(x)), cosine, sine)
        keys = _rotated(by_heads(self.keys(x)), cosine, sine)
        attended = functional.scaled_dot_product_attention(
            queries, keys, by_heads(self.values(x)), is_causal=True, enable_gqa=True
        )
        return self.result(attended.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A layer: attention and an MLP with a gate, each behind a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        projection = functools.partial(nn.Linear, bias=False, dtype=torch.bfloat16)
        self.attention_norm = _norm(shape)
        self.attention = Attention(shape)
        self.mlp_norm = _norm(shape)
        self.gate = projection(shape.width, shape.hidden)
        self.up = projection(shape.width, shape.hidden)
        self.down = projection(shape.hidden, shape.width)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Of ``(batch, length, width)``."""
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        y = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A Llama with its loss; parameters are bfloat16, and made where torch's default device is."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = _norm(shape)
        size = shape.width // shape.heads
        frequencies = 500_000.0 ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
        angles = torch.arange(shape.length, dtype=torch.float32)[:, None] * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if "norm" not in name:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of ``(batch, length)`` tokens; labels are the tokens after them."""
        return self.loss(tokens, labels)

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor,
        *,
        run_block: RunBlock | None = None,
        head: Head | None = None,
    ) -> Tensor:
        """The loss, with each block called through ``run_block``, and ``head`` as the last part."""
        x = self.embedding(tokens)
        for block in self.blocks:
            if run_block is None:
                x = block(x, self.cosine, self.sine)
            else:
                x = run_block(block, x, self.cosine, self.sine)
        return (head or whole_logits)(self.norm(x), self.embedding.weight, labels)


def whole_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy of float32 logits, all of them at once."""
    logits = functional.linear(hidden, weight)
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def _norm(shape: Shape) -> nn.RMSNorm:
    return nn.RMSNorm(shape.width, eps=1e-5, dtype=torch.bfloat16)


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """``(batch, heads, length, size)``, turned by position, computed in float32."""
    first, second = x.float().chunk(2, dim=-1)
    across = torch.cat((-second, first), dim=-1)
    return (x.float() * cosine + across * sine).to(x.dtype)


def training_flops(parameters: int, tokens: int, *, layers: int, width: int, length: int) -> float:
    """Floating point operations of a training step, nothing computed twice.

    Six a parameter and token: two in the forward, four in the backward. The tied embedding counts
    once, as the last projection; a lookup computes nothing. Attention adds 12 times layers, width
    and length a token: the mask is not taken off, as in the figures of PaLM and of torchtitan.
    """
    return tokens * (6.0 * parameters + 12.0 * layers * width * length)


class AutocastClassifier(Classifier):
    """An image classifier with its cross entropy, computed in bfloat16 where autocast says so."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The mean loss of ``(batch, 3, size, size)`` images."""
        with torch.autocast(x.device.type, torch.bfloat16):
            return super().forward(x, target)


Way = Callable[[Any], Call]
"""Makes the function that stands for a module's call, without a change of the module."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What trains, on its device.

    Attributes:
        name: the option's.
        title: for tables.
        model: returns its loss, given the inputs.
        optimizer: of the model; its state exists.
        ways: by which the module may be called, by the names of contenders.
        items: of a step, such as its tokens, and what they are.
        flops: of a step, or nothing where no formula is at hand.
        fixed_budget: bytes that are asked for whatever others take, as a text.
    """

    name: str
    title: str
    model: nn.Module
    inputs: tuple[Tensor, ...]
    optimizer: torch.optim.Optimizer
    ways: Mapping[str, Way]
    items: tuple[int, str]
    flops: float | None
    fixed_budget: str


def llama(device: torch.device, *, small: bool) -> Trained:
    """The Llama, its batch and fused AdamW."""
    shape = SMALL if small else Shape()
    torch.manual_seed(0)
    with device:
        model = Llama(shape).train()
        words = torch.randint(0, shape.vocabulary, (shape.batch, shape.length + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    _make_state(optimizer)
    parameters = sum(p.numel() for p in model.parameters())
    return Trained(
        name="llama",
        title=f"Llama, {parameters / 1e6:.0f} million parameters, bf16, "
        f"{shape.batch} x {shape.length} tokens, fused AdamW",
        model=model,
        inputs=(words[:, :-1].contiguous(), words[:, 1:].contiguous()),
        optimizer=optimizer,
        ways={
            "eager": as_it_is,
            "checkpoint per block": checkpointed,
            "per-op SAC": every_second_product_saved,
            "Liger loss + checkpoint per block": with_liger_loss,
        },
        items=(shape.tokens, "tokens"),
        flops=training_flops(
            parameters, shape.tokens, layers=shape.layers, width=shape.width, length=shape.length
        ),
        fixed_budget="32 MiB" if small else "20 GiB",
    )


def resnet50(device: torch.device, *, small: bool) -> Trained:
    """ResNet-50 under autocast, channels last, and SGD with momentum."""
    batch, size, classes = (64, 64, 10) if small else (64, 224, 1000)
    torch.manual_seed(0)
    with device:
        net = (
            ResNet(depths=(1, 1, 1, 1), width=8, classes=classes) if small else ResNet(classes=1000)
        )
        model = AutocastClassifier(net).train().to(memory_format=torch.channels_last)
        images = torch.randn(batch, 3, size, size).contiguous(memory_format=torch.channels_last)
        labels = torch.randint(0, classes, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    _make_state(optimizer)
    return Trained(
        name="resnet50",
        title=f"ResNet-50, autocast to bf16, channels last, {batch} x 3 x {size}², "
        "SGD with momentum",
        model=model,
        inputs=(images, labels),
        optimizer=optimizer,
        ways={"eager": as_it_is},
        items=(batch, "images"),
        flops=None,
        fixed_budget="",
    )


NETWORKS: dict[str, Callable[..., Trained]] = {"llama": llama, "resnet50": resnet50}


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer make its state, by a step of gradients that are zero."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def as_it_is(model: nn.Module) -> Call:
    """The module itself."""

    def call(*inputs: Tensor) -> Tensor:
        found: Tensor = model(*inputs)
        return found

    return call


def checkpointed(model: Llama, *, head: Head | None = None) -> Call:
    """``torch.utils.checkpoint`` around each block."""

    def run_block(block: nn.Module, *inputs: Tensor) -> Tensor:
        found: Tensor = checkpoint(block, *inputs, use_reentrant=False)
        return found

    def call(tokens: Tensor, labels: Tensor) -> Tensor:
        return model.loss(tokens, labels, run_block=run_block, head=head)

    return call


def with_liger_loss(model: Llama) -> Call:
    """Liger's loss, which makes the logits in chunks, and ``checkpoint`` around each block.

    Raises:
        NotHereError: ``liger_kernel`` is not installed.
    """
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        raise NotHereError("liger_kernel is not installed") from None
    fused = LigerFusedLinearCrossEntropyLoss()

    def head(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = fused(weight, hidden.flatten(0, 1), labels.flatten())
        return found

    return checkpointed(model, head=head)


def every_second_product_saved(model: Llama) -> Call:
    """Selective checkpointing by operations, with the list of torchtitan.

    Attention, reductions over ranks, maxima and every second product of matrices of a block are
    saved; all else is computed again.
    """

    def run_block(block: nn.Module, *inputs: Tensor) -> Tensor:
        found: Tensor = checkpoint(
            block,
            *inputs,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(_EverySecondProduct()),
        )
        return found

    def call(tokens: Tensor, labels: Tensor) -> Tensor:
        return model.loss(tokens, labels, run_block=run_block)

    return call


class _EverySecondProduct:
    """The policy of one block: it counts products, in the forward and in the recomputation."""

    def __init__(self) -> None:
        self._products = {False: 0, True: 0}

    def __call__(self, context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> Any:
        if operation is torch.ops.aten.mm.default:
            self._products[context.is_recompute] += 1
            if self._products[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        saved = operation in _saved_operations()
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _saved_operations() -> frozenset[Any]:
    aten: Any = torch.ops.aten
    found = {
        aten.mm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten.max.default,
    }
    if hasattr(torch.ops._c10d_functional, "reduce_scatter_tensor"):
        found.add(torch.ops._c10d_functional.reduce_scatter_tensor.default)
    return frozenset(found)
