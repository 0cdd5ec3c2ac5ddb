"""Models that train as planned without being replaced by another module.

A trainer passes its model to a callback after it has wrapped it, so that a new module would come
too late. The planned forward therefore takes the place where ``nn.Module.compile`` puts its code,
and every call of the model runs it. Class, attributes, hooks, checkpoints and copies stay those of
the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fxremat import api, torch_compat
from fxremat.costs.measured.measure import device_of
from fxremat.errors import ArgumentError, FxrematError, PlanError
from fxremat.module.compiled import CompiledModule
from fxremat.options.arguments import Arguments
from fxremat.options.budget import Readable


def check_options(budget: Readable | None, options: Mapping[str, Any]) -> None:
    """Raise an error if a callback cannot use ``budget`` or ``options``.

    Raises:
        ArgumentError: a sample is given, or an option cannot be read.
        BudgetError: the budget cannot be read.
    """
    if "sample" in options:
        raise ArgumentError(
            "a callback does not take sample=, because it plans for the trainer's first batch: "
            "omit it",
            argument="sample",
            value=options["sample"],
            code="FXR407",
        )
    Arguments.read(budget, **options)


class InPlace:
    """A model that trains within a budget until :meth:`end` is called.

    A model that ``fxremat.compile`` returned is not changed.

    Args:
        model: the model.
        budget: the budget, as for :func:`fxremat.compile`.
        options: options of :func:`fxremat.compile`.

    Attributes:
        model: the model.
        compiled: the model as ``fxremat.compile`` returns it, planned at the first training call.
        measured_peak_bytes: the largest number of bytes allocated in a step in which nothing was
            planned; ``None`` where the device does not count them.

    Raises:
        ArgumentError: the model was compiled by torch, or an option cannot be read.
        BudgetError: the budget cannot be read.
    """

    def __init__(
        self, model: nn.Module, budget: Readable | None, options: Mapping[str, Any]
    ) -> None:
        self.model = model
        self.measured_peak_bytes: int | None = None
        self._forward = model.forward
        self._plans_before: int | None = None
        self._called = self._bypassed = False
        if isinstance(model, CompiledModule):
            self.compiled = model
            return
        before = torch_compat.called_instead(model)
        theirs = before is not None and not isinstance(before, InPlace)
        if theirs or torch_compat.uncompiled(model) is not model:
            raise ArgumentError(
                f"{type(model).__name__} was compiled by torch: pass the original model",
                argument="model",
                value=model,
                code="FXR410",
            )
        self.compiled = api.compile(model, budget=budget, **options)
        self.begin()

    def begin(self) -> None:
        """Make calls of the model run as planned; the constructor does so, too."""
        if self.compiled is not self.model:
            self._forward = self.model.forward
            torch_compat.call_instead(self.model, self)

    def end(self) -> None:
        """Make calls of the model run its own forward again."""
        if torch_compat.called_instead(self.model) is self:
            torch_compat.call_instead(self.model, None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call of the model as planned, and return its outputs."""
        if self.model.forward != self._forward:  # another forward was assigned
            self._bypassed = True
            return torch_compat.own_call(self.model)(*args, **kwargs)
        self._called = True
        try:
            return torch_compat.own_call(self.compiled)(*args, **kwargs)
        except FxrematError:
            if not self.compiled.plans:  # the first plan failed: the model stays usable
                self.end()
            raise

    def __reduce__(self) -> Any:
        """Pickle as ``None``: like ``nn.Module.compile``, copies of the model are not planned."""
        return type(None), ()

    def facts(self) -> dict[str, int]:
        """Return budget and peaks of the present plan in bytes, by name; empty without a plan."""
        if not self.compiled.plans:
            return {}
        try:
            plan = self.compiled.plan
        except PlanError:  # of several graphs, which are planned separately in the first steps
            return {}
        facts = {
            "budget_bytes": plan.budget_bytes,
            "predicted_peak_bytes": plan.predicted_peak_bytes,
        }
        if self.measured_peak_bytes is not None:
            facts["measured_peak_bytes"] = self.measured_peak_bytes
        return facts

    def begin_step(self) -> None:
        """Begin to measure the peak memory of a step, before its forward.

        On CUDA this resets torch's peak statistics.
        """
        device = device_of(self.model)
        self._plans_before = len(self.compiled.plans)
        self._called = self._bypassed = False
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def end_step(self) -> None:
        """Update ``measured_peak_bytes`` after a backward, unless a plan was made in the step."""
        device, before = device_of(self.model), self._plans_before
        self._plans_before = None
        if device.type == "cuda" and before and before == len(self.compiled.plans):
            peak_bytes = torch.cuda.max_memory_allocated(device)
            self.measured_peak_bytes = max(peak_bytes, self.measured_peak_bytes or 0)

    def check_planned(self, remedy: str) -> None:
        """Raise ``ArgumentError`` if the step that has ended did not run as planned.

        Args:
            remedy: the advice to a user whose step never calls the model.

        Raises:
            ArgumentError: nothing was planned so far, or this step ran another forward.
        """
        name = type(self.model).__name__
        if not self.compiled.plans:
            why = f"a training step did not call {name} in training mode"
        elif self._bypassed and not self._called:
            why = f"the forward of {name} was replaced during training"
            remedy = "replace it before training begins"
        else:
            return
        self.end()
        raise ArgumentError(
            f"{why}, so it is not planned and no budget holds: {remedy}",
            argument="model",
            value=self.model,
            code="FXR409",
        )
