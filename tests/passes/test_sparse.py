"""Sparse gradients are single operations, which plans see as bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxremat
from fxremat import torch_compat
from fxremat.errors import CaptureError
from fxremat.graph.shortfall import excess_bytes
from fxremat.passes.joint.sparse import makes_sparse, with_sparse
from fxremat.runtime.sparse import SparseOperation
from tests.harness import capture

aten = torch.ops.aten

ROWS, WIDTH, COUNT = 50, 8, 12


class Twice(nn.Module):
    """Looks up rows of one table twice, so that two sparse gradients are added."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(ROWS, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, index: Tensor) -> Tensor:
        return self.layer(self.table(index).tanh() + self.table(index.flip(0)))


@pytest.fixture(scope="module")
def traced() -> fx.GraphModule:
    return capture(Twice(), (torch.randint(0, ROWS, (COUNT,)),)).traced


def operations(module: fx.GraphModule) -> list[fx.Node]:
    return [n for n in module.graph.nodes if isinstance(n.target, SparseOperation)]


def test_a_sum_of_sparse_gradients_is_one_operation(traced: fx.GraphModule):
    made = with_sparse(traced)
    (node,) = operations(made)
    assert not any(map(makes_sparse, made.graph.nodes))
    assert any(map(makes_sparse, traced.graph.nodes))  # the graph that was given is as it was
    value = node.meta["val"]
    assert value.dtype is torch.uint8
    assert value.numel() == 2 * COUNT * (8 + 4 * WIDTH)
    assert [n.name for n in operations(with_sparse(traced))] == [node.name]
    assert str(operations(with_sparse(traced))[0].target) == str(node.target)


def test_its_result_is_that_of_the_operations(traced: fx.GraphModule):
    made, drawn = with_sparse(traced), torch.Generator().manual_seed(0)
    values = [
        torch.randint(0, ROWS, (COUNT,)) if v.dtype is torch.int64 else
        torch.randn(v.shape, generator=drawn)
        for v in (n.meta["val"] for n in traced.graph.find_nodes(op="placeholder"))
    ]  # fmt: skip
    before, after = (
        fx.Interpreter(module).run(*values, enable_io_processing=False) for module in (traced, made)
    )
    for one, other in zip(before, after, strict=True):
        if one is not None and not one.is_sparse:
            assert torch.equal(one, other)
    (one,), (other,) = (
        [g for g in all if g is not None and g.is_sparse] for all in (before, after)
    )
    assert torch.equal(one._indices(), other._indices())
    assert torch.equal(one._values(), other._values())
    (node,) = operations(made)
    taken = [torch.zeros(n.meta["val"].shape, dtype=n.meta["val"].dtype) for n in node.args]
    assert node.target.stand_in(*taken).numel() == node.meta["val"].numel()


def test_a_sparse_result_holds_no_more_than_its_parts():
    graph = fx.Graph()
    index, values = graph.placeholder("index"), graph.placeholder("values")
    call = (1, 1, [9, 4], index, values)
    options = {"dtype": torch.float32, "layout": torch.sparse_coo, "device": "cpu"}
    target = aten._sparse_coo_tensor_with_dims_and_tensors.default
    graph.output(graph.call_function(target, call, options))
    run = SparseOperation(fx.GraphModule(nn.Module(), graph), "0" * 64)
    many = torch.randn(100, 4)
    part = run(torch.zeros(1, 3, dtype=torch.int64), many[:3])
    assert torch.equal(part._values(), many[:3])
    assert torch_compat.storages_of(part).keys().isdisjoint(torch_compat.storages_of(many))
    whole = run(torch.zeros(1, 100, dtype=torch.int64), many)
    assert not torch_compat.storages_of(whole).keys().isdisjoint(torch_compat.storages_of(many))


def test_a_sparse_gradient_of_an_output_is_refused(traced: fx.GraphModule):
    graph = fx.Graph()
    primal = graph.placeholder("primals_1")
    tangent = graph.placeholder("tangents_1")
    primal.meta["val"] = torch.zeros(3, 3)
    tangent.meta["val"] = torch.eye(3).to_sparse()
    graph.output((primal, tangent))
    with pytest.raises(CaptureError, match="tangents_1"):
        with_sparse(fx.GraphModule(nn.Module(), graph))


class Tables(nn.Module):
    """Layers behind a table whose gradient is sparse."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.table: Any = kind(500, 32, sparse=True)
        if isinstance(self.table, nn.EmbeddingBag):
            self.table.mode = "sum"
        layers = (nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in "abc")
        self.layers = nn.Sequential(*layers)

    def forward(self, index: Tensor) -> Tensor:
        return self.layers(self.table(index))


@pytest.mark.usefixtures("fresh_dynamo", "quick_search")
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_model_with_a_sparse_gradient_is_planned(kind: type[nn.Module], accumulate: bool):
    found = []
    for ours in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, index = Tables(kind), torch.randint(0, 500, (256, 4))
        call = torch.compile(model, backend="aot_eager")
        if ours:
            call = fxremat.compile(model, index, "min", accumulate=accumulate)
        for _ in range(3):
            if not accumulate:
                model.zero_grad()
            call(index).square().sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        assert gradients[0].is_sparse
        found.append([g.coalesce().to_dense() if g.is_sparse else g for g in gradients])
    assert all(map(torch.equal, *found))
    assert not excess_bytes(call.plan.measured_peak_bytes, call.plan.budget_bytes)
    assert call.plan.budget_bytes < 0.8 * call.plan.baseline_peak_bytes
