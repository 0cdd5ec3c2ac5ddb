"""A GAN: two networks with an optimizer each, both compiled with one budget."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from benchmarks.scripts import Meter, Wrap

NETWORKS = 2
CALLS = None


class Generator(nn.Module):
    """Noise to an image."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(32, 32, 4, 1, 0, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(True),
            nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(True),
            nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(True),
            nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, noise: Tensor) -> Tensor:
        """Of 32 × 32."""
        return self.main(noise)


class Discriminator(nn.Module):
    """An image to a probability."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(3, 16, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(16, 32, 4, 2, 1, bias=False),
            nn.BatchNorm2d(32),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(32, 64, 4, 2, 1, bias=False),
            nn.BatchNorm2d(64),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(64, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, image: Tensor) -> Tensor:
        """Whether it is real."""
        return self.main(image).view(-1, 1).squeeze(1)


def train(wrap: Wrap, meter: Meter, steps: int) -> Iterator[Tensor]:
    """Train both by Adam, as DCGAN."""
    torch.manual_seed(999)
    generator, discriminator = Generator(), Discriminator()
    criterion = nn.BCELoss()
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    noise, real = torch.randn(32, 32, 1, 1), torch.randn(32, 3, 32, 32)
    generator = wrap(generator, noise, optimizer=optimizer_g)
    discriminator = wrap(discriminator, real, optimizer=optimizer_d)
    for _ in range(steps):
        real = torch.randn(32, 3, 32, 32)
        discriminator.zero_grad()
        label = torch.full((32,), 1.0)
        meter.begin()
        output = discriminator(real)
        error_real = criterion(output, label)
        error_real.backward()
        noise = torch.randn(32, 32, 1, 1)
        fake = generator(noise)
        label.fill_(0.0)
        output = discriminator(fake.detach())
        error_fake = criterion(output, label)
        error_fake.backward()
        meter.end()
        optimizer_d.step()
        generator.zero_grad()
        label.fill_(1.0)
        meter.begin()
        output = discriminator(fake)
        error_g = criterion(output, label)
        error_g.backward()
        meter.end()
        optimizer_g.step()
        yield error_real + error_fake + error_g
