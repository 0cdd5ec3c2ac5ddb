"""The backend of ``torch.compile``, and the plans of models compiled with it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from fxremat import torch_compat
from fxremat.capture.sample import Sample
from fxremat.compiler.compiler import compile_graph
from fxremat.compiler.entry import forbid_silent_fallback
from fxremat.errors import ArgumentError, FxrematError, PlanError
from fxremat.module.compiled import CompiledModule
from fxremat.module.step_plan import latest_plan
from fxremat.options.arguments import Arguments
from fxremat.options.loss import target_bytes
from fxremat.options.measured_needs import LossNeeds, needs_of_loss
from fxremat.options.readers import Executor
from fxremat.report.plan import Plan, StepPlan
from fxremat.training.training import Training


def backend(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    **_kwargs: Any,
) -> Callable[..., Any]:
    """Plan a graph for ``torch.compile(model, backend="fxremat", options={"budget": "6 GiB"})``.

    Each graph that Dynamo captures is planned at its first call. If a model is captured as several
    graphs, they share the budget as those of :func:`fxremat.compile` do; code that runs before the
    first graph is not counted. All models that are compiled with one ``options`` share one budget.

    Args:
        module: the graph that Dynamo captured.
        example_inputs: its inputs.
        options: ``budget``, and the options of :func:`fxremat.compile` except ``dynamic``,
            ``plan``, ``regions`` and ``ranks``, with the same or plain values. An ``optimizer``
            must be an object, not a class. ``loss`` is called with the tensor that the model
            returns, or with a tuple of all tensors in its outputs. ``executor`` is by default
            ``"inductor"`` on a GPU, as for ``torch.compile``, and ``"eager"`` elsewhere.

    Returns:
        A function that runs the graph as planned.

    Raises:
        BudgetError: the budget is missing, cannot be read, or is below the least feasible one.
        ArgumentError: an option does not exist, or cannot be read.
    """
    try:
        training = _trainings.get(id(options))
        if training is None:
            given = {"executor": _usual_executor(module, example_inputs), **(options or {})}
            training = _training_of(module, Arguments.read_options(given))
            training.owner = options  # keeps the identity unique
            _trainings[id(options)] = training
        return compile_graph(training, module, example_inputs)
    except FxrematError as error:
        raise torch_compat.not_wrapped(error) from error.__cause__


# torch imports this module when torch.compile names the backend, long before the first graph.
forbid_silent_fallback()

_trainings: weakref.WeakValueDictionary[int, Training] = weakref.WeakValueDictionary()
"""The trainings of the backend by the ``id`` of their options, as long as a graph exists."""


def plan_of(compiled: object) -> Plan | StepPlan:
    """Return the plan that the latest step of a compiled model or function followed.

    Args:
        compiled: the result of ``torch.compile(…, backend="fxremat", options=…)`` or of
            :func:`fxremat.compile`, or a module whose ``compile(backend="fxremat", options=…)`` was
            called. All models and functions compiled with one ``options`` share one plan.

    Returns:
        The plan, which is a ``StepPlan`` if the step runs several graphs.

    Raises:
        ArgumentError: ``compiled`` was not compiled with this backend.
        PlanError: no step of it has been planned yet.
    """
    if isinstance(compiled, CompiledModule):
        return compiled.plan
    options = torch_compat.options_of(compiled, backend)
    if options is None:
        raise ArgumentError(
            f"compiled is a {type(compiled).__name__} that was not compiled with "
            'backend="fxremat": pass the result of torch.compile or fxremat.compile',
            argument="compiled",
            value=compiled,
            code="FXR410",
        )
    training = _trainings.get(id(options))
    if training is None:
        raise PlanError("no step is planned yet: run a training step first", code="FXR601")
    named = compiled.named_parameters() if isinstance(compiled, nn.Module) else ()
    return latest_plan(training, lambda: {id(own): name for name, own in named})


def _usual_executor(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Executor:
    """Return the default of ``executor``: ``"inductor"`` on a GPU with Triton, else ``"eager"``.

    A user of ``torch.compile`` on a GPU expects the speed and the rounding of Inductor's kernels.
    """
    given = (x for x in example_inputs if isinstance(x, torch.Tensor))
    devices = {tensor.device for tensor in (*given, *module.parameters(), *module.buffers())}
    on_gpu = (device for device in devices if device.type == "cuda")
    fused = any(torch_compat.missing_compiler(device) is None for device in on_gpu)
    return "inductor" if fused else "eager"


def _training_of(module: fx.GraphModule, asked: Arguments) -> Training:
    """Create the ``Training`` of a model from its first captured graph and the checked options."""
    classes = [own for own in asked.optimizers if isinstance(own, type)]
    if classes:
        raise ArgumentError(
            "optimizer is a class, but torch.compile passes no parameters to its backend: create "
            "the optimizer first and pass it",
            argument="optimizer",
            value=classes[0],
            code="FXR405",
        )
    needs = _needs_of_loss(module, asked)
    return Training.of(asked, nn.Module(), needs=needs, target_bytes=_target_bytes(module, asked))


def _needs_of_loss(module: fx.GraphModule, asked: Arguments) -> LossNeeds | None:
    """Return the measured memory of ``loss=``; ``None`` without one, or if more graphs follow.

    Raises:
        ArgumentError: the loss cannot be computed from the tensors that the model returns.
    """
    if asked.loss is None or torch_compat.break_of(module) is not None:
        return None
    tensors = torch_compat.results_of_captured(module)
    try:
        return needs_of_loss(asked.loss, tensors[0] if len(tensors) == 1 else tensors)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        if isinstance(error, ArgumentError):
            raise
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ArgumentError(
            f"loss= failed ({error}). torch.compile passes no structure to its backend, so the "
            f"loss is called with the tensors of the model's outputs, here {shapes}. Change it to "
            "accept these, or use fxremat.compile, whose loss= is called with the outputs",
            argument="loss",
            value=asked.loss,
            code="FXR404",
        ) from error


def _target_bytes(module: fx.GraphModule, asked: Arguments) -> tuple[int, ...]:
    """Return the bytes of each storage of the loss's target on the devices of the outputs."""
    devices = {t.device for t in torch_compat.results_of_captured(module)} if asked.loss else ()
    each = (target_bytes(asked.loss, nn.Module(), Sample(), device) for device in devices)
    return tuple(itertools.chain.from_iterable(each))
