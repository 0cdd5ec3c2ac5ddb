"""Compile a model for one budget, and run steps of it where only steps show what is planned."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxremat import api
from fxremat.capture.isolation import attributes_replaced, generators_restored, in_training
from fxremat.capture.sample import Sample
from fxremat.errors import GraphBreakWarning, PlanError
from fxremat.module.compiled import CompiledModule
from fxremat.options.loss import returned_loss
from fxremat.progress import timed
from fxremat.report.plan import AnyPlan, StepPlan
from fxremat.training.training import Training

MOST_STEPS = 10
"""Steps after which a model in several graphs counts as one whose plans are never chosen."""

PLANNED_STEPS = 3
"""Steps of a model in several graphs that take longer than later ones."""


@dataclass(frozen=True)
class Trial:
    """A model that was compiled for one budget.

    Attributes:
        module: what ``fxremat.compile`` has returned.
        plan: its plan, or ``None`` if there is none even after ``MOST_STEPS``.
        why_none: why there is none.
        seconds: seconds of each phase of planning or, if steps were run, of each call.
        steps: the number of steps that were run.
        unplanned: warnings that something runs as it is.
    """

    module: CompiledModule
    plan: AnyPlan | None
    why_none: str
    seconds: Mapping[str, float]
    steps: int = 0
    unplanned: tuple[str, ...] = field(default=())

    @property
    def training(self) -> Training:
        """The training of the model."""
        return self.module._training


def try_budget(model: nn.Module, call: Sample, budget: str | int, options: Any) -> Trial:
    """Compile ``model`` for one call within ``budget``.

    Nothing of the model runs if it is captured as one graph. Otherwise, steps are run until plans
    were chosen together and the code between graphs was measured.

    Args:
        model: the model; its parameters, buffers, gradients and attributes are unchanged
            afterwards, and so are random generators.
        call: the arguments of the call.
        budget: the budget, as for :func:`fxremat.compile`.
        options: other arguments of :func:`fxremat.compile`, by name.

    Raises:
        FxrematError: the errors of :func:`fxremat.compile`.
        Exception: what the model itself raises.
    """
    with warnings.catch_warnings(record=True) as issued, timed() as phases:
        warnings.simplefilter("always")
        begun_s = time.perf_counter()
        module = api.compile(model, call, budget, **options)
        try:
            seconds = {"compile": time.perf_counter() - begun_s}
            if not module._training.regions.several:
                return Trial(module, *_plan_of(module), seconds=dict(phases))
            with unchanged(model, call):
                steps = _run_steps(module, call, seconds)
            plan, why_none = _plan_of(module)
        finally:
            module._training.loop.leave()  # it does not train
    texts = (str(own.message) for own in issued if own.category is GraphBreakWarning)
    unplanned = tuple(dict.fromkeys(text for text in texts if "planned together" not in text))
    return Trial(module, plan, why_none, seconds, steps, unplanned)


def _plan_of(module: CompiledModule) -> tuple[AnyPlan | None, str]:
    """Return the plan of a compiled module and, if it has none, the reason."""
    try:
        return module.plan, ""
    except PlanError as error:
        return None, str(error)


def _run_steps(module: CompiledModule, call: Sample, seconds: dict[str, float]) -> int:
    """Run steps until the plan is complete, and return their number.

    ``seconds`` gets the duration of each of the first ``PLANNED_STEPS`` steps.
    """
    held: list[object] = []
    for count in range(1, MOST_STEPS + 1):
        begun_s = time.perf_counter()
        run_step(module, call, held)
        if count <= PLANNED_STEPS:
            seconds[f"step {count}"] = time.perf_counter() - begun_s
        plan, _ = _plan_of(module)
        if plan is None or count < PLANNED_STEPS:
            continue
        if not isinstance(plan, StepPlan) or plan.between_s is not None:
            return count
    return MOST_STEPS


def run_step(module: nn.Module, call: Sample, held: list[object]) -> None:
    """Run a forward and a backward of ``module``, and clear all gradients.

    The loss is the one that the module returns, else the sum of its outputs.

    Args:
        module: the module.
        call: the arguments.
        held: has the outputs from one forward to the end of the next one, as in usual loops.
    """
    outputs = module(*call.args, **call.kwargs)
    held[:] = [outputs]
    loss = returned_loss(outputs)
    if loss is None or not loss.requires_grad:
        tensors = (t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor))
        trained = [t for t in tensors if t.requires_grad]
        parts = [torch.view_as_real(t) if t.is_complex() else t for t in trained]
        loss = torch.stack([part.float().sum() for part in parts]).sum()
    torch.autograd.backward(loss)
    for tensor in _leaves(module, call):
        tensor.grad = None


def _leaves(model: nn.Module, call: Sample) -> list[torch.Tensor]:
    """Return the tensors that may get a gradient: parameters, and tensors of the call."""
    return [*model.parameters(), *(t for _, t in call.tensors() if t.is_leaf)]


@contextlib.contextmanager
def unchanged(model: nn.Module, call: Sample) -> Iterator[None]:
    """Restore what steps change, on exit: buffers, gradients, attributes, random generators.

    The model is in training mode, and has no gradients, inside.
    """
    buffers = [(own, own.detach().clone()) for own in model.buffers()]
    gradients = [(own, own.grad) for own in _leaves(model, call)]
    for own, _ in gradients:
        own.grad = None
    try:
        with (
            generators_restored(model, (call.args, call.kwargs)),
            attributes_replaced(model, lambda tensor: tensor),
            in_training(model),
            torch.enable_grad(),
        ):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for own, gradient in gradients:
            own.grad = gradient
