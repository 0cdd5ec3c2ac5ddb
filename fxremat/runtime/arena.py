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

from fxremat.errors import HostMemoryError, TransferError
from fxremat.runtime.lease import Lease
from fxremat.runtime.memory import Block, Lent, file_memory, folder_of, pinned_memory
from fxremat.runtime.streams import PinnedBlock, StreamLease
from fxremat.runtime.worker import WorkerLease
from fxremat.units import format_bytes


class HostLimit:
    """The host memory that all arenas of a module share, and the most that it may be.

    Its blocks are lent to one step each. One that came back is lent to any step that needs at
    least half of it; where no such block is there, one is allocated in place of the next smaller
    one. So what steps leave that do not overlap is at most twice what the largest of them needs.

    Attributes:
        nbytes: the most that may be allocated; ``None``: as much as it takes.
        arenas: that are lent its blocks.
        blocks: that are allocated, lent or not.
    """

    def __init__(self, nbytes: int | None = None) -> None:
        self.nbytes = nbytes
        self.arenas: weakref.WeakSet[Arena] = weakref.WeakSet()
        self.blocks: list[Block] = []
        # Taken again by a finalizer that runs meanwhile in the same thread.
        self.lock = threading.RLock()
        self._overlaps = False

    @property
    def allocated_bytes(self) -> int:
        """Bytes that are allocated, lent or not."""
        return sum(block.nbytes for block in self.blocks)

    @property
    def lent_bytes(self) -> int:
        """Bytes that steps use now."""
        return sum(block.nbytes for block in self.blocks if not block.free)

    def drop_idle(self) -> None:
        """Give up what no step uses now; a step that needs it again allocates it again."""
        with self.lock:
            self.blocks = [block for block in self.blocks if not block.free]

    def lend(self, arena: Arena) -> tuple[Block, Lent]:
        """A block for a step of ``arena``, and the view of it that is the step's.

        Raises:
            HostMemoryError: one more is needed, and cannot be had.
        """
        with self.lock:
            self._overlaps |= self.lent_bytes > 0
            block = self.idle_for(arena) or self.grow(arena)
            block.lent_by, block.lent_last = arena.id, next(_numbers)
            return block, block.lend()

    def idle_for(self, arena: Arena) -> Block | None:
        """The smallest block that a step of ``arena`` may have, of those that no step uses."""
        # Where steps overlap within a limit, what one of them has too much another may lack.
        exact = self._overlaps and self.nbytes is not None
        most = arena.nbytes * (1 if exact else 2)
        return self._next_block(arena, lambda nbytes: arena.nbytes <= nbytes <= most, min)

    def grow(self, arena: Arena) -> Block:
        """Allocate a block for ``arena``, in place of the next smaller one that no step uses.

        Raises:
            HostMemoryError: it cannot be had, or would exceed the limit.
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
                self.drop_idle()  # in its place
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
        idle = (own for own in self.blocks if own.free and own.place == arena.place)
        fitting = (own for own in idle if fits(own.nbytes))
        return choose(fitting, key=lambda own: own.nbytes, default=None)

    def _drop(self, block: Block | None) -> None:
        self.blocks = [own for own in self.blocks if own is not block]

    def _make_room(self, nbytes: int) -> None:
        """Have ``nbytes`` more fit, at the cost of what no step uses now.

        Raises:
            HostMemoryError: they do not.
        """
        limit = self.nbytes
        if limit is None:
            return
        # What was lent longest ago first: what every step takes is not given up in turn.
        for block in sorted(self.blocks, key=lambda block: block.lent_last):
            if block.free and self.allocated_bytes + nbytes > limit:
                self._drop(block)
        if self.allocated_bytes + nbytes > limit:
            # A step that was dropped in a circle of references holds its memory until then.
            gc.collect()
            self.drop_idle()
        asked = self.allocated_bytes + nbytes
        if asked > limit:
            raise HostMemoryError(self._over_limit(asked, limit), asked_bytes=asked)

    def _over_limit(self, asked: int, limit: int) -> str:
        others = len(self.blocks)
        if not others:
            return (
                f"the plan needs {format_bytes(asked)} ({asked} bytes) of host memory, "
                f"HostMemory(limit=) allows {format_bytes(limit)} ({limit}). Raise it, or plan "
                "within it"
            )
        return (
            f"a step begins while {others} others are not finished, so that "
            f"{format_bytes(asked)} ({asked} bytes) of host memory are needed; "
            f"HostMemory(limit=) allows {format_bytes(limit)} ({limit}). Raise it, or finish or "
            "drop earlier steps first: what was computed and is still held keeps its step's host "
            "memory"
        )


class Arena:
    """Host memory for the steps of one plan, in blocks that all plans of a module share.

    Pinned memory for a CUDA device; for the CPU a memory-mapped temporary file.

    A block is free exactly when the view that was lent of it is dead. So nothing has to be
    done for it to come back, and no interrupt can prevent that. Memory is given up with the
    last arena, and what a step that is not finished still uses with that step's lease.

    Args:
        nbytes: what one step needs.
        device: from where tensors are moved.
        host_dir: folder of the file, by default the system's for temporary files.
        limit: the memory, of which other arenas may have blocks as well; ``None``: memory of
            its own, without a limit.

    Attributes:
        id: by which :meth:`find` finds it.
        nbytes: what one step may use.
        place: from where tensors are moved, and the folder of the file.
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
        self.closed = self._forked = False
        self._device = _supported(torch.device(device))
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
        """Bytes that are allocated of the memory that it shares with other arenas."""
        return self._limit.allocated_bytes

    @property
    def leases(self) -> int:
        """How many of its steps use host memory now."""
        blocks = self._limit.blocks
        return sum(not block.free and block.lent_by == self.id for block in blocks)

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
        block, view = self._limit.lend(self)
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
        """Let no step begin any more. Idempotent.

        The memory is given up with the last arena, what is lent as soon as it comes back.
        """
        self.closed = True
        with self._limit.lock:
            self._limit.arenas.discard(self)
            if not self._limit.arenas:
                self._limit.blocks = []

    def allocate(self) -> Block:
        """A new block for a step.

        Raises:
            HostMemoryError: it cannot be had.
        """
        if self._device.type == "cuda":
            return PinnedBlock(pinned_memory(self.nbytes, device=self._device))
        return Block(file_memory(self.nbytes, folder=self._folder))

    def _forget(self) -> None:
        """This is a forked child: the blocks are those of its parent, and so may the lock be."""
        self._forked = True
        for block in self._limit.blocks:
            block.disown()
        self._limit.blocks, self._limit.lock = [], threading.RLock()


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
