"""Optimizers in few bits, fused ones, and ones that step inside the backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.works_with.subjects import blocks, rows
from tests.works_with.training import BUDGETS, Subject, check

torchao_optim = pytest.importorskip("torchao.optim")
bitsandbytes = pytest.importorskip("bitsandbytes")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("fresh_dynamo", "quick_search"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "fused AdamW": lambda own: torch.optim.AdamW(own, lr=1e-3, fused=True),
    "bitsandbytes AdamW8bit": lambda own: bitsandbytes.optim.AdamW8bit(own, lr=1e-3),
    "bitsandbytes PagedAdamW8bit": lambda own: bitsandbytes.optim.PagedAdamW8bit(own, lr=1e-3),
    "torchao AdamW8bit": lambda own: torchao_optim.AdamW8bit(own, lr=1e-3),
    "torchao AdamW4bit": lambda own: torchao_optim.AdamW4bit(own, lr=1e-3),
    "torchao AdamWFp8": lambda own: torchao_optim.AdamWFp8(own, lr=1e-3),
}


@functools.cache
def trained_by(name: str) -> Callable[[], Subject]:
    return lambda: Subject(blocks, rows, optimizer=OPTIMIZERS[name])


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_another_kind(name: str, budget: Any):
    check(trained_by(name), budget)
