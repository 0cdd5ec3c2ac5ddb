"""DenseNet-121, in train mode: every layer reads every earlier feature of its block."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models.images import image_entry
from tests.models.zoo import drawn_once


def _norm_relu_conv(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm2d(inputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False),
    )


class DenseLayer(nn.Module):
    def __init__(self, inputs: int, growth: int):
        super().__init__()
        self.reduce = _norm_relu_conv(inputs, 4 * growth, 1)
        self.spatial = _norm_relu_conv(4 * growth, growth, 3)

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.spatial(self.reduce(torch.cat(features, 1)))


class DenseBlock(nn.Module):
    """Layers that read all features before them.

    ``chained``: each layer hands on all features so far as one tensor, as torchvision did when
    the papers were written; else each reads them one by one. The numbers are the same.
    """

    def __init__(self, inputs: int, growth: int, depth: int, *, chained: bool = False):
        super().__init__()
        self.chained = chained
        self.layers = nn.ModuleList(
            DenseLayer(inputs + index * growth, growth) for index in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.chained:
            for layer in self.layers:
                x = torch.cat([x, layer([x])], 1)
            return x
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    def __init__(
        self,
        *,
        growth: int = 32,
        depths: tuple[int, ...] = (6, 12, 24, 16),
        classes: int,
        chained: bool = False,
    ):
        super().__init__()
        width = 2 * growth
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        body: list[nn.Module] = []
        for index, depth in enumerate(depths):
            body.append(DenseBlock(width, growth, depth, chained=chained))
            width += depth * growth
            if index < len(depths) - 1:
                body.append(nn.Sequential(_norm_relu_conv(width, width // 2, 1), nn.AvgPool2d(2)))
                width //= 2
        self.body = nn.Sequential(*body, nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.body(self.stem(images))
        return self.head(torch.flatten(functional.adaptive_avg_pool2d(features, 1), 1))


_SMALL = drawn_once(lambda: DenseNet(growth=8, classes=10))
_FULL = drawn_once(lambda: DenseNet(classes=1000))

ZOO = [image_entry("densenet121", _SMALL, batch=2, size=64, classes=10)]
BENCH = [image_entry("densenet121", _FULL, batch=8, size=128, classes=1000)]
