"""Storages: which one a tensor has, and whether it is still held."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxremat.torch_compat.modes import real_execution

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Bundle(torch.Tensor):
    """An empty tensor that holds other values: tensors and numbers whose sizes depend on data.

    It takes the place of one tensor in a graph. Its own storage is empty, and the bytes of the
    tensors that it holds count as its storages.

    Attributes:
        contents: what it holds.
    """

    contents: tuple[Any, ...]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class OffDevice(torch.Tensor):
    """A base class of tensors that no memory of their device belongs to."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


_in_host: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
"""Owners of storages that represent host memory, by address. These count on no device."""


def note_in_host(tensor: torch.Tensor, owner: object) -> None:
    """Record that the storage of ``tensor`` is in host memory, also where the device is the CPU.

    Args:
        tensor: a dense tensor with data.
        owner: an object that exists for as long as the storage.
    """
    _in_host[tensor.untyped_storage().data_ptr()] = owner


def any_in_host() -> bool:
    """Return whether any storage was noted by :func:`note_in_host` and still exists."""
    return bool(_in_host)


def host_owner(tensor: torch.Tensor) -> Any:
    """Return the owner of the storage of ``tensor`` if it is in host memory, else ``None``."""
    if not (_in_host and type(tensor) in _PLAIN and tensor.is_cpu):
        return None
    return _in_host.get(tensor.untyped_storage().data_ptr())


def wrapper_tensor(kind: Any, like: torch.Tensor, device: torch.device) -> Any:
    """Return a tensor of the subclass ``kind`` on ``device``, without data.

    Args:
        kind: the subclass. ``foreach`` operators take its tensors, as they take plain ones.
        like: has the layout and the dtype of the result.
        device: the device that the result seems to be on.
    """
    supported = _foreach_utils._foreach_supported_types
    if kind not in supported:
        supported.append(kind)
    make: Any = torch.Tensor._make_wrapper_subclass
    return make(
        kind,
        like.shape,
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        device=device,
    )


def bundle_of(values: tuple[Any, ...], device: torch.device) -> Bundle:
    """Return a bundle on ``device`` that holds ``values``."""
    made = torch.empty(0, dtype=torch.uint8, device=device).as_subclass(Bundle)
    made.contents = values
    return made


def storage_key(tensor: torch.Tensor) -> int:
    """Return the identity of a dense tensor's storage, which holds while the tensor is alive."""
    return int(tensor.untyped_storage()._cdata)


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the dense tensors that hold the data of a tensor.

    For a dense tensor that is the tensor itself; for a sparse one, its indices and its values; for
    a bundle, also what it holds; for one of a wrapper subclass, such as a quantized weight, the
    parts of the tensors that it wraps, and thus only this process's part of a distributed tensor.
    The result is empty if torch does not expose the tensor's memory, and for tensors in host
    memory: :class:`OffDevice` tensors, and those of :func:`note_in_host`.
    """
    if isinstance(tensor, OffDevice) or host_owner(tensor) is not None:
        return ()
    if type(tensor) is Bundle:
        tensors = (x for x in tensor.contents if isinstance(x, torch.Tensor))
        held = (part for x in tensors for part in dense_parts(x))
        return (tensor, *held)
    if is_wrapper(tensor):
        return tuple([part for own in wrapped_tensors(tensor) for part in dense_parts(own)])
    accessors = _SPARSE.get(tensor.layout)
    if accessors is None:
        return (tensor,) if torch._C._has_storage(tensor) else ()
    with real_execution(), torch.no_grad():  # a trace may be active, and these are operators
        return tuple([access(tensor) for access in accessors])


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor consists of other tensors, which a captured graph has as inputs.

    Its own storage has a nominal size and no memory.
    """
    return type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor)


def swap(first: torch.Tensor, second: torch.Tensor) -> str:
    """Exchange class, attributes and memory of two tensors; weak references stay with the objects.

    Returns why that is impossible, in which case nothing has changed; else an empty text.
    """
    tensors: list[Any] = [first, second]
    for tensor in tensors:
        if tensor._use_count() > 1:
            return "an autograd graph, or code in C++, refers to it"
    for name in ("__class__", "__dict__"):
        own, other = getattr(first, name), getattr(second, name)
        setattr(first, name, other)
        setattr(second, name, own)
    torch._C._swap_tensor_impl(first, second)
    return ""


