"""What is true of a model between its steps, whatever graphs it is captured in."""

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
from fxremat.costs.execute import HeldBytes
from fxremat.costs.workspaces import library_workspaces
from fxremat.graph.shortfall import excess_bytes, warn_of_measuring
from fxremat.loop.comparison import Comparison
from fxremat.loop.optimizer_state import StateBytes, counted_state
from fxremat.loop.optimizers import Optimizers
from fxremat.loop.outside import Outside
from fxremat.options.budget import TrainingBudget
from fxremat.passes.joint.graph import allocated_bytes
from fxremat.planner.context_bytes import Caller, spread_gradient_bytes
from fxremat.ranks.peers import Peers
from fxremat.runtime.arena import HostLimit
from fxremat.runtime.profile import Watcher
from fxremat.runtime.steps import InFlight

_loops: weakref.WeakSet[Loop] = weakref.WeakSet()
"""Of all networks that are compiled in this process."""

_clock = itertools.count(1)
"""Numbers of calls, and of compilations, of all networks of this process."""


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """A model's parameters, buffers and gradients."""
    tensors = torch_compat.tensors_of_module(model)
    return tensors + [t.grad for t in tensors if t.is_leaf and t.grad is not None]


class CurrentCall(threading.local):
    """The call of the model that goes on in this thread; nothing where none does.

    Attributes:
        resident: tensors of the model, and those of the call.
        arguments: tensors of the call, and their places in it.
    """

    def __init__(self) -> None:
        self.resident: Callable[[], tuple[torch.Tensor, ...]] = tuple
        self.arguments: Callable[[], tuple[tuple[str, torch.Tensor], ...]] = tuple


