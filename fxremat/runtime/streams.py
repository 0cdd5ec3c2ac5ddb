"""Transfers on CUDA: one stream for each direction, ordered by events."""

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
    """The stream on which all copies to host memory, or all copies from it, run."""

    stream: torch.cuda.Stream

    def wait_for_compute(self, compute: torch.cuda.Stream) -> None:
        """Let all further copies wait for everything that is enqueued on ``compute``."""
        # Each copy has a new event: another thread with another compute stream could record a
        # shared one between these two lines.
        ready = _new_event()
        ready.record(compute)
        self.stream.wait_event(ready)

    def copy(self, target: Tensor, source: Tensor, *, kind: watch.Kind) -> None:
        """Enqueue a copy of ``source`` into ``target``, and time it if transfers are recorded."""
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
    """Return the lanes of a device: that of copies to host memory, and that of copies from it."""
    stream: Any = torch.cuda.Stream
    device = torch.device("cuda", device_index)
    return Lane(stream(device)), Lane(stream(device))


class Traffic:
    """Events of the last copies into, or out of, each part of a block, all on one stream.

    It belongs to the block, not to a lease: the host runs ahead of the device, so a lease may end,
    and the next one begin, before the copies of the first have run.
    """

    def __init__(self) -> None:
        self._events: dict[tuple[int, int], Any] = {}

    def record(self, stream: torch.cuda.Stream, begin: int, end: int) -> Any:
        """Record and return an event after the latest copy on ``stream``.

        The copy is of the bytes ``[begin, end)`` of the block. Since the stream is in order, this
        event replaces those of the range. A range always has the same event.
        """
        event = self._events.get((begin, end)) or _new_event()
        event.record(stream)
        # Only after recording, which may fail: earlier copies must not be forgotten. Ranges that
        # overlap this one are cut, so that there are never more of them than parts of a block.
        met = [key for key in self._events if key[0] < end and begin < key[1]]
        for key in met:
            before, after = (key[0], begin), (end, key[1])
            cut = self._events.pop(key)
            self._events |= {part: cut for part in (before, after) if part[0] < part[1]}
        self._events[begin, end] = event
        return event

    def hold_back(self, stream: torch.cuda.Stream, begin: int, end: int) -> None:
        """Let ``stream`` wait for the copies that overlap bytes ``[begin, end)`` of the block."""
        for (other_begin, other_end), event in list(self._events.items()):
            if other_begin < end and begin < other_end:
                stream.wait_event(event)

    def wait_until_copied(self) -> None:
        """Let the host wait for all recorded copies, which is done only before memory is freed."""
        for event in list(self._events.values()):
            event.synchronize()


class PinnedBlock(Block):
    """Page-locked memory, with the copies into it (``written``) and out of it (``read``)."""

    def __init__(self, memory: mmap.mmap) -> None:
        super().__init__(memory)
        self.written, self.read = Traffic(), Traffic()

    def _before_unmapping(self, memory: Bytes) -> None:
        self.written.wait_until_copied()
        self.read.wait_until_copied()
        unpin(memory)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy under way: its event, and the stream that its device memory belongs to."""

    event: Any
    compute: torch.cuda.Stream

    def wait_until_copied(self) -> None:
        """Let the next user of the device memory wait for the copy, because the step was given up.

        Nobody handles an error of this, so the host waits if the stream cannot.
        """
        try:
            self.compute.wait_event(self.event)
        except RuntimeError:
            self.event.synchronize()


class StreamLease(Lease):
    """Transfers on two streams, which wait for events; the host waits for nothing.

    The device memory of a copy belongs to the compute stream, in whose order the allocator hands it
    out. The compute stream waits for a copy from that memory before the memory is freed
    (:meth:`release`), and for a copy into it before it is used. So the allocator need not know
    about the other streams. If a step is given up in between, freeing the memory makes the compute
    stream wait.
    """

    block: PinnedBlock

    def __init__(self, block: PinnedBlock, *, nbytes: int, device: torch.device) -> None:
        super().__init__(block, nbytes=nbytes, device=device)
        self._out, self._in = lanes(device.index)

    def _offload(self, source: Tensor, offset: int) -> tuple[_Copy, Any]:
        """Start to copy ``source``; return the copy, and a finalizer of the storage it reads."""
        end = offset + source.numel()
        # Inside a lane's context, the current stream is that of the lane.
        compute = torch.cuda.current_stream(self.device)
        self._out.wait_for_compute(compute)
        self.block.read.hold_back(self._out.stream, offset, end)
        try:
            self._out.copy(self._part(offset, end), source, kind="offload")
            copy = _Copy(self.block.written.record(self._out.stream, offset, end), compute)
            # The finalizer holds no lease: the storage may outlive the host memory.
            dropped = weakref.finalize(source.untyped_storage(), self._drop, copy, os.getpid())
            dropped.atexit = False
            return copy, dropped
        except BaseException:
            self._wait_for_unfinished(self.block.written, self._out.stream, compute)
            raise

    def _release(self, copy: tuple[_Copy, Any]) -> None:
        under_way, dropped = copy
        torch.cuda.current_stream(self.device).wait_event(under_way.event)
        dropped.detach()

    def _prefetch(self, fresh: Tensor, offset: int) -> _Copy:
        end = offset + fresh.numel()
        compute = torch.cuda.current_stream(self.device)
        # Computations that are enqueued already may still use the memory of ``fresh``.
        self._in.wait_for_compute(compute)
        self.block.written.hold_back(self._in.stream, offset, end)
        try:
            self._in.copy(fresh, self._part(offset, end), kind="prefetch")
            return _Copy(self.block.read.record(self._in.stream, offset, end), compute)
        except BaseException:
            self._wait_for_unfinished(self.block.read, self._in.stream, compute)
            raise

    def wait_for(self, copy: _Copy) -> None:
        """Let the current stream wait for ``copy``."""
        torch.cuda.current_stream(self.device).wait_event(copy.event)

    def abandon(self, copy: _Copy) -> None:
        """Let the stream that gets the device memory back wait for ``copy``."""
        copy.wait_until_copied()

    def _wait_for_unfinished(
        self, traffic: Traffic, stream: torch.cuda.Stream, compute: torch.cuda.Stream
    ) -> None:
        """Wait for a copy that may be under way although starting it has raised an error.

        Args:
            traffic: copies in the direction of this one.
            stream: the stream of the copy.
            compute: the stream that waits, to which the copy's device memory belongs.
        """
        try:
            _Copy(traffic.record(stream, 0, self.nbytes), compute).wait_until_copied()
        except RuntimeError:
            stream.synchronize()

    @staticmethod
    def _drop(copy: _Copy, process: int) -> None:
        """Let the next user of the device memory wait for ``copy``, as there was no release.

        ``process`` is the id of the process that started the copy; others do nothing.
        """
        if process == os.getpid():  # CUDA does not work in a forked child
            copy.wait_until_copied()

    def _part(self, begin: int, end: int) -> Tensor:
        assert self.block.bytes is not None
        return torch.from_numpy(self.block.bytes[begin:end])
