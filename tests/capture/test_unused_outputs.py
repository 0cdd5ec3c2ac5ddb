"""Outputs that the loss does not use: no gradient, no memory, the same bits, no silence."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxremat
from fxremat.errors import BackwardError
from tests.models import ZOO
from tests.models.bits import assert_bitwise_equal
from tests.models.reference import run_step
from tests.trials import attempt, compiled, measured_bytes

pytestmark = pytest.mark.usefixtures("quick_search")

PARTIAL = (
    "hf_gpt2",
    "hf_llama",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("hf_llama_states", "hf_t5", "hf_clip")
    ),
)
"""Models that return more than their loss."""


class Various(nn.Module):
    """Outputs whose form depends on a flag; one of them never has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 4))

    def forward(self, x: Tensor, *, whole: bool = True) -> tuple[Tensor, ...]:
        y = self.body(x)
        share = (y > 0).float().mean()
        return (y.square().mean(), y, share) if whole else (y,)


def test_an_output_that_never_had_a_gradient_has_none():
    model, x = Various(), torch.randn(64, 8)
    loss, y, share = fxremat.compile(model, x, 1.0, loss=lambda out: out[0])(x)
    assert loss.requires_grad
    assert y.requires_grad
    assert not share.requires_grad
    share.numpy()


def test_outputs_of_another_form_keep_their_gradients():
    model, x = Various(), torch.randn(64, 8)
    call = fxremat.compile(model, x, "1 MiB", loss=lambda out: out[0])
    call(x, whole=False)[0].sum().backward()
    found = [p.grad for p in model.parameters()]
    eager = Various()
    eager(x, whole=False)[0].sum().backward()
    for ours, theirs in zip(found, eager.parameters(), strict=True):
        assert ours is not None
        assert theirs.grad is not None
        assert torch.equal(ours, theirs.grad)


