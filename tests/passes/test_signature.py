"""Equal keys mean equal code: what may share a module does, and nothing else."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, fx, nn

from fxremat.costs.measured.cost import stage_blocks
from fxremat.passes.joint.graph import is_getitem
from fxremat.passes.stages.block import Mode, block_key, build_graph, node_key, tensor_key
from tests.harness import Captured, capture, captured

X = torch.zeros(4, 6)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (X, X.double()),
        (X, torch.zeros(6, 4)),
        (X, torch.zeros(6, 4).t()),  # strides
        (X[:, :3], torch.zeros(4, 3)),
        (X[0], X[1]),  # offset
        (X[0], torch.zeros(6)),  # the storage is larger
        (X, torch.zeros(4, 6, device="meta")),
        (3, 4),
        (None, X),
    ],
)
def test_tensors_that_differ(a, b):
    assert tensor_key(a) != tensor_key(b)


def test_tensors_that_do_not():
    assert tensor_key(X) == tensor_key(torch.ones(4, 6))
    assert tensor_key(X[1]) == tensor_key(torch.rand(4, 6)[1])


def keys_of(model: nn.Module, *args: Tensor) -> set[object]:
    """Keys of all blocks of a model."""
    step = capture(model, args)
    return {block_key(b, step.joint.storages) for b in all_blocks(step)}


def all_blocks(step: Captured):
    for index in range(len(step.line.stages)):
        yield from stage_blocks(step.line, step.blocks, index)


class Scaled(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x)).tanh()


FUNCTIONS = {
    "0.5": lambda x: x * 0.5,
    "0.25": lambda x: x * 0.25,
    "-0.0": lambda x: x + -0.0,
    "0.0": lambda x: x + 0.0,
    "1": lambda x: x + 1,
    "1.0": lambda x: x + 1.0,
    "softmax 0": lambda x: x.softmax(0),
    "softmax 1": lambda x: x.softmax(1),
    "slice 1": lambda x: x[1:],
    "slice 2": lambda x: x[2:],
    "alpha": lambda x: torch.add(x, x, alpha=2),
    "twice": lambda x: torch.add(x, x),
    "inf": lambda x: x.masked_fill(x > 0, float("inf")),
    "-inf": lambda x: x.masked_fill(x > 0, float("-inf")),
    "to double": lambda x: x.to(torch.float64),
    "to bfloat16": lambda x: x.to(torch.bfloat16),
}


@pytest.fixture(scope="module")
def keys() -> dict[str, set[object]]:
    x = torch.randn(4, 8)
    return {name: keys_of(Scaled(function), x) for name, function in FUNCTIONS.items()}


@pytest.mark.parametrize(("a", "b"), list(itertools.combinations(FUNCTIONS, 2)))
def test_models_that_differ_in_one_constant(keys: dict[str, set[object]], a: str, b: str):
    assert keys[a] != keys[b]


def test_the_same_model_twice(keys: dict[str, set[object]]):
    assert keys_of(Scaled(FUNCTIONS["0.5"]), torch.randn(4, 8)) == keys["0.5"]


def test_shapes_and_dtypes_matter(keys: dict[str, set[object]]):
    other = keys_of(Scaled(FUNCTIONS["0.5"]), torch.randn(5, 8))
    common = {line[0] for key in other & keys["0.5"] for line in key[2]}
    assert common <= {"aten.t.default"}, "views of the weights are the same, and nothing else"


def test_inputs_that_share_memory_are_told_from_others():
    """What frees one of two such inputs must know whether memory comes back."""
    step = captured("gpt")
    with_two = next(
        b for b in all_blocks(step) if len(b.inputs) > 1 and len(b.reads) == len(b.inputs)
    )
    storages = step.joint.storages
    merged = dict(storages.of_node)
    merged[with_two.inputs[1]] = merged[with_two.inputs[0]]
    table = type(storages)(storages.nbytes, storages.owner, merged)
    assert block_key(with_two, storages) != block_key(with_two, table)


def text_of(graph: fx.Graph) -> str:
    """The operations, with values numbered instead of named."""
    names = {node: f"v{i}" for i, node in enumerate(graph.nodes)}
    return "\n".join(
        f"{names[n]} {n.target} {fx.map_arg((n.args, n.kwargs), names.__getitem__)}"
        for n in graph.nodes
        if n.op == "call_function"
    )


@pytest.mark.parametrize("name", ["gpt", "hf_llama", "resnet50"])
def test_equal_keys_mean_equal_code(name: str):
    step = captured(name)
    codes: dict[object, str] = {}
    shared = 0
    for block in all_blocks(step):
        code = text_of(build_graph(block))
        key = block_key(block, step.joint.storages)
        shared += key in codes
        assert codes.setdefault(key, code) == code
    assert shared > len(codes) / 2, "blocks of a deep model are mostly alike"


def test_modes_are_told_apart():
    step = captured("resnet50")
    line = step.line
    for index in range(len(line.stages)):
        outputs = frozenset(line.stages[index].saved)
        first, again = (step.blocks(index, mode, outputs) for mode in (Mode.FIRST, Mode.AGAIN))
        assert block_key(first, step.joint.storages) != block_key(again, step.joint.storages)


def test_what_an_operation_costs_depends_on_its_mode_only_where_it_runs_differently():
    step = captured("gpt")
    blocks = list(all_blocks(step))
    first = {n: node_key(n, b) for b in blocks if b.mode is Mode.FIRST for n in b.nodes}
    again = {n: node_key(n, b) for b in blocks if b.mode is Mode.AGAIN for n in b.nodes}
    both = [n for n in first.keys() & again.keys() if not is_getitem(n)]
    different = [n for n in both if first[n] != again[n]]
    assert different
    assert len(different) < len(both)
    assert {str(n.args[2]) for n in different} == {"aten.native_dropout.default"}
