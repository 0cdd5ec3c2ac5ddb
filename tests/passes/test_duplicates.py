"""Equal operations become one where that takes no memory, and only there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.harness import Captured, capture, captured, keep_all_ran, run_traced
from tests.models.bits import assert_bitwise_equal


class Twice(nn.Module):
    """Two branches from one function, then a product that reads both."""

    def __init__(self, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]):
        super().__init__()
        self.first, self.second = first, second
        self.weight = nn.Parameter(torch.linspace(-1, 1, 4096).reshape(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weight
        left = self.first(x)
        return ((left @ self.weight) * (self.second(x) @ self.weight)).sum()


def step_of(first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> Captured:
    return capture(Twice(first, second), (torch.randn(64, 64),))


def count(step: Captured, name: str) -> int:
    return sum(name in str(node.target) for node in step.joint.forward)


def check_bits(step: Captured) -> None:
    ours, theirs = keep_all_ran(step), run_traced(step)
    assert_bitwise_equal(ours.outputs, theirs.outputs)
    assert_bitwise_equal(ours.gradients, theirs.gradients)
    assert torch.equal(ours.generator, theirs.generator)


def test_what_the_backward_keeps_anyway_is_computed_once():
    step = step_of(torch.sigmoid, torch.sigmoid)
    assert count(step, "sigmoid") == 1
    check_bits(step)


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        (lambda x: x.clamp(min=0.5).exp(), lambda x: x.clamp(min=0.25).exp(), "exp"),
        (lambda x: torch.pow(x, 3), lambda x: torch.pow(x, 3.0), "pow"),
        (
            lambda x: functional.dropout(x, 0.5),
            lambda x: functional.dropout(x, 0.5),
            "rng.draw",
        ),
    ],
)
def test_other_arguments_and_draws_stay_two(
    first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor], name: str
):
    step = step_of(first, second)
    names = name.rsplit(".", maxsplit=1)[-1]
    assert count(step, names) == 2
    check_bits(step)


def test_what_nobody_would_keep_is_computed_again():
    """A sum of two tensors is read by no backward: holding it would take memory."""
    step = step_of(lambda x: (x + 1).sigmoid(), lambda x: (x + 1).tanh())
    assert count(step, "add") == 2
    check_bits(step)


class Both(nn.Module):
    """Returns two equal tensors that a caller may write to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x @ self.weight
        return x.sigmoid(), x.sigmoid()


def test_results_do_not_become_aliases():
    step = capture(Both(), (torch.randn(64, 64),))
    assert count(step, "sigmoid") == 2
    check_bits(step)


def test_a_mask_for_every_layer_is_one_mask():
    """Each layer of this model makes the same one."""
    step = captured("hf_llama")
    masks = [node for node in step.joint.forward if "where" in str(node.target)]
    assert len(masks) == 1
    check_bits(step)


class Positions(nn.Module):
    """Positions, made twice and looked at in two ways."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * torch.arange(8.0).unsqueeze(0)).sin() * torch.arange(8.0).unsqueeze(1)


def test_views_of_what_is_made_once_share_its_storage():
    step = capture(Positions(), (torch.randn(8, 8, requires_grad=True),))
    assert count(step, "arange") == 1
    views = [n for n in step.joint.forward if "unsqueeze" in str(n.target)]
    assert len(views) == 2
    assert len(step.joint.storages.of([*views, views[0].args[0]])) == 1
    check_bits(step)


class Views(nn.Module):
    """Equal sequences of numbers, of which each view that stays is of another one."""

    def forward(self, x: Tensor) -> Tensor:
        one, other = torch.arange(64), torch.arange(64)
        return ((x * one[None]) * (x + other[:, None]) * (x - one[:, None])).sum()


def test_a_view_that_stays_may_be_of_a_tensor_that_is_gone():
    step = capture(Views(), (torch.randn(64, 64, requires_grad=True),))
    assert count(step, "arange") == 1
    assert count(step, "unsqueeze") == 2
    check_bits(step)
