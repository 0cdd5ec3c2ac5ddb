"""Models that only benchmarks use: tiny operations in long rows, and what planning is timed on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.models.gpt import GPTConfig, gpt_entry
from tests.models.hf import llama
from tests.models.recurrent import UnrolledGRU
from tests.models.zoo import Args, Kwargs, ZooModel, drawn_once, seeded, sum_of_squares


class Residual(nn.Module):
    """Blocks of a norm, two small layers and a sum."""

    def __init__(self, *, blocks: int = 60, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)
            )
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(rows, width)``, in and out."""
        for block in self.blocks:
            x = x + block(x)
        return x


class Twice(nn.Module):
    """An encoder of 6 layers run on two inputs: branches that share every parameter."""

    def __init__(self, *, width: int = 128, layers: int = 6) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, layers)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        """Two batches of shape ``(batch, length, width)``; how alike their means are."""
        left, right = self.encoder(one).mean(1), self.encoder(other).mean(1)
        return (left @ right.T).logsumexp(1).mean()


def _entry(name: str, build: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> ZooModel:
    def sample(seed: int) -> tuple[Args, Kwargs]:
        with seeded(seed):
            return tuple(torch.randn(*shape) for shape in shapes), {}

    return ZooModel(name=name, build=drawn_once(build), sample=sample, loss=sum_of_squares)


def _narrow_llama(layers: int) -> ZooModel:
    return llama(
        f"llama_narrow{layers}",
        vocabulary=512,
        width=128,
        inner=344,
        layers=layers,
        batch=4,
        length=128,
        heads=4,
        key_value_heads=2,
    )


def _words(count: int) -> ZooModel:
    """A small Llama whose logits are most of what it takes."""
    return llama(
        f"llama_words{count}",
        vocabulary=count,
        width=64,
        inner=172,
        layers=2,
        batch=1,
        length=4096,
        heads=4,
        key_value_heads=2,
    )


def _encoder(length: int) -> ZooModel:
    """An encoder of one long sequence."""

    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(32, 2, 128, batch_first=True, dropout=0.0)
        return nn.TransformerEncoder(layer, 2)

    return _entry(f"encoder{length}", build, (1, length, 32))


def _deep_gpt(blocks: int) -> ZooModel:
    """A GPT of many small blocks: its graph is large, its step is not."""
    config = GPTConfig(vocabulary=256, context=64, width=64, blocks=blocks)
    return gpt_entry(f"gpt{blocks}_narrow", config, batch=4, length=64)


_TINY_GPT = GPTConfig(vocabulary=64, context=32, width=32, heads=2, blocks=12)

_EACH = (
    _entry("blocks60", Residual, (8, 16)),
    _entry("gru48", lambda: UnrolledGRU(steps=48), (8, 48, 16)),
    _entry("gru500", lambda: UnrolledGRU(steps=500), (8, 500, 16)),
    _entry("encoder_twice", Twice, (8, 64, 128), (8, 64, 128)),
    gpt_entry("gpt12_tiny", _TINY_GPT, batch=2, length=32),
    *map(_narrow_llama, (8, 16, 32, 64)),
    *map(_deep_gpt, (48, 96, 384, 960)),
    *map(_words, (4000, 32_000, 128_000)),
    *map(_encoder, (2048, 16_384)),
)

ENTRIES: dict[str, ZooModel] = {entry.name: entry for entry in _EACH}
