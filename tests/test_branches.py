"""Branches: found where the forward falls apart, and kept apart in the backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxremat.passes.branches import TRUNK, branch_at
from fxremat.passes.linearize import Line, linearize
from fxremat.passes.storage import is_tensor
from tests.harness import capture, captured
from tests.models import ZOO

JOINS = {
    "siamese": 2,
    "siamese_resnet": 2,
    "triplet": 3,
    "triplet_resnet": 3,
    "image_recipe": 2,
    "coca": 2,
    "two_texts": 2,
    "hf_clip": 2,
}

every_join = pytest.mark.parametrize("name", JOINS)


@pytest.mark.parametrize("name", ZOO)
def test_these_models_are_joins_and_no_others(name: str):
    assert len(captured(name).line.branch_ends) == JOINS.get(name, 0)


def branch_of(line: Line, stage: int) -> int:
    return branch_at(line.branch_ends, stage)


@every_join
def test_no_activation_of_a_branch_is_read_in_another(name: str):
    line = captured(name, input_gradients=True).line
    for node in line.joint.forward:
        if not is_tensor(node) or node in line.pinned or node in line.views:
            continue
        here = branch_of(line, line.stage_of[node])
        for user in node.users:
            if here != TRUNK and user in line.stage_of:
                assert user not in line.sums
                assert branch_of(line, line.stage_of[user]) in (here, TRUNK)


@every_join
def test_only_sums_read_gradients_of_another_branch(name: str):
    line = captured(name, input_gradients=True).line
    backward = set(line.joint.backward)
    for node in line.joint.backward:
        sources = [n for n in node.all_input_nodes if n in backward]
        if node in line.sums:
            stages = {line.stage_of[n] for n in sources if n not in line.sums}
            stages = stages.union(*(line.sums[n] for n in sources if n in line.sums))
            assert stages == line.sums[node]
            assert len({branch_of(line, stage) for stage in stages} - {TRUNK}) > 1
            assert line.stage_of[node] == min(stages)
            continue
        here = branch_of(line, line.stage_of[node])
        for source in sources:
            assert source not in line.sums
            assert branch_of(line, line.stage_of[source]) in (here, TRUNK)


@pytest.mark.parametrize("name", ["siamese_resnet", "triplet", "two_texts"])
def test_every_shared_parameter_has_its_gradients_summed(name: str):
    line = captured(name).line
    shared = sum(1 for g in line.joint.backward_outputs if g in line.sums)
    parameters = sum(1 for p in ZOO[name].build().parameters())
    assert shared == parameters


@every_join
def test_asked_for_a_line_there_are_no_branches(name: str):
    line = linearize(captured(name).joint, join=False)
    assert line.branch_ends == ()
    assert not line.sums


@pytest.mark.parametrize("name", ["siamese", "siamese_resnet", "triplet", "two_texts"])
def test_equal_branches_are_cut_alike(name: str):
    line = captured(name).line
    sizes = [[len(stage.forward) for stage in line.stages[a:b]] for a, b in _ranges(line)]
    least = min(map(len, sizes))
    assert max(map(len, sizes)) <= least + 1  # a view of the last one's end, before they meet
    # What they compute alike from no activation (a mask) is computed once, in the first.
    pairs = [pair for own in sizes for pair in zip(own[: least - 1], sizes[0], strict=False)]
    assert all(own <= first for own, first in pairs)
    assert all(own[: least - 1] == sizes[-1][: least - 1] for own in sizes[1:])


def _ranges(line: Line) -> list[tuple[int, int]]:
    return list(zip((0, *line.branch_ends), line.branch_ends, strict=False))


class Towers(nn.Module):
    """Two towers; ``mix`` says what they share."""

    def __init__(self, mix: str):
        super().__init__()
        self.mix = mix
        self.left = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.right = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.stem = nn.Linear(16, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if self.mix == "stem":
            x = y = self.stem(x).tanh()
        if self.mix == "interleaved":
            for left, right in zip(self.left, self.right, strict=True):
                x, y = left(x).tanh(), right(y).tanh()
            return (x * y).sum()
        for left in self.left:
            x = left(x).tanh()
        for index, right in enumerate(self.right):
            y = right(y + x if self.mix == "cross" and index == 3 else y).tanh()
        if self.mix == "drops":
            x, y = nn.functional.dropout(x), nn.functional.dropout(y)
        return (x, y) if self.mix == "outputs" else (x * y).sum()


def towers(mix: str) -> Line:
    return capture(Towers(mix), (torch.randn(32, 16), torch.randn(32, 16))).line


@pytest.mark.parametrize("mix", ["nothing", "outputs", "interleaved", "drops"])
def test_towers_are_branches_in_whatever_order_they_were_written(mix: str):
    line = towers(mix)
    assert len(line.branch_ends) == 2
    first, second = (line.stages[a:b] for a, b in _ranges(line))
    assert sum(len(s.forward) for s in first) == sum(len(s.forward) for s in second)
    assert len(line.stages) > line.branch_ends[-1], "there is a trunk, be it empty"


def test_a_stem_that_both_read_makes_a_line():
    assert towers("stem").branch_ends == ()


def test_a_branch_ends_where_it_reads_the_other():
    line = towers("cross")
    lengths = [sum(len(s.forward) for s in line.stages[a:b]) for a, b in _ranges(line)]
    assert lengths == [8, 6]
