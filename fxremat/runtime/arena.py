"""The host memory of a compiled module: allocated once, lent to one step at a time."""

from __future__ import annotations

import atexit
import gc
import itertools
import os
import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from fxremat.errors import FAULT, HostMemoryError, TransferError
from fxremat.runtime.lease import Lease
from fxremat.runtime.memory import Block, Lent, file_memory, folder_of, pinned_memory
from fxremat.runtime.streams import PinnedBlock, StreamLease
from fxremat.runtime.worker import WorkerLease
from fxremat.units import format_bytes, plural


class HostLimit:
    """The host memory that all arenas of a module share, and its limit.

    Each block is lent to one step at a time. A block that came back is lent to any step that needs
    at least half of it. If there is none, a new block replaces the next smaller one. So steps that
    do not overlap leave at most twice what the largest of them needs.

    Attributes:
        nbytes: the most bytes that may be allocated; ``None``: no limit.
        arenas: the arenas that share the blocks.
        blocks: the allocated blocks, lent or not.
    """

    def __init__(self, nbytes: int | None = None) -> None:
        self.nbytes = nbytes
        self.arenas: weakref.WeakSet[Arena] = weakref.WeakSet()
        self.blocks: list[Block] = []
        # A finalizer that runs in the same thread takes the lock again.
        self.lock = threading.RLock()
        self._overlaps = False

    @property
    def allocated_bytes(self) -> int:
        """Bytes that are allocated, lent or not."""
        return sum(block.nbytes for block in self.blocks)

    @property
    def lent_bytes(self) -> int:
        """Bytes of the blocks that steps use now."""
        return sum(block.nbytes for block in self.blocks if not block.free)

    @property
    def lasting_bytes(self) -> int:
        """Bytes of the blocks that parameters, gradients and optimizer state are in."""
        return sum(block.nbytes for block in self.blocks if block.lasting and not block.free)

    def drop_idle(self) -> None:
        """Free the blocks that no step uses; a step that needs one allocates it again."""
        with self.lock:
            self.blocks = [block for block in self.blocks if not block.free]

    def lend(self, arena: Arena) -> tuple[Block, Lent]:
        """Return a block for a step of ``arena``, new if necessary, and the step's view of it.

        Raises:
            HostMemoryError: another block is needed and cannot be allocated.
        """
        with self.lock:
            self._overlaps |= self.lent_bytes > 0
            block = self.idle_for(arena) or self.grow(arena)
            block.lent_by, block.lent_last = arena.id, next(_ids)
            block.lasting = arena.lasting
            return block, block.lend()

    def idle_for(self, arena: Arena) -> Block | None:
        """Return the smallest unused block that suits a step of ``arena``, or ``None``.

        It has the bytes that the step needs, and at most twice as many; no more than it needs if
        steps overlap within a limit.
        """
        # If steps overlap within a limit, one step's excess may be another step's shortage.
        exact = self._overlaps and self.nbytes is not None
        most = arena.nbytes * (1 if exact else 2)
        return self._next_block(arena, lambda nbytes: arena.nbytes <= nbytes <= most, min)

    def grow(self, arena: Arena) -> Block:
        """Allocate and return a block for ``arena``, in place of the next smaller unused block.

        Raises:
            HostMemoryError: the block cannot be allocated, or would exceed the limit.
        """
        with self.lock:
            self._drop(self._next_block(arena, lambda nbytes: nbytes < arena.nbytes, max))
            self._make_room(arena.nbytes)
            try:
                block = arena.allocate()
            except HostMemoryError:
                gc.collect()
                if not any(block.free for block in self.blocks):
                    raise
                self.drop_idle()
                block = arena.allocate()
            block.place = arena.place
            self.blocks.append(block)
            return block

    def _next_block(
        self,
        arena: Arena,
        fits: Callable[[int], bool],
        choose: Callable[..., Block | None],
    ) -> Block | None:
        idle = (block for block in self.blocks if block.free and block.place == arena.place)
        fitting = (block for block in idle if fits(block.nbytes))
        return choose(fitting, key=lambda block: block.nbytes, default=None)

    def _drop(self, block: Block | None) -> None:
        self.blocks = [other for other in self.blocks if other is not block]

    def _make_room(self, nbytes: int) -> None:
        """Free unused blocks until ``nbytes`` more are within the limit.

        Raises:
            HostMemoryError: they would exceed it even without unused blocks.
        """
        limit = self.nbytes
        if limit is None:
            return
        # The block that was lent longest ago goes first: steps that alternate keep theirs.
        for block in sorted(self.blocks, key=lambda block: block.lent_last):
            if block.free and self.allocated_bytes + nbytes > limit:
                self._drop(block)
        if self.allocated_bytes + nbytes > limit:
            # A step in a reference cycle holds its memory until it is collected.
            gc.collect()
            self.drop_idle()
        asked = self.allocated_bytes + nbytes
        if asked > limit:
            raise HostMemoryError(self._over_limit(asked, limit), asked_bytes=asked, code="FXR711")

    def _over_limit(self, asked: int, limit: int) -> str:
        others = sum(not block.lasting for block in self.blocks)
        if not others:
            lasting_bytes = self.lasting_bytes
            held = (
                f", of which {format_bytes(lasting_bytes)} hold parameters, gradients or optimizer "
                "state"
            )
            return (
                f"the plan needs {format_bytes(asked)} ({asked} bytes) of host memory"
                f"{held if lasting_bytes else ''}, but HostMemory(limit=) allows "
                f"{format_bytes(limit)} ({limit}). Raise the limit, or plan again with it"
            )
        return (
            f"a step begins before {plural(others, 'earlier step')} finished, which requires "
            f"{format_bytes(asked)} ({asked} bytes) of host memory, but HostMemory(limit=) allows "
            f"{format_bytes(limit)} ({limit}). Raise the limit, or finish or drop earlier steps "
            "first: outputs that are still held keep the host memory of their step"
        )


