"""What makes two traced steps the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxremat.passes.joint.digest import Digests, digest, structure_digest
from fxremat.passes.joint.fixed_sizes import fix_sizes
from tests.harness import capture
from tests.sized import capture_sized


class Model(nn.Module):
    def __init__(self, *, slope: float = 0.1, tanh: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.slope, self.tanh = slope, tanh
        self.layer = nn.Linear(8, 8, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.leaky_relu(self.layer(x), self.slope)
        return torch.dropout(y.tanh() if self.tanh else y, 0.5, True) * 2


def digests(model: nn.Module, x: Tensor) -> Digests:
    step = capture(model, (x,))
    return digest(step.traced, forward_output_count=step.output_count, mutated_primals=step.mutated)


X = torch.randn(4, 8)


@pytest.fixture(scope="module")
def first() -> Digests:
    return digests(Model(), X)


def test_another_capture_is_the_same_whatever_its_values(first: Digests):
    nn.Linear(3, 3)(torch.randn(2, 3)).sum().backward()  # sequence numbers go on
    assert digests(Model(), torch.randn(4, 8)) == first


def test_another_operation_is_another_model(first: Digests):
    other = digests(Model(tanh=True), X)
    assert other.operations != first.operations
    assert other.code != first.code
    assert other.inputs == first.inputs
    assert digests(Model(bias=False), X).operations != first.operations


def test_sizes_and_dtypes_are_told_of_the_inputs(first: Digests):
    longer = digests(Model(), torch.randn(6, 8))
    assert longer.operations == first.operations
    assert longer.code != first.code
    changed = [(a, b) for a, b in zip(first.inputs, longer.inputs, strict=True) if a != b]
    assert changed == [("float32[4, 8]", "float32[6, 8]")]
    double = digests(Model().double(), X.double())
    assert double.code != first.code
    assert all("float64" in shape for shape in double.inputs)


@pytest.mark.parametrize(
    ("model", "x"),
    [(Model(slope=0.2), X), (Model(), torch.randn(8, 4).T), (Model(), torch.randn(9, 8)[:4])],
    ids=["a constant", "strides", "a part of a larger storage"],
)
def test_the_code_is_of_all_that_a_kernel_sees(first: Digests, model: nn.Module, x: Tensor):
    other = digests(model, x)
    assert (other.operations, other.inputs) == (first.operations, first.inputs)
    assert other.code != first.code


class _OfX(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        return (x @ self.weight).relu() + torch.ones(x.shape[0], 1)


class _OfY(_OfX):
    def forward(self, y):
        return (y @ self.weight).relu() + torch.ones(y.shape[0], 1)


def _digest_of(model: nn.Module, batch: int) -> Digests:
    step = capture_sized(model, (torch.ones(batch, 4),), dims=[(0,)])
    fixed, _sizes = fix_sizes(step.traced)
    return digest(fixed, forward_output_count=step.output_count, mutated_primals=step.mutated)


def test_names_of_symbols_make_no_difference_but_sizes_do():
    first, other = _digest_of(_OfX(), 5), _digest_of(_OfY(), 5)
    assert first == other
    larger = _digest_of(_OfX(), 6)
    assert larger.operations == first.operations
    assert larger.code != first.code
    assert larger.inputs != first.inputs


def on_devices(*indices: int) -> Digests:
    """A graph that makes a tensor on each of some GPUs, whatever there is here."""
    graph = torch.fx.Graph()
    made = []
    for index in indices:
        where = {"device": torch.device("cuda", index)}
        made.append(graph.call_function(torch.ops.aten.arange.default, (4,), where))
        made[-1].meta["val"] = torch.empty(4, device="meta")
    graph.output(tuple(made))
    module = torch.fx.GraphModule(nn.Module(), graph)
    return digest(module, forward_output_count=len(made), mutated_primals=())


def test_processes_have_gpus_of_their_own_but_as_many():
    assert on_devices(0, 0) == on_devices(1, 1)
    assert on_devices(0, 1) == on_devices(2, 5)
    assert on_devices(0, 0).code != on_devices(0, 1).code


class _Shard(nn.Module):
    """Of an embedding: rows from ``first`` on, and a part of them."""

    def __init__(self, first: int = 0, *, part: int = 0, scale: float = 2.0, dim: int = 0) -> None:
        super().__init__()
        self.first, self.part, self.scale, self.dim = first, part, scale, dim
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        rows = (x - self.first).clamp(0, 7).split(2)[self.part]
        return self.weight[rows].softmax(self.dim) * self.scale


def _outline_of(model: nn.Module) -> str:
    return structure_digest(capture(model, (torch.arange(4) + 8,)).traced)


def test_places_of_shards_make_no_difference_to_an_outline():
    assert _outline_of(_Shard(8, part=1)) == _outline_of(_Shard())


@pytest.mark.parametrize("other", [{"scale": 3.0}, {"dim": 1}], ids=["a float", "a dimension"])
def test_other_constants_do(other: dict[str, float]):
    assert _outline_of(_Shard(**other)) != _outline_of(_Shard())


def test_an_outline_is_of_sizes_and_operations():
    first, longer = capture(Model(), (X,)).traced, capture(Model(), (torch.randn(6, 8),)).traced
    assert structure_digest(first) != structure_digest(longer)
    assert structure_digest(first) != structure_digest(capture(Model(tanh=True), (X,)).traced)
    assert structure_digest(first) == structure_digest(
        capture(Model(), (torch.randn(4, 8),)).traced
    )
