"""bfloat16 autocast, around the step and inside the forward."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from tests.models.gpt import GPTConfig, gpt_entry
from tests.models.zoo import Args, Kwargs, ZooModel, drawn_once, seeded, sum_of_squares


class AutocastMLP(nn.Module):
    """Half of the blocks compute in bfloat16, the other half in float32."""

    def __init__(self, *, width: int = 48, blocks: int = 6):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Dropout(0.1),
                nn.Linear(4 * width, width),
            )
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        half = len(self.blocks) // 2
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            for block in self.blocks[:half]:
                x = x + block(x)
        for block in self.blocks[half:]:
            x = x + block(x)
        return x


def _rows(seed: int) -> tuple[Args, Kwargs]:
    with seeded(seed):
        return (torch.randn(256, 48),), {}


_CONFIG = GPTConfig(vocabulary=96, context=32, width=64, blocks=4, dropout=0.1)

ZOO = [
    ZooModel(
        name="autocast_inside",
        build=drawn_once(AutocastMLP),
        sample=_rows,
        loss=sum_of_squares,
        draws=True,
    ),
    replace(
        gpt_entry("autocast_around", _CONFIG, batch=2, length=32),
        autocast=torch.bfloat16,
    ),
]
BENCH: list = []
