"""What the loops train."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tests.models import ZOO, ZooModel
from tests.models.gpt import GPTConfig, gpt_entry
from tests.models.zoo import Args, Kwargs, drawn_once, seeded, sum_of_squares


class Block(nn.Module):
    """A hidden layer with dropout, beside which the input goes on."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Dropout(0.1), nn.Linear(hidden, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def _mlp(name: str, *, rows: int, width: int, hidden: int) -> ZooModel:
    def sample(seed: int) -> tuple[Args, Kwargs]:
        with seeded(seed):
            return (torch.randn(rows, width),), {}

    build = drawn_once(lambda: nn.Sequential(*(Block(width, hidden) for _ in range(8))))
    return ZooModel(name, build, sample, sum_of_squares, draws=True)


def _deep() -> ZooModel:
    def sample(seed: int) -> tuple[Args, Kwargs]:
        with seeded(seed):
            return (torch.randn(4, 128),), {}

    build = drawn_once(lambda: nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(52))))
    return ZooModel("deep", build, sample, sum_of_squares)


def _conv() -> ZooModel:
    """Convolutions with BatchNorm; the loss is outside, on few numbers."""

    def layers() -> list[nn.Module]:
        return [nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]

    def build() -> nn.Module:
        body = [layer for _ in range(6) for layer in layers()]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)]
        return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *body, *head)

    def sample(seed: int) -> tuple[Args, Kwargs]:
        with seeded(seed):
            return (torch.randn(4, 3, 24, 24),), {}

    return ZooModel("conv", drawn_once(build), sample, sum_of_squares)


def _larger(entry: ZooModel, name: str, *, times: int) -> ZooModel:
    """With batches so large that activations, not parameters, are most of what a step takes."""

    def sample(seed: int) -> tuple[Args, Kwargs]:
        parts = [entry.sample(times * seed + part) for part in range(times)]
        joined: tuple[Args, Kwargs] = tree_map(lambda *tensors: torch.cat(tensors), *parts)
        return joined

    return replace(entry, name=name, sample=sample)


_GPT = GPTConfig(vocabulary=96, context=64, width=64, blocks=4, dropout=0.1, returns_logits=True)

SUBJECTS: dict[str, ZooModel] = {
    "mlp": _mlp("mlp", rows=512, width=64, hidden=256),
    "deep": _deep(),
    "conv": _conv(),
    "gpt": _larger(gpt_entry("gpt", _GPT, batch=2, length=64), "gpt", times=4),
    "llama": _larger(ZOO["hf_llama"], "llama", times=4),
    "resnet": _larger(ZOO["resnet50"], "resnet", times=4),
    "unet": _larger(ZOO["unet"], "unet", times=4),
}
"""By name; the gradients of ``deep`` are most of what its step makes, none is 2 % of them."""
