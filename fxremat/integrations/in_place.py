"""Models that train as planned without being replaced.

A trainer hands its model to a callback after it has given it to wrappers and to its own loop: a
new module would come too late. So the plan is put where ``nn.Module.compile`` puts its code: who
calls the model, calls the plan. Class, attributes, hooks, checkpoints and copies are the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fxremat import api, torch_compat
from fxremat.costs.measure import device_of
from fxremat.errors import ArgumentError, FxrematError, PlanError
from fxremat.module.compiled import CompiledModule
from fxremat.options.arguments import Arguments
from fxremat.options.budget import Readable


def check_options(budget: Readable | None, options: Mapping[str, Any]) -> None:
    """Refuse what a callback cannot use, when it is made.

    Raises:
        ArgumentError: a sample is given, or an option cannot be read.
        BudgetError: the budget cannot be read.
    """
    if "sample" in options:
        raise ArgumentError(
            "sample= is not for a callback: it plans for the trainer's first batch, leave it out",
            argument="sample",
            value=options["sample"],
        )
    Arguments.read(budget, **options)


class InPlace:
    """A model that trains within a budget from now on, until :meth:`end`.

    One that ``fxremat.compile`` returned is left as it is.

    Args:
        model: the model.
        budget: as for ``fxremat.compile``.
        options: of ``fxremat.compile``.

    Attributes:
        model: the model.
        compiled: the same, as ``fxremat.compile`` returns it; planned at the first training call.
        measured_peak_bytes: the most that was allocated in a step that was not planned meanwhile;
            ``None`` where the device does not count it.

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
        self._called = self._passed_by = False
        if isinstance(model, CompiledModule):
            self.compiled = model
            return
        before = torch_compat.called_instead(model)
        theirs = before is not None and not isinstance(before, InPlace)
        if theirs or torch_compat.uncompiled(model) is not model:
            raise ArgumentError(
                f"{type(model).__name__} was compiled by torch: give it as it was before",
                argument="model",
                value=model,
            )
        self.compiled = api.compile(model, budget=budget, **options)
        self.begin()

    def begin(self) -> None:
        """Have the model run as planned: from the start, and again after :meth:`end`."""
        if self.compiled is not self.model:
            self._forward = self.model.forward
            torch_compat.call_instead(self.model, self)

    def end(self) -> None:
        """From now on the model runs as it is."""
        if torch_compat.called_instead(self.model) is self:
            torch_compat.call_instead(self.model, None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What runs in the place of a call of the model."""
        if self.model.forward != self._forward:  # others use the call for something else
            self._passed_by = True
            return torch_compat.own_call(self.model)(*args, **kwargs)
        self._called = True
        try:
            return torch_compat.own_call(self.compiled)(*args, **kwargs)
        except FxrematError:
            if not self.compiled.plans:  # nothing is left half compiled
                self.end()
            raise

    def __reduce__(self) -> Any:
        """Copies of the model are not planned, as with ``nn.Module.compile``."""
        return type(None), ()

    def facts(self) -> dict[str, int]:
        """Of the plan that is followed, for a log; nothing where there is none yet."""
        if not self.compiled.plans:
            return {}
        try:
            plan = self.compiled.plan
        except PlanError:  # of several graphs, which first steps run each by itself
            return {}
        facts = {
            "budget_bytes": plan.budget_bytes,
            "predicted_peak_bytes": plan.predicted_peak_bytes,
        }
        if self.measured_peak_bytes is not None:
            facts["measured_peak_bytes"] = self.measured_peak_bytes
        return facts

    def begin_step(self) -> None:
        """Before a forward. On CUDA the allocator's peak is counted anew."""
        device = device_of(self.model)
        self._plans_before = len(self.compiled.plans)
        self._called = self._passed_by = False
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def end_step(self) -> None:
        """After the backward; planning is no part of a step."""
        device, before = device_of(self.model), self._plans_before
        self._plans_before = None
        if device.type == "cuda" and before and before == len(self.compiled.plans):
            peak_bytes = torch.cuda.max_memory_allocated(device)
            self.measured_peak_bytes = max(peak_bytes, self.measured_peak_bytes or 0)

    def check_planned(self, remedy: str) -> None:
        """After a step: the plan was not passed by.

        Args:
            remedy: for who never calls the model.

        Raises:
            ArgumentError: nothing was planned so far, or this step ran another forward.
        """
        name = type(self.model).__name__
        if not self.compiled.plans:
            why = f"a step was trained without a call of {name} in training mode"
        elif self._passed_by and not self._called:
            why = f"the forward of {name} was replaced while it trains"
            remedy = "replace it before training begins"
        else:
            return
        self.end()
        raise ArgumentError(
            f"{why}, so it is not planned and no budget holds: {remedy}",
            argument="model",
            value=self.model,
        )
