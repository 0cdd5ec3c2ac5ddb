"""Workspaces of convolutions and units at a size are those that they take there."""

from __future__ import annotations

import torch
from torch import fx, nn

from fxremat import torch_compat
from fxremat.costs.cache import CostCache
from fxremat.costs.library import with_workspaces
from fxremat.costs.scaled import ScaledCosts
from fxremat.passes.fuse.unit import Unit
from fxremat.passes.joint.sizes import layouts_of, number_at
from tests.fused import with_units
from tests.sized import at_size, capture_sized, symbolic


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
