"""Momentum contrast: a copy follows the network under no_grad, and a queue of its keys is held."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.scripts import Meter, Wrap


def encoder() -> nn.Sequential:
    """An image to a vector of 64."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 64),
    )


def train(wrap: Wrap, meter: Meter, steps: int) -> Iterator[Tensor]:
    """Train the queries' encoder by SGD."""
    torch.manual_seed(0)
    encoder_q = encoder()
    encoder_k = copy.deepcopy(encoder_q)
    for p in encoder_k.parameters():
        p.requires_grad = False
    queue = functional.normalize(torch.randn(64, 1024), dim=0)
    optimizer = torch.optim.SGD(encoder_q.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    im_q = torch.randn(32, 3, 32, 32)
    encoder_q = wrap(encoder_q, im_q, optimizer=optimizer)
    for _ in range(steps):
        image = torch.randn(32, 3, 32, 32)
        im_q, im_k = image + 0.1 * torch.randn_like(image), image.flip(3)
        meter.begin()
        q = functional.normalize(encoder_q(im_q), dim=1)
        with torch.no_grad():
            pairs = zip(encoder_q.parameters(), encoder_k.parameters(), strict=True)
            for param_q, param_k in pairs:
                param_k.data = param_k.data * 0.99 + param_q.data * 0.01
            k = functional.normalize(encoder_k(im_k), dim=1)
        l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", [q, queue.clone().detach()])
        logits = torch.cat([l_pos, l_neg], dim=1) / 0.07
        loss = functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        meter.end()
        optimizer.step()
        queue = torch.cat([k.T, queue[:, :-32]], dim=1)
        yield loss
