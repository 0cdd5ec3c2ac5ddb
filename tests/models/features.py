"""Small models, each with one thing that a graph rewrite can get wrong."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models.gpt import tokens
from tests.models.zoo import Args, Kwargs, ZooModel, drawn_once, seeded, sum_of_squares

WIDTH, BLOCKS = 32, 5
_LOGGER = logging.getLogger(__name__)


def _mlp(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def _mlps() -> nn.ModuleList:
    return nn.ModuleList(_mlp() for _ in range(BLOCKS))


class TiedEmbeddings(nn.Module):
    """The head is the embedding: one parameter read by the first and the last stage."""

    def __init__(self, vocabulary: int = 64):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.blocks = _mlps()
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(idx)
        for block in self.blocks:
            x = x + block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class LowRank(nn.Module):
    """A frozen linear layer and a trainable low-rank update, as in LoRA."""

    def __init__(self, width: int, rank: int = 4):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class HalfFrozen(nn.Module):
    """A wholly frozen first block (no backward reaches it), then low-rank updates."""

    def __init__(self):
        super().__init__()
        self.stem = _mlp().requires_grad_(False)
        self.blocks = nn.ModuleList(LowRank(WIDTH) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + functional.silu(block(self.norm(x)))
        return x


class InPlace(nn.Module):
    """In-place arithmetic on intermediates, and buffers that a forward updates and reads."""

    def __init__(self):
        super().__init__()
        self.blocks = _mlps()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            self.average.lerp_(x.mean(0), 0.1)
        x = x - self.average
        for block in self.blocks:
            y = block(x)
            y.mul_(0.5)
            y.add_(x)
            y[:, 0] = 1.0
            x = y.relu_()
        return x * self.calls.sqrt()


class BufferPerBlock(nn.Module):
    """Each block moves its own running mean and subtracts it, as a normalization would."""

    def __init__(self):
        super().__init__()
        self.blocks = _mlps()
        for index in range(BLOCKS):
            self.register_buffer(f"mean{index}", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            y = block(x)
            mean = self.get_buffer(f"mean{index}")
            mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
            x = x + functional.gelu(y - mean)
        return x


class SeveralOutputs(nn.Module):
    """Nested outputs: views, aliases, integers, an input and a parameter as they are."""

    def __init__(self):
        super().__init__()
        self.blocks = _mlps()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> dict[str, Any]:
        given, states = x, []
        for block in self.blocks:
            x = x + block(x) * self.scale
            states.append(x)
        return {
            "last": x,
            "states": tuple(states[1::2]),
            "nested": {"transposed": x.t(), "norms": [state.norm() for state in states]},
            "best": x.argmax(1),
            "detached": x.detach(),
            "unchanged": [given, self.scale],
        }


class NonTensors(nn.Module):
    """Flags, None, numbers and text among the inputs and the outputs."""

    def __init__(self):
        super().__init__()
        self.blocks = _mlps()

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        scale: float,
        *,
        repeats: int = 1,
        activation: str = "gelu",
        residual: bool = False,
    ) -> dict[str, Any]:
        for block in self.blocks:
            for _ in range(repeats):
                y = getattr(functional, activation)(block(x)) * scale
                x = x + y if residual else y
        if mask is not None:
            x = x * mask
        return {"x": x, "mask": mask, "blocks": len(self.blocks), "activation": activation}


class Logs(nn.Module):
    """Log messages inside the forward."""

    def __init__(self):
        super().__init__()
        self.blocks = _mlps()

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            _LOGGER.debug("block %d", index)
            x = x + block(x)
        return x


class Bits(nn.Module):
    """Integer arithmetic between the layers: shifts, comparisons, gathers."""

    def __init__(self, vocabulary: int = 64):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.blocks = _mlps()

    def forward(self, idx: Tensor, length: Tensor) -> Tensor:
        where = torch.arange(idx.shape[1], device=idx.device)
        keep = where < length[:, None]
        x = self.embedding((idx << 1) % self.embedding.num_embeddings)
        for block in self.blocks:
            order = (x[..., 0] * keep).argsort(dim=1, stable=True)
            x = x + block(x).gather(1, order[..., None].expand_as(x))
        return x.masked_fill(~keep[..., None], 0.0)


def _rows(seed: int) -> tuple[Args, Kwargs]:
    with seeded(seed):
        return (torch.randn(256, WIDTH),), {}


def _tokens(seed: int) -> tuple[Args, Kwargs]:
    return tokens(seed, vocabulary=64, batch=8, length=32), {}


def _ragged(seed: int) -> tuple[Args, Kwargs]:
    idx, _ = tokens(seed, vocabulary=64, batch=8, length=32)
    return (idx, torch.arange(25, 33, dtype=torch.int32)), {}


def _flags(seed: int) -> tuple[Args, Kwargs]:
    (x,), _ = _rows(seed)
    return (x, None, 0.5), {"repeats": 2, "activation": "silu", "residual": True}


ZOO = [
    ZooModel(
        name="tied",
        build=drawn_once(TiedEmbeddings),
        sample=_tokens,
        loss=lambda loss: loss,
        loss_inside=True,
    ),
    ZooModel(name="lora", build=drawn_once(HalfFrozen), sample=_rows, loss=sum_of_squares),
    ZooModel(
        name="inplace",
        build=drawn_once(InPlace),
        sample=_rows,
        loss=sum_of_squares,
        # The min-cut partitioner of ``aot_eager`` recomputes ``calls`` from the buffer after it
        # was updated, and gets gradients that are wrong by sqrt(2) (pytorch#197039).
        reference_backend="aot_eager_default_partitioner",
    ),
    ZooModel(name="logs", build=drawn_once(Logs), sample=_rows, loss=sum_of_squares),
    ZooModel(name="buffers", build=drawn_once(BufferPerBlock), sample=_rows, loss=sum_of_squares),
    ZooModel(name="outputs", build=drawn_once(SeveralOutputs), sample=_rows, loss=sum_of_squares),
    ZooModel(name="nontensors", build=drawn_once(NonTensors), sample=_flags, loss=sum_of_squares),
    ZooModel(name="integers", build=drawn_once(Bits), sample=_ragged, loss=sum_of_squares),
]
BENCH: list = []
