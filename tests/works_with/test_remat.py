"""Regions of torch_remat inside the model are constraints of the plan, as tags of SAC are."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

import fxremat
from tests.models.zoo import seeded
from tests.works_with.subjects import BLOCKS, Block, rows
from tests.works_with.training import Subject, check

torch_remat = pytest.importorskip("torch_remat")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("fresh_dynamo", "quick_search"),
]


class Checkpointed(nn.Module):
    """Each block is a checkpoint, in which one product is saved."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(0):
            self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = torch_remat.checkpoint(region_name=f"block {number}")(through)(block, x)
        return x


def through(block: Block, x: Tensor) -> Tensor:
    hidden = torch_remat.region(block.up, "up", recompute=False)(block.norm(x))
    torch_remat.recompute_needs_tensor(hidden)
    return x + block.down(nn.functional.gelu(hidden))


def subject() -> Subject:
    return Subject(Checkpointed, rows)


@pytest.mark.parametrize("budget", [1.0, "min"])
def test_regions_are_kept_within_the_budget(budget: Any):
    check(subject, budget, saves=False)  # regions save more than aot_eager does


def test_a_plan_keeps_what_a_region_saves():
    plan = fxremat.plan(Checkpointed(), *rows(0), "min")
    kept = [own for own in plan.decided if own.answer == "keep" and own.by == "tag"]
    assert sum("mm" in own.operation for own in kept) == BLOCKS
