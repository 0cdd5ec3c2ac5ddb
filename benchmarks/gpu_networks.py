"""The networks of the GPU benchmarks: random weights, the loss inside, a few blocks suffice.

``tiny`` keeps every layer's kind and makes all sizes small, so that a CPU runs the same code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models.densenet import DenseNet
from tests.models.gpt import GPT, GPTConfig, tokens
from tests.models.images import images, labels
from tests.models.resnet import ResNet
from tests.models.zoo import drawn_once


@dataclass(frozen=True, slots=True)
class Network:
    """A network that returns its loss.

    Attributes:
        name: with what makes it that size.
        build: makes it on the CPU, in float32.
        inputs: of one step, on the CPU.
        blocks: the modules that a user would wrap, one after the other.
        dtype: of its parameters.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    blocks: Callable[[Any], Sequence[nn.Module]]
    dtype: torch.dtype = torch.float32

    def inputs_on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Inputs of one step, images in the network's dtype."""
        return tuple(
            x.to(device, self.dtype) if x.is_floating_point() else x.to(device)
            for x in self.inputs()
        )


class Classifier(nn.Module):
    """An image classifier with its cross-entropy."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Mean loss of ``(batch, 3, size, size)`` images."""
        return functional.cross_entropy(self.net(x), target)


class VGG(nn.Module):
    """VGG (Simonyan and Zisserman 2014), VGG-19 by default, without batch normalization."""

    def __init__(
        self,
        *,
        depths: tuple[int, ...] = (2, 2, 4, 4, 4),
        width: int = 64,
        hidden: int = 4096,
        classes: int = 1000,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        groups, inputs = [], 3
        for level, depth in enumerate(depths):
            outputs = width * min(1 << level, 8)
            layers: list[nn.Module] = []
            for _ in range(depth):
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
                inputs = outputs
            groups.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
        self.groups = nn.Sequential(*groups)
        self.head = nn.Sequential(
            nn.Linear(inputs * 7 * 7, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits of ``(batch, 3, size, size)`` images."""
        pooled = functional.adaptive_avg_pool2d(self.groups(x), 7)
        return self.head(torch.flatten(pooled, 1))


class LanguageLoss(nn.Module):
    """A Hugging Face language model that returns its loss alone."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, ids: Tensor) -> Tensor:
        """Mean loss of ``(batch, length)`` tokens, each predicted from those before."""
        loss: Tensor = self.net(input_ids=ids, labels=ids).loss
        return loss


def gpt2_medium(*, tiny: bool = False) -> Network:
    """Blocks of the size of GPT-2 medium: width 1024, 16 heads, 1024 tokens, dropout 0.1."""
    batch, length = (2, 64) if tiny else (16, 1024)
    config = GPTConfig(
        vocabulary=96 if tiny else 8192,
        context=length,
        width=64 if tiny else 1024,
        heads=4 if tiny else 16,
        blocks=3 if tiny else 8,
        dropout=0.1,
    )
    return Network(
        f"GPT-2 medium, {config.blocks} blocks, {batch} x {length}, bf16",
        drawn_once(lambda: GPT(config)),
        lambda: tokens(0, vocabulary=config.vocabulary, batch=batch, length=length),
        lambda model: model.blocks,
        torch.bfloat16,
    )


def llama_1b(*, tiny: bool = False, whole: bool = False) -> Network:
    """Blocks of the shape of Llama 3.2 1B: width 2048, 32 heads on 8 keys, inner width 8192.

    ``whole`` has all 16 of them, and the whole vocabulary with tied embeddings: 1.24 billion
    parameters.

    Raises:
        ImportError: ``transformers`` is not installed.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    batch, length = (2, 64) if tiny else (4, 2048)
    vocabulary, blocks = (128256, 16) if whole else (8192, 4)
    heads = 4 if tiny else 32
    config = LlamaConfig(
        vocab_size=96 if tiny else vocabulary,
        hidden_size=64 if tiny else 2048,
        intermediate_size=256 if tiny else 8192,
        num_hidden_layers=3 if tiny else blocks,
        tie_word_embeddings=whole,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        max_position_embeddings=length,
        use_cache=False,
    )
    return Network(
        f"Llama 1B, {config.num_hidden_layers} blocks, {batch} x {length}, bf16",
        drawn_once(lambda: LanguageLoss(LlamaForCausalLM(config).train())),
        lambda: tokens(0, vocabulary=config.vocab_size, batch=batch, length=length)[:1],
        lambda model: model.net.model.layers,
        torch.bfloat16,
    )


def _classifier(
    name: str,
    build: Callable[[], nn.Module],
    blocks: Callable[[Any], Sequence[nn.Module]],
    *,
    batch: int,
    size: int,
    classes: int,
) -> Network:
    return Network(
        f"{name}, {batch} x {size}², fp32",
        drawn_once(lambda: Classifier(build())),
        lambda: (
            images(0, batch=batch, size=size),
            labels(0, batch=batch, classes=classes),
        ),
        lambda model: blocks(model.net),
    )


def resnet101(*, tiny: bool = False) -> Network:
    """ResNet-101 at 500 x 500."""
    classes = 10 if tiny else 1000
    depths = (1, 1, 2, 1) if tiny else (3, 4, 23, 3)
    return _classifier(
        "ResNet-101",
        lambda: ResNet(depths=depths, width=4 if tiny else 64, classes=classes),
        lambda net: [block for group in net.groups for block in group],
        batch=2 if tiny else 16,
        size=50 if tiny else 500,
        classes=classes,
    )


def resnet50(*, tiny: bool = False) -> Network:
    """ResNet-50 at 224 x 224."""
    classes = 10 if tiny else 1000
    return _classifier(
        "ResNet-50",
        lambda: ResNet(width=4 if tiny else 64, classes=classes),
        lambda net: [block for group in net.groups for block in group],
        batch=2 if tiny else 64,
        size=64 if tiny else 224,
        classes=classes,
    )


def vgg19(*, tiny: bool = False) -> Network:
    """VGG-19 at 224 x 224."""
    classes = 10 if tiny else 1000
    return _classifier(
        "VGG-19",
        lambda: VGG(width=2 if tiny else 64, hidden=8 if tiny else 4096, classes=classes),
        lambda net: net.groups,
        batch=4 if tiny else 32,
        size=64 if tiny else 224,
        classes=classes,
    )


def densenet161(*, tiny: bool = False) -> Network:
    """DenseNet-161 at 224 x 224."""
    classes = 10 if tiny else 1000
    depths = (2, 2, 2, 2) if tiny else (6, 12, 36, 24)
    return _classifier(
        "DenseNet-161",
        lambda: DenseNet(growth=4 if tiny else 48, depths=depths, classes=classes),
        lambda net: [part for part in net.body if not isinstance(part, nn.ReLU | nn.BatchNorm2d)],
        batch=2 if tiny else 16,
        size=64 if tiny else 224,
        classes=classes,
    )


PROMISED = {
    "gpt": gpt2_medium,
    "llama-1b": functools.partial(llama_1b, whole=True),
    "resnet50": resnet50,
}
"""Those of ``benchmarks.gpu_promise``."""

NETWORKS = {
    "gpt2-medium": gpt2_medium,
    "llama-1b": llama_1b,
    "resnet101": resnet101,
    "vgg19": vgg19,
    "densenet161": densenet161,
}
