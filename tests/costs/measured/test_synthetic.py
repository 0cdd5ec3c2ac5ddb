"""Made-up values: the traced dtype, shape, strides and sharing, and numbers that do no harm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxremat.costs.measured.synthetic import Synthesizer, made_up
from fxremat.torch_compat import storage_key
from tests.harness import Captured, capture, captured

models = pytest.mark.parametrize("name", ["gpt", "outputs", "integers", "autocast_inside", "gru"])


def synthesizer(step: Captured) -> Synthesizer:
    return Synthesizer(step.joint, {})


@models
def test_values_look_as_traced(name: str):
    step = captured(name)
    for node in (*step.joint.forward, *step.joint.backward):
        traced = node.meta["val"]
        if not isinstance(traced, torch.Tensor):
            continue
        (value,) = synthesizer(step).of([node]).values()
        assert value.dtype == traced.dtype
        assert value.shape == traced.shape
        assert value.stride() == traced.stride()
        assert value.storage_offset() == traced.storage_offset()
        assert value.untyped_storage().nbytes() == traced.untyped_storage().nbytes()


@models
def test_values_share_memory_as_traced(name: str):
    step = captured(name)
    nodes = [n for n in step.joint.forward if isinstance(n.meta["val"], torch.Tensor)]
    values = synthesizer(step).of(nodes)
    table = step.joint.storages
    for a in nodes[:60]:
        for b in nodes[:60]:
            shared = storage_key(values[a]) == storage_key(values[b])
            assert shared == (table.of_node[a] == table.of_node[b]), (a, b)


def test_floats_are_random_and_small_and_integers_valid_indices():
    step = captured("integers")
    nodes = [n for n in step.joint.forward if isinstance(n.meta["val"], torch.Tensor)]
    values = synthesizer(step).of(nodes)
    floats = [v for v in values.values() if v.is_floating_point() and v.numel() > 100]
    others = [v for v in values.values() if not v.is_floating_point()]
    assert floats and others
    for value in floats:
        assert value.float().std() > 0.01
        assert value.abs().max() < 1
    assert all(not value.any() for value in others)


def test_real_values_are_used_as_they_are():
    step = captured("gpt")
    real = dict(zip(step.joint.primals, step.primals, strict=True))
    values = Synthesizer(step.joint, real).of(step.joint.primals)
    assert all(values[n] is real[n] for n in step.joint.primals)


def test_held_values_come_before_made_up_ones_until_they_are_forgotten():
    step = captured("gpt")
    a, b = [n for n in step.joint.forward if isinstance(n.meta["val"], torch.Tensor)][:2]
    made = synthesizer(step)
    held = {n: torch.full_like(made.of([n])[n], 3) for n in (a, b)}
    made.hold(held)
    assert made.of([a, b]) == held
    made.keep_only([a])
    after = made.of([a, b])
    assert after[a] is held[a]
    assert after[b] is not held[b]


def test_constants_are_the_modules_own():
    step = captured("gru")
    joint = step.joint
    values = synthesizer(step).of(joint.constants)
    for node in joint.constants:
        assert values[node] is joint.module.get_buffer(str(node.target))


class Summed(nn.Module):
    """The gradient of a sum is one number, expanded."""

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh().sum()


def test_an_expanded_tensor_can_be_made():
    step = capture(Summed(), (torch.randn(5, 7, requires_grad=True),))
    (node,) = [n for n in step.joint.backward if n.meta["val"].stride() == (0, 0)]
    (value,) = synthesizer(step).of([node]).values()
    assert value.shape == (5, 7)
    assert value.stride() == (0, 0)
    assert value.untyped_storage().nbytes() == 4


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_numbers_of_eight_bits_are_random(dtype: torch.dtype):
    numbers = made_up(torch.empty(4, 5, dtype=dtype)).float()
    assert len(numbers.unique()) > 1
