"""Costs at sizes at which nothing was measured."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import fx, nn

from fxremat import torch_compat
from fxremat.costs.estimated.scaled import ScaledCosts, rates_of, with_workspaces
from fxremat.costs.measured.cache import CostCache
from fxremat.costs.measured.stages import measure_line
from fxremat.effort import USUAL
from fxremat.ir import RecordedCosts
from fxremat.passes.fuse.unit import Unit
from fxremat.passes.joint.build import rebuilt
from fxremat.passes.joint.sizes import layouts_of, number_at
from fxremat.passes.split.rewrite import split
from fxremat.passes.split.run import Looks
from fxremat.passes.split.runs import Large
from fxremat.passes.stages.block import BlockCache
from fxremat.passes.stages.linearize import Line, linearize
from fxremat.passes.stages.resize import resize
from fxremat.progress import silent
from tests.fused import with_units
from tests.sized import at_size, capture_sized, symbolic

HINTS = (3, 24)


def values(batch: int, length: int) -> tuple[int, ...]:
    return (batch, length, batch, length)


@functools.cache
def scaled() -> ScaledCosts:
    """The GPT's, measured at its capture."""
    step = symbolic("gpt", HINTS)
    return ScaledCosts(step.line, step.blocks, step.measured.costs)


def seconds(costs: RecordedCosts) -> np.ndarray:
    stages = [(s.forward_s, s.rebuild_s, s.backward_s) for s in costs.stages]
    return np.array([*np.ravel(stages), *(s for _, s in costs.again_s)])


def test_at_the_size_of_the_capture_they_are_what_was_measured():
    costs = symbolic("gpt", HINTS).measured.costs
    assert scaled().at(values(*HINTS)) is costs


@pytest.mark.parametrize("sizes", [(2, 64), (5, 17), (7, 2)])
def test_storages_are_exact_and_workspaces_enough(sizes: tuple[int, int]):
    at = at_size("gpt", HINTS, sizes)
    found = scaled().at(at.values)
    assert found.storage_bytes == at.costs.storage_bytes
    assert [x[:2] for x in found.workspace_bytes] == [x[:2] for x in at.costs.workspace_bytes]
    for (_, _, mine), (_, _, real) in zip(
        found.workspace_bytes, at.costs.workspace_bytes, strict=True
    ):
        assert mine >= real
        assert (mine == 0) == (real == 0)


def test_what_is_asked_for_grows_with_the_workspace():
    """Each piece by as much; and is given back whole."""
    step = symbolic("gpt", HINTS)
    costs = step.measured.costs
    index, mode, _ = next(ran for ran in costs.workspace_bytes if ran[2])
    workspaces = tuple(
        (i, m, 3000 if (i, m) == (index, mode) else n) for i, m, n in costs.workspace_bytes
    )
    asked = ((-1, 2000), (0, 0), (-2, 1001), (-2, -1001), (-1, -2000))
    at = values(7, 40)
    plain = replace(costs, workspace_bytes=workspaces)
    in_pieces = replace(plain, asked=((index, mode, asked),))
    assert ScaledCosts(step.line, step.blocks, plain).at(at).asked == ()
    found = ScaledCosts(step.line, step.blocks, in_pieces).at(at)
    now = {(i, m): n for i, m, n in found.workspace_bytes}[index, mode]
    assert now > 3000
    ((*_, pieces),) = found.asked
    assert pieces[1] == (0, 0)
    assert pieces[0][1] == -pieces[-1][1] == math.ceil(2000 * now / 3000)
    assert pieces[2][1] == -pieces[3][1] == math.ceil(1001 * now / 3000)


def test_more_work_never_takes_less():
    rows = [seconds(scaled().at(values(b, 8 * b))) for b in (2, 3, 4, 5, 7, 8, 20)]
    assert np.all(np.array(rows) >= 0)
    assert np.all(np.diff(rows, axis=0) >= -1e-15)


def test_seconds_go_with_the_work():
    step = symbolic("gpt", HINTS)
    costs = scaled()
    first = seconds(step.measured.costs)
    small, large = seconds(costs.at(values(2, 12))), seconds(costs.at(values(30, 24)))
    assert np.all(small <= first * (1 + 1e-9))
    assert np.all(large >= first * (1 - 1e-9))
    assert np.all(large <= 10 * first * (1 + 1e-9))
    assert large.sum() > 2 * first.sum()


def test_workspaces_are_bounded_by_what_has_grown():
    step = symbolic("gpt", HINTS)
    first = step.measured.costs
    index = next(i for i, (_, _, n) in enumerate(first.workspace_bytes) if n)

    def found(nbytes: int, batch: int) -> int:
        own = list(first.workspace_bytes)
        own[index] = (*own[index][:2], nbytes)
        costs = replace(first, workspace_bytes=tuple(own))
        at = ScaledCosts(step.line, step.blocks, costs).at(values(batch, HINTS[1]))
        return at.workspace_bytes[index][2]

    assert found(300, 6) == 600
    assert found(300, 2) == 300  # not less than where less was measured
    assert found(0, 6) == 0


