"""A model whose layers gather their parameters, captured in a group of one process."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import _functional_collectives as functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.harness import Captured, capture

LAYERS, WIDTH, ROWS = 6, 32, 64


@contextmanager
def group_of_one(*, with_values: bool = False) -> Iterator[None]:
    """A process group that this process is alone in: no thread of a backend holds anything.

    Args:
        with_values: results are right. Torch 2.11's fake group writes none of some collectives:
            there it is a real one, whose threads hold tensors.
    """
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    if with_values and not _scatters():
        distributed.destroy_process_group()
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def _scatters() -> bool:
    result = torch.zeros(1)
    distributed.reduce_scatter_tensor(result, torch.ones(1))
    return bool(result == 1)


class Gathering(nn.Module):
    """Layers that gather two parameters each, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) / shape[0] ** 0.5)

        self.up = nn.ParameterList(parameter(WIDTH, 4 * WIDTH) for _ in range(LAYERS))
        self.down = nn.ParameterList(parameter(4 * WIDTH, WIDTH) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for up, down, norm in zip(self.up, self.down, self.norms, strict=True):
            hidden = torch.nn.functional.gelu(norm(x) @ _whole(up))
            x = x + torch.nn.functional.dropout(hidden @ _whole(down), 0.1)
        return x


def _whole(shard: Tensor) -> Tensor:
    group: Any = distributed.group.WORLD
    return functional.all_gather_tensor_autograd(shard * 1.0, 0, group)


@functools.cache
def gathering() -> Captured:
    """Its step, measured."""
    return capture(Gathering(), (torch.randn(ROWS, WIDTH, requires_grad=True),))
