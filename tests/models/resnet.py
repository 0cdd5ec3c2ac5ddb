"""ResNet-50, in train mode: BatchNorm statistics, in-place ReLU, strided shortcuts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models.images import image_entry
from tests.models.zoo import drawn_once


def _conv_norm(inputs: int, outputs: int, kernel: int, *, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, inputs: int, width: int, *, stride: int = 1):
        super().__init__()
        outputs = width * self.expansion
        self.reduce = _conv_norm(inputs, width, 1)
        self.spatial = _conv_norm(width, width, 3, stride=stride)
        self.expand = _conv_norm(width, outputs, 1)
        self.relu = nn.ReLU(inplace=True)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else _conv_norm(inputs, outputs, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.reduce(x))
        y = self.relu(self.spatial(y))
        y = self.expand(y)
        y += self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self, *, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        groups, inputs = [], width
        for level, depth in enumerate(depths):
            group = []
            for index in range(depth):
                stride = 2 if level > 0 and index == 0 else 1
                group.append(Bottleneck(inputs, width << level, stride=stride))
                inputs = (width << level) * Bottleneck.expansion
            groups.append(nn.Sequential(*group))
        self.groups = nn.Sequential(*groups)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.groups(self.stem(images))
        return self.head(torch.flatten(functional.adaptive_avg_pool2d(features, 1), 1))


_SMALL = drawn_once(lambda: ResNet(width=8, classes=10))
_FULL = drawn_once(lambda: ResNet(classes=1000))

ZOO = [image_entry("resnet50", _SMALL, batch=4, size=64, classes=10)]
BENCH = [image_entry("resnet50", _FULL, batch=8, size=128, classes=1000)]
