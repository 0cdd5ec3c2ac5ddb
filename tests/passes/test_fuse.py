"""The graph with units computes what the graph without them does."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from fxremat.effort import USUAL
from fxremat.passes.fuse.kinds import Kind, kinds_of
from fxremat.passes.fuse.unit import Unit, Units
from fxremat.passes.joint import rng
from fxremat.passes.joint.build import rebuilt
from fxremat.passes.joint.sizes import layouts_of
from fxremat.passes.stages.linearize import linearize
from fxremat.runtime.views import look
from tests.fused import (
    STEPS,
    WIDTH,
    Buffers,
    Images,
    Language,
    MeanAlone,
    fused,
    run_fused,
    square,
    taken_apart,
    units_in,
)
from tests.harness import Captured, run_traced
from tests.models.bits import assert_bitwise_equal


@pytest.fixture(scope="module", params=STEPS)
def step(request: pytest.FixtureRequest) -> Captured:
    model, args = STEPS[request.param]()
    return taken_apart(model, *args)


def test_it_computes_the_same(step: Captured):
    module = fused(step)
    assert units_in(module)
    ours, theirs = run_fused(step, module), run_traced(step)
    assert_bitwise_equal(ours.outputs, theirs.outputs)
    assert_bitwise_equal(ours.gradients, theirs.gradients)
    assert torch.equal(ours.generator, theirs.generator)


def test_each_state_is_of_its_draw(step: Captured):
    """A state is recorded after the draw before, and draws are as they were."""

    def told(nodes: Any) -> list[str]:
        return [n.name for n in nodes if rng.is_state(n) or rng.draws(n)]

    assert told(fused(step).graph.nodes) == told(step.joint.module.graph.nodes)


def test_it_is_a_step_as_it_was(step: Captured):
    """What is left of the traced operations lies as it lay, and stages can be found in it."""
    module = fused(step)
    joint = rebuilt(step.joint, module)
    line = linearize(joint, USUAL)
    assert [n.name for n in joint.primals] == [n.name for n in step.joint.primals]
    assert {n for stage in line.stages for n in stage.backward} == set(joint.backward)
    before = {n.name: layouts_of(n) for n in step.joint.module.graph.nodes}
    for node in module.graph.nodes:
        if node.name in before and node.target is not operator.getitem:
            assert layouts_of(node) == before[node.name]


def test_a_unit_is_several_operations_and_what_does_not_fuse_is_left(step: Captured):
    module = fused(step)
    for node in units_in(module):
        unit = node.target
        assert isinstance(unit, Unit)
        assert len(unit.operations) >= 2 or unit.operations[-1] == "clone"
        assert unit.__name__.isidentifier()
    kinds = kinds_of(step.joint)
    alone = {n.name for n in step.joint.forward if kinds[n] is Kind.ALONE}
    assert alone <= {n.name for n in module.graph.nodes}


class Turned(nn.Module):
    """A product, the transpose of it, laid out anew, and another product."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x).t().contiguous() @ x


def test_a_copy_is_a_unit_where_it_lays_memory_out_anew():
    module = fused(taken_apart(Turned(), torch.randn(8, 8, requires_grad=True)))
    assert "clone" in {n.target.operations[-1] for n in units_in(module)}
    assert not [n for n in module.graph.nodes if n.target is torch.ops.aten.clone.default]


def test_names_are_those_of_any_other_capture():
    def names() -> list[str]:
        return [str(n.target) for n in units_in(fused(taken_apart(Images(), *args)))]

    args = STEPS["images"]()[1]
    assert names() == names()


def test_equal_layers_share_their_units():
    def distinct(layers: int) -> int:
        units = Units()
        fused(taken_apart(Language(layers), torch.randint(50, (2, 16))), units)
        names = [unit.__name__ for unit in units]
        assert len(set(names)) == len(names)
        return len(names)

    counts = {layers: distinct(layers) for layers in (3, 5)}
    assert counts[3] == counts[5]


def test_what_runs_once_is_in_no_unit_with_what_may_run_again():
    """The old value of a buffer is gone when something is computed again."""
    step = taken_apart(Buffers(), torch.randn(16, WIDTH))
    module = fused(step)
    joint = rebuilt(step.joint, module)
    kept = joint.storages.of(n for n in joint.forward_outputs if n is not None)
    readers = [n for n in units_in(module) if joint.mutated.intersection(n.all_input_nodes)]
    assert readers
    for node in readers:
        results = [n for n in node.users if n.name.startswith("getitem")] or [node]
        assert kept.issuperset(joint.storages.of(results))


def test_several_results_of_which_one_leads_to_a_buffer():
    step = taken_apart(MeanAlone(), torch.randn(8, requires_grad=True))
    assert_bitwise_equal(run_fused(step, fused(step)).outputs, run_traced(step).outputs)


class Views(nn.Module):
    """Views of a product, of pointwise operations, and of what a library returns."""

    def forward(self, x: Tensor, kernel: Tensor) -> tuple[Tensor, ...]:
        product = (x @ x).unsqueeze(0)
        fused = (x.sin() * 2).reshape(1, 1, WIDTH, WIDTH)
        found = functional.conv2d(fused, kernel)
        return product @ product, found.flatten() @ found.flatten()


def test_a_view_of_what_surely_lies_so_is_a_look_and_others_stay():
    step = taken_apart(Views(), square(), torch.randn(1, 1, 3, 3, requires_grad=True))
    module = fused(step)
    kinds = {n.name: kind for n, kind in kinds_of(step.joint).items()}
    seen = set()
    for node in module.graph.nodes:
        if kinds.get(node.name) is Kind.VIEW:
            seen.add(node.target is look)
            assert (node.target is look) == surely_as_traced(node.all_input_nodes[0])
    assert seen == {True, False}


def surely_as_traced(node: fx.Node) -> bool:
    """Whether what ``node`` returns lies one way, whatever the library that makes it."""
    if node.target is operator.getitem:
        node = node.all_input_nodes[0]
    products = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
    primal = node.op == "placeholder" and not node.name.startswith("tangents")
    return primal or isinstance(node.target, Unit) or node.target in products
