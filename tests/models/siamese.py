"""A siamese network: one encoder run twice, a contrastive loss between the two results."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models.images import images
from tests.models.zoo import Args, Kwargs, ZooModel, drawn_once, seeded


class Siamese(nn.Module):
    """The shared encoder's parameters collect gradients from both passes."""

    def __init__(self, *, width: int = 16, blocks: int = 4, features: int = 32):
        super().__init__()
        layers: list[nn.Module] = []
        for index in range(blocks):
            layers += [
                nn.Conv2d(width if index else 3, width, 3, padding=1),
                nn.GroupNorm(4, width),
                nn.SiLU(),
            ]
            if index % 2:
                layers.append(nn.AvgPool2d(2))
        self.encoder = nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, features)
        )

    def forward(self, left: Tensor, right: Tensor, same: Tensor) -> Tensor:
        distance = functional.pairwise_distance(self.encoder(left), self.encoder(right))
        attract = same * distance.square()
        repel = (1 - same) * functional.relu(1 - distance).square()
        return (attract + repel).mean()


def _sample(seed: int) -> tuple[Args, Kwargs]:
    left = images(seed, batch=4, size=24)
    right = images(seed + 1, batch=4, size=24)
    with seeded(seed):
        same = torch.randint(2, (4,)).float()
    return (left, right, same), {}


ZOO = [
    ZooModel(
        name="siamese",
        build=drawn_once(Siamese),
        sample=_sample,
        loss=lambda loss: loss,
        loss_inside=True,
    )
]
BENCH: list = []
