"""Fast neural style: a frozen network outside the compiled one makes the loss."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.scripts import Meter, Wrap


class TransformerNet(nn.Module):
    """An image to an image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 9, padding=4, padding_mode="reflect")
        self.in1 = nn.InstanceNorm2d(16, affine=True)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect")
        self.in2 = nn.InstanceNorm2d(16, affine=True)
        self.deconv = nn.Conv2d(16, 3, 5, padding=2, padding_mode="reflect")

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape."""
        y = functional.relu(self.in1(self.conv1(x)))
        y = y + functional.relu(self.in2(self.conv2(y)))
        return self.deconv(y)


class Features(nn.Module):
    """A frozen network: what its layers see."""

    def __init__(self) -> None:
        super().__init__()
        self.slice1 = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        self.slice2 = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU())
        for param in self.parameters():
            param.requires_grad = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of both slices."""
        first = self.slice1(x)
        return first, self.slice2(first)


def gram_matrix(y: Tensor) -> Tensor:
    """Products of channels."""
    b, ch, h, w = y.size()
    features = y.view(b, ch, w * h)
    return features.bmm(features.transpose(1, 2)) / (ch * h * w)


def train(wrap: Wrap, meter: Meter, steps: int) -> Iterator[Tensor]:
    """Train by Adam."""
    torch.manual_seed(42)
    transformer = TransformerNet()
    optimizer = torch.optim.Adam(transformer.parameters(), 1e-3)
    mse_loss = nn.MSELoss()
    vgg = Features()
    gram_style = [gram_matrix(y) for y in vgg(torch.rand(2, 3, 48, 48))]
    x = torch.rand(2, 3, 48, 48)
    transformer = wrap(transformer, x, optimizer=optimizer)
    for _ in range(steps):
        x = torch.rand(2, 3, 48, 48)
        optimizer.zero_grad()
        meter.begin()
        y = transformer(x)
        features_y = vgg(y)
        features_x = vgg(x)
        content_loss = 1e3 * mse_loss(features_y[1], features_x[1])
        style_loss = 0.0
        for ft_y, gm_s in zip(features_y, gram_style, strict=True):
            style_loss += mse_loss(gram_matrix(ft_y), gm_s)
        total_loss = content_loss + 1e4 * style_loss
        total_loss.backward()
        meter.end()
        optimizer.step()
        yield total_loss
