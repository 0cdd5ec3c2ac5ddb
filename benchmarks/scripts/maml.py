"""MAML by torch.func: a step on each task inside the loss."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional

from benchmarks.scripts import Meter, Wrap

CALLS = None


def sines(tasks: int, shots: int) -> tuple[Tensor, Tensor]:
    """Points on sines of random amplitude and phase."""
    amplitude, phase = 0.1 + 4.9 * torch.rand(tasks, 1, 1), 3.14 * torch.rand(tasks, 1, 1)
    x = 10 * torch.rand(tasks, shots, 1) - 5
    return x, amplitude * torch.sin(x - phase)


def train(wrap: Wrap, meter: Meter, steps: int) -> Iterator[Tensor]:
    """Train by Adam on the loss after one inner step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    x, y = sines(4, 128)
    model = wrap(net, x[0])
    params = dict(model.named_parameters())

    def inner(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(functional_call(model, weights, (x,)), y)

    for _ in range(steps):
        x, y = sines(4, 256)
        optimizer.zero_grad()
        meter.begin()
        losses = []
        for xs, ys in zip(x, y, strict=True):
            grads = grad(inner)(params, xs[:128], ys[:128])
            adapted = {name: p - 0.01 * grads[name] for name, p in params.items()}
            losses.append(inner(adapted, xs[128:], ys[128:]))
        loss = torch.stack(losses).mean()
        loss.backward()
        meter.end()
        optimizer.step()
        yield loss
