"""A compiled model in the hands of a caller: whatever they do, the numbers are the reference's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import fxremat
from tests.models.bits import assert_bitwise_equal
from tests.models.zoo import seeded

WIDTH, ROWS = 16, 256
Step = Callable[[nn.Module, Any], Any]


pytestmark = pytest.mark.usefixtures("fresh_dynamo", "quick_search")


def batch(seed: int = 0, rows: int = ROWS) -> Tensor:
    with seeded(seed):
        return torch.randn(rows, WIDTH)


def blocks() -> nn.Module:
    """Everything a recomputation can get wrong: statistics and draws."""
    with seeded(0):
        return nn.Sequential(
            *(
                layer
                for _ in range(5)
                for layer in (
                    nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.GELU()
                )
            )
        )  # fmt: skip


def two_calls(_model, call):
    (call(batch(0)).sum() + call(batch(1)).square().sum()).backward()


def first_call_first(_model, call):
    a, b = call(batch(0)), call(batch(1))
    a.sum().backward()
    b.square().sum().backward()


def last_call_first(_model, call):
    a, b = call(batch(0)), call(batch(1))
    b.square().sum().backward()
    a.sum().backward()


def forwards_without_backward(_model, call):
    call(batch(0))
    call(batch(1))
    call(batch(2)).sum().backward()


def accumulation(_model, call):
    for seed in range(4):
        call(batch(seed)).sum().backward()


def retained_graph(_model, call):
    y = call(batch())
    y.sum().backward(retain_graph=True)
    y.square().sum().backward(retain_graph=True)
    y.sum().backward()


def input_gradients(_model, call):
    x = batch().requires_grad_()
    y = call(x)
    (first,) = torch.autograd.grad(y.sum(), [x], retain_graph=True)
    return first, torch.autograd.grad(y.square().sum(), [x])


def some_gradients(model, call):
    return torch.autograd.grad(call(batch()).sum(), [model[0].weight, model[16].bias])


def output_changed_in_place(_model, call):
    y = call(batch())
    y.mul_(2)
    y.sum().backward()


def parameter_hooks(model, call):
    seen: list[Tensor] = []
    model[0].weight.register_hook(lambda gradient: 2 * gradient)
    model[4].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum()))
    call(batch()).sum().backward()
    return seen


def evaluation_between_steps(_model, call):
    call(batch(0)).sum().backward()
    call.eval()
    y = call(batch(1))
    call.train()
    call(batch(2)).sum().backward()
    return y.detach()


def evaluation_before_the_backward(_model, call):
    y = call(batch(0))
    call.eval()
    with torch.no_grad():
        call(batch(1))
    call.train()
    y.sum().backward()


def inference(_model, call):
    with torch.inference_mode():
        y = call(batch(0))
    call(batch(1)).sum().backward()
    return y.clone()


def autocast(_model, call):
    with torch.autocast("cpu", torch.bfloat16):
        y = call(batch())
    y.sum().backward()
    return y.detach()


def smaller_batch(_model, call):
    call(batch(rows=ROWS // 2)).sum().backward()


def backward_in_a_thread(_model, call):
    y = call(batch())
    thread = threading.Thread(target=lambda: y.sum().backward())
    thread.start()
    thread.join()


def anomalies_detected(_model, call):
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        call(batch()).sum().backward()


def saved_tensors_on_the_host(_model, call):
    with torch.autograd.graph.save_on_cpu():
        y = call(batch())
    y.sum().backward()


def optimizer_steps(model, call):
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for seed in range(3):
        optimizer.zero_grad()
        call(batch(seed)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def other_data(model, call):
    model[0].weight.data = torch.ones(WIDTH, WIDTH)
    call(batch()).sum().backward()


def other_parameter(model, call):
    model[0].weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    call(batch()).sum().backward()


def other_layer(model, call):
    with seeded(9):
        model[0] = nn.Linear(WIDTH, WIDTH)
    call(batch()).sum().backward()


def functional(model, call):
    state = {name: 2 * p.detach() for name, p in model.named_parameters()}
    return functional_call(call, state, (batch(),)).detach()


STEPS: list[Step] = [
    two_calls, first_call_first, last_call_first, forwards_without_backward, accumulation,
    retained_graph, input_gradients, some_gradients, output_changed_in_place, parameter_hooks,
    evaluation_between_steps, evaluation_before_the_backward, inference, autocast,
    smaller_batch, backward_in_a_thread, anomalies_detected, saved_tensors_on_the_host,
    optimizer_steps, other_data, other_parameter, other_layer, functional,
]  # fmt: skip


def outcome(step: Step, model: nn.Module, call: Any) -> dict[str, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        returned = step(model, call)
        return {
            "returned": returned,
            "gradients": {name: p.grad for name, p in model.named_parameters()},
            "buffers": dict(model.named_buffers()),
            "generator": torch.get_rng_state(),
        }


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_the_numbers_are_the_references(step: Step):
    model = blocks()
    expected = outcome(step, model, torch.compile(model, backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()
    model = blocks()
    compiled = fxremat.compile(model, batch(), 0.8)
    assert compiled.plan.predicted_peak_bytes < compiled.plan.baseline_peak_bytes
    assert_bitwise_equal(outcome(step, model, compiled), expected)


def plain() -> nn.Sequential:
    with seeded(0):
        return nn.Sequential(
            *(layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU()))
        )


def test_a_graph_is_retained_after_a_backward_whose_was_not():
    """``aot_eager`` refuses that, so the reference is the model as it is."""

    def outcome(call: Any) -> list[Tensor]:
        call(batch(1)).sum().backward()
        retained_graph(model, call)
        found = [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        return found

    model = plain()
    expected = outcome(model)
    assert_bitwise_equal(outcome(fxremat.compile(model, batch(), "min")), expected)


def change_bias(model: nn.Module, _x: Tensor) -> None:
    with torch.no_grad():
        model[0].bias.add_(1)


def change_input(_model: nn.Module, x: Tensor) -> None:
    x.add_(1)


@pytest.mark.parametrize("change", [change_bias, change_input])
def test_what_a_recomputation_reads_must_not_change_before_the_backward(change):
    """The reference may not need the old value; a recomputation does, and says so."""
    model = plain()
    compiled = fxremat.compile(model, batch(), "min")
    x = batch()
    y = compiled(x)
    change(model, x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
