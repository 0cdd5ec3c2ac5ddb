"""Higher-order operators in a model: the same bits and peaks within budgets, for every kind."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fxremat
from tests.higher_order import (
    NOT_BUILT,
    ROWS,
    TRAINS,
    VARIANTS,
    WIDTH,
    Layers,
    cond,
    cond_with_dropout,
    model_of,
    print_shape,
    scan,
    while_loop,
)
from tests.models.reference import reference_step
from tests.models.zoo import ZooModel, sum_of_squares
from tests.trials import attempt

pytestmark = pytest.mark.usefixtures("quick_search")


def operators() -> set[str]:
    package: Any = torch._higher_order_ops
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    every = torch._ops._higher_order_ops.items()
    return {str(name) for name, own in every if type(own).__module__.startswith(package.__name__)}


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="other versions have others")
def test_every_operator_of_torch_is_trained_or_has_a_reason() -> None:
    assert operators() - {*TRAINS, *NOT_BUILT} == set()


def captured_operators(name: str) -> set[str]:
    """The higher-order operators of the graphs that Dynamo and AOTAutograd make of a model."""
    from torch._dynamo.backends.common import aot_autograd

    names: set[str] = set()

    def note(module: fx.GraphModule) -> None:
        names.update(
            node.target.__name__
            for node in module.graph.nodes
            if isinstance(node.target, torch._ops.HigherOrderOperator)
        )

    def keep(module: fx.GraphModule, _inputs: Any) -> Any:
        note(module)
        return module

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)

    def first(module: fx.GraphModule, inputs: Any) -> Any:
        note(module)
        return backend(module, inputs)

    torch._dynamo.reset()
    model = Layers(TRAINS[name], layers=3)
    torch.compile(model, backend=first)(torch.randn(ROWS, WIDTH)).sum().backward()
    return names


@pytest.mark.parametrize("name", sorted(TRAINS))
def test_the_function_of_a_kind_leads_to_its_operator(name: str) -> None:
    assert name in captured_operators(name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name == "cond_in_cond" else name
        for name in (*TRAINS, *VARIANTS)
    ],
)
def test_every_kind_trains_within_each_budget_with_the_bits_of_aot_eager(name: str) -> None:
    entry = model_of(name, {**TRAINS, **VARIANTS}[name])
    expected = reference_step(entry, input_gradients=True)
    ample = attempt(entry, 1.0, expected)
    least = attempt(entry, "min", expected)
    assert not ample.again
    between = (ample.full_bytes + 2 * least.budget_bytes) // 3
    attempt(entry, between, expected)


@pytest.mark.parametrize("function", [cond_with_dropout, print_shape, scan, while_loop])
def test_models_with_higher_order_operators_can_be_estimated(function: Any) -> None:
    x = torch.randn(ROWS, WIDTH)
    estimate = fxremat.estimate(Layers(function), x, loss=sum_of_squares)
    assert estimate.least_budget_bytes <= estimate.peak_bytes


class FlexAttention(nn.Module):
    """One head of attention over a causal mask that the module holds."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.read = nn.Linear(WIDTH, 3 * WIDTH)
        self.mask = create_block_mask(
            lambda _b, _h, q, k: q >= k, None, None, length, length, device="cpu"
        )

    def forward(self, x: Tensor) -> Tensor:
        return flex_attention(*self.read(x).chunk(3, -1), block_mask=self.mask)


def test_flex_attention_is_estimated_for_a_gpu_without_its_matrix_of_scores() -> None:
    batch, length = 4, 1024
    model, x = FlexAttention(length), torch.randn(batch, 1, length, WIDTH)
    estimate = fxremat.estimate(model, x, device="H100", loss=sum_of_squares)
    step_bytes = estimate.peak_bytes - estimate.library_bytes - estimate.workspace_bytes
    assert step_bytes < batch * length * length * 4
    with pytest.raises(NotImplementedError, match="on CPU"):
        fxremat.compile(model, x, "min", loss=sum_of_squares)(x)


