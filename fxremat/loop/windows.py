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
        window_bytes: returns the bytes of gradients and state that a window may have. A parameter
            with more is a window by itself.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        space: HostSpace,
        is_hosted: Callable[[Tensor], bool],
        window_bytes: Callable[[], int],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._space = space
        self._is_hosted = is_hosted
        self._window_bytes = window_bytes
        self._run = torch_compat.unhooked_step(optimizer)
        # Parameters that a failed step has stepped, with their gradients' identity and version.
        self._stepped: dict[Tensor, tuple[int, int]] = {}
        torch_compat.replace_step(optimizer, self._step)

    def remove(self) -> None:
        """Give the optimizer its own ``step`` again, and its state back to the device."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        torch_compat.restore_step(optimizer)
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
            try:
                self._step_windows(optimizer, overlap=True)
            except (TransferError, torch.OutOfMemoryError):
                self._step_windows(optimizer, overlap=False)
            except Exception as error:
                self._note(error, optimizer)
                raise
            self._stepped.clear()
        return loss

    def _step_windows(self, optimizer: torch.optim.Optimizer, *, overlap: bool) -> None:
        windows = self._windows(optimizer)
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

    def _windows(self, optimizer: torch.optim.Optimizer) -> list[Window]:
        """Return the parameters to step, in windows; those that are stepped already are left out.

        They are those of a step that failed, if it is continued.
        """
        continued = self._stepped and all(
            _gradient_key(parameter) == key for parameter, key in self._stepped.items()
        )
        if not continued:
            self._stepped.clear()
        most_bytes, taken_bytes = self._window_bytes(), 0
        windows: list[list[tuple[dict[str, Any], list[Tensor]]]] = [[]]
        for group in optimizer.param_groups:
            windows[-1].append((group, []))
            for parameter in group["params"]:
                if parameter in self._stepped:
                    continue
                nbytes = self._bytes_of(optimizer, parameter)
                if taken_bytes and taken_bytes + nbytes > most_bytes:
                    windows.append([(group, [])])
                    taken_bytes = 0
                windows[-1][-1][1].append(parameter)
                taken_bytes += nbytes
        filled = (tuple(part for part in window if part[1]) for window in windows)
        return [window for window in filled if window]

    def _bytes_of(self, optimizer: torch.optim.Optimizer, parameter: Tensor) -> int:
        """Return the bytes that a window has on the device because of ``parameter``."""
        state = optimizer.state.get(parameter, {}).values()
        tensors = [value for value in (parameter.grad, *state) if isinstance(value, HostTensor)]
        if not tensors and self._is_hosted(parameter):
            return 3 * parameter.nbytes  # its state does not exist yet
        return sum([tensor.content.meta.nbytes for tensor in tensors])

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
