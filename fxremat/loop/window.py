"""What a step of some parameters fetches, changes, and copies back to host memory."""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxremat import torch_compat
from fxremat.runtime.host_tensor import Content, HostTensor, arrive

KEPT_BYTES = 4096
"""State of at most this size stays on the device, such as a count of steps."""


@dataclass(slots=True)
class Gradient:
    """A gradient in host memory, and its copy on the device with that copy's version."""

    parameter: Tensor
    host: HostTensor
    copy: Tensor
    version: int = 0

    def leave(self, *, written: bool) -> None:
        """Give the parameter its gradient in host memory again, with what was written to the copy.

        If that cannot be copied, the gradient stays on the device.

        Args:
            written: whether the copy was written to in a way that its version does not show.

        Raises:
            TransferError: it cannot be copied.
        """
        if self.parameter.grad is not self.copy:
            return  # the optimizer has replaced it
        if written or self.copy._version != self.version:
            self.host.copy_(self.copy)
        self.parameter.grad = self.host


@dataclass(slots=True)
class Entry:
    """An entry of a parameter's state in host memory, and its copy on the device."""

    state: dict[Any, Any]
    name: Any
    host: HostTensor
    copy: Tensor


@dataclass(slots=True)
class Fetched:
    """The copies on the device of what a window reads."""

    gradients: list[Gradient] = field(default_factory=list)
    state: list[Entry] = field(default_factory=list)

    def put_in_place(self) -> None:
        """Give gradients and state of the device to the parameters."""
        for gradient in self.gradients:
            arrive(gradient.copy)
        for entry in self.state:
            arrive(entry.copy)
        for gradient in self.gradients:
            gradient.version = gradient.copy._version
            gradient.parameter.grad = gradient.copy
        for entry in self.state:
            entry.state[entry.name] = entry.copy

    def take_back(self) -> None:
        """Give the parameters what is in host memory again."""
        for gradient in self.gradients:
            gradient.parameter.grad = gradient.host
        for entry in self.state:
            entry.state[entry.name] = entry.host
        self.gradients, self.state = [], []


@dataclass(slots=True)
class Leaving:
    """An entry of state that is being copied to host memory."""

    state: dict[Any, Any]
    name: Any
    content: Content
    source: Tensor

    def end(self) -> None:
        """Wait for the copy, and let the state refer to it.

        If the copy fails, the state remains on the device.
        """
        self.content.place.wait_until_written()
        self.state[self.name] = HostTensor(self.content)


@dataclass(frozen=True, slots=True)
class Stepped:
    """A parameter and its gradient after a step of it, which must be unchanged to go on."""

    version: int
    gradient: weakref.ref[Tensor] | None
    gradient_version: int

    @staticmethod
    def of(parameter: Tensor) -> Stepped:
        """Return what identifies a parameter and its gradient now."""
        gradient = parameter.grad
        if gradient is None:
            return Stepped(parameter._version, None, 0)
        return Stepped(parameter._version, weakref.ref(gradient), gradient._version)

    def is_current(self, parameter: Tensor) -> bool:
        """Return whether neither has changed since."""
        gradient = None if self.gradient is None else self.gradient()
        if gradient is not parameter.grad or self.version != parameter._version:
            return False
        return gradient is None or gradient._version == self.gradient_version


class Before:
    """What a step of some parameters may change on the device, as it was before.

    Args:
        optimizer: the optimizer.
        parameters: the parameters that it is about to step.
        in_host_memory: entries of state that are in host memory as well, by the ``id`` of the
            parameter's state and their name.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: list[Tensor],
        in_host_memory: set[tuple[int, Any]],
    ) -> None:
        self._optimizer = optimizer
        self._parameters = [(p, p.detach().clone()) for p in parameters]
        self._state: list[tuple[Tensor, dict[Any, Any], dict[Any, tuple[Any, Any]]]] = []
        for parameter in parameters:
            state = optimizer.state.get(parameter)
            if state:
                entries = {
                    name: (value, None if (id(state), name) in in_host_memory else _copied(value))
                    for name, value in state.items()
                }
                self._state.append((parameter, state, entries))

    def restore(self) -> None:
        """Give the parameters and their state the values from before."""
        for parameter, before in self._parameters:
            parameter.detach().copy_(before)
            self._optimizer.state.pop(parameter, None)
        for parameter, state, entries in self._state:
            state.clear()
            for name, (value, before) in entries.items():
                if isinstance(value, Tensor) and before is not None:
                    value.detach().copy_(before)
                state[name] = value if before is None or isinstance(value, Tensor) else before
            self._optimizer.state[parameter] = state


def _copied(value: Any) -> Any:
    """Return a copy of an entry of state."""
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def may_leave(value: object, parameter: Tensor) -> bool:
    """Return whether an entry of state may be in host memory: a dense tensor of the device."""
    return (
        isinstance(value, Tensor)
        and torch_compat.is_plain(value)
        and value.layout is torch.strided
        and value.device == parameter.device
        and value.nbytes > KEPT_BYTES
    )