class Two(nn.Module):
    """Two outputs from one stem, one of them large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(8, 32)
        self.body = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(32, 32), nn.GELU())))
        self.small = nn.Linear(32, 1)
        self.large = nn.Linear(32, 512)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.body(self.stem(x))
        return {"large": self.large(hidden), "small": self.small(hidden)}


def _small(outputs: dict[str, Tensor]) -> Tensor:
    return functional.mse_loss(outputs["small"], torch.ones(64, 1))


def _step(model: nn.Module, call: Any, x: Tensor) -> list[Tensor | None]:
    model.zero_grad(set_to_none=True)
    _small(call(x)).backward()
    return [p.grad for p in model.parameters()]


def test_gradients_are_those_of_eager():
    model, x = Two(), torch.randn(64, 8)
    expected = [None if g is None else g.clone() for g in _step(model, model, x)]
    call = fxremat.compile(model, x, "min", loss=_small)
    for ours, theirs in zip(_step(model, call, x), expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


class Weighed(nn.Module):
    """Scores whose gradient the loss makes in another layout than they lie in.

    How the convolution's bias sums it up follows the layout.
    """

    def __init__(self, order: tuple[int, ...] = (0, 2, 3, 1)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.order, self.back = order, tuple(order.index(dim) for dim in range(4))
        self.body, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = self.head(self.body(x).relu())
        scores = scores.permute(self.order).clone(memory_format=torch.contiguous_format)
        scores = scores.permute(self.back) * 1.5
        weights = torch.ones(scores.shape).cumsum(3).cumsum(2).cumsum(1).sin()
        return {"loss": (scores * weights).sum(), "scores": scores}


ORDERS = {"channels last": (0, 2, 3, 1), "transposed": (0, 1, 3, 2), "reversed": (3, 2, 1, 0)}


def _gradients(model: nn.Module, call: Any, x: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    call(x)["loss"].backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("drop_unused", [False, True])
@pytest.mark.parametrize("budget", ["min", 1.0])
def test_their_gradient_lies_as_that_of_aot_eager(
    order: tuple[int, ...], drop_unused: bool, budget: str | float
):
    model, x = Weighed(order), torch.randn(4, 3, 32, 32)
    expected = _gradients(model, torch.compile(model, backend="aot_eager"), x)
    torch._dynamo.reset()
    loss = fxremat.Loss(operator.itemgetter("loss"), drop_unused=drop_unused)
    call = fxremat.compile(model, x, budget, loss=loss)
    assert_bitwise_equal(_gradients(model, call, x), expected)


def test_their_gradient_lies_as_that_of_aot_eager_at_other_sizes():
    model = Weighed()
    call = fxremat.compile(model, torch.randn(4, 3, 32, 32), 1.0, loss=operator.itemgetter("loss"))
    for shape in ((3, 3, 24, 40), (2, 3, 16, 16)):
        x = torch.randn(shape)
        found = _gradients(model, call, x)
        reference = torch.compile(model, backend="aot_eager", dynamic=True)
        assert_bitwise_equal(found, _gradients(model, reference, x))
    assert len(call._training.graphs) == 2


@pytest.mark.parametrize(("order", "count"), [((0, 2, 3, 1), 1), ((0, 1, 2, 3), 0)])
def test_their_gradient_is_copied_only_into_another_layout(order: tuple[int, ...], count: int):
    loss = operator.itemgetter("loss")
    call = fxremat.compile(Weighed(order), torch.randn(4, 3, 32, 32), 1.0, loss=loss)
    (graph,) = call._training.graphs
    made = [node.target for node in graph.joint.backward]
    assert made.count(torch.ops.aten.clone.default) == count
    assert torch.ops.aten.add.Tensor not in made


def test_no_gradient_of_them_is_set_aside():
    x = torch.randn(64, 8)
    large_bytes = 64 * 512 * 4
    strict = {"assume": "strict"}
    used = fxremat.plan(Two(), x, "min", loss=lambda o: _small(o) + o["large"].sum(), **strict)
    unused = fxremat.plan(Two(), x, "min", loss=_small, **strict)
    assert unused.budget_bytes <= used.budget_bytes - large_bytes


def test_the_measured_peak_is_within_the_budget():
    model, x = Two(), torch.randn(64, 8)
    call = fxremat.compile(model, x, "min", loss=_small)
    measured = fxremat.measure_step(model, lambda: _step(model, call, x))
    assert measured.peak_bytes <= call.plan.predicted_peak_bytes <= call.plan.budget_bytes


def test_a_gradient_after_all_is_refused():
    model, x = Two(), torch.randn(64, 8)
    call = fxremat.compile(model, x, 1.0, loss=_small)
    outputs = call(x)
    assert outputs["large"].requires_grad
    with pytest.raises(BackwardError, match=r"output 0 of shape \(64, 512\).*loss="):
        (outputs["small"].sum() + outputs["large"].sum()).backward()


def test_what_is_dropped_takes_no_memory_in_the_backward():
    model, x = Two(), torch.randn(64, 8)
    large_bytes = 64 * 512 * 4
    expected = [None if g is None else g.clone() for g in _step(model, model, x)]
    call = fxremat.compile(model, x, "min", loss=fxremat.Loss(_small, drop_unused=True))
    held = fxremat.plan(model, x, "min", loss=_small)
    assert call.plan.budget_bytes <= held.budget_bytes - large_bytes
    assert call(x)["large"] is None
    for ours, theirs in zip(_step(model, call, x), expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)
    measured = fxremat.measure_step(model, lambda: _step(model, call, x))
    assert measured.peak_bytes <= call.plan.predicted_peak_bytes <= call.plan.budget_bytes


def test_a_class_of_outputs_lacks_what_is_dropped():
    entry = ZOO["hf_llama"]
    args, kwargs = entry.sample(0)
    model, call = compiled(entry, "min", loss=fxremat.Loss(entry.loss, drop_unused=True))
    outputs = call(*args, **kwargs)
    assert outputs.logits is None
    del outputs
    assert measured_bytes(entry, model, call) <= call.plan.budget_bytes
    model.zero_grad(set_to_none=True)
    entry.loss(call(*args, **kwargs)).backward()
    found = [p.grad for p in model.parameters()]
    torch._dynamo.reset()
    eager = entry.build()
    entry.loss(eager(*args, **kwargs)).backward()
    for ours, theirs in zip(found, eager.parameters(), strict=True):
        assert ours is not None
        assert theirs.grad is not None
        assert torch.equal(ours, theirs.grad)


@pytest.mark.parametrize("name", PARTIAL)
def test_models_that_return_more_than_their_loss(name: str):
    entry = ZOO[name]
    model, call = compiled(entry, 1.0, input_gradients=True, loss=entry.loss)
    expected = run_step(entry, model, call, input_gradients=True)
    assert call._training.loss_needs.unused is not None
    torch._dynamo.reset()
    eager = entry.build()
    for budget in ("min", 0.9):
        attempt(entry, budget, expected, loss=entry.loss)
    found = run_step(entry, eager, eager, input_gradients=True)
    assert_bitwise_equal(found, expected)
