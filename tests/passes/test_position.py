"""Backward nodes stand with the forward operation that they differentiate."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor, nn

from fxremat import torch_compat
from fxremat.passes.stages.position import Positions, locate
from tests.fused import with_units
from tests.harness import Captured, capture, captured
from tests.sized import capture_sized

models = pytest.mark.parametrize(
    "name", ["gpt", "tied", "outputs", "wavenet", "gru", "hf_t5", "densenet121", "autocast_inside"]
)


@models
def test_forward_positions_are_the_order_of_operations(name: str):
    joint = captured(name).joint
    positions = locate(joint)
    operations = [n for n in joint.forward if n.target is not operator.getitem]
    assert [positions.forward[n] for n in operations] == list(range(len(operations)))
    assert positions.count == len(operations)
    for node in joint.forward:
        if node.target is operator.getitem:
            assert positions.forward[node] == positions.forward[node.args[0]]


@models
def test_descending_positions_are_a_valid_order(name: str):
    joint = captured(name).joint
    positions = locate(joint)
    assert positions.backward.keys() == set(joint.backward)
    assert all(0 <= p < positions.count for p in positions.backward.values())
    index = {node: i for i, node in enumerate(joint.backward)}
    order = sorted(joint.backward, key=lambda n: (-positions.backward[n], index[n]))
    done = set()
    for node in order:
        missing = [n for n in node.all_input_nodes if n in index and n not in done]
        assert not missing, f"{node} runs before {missing}"
        done.add(node)


@models
def test_no_backward_node_stands_above_what_it_reads(name: str):
    joint = captured(name).joint
    positions = locate(joint)
    for node in joint.backward:
        for source in node.all_input_nodes:
            if source in positions.backward:
                assert positions.backward[node] <= positions.backward[source]


def test_results_of_one_operation_stand_with_it():
    """Even where it must wait for a value that the forward computes late."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(4)),
        *(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(8, 4, 3), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.LogSoftmax(-1)),
    )
    x = torch.randn(3, 3, 12, 12)
    joint = with_units(capture_sized(model, (x,), dims=[(0, 2, 3)], apart=True)).joint
    positions = locate(joint)
    results = [n for n in joint.backward if n.target is operator.getitem]
    assert results
    for node in results:
        assert positions.backward[node] == positions.backward[node.args[0]]


def test_a_backward_node_stands_with_its_forward_operation():
    """Along a chain without branches nothing has a reason to stand elsewhere."""
    width, depth = 8, 6
    model = nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(width, width), nn.Tanh())))
    step = capture(model, (torch.randn(4, width),))
    positions = locate(step.joint)
    tanh = [n for n in step.joint.forward if "tanh" in str(n.target)]
    tanh_backward = [n for n in step.joint.backward if "tanh_backward" in str(n.target)]
    assert len(tanh) == len(tanh_backward) == depth
    for forward, backward in zip(tanh, reversed(tanh_backward), strict=True):
        assert torch_compat.sequence_number(forward) == torch_compat.sequence_number(backward)
        assert positions.backward[backward] == positions.forward[forward]


class Shared(nn.Module):
    """One weight, read at both ends: its gradient is a sum that belongs to the first end."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = (x @ self.weight).tanh()
        return x


def test_sums_of_gradients_stand_with_the_lowest_term():
    joint = capture(Shared(), (torch.randn(4, 8),)).joint
    positions = locate(joint)
    sums = [n for n in joint.backward if str(n.target) == "aten.add.Tensor"]
    assert len(sums) == 3
    for node in sums:
        assert positions.backward[node] == min(positions.backward[a] for a in node.args)


class Seldom(nn.Module):
    """The backward needs a scale that depends on no gradient."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        x = x * weight
        x = torch.nn.functional.layer_norm(x, (8,))
        return nn.functional.leaky_relu(x).norm()


def test_what_depends_on_no_gradient_is_computed_where_it_is_read():
    step: Captured = capture(
        Seldom(), (torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True))
    )
    positions: Positions = locate(step.joint)
    backward = set(step.joint.backward)
    gradients = set(step.joint.tangents)
    for node in step.joint.backward:
        if gradients.intersection(node.all_input_nodes):
            gradients.add(node)
    free = [n for n in step.joint.backward if n not in gradients]
    assert free, "this model has such nodes"
    for node in free:
        readers = [positions.backward[user] for user in node.users if user in backward]
        assert positions.backward[node] == max(readers)


@pytest.mark.parametrize("name", ["gpt", "hf_gpt2", "inception"])
def test_random_draws_of_the_backward_keep_their_order(name: str):
    joint = captured(name).joint
    positions = locate(joint)
    draws = [positions.backward[n] for n in joint.backward if torch_compat.draws_random_numbers(n)]
    assert draws == sorted(draws, reverse=True)
