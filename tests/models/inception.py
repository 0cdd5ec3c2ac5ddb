"""Inception-style blocks: four branches of different depth, concatenated."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.models.images import image_entry
from tests.models.zoo import drawn_once


def _conv(inputs: int, outputs: int, kernel: int, *, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class InceptionBlock(nn.Module):
    """``inputs`` channels in, ``4 * width`` out."""

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.branches = nn.ModuleList(
            [
                _conv(inputs, width, 1),
                nn.Sequential(_conv(inputs, width, 1), _conv(width, width, 3)),
                nn.Sequential(
                    _conv(inputs, width, 1), _conv(width, width, 3), _conv(width, width, 3)
                ),
                nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), _conv(inputs, width, 1)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Inception(nn.Module):
    def __init__(self, *, width: int = 8, blocks: int = 5, classes: int = 10):
        super().__init__()
        self.stem = _conv(3, 4 * width, 3, stride=2)
        self.blocks = nn.Sequential(*(InceptionBlock(4 * width, width) for _ in range(blocks)))
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(4 * width, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)))


ZOO = [image_entry("inception", drawn_once(Inception), batch=2, size=48, classes=10, draws=True)]
BENCH: list = []
