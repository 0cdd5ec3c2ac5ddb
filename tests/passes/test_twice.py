"""Backwards that write what their products read compute what was computed, and are given less."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from fxremat.passes.fuse.again import computed_twice
from fxremat.passes.fuse.kinds import Kind, kinds_of
from fxremat.passes.joint.build import rebuilt
from fxremat.passes.joint.graph import JointGraph
from tests.fused import STEPS, WIDTH, fused, run_fused, taken_apart
from tests.harness import Captured, run_traced
from tests.models.bits import assert_bitwise_equal


class Layer(nn.Module):
    """A product, an activation, a product that reads it in its backward, and so does dropout's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.down(functional.gelu(self.up(x))), 0.5)


STEPS_HERE = STEPS | {"layer": lambda: (Layer(), (torch.randn(64, WIDTH),))}


@pytest.fixture(scope="module", params=STEPS_HERE)
def step(request: pytest.FixtureRequest) -> Captured:
    model, args = STEPS_HERE[request.param]()
    return taken_apart(model, *args)


def twice_in(step: Captured) -> tuple[fx.GraphModule, JointGraph]:
    module = computed_twice(step.line)
    return module, rebuilt(step.line.joint, module)


def test_it_computes_the_same(step: Captured):
    module, _ = twice_in(step)
    ours, theirs = run_fused(step, module), run_traced(step)
    assert_bitwise_equal(ours.outputs, theirs.outputs)
    assert_bitwise_equal(ours.gradients, theirs.gradients)
    assert torch.equal(ours.generator, theirs.generator)


def test_forwards_are_as_they_were_and_only_pointwise_values_are_computed_twice(step: Captured):
    _, joint = twice_in(step)
    before = {n.name: str(n.target) for n in (*step.joint.forward, *step.joint.backward)}
    assert [n.name for n in joint.forward] == [n.name for n in step.joint.forward]
    kinds = kinds_of(joint)
    more = [n for n in joint.backward if n.name not in before]
    assert len(more) + len(before) == len(joint.forward) + len(joint.backward)
    assert {kinds[n] for n in more} <= {Kind.POINTWISE, Kind.VIEW}
    assert {str(n.target) for n in more} <= set(before.values())
    assert joint.mutated.isdisjoint(s for n in more for s in n.all_input_nodes)


def test_a_backward_is_not_given_an_activation():
    step = taken_apart(Layer(), torch.randn(64, WIDTH))
    _, joint = twice_in(step)

    def saved_bytes(own: JointGraph) -> int:
        backward = set(own.backward)
        saved = own.storages.of(n for n in own.forward if not backward.isdisjoint(n.users))
        return own.storages.total(saved)

    activation_bytes = 64 * 4 * WIDTH * 4
    assert saved_bytes(step.joint) - saved_bytes(joint) == activation_bytes


class Long(nn.Module):
    """All that a product's backward reads is computed of one value, each by two ways."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x @ y
        for _ in range(200):
            x = x + x.sin()
        return x @ y


def test_long_chains_take_no_time_to_look_through():
    step = taken_apart(Long(), *(torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(2)))
    module, _ = twice_in(step)
    theirs = run_traced(step)
    for own in (module, fused(step)):
        assert_bitwise_equal(run_fused(step, own).gradients, theirs.gradients)
