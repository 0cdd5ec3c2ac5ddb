"""Steps of an optimizer whose state is in host memory, for some parameters at a time."""

from __future__ import annotations

import contextlib
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fxremat import torch_compat
from fxremat.errors import TransferError
from fxremat.loop.window import Before, Entry, Fetched, Gradient, Leaving, Stepped, may_leave
from fxremat.runtime.host_tensor import Content, HostSpace, HostTensor
from fxremat.units import plural

MOST_WINDOW_BYTES = 1 << 30
"""A larger window makes transfers no faster, and its first and last transfers overlap nothing."""

Window = tuple[tuple[dict[str, Any], list[Tensor]], ...]
"""Parameters that an optimizer steps together, with their groups."""


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
        hosted_bytes: returns the bytes of a parameter's state in host memory; 0: its state is on
            the device.
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
        hosted_bytes: Callable[[Tensor], int],
        room: Callable[[], int | None] = lambda: None,
        temporary: float = 2.0,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._space = space
        self._hosted_bytes = hosted_bytes
        self._room = room
        self._temporary = temporary
        self._run = torch_compat.unhooked_step(optimizer)
        # Parameters that a failed step has stepped. After a failure state may be on the device.
        self._stepped: dict[Tensor, Stepped] = {}
        self._has_failed = False
        # Another model's, which has some of the parameters.
        self._former = _latest.get(optimizer, _no_step)
        _latest[optimizer] = weakref.ref(self)
        self._restore_step = torch_compat.replace_step(optimizer, self._step)
        self._hooks = (
            optimizer.register_state_dict_post_hook(_as_plain, prepend=True),
            optimizer.register_load_state_dict_pre_hook(_weakly(self._store_loaded)),
            optimizer.register_load_state_dict_post_hook(_weakly(self._end_loading)),
        )

    def _is_hosted(self, parameter: Tensor) -> bool:
        former = self._former()
        return self._hosted_bytes(parameter) > 0 or (
            former is not None and former._is_hosted(parameter)
        )

    def _store_loaded(
        self, optimizer: torch.optim.Optimizer, loaded: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Return the state dict ``loaded`` with what belongs there in host memory already.

        So there is never all of it on the device.
        """
        ids = [own for group in loaded["param_groups"] for own in group["params"]]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if len(ids) != len(parameters):
            return None  # which is an error of torch's
        state = dict(loaded["state"])
        for own, parameter in zip(ids, parameters, strict=True):
            if own in state and self._is_hosted(parameter):
                before = optimizer.state.get(parameter, {})
                state[own] = {
                    name: self._stored(value, before.get(name), parameter)
                    for name, value in state[own].items()
                }
        return {**loaded, "state": state}

    def _stored(self, value: Any, before: Any, parameter: Tensor) -> Any:
        """Return a loaded entry of state, converted as torch does; in host memory if eligible.

        It takes the place of the entry ``before``.
        """
        if not isinstance(value, Tensor) or isinstance(value, HostTensor):
            return value
        converted = value.to(
            device=parameter.device,
            dtype=parameter.dtype if parameter.is_floating_point() else value.dtype,
        )
        if not may_leave(converted, parameter):
            return value
        content = self._content(converted, before if isinstance(before, HostTensor) else None)
        content.store(converted)
        return HostTensor(content)

    def _end_loading(self, _optimizer: torch.optim.Optimizer) -> None:
        self._stepped.clear()
        self.move_existing_state()

    def move_existing_state(self) -> None:
        """Move the state that exists to host memory."""
        optimizer = self._optimizer()
        assert optimizer is not None
        for parameter, state in optimizer.state.items():
            if self._is_hosted(parameter):
                for name, value in state.items():
                    if may_leave(value, parameter):
                        content = Content(self._space.place(value.nbytes), value)
                        content.store(value)
                        state[name] = HostTensor(content)

    def remove(self) -> None:
        """Give the optimizer its own ``step`` again, and its state back to the device."""
        for hook in self._hooks:
            hook.remove()
        optimizer = self._optimizer()
        self._restore_step()
        if optimizer is None or _latest.get(optimizer, _no_step)() is not self:
            self._hosted_bytes = lambda _: 0  # another model's step has replaced this one
            return
        _latest[optimizer] = self._former
        former = self._former()
        for parameter, state in optimizer.state.items():
            if former is None or not former._is_hosted(parameter):
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
            except (TransferError, torch.OutOfMemoryError, MemoryError):
                self._has_failed = True
                self._step_windows(optimizer, 0)
            if self._has_failed:
                self.move_existing_state()
        except BaseException as error:
            self._has_failed = True
            self._note(error, optimizer)
            raise
        self._has_failed = False
        self._stepped.clear()

    def _step_windows(self, optimizer: torch.optim.Optimizer, room_bytes: int | None) -> None:
        windows, overlap = self._windows(optimizer, room_bytes)
        fetched, following = Fetched(), Fetched()
        leaving: list[Leaving] = []
        try:
            for number, window in enumerate(windows):
                if overlap and number:
                    fetched, following = following, Fetched()
                else:
                    fetched = Fetched()  # frees the memory of the window before
                    if not overlap:
                        _end(leaving)
                    self._fetch(optimizer, window, fetched)
                fetched.put_in_place()
                _end(leaving)
                if overlap and number + 1 < len(windows):
                    self._fetch(optimizer, windows[number + 1], following)
                self._run_window(optimizer, window, fetched)
                self._finish(optimizer, window, fetched, leaving)
        except BaseException:
            fetched.take_back()
            with contextlib.suppress(TransferError):  # the state then stays on the device
                _end(leaving)
            raise
        _end(leaving)

    def _run_window(
        self, optimizer: torch.optim.Optimizer, window: Window, fetched: Fetched
    ) -> None:
        """Run the optimizer's own step for the parameters of ``window``.

        If it raises, the parameters and their state are as before.
        """
        groups = optimizer.param_groups
        everything = [(group, group["params"]) for group, _ in window]
        parameters = [p for _, own in window for p in own]
        before = Before(
            optimizer, parameters, {(id(entry.state), entry.name) for entry in fetched.state}
        )
        try:
            for group, own in window:
                group["params"] = own
            optimizer.param_groups = [group for group, _ in window]
            self._run(optimizer)
        except BaseException:
            before.restore()
            raise
        finally:
            optimizer.param_groups = groups
            for group, own in everything:
                group["params"] = own

    def _windows(
        self, optimizer: torch.optim.Optimizer, room_bytes: int | None
    ) -> tuple[list[Window], bool]:
        """Return the parameters to step, in windows, and whether transfers overlap with steps.

        If they do, three windows at a time have memory: one arrives and one leaves. Parameters that
        a failed step has stepped are left out if this step continues it.
        """
        if not all(own.is_current(parameter) for parameter, own in self._stepped.items()):
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
        state = optimizer.state.get(parameter, {})
        tensors = [own for own in (parameter.grad, *state.values()) if isinstance(own, Tensor)]
        # What is on the device is copied, so that a step that fails can be undone.
        copied_bytes = sum([t.nbytes for t in tensors if t is not parameter.grad])
        gradient_bytes = parameter.grad.nbytes if isinstance(parameter.grad, HostTensor) else 0
        made_bytes = 0 if state else self._hosted_bytes(parameter)
        own_bytes = int((1 + self._temporary) * parameter.nbytes)
        return copied_bytes + gradient_bytes + made_bytes + own_bytes

    def _fetch(self, optimizer: torch.optim.Optimizer, window: Window, fetched: Fetched) -> None:
        """Start to fetch the gradients and the state of ``window`` into ``fetched``."""
        for _, parameters in window:
            for parameter in parameters:
                gradient = parameter.grad
                if isinstance(gradient, HostTensor):
                    copy = gradient.of(gradient.content.start_fetching())
                    fetched.gradients.append(Gradient(parameter, gradient, copy))
                state = optimizer.state.get(parameter, {})
                for name, value in state.items():
                    if isinstance(value, HostTensor):
                        copy = value.content.start_fetching()
                        fetched.state.append(Entry(state, name, value, copy))

    def _finish(
        self,
        optimizer: torch.optim.Optimizer,
        window: Window,
        fetched: Fetched,
        leaving: list[Leaving],
    ) -> None:
        """Record that ``window`` is stepped, and start to copy its state to host memory.

        Copies that have started are added to ``leaving``. What fails to be copied stays on the
        device.

        Raises:
            TransferError, HostMemoryError: something cannot be copied.
        """
        hosts = {(id(entry.state), entry.name): entry.host for entry in fetched.state}
        gradients, fetched.gradients, fetched.state = fetched.gradients, [], []
        failed = None
        written = getattr(optimizer, "grad_scale", None) is not None  # by a fused step
        for gradient in gradients:
            try:
                gradient.leave(written=written)
            except TransferError as error:
                failed = error
        for _, parameters in window:
            self._stepped |= {p: Stepped.of(p) for p in parameters}
        if failed is not None:
            raise failed
        for _, parameters in window:
            for parameter in filter(self._is_hosted, parameters):
                state = optimizer.state.get(parameter, {})
                for name, value in state.items():
                    if may_leave(value, parameter):
                        before = hosts.get((id(state), name))
                        content = self._content(value, before)
                        source = content.start_storing(value)
                        leaving.append(Leaving(state, name, content, source))

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

    def _note(self, error: BaseException, optimizer: torch.optim.Optimizer) -> None:
        """Add to ``error`` how many parameters the failed step has stepped."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if len(self._stepped) == count:
            error.add_note(
                "All parameters have been stepped, with their state. Some of it has remained on "
                "the device. Call step() again to move it to host memory: nothing is stepped again"
            )
        elif self._stepped:
            error.add_note(
                f"{len(self._stepped)} of {plural(count, 'parameter')} have been stepped, with "
                "their state. The others, and their state, are as before the step. Call step() "
                "again to step the others"
            )
        else:
            error.add_note("All parameters, and their state, are as before the step")


_latest: weakref.WeakKeyDictionary[torch.optim.Optimizer, Callable[[], WindowedStep | None]] = (
    weakref.WeakKeyDictionary()
)
"""The latest step of each optimizer."""


def _no_step() -> None:
    return None


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method while its object exists."""
    reference = weakref.WeakMethod(method)

    def call(*given: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*given)

    return call


def _as_plain(_optimizer: object, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with plain copies of all host tensors, on the CPU."""
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


def _end(leaving: list[Leaving]) -> None:
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