def test_rates_are_found_again():
    draw = np.random.default_rng(0)
    nbytes, flops = draw.uniform(1e3, 1e6, 50), draw.uniform(0, 1e7, 50)
    nbytes[:5] = flops[:5] = 0
    made = 2e-6 + 1e-10 * nbytes + 1e-11 * flops
    call_s, byte_s, flop_s = rates_of(nbytes, flops, made)
    assert call_s == pytest.approx(2e-6)
    assert byte_s == pytest.approx(1e-10)
    assert flop_s == pytest.approx(1e-11)
    assert rates_of(nbytes, flops, made - 3e-11 * flops)[2] == 0


def test_convolutions_take_what_is_measured_at_that_size():
    step, at = symbolic("unet", (3, 32, 64)), at_size("unet", (3, 32, 64), (2, 64, 32))
    costs = ScaledCosts(step.line, step.blocks, step.measured.costs).at(at.values)
    cache = CostCache()
    torch.manual_seed(7)
    generator = torch.get_rng_state()
    found = with_workspaces(costs, step.line, at.values, cache)
    assert torch.equal(torch.get_rng_state(), generator)
    nodes = tuple(step.joint.module.graph.nodes)
    checked = 0
    for mine, scaled, real in zip(
        found.workspace_bytes, costs.workspace_bytes, at.costs.workspace_bytes, strict=True
    ):
        if "convolution" in str(nodes[mine[0]].target):
            assert mine == real
            checked += 1
        else:
            assert mine == scaled
    assert checked
    known = dict(cache.workspace_bytes)
    assert with_workspaces(costs, step.line, at.values, cache) == found
    assert cache.workspace_bytes == known


def test_units_take_what_their_kernels_take_at_that_size():
    x = torch.randn(4, 64)
    model = nn.Sequential(nn.Linear(64, 64), nn.Softmax(-1), nn.Linear(64, 8), nn.LogSoftmax(-1))
    step = with_units(capture_sized(model, (x,), dims=[(0,)], apart=True))
    costs = ScaledCosts(step.line, step.blocks, step.measured.costs).at((64,))
    found = with_workspaces(costs, step.line, (64,), CostCache())
    assert found.workspace_bytes != costs.workspace_bytes
    nodes = tuple(step.joint.module.graph.nodes)
    checked = 0
    for index, _, nbytes in found.workspace_bytes:
        if isinstance(nodes[index].target, Unit):
            assert nbytes == workspace_bytes(nodes[index], 64)
            checked += 1
    assert checked


def workspace_bytes(node: fx.Node, rows: int) -> int:
    """What a unit's call takes beyond its results where the one size is ``rows``."""
    sizes = {"SIZE0": rows}
    args = [
        torch.zeros([number_at(n, sizes) for n in layouts_of(own)[0].shape])
        for own in node.all_input_nodes
    ]
    with torch_compat.AllocationLog(torch.device("cpu")) as log:
        results = node.target(*args, rows)
    made = [results] if isinstance(results, torch.Tensor) else results
    return log.peak_bytes - sum(t.untyped_storage().nbytes() for t in made)


def test_where_there_are_none_nothing_is_run():
    step = symbolic("gpt", (3, 24))
    cache = CostCache()
    costs = step.measured.costs
    assert with_workspaces(costs, step.line, step.joint.sizes.hints, cache) is costs
    assert not cache.workspace_bytes


class Wide(nn.Module):
    """An MLP whose hidden layer is larger than all else."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 4096), nn.Linear(4096, 2048)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).sin())


@pytest.mark.parametrize("hint", [3, 4, 5], ids="{} rows".format)
@pytest.mark.parametrize("rows", [2, 7, 40])
def test_parts_take_no_more_where_there_are_more_of_them(hint: int, rows: int):
    """At the capture the second part may be smaller than the first."""
    step = capture_sized(Wide(), (torch.randn(hint, 64),), dims=[[0]])
    large = Large(4 * 4096 * hint - 1)
    module = split(
        step.joint,
        large,
        None,
        early_gradients=False,
        expected={},
        looks=Looks(),
        most_operations=USUAL.run_operations,
    )
    assert module is not None
    line = linearize(rebuilt(step.joint, module), USUAL)

    def measured(line: Line) -> RecordedCosts:
        blocks = BlockCache(line)
        return measure_line(line, blocks, real={}, cache=CostCache(), progress=silent).costs

    scaled = ScaledCosts(line, BlockCache(line), measured(line))
    found = with_workspaces(scaled.at((rows,)), line, (rows,), CostCache()).workspace_bytes
    real = measured(resize(line, (rows,))).workspace_bytes
    assert any(nbytes for _, _, nbytes in real)
    for mine, expected in zip(found, real, strict=True):
        assert mine[:2] == expected[:2]
        assert mine[2] >= expected[2]
        if hint == 4 and rows > 4:
            assert mine[2] == expected[2]
