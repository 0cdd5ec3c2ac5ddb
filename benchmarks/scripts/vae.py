"""A variational autoencoder: the model returns a tuple, the loss is outside."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.scripts import Meter, Wrap


class VAE(nn.Module):
    """Encoder, a draw, decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, 200)
        self.fc21 = nn.Linear(200, 20)
        self.fc22 = nn.Linear(200, 20)
        self.fc3 = nn.Linear(20, 200)
        self.fc4 = nn.Linear(200, 784)

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        """A draw of the normal distribution."""
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Reconstruction, mean and logarithm of the variance."""
        hidden = functional.relu(self.fc1(x.view(-1, 784)))
        mu, logvar = self.fc21(hidden), self.fc22(hidden)
        z = self.reparameterize(mu, logvar)
        return torch.sigmoid(self.fc4(functional.relu(self.fc3(z)))), mu, logvar


def loss_function(recon_x: Tensor, x: Tensor, mu: Tensor, logvar: Tensor) -> Tensor:
    """Reconstruction and divergence, summed."""
    bce = functional.binary_cross_entropy(recon_x, x.view(-1, 784), reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def train(wrap: Wrap, meter: Meter, steps: int) -> Iterator[Tensor]:
    """Train by Adam."""
    torch.manual_seed(1)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = torch.rand(512, 1, 28, 28)
    model = wrap(model, data, optimizer=optimizer)
    for _ in range(steps):
        data = torch.rand(512, 1, 28, 28)
        optimizer.zero_grad()
        meter.begin()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        meter.end()
        optimizer.step()
        yield loss
