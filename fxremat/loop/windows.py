"""Steps of an optimizer whose state is in host memory, for some parameters at a time."""

from __future__ import annotations

import contextlib
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxremat import torch_compat
from fxremat.errors import TransferError
from fxremat.runtime.host_tensor import Content, HostSpace, HostTensor, arrive
from fxremat.units import plural

KEPT_BYTES = 4096
"""State of at most this size stays on the device, such as a count of steps."""

MOST_WINDOW_BYTES = 1 << 30
"""A larger window makes transfers no faster, and its first and last transfers overlap nothing."""

Window = tuple[tuple[dict[str, Any], list[Tensor]], ...]
"""Parameters that an optimizer steps together, with their groups."""


@dataclass(slots=True)
class _Gradient:
    """A gradient in host memory, and its copy on the device with that copy's version."""

    parameter: Tensor
    host: HostTensor
    copy: Tensor
    version: int = 0


@dataclass(slots=True)
class _Entry:
    """An entry of a parameter's state in host memory, and its copy on the device."""

    state: dict[Any, Any]
    name: Any
    host: HostTensor
    copy: Tensor


@dataclass(slots=True)
class _Fetched:
    """The copies on the device of what a window reads."""

    gradients: list[_Gradient] = field(default_factory=list)
    state: list[_Entry] = field(default_factory=list)

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


@dataclass(slots=True)
class _Leaving:
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


