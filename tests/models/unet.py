"""U-Net with BatchNorm: each resolution's features wait for the way back up."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models.images import images
from tests.models.zoo import Args, Kwargs, ZooModel, drawn_once, sum_of_squares


def _double_conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, *, width: int, levels: int = 4):
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.down = nn.ModuleList(
            _double_conv(inputs, outputs)
            for inputs, outputs in zip([3, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * narrow, narrow, 2, stride=2) for narrow in reversed(widths[:-1])
        )
        self.merge = nn.ModuleList(
            _double_conv(2 * narrow, narrow) for narrow in reversed(widths[:-1])
        )
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            if skips:
                x = functional.max_pool2d(x, 2)
            x = block(x)
            skips.append(x)
        skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        return self.head(x)


def _entry(name: str, *, width: int, batch: int, size: int) -> ZooModel:
    def sample(seed: int) -> tuple[Args, Kwargs]:
        return (images(seed, batch=batch, size=size),), {}

    return ZooModel(
        name=name, build=drawn_once(lambda: UNet(width=width)), sample=sample, loss=sum_of_squares
    )


ZOO = [_entry("unet", width=8, batch=2, size=64)]
BENCH = [_entry("unet", width=32, batch=4, size=128)]
