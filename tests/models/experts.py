"""Mixtures of experts, as public models write them, and other models whose sizes depend on data."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, HIDDEN, EXPERTS, LAYERS, TOKENS = 16, 32, 4, 3, 512


class Experts(nn.Module):
    """A residual layer with a router and experts; the subclass says how tokens get to experts.

    Args:
        dropout: probability of a dropout inside each expert.
    """

    top = 2

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, HIDDEN), nn.SiLU(), nn.Dropout(dropout), nn.Linear(HIDDEN, WIDTH)
            )
            for _ in range(EXPERTS)
        )

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.router(x).softmax(-1).topk(self.top)
        return weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixed(self.norm(x))

    def mixed(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Loop(Experts):
    """A loop over experts, each of which looks its tokens up (Mixtral, Qwen)."""

    def mixed(self, x: Tensor) -> Tensor:
        weights, chosen = self.routed(x)
        mixed = torch.zeros_like(x)
        mask = nn.functional.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for index, expert in enumerate(self.experts):
            place, token = torch.where(mask[index])
            mixed.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return mixed


class Masked(Experts):
    """A loop over experts with a mask of booleans for each."""

    top = 1

    def mixed(self, x: Tensor) -> Tensor:
        weights, chosen = self.routed(x)
        mixed = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mask = chosen[:, 0] == index
            mixed[mask] = expert(x[mask]) * weights[mask]
        return mixed


class Sorted(Experts):
    """Tokens sorted by expert and split into lists of the experts' lengths."""

    def counted(self, chosen: Tensor) -> Tensor:
        return torch.histc(chosen.float(), EXPERTS, 0, EXPERTS - 1).long()

    def mixed(self, x: Tensor) -> Tensor:
        weights, chosen = self.routed(x)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        parts = x[order // self.top].split(self.counted(flat).tolist())
        made = torch.cat([expert(p) for expert, p in zip(self.experts, parts, strict=True)])
        weighted = made * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // self.top, weighted)


class Counted(Sorted):
    """As ``Sorted``, with ``bincount``, whose own length depends on data."""

    def counted(self, chosen: Tensor) -> Tensor:
        return torch.bincount(chosen, minlength=EXPERTS)


class Capacity(Experts):
    """Each expert takes its first tokens, up to a capacity, and drops the rest."""

    top = 1

    def mixed(self, x: Tensor) -> Tensor:
        weights, chosen = self.routed(x)
        mixed = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token = (chosen[:, 0] == index).nonzero().squeeze(-1)[: len(x) // 3]
            mixed = mixed.index_copy(0, token, expert(x[token]) * weights[token])
        return mixed


class ExpertsChoose(Experts):
    """Each expert chooses as many tokens as its capacity."""

    def mixed(self, x: Tensor) -> Tensor:
        weights, token = self.router(x).softmax(-1).t().topk(TOKENS // 4)
        mixed = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            made = expert(x[token[index]]) * weights[index, :, None]
            mixed = mixed.index_add(0, token[index], made)
        return mixed


class Shared(Loop):
    """As ``Loop``, with an expert that takes all tokens."""

    def __init__(self, dropout: float = 0.0):
        super().__init__(dropout)
        self.shared = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, WIDTH))

    def mixed(self, x: Tensor) -> Tensor:
        return super().mixed(x) + self.shared(x)


class Grouped(Experts):
    """Tokens sorted by expert, and one product for all experts, which is given offsets."""

    top = 1

    def __init__(self, dropout: float = 0.0):
        super().__init__(dropout)
        self.experts = nn.ModuleList()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * 0.1)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * 0.1)

    def mixed(self, x: Tensor) -> Tensor:
        weights, chosen = self.routed(x)
        order = chosen[:, 0].argsort(stable=True)
        counts = torch.histc(chosen.float(), EXPERTS, 0, EXPERTS - 1)
        ends = counts.cumsum(0).to(torch.int32)
        made = torch._grouped_mm(x[order].bfloat16(), self.up.bfloat16(), offs=ends)
        made = torch._grouped_mm(nn.functional.silu(made), self.down.bfloat16(), offs=ends)
        return torch.zeros_like(x).index_add(0, order, made.float() * weights[order])


class Repeated(Experts):
    """Each token is repeated as often as its first expert says."""

    def mixed(self, x: Tensor) -> Tensor:
        weights, chosen = self.routed(x)
        times = chosen[:, 0] + 1
        token = torch.arange(len(x)).repeat_interleave(times)
        made = self.experts[0](x.repeat_interleave(times, dim=0))
        return torch.zeros_like(x).index_add(0, token, made * weights[token, :1])


class Skipping(Loop):
    """A loop that skips experts without tokens, which no graph can."""

    def mixed(self, x: Tensor) -> Tensor:
        weights, chosen = self.routed(x)
        mixed = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, place = torch.where(chosen == index)
            if token.numel():
                made = expert(x[token]) * weights[token, place, None]
                mixed = mixed.index_add(0, token, made)
        return mixed


class Chosen(Experts):
    """Returns some of the tokens only, so that a size which depends on data leads out."""

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](x[x.sum(-1) > 0])


class Doubled(nn.Module):
    """Layers that each compute some tokens four times: those whose first number is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, WIDTH))
            for _ in range(LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        times = 1 + 3 * (x[:, 0] > 0).long()
        token = torch.arange(len(x)).repeat_interleave(times)
        for layer in self.layers:
            x = x + torch.zeros_like(x).index_add(0, token, layer(x[token]))
        return x


def experts(kind: type[Experts], *, layers: int = LAYERS, dropout: float = 0.0) -> nn.Module:
    """A model of some layers of experts between linear layers."""
    inner = (kind(dropout) for _ in range(layers))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *inner, nn.Linear(WIDTH, WIDTH))


def tokens(seed: int, *, count: int = TOKENS, alike: bool = False) -> Tensor:
    """Tokens that are drawn; with ``alike`` they differ little, so that few experts get them."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        x = torch.randn(count, WIDTH)
        return x[:1] + x * 1e-3 if alike else x
