"""The training loop around one model, whatever graphs the model is captured in."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import nn

from fxremat import torch_compat
from fxremat.costs.measured.execute import HeldBytes
from fxremat.costs.measured.workspaces import library_workspaces
from fxremat.graph.shortfall import excess_bytes, warn_of_measuring
from fxremat.loop.comparison import Comparison
from fxremat.loop.hosting import Hosting
from fxremat.loop.optimizer_state import StateBytes, counted_state
from fxremat.loop.optimizers import Optimizers
from fxremat.loop.outside import Outside
from fxremat.options.budget import TrainingBudget
from fxremat.passes.joint.graph import allocated_bytes
from fxremat.planner.context.context_bytes import Caller, wrapped_gradient_bytes
from fxremat.ranks.peers import Peers
from fxremat.runtime.arena import HostLimit
from fxremat.runtime.profile import Watcher
from fxremat.runtime.steps import InFlight

_loops: weakref.WeakSet[Loop] = weakref.WeakSet()
"""The loops of all networks that are compiled in this process."""

_clock = itertools.count(1)
"""Numbers calls and compilations of all networks of this process in one order."""


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """Return a model's parameters, buffers and gradients."""
    tensors = torch_compat.tensors_of_module(model)
    return tensors + [t.grad for t in tensors if t.is_leaf and t.grad is not None]


class CurrentCall(threading.local):
    """Functions for tensors of the model's call in this thread; without a call they return none.

    Attributes:
        resident: returns tensors of the model, and those of the call.
        arguments: returns tensors of the call, and where in the arguments each is.
    """

    def __init__(self) -> None:
        self.resident: Callable[[], tuple[torch.Tensor, ...]] = tuple
        self.arguments: Callable[[], tuple[tuple[str, torch.Tensor], ...]] = tuple


