"""The host memory of a compiled module: allocated once, lent to one step at a time."""

from __future__ import annotations

import itertools
import os
import weakref
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fxremat.errors import HostMemoryError, TransferError
from fxremat.runtime.lease import Lease
from fxremat.runtime.memory import Block, file_memory, folder_of, pinned_memory
from fxremat.runtime.streams import PinnedBlock, StreamLease
from fxremat.runtime.worker import WorkerLease
from fxremat.units import format_bytes


@dataclass(slots=True)
class _Pool:
    """The blocks of an arena. It outlives the arena for as long as a step uses a block."""

    nbytes: int
    device: torch.device
    folder: str
    limit_bytes: int | None
    # Appending and popping need no lock: a block may come back in any thread, even while
    # this one is in the middle of taking another.
    free: deque[Block] = field(default_factory=deque)
    blocks: int = 0
    closed: bool = False

    def grow(self) -> Block:
        """One more block.

        Raises:
            HostMemoryError: it cannot be had, or would exceed the limit.
        """
        asked = self.nbytes * (self.blocks + 1)
        if self.limit_bytes is not None and asked > self.limit_bytes:
            raise HostMemoryError(self._over_limit(asked, self.limit_bytes), asked_bytes=asked)
        block: Block
        if self.device.type == "cuda":
            block = PinnedBlock(pinned_memory(self.nbytes, device=self.device))
        else:
            block = Block(file_memory(self.nbytes, folder=self.folder))
        self.blocks += 1
        return block

    def give_back(self, block: Block) -> None:
        """No tensor uses ``block`` any more."""
        self.free.append(block)
        if self.closed:
            self.close()

    def close(self) -> None:
        """Release what is free now, and what is lent as soon as it comes back."""
        self.closed = True
        while self.free:
            try:
                block = self.free.pop()
            except IndexError:
                return
            block.release()
            self.blocks -= 1

    def _over_limit(self, asked: int, limit: int) -> str:
        if not self.blocks:
            return (
                f"the plan needs {format_bytes(asked)} ({asked} bytes) of host memory, "
                f"host_limit= allows {format_bytes(limit)} ({limit}). Raise it, or plan within it"
            )
        return (
            f"a step begins while {self.blocks} others are not finished, so that "
            f"{format_bytes(asked)} ({asked} bytes) of host memory are needed; host_limit= "
            f"allows {format_bytes(limit)} ({limit}). Raise it, or finish or drop earlier "
            "steps first: what was computed and is still held keeps its step's host memory"
        )


class Arena:
    """Host memory that a compiled module owns; :meth:`create` makes one.

    It is closed when it is collected, so with its owner. What a step that is not
    finished still uses stays until that step is.
    """

    def __init__(self, pool: _Pool) -> None:
        self._pool = pool
        self.id = next(_ids)
        _arenas[self.id] = self
        self._finalizer = weakref.finalize(self, pool.close)

    @staticmethod
    def create(
        nbytes: int,
        *,
        device: torch.device | str,
        host_dir: str | os.PathLike[str] | None = None,
        host_limit_bytes: int | None = None,
    ) -> Arena:
        """Allocate ``nbytes`` of host memory for the steps of one compiled module.

        Pinned memory for a CUDA device; for the CPU a memory-mapped temporary file.

        Args:
            nbytes: what one step needs.
            device: from where tensors are moved.
            host_dir: folder of the file, by default the system's for temporary files.
            host_limit_bytes: most bytes to allocate, for all steps that overlap together.

        Raises:
            HostMemoryError: the memory cannot be had, or is more than the limit.
            ValueError: ``nbytes`` is not positive, or the device is of another kind.
        """
        if nbytes <= 0:
            raise ValueError(f"an arena of {nbytes} bytes: must be at least 1")
        device = _supported(torch.device(device))
        pool = _Pool(nbytes, device, folder_of(host_dir), host_limit_bytes)
        pool.free.append(pool.grow())
        return Arena(pool)

    @staticmethod
    def find(arena_id: int) -> Arena:
        """The arena with that id.

        Raises:
            TransferError: it is closed, or of another process.
        """
        arena = _arenas.get(arena_id)
        if arena is None or arena.closed:
            raise TransferError(
                f"host memory {arena_id} is not there: the compiled module that owned it is "
                "gone, or is of another process. Keep the compiled module for as long as its "
                "graphs run, or compile the model again"
            )
        return arena

    @property
    def nbytes(self) -> int:
        """What one step may use."""
        return self._pool.nbytes

    @property
    def allocated_bytes(self) -> int:
        """What is allocated for all steps that overlapped so far."""
        return self._pool.nbytes * self._pool.blocks

    @property
    def leases(self) -> int:
        """How many steps use host memory now."""
        return self._pool.blocks - len(self._pool.free)

    @property
    def closed(self) -> bool:
        """Whether no step may begin any more."""
        return self._pool.closed

    def open(self, nbytes: int | None = None) -> Tensor:
        """Host memory for one step: a uint8 tensor of ``nbytes``, by default all of it.

        The memory is the step's until the last tensor on that storage is gone. If all is
        lent already, as much again is allocated.

        Raises:
            HostMemoryError: more is needed, and cannot be had.
            TransferError: more than a step may use, or the arena is closed.
        """
        pool = self._pool
        nbytes = pool.nbytes if nbytes is None else nbytes
        if self.closed or not 0 <= nbytes <= pool.nbytes:
            raise TransferError(
                f"a step asks for {nbytes} bytes of host memory {self.id}, which "
                + ("is closed" if self.closed else f"has {pool.nbytes}")
            )
        try:
            block = pool.free.pop()
        except IndexError:
            block = pool.grow()
        return _lend(block, pool, nbytes=nbytes)

    def close(self) -> None:
        """Give the memory up, what is lent as soon as it comes back. Idempotent."""
        self._finalizer()


_ids = itertools.count(1)
_arenas: weakref.WeakValueDictionary[int, Arena] = weakref.WeakValueDictionary()
_leases: dict[int, Lease] = {}
"""By the address of their memory."""


def lease_of(host: Tensor) -> Lease | None:
    """The lease that ``host`` is of; ``None`` for memory of another kind."""
    return _leases.get(host.untyped_storage().data_ptr())


def _lend(block: Block, pool: _Pool, *, nbytes: int) -> Tensor:
    assert block.bytes is not None
    # A fresh view each time: it dies with the last tensor on the storage, since the
    # storage is what holds it.
    view = block.bytes[:]
    lease: Lease
    if isinstance(block, PinnedBlock):
        lease = StreamLease(block, nbytes=nbytes, device=pool.device)
    else:
        lease = WorkerLease(block, nbytes=nbytes, device=pool.device)
    _leases[view.ctypes.data] = lease
    end = weakref.finalize(view, _end, view.ctypes.data, pool)
    end.atexit = False
    return torch.from_numpy(view)[:nbytes]


def _end(address: int, pool: _Pool) -> None:
    # What is under way goes on: the next lease's copies are ordered after it.
    pool.give_back(_leases.pop(address).block)


def _supported(device: torch.device) -> torch.device:
    """``device`` with its index.

    Raises:
        ValueError: neither a CPU nor CUDA.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"nothing can be moved between {device} and host memory: cpu, cuda can")
    index: int | None = device.index
    if device.type == "cuda" and index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
