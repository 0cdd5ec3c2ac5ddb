"""Image classification: random images and labels, the loss outside the model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models.zoo import Args, Kwargs, ZooModel, seeded


def labels(seed: int, *, batch: int, classes: int) -> Tensor:
    """``(batch,)`` class numbers."""
    with seeded(seed + 10_000):
        return torch.randint(classes, (batch,))


def images(seed: int, *, batch: int, size: int, channels: int = 3) -> Tensor:
    """``(batch, channels, size, size)`` normal noise."""
    with seeded(seed):
        return torch.randn(batch, channels, size, size)


def classify(logits: Tensor) -> Tensor:
    """Cross-entropy against fixed labels: a loss outside the model."""
    batch, classes = logits.shape
    target = labels(0, batch=batch, classes=classes).to(logits.device)
    return functional.cross_entropy(logits.float(), target)


def image_entry(
    name: str,
    build: Callable[[], nn.Module],
    *,
    batch: int,
    size: int,
    classes: int,
    draws: bool = False,
) -> ZooModel:
    """A zoo entry for a classifier of square images."""

    def sample(seed: int) -> tuple[Args, Kwargs]:
        return (images(seed, batch=batch, size=size),), {}

    return ZooModel(name=name, build=build, sample=sample, loss=classify, draws=draws)
