"""One symbolic capture stands for every size: its graphs, its bytes, and what is refused."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from fxremat import torch_compat
from fxremat.errors import SizesError
from fxremat.passes.emit.program import keep_all
from fxremat.passes.emit.rewrite import BlockModules
from fxremat.passes.joint.build import build_joint_graph
from fxremat.passes.joint.fixed_sizes import fix_sizes
from fxremat.passes.joint.graph import build_storage_table
from fxremat.passes.joint.sizes import Size, Sizes, layouts_of
from tests.harness import Captured, capture, captured, periodic, random_schedule, run_traced
from tests.models.bits import assert_bitwise_equal
from tests.sized import AtSize, capture_sized, static, symbolic

HINTS = {"gpt": (3, 24), "hf_llama": (3, 24), "resnet50": (3,), "unet": (3, 32, 64)}
OTHERS = {
    "gpt": [(2, 64), (5, 17), (7, 2)],
    "hf_llama": [(2, 64), (5, 17)],
    "resnet50": [(2,), (5,)],
    "unet": [(2, 64, 32), (4, 64, 64)],
}
QUICK = {"gpt": [(3, 24), (2, 64), (5, 17), (7, 2)], "unet": [(3, 32, 64), (2, 64, 32)]}
"""A line and convolutions."""

EVERY = [
    pytest.param(name, sizes, marks=[] if sizes in QUICK.get(name, ()) else pytest.mark.slow)
    for name, own in OTHERS.items()
    for sizes in (HINTS[name], *own)
]

models = pytest.mark.parametrize(("name", "sizes"), EVERY, ids=str)


@models
def test_emitted_graphs_compute_what_the_step_of_that_size_does(name: str, sizes: tuple[int, ...]):
    step, alone = symbolic(name, HINTS[name]), static(name, sizes)
    at = AtSize.of(step, alone)
    truth = run_traced(alone)
    modules = BlockModules()
    count = len(step.line.stages)
    drawn = random.Random(str(sizes)).randrange(100)
    for schedule in (keep_all(count), periodic(count, 2), random_schedule(count, drawn)):
        ran = at.run(step.program(schedule), modules)
        assert_bitwise_equal(ran.outputs, truth.outputs)
        assert_bitwise_equal(ran.gradients, truth.gradients)
        assert torch.equal(ran.generator, truth.generator)


@pytest.mark.parametrize(
    ("name", "sizes"), [x for x in EVERY if x.values[0] != "hf_llama"], ids=str
)
def test_storages_are_as_large_as_those_of_the_step_of_that_size(name: str, sizes: tuple[int, ...]):
    # A Llama that is traced without symbols has two operations less, which only copy.
    step, alone = symbolic(name, HINTS[name]), static(name, sizes)
    values = AtSize.of(step, alone).values
    fixed, sizes_of_step = fix_sizes(step.traced)
    table = build_storage_table(fixed.graph)
    found = sizes_of_step.formulas(table.asked_bytes)(values)
    assert tuple(found.tolist()) == build_storage_table(alone.traced.graph).nbytes


def test_a_graph_of_numbers_stays_itself():
    traced = captured("gpt").traced
    fixed, sizes = fix_sizes(traced)
    assert fixed is traced
    assert not sizes
    assert sizes == Sizes() == captured("gpt").joint.sizes


def test_only_numbers_are_left():
    step = symbolic("gpt", HINTS["gpt"])
    before = str(step.traced.graph)
    fixed, sizes = fix_sizes(step.traced)
    assert str(step.traced.graph) == before
    assert sizes.hints == tuple(x for _ in range(2) for x in HINTS["gpt"])
    for node in fixed.graph.nodes:
        value = node.meta.get("val")
        for item in value if isinstance(value, (tuple, list)) else (value,):
            assert not isinstance(item, torch.SymInt)
        for layout in layouts_of(node) if node.op == "call_function" else ():
            assert all(isinstance(n, int) for n in layout.numbers)
    assert step.joint.sizes.values(step.primals) == sizes.hints


def check_ran_as(step: Captured, alone: Captured) -> None:
    """With everything kept, at the size of ``alone``: the bits of its own capture."""
    ran = AtSize.of(step, alone).run(step.program(keep_all(len(step.line.stages))))
    truth = run_traced(alone)
    assert_bitwise_equal(ran.outputs, truth.outputs)
    assert_bitwise_equal(ran.gradients, truth.gradients)


class _Alike(nn.Module):
    """Where a batch is 4, both masks have 16 elements."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        one = torch.ones(x.shape[0] * 4)
        two = torch.ones(x.shape[0] + 12)
        return (x.sum() * self.scale) * one, (x.mean() * self.scale) * two


def test_expressions_that_agree_at_the_capture_are_not_taken_for_one():
    model = _Alike()
    step = capture_sized(model, (torch.randn(4, 3),), dims=[(0,)])
    for batch in (4, 5, 9):
        alone = capture(model, (torch.randn(batch, 3),))
        check_ran_as(step, alone)


class _TellsSize(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.scale, x.shape[0] * 2 + x.shape[1]


def test_a_size_that_is_returned_is_that_of_the_call():
    model = _TellsSize()
    step = capture_sized(model, (torch.randn(4, 3),), dims=[(0, 1)])
    assert any(isinstance(x, Size) for x in step.joint.forward_outputs)
    alone = capture(model, (torch.randn(6, 5),))
    ran = AtSize.of(step, alone).run(step.program(keep_all(len(step.line.stages))))
    assert [x for x in ran.outputs if isinstance(x, int)] == [17]


class _Divides(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.scale * (3.0 / x.shape[0])


def test_a_fraction_of_a_size_is_that_of_the_call():
    model = _Divides()
    step = capture_sized(model, (torch.randn(4, 3),), dims=[(0,)])
    for batch in (4, 7, 11):
        alone = capture(model, (torch.randn(batch, 3),))
        check_ran_as(step, alone)


def test_a_scale_is_computed_as_at_the_size_itself():
    """The count that a norm corrects its variance by, where operations are taken apart."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    step = capture_sized(model, (torch.randn(4, 3, 8, 8),), dims=[(0, 2)], apart=True)
    for batch, height in ((4, 8), (7, 5), (3, 11)):
        alone = capture(model, (torch.randn(batch, 3, height, 8),), apart=True)
        check_ran_as(step, alone)


def test_a_graph_with_symbols_is_refused():
    step = symbolic("gpt", HINTS["gpt"])
    with pytest.raises(SizesError, match="symbols"):
        build_joint_graph(
            step.traced, forward_output_count=step.output_count, mutated_primals=step.mutated
        )


class _Scaled(nn.Module):
    """Multiplies by a number that is no sum, product or quotient of its sizes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() * (0.5 * x.shape[0] % 1.7)


def test_a_number_that_does_not_follow_sizes_is_refused_with_the_way_out():
    model, x = nn.Sequential(nn.Linear(4, 4), _Scaled()), torch.randn(6, 4)
    with pytest.raises(torch_compat.capture_failures()) as caught:
        capture_sized(model, (x,), dims=[(0, 0)])
    refused = torch_compat.failure_cause(caught.value)
    assert isinstance(refused, SizesError)
    assert "mod " in str(refused)
    assert "fxremat.compile(..., dynamic=False)" in str(refused)