class Arena:
    """Host memory for the steps of one plan, in blocks that all plans of a module share.

    It is pinned memory for a CUDA device, and a memory-mapped temporary file for the CPU.

    A block is free exactly if the view that was lent of it is dead. So nothing has to be done to
    return it, and no interrupt can prevent that. Memory is freed with the last arena; what an
    unfinished step still uses is freed with that step's lease.

    Args:
        nbytes: bytes that one step needs.
        device: the device that tensors are moved from.
        host_dir: folder of the file; by default the system's for temporary files.
        limit: the memory that this arena shares with others; ``None``: separate memory without a
            limit.
        lasting: whether its memory is lent for longer than a step.

    Attributes:
        id: identifies the arena in :meth:`find`.
        nbytes: bytes that one step may use.
        lasting: whether its memory is lent for longer than a step.
        place: the device, and the folder of the file.
        closed: whether no further step may begin.

    Raises:
        HostMemoryError: the memory cannot be allocated, or exceeds the limit.
        ValueError: ``nbytes`` is not positive, or the device is neither a CPU nor CUDA.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        device: torch.device | str,
        host_dir: str | os.PathLike[str] | None = None,
        limit: HostLimit | None = None,
        lasting: bool = False,
    ) -> None:
        if nbytes <= 0:
            raise ValueError(f"an arena of {nbytes} bytes: must be at least 1")
        self.id = next(_ids)
        self.nbytes, self.lasting = nbytes, lasting
        self.closed = self._forked = False
        self._device = _with_index(torch.device(device))
        self._folder = folder_of(host_dir)
        self.place = self._device, self._folder
        self._limit = limit or HostLimit()
        with self._limit.lock:
            if self._limit.idle_for(self) is None:
                self._limit.grow(self)
            self._limit.arenas.add(self)
        _arenas[self.id] = self

    @staticmethod
    def find(arena_id: int) -> Arena:
        """Return the arena with this id.

        Raises:
            TransferError: the arena is closed, or belongs to another process.
        """
        arena = _arenas.get(arena_id)
        if arena is None or arena.closed:
            raise TransferError(
                f"host memory {arena_id} does not exist: the compiled module that owned it was "
                "deleted, or belongs to another process. Keep the compiled module for as long as "
                "its graphs run, or compile the model again",
                code="FXR724",
            )
        return arena

    @property
    def allocated_bytes(self) -> int:
        """Allocated bytes of the memory that this arena shares with others."""
        return self._limit.allocated_bytes

    @property
    def leases(self) -> int:
        """Number of this arena's steps that use host memory now."""
        blocks = self._limit.blocks
        return sum(not block.free and block.lent_by == self.id for block in blocks)

    def open(self, nbytes: int | None = None) -> Tensor:
        """Return host memory that is lent to one step: uint8, ``nbytes`` or all it may use.

        The memory belongs to the step until the last tensor on that storage is freed. If all blocks
        are lent, another one is allocated.

        Raises:
            HostMemoryError: another block is needed and cannot be allocated.
            TransferError: ``nbytes`` is more than a step may use, or the arena is closed.
        """
        nbytes = self.nbytes if nbytes is None else nbytes
        if self.closed or not 0 <= nbytes <= self.nbytes:
            raise TransferError(
                f"a step asks for {nbytes} bytes of host memory {self.id}, which "
                + ("is closed" if self.closed else f"has {self.nbytes}"),
                code="FXR724",
            )
        if self._forked and self._device.type == "cuda":
            raise TransferError(
                f"a step begins in a forked child of the process that compiled the model for "
                f"{self._device}, where CUDA does not work. Start workers with 'spawn', or compile "
                "the model in the child",
                code="FXR721",
            )
        block, view = self._limit.lend(self)
        # Copies that are under way when a lease ends go on; those of the next lease wait for them.
        lease: Lease
        if isinstance(block, PinnedBlock):
            lease = StreamLease(block, nbytes=nbytes, device=self._device)
        else:
            lease = WorkerLease(block, nbytes=nbytes, device=self._device)
        _leases[view.ctypes.data] = lease
        view.holds = lease
        return torch.from_numpy(view)[:nbytes]

    def close(self) -> None:
        """Let no further step begin. A second call does nothing.

        The memory is freed with the last arena, and lent blocks as soon as they come back.
        """
        self.closed = True
        with self._limit.lock:
            self._limit.arenas.discard(self)
            if not self._limit.arenas:
                self._limit.blocks = []

    def allocate(self) -> Block:
        """Return a new block with the bytes that a step needs.

        Raises:
            HostMemoryError: it cannot be allocated.
        """
        if self._device.type == "cuda":
            return PinnedBlock(pinned_memory(self.nbytes, device=self._device))
        return Block(file_memory(self.nbytes, folder=self._folder))

    def _forget(self) -> None:
        """Drop, in a forked child, the blocks of the parent, and its lock, which may be held."""
        self._forked = True
        for block in self._limit.blocks:
            block.disown()
        self._limit.blocks, self._limit.lock = [], threading.RLock()


