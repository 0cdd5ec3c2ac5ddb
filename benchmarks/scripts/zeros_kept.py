"""Segmentation by a small U-Net; gradients are set to zero in place, not to None."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.scripts import Meter, Wrap


def convolutions(inside: int, outside: int) -> nn.Sequential:
    """Two convolutions with norms."""
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1),
        nn.BatchNorm2d(outside),
        nn.ReLU(inplace=True),
        nn.Conv2d(outside, outside, 3, padding=1),
        nn.BatchNorm2d(outside),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Down twice, up twice, with skips."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = convolutions(3, 8), convolutions(8, 16)
        self.middle = convolutions(16, 32)
        self.up2 = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.after2 = convolutions(32, 16)
        self.up1 = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.after1 = convolutions(16, 8)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of each pixel."""
        first = self.down1(x)
        second = self.down2(functional.max_pool2d(first, 2))
        x = self.middle(functional.max_pool2d(second, 2))
        x = self.after2(torch.cat([self.up2(x), second], 1))
        x = self.after1(torch.cat([self.up1(x), first], 1))
        return self.head(x)


def train(wrap: Wrap, meter: Meter, steps: int) -> Iterator[Tensor]:
    """Train by SGD with momentum."""
    torch.manual_seed(0)
    model = UNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    image = torch.randn(4, 3, 48, 48)
    model = wrap(model, image)
    for _ in range(steps):
        image, mask = torch.randn(4, 3, 48, 48), torch.randint(0, 4, (4, 48, 48))
        optimizer.zero_grad(set_to_none=False)
        meter.begin()
        output = model(image)
        loss = criterion(output, mask)
        loss.backward()
        meter.end()
        optimizer.step()
        yield loss
