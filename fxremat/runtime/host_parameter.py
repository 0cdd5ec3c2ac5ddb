"""Parameters whose bytes are in host memory, while every operator sees tensors of the device.

A :class:`HostParameter` has the device, the shape and the dtype of the parameter that it stands
for, and consists of one tensor in host memory. An operator on it copies the bytes to the device,
runs there, and copies back what it has written. A captured graph has the tensor in host memory as
an input, and each copy to the device as an operation, :data:`fetch`. So plans count the copy for as
long as they hold it, and nothing else of the parameter.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxremat import torch_compat
from fxremat.errors import CaptureError
from fxremat.runtime.arena import Arena, HostLimit, lease_of
from fxremat.runtime.lease import Arrival, Lease
from fxremat.runtime.memory import Lent
from fxremat.runtime.operators import list_length, one_by_one, treats_each, written
from fxremat.runtime.slots import assign_slots, slot_bytes

aten = torch.ops.aten


@dataclass(eq=False)
class _Home:
    """The part of host memory that has the bytes of one parameter.

    Attributes:
        lease: the transfers to it and from it.
        address: where the lease's memory begins.
        parameter: returns the parameter, while it exists; ``None``: it is not known.
    """

    lease: Lease
    address: int
    parameter: Callable[[], Tensor | None] | None = None

    def offset_of(self, part: Tensor) -> int:
        return part.data_ptr() - self.address


def _home_of(host: Tensor) -> _Home | None:
    """Return where ``host`` has its bytes; ``None`` for memory that :func:`homes` did not give."""
    home: _Home | None = torch_compat.host_owner(host)
    return home


def homes(like: Sequence[Tensor], *, folder: str | None, limit: HostLimit) -> list[Tensor]:
    """Return a tensor in host memory for each of ``like``, with its layout and without its values.

    Each has a storage to itself, whose memory lives as long as the tensor.

    Args:
        like: tensors of one device.
        folder: for a CPU, the folder of the file that represents host memory.
        limit: the limit that all host memory of the model shares.

    Raises:
        HostMemoryError: the memory cannot be allocated, or exceeds the limit.
    """
    offsets, total = assign_slots([tensor.nbytes for tensor in like])
    arena = Arena(total, device=like[0].device, host_dir=folder, limit=limit, lasting=True)
    memory = arena.open()
    lease, array = lease_of(memory), memory.numpy()
    made = []
    for tensor, offset in zip(like, offsets, strict=True):
        part = array[offset : offset + slot_bytes(tensor.nbytes)].view(Lent)
        part.holds = home = _Home(lease, memory.data_ptr())
        flat = torch.from_numpy(part)
        torch_compat.note_in_host(flat, home)
        typed = flat[: tensor.nbytes].view(tensor.dtype)
        made.append(typed.as_strided(tensor.shape, tensor.stride()))
    return made


def _span(tensor: Tensor) -> int:
    """Return how many elements lie from the first to the last one of ``tensor`` in memory."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _fresh(host: Tensor, device: torch.device) -> Tensor:
    return torch.empty(_span(host), dtype=host.dtype, device=device)


def _fetch(host: Tensor, device: torch.device) -> Tensor:
    early = _early.pop((host.data_ptr(), threading.get_ident()), None) if _early else None
    if early is not None and early.fresh is not None and early.fresh.numel() == _span(host):
        return early.take().as_strided(host.shape, host.stride())
    fresh = _fresh(host, device)
    source = host.as_strided(fresh.shape, (1,))
    home = _home_of(host)
    if home is None:
        fresh.copy_(source)
    elif fresh.numel():
        home.lease.fill(fresh.view(torch.uint8), offset=home.offset_of(source))
    return fresh.as_strided(host.shape, host.stride())


@dataclass(eq=False)
class Early:
    """A copy to the device that has started before the operation that reads it.

    Attributes:
        fresh: the copy, flat; ``None`` once it is taken.
    """

    fresh: Tensor | None

    def take(self) -> Tensor:
        """Return the copy, which may be read in the order of the device.

        Raises:
            TransferError: the copy failed.
        """
        fresh, self.fresh = self.fresh, None
        assert fresh is not None
        Arrival.wait(fresh)
        return fresh


_early: weakref.WeakValueDictionary[tuple[int, int], Early] = weakref.WeakValueDictionary()
"""Copies under way, by the address of their source and the thread that reads them next. Emitted
code holds them, so that those of a step that is given up are freed."""


def fetch_early(host: Tensor, device: torch.device) -> Early:
    """Start to copy the whole of ``host``; the next :data:`fetch` of it in this thread takes it.

    Raises:
        TransferError: the copy cannot be started.
    """
    home = _home_of(host)
    if home is None or not host.numel():
        return Early(None)
    fresh = _fresh(host, device)
    home.lease.start_filling(fresh.view(torch.uint8), offset=home.offset_of(host))
    made = _early[host.data_ptr(), threading.get_ident()] = Early(fresh)
    return made


def _fake_fetch(host: Tensor, device: torch.device) -> Tensor:
    return _fresh(host, device).as_strided(host.shape, host.stride())