_ids = itertools.count(1)
_arenas: weakref.WeakValueDictionary[int, Arena] = weakref.WeakValueDictionary()
_leases: weakref.WeakValueDictionary[int, Lease] = weakref.WeakValueDictionary()
"""Leases by the address of their memory; each is kept alive by the view that was lent."""


def lease_of(host: Tensor) -> Lease:
    """Return the lease of the host memory ``host``.

    Raises:
        TransferError: ``host`` was not lent by an arena.
    """
    lease = _leases.get(host.untyped_storage().data_ptr())
    if lease is None:
        raise TransferError(
            "a step moves a tensor to memory that was not lent to it: its graphs must be run as "
            "they were emitted",
            code=FAULT,
        )
    return lease


@atexit.register
def _close_all() -> None:
    # Before CUDA shuts down: copies are awaited, and memory is unpinned.
    for arena in list(_arenas.values()):
        arena.close()


def _forget_all() -> None:
    """Make all arenas drop, in a forked child, the host memory of the parent."""
    for arena in list(_arenas.values()):
        arena._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def _with_index(device: torch.device) -> torch.device:
    """Return ``device`` with an index; by default, that of CUDA's current device.

    Raises:
        ValueError: it is neither a CPU nor CUDA.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"cannot move tensors between {device} and host memory: use cpu or cuda")
    index: int | None = device.index
    if device.type == "cuda" and index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
