"""The host memory of a compiled module: allocated once, lent to one step at a time."""

from __future__ import annotations

import atexit
import gc
import itertools
import os
import threading
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from fxremat.errors import HostMemoryError, TransferError
from fxremat.runtime.lease import Lease
from fxremat.runtime.memory import Block, file_memory, folder_of, pinned_memory
from fxremat.runtime.streams import PinnedBlock, StreamLease
from fxremat.runtime.worker import WorkerLease
from fxremat.units import format_bytes


class HostLimit:
    """The most host memory that all arenas of a module may have allocated together.

    Attributes:
        nbytes: how much; ``None``: as much as it takes.
        arenas: that keep to it.
    """

    def __init__(self, nbytes: int | None = None) -> None:
        self.nbytes = nbytes
        self.arenas: weakref.WeakSet[Arena] = weakref.WeakSet()
        # Taken again by a finalizer that runs meanwhile in the same thread.
        self.lock = threading.RLock()

    @property
    def lent_bytes(self) -> int:
        """Bytes that steps use now."""
        return sum(arena.nbytes * arena.leases for arena in self.arenas)

    def drop_idle(self, arenas: Iterable[Arena] | None = None) -> None:
        """Give up what no step uses now; a step that needs it again allocates it again.

        Args:
            arenas: of which; ``None``: of all.
        """
        with self.lock:
            for arena in self.arenas if arenas is None else arenas:
                arena.drop_idle()

    def make_room(self, nbytes: int) -> None:
        """Have ``nbytes`` more fit, at the cost of what no step uses now.

        Raises:
            HostMemoryError: they do not.
        """
        limit = self.nbytes
        if limit is None:
            return
        # What was lent longest ago first: what every step takes is not given up in turn.
        for arena in sorted(self.arenas, key=lambda arena: arena.lent_last):
            if self._allocated_bytes() + nbytes > limit:
                arena.drop_idle()
        if self._allocated_bytes() + nbytes > limit:
            # A step that was dropped in a circle of references holds its memory until then.
            gc.collect()
            self.drop_idle()
        asked = self._allocated_bytes() + nbytes
        if asked > limit:
            raise HostMemoryError(self._over_limit(asked, limit), asked_bytes=asked)

    def _allocated_bytes(self) -> int:
        return sum(arena.allocated_bytes for arena in self.arenas)

    def _over_limit(self, asked: int, limit: int) -> str:
        others = sum(len(arena.blocks) for arena in self.arenas)
        if not others:
            return (
                f"the plan needs {format_bytes(asked)} ({asked} bytes) of host memory, "
                f"host_limit= allows {format_bytes(limit)} ({limit}). Raise it, or plan within it"
            )
        return (
            f"a step begins while {others} others are not finished, so that "
            f"{format_bytes(asked)} ({asked} bytes) of host memory are needed; host_limit= "
            f"allows {format_bytes(limit)} ({limit}). Raise it, or finish or drop earlier "
            "steps first: what was computed and is still held keeps its step's host memory"
        )