def test_a_branch_that_the_sample_does_not_take_is_within_the_budget() -> None:
    """The plan counts the memory of both branches."""

    def choose(x: Tensor) -> Tensor:
        def wide(a: Tensor) -> Tensor:
            return torch.cat([a] * 16, 1).sin().sum(1, keepdim=True) * a

        return torch.cond(x.sum() > 1e5, wide, lambda a: a * 2, (x,))

    model, x = Layers(choose), torch.randn(ROWS, WIDTH)
    model = fxremat.compile(model, x, "min", loss=sum_of_squares, assume="strict")
    other = torch.full_like(x, 1e9)

    def step() -> None:
        model.zero_grad()
        sum_of_squares(model(other)).backward()

    budget = model.plan.budget_bytes
    assert fxremat.measure_step(model, step).peak_bytes <= budget == model.plan.budget_bytes


def test_a_loop_whose_end_depends_on_data_is_measured_without_running_to_its_end() -> None:
    def halve(x: Tensor) -> Tensor:
        from torch._higher_order_ops.while_loop import while_loop as run

        with torch.no_grad():
            (small,) = run(lambda a: a.abs().max() > 1e-3, lambda a: (a * 0.5,), (x.detach(),))
        return x * small

    model = fxremat.compile(Layers(halve), torch.randn(ROWS, WIDTH), "min", loss=sum_of_squares)
    sum_of_squares(model(torch.randn(ROWS, WIDTH))).backward()


@pytest.mark.parametrize("function", [cond, scan, while_loop])
def test_other_sizes_train_with_the_same_bits(function: Any) -> None:
    torch.manual_seed(0)
    plain = Layers(function)
    model = fxremat.compile(
        Layers(function), torch.randn(ROWS, WIDTH), 0.9, loss=sum_of_squares, dynamic=True
    )
    model.load_state_dict(plain.state_dict())
    torch._dynamo.reset()
    reference = torch.compile(plain, backend="aot_eager", dynamic=True)
    for rows in (ROWS, 48, 80):
        x = torch.randn(rows, WIDTH)
        for each in (reference, model):
            each.zero_grad()
            sum_of_squares(each(x)).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)


def test_plans_of_one_process_are_followed_in_another_capture() -> None:
    x = torch.randn(ROWS, WIDTH)
    first = fxremat.compile(Layers(cond), x, "min", loss=sum_of_squares)
    torch._dynamo.reset()
    second = fxremat.compile(
        Layers(cond), x, first.plan.budget_bytes, loss=sum_of_squares, plan=first.plan
    )
    assert second.plan.schedule == first.plan.schedule


class Recurrent(nn.Module):
    """A recurrent network whose iterations save values of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.write = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(0.1 * torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        from torch._higher_order_ops.scan import scan as run

        def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            made = torch.tanh(row + functional.gelu(state @ self.weight))
            return made, made * 1

        return self.write(run(step, x.new_zeros(8, WIDTH), self.read(x))[1])


@pytest.mark.parametrize("length", [48, 100])
def test_a_long_scan_is_recomputed_in_pieces(length: int) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Recurrent()

    entry = ZooModel(
        "recurrent", build, lambda _seed: ((torch.ones(length, 8, WIDTH),), {}), sum_of_squares
    )
    expected = reference_step(entry, input_gradients=True)
    ample = attempt(entry, 1.0, expected)
    least = attempt(entry, "min", expected)
    assert not ample.again
    assert least.budget_bytes < 0.8 * ample.full_bytes


def test_a_region_that_is_called_often_is_planned_inside() -> None:
    entry = model_of("region", TRAINS["invoke_subgraph"])
    args, _ = entry.sample(0)
    model = fxremat.compile(entry.build(), args, "min", loss=sum_of_squares)
    assert "gelu" in model.forward_code and "invoke_subgraph" not in model.forward_code
