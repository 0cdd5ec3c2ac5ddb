"""The CUDA tier: a stream for each direction, ordered by events alone."""

from __future__ import annotations

import functools
import mmap
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
    """Of a device the lane to host memory, and the lane from it."""
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

    def event(self, begin: int, end: int) -> Any:
        """The event to record after a copy of ``[begin, end)``.

        What that range covers needs no event of its own any more: the stream is in order.
        The same range has the same event again and again.
        """
        event = self._events.pop((begin, end), None) or _new_event()
        covered = [key for key in self._events if begin <= key[0] and key[1] <= end]
        for key in covered:
            del self._events[key]
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
class _Coming:
    """A prefetch under way: its event, and the stream that its memory belongs to."""

    event: Any
    compute: torch.cuda.Stream


class StreamLease(Lease):
    """Transfers on two streams: streams wait for events, the host for nothing.

    What a copy reads or writes on the device belongs to the compute stream, in whose order
    the allocator hands memory out. A copy from it is awaited by that stream before it is
    dropped (:meth:`release`), a copy into it before it is used; so the allocator need not
    know of the other streams.
    """

    block: PinnedBlock

    def __init__(self, block: PinnedBlock, *, nbytes: int, device: torch.device) -> None:
        super().__init__(block, nbytes=nbytes, device=device)
        self._out, self._in = lanes(device.index)
        self._offloads: dict[int, Any] = {}

    def _offload(self, source: Tensor, offset: int) -> None:
        end = offset + source.numel()
        # The current stream is asked for first: inside a lane's context it is the lane.
        compute = torch.cuda.current_stream(self.device)
        self._out.wait_for_compute(compute)
        self.block.read.hold_back(self._out.stream, offset, end)
        self._out.copy(self._part(offset, end), source, kind="offload")
        event = self.block.written.event(offset, end)
        event.record(self._out.stream)
        self._offloads[offset] = event

    def _release(self, offset: int) -> None:
        torch.cuda.current_stream(self.device).wait_event(self._offloads[offset])

    def _prefetch(self, fresh: Tensor, offset: int) -> _Coming:
        end = offset + fresh.numel()
        compute = torch.cuda.current_stream(self.device)
        # The memory of fresh may be that of a tensor which earlier computations still use.
        self._in.wait_for_compute(compute)
        self.block.written.hold_back(self._in.stream, offset, end)
        self._in.copy(fresh, self._part(offset, end), kind="prefetch")
        event = self.block.read.event(offset, end)
        event.record(self._in.stream)
        return _Coming(event, compute)

    def wait_for(self, token: object) -> None:
        """Have the current stream wait for the copy."""
        assert isinstance(token, _Coming)
        torch.cuda.current_stream(self.device).wait_event(token.event)

    def abandon(self, token: object) -> None:
        """Have the stream that the memory goes back to wait for the copy."""
        assert isinstance(token, _Coming)
        token.compute.wait_event(token.event)

    def _part(self, begin: int, end: int) -> Tensor:
        assert self.block.bytes is not None
        return torch.from_numpy(self.block.bytes[begin:end])
