"""What is true of a model between its steps, whatever graphs it is captured in."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxremat import torch_compat
from fxremat.errors import BudgetWarning
from fxremat.frontend.budget import Budget
from fxremat.frontend.pipeline import Planner
from fxremat.frontend.ranks import Peers
from fxremat.passes.joint.graph import allocated_bytes
from fxremat.planner.context_bytes import Caller, spread_gradient_bytes
from fxremat.runtime.arena import HostLimit
from fxremat.runtime.profile import MemoryProfile, Watcher
from fxremat.runtime.steps import InFlight
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
        found = self.state_bytes
        return max(0, sum(found.values()) - self.told_bytes) if found else 0

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


@dataclass(eq=False)
class Loop:
    """The training loop around one model: its budget, and what it holds between steps.

    Attributes:
        budget: what the peak of a step may reach.
        caller: what is needed beside a step.
        host: what all graphs keep to together of host memory; ``None``: nothing travels.
        peers: processes that train the same model; ``None``: this one plans for itself.
        resident: tells the tensors that the step which is captured holds, used or not.
        planners: of the graphs that are captured.
        in_flight: steps whose backward has not run.
        watcher: of what a step really takes, one at a time.
        optimizers: that step the model.
        planning: one thread at a time plans: evaluators of one step share their room.
        overhead_s: what a step takes beside its calls, once that is known.
        on_new: is told of each new plan.
    """

    budget: Budget
    caller: Caller
    host: HostLimit | None = None
    peers: Peers | None = None
    resident: Callable[[], tuple[torch.Tensor, ...]] = tuple
    planners: list[Planner] = field(default_factory=list)
    in_flight: InFlight = field(default_factory=InFlight)
    watcher: Watcher = field(default_factory=Watcher)
    optimizers: Optimizers = field(init=False)
    planning: threading.RLock = field(default_factory=threading.RLock)
    overhead_s: float = 0.0
    on_new: Callable[[Any], None] | None = None
    _slack_bytes: int = 0  # the most that was found
    _all_slack_bytes: int = 0  # of all on the device, when it was found

    def __post_init__(self) -> None:
        told_bytes = sum(self.caller.held_bytes)
        self.optimizers = Optimizers(lambda: self.budget.nbytes, told_bytes=told_bytes)

    def settle(self, budget_bytes: int) -> None:
        """Let the budget mean so many bytes from now on."""
        self.budget = self.budget.settled(budget_bytes)
        for planner in self.planners:
            planner.budget = self.budget

    def slack_bytes(self, device: torch.device) -> int:
        """The most by which blocks of what the model held at any call were larger than that.

        A cached block of some megabytes is handed out whole where a part of less than one would be
        left. So what an optimizer makes in its first step may take more than it asked for, for
        good.
        """
        total_bytes = torch_compat.slack_bytes(device)
        if total_bytes > self._all_slack_bytes:
            self._all_slack_bytes = total_bytes
            tensors = (*self.resident(), *self.optimizers.tensors())
            blocks = torch_compat.blocks_of(map(torch_compat.local_part, tensors), device)
            nbytes = sum(size - allocated_bytes(asked, device) for size, asked in blocks)
            self._slack_bytes = max(self._slack_bytes, nbytes)
        return self._slack_bytes

    def spread_bytes(self) -> int:
        """Of gradients that exist of tensors that several processes share."""
        return spread_gradient_bytes(self.resident())