def rewrapped(wrapper: Any, replacement: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return a tensor of the class of ``wrapper`` that wraps replacements of its tensors."""
    names, about = wrapper.__tensor_flatten__()
    parts = {name: getattr(wrapper, name) for name in names}
    new = {n: replacement(p) if isinstance(p, torch.Tensor) else p for n, p in parts.items()}
    made = type(wrapper).__tensor_unflatten__(new, about, wrapper.shape, wrapper.stride())
    if isinstance(wrapper, torch.nn.Parameter):
        return torch.nn.Parameter(made, wrapper.requires_grad)
    return cast(torch.Tensor, made.requires_grad_(wrapper.requires_grad))


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is strided and consists of no other tensors."""
    return tensor.layout is torch.strided and not is_wrapper(tensor)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of no subclass, parameters aside."""
    return type(tensor) in _PLAIN


def wrapped_tensors(wrapper: Any) -> list[torch.Tensor]:
    """Return the tensors that a tensor of a wrapper subclass consists of."""
    parts = (getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0])
    return [part for part in parts if isinstance(part, torch.Tensor)]  # others are meshes


_Accessor = Callable[[torch.Tensor], torch.Tensor]

_ROWS = torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values
_COLUMNS = torch.Tensor.ccol_indices, torch.Tensor.row_indices, torch.Tensor.values

_SPARSE: dict[torch.layout, tuple[_Accessor, ...]] = {
    torch.sparse_coo: (torch.Tensor._indices, torch.Tensor._values),
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
}
"""Accessors of the dense tensors of a sparse one, by its layout."""


def storages_of(tensor: torch.Tensor) -> dict[int, int]:
    """Return the bytes of each storage of a tensor, by its identity while the tensor is alive."""
    storages: list[Any] = [part.untyped_storage() for part in dense_parts(tensor)]
    return {storage._cdata: storage.nbytes() for storage in storages}


def storage_keys(tensor: torch.Tensor) -> set[int]:
    """Return the identity of each storage of a tensor, also of those in host memory."""
    if is_wrapper(tensor):
        return {key for own in wrapped_tensors(tensor) for key in storage_keys(own)}
    if type(tensor) in _PLAIN and torch._C._has_storage(tensor):
        return {storage_key(tensor)}
    return {*storages_of(tensor)}


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements; of a sparse one, of its indices and values."""
    return sum([part.nbytes for part in dense_parts(tensor)])


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a distributed tensor; any other tensor as it is."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def storages_on(device: torch.device, tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of each storage of ``tensors`` on a device, once each.

    Args:
        device: tensors on other devices are left out.
        tensors: the tensors.

    Returns:
        Bytes by the storage's identity, which holds while one of the tensors is alive.
    """
    nbytes: dict[int, int] = {}
    on_cpu = device.type == "cpu"
    for tensor in tensors:
        if not (tensor.is_cpu if on_cpu else tensor.device == device):
            continue
        if type(tensor) in _PLAIN and torch._C._has_storage(tensor):
            if _in_host and host_owner(tensor) is not None:
                continue
            storage: Any = tensor.untyped_storage()  # makes no dict, because this runs at each call
            nbytes[storage._cdata] = storage.nbytes()
        else:
            nbytes |= storages_of(tensor)
    return nbytes


def meta_storage(nbytes: int) -> torch.UntypedStorage:
    """Return a storage of ``nbytes`` on ``meta``, without data."""
    return torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()


def reinterpreter() -> Callable[[torch.Tensor, Sequence[int], Sequence[int], int], torch.Tensor]:
    """Return the fastest function that makes a view, given a tensor, shape, strides, and an offset.

    The offset is relative to that of the tensor.
    """
    guards: Any = torch._C._dynamo.guards
    reinterpret: Callable[[torch.Tensor, Sequence[int], Sequence[int], int], torch.Tensor]
    reinterpret = guards._reinterpret_tensor
    return reinterpret


class StorageAlive:
    """Is true as long as the storage of a tensor exists, which it does not keep alive itself.

    Attributes:
        nbytes: size of the storage.
        key: its identity while it exists.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        storage: Any = tensor.untyped_storage()
        make: Any = StorageWeakRef
        self._reference = make(storage)
        self.nbytes: int = storage.nbytes()
        self.key: int = storage._cdata

    def __bool__(self) -> bool:
        return not self._reference.expired()


def storages_alive(values: Iterable[object]) -> list[StorageAlive]:
    """Return a :class:`StorageAlive` for each dense part of the tensors among ``values``."""
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return [StorageAlive(part) for tensor in tensors for part in dense_parts(tensor)]
