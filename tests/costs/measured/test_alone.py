"""Seconds of an operation by itself, of a graph that was traced elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxremat.costs.measured.alone import alone_s
from fxremat.costs.measured.cache import CostCache
from fxremat.errors import CostError

aten = torch.ops.aten


def traced(function: Any, *args: Tensor, mode: str = "fake") -> dict[Any, fx.Node]:
    """Operations of a trace, by what they call."""
    graph = make_fx(function, tracing_mode=mode)(*args).graph
    return {node.target: node for node in graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_more_work_takes_longer(mode: str) -> None:
    def function(small: Tensor, large: Tensor) -> tuple[Tensor, Tensor]:
        return small @ small, torch.bmm(large, large)

    found = traced(function, torch.ones(8, 8), torch.ones(2, 256, 256), mode=mode)
    cache = CostCache()
    small, large = (alone_s(found[op], cache) for op in (aten.mm.default, aten.bmm.default))
    assert 0 < small < large


def test_a_size_takes_no_guard_with_it() -> None:
    node = traced(lambda x: x @ x.t(), torch.ones(40, 24), mode="symbolic")[aten.mm.default]
    environment = node.meta["val"].shape[0].node.shape_env
    before = len(environment.guards)
    alone_s(node, CostCache())
    assert len(environment.guards) == before


def test_views_and_parts_of_a_result_take_no_time() -> None:
    def function(x: Tensor) -> Tensor:
        values, _places = x.view(-1, 4).max(1)
        return values

    found = traced(function, torch.ones(8, 8))
    cache = CostCache()
    views = [node for op, node in found.items() if op is not aten.max.dim]
    assert views and all(alone_s(node, cache) == 0 for node in views)
    assert alone_s(found[aten.max.dim], cache) > 0


def test_what_was_measured_is_not_measured_again() -> None:
    node = traced(lambda x: x @ x, torch.ones(64, 64))[aten.mm.default]
    cache = CostCache()
    assert alone_s(node, cache) == alone_s(node, cache)
    assert len(cache.operation_s) == 1


def test_what_cannot_be_run_alone_is_named() -> None:
    node = traced(lambda x: x @ x, torch.ones(64, 64))[aten.mm.default]

    def refuses(*_args: Any) -> Tensor:
        raise RuntimeError("no kernel")

    node.target = refuses
    with pytest.raises(CostError, match="mm"):
        alone_s(node, CostCache())
