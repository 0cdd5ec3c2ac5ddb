"""Workspaces of convolutions at a size are those that they take there."""

from __future__ import annotations

from fxremat.costs.cache import CostCache
from fxremat.costs.library import with_convolutions
from fxremat.costs.scaled import Anchor, ScaledCosts
from tests.sized import at_size, symbolic


def test_convolutions_take_what_is_measured_at_that_size():
    step, at = symbolic("unet", (3, 32, 64)), at_size("unet", (3, 32, 64), (2, 64, 32))
    anchor = Anchor(step.joint.sizes.hints, step.measured.costs)
    costs = ScaledCosts.of(step.line, step.blocks, [anchor]).at(at.values)
    cache = CostCache()
    found = with_convolutions(costs, step.line, at.values, cache)
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
    assert with_convolutions(costs, step.line, at.values, cache) == found
    assert cache.workspace_bytes == known


def test_where_there_are_none_nothing_is_run():
    step = symbolic("gpt", (3, 24))
    cache = CostCache()
    costs = step.measured.costs
    assert with_convolutions(costs, step.line, step.joint.sizes.hints, cache) is costs
    assert not cache.workspace_bytes
