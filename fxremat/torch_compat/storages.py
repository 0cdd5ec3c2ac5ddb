"""Storages: which one a tensor has, and whether it is still held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fxremat.torch_compat.modes import real_execution

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of a dense tensor's storage while the tensor is alive."""
    return int(tensor.untyped_storage()._cdata)


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the dense tensors that hold the data of a tensor.

    For a dense tensor that is the tensor itself; for a sparse one, its indices and its values. The
    result is empty if torch does not expose the tensor's memory.
    """
    accessors = _SPARSE.get(tensor.layout)
    if accessors is None:
        return (tensor,) if torch._C._has_storage(tensor) else ()
    with real_execution(), torch.no_grad():  # a trace may be active, and these are operators
        return tuple([access(tensor) for access in accessors])


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


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements; of a sparse one, of its indices and values."""
    return sum([part.nbytes for part in dense_parts(tensor)])


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part that this process has of a tensor that several share; any other as it is."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def storages_on(device: torch.device, tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of each storage on a device that tensors have, once each.

    Args:
        device: other tensors are left out.
        tensors: of one that several processes share, only this process's part counts.

    Returns bytes by the storage's identity, which holds while one of the tensors is alive.
    """
    nbytes: dict[int, int] = {}
    on_cpu = device.type == "cpu"
    for tensor in tensors:
        own = tensor if type(tensor) in _PLAIN else local_part(tensor)
        if own.is_cpu if on_cpu else own.device == device:
            if torch._C._has_storage(own):  # without a dict for each: this runs at each call
                storage: Any = own.untyped_storage()
                nbytes[storage._cdata] = storage.nbytes()
            else:
                nbytes |= storages_of(own)
    return nbytes


def meta_storage(nbytes: int) -> torch.UntypedStorage:
    """A storage without data."""
    return torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()


def reinterpreter() -> Callable[[torch.Tensor, Sequence[int], Sequence[int], int], torch.Tensor]:
    """The cheapest way to a view: a tensor, shape, strides, and an offset beyond the tensor's."""
    guards: Any = torch._C._dynamo.guards
    found: Callable[[torch.Tensor, Sequence[int], Sequence[int], int], torch.Tensor]
    found = guards._reinterpret_tensor
    return found


class StorageAlive:
    """Whether the memory of a tensor is still held by anyone; it holds none itself.

    Attributes:
        nbytes: of the storage.
        key: its identity while it is held.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        storage: Any = tensor.untyped_storage()
        make: Any = StorageWeakRef
        self._reference = make(storage)
        self.nbytes: int = storage.nbytes()
        self.key: int = storage._cdata

    def __bool__(self) -> bool:
        return not self._reference.expired()