class WindowedStep:
    """Makes the steps of one optimizer, with its state in host memory between them.

    The optimizer's own code steps some parameters at a time, with plain tensors of the device as
    state and gradients. While it runs, the next window's tensors are fetched, and those of the
    window before are copied back.

    If a copy fails, the remaining windows are tried once more without overlap. If that fails, or
    if the optimizer raises, each parameter and its state are as before the step or as after it. The
    error carries a note. The next call steps the remaining parameters, unless their gradients have
    changed since. An interrupt takes effect when the step is complete.

    Args:
        optimizer: the optimizer, whose ``step`` is replaced. It is not kept alive.
        space: host memory for its state.
        is_hosted: returns whether the state of a parameter is in host memory.
        room: returns the bytes that a step may have on the device in addition to what is held
            between steps; ``None``: as few as possible. A parameter with more is a window by
            itself.
        temporary: bytes that the optimizer allocates and frees for each byte of a parameter.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        space: HostSpace,
        is_hosted: Callable[[Tensor], bool],
        room: Callable[[], int | None] = lambda: None,
        temporary: float = 2.0,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._space = space
        self._is_hosted = is_hosted
        self._room = room
        self._temporary = temporary
        self._run = torch_compat.unhooked_step(optimizer)
        # Parameters that a failed step has stepped, with their gradients' identity and version.
        self._stepped: dict[Tensor, tuple[int, int]] = {}
        torch_compat.replace_step(optimizer, self._step)
        self._hooks = (
            optimizer.register_state_dict_post_hook(_as_plain),
            optimizer.register_load_state_dict_post_hook(weak_call(self.move_existing_state)),
        )

    def move_existing_state(self) -> None:
        """Move the state that exists to host memory."""
        optimizer = self._optimizer()
        assert optimizer is not None
        for parameter, state in optimizer.state.items():
            if self._is_hosted(parameter):
                for name, value in state.items():
                    if _may_leave(value, parameter):
                        content = Content(self._space.place(value.nbytes), value)
                        content.store(value)
                        state[name] = HostTensor(content)

    def remove(self) -> None:
        """Give the optimizer its own ``step`` again, and its state back to the device."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        torch_compat.restore_step(optimizer)
        for hook in self._hooks:
            hook.remove()
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, HostTensor):
                    state[name] = value.on_device()

    def _step(self, optimizer: torch.optim.Optimizer, closure: Any = None) -> Any:
        """Step all parameters, one window after the other; return the closure's loss.

        Raises:
            TransferError: a copy failed twice.
            Exception: what the optimizer or the closure raises.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad(), _interrupts_deferred():
            self.run(optimizer)
        return loss

    def run(self, optimizer: torch.optim.Optimizer) -> None:
        """Step all parameters, without hooks of the optimizer.

        Raises:
            TransferError: a copy failed twice.
            Exception: what the optimizer raises.
        """
        room_bytes = self._room()
        try:
            try:
                self._step_windows(optimizer, room_bytes)
            except (TransferError, torch.OutOfMemoryError):
                self._step_windows(optimizer, 0)
        except Exception as error:
            self._note(error, optimizer)
            raise
        self._stepped.clear()

    def _step_windows(self, optimizer: torch.optim.Optimizer, room_bytes: int | None) -> None:
        windows, overlap = self._windows(optimizer, room_bytes)
        fetched = _Fetched()
        leaving: list[_Leaving] = []
        try:
            for number, window in enumerate(windows):
                if number == 0 or not overlap:
                    fetched = self._fetch(optimizer, window)
                fetched.put_in_place()
                _end(leaving)
                following = _Fetched()
                try:
                    if overlap and number + 1 < len(windows):
                        following = self._fetch(optimizer, windows[number + 1])
                    self._run_window(optimizer, window)
                except BaseException:
                    fetched.take_back()
                    raise
                for _, parameters in window:
                    self._stepped |= {p: _gradient_key(p) for p in parameters}
                leaving = self._start_storing(optimizer, window, fetched)
                fetched = following
        finally:
            _end(leaving)

    def _run_window(self, optimizer: torch.optim.Optimizer, window: Window) -> None:
        """Run the optimizer's own step for the parameters of ``window``.

        If it raises, the parameters are as before.
        """
        groups = optimizer.param_groups
        everything = [(group, group["params"]) for group, _ in window]
        backup = [p.detach().clone() for _, parameters in window for p in parameters]
        try:
            for group, parameters in window:
                group["params"] = parameters
            optimizer.param_groups = [group for group, _ in window]
            self._run(optimizer)
        except BaseException:
            changed = (p for _, parameters in window for p in parameters)
            for parameter, before in zip(changed, backup, strict=True):
                parameter.detach().copy_(before)
            raise
        finally:
            optimizer.param_groups = groups
            for group, parameters in everything:
                group["params"] = parameters

    def _windows(
        self, optimizer: torch.optim.Optimizer, room_bytes: int | None
    ) -> tuple[list[Window], bool]:
        """Return the parameters to step, in windows, and whether transfers overlap with steps.

        If they do, three windows at a time have memory: one arrives and one leaves. Parameters that
        a failed step has stepped are left out if this step continues it.
        """
        continued = self._stepped and all(
            _gradient_key(parameter) == key for parameter, key in self._stepped.items()
        )
        if not continued:
            self._stepped.clear()
        costs = {
            parameter: self._bytes_of(optimizer, parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter not in self._stepped
        }
        overlap = room_bytes is None or room_bytes >= 3 * max(costs.values(), default=0)
        most_bytes = min((room_bytes or 0) // (3 if overlap else 1), MOST_WINDOW_BYTES)
        windows: list[list[tuple[dict[str, Any], list[Tensor]]]] = [[]]
        taken_bytes = 0
        for group in optimizer.param_groups:
            windows[-1].append((group, []))
            for parameter in group["params"]:
                if parameter not in costs:
                    continue
                if taken_bytes and taken_bytes + costs[parameter] > most_bytes:
                    windows.append([(group, [])])
                    taken_bytes = 0
                windows[-1][-1][1].append(parameter)
                taken_bytes += costs[parameter]
        filled = (tuple(part for part in window if part[1]) for window in windows)
        return [window for window in filled if window], overlap

    def _bytes_of(self, optimizer: torch.optim.Optimizer, parameter: Tensor) -> int:
        """Return the bytes that stepping ``parameter`` takes in addition to what is held."""
        state = optimizer.state.get(parameter, {}).values()
        tensors = [value for value in (parameter.grad, *state) if isinstance(value, HostTensor)]
        moved_bytes = sum([tensor.content.meta.nbytes for tensor in tensors])
        if not state and self._is_hosted(parameter):
            moved_bytes += 2 * parameter.nbytes  # it is allocated now
        return moved_bytes + int((1 + self._temporary) * parameter.nbytes)

    def _fetch(self, optimizer: torch.optim.Optimizer, window: Window) -> _Fetched:
        """Start to fetch the gradients and the state of ``window``."""
        fetched = _Fetched()
        for _, parameters in window:
            for parameter in parameters:
                gradient = parameter.grad
                if isinstance(gradient, HostTensor):
                    copy = gradient.of(gradient.content.start_fetching())
                    fetched.gradients.append(_Gradient(parameter, gradient, copy))
                state = optimizer.state.get(parameter, {})
                for name, value in state.items():
                    if isinstance(value, HostTensor):
                        copy = value.content.start_fetching()
                        fetched.state.append(_Entry(state, name, value, copy))
        return fetched

    def _start_storing(
        self, optimizer: torch.optim.Optimizer, window: Window, fetched: _Fetched
    ) -> list[_Leaving]:
        """Start to copy the window's state to host memory, and gradients that were written to."""
        for gradient in fetched.gradients:
            if gradient.parameter.grad is gradient.copy:
                gradient.parameter.grad = gradient.host
            if gradient.copy._version != gradient.version:
                gradient.host.copy_(gradient.copy)
        hosts = {(id(entry.state), entry.name): entry.host for entry in fetched.state}
        leaving = []
        for _, parameters in window:
            for parameter in filter(self._is_hosted, parameters):
                state = optimizer.state.get(parameter, {})
                for name, value in state.items():
                    if _may_leave(value, parameter):
                        before = hosts.get((id(state), name))
                        content = self._content(value, before)
                        source = content.start_storing(value)
                        leaving.append(_Leaving(state, name, content, source))
        return leaving

    def _content(self, value: Tensor, before: HostTensor | None) -> Content:
        """Return the content that ``value`` is stored as: that of ``before``, if it fits."""
        if before is not None:
            meta = before.content.meta
            if (meta.shape, meta.stride(), meta.dtype) == (
                value.shape,
                value.stride(),
                value.dtype,
            ):
                return before.content
        return Content(self._space.place(value.nbytes), value)

    def _note(self, error: Exception, optimizer: torch.optim.Optimizer) -> None:
        """Add to ``error`` how many parameters the failed step has stepped."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._stepped:
            error.add_note(
                f"{len(self._stepped)} of {plural(count, 'parameter')} have been stepped, with "
                "their state. The others, and their state, are as before the step. Call step() "
                "again to step the others"
            )


def weak_call(method: Callable[[], object]) -> Callable[..., None]:
    """Return a function that calls a bound method without arguments while its object exists."""
    reference = weakref.WeakMethod(method)

    def call(*_: object) -> None:
        alive = reference()
        if alive is not None:
            alive()

    return call


def _as_plain(_optimizer: object, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with plain copies, in host memory, of what is there."""
    plain = {
        key: {
            name: value.on_device().cpu() if isinstance(value, HostTensor) else value
            for name, value in state.items()
        }
        if isinstance(state, dict)
        else state
        for key, state in state_dict["state"].items()
    }
    return {**state_dict, "state": plain}


def _end(leaving: list[_Leaving]) -> None:
    """Wait for copies to host memory; those that fail leave the state on the device.

    Raises:
        TransferError: a copy failed. The others have ended as well.
    """
    failed = None
    while leaving:
        try:
            leaving.pop().end()
        except TransferError as error:
            failed = error
    if failed is not None:
        raise failed


def _gradient_key(parameter: Tensor) -> tuple[int, int]:
    gradient = parameter.grad
    return (0, 0) if gradient is None else (id(gradient), gradient._version)


def _may_leave(value: object, parameter: Tensor) -> bool:
    """Return whether an entry of state may be in host memory: a dense tensor of the device."""
    return (
        isinstance(value, Tensor)
        and torch_compat.is_plain(value)
        and value.layout is torch.strided
        and value.device == parameter.device
        and value.nbytes > KEPT_BYTES
    )


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Deliver an interrupt of the main thread only when the block ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):
        yield
        return
    received: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if received:
            before(*received[-1])
