"""What optimizers take beside the steps, seen when they first step."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxremat import torch_compat
from fxremat.errors import BudgetWarning
from fxremat.passes.joint.graph import allocated_bytes
from fxremat.runtime.profile import MemoryProfile, Watcher
from fxremat.units import format_bytes

MOST_SEEN = 2
"""Steps of an optimizer that are watched: the first one makes its state."""


@dataclass(slots=True)
class Optimizers:
    """Optimizers that step parameters of a model: their state, and what a step allocates.

    Attributes:
        budget_bytes: asked for when a step was seen; ``None``: there is no budget yet.
        told_bytes: of state that was counted from the beginning.
        state_bytes: of each optimizer.
        watcher: of what a step allocates. Nobody tells of one that raises: it ends with what
            is watched next, a forward or a profile of the user's.
    """

    budget_bytes: Callable[[], int | None]
    told_bytes: int = 0
    state_bytes: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    watcher: Watcher = field(default_factory=Watcher)
    _seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    _told: list[MemoryProfile] = field(default_factory=list)
    _model: Callable[[], nn.Module | None] = lambda: None
    _device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def more_bytes(self) -> int:
        """State that was not told of."""
        return max(0, sum(self.state_bytes.values()) - self.told_bytes)

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors of the optimizers' state."""
        for optimizer in self.state_bytes:
            for state in optimizer.state.values():
                yield from (v for v in state.values() if isinstance(v, torch.Tensor))

    def watch(self, model: nn.Module, device: torch.device) -> Callable[[], None]:
        """Watch those that step parameters of ``model``; what is returned ends that."""
        self._model, self._device = weakref.ref(model), device
        remove = torch_compat.around_optimizers(self._before, self._after)

        def end() -> None:
            remove()
            self.watcher.end()

        return end

    def _before(self, optimizer: torch.optim.Optimizer) -> None:
        self.watcher.end()
        if self._seen.get(optimizer, 0) >= MOST_SEEN:
            return
        if self._steps(optimizer):
            self.watcher.begin(self._device, self._told.append)
        else:
            self._seen[optimizer] = MOST_SEEN

    def _after(self, optimizer: torch.optim.Optimizer) -> None:
        seen = self._seen.get(optimizer, 0)
        if seen >= MOST_SEEN:
            return
        self._seen[optimizer] = seen + 1
        self.state_bytes[optimizer] = sum(
            allocated_bytes(own.untyped_storage().nbytes(), own.device)
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.device == self._device
            for own in (torch_compat.local_part(value),)
        )
        self._told.clear()  # of one that has raised
        self.watcher.end()
        for told in self._told:
            self._compare(optimizer, told.forward_bytes - max(0, told.left_bytes))

    def _compare(self, optimizer: torch.optim.Optimizer, bytes_meanwhile: int) -> None:
        """Warn where a step of the optimizer alone is too much."""
        model, budget = self._model(), self.budget_bytes()
        if model is None or budget is None:
            return
        tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
        tensors += [p.grad for p in model.parameters() if p.grad is not None]
        local = map(torch_compat.local_part, tensors)
        held = sum(t.nbytes for t in local if t.device == self._device)
        held += sum(self.state_bytes.values())
        if bytes_meanwhile and held + bytes_meanwhile > budget:
            groups = optimizer.param_groups
            may_fuse = any("fused" in group and not group["fused"] for group in groups)
            other = ", or an optimizer with fused=True, which allocates less" if may_fuse else ""
            warnings.warn(
                f"a step of {type(optimizer).__name__} allocates {bytes_meanwhile} bytes "
                f"({format_bytes(bytes_meanwhile)}) beside {held} for parameters, gradients and "
                f"state: more than the budget of {budget}, whatever the plan. Give at least "
                f"{held + bytes_meanwhile}{other}",
                BudgetWarning,
                stacklevel=2,
            )

    def _steps(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it steps any of the model's parameters."""
        model: Any = self._model()
        own = {id(p) for p in model.parameters()} if model is not None else set()
        return any(id(p) in own for group in optimizer.param_groups for p in group["params"])
