"""Storages: which one a tensor has, and whether it is still held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of a dense tensor's storage while the tensor is alive."""
    return int(tensor.untyped_storage()._cdata)


def storages_of(tensor: torch.Tensor) -> dict[int, int]:
    """Bytes of each storage of a tensor, by its identity while the tensor is alive.

    A sparse tensor has one for its values, and others for where these are. A tensor whose memory
    torch does not show has none.
    """
    storages: list[Any] = [part.untyped_storage() for part in dense_parts(tensor)]
    return {storage._cdata: storage.nbytes() for storage in storages}


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors that a tensor consists of: itself, or the values of a sparse one and where
    they are.
    """
    layout = tensor.layout
    if layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,) if torch._C._has_storage(tensor) else ()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part that this process has of a tensor that several share; any other as it is."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def storages_on(device: torch.device, tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of each storage on ``device`` that tensors have, by its identity while one of these is
    alive; of the parts that this process has.
    """
    found: dict[int, int] = {}
    on_cpu = device.type == "cpu"
    for tensor in tensors:
        own = tensor if type(tensor) in _PLAIN else local_part(tensor)
        if own.is_cpu if on_cpu else own.device == device:
            try:
                storage: Any = own.untyped_storage()
            except NotImplementedError:  # as of a sparse tensor
                found |= storages_of(own)
            else:
                found[storage._cdata] = storage.nbytes()
    return found


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
