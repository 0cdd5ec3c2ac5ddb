"""Branches: found where the forward falls apart, and kept apart in the backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxremat.passes.joint.graph import is_tensor
from fxremat.passes.stages.linearize import Line
from fxremat.passes.stages.position import Segments
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
    "composed": 2,
}
"""With how many outermost branches."""

NESTED = {"composed": (2, 2, 4, 4)}
"""Those with branches in branches, and into which segment each flows."""

every_join = pytest.mark.parametrize("name", JOINS)


@pytest.mark.parametrize("name", ZOO)
def test_these_models_are_joins_and_no_others(name: str):
    assert len(captured(name).line.branch_ends) == JOINS.get(name, 0)


@every_join
def test_branches_are_found_in_branches(name: str):
    segments = captured(name).line.segments
    assert segments.into == NESTED.get(name, (JOINS[name],) * JOINS[name])


def path_of(line: Line, stage: int) -> tuple[int, ...]:
    """The segment of a stage and those after it."""
    return line.segments.path(line.segments.at(stage))


@every_join
def test_no_activation_of_a_branch_is_read_in_another(name: str):
    line = captured(name).line
    for node in line.joint.forward:
        if not is_tensor(node) or node in line.pinned or node in line.views:
            continue
        path = path_of(line, line.stage_of[node])
        for user in node.users:
            if len(path) > 1 and user in line.stage_of:
                assert user not in line.sums
                assert line.segments.at(line.stage_of[user]) in path


@every_join
def test_only_sums_read_gradients_of_another_branch(name: str):
    line = captured(name).line
    backward = set(line.joint.backward)
    for node in line.joint.backward:
        sources = [n for n in node.all_input_nodes if n in backward]
        if node in line.sums:
            stages = {line.stage_of[n] for n in sources if n not in line.sums}
            stages = stages.union(*(line.sums[n] for n in sources if n in line.sums))
            assert stages == line.sums[node]
            apart = line.segments.outmost(line.segments.at(stage) for stage in stages)
            assert len(apart) > 1
            assert line.stage_of[node] == min(stages)
            continue
        path = path_of(line, line.stage_of[node])
        for source in sources:
            assert source not in line.sums
            assert line.segments.at(line.stage_of[source]) in path


@pytest.mark.parametrize("name", ["siamese_resnet", "triplet", "two_texts"])
def test_every_shared_parameter_has_its_gradients_summed(name: str):
    line = captured(name).line
    shared = sum(1 for g in line.joint.backward_outputs if g in line.sums)
    parameters = sum(1 for p in ZOO[name].build().parameters())
    assert shared == parameters


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


class Fused(nn.Module):
    """Three towers, of which the first two are fused, and go on, before they meet the third."""

    def __init__(self, *, drops: bool = False):
        super().__init__()
        self.drops = drops
        self.towers = nn.ModuleList(
            nn.ModuleList(nn.Linear(16, 16) for _ in range(4)) for _ in range(4)
        )

    def run(self, tower: int, x: Tensor) -> Tensor:
        for layer in self.towers[tower]:
            x = layer(x).tanh()
        return nn.functional.dropout(x) if self.drops else x

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        fused = self.run(2, self.run(0, x) * self.run(1, y))
        return (fused * self.run(3, z)).sum()


@pytest.mark.parametrize("drops", [False, True])
def test_fused_towers_are_branches_of_a_branch(drops: bool):
    x = tuple(torch.randn(32, 16) for _ in range(3))
    line = capture(Fused(drops=drops), x).line
    assert line.segments.into == (2, 2, 4, 4)
    assert [line.name_of(line.segments.start(s)).split("_stage")[0] for s in range(5)] == [
        "branch0_0",
        "branch0_1",
        "branch0",
        "branch1",
        "trunk",
    ]
    assert line.branch_ends == line.segments.ends[2:]
    assert line.segments != Segments()