class Arena:
    """Host memory that a compiled module owns, in blocks that are lent to one step each.

    Pinned memory for a CUDA device; for the CPU a memory-mapped temporary file.

    A block is free exactly when the view that was lent of it is dead. So nothing has to be
    done for it to come back, and no interrupt can prevent that. Memory is given up with the
    arena, and what a step that is not finished still uses with that step's lease.

    Args:
        nbytes: what one step needs.
        device: from where tensors are moved.
        host_dir: folder of the file, by default the system's for temporary files.
        limit: the most host memory, which other arenas may keep to as well; ``None``: a limit
            of its own that refuses nothing.

    Attributes:
        id: by which :meth:`find` finds it.
        nbytes: what one step may use.
        blocks: for all steps that overlapped so far.
        lent_last: larger than that of an arena whose blocks were lent before.
        closed: whether no step may begin any more.

    Raises:
        HostMemoryError: the memory cannot be had, or is more than the limit.
        ValueError: ``nbytes`` is not positive, or the device is of another kind.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        device: torch.device | str,
        host_dir: str | os.PathLike[str] | None = None,
        limit: HostLimit | None = None,
    ) -> None:
        if nbytes <= 0:
            raise ValueError(f"an arena of {nbytes} bytes: must be at least 1")
        self.id = next(_numbers)
        self.nbytes = nbytes
        self.blocks: list[Block] = []
        self.lent_last = 0
        self.closed = self._forked = False
        self._device = _supported(torch.device(device))
        self._folder = folder_of(host_dir)
        self._limit = limit or HostLimit()
        self._limit.arenas.add(self)
        self._grow()
        _arenas[self.id] = self

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
    def allocated_bytes(self) -> int:
        """Bytes that are allocated for all steps that overlapped so far."""
        return self.nbytes * len(self.blocks)

    @property
    def leases(self) -> int:
        """How many steps use host memory now."""
        return sum(not block.free for block in self.blocks)

    def drop_idle(self) -> None:
        """Give up what no step uses."""
        self.blocks = [block for block in self.blocks if not block.free]

    def open(self, nbytes: int | None = None) -> Tensor:
        """Host memory for one step: a uint8 tensor of ``nbytes``, by default all of it.

        The memory is the step's until the last tensor on that storage is gone. If all is
        lent already, as much again is allocated.

        Raises:
            HostMemoryError: more is needed, and cannot be had.
            TransferError: more than a step may use, or the arena is closed.
        """
        nbytes = self.nbytes if nbytes is None else nbytes
        if self.closed or not 0 <= nbytes <= self.nbytes:
            raise TransferError(
                f"a step asks for {nbytes} bytes of host memory {self.id}, which "
                + ("is closed" if self.closed else f"has {self.nbytes}")
            )
        if self._forked and self._device.type == "cuda":
            raise TransferError(
                f"a step begins in a forked child of the process that compiled the model for "
                f"{self._device}: CUDA does not work there. Start workers by 'spawn', or compile "
                "the model in the child"
            )
        with self._limit.lock:
            self.lent_last = next(_numbers)
            block = next((block for block in self.blocks if block.free), None) or self._grow()
            view = block.lend()
        # What is under way when a lease ends goes on: the next one's copies come after it.
        lease: Lease
        if isinstance(block, PinnedBlock):
            lease = StreamLease(block, nbytes=nbytes, device=self._device)
        else:
            lease = WorkerLease(block, nbytes=nbytes, device=self._device)
        _leases[view.ctypes.data] = lease
        view.holds = lease
        return torch.from_numpy(view)[:nbytes]

    def close(self) -> None:
        """Give the memory up, what is lent as soon as it comes back. Idempotent."""
        self.closed = True
        self.blocks = []

    def _grow(self) -> Block:
        """Allocate one more block.

        Raises:
            HostMemoryError: it cannot be had, or would exceed the limit.
        """
        with self._limit.lock:
            self._limit.make_room(self.nbytes)
            block: Block
            if self._device.type == "cuda":
                block = PinnedBlock(pinned_memory(self.nbytes, device=self._device))
            else:
                block = Block(file_memory(self.nbytes, folder=self._folder))
            self.blocks.append(block)
            return block

    def _forget(self) -> None:
        """This is a forked child: the blocks are those of its parent, and so may the lock be."""
        for block in self.blocks:
            block.disown()
        self.blocks, self._forked = [], True
        self._limit.lock = threading.RLock()


_numbers = itertools.count(1)
_arenas: weakref.WeakValueDictionary[int, Arena] = weakref.WeakValueDictionary()
_leases: weakref.WeakValueDictionary[int, Lease] = weakref.WeakValueDictionary()
"""By the address of their memory; each is held by the view that was lent."""


def lease_of(host: Tensor) -> Lease:
    """The lease that ``host`` is of.

    Raises:
        TransferError: it is memory of another kind.
    """
    lease = _leases.get(host.untyped_storage().data_ptr())
    if lease is None:
        raise TransferError(
            "a step moves a tensor to memory that was not lent to it: its graphs must be run as "
            "they were emitted"
        )
    return lease


@atexit.register
def _close_all() -> None:
    # While CUDA is there: a copy that is under way is awaited, and memory is unpinned.
    for arena in list(_arenas.values()):
        arena.close()


def _forget_all() -> None:
    """In a forked child: host memory is the parent's, leases and all."""
    for arena in list(_arenas.values()):
        arena._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


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
