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
schedulefree = pytest.importorskip("schedulefree")
transformers = pytest.importorskip("transformers.optimization")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("fresh_dynamo", "quick_search"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]


def _schedule_free(own: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = schedulefree.AdamWScheduleFree(own, lr=1e-3)
    optimizer.train()
    return optimizer


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "fused AdamW": lambda own: torch.optim.AdamW(own, lr=1e-3, fused=True),
    "bitsandbytes AdamW8bit": lambda own: bitsandbytes.optim.AdamW8bit(own, lr=1e-3),
    "bitsandbytes PagedAdamW8bit": lambda own: bitsandbytes.optim.PagedAdamW8bit(own, lr=1e-3),
    "torchao AdamW8bit": lambda own: torchao_optim.AdamW8bit(own, lr=1e-3),
    "torchao AdamW4bit": lambda own: torchao_optim.AdamW4bit(own, lr=1e-3),
    "torchao AdamWFp8": lambda own: torchao_optim.AdamWFp8(own, lr=1e-3),
    "bitsandbytes Lion8bit": lambda own: bitsandbytes.optim.Lion8bit(own, lr=1e-4),
    "Adafactor": lambda own: torch.optim.Adafactor(own, lr=1e-3),
    "transformers' Adafactor": transformers.Adafactor,
    "schedule-free AdamW": _schedule_free,
    "SGD with momentum": lambda own: torch.optim.SGD(own, lr=1e-2, momentum=0.9),
    "foreach AdamW": lambda own: torch.optim.AdamW(own, lr=1e-3, foreach=True),
}


@functools.cache
def trained_by(name: str) -> Callable[[], Subject]:
    return lambda: Subject(blocks, rows, optimizer=OPTIMIZERS[name])


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_another_kind(name: str, budget: Any):
    check(trained_by(name), budget)
