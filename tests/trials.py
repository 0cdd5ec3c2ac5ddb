"""One step of a model within a budget: the same bits as the reference, and the real peak."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import fxremat
from fxremat.ir import Forward
from fxremat.module.compiled import CompiledModule
from fxremat.report.plan import Plan
from tests.harness import ask_input_gradients
from tests.models import ZOO, ZooModel
from tests.models.bits import assert_bitwise_equal
from tests.models.reference import StepResult, call_without_trace, reference_step, run_step


@dataclass(frozen=True)
class Tried:
    """One budget, tried.

    Attributes:
        again: whether a stage runs forward more than once.
    """

    budget_bytes: int
    predicted_bytes: int
    measured_bytes: int
    full_bytes: int
    host_bytes: int
    again: bool


@functools.cache
def reference(name: str) -> StepResult:
    """One step of a zoo model that nothing was planned for; compiled once a process."""
    return reference_step(ZOO[name], input_gradients=True)


def compiled(
    entry: ZooModel, budget: int | str | float, *, input_gradients: bool = False, **options: Any
) -> tuple[nn.Module, CompiledModule]:
    """A fresh model and its compiled step."""
    model = entry.build()
    args, kwargs = entry.sample(0)
    if input_gradients:
        ask_input_gradients((args, kwargs))
    options.setdefault("loss", None if entry.loss_inside else entry.loss)
    if entry.hooks_at_first_call:
        call_without_trace(entry, model)
    with entry.context():
        return model, fxremat.compile(model, fxremat.Sample(args, kwargs), budget, **options)


def captures(call: CompiledModule) -> int:
    """How often the step was captured."""
    return len(call._training.graphs)


def measured_bytes(entry: ZooModel, model: nn.Module, call: CompiledModule) -> int:
    """Peak of a whole step: forward, loss, backward."""
    args, kwargs = entry.sample(0)
    ask_input_gradients((args, kwargs))
    leaves = [*model.parameters(), *(x for x in tree_leaves((args, kwargs)) if _is_tensor(x))]

    def forget_gradients() -> None:
        for tensor in leaves:
            tensor.grad = None

    def step() -> None:
        forget_gradients()
        with entry.context():
            outputs = call(*args, **kwargs)
            loss = entry.loss(outputs)
        del outputs  # as `run_step`, which the first step has shown
        loss.backward()

    forget_gradients()  # those of an earlier step are not part of this one
    return fxremat.measure_step(model, step).peak_bytes


def _is_tensor(x: object) -> bool:
    return isinstance(x, Tensor)


def attempt(
    entry: ZooModel, budget: int | str | float, expected: StepResult, **options: Any
) -> Tried:
    """Train one step within ``budget``, hold it against the reference, and measure it."""
    options.setdefault("assume", "strict")  # one step is measured
    model, call = compiled(entry, budget, input_gradients=True, **options)
    result = run_step(entry, model, call, input_gradients=True)
    assert captures(call) == 1, "the step was captured again"
    assert_bitwise_equal(result, expected)
    plan = call.plan
    measured = measured_bytes(entry, model, call)
    assert measured <= plan.budget_bytes, f"{measured} bytes at budget {budget}"
    latest = call.plan  # the first step may have taught something
    assert measured <= latest.predicted_peak_bytes <= latest.budget_bytes == plan.budget_bytes
    torch._dynamo.reset()
    return Tried(
        plan.budget_bytes,
        plan.predicted_peak_bytes,
        measured,
        plan.baseline_peak_bytes,
        plan.host_bytes,
        sum(isinstance(op, Forward) for op in plan.schedule) > len(plan.chain),
    )


@functools.cache
def compiled_once(name: str, offload: str = "") -> tuple[CompiledModule, Callable[[], None]]:
    """A model of the zoo within seven tenths of its peak, and a step of it."""
    entry = ZOO[name]
    options = {"offload": offload} if offload else {}
    _, call = compiled(entry, 0.7, assume="strict", **options)
    args, kwargs = entry.sample(0)

    def step() -> None:
        call.zero_grad()
        entry.loss(call(*args, **kwargs)).backward()

    return call, step


def plan_of_model(name: str, offload: str = "") -> Plan:
    """Its plan."""
    return compiled_once(name, offload)[0].plan
