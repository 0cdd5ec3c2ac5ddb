"""Convolutions get channels last, and the step around them sees nothing of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from fxremat import torch_compat
from fxremat.effort import USUAL
from fxremat.passes.fuse.layout import with_channels_last
from fxremat.passes.joint.build import build_joint_graph
from fxremat.passes.joint.fixed_sizes import fix_sizes
from fxremat.passes.stages.linearize import linearize
from tests.fused import taken_apart
from tests.harness import SEED, Captured, flatten, run_traced

aten = torch.ops.aten
CONVOLUTIONS = {aten.convolution.default: (0,), aten.convolution_backward.default: (0, 1)}
"""And which of their arguments are images."""


class Net(nn.Module):
    """Convolutions, norms, a sum of two ways, a view that needs channels second, a product."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.out = nn.Linear(8 * 16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.one(x)).relu()
        y = functional.max_pool2d(self.two(x) + x, 2)
        return self.out(y.view(len(y), -1)), x


class Volumes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv3d(2, 4, 3), nn.Conv3d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).sin())


MODELS: dict[str, tuple[type[nn.Module], tuple[int, ...], torch.memory_format]] = {
    "images": (Net, (2, 3, 8, 8), torch.channels_last),
    "volumes": (Volumes, (2, 2, 6, 6, 6), torch.channels_last_3d),
}


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[Captured, fx.GraphModule, torch.memory_format]:
    model, shape, wanted = MODELS[request.param]
    # A bias before a norm has a gradient of zero: what is left of it is rounding, in float32 1e-5.
    batch = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    step = taken_apart(model().double(), batch)
    return step, with_channels_last(step.traced), wanted


def strides(nodes: Any) -> list[Any]:
    return [n.meta["val"].stride() if isinstance(n, fx.Node) else n for n in nodes]


def test_inputs_and_results_of_the_step_lie_as_ever(case: Any):
    step, module, _ = case
    assert module is not step.traced
    for old, new in zip(ends(step.traced), ends(module), strict=True):
        assert strides(old) == strides(new)


def test_what_lies_as_ever_is_not_copied():
    """A weight of one pixel has its elements in the same order, channels last or not."""
    model = nn.Sequential(nn.Conv2d(4, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 3)).double()
    step = taken_apart(model, torch.randn(2, 4, 6, 6, dtype=torch.float64))
    module = with_channels_last(step.traced)
    _, results = ends(module)
    made = [n for n in results if isinstance(n, fx.Node)]
    copied = [n.meta["val"].shape for n in made if n.target is aten.clone.default]
    assert copied == [(2, 4, 4, 4), (4, 8, 3, 3)]
    assert strides(results) == strides(ends(step.traced)[1])


def ends(module: fx.GraphModule) -> tuple[list[Any], list[Any]]:
    """What goes in and out."""
    placeholders = module.graph.find_nodes(op="placeholder")
    return placeholders, list(module.graph.output_node().args[0])


def test_convolutions_have_channels_last(case: Any):
    _, module, wanted = case
    found = [n for n in module.graph.nodes if n.target in CONVOLUTIONS]
    assert len(found) == 4
    for node in found:
        for place in CONVOLUTIONS[node.target]:
            assert node.args[place].meta["val"].is_contiguous(memory_format=wanted)


def test_what_is_computed_element_by_element_follows():
    """Only what goes in is copied: what is between two convolutions comes out as it must."""
    step = taken_apart(Volumes(), torch.randn(2, 2, 6, 6, 6))
    module = with_channels_last(step.traced)
    copies = [n for n in module.graph.nodes if n.target is aten.clone.default]
    sources = {n.args[0].op for n in copies if n.kwargs["memory_format"] != torch.contiguous_format}
    assert sources == {"placeholder"}
    (sine,) = (n for n in module.graph.nodes if n.target is aten.sin.default)
    assert sine.meta["val"].is_contiguous(memory_format=torch.channels_last_3d)


def test_each_value_lies_as_the_graph_says(case: Any):
    """A run of the graph gives what its metadata has, and numbers as close as sums in any order."""
    step, module, _ = case
    seen = 0

    class Checking(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            nonlocal seen
            value = super().run_node(n)
            if isinstance(value, Tensor) and n.op == "call_function":
                seen += 1
                assert value.shape == n.meta["val"].shape
                assert value.stride() == n.meta["val"].stride(), n.format_node()
            return value

    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(SEED)
        run = Checking(module).run
        results = flatten(run(*step.primals, *step.tangents, enable_io_processing=False))
    assert seen
    theirs = run_traced(step)
    for ours, expected in zip(results, [*theirs.outputs, *theirs.gradients], strict=True):
        torch.testing.assert_close(ours, expected)


def test_what_is_drawn_is_drawn_for_what_lies_as_ever():
    """Else it would be other numbers: they are drawn in the order of memory."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout(0.5), nn.Conv2d(8, 8, 3), nn.Sigmoid())
    step = taken_apart(model, torch.randn(2, 3, 8, 8))
    module = with_channels_last(step.traced)
    (old,), (new,) = (
        [n for n in m.graph.nodes if torch_compat.draws_random_numbers(n)]
        for m in (step.traced, module)
    )
    assert strides(old.all_input_nodes) == strides(new.all_input_nodes)


def test_stages_are_found_in_it(case: Any):
    step, module, _ = case
    joint = build_joint_graph(
        module, forward_output_count=step.output_count, mutated_primals=step.mutated
    )
    line = linearize(joint, USUAL)
    assert len(joint.backward) >= len(step.joint.backward)
    assert {n for s in line.stages for n in s.backward} == set(joint.backward)


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x).sin()


def test_a_graph_without_convolutions_is_itself():
    step = taken_apart(Products(), torch.randn(4, 8))
    assert with_channels_last(step.traced) is step.traced


def test_a_graph_of_any_size_is_itself():
    x = torch.randn(4, 3, 8, 8)
    torch._dynamo.mark_dynamic(x, 0)
    step = taken_apart(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), x, dynamic=None)
    module, sizes = fix_sizes(step.traced)
    assert sizes
    assert with_channels_last(module) is module