def _store(tensor: Tensor, host: Tensor) -> None:
    """Copy ``tensor``, the result of :data:`fetch` for ``host``, back to ``host``."""
    home = _home_of(host)
    size = (_span(host),)
    source, target = tensor.as_strided(size, (1,)), host.as_strided(size, (1,))
    if home is None:
        target.copy_(source)
    elif source.numel():
        home.lease.take(source.view(torch.uint8), offset=home.offset_of(target))


fetch = torch_compat.new_operator(
    "fetch(Tensor host, Device device) -> Tensor", _fetch, fake=_fake_fetch
)
"""Copies a tensor in host memory to a device. The result has its strides."""


class HostParameter(torch_compat.OffDevice):
    """A tensor of the device whose bytes are in host memory; see the module.

    A view of it is another one, of the same bytes.

    Attributes:
        host: the tensor in host memory.
    """

    host: Tensor

    @staticmethod
    def __new__(cls: Any, host: Tensor, device: torch.device) -> HostParameter:
        """Return a tensor of ``device`` that has its bytes in ``host``."""
        made: HostParameter = torch_compat.wrapper_tensor(cls, host, device)
        made.host = host
        return made

    @classmethod
    def of(cls, tensor: Tensor, host: Tensor) -> HostParameter:
        """Copy ``tensor`` to ``host``, one of :func:`homes`, and return what stands for it.

        Raises:
            TransferError: the copy failed.
        """
        with torch.no_grad():
            _store(tensor.detach(), host)
        return cls(host, tensor.device)

    def claim(self) -> None:
        """Make this the tensor that :func:`parameter_of` returns for the bytes."""
        home = _home_of(self.host)
        if home is not None:
            home.parameter = weakref.ref(self)

    def on_device(self) -> Tensor:
        """Return a copy on the device."""
        copied: Tensor = fetch(self.host, self.device)
        return copied

    def __tensor_flatten__(self) -> tuple[list[str], torch.device]:
        """Return the names of the tensors that this consists of, and the device."""
        return ["host"], self.device

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor], device: torch.device, _shape: object, _stride: object
    ) -> HostParameter:
        """Return the tensor that :meth:`__tensor_flatten__` has described."""
        return HostParameter(parts["host"], device)

    def data_ptr(self) -> int:
        """Return the address in host memory."""
        return self.host.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array."""
        return self.host.numpy() if self.is_cpu else self.on_device().numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self.on_device().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a plain copy on the device."""
        made = self.on_device()
        if isinstance(self, nn.Parameter):
            made = nn.Parameter(made, self.requires_grad)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how to pickle a plain tensor: a parameter is restored on its device."""
        if isinstance(self, nn.Parameter):
            return _restored, (self.host, self.device, self.requires_grad)
        host: Any = self.host
        return host.__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Return a description without values."""
        return f"HostParameter(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator on the device, and copy back what it has written."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func is aten.record_stream.default:
            return None  # no memory of the device belongs to it
        if func.is_view and isinstance(first, HostParameter):
            return _view_of(func, first, args, kwargs)
        count = list_length(func, args)
        if count > 1:
            return one_by_one(_run, func, args, kwargs, count)
        return _run(func, args, kwargs)


def parameter_of(host: Tensor) -> Tensor | None:
    """Return the parameter whose bytes ``host`` has; ``host`` itself if it is not in host memory.

    The result is ``None`` if no parameter has claimed the bytes, or it does not exist any more.
    """
    home = _home_of(host)
    if home is None:
        return host
    return None if home.parameter is None else home.parameter()


def _restored(host: Tensor, device: torch.device, requires_grad: bool) -> nn.Parameter:
    """Return a pickled parameter as a plain one."""
    is_here = device.type != "cuda" or torch.cuda.is_available()
    return nn.Parameter(host.to(device) if is_here else host, requires_grad)


def _view_of(func: Any, base: HostParameter, args: Any, kwargs: Any) -> Any:
    """Return a view of ``base``, or a list of views, without copying anything."""
    made = func(base.host, *args[1:], **kwargs)
    views = pytree.tree_map_only(Tensor, lambda own: HostParameter(own, base.device), made)
    return torch_compat.aliasing_corrected(func, args, kwargs, views)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``func`` on copies of its host parameters, and copy back those that it has written."""
    copies: dict[int, Tensor] = {}
    originals: dict[int, HostParameter] = {}

    def fetched(value: Any) -> Any:
        if not isinstance(value, HostParameter):
            return value
        if id(value) not in copies:
            copies[id(value)] = copy = value.on_device()
            originals[id(copy)] = value
        return copies[id(value)]

    targets = [own for own in written(func, args, kwargs) if isinstance(own, HostParameter)]
    if any(type(own.host) is not Tensor for own in targets):
        raise CaptureError(
            f"the model writes to a parameter in host memory ({func}): omit parameters=True of "
            "HostMemory, or write to the parameter outside of the forward",
            code="FXR302",
        )
    given = pytree.tree_map(fetched, (args, kwargs))
    result = func(*given[0], **given[1])
    with torch.no_grad():
        for own in targets:
            _store(copies[id(own)], own.host)
    # A backward checks that what it reads was not written to.
    torch.autograd.graph.increment_version([own.host for own in targets])
    if treats_each(func):  # autograd counts the writes of all other operators
        torch.autograd.graph.increment_version(targets)
    # What an operator writes to and returns is the caller's tensor, not the copy.
    return pytree.tree_map(lambda made: originals.get(id(made), made), result)