@dataclass(eq=False)
class Loop:
    """The training loop around one model: its budget, and what it holds between steps.

    Attributes:
        budget: what the peak of a step may reach.
        caller: what the caller of a step holds.
        host: the limit of host memory that all graphs share; ``None``: no storage is moved there.
        hosting: optimizer state and gradients that live in host memory; ``None``: none do.
        peers: processes that train the same model; ``None``: this one plans by itself.
        given_optimizers: the optimizers that ``optimizer=`` names; they are not kept alive.
        state: bytes of the state of these optimizers, by parameter.
        model: returns the model, while it exists.
        device: the device of the model.
        copies: copies of the compiled model, as for an average of its weights.
        call: the call of the model that runs.
        in_flight: steps whose backward has not run.
        watcher: measures the memory of steps, one at a time.
        optimizers: the optimizers that step the model.
        outside: tensors that the loop holds outside the model.
        comparison: compares runs in parts with their operations as a whole.
        planning: the lock of planning: evaluators of one step share buffers.
        born: number of the compilation of the model, in one order with calls of all models.
        last_call: number of the latest call of the model; 0: it was never called.
        input_bytes: bytes of the inputs and buffers of the latest call, if an optimizer steps some
            parameters at a time.
        on_new: is called with each new plan.
    """

    budget: TrainingBudget
    caller: Caller
    given_optimizers: InitVar[tuple[object, ...]] = ()
    state: StateBytes = field(default_factory=dict)
    host: HostLimit | None = None
    hosting: Hosting | None = None
    peers: Peers | None = None
    call: CurrentCall = field(default_factory=CurrentCall)
    model: Callable[[], nn.Module | None] = lambda: None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    in_flight: InFlight = field(default_factory=InFlight)
    watcher: Watcher = field(default_factory=Watcher)
    optimizers: Optimizers = field(init=False)
    outside: Outside = field(default_factory=Outside)
    planning: threading.RLock = field(default_factory=threading.RLock)
    copies: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    comparison: Comparison = field(default_factory=lambda: Comparison(0))
    born: int = field(default_factory=lambda: next(_clock))
    last_call: int = 0
    input_bytes: int = 0
    on_new: Callable[[Any], None] | None = None
    _slack_bytes: int = 0  # the most that was measured
    _all_slack_bytes: int = 0  # of all on the device, when that was measured

    def __post_init__(self, given_optimizers: tuple[object, ...]) -> None:
        given_bytes = sum(self.caller.held_bytes)
        self.optimizers = Optimizers(
            lambda: self.budget.nbytes, given_optimizers, given_bytes, self.watcher.end
        )

    def join(self) -> None:
        """Have other networks of the process count what this one holds, until :meth:`leave`."""
        _loops.add(self)

    def leave(self) -> None:
        """Have no other network count what this one holds any more."""
        _loops.discard(self)
        if self.hosting is not None:
            self.hosting.release()

    @property
    def moves_gradients(self) -> bool:
        """Whether some gradients are moved to host memory."""
        return self.hosting is not None and bool(self.hosting.placement.gradients)

    def held_tensors(self) -> list[torch.Tensor]:
        """Return parameters, buffers, gradients and optimizer state of the model."""
        model = self.model()
        return [] if model is None else [*tensors_of(model), *self.optimizers.tensors()]

    def note_call(self) -> None:
        """Record that a call of the model begins, so that other networks count what it holds."""
        self.last_call = next(_clock)

    def _is_active(self, other: Loop) -> bool:
        """Return whether ``other`` is on this device and was called since this was compiled."""
        return other.last_call > self.born and other.device == self.device

    def optimizer_room_bytes(self) -> int | None:
        """Return the bytes that an optimizer's step may allocate within the budget.

        ``None`` if there is no budget yet, or what is held cannot be counted.
        """
        if self.budget.nbytes is None:
            return None
        coming_bytes = 0
        if self.hosting is not None and not self.optimizers.all_have_stepped:
            device_bytes = sum(self.caller.held_bytes) - self.hosting.placement.state_bytes
            coming_bytes = max(0, device_bytes - self.optimizers.state_bytes)
        counted = torch_compat.counted_bytes(self.device)
        if counted is not None:
            return max(0, self.budget.nbytes - counted[0] - coming_bytes)
        held = torch_compat.storages_on(self.device, self.held_tensors())
        kept_bytes = self.in_flight.kept_bytes(())
        given_bytes = sum(self.caller.target_bytes) + self.caller.reserve_bytes
        held_bytes = sum(held.values()) + kept_bytes + given_bytes + coming_bytes
        held_bytes += self.networks_bytes() + self.input_bytes
        return max(0, self.budget.nbytes - held_bytes)

    def look_outside(self, arguments: Iterable[torch.Tensor]) -> None:
        """Measure the bytes of tensors that the training loop holds outside the model.

        A call with ``arguments``, which are not counted, is about to begin. :attr:`outside` keeps
        the result.
        """
        if not self.budget.usual or self.peers is not None or any(self.in_flight):
            return
        if torch_compat.counted_bytes(self.device) is not None:
            return  # the allocator counts it
        loops = {self, *_loops}
        tensors = itertools.chain(
            *(loop.held_tensors() for loop in loops),
            *(tensors_of(copy) for loop in loops for copy in loop.copies),
            # On a CPU, host memory consists of tensors of the model's device.
            *(loop.hosting.space.tensors() for loop in loops if loop.hosting is not None),
            arguments,
        )
        keys = [*torch_compat.storages_on(self.device, tensors)]
        keys += [alive.key for loop in loops for alive in loop.in_flight.kept(())]
        given_bytes = sum(self.caller.target_bytes) + self.caller.reserve_bytes
        self.outside.look(self.device, keys, given_bytes)

    def check_outside(self, peak_bytes: int, *, planned: bool = False) -> None:
        """Warn if a step exceeds the budget only with what the loop holds outside the model.

        For the arguments see :meth:`Outside.check`.
        """
        reserve_bytes = self.caller.reserve_bytes
        self.outside.check(peak_bytes, self.budget, reserve_bytes, planned=planned)

    def check_measuring(
        self, measuring_bytes: int, inputs: Iterable[object], device: torch.device
    ) -> None:
        """Warn if measuring operations inside a training step took more memory than the budget.

        Args:
            measuring_bytes: the most that measuring held at once, beyond what the model holds.
            inputs: the inputs of the call that was planned; those that are no tensors are ignored.
            device: the device of the step.
        """
        if self.budget.nbytes is None:
            return
        held = HeldBytes(device)
        for tensor in self.held_tensors():
            held.add(tensor)
        for value in inputs:
            held.add(value)
        peak_bytes = held.nbytes + sum(library_workspaces(device)) + measuring_bytes
        if excess_bytes(peak_bytes, self.budget.nbytes):
            warn_of_measuring(peak_bytes, self.budget.nbytes)

    def other_state_bytes(self, parameters: Iterable[torch.Tensor]) -> int:
        """Return the bytes of the optimizer state of all parameters but ``parameters``."""
        model = self.model()
        if model is None:
            return 0
        counted = (counted_state(self.state, model, some) for some in (None, parameters))
        all_bytes, own_bytes = map(sum, counted)
        return all_bytes - own_bytes

    def networks_bytes(self) -> int:
        """Return the bytes that other networks of this process, and copies, hold on the device.

        These are parameters, buffers, gradients and optimizer state, and what steps in flight have
        saved. What they share with this network is left out, and so is a network that has not
        trained since this one was compiled. With ``assume="strict"`` none is counted.
        """
        if not self.budget.usual:
            return 0
        if len(_loops) == (self in _loops) and not self.copies:
            return 0
        model = self.model()
        others = [own for own in _loops if own is not self and self._is_active(own)]
        if model is None or not (others or self.copies):
            return 0
        counted = torch_compat.storages_on(self.device, self.held_tensors())
        tensors = [tensor for copy in self.copies for tensor in tensors_of(copy)]
        tensors += [tensor for other in others for tensor in other.held_tensors()]
        held = torch_compat.storages_on(self.device, tensors)
        nbytes = sum([allocated_bytes(held[key], self.device) for key in held.keys() - counted])
        for other in others:
            waiting = other.in_flight.waiting()
            nbytes += sum(step.held_bytes for step in waiting)
            nbytes += other.in_flight.kept_bytes(waiting)
        return nbytes

    def slack_bytes(self, device: torch.device) -> int:
        """Return the most bytes by which allocator blocks have exceeded the tensors in them.

        Tensors are those of the model and its optimizers. A cached block of some megabytes is
        handed out whole if less than one megabyte would be left. So the state that an optimizer
        makes in its first step may take more than its size, as long as it exists.
        """
        total_bytes = torch_compat.slack_bytes(device)
        if total_bytes > self._all_slack_bytes:
            self._all_slack_bytes = total_bytes
            tensors = (*self.call.resident(), *self.optimizers.tensors())
            blocks = torch_compat.blocks_of(tensors, device)
            nbytes = sum(size - allocated_bytes(asked, device) for size, asked in blocks)
            self._slack_bytes = max(self._slack_bytes, nbytes)
        return self._slack_bytes

    def plannable_host_bytes(self) -> int | None:
        """Return the bytes of host memory that parameters, gradients and state leave to plans.

        ``None``: all that the limit allows.
        """
        if self.host is None or self.host.nbytes is None:
            return None
        kept_bytes = self.host.lasting_bytes
        if self.hosting is not None:  # before the placement is used, it has no memory
            kept_bytes += self.hosting.placement.host_bytes - self.hosting.space.allocated_bytes
        return max(0, self.host.nbytes - kept_bytes) if kept_bytes else None

    def free_host_bytes(self, later_bytes: int = 0) -> int | None:
        """Return the bytes of host memory that a call may take; ``None``: no limit.

        Args:
            later_bytes: bytes of it that later calls of the step are to take.
        """
        if self.host is None or self.host.nbytes is None:
            return None
        return max(0, self.host.nbytes - self.host.lent_bytes - later_bytes)

    def wrapped_bytes(self) -> int:
        """Return the bytes of existing gradients of tensors of wrapper subclasses."""
        return wrapped_gradient_bytes(self.call.resident())
