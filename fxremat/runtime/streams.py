"""The CUDA tier: a stream for each direction, ordered by events alone."""

from __future__ import annotations

import functools
import mmap
import os
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxremat.runtime import watch
from fxremat.runtime.lease import Lease
from fxremat.runtime.memory import Block, Bytes, unpin


def _new_event() -> Any:
    # Any: torch's stubs leave events untyped.
    event: Any = torch.cuda.Event
    return event()


@dataclass(slots=True)
class Lane:
    """The stream of one direction.

    Attributes:
        stream: what its copies run on.
    """

    stream: torch.cuda.Stream

    def wait_for_compute(self, compute: torch.cuda.Stream) -> None:
        """Run nothing more before all that ``compute`` has been given."""
        # One of its own for each copy: another thread, on a compute stream of its own, could
        # record a shared one between these two lines.
        ready = _new_event()
        ready.record(compute)
        self.stream.wait_event(ready)

    def copy(self, target: Tensor, source: Tensor, *, kind: watch.Kind) -> None:
        """Enqueue a copy."""
        times = watch.CudaTimes(kind, source.numel(), self.stream) if watch.recording() else None
        with torch.cuda.stream(self.stream):
            if times is not None:
                times.begin()
            watch.perform(lambda: _copy(target, source))
            if times is not None:
                times.end()
                watch.started(times)


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


@functools.cache
def lanes(device_index: int) -> tuple[Lane, Lane]:
    """A device's lane to host memory, and its lane from it."""
    stream: Any = torch.cuda.Stream
    device = torch.device("cuda", device_index)
    return Lane(stream(device)), Lane(stream(device))


class Traffic:
    """The last copies into, or out of, each part of a block, all on one stream.

    It belongs to the block, not to a lease: the host runs ahead of the device, so a
    lease may end, and the next one begin, while copies of the first are still to run.
    """

    def __init__(self) -> None:
        self._events: dict[tuple[int, int], Any] = {}

    def record(self, stream: torch.cuda.Stream, begin: int, end: int) -> Any:
        """An event after the copy of ``[begin, end)`` that ``stream`` was given last.

        What that range covers needs no event of its own any more: the stream is in order.
        The same range has the same event again and again.
        """
        event = self._events.get((begin, end)) or _new_event()
        event.record(stream)
        # Only now: should that fail, the copies before it are still known. Of a range that this
        # one meets what is outside of it stays, so that there are no more than parts of a block.
        met = [key for key in self._events if key[0] < end and begin < key[1]]
        for key in met:
            before, after = (key[0], begin), (end, key[1])
            own = self._events.pop(key)
            self._events |= {part: own for part in (before, after) if part[0] < part[1]}
        self._events[begin, end] = event
        return event

    def hold_back(self, stream: torch.cuda.Stream, begin: int, end: int) -> None:
        """Make ``stream`` wait for the copies that overlap ``[begin, end)``."""
        for (other_begin, other_end), event in list(self._events.items()):
            if other_begin < end and begin < other_end:
                stream.wait_event(event)

    def settle(self) -> None:
        """Have the host wait for all copies. Not in a step: before memory is given up."""
        for event in list(self._events.values()):
            event.synchronize()


class PinnedBlock(Block):
    """Page-locked memory.

    Attributes:
        written: the copies into it.
        read: the copies out of it.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        super().__init__(memory)
        self.written, self.read = Traffic(), Traffic()

    def _before_unmapping(self, memory: Bytes) -> None:
        self.written.settle()
        self.read.settle()
        unpin(memory)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy under way: its event, and the stream that its device memory belongs to."""

    event: Any
    compute: torch.cuda.Stream

    def settle(self) -> None:
        """The step is given up, and the memory is free: what comes next there is after the copy.

        Nobody handles an error of this, so the host waits where the stream cannot be made to.
        """
        try:
            self.compute.wait_event(self.event)
        except RuntimeError:
            self.event.synchronize()


class StreamLease(Lease):
    """Transfers on two streams: streams wait for events, the host for nothing.

    What a copy reads or writes on the device belongs to the compute stream, in whose order
    the allocator hands memory out. A copy from it is awaited by that stream before it is
    dropped (:meth:`release`), a copy into it before it is used; so the allocator need not
    know of the other streams. If a step is given up in between, the drop itself has that
    stream wait.
    """

    block: PinnedBlock

    def __init__(self, block: PinnedBlock, *, nbytes: int, device: torch.device) -> None:
        super().__init__(block, nbytes=nbytes, device=device)
        self._out, self._in = lanes(device.index)

    def _offload(self, source: Tensor, offset: int) -> tuple[_Copy, Any]:
        """The copy, and a finalizer of what it reads."""
        end = offset + source.numel()
        # The current stream is asked for first: inside a lane's context it is the lane.
        compute = torch.cuda.current_stream(self.device)
        self._out.wait_for_compute(compute)
        self.block.read.hold_back(self._out.stream, offset, end)
        try:
            self._out.copy(self._part(offset, end), source, kind="offload")
            copy = _Copy(self.block.written.record(self._out.stream, offset, end), compute)
            # It holds no lease: the storage may live on, and the host's memory need not.
            dropped = weakref.finalize(source.untyped_storage(), self._drop, copy, os.getpid())
            dropped.atexit = False
            return copy, dropped
        except BaseException:
            self._settle_all(self.block.written, self._out.stream, compute)
            raise

    def _release(self, copy: tuple[_Copy, Any]) -> None:
        under_way, dropped = copy
        torch.cuda.current_stream(self.device).wait_event(under_way.event)
        dropped.detach()

    def _prefetch(self, fresh: Tensor, offset: int) -> _Copy:
        end = offset + fresh.numel()
        compute = torch.cuda.current_stream(self.device)
        # The memory of fresh may be that of a tensor which earlier computations still use.
        self._in.wait_for_compute(compute)
        self.block.written.hold_back(self._in.stream, offset, end)
        try:
            self._in.copy(fresh, self._part(offset, end), kind="prefetch")
            return _Copy(self.block.read.record(self._in.stream, offset, end), compute)
        except BaseException:
            self._settle_all(self.block.read, self._in.stream, compute)
            raise

    def wait_for(self, copy: _Copy) -> None:
        """Have the current stream wait for the copy."""
        torch.cuda.current_stream(self.device).wait_event(copy.event)

    def abandon(self, copy: _Copy) -> None:
        """Have the stream that the memory goes back to wait for the copy."""
        copy.settle()

    def _settle_all(
        self, traffic: Traffic, stream: torch.cuda.Stream, compute: torch.cuda.Stream
    ) -> None:
        """A copy may be under way of which nothing else knows, as what begins one has raised."""
        try:
            _Copy(traffic.record(stream, 0, self.nbytes), compute).settle()
        except RuntimeError:
            stream.synchronize()

    @staticmethod
    def _drop(copy: _Copy, process: int) -> None:
        """Settle ``copy``, whose source was dropped without a release."""
        if process == os.getpid():  # in a forked child CUDA does not work
            copy.settle()

    def _part(self, begin: int, end: int) -> Tensor:
        assert self.block.bytes is not None
        return torch.from_numpy(self.block.bytes[begin:end])