@dataclass(eq=False)
class Loop:
    """The training loop around one model: its budget, and what it holds between steps.

    Attributes:
        budget: what the peak of a step may reach.
        caller: what is needed beside a step.
        host: what all graphs keep to together of host memory; ``None``: nothing travels.
        peers: processes that train the same model; ``None``: this one plans for itself.
        resident: tells the tensors that the step which is captured holds, used or not.
        given_optimizers: those that ``optimizer=`` names; they are not kept alive.
        state: that these keep, by parameter.
        model: that trains, while it is there.
        device: of the model.
        copies: of the compiled model, as for an average of its weights.
        call: of the model, that goes on.
        in_flight: steps whose backward has not run.
        watcher: of what a step really takes, one at a time.
        optimizers: that step the model.
        outside: what the loop holds outside the model.
        comparison: of runs in parts with their operations at once.
        planning: one thread at a time plans: evaluators of one step share their room.
        born: when it was made, and ``last_call``, when the model was called last, 0 if never, as
            numbers of one count in the process.
        on_new: is told of each new plan.
    """

    budget: TrainingBudget
    caller: Caller
    given_optimizers: InitVar[tuple[object, ...]] = ()
    state: StateBytes = field(default_factory=dict)
    host: HostLimit | None = None
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
    on_new: Callable[[Any], None] | None = None
    _slack_bytes: int = 0  # the most that was found
    _all_slack_bytes: int = 0  # of all on the device, when it was found

    def __post_init__(self, given_optimizers: tuple[object, ...]) -> None:
        given_bytes = sum(self.caller.held_bytes)
        self.optimizers = Optimizers(
            lambda: self.budget.nbytes, given_optimizers, given_bytes, self.watcher.end
        )

    def join(self) -> None:
        """Let other networks of the process count what this one holds, until :meth:`leave`."""
        _loops.add(self)

    def leave(self) -> None:
        """Let nobody count what the network holds any more."""
        _loops.discard(self)

    def held_tensors(self) -> list[torch.Tensor]:
        """Parameters, buffers, gradients and optimizer state of the model, whoever calls."""
        model = self.model()
        return [] if model is None else [*tensors_of(model), *self.optimizers.tensors()]

    def called(self) -> None:
        """Note that a call of the model begins."""
        self.last_call = next(_clock)

    def _is_active(self, other: Loop) -> bool:
        """Whether another network has trained since this one was compiled, on its device."""
        return other.last_call > self.born and other.device == self.device

    def look_outside(self, arguments: Iterable[torch.Tensor]) -> None:
        """Look for what the loop holds outside the model, as a call with ``arguments`` begins."""
        if not self.budget.usual or self.peers is not None or any(self.in_flight):
            return
        if torch_compat.counted_bytes(self.device) is not None:
            return  # an allocator counts all
        loops = {self, *_loops}
        tensors = itertools.chain(
            *(loop.held_tensors() for loop in loops),
            *(tensors_of(copy) for loop in loops for copy in loop.copies),
            arguments,
        )
        keys = [*torch_compat.storages_on(self.device, tensors)]
        keys += [alive.key for loop in loops for alive in loop.in_flight.kept(())]
        given_bytes = sum(self.caller.target_bytes) + self.caller.reserve_bytes
        self.outside.look(self.device, keys, given_bytes)

    def check_outside(self, peak_bytes: int, *, planned: bool = False) -> None:
        """Warn of a step that keeps to the budget only without what the loop holds outside."""
        reserve_bytes = self.caller.reserve_bytes
        self.outside.check(peak_bytes, self.budget, reserve_bytes, planned=planned)

    def check_measuring(
        self, measuring_bytes: int, inputs: Iterable[object], device: torch.device
    ) -> None:
        """Warn if measuring inside a training step took more than the budget.

        Args:
            measuring_bytes: the most that it held at once, without what the model holds.
            inputs: of the call that was planned; what is no tensor is left out.
            device: of the step.
        """
        if self.budget.nbytes is None:
            return
        held = HeldBytes(device)
        for tensor in self.held_tensors():
            held.add(torch_compat.local_part(tensor))
        for value in inputs:
            held.add(value)
        peak_bytes = held.nbytes + sum(library_workspaces(device)) + measuring_bytes
        if excess_bytes(peak_bytes, self.budget.nbytes):
            warn_of_measuring(peak_bytes, self.budget.nbytes)

    def other_state_bytes(self, parameters: Iterable[torch.Tensor]) -> int:
        """Bytes of optimizer state that is counted, of other tensors of the model than these."""
        model = self.model()
        if model is None:
            return 0
        counted = (counted_state(self.state, model, some) for some in (None, parameters))
        of_all, own = map(sum, counted)
        return of_all - own

    def networks_bytes(self) -> int:
        """Bytes that other networks which train in this process, and copies, hold on the device.

        Their parameters, buffers, gradients and optimizer state, and what their steps in flight
        have saved. What they share with this one is left out, and so is a network that has not
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
        """The most by which blocks of what the model held at any call were larger than that.

        A cached block of some megabytes is handed out whole where a part of less than one would be
        left. So what an optimizer makes in its first step may take more than it asked for, for
        good.
        """
        total_bytes = torch_compat.slack_bytes(device)
        if total_bytes > self._all_slack_bytes:
            self._all_slack_bytes = total_bytes
            tensors = (*self.call.resident(), *self.optimizers.tensors())
            blocks = torch_compat.blocks_of(map(torch_compat.local_part, tensors), device)
            nbytes = sum(size - allocated_bytes(asked, device) for size, asked in blocks)
            self._slack_bytes = max(self._slack_bytes, nbytes)
        return self._slack_bytes

    def free_host_bytes(self, later_bytes: int = 0) -> int | None:
        """Return the host memory that a call may take; ``None``: no limit.

        Args:
            later_bytes: what later calls of its step are to take.
        """
        if self.host is None or self.host.nbytes is None:
            return None
        return max(0, self.host.nbytes - self.host.lent_bytes - later_bytes)

    def spread_bytes(self) -> int:
        """Of gradients that exist of tensors that several processes share."""
        return spread_gradient_bytes(self.call.resident())
