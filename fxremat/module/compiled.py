"""The module that ``fxremat.compile`` returns: the user's model with a planned training forward."""

from __future__ import annotations

import contextlib
import copy
import types
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fxremat import torch_compat
from fxremat.capture.sample import Sample
from fxremat.errors import PlanError
from fxremat.graph.shortfall import warn
from fxremat.module.forward import PlannedForward
from fxremat.module.state import NOTHING_INHERITED, Inherited, ModuleState, start
from fxremat.module.step_plan import latest_plan
from fxremat.module.traced_step import trace_step
from fxremat.options.arguments import Arguments
from fxremat.options.loss import own_loss
from fxremat.report.plan import Plan, StepPlan
from fxremat.report.trace import StepTrace
from fxremat.training.training import Training


class CompiledModule(nn.Module):
    """A model that trains under a byte budget.

    It is an instance of a subclass of the model's class, with the same name and the model's
    ``__dict__``, so that all other code treats it as the model. Its forward runs as planned; in
    eval mode and without gradients it is the model's. Hooks of the model run before and after it.

    A copy is planned at its first training call. So is a module that was pickled, which loses a
    function given as ``loss``. Its plans reserve what that loss was observed to need. If no step
    had run before it was pickled, they reserve nothing for it, and a ``BudgetWarning`` says so.

    Attributes:
        plan: the plan of the latest step, or of the sample before any step: a ``StepPlan`` if the
            model is captured as several graphs.
        plans: the plans so far, in order: one for each combination of sizes and existing gradients.
    """

    __slots__ = ("_state",)
    _state: ModuleState

    def __init_subclass__(cls, **_options: Any) -> None:
        """Do nothing, so that a base class that registers its subclasses ignores this one."""

    @property
    def plan(self) -> Plan | StepPlan:
        """The plan of the latest step, which is a ``StepPlan`` if it runs several graphs.

        Raises:
            PlanError: no step has been planned yet, or the plans of the step's graphs were not
                chosen together.
        """
        return latest_plan(self._training, self._parameter_names)

    def _parameter_names(self) -> dict[int, str]:
        """Return the names of the model's parameters by ``id`` of the parameter."""
        return {id(own): name for name, own in self._state.original.named_parameters()}

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans so far, in order: one for each combination of sizes and existing gradients."""
        if self._state.runner is None:
            return ()
        return tuple({id(plan): plan for plan in self._training.records()}.values())

    @property
    def forward_code(self) -> str:
        """The emitted forward as Python source, one line for each operation."""
        return self.plan.forward_code

    @property
    def backward_code(self) -> str:
        """The emitted backward as Python source, one line for each operation."""
        return self.plan.backward_code

    def trace_step(self, step: Callable[[], object]) -> StepTrace:
        """Run ``step`` once, and measure the time of each call of a stage and each transfer.

        Args:
            step: a function that runs one forward and one backward of this module.

        Returns:
            The predicted and the measured timeline.

        Raises:
            PlanError: no step has been planned yet, or the step runs several graphs.
            ValueError: ``step`` did not run exactly one forward and one backward.
        """
        training = self._training
        if training.regions.several:
            raise PlanError(
                f"{type(self).__name__} is captured as several graphs, but trace_step times the "
                "calls of one. Use plan.save_trace(path) for the prediction, or torch.profiler",
                code="FXR605",
            )
        return trace_step(step, training=training, device=training.loop.device)

    @property
    def _training(self) -> Training:
        runner = self._state.runner
        if runner is None:
            raise PlanError(
                f"no step of {type(self).__name__} is planned yet: run a training step, or pass a "
                "sample to fxremat.compile",
                code="FXR601",
            )
        return runner.training

    def _replicate_for_data_parallel(self) -> Any:
        raise TypeError(
            f"{type(self).__name__} is compiled and cannot be replicated by DataParallel: "
            "use DistributedDataParallel with one process per device"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        """Return a compiled copy of the model, which is planned when it is first trained."""
        copied: CompiledModule = object.__new__(type(self))
        memo[id(self)] = copied
        original = copy.deepcopy(self._state.original, memo)
        object.__setattr__(copied, "__dict__", original.__dict__)
        copied._state = ModuleState(original, *self._state.for_copy())
        copied._state.assigned = copy.deepcopy(self._state.assigned, memo)
        self._state.copies.add(copied)
        return copied

    def __reduce_ex__(self, _protocol: object) -> Any:
        """Pickle the model and its options, with the measured memory of ``loss=`` in its place."""
        state = self._state
        options, inherited = state.for_copy()
        if options.loss not in (None, own_loss):
            if state.runner is None:
                warn(_unsaved_loss(state.original), code="FXR111")
            options = replace(options, loss=None)
        return _restored, (state.original, options, inherited, state.assigned)

    def __copy__(self) -> CompiledModule:
        """Return a compiled module of the same model, planned when it is first trained."""
        return _restored(self._state.original, *self._state.for_copy(), self._state.assigned)


def _unsaved_loss(model: nn.Module) -> str:
    """Return the warning for pickling a module whose ``loss=`` was not measured yet."""
    name = type(model).__name__
    return (
        f"{name} is saved before its first training step. Its loss= is not saved and its memory is "
        "not measured yet, so the loaded module is planned as if no loss had been given. Save "
        "after a step, pass a sample to fxremat.compile, or compile the loaded module again with "
        "loss="
    )


def compile_module(model: nn.Module, options: Arguments, sample: Sample | None) -> CompiledModule:
    """Return a compiled module of ``model``, planned for ``sample`` if one is given.

    Args:
        model: the model, which is not changed.
        options: the arguments of :func:`fxremat.compile`.
        sample: a call to plan now; ``None``: the first training call is planned.

    Raises:
        FxrematError: see :func:`fxremat.compile`.
    """
    module = _wrapped(model, options)
    if sample is not None and torch_compat.is_uninitialized(model):
        warn(
            f"{type(model).__name__} has parameters that its first call creates. The sample is "
            "ignored, and the budget is checked in the first training call. To plan in "
            "fxremat.compile, call the model once before it",
            code="FXR115",
        )
    elif sample is not None:
        # The caller may be in inference mode; planning differentiates.
        inference = torch.is_inference_mode_enabled()
        with (
            torch_compat.without_dispatch_modes(),
            torch.inference_mode(False) if inference else contextlib.nullcontext(),
        ):
            runner = start(module._state, sample.map(_differentiable), hooked=True)
        for graph in runner.training.graphs:
            graph.measuring_bytes = 0  # measuring took place before training
        module._state.install(runner)
    return module


def _differentiable(value: Any) -> Any:
    """Return a clone of ``value`` if it is an inference tensor, which autograd cannot save."""
    if isinstance(value, torch.Tensor) and value.is_inference():
        return value.clone()
    return value


def original_of(model: nn.Module) -> nn.Module:
    """Return the model that fxremat or torch has compiled; return any other model unchanged."""
    if isinstance(model, CompiledModule):
        return model._state.original
    return torch_compat.uncompiled(model)


def _wrapped(
    model: nn.Module, options: Arguments, inherited: Inherited = NOTHING_INHERITED
) -> CompiledModule:
    module: CompiledModule = object.__new__(_class_of(type(model)))
    object.__setattr__(module, "__dict__", model.__dict__)
    module._state = ModuleState(model, options, inherited)
    return module


def _restored(
    original: nn.Module,
    options: Arguments,
    inherited: Inherited,
    assigned: Callable[..., Any] | None,
) -> CompiledModule:
    """Return the compiled module that a pickle or ``copy.copy`` describes.

    Args:
        original: the model.
        options: the arguments of :func:`fxremat.compile`.
        inherited: the plan and loss memory that its first step takes over.
        assigned: the forward that was assigned to the module, if any.
    """
    module = _wrapped(original, options, inherited)
    module._state.assigned = assigned
    return module


_classes: weakref.WeakKeyDictionary[type[nn.Module], type[CompiledModule]]
_classes = weakref.WeakKeyDictionary()


def _class_of(model: type[nn.Module]) -> type[CompiledModule]:
    """Return the class of compiled modules of ``model``: its subclass with a planned forward."""
    if model not in _classes:
        attributes: dict[str, object] = {
            "__slots__": (),
            "__module__": model.__module__,
            "__qualname__": model.__qualname__,
            "__doc__": model.__doc__,
            "forward": PlannedForward(model.forward),
        }
        if torch_compat.becomes_another_class(model):
            attributes["cls_to_become"] = None  # it keeps its class
        bases = (CompiledModule, model)
        _classes[model] = types.new_class(
            model.__name__, bases, {}, lambda body: body.update(attributes)
        )
    return _classes[model]
