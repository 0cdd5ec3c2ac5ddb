"""CUDA streams without CUDA: work is queued, and done later in any order that is allowed.

A stream does its work in order; a wait holds it until what the event stood for, when the
wait was queued, is done. Everything else may happen in any order, and a random one is
chosen. So an order that is missing shows as wrong data, sooner or later.

Device memory is handed out as the CUDA allocator does: what is freed is handed out again
at once, in the belief that whoever gets it works on the same stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fxremat.runtime import streams

Work = Callable[[], object]


class Record:
    """What an event stands for from one recording to the next."""

    def __init__(self) -> None:
        self.done = False


class FakeEvent:
    def __init__(self) -> None:
        self.last = Record()
        self.last.done = True

    def record(self, stream: FakeStream) -> None:
        self.last = record = Record()
        stream.queue.append(lambda: setattr(record, "done", True))

    def synchronize(self) -> None:
        assert self.last.done, "the host waits"


class FakeStream:
    def __init__(self) -> None:
        self.queue: deque[Work | Record] = deque()

    def wait_event(self, event: FakeEvent) -> None:
        self.queue.append(event.last)

    def step(self) -> bool:
        """Do the next piece of work, if there is one that may be done."""
        if not self.queue:
            return False
        first = self.queue[0]
        if isinstance(first, Record):
            if not first.done:
                return False
        else:
            first()
        self.queue.popleft()
        return True


@dataclass
class Device:
    """Streams, and memory in blocks of one size."""

    draw: random.Random
    block_bytes: int
    compute: FakeStream = field(default_factory=FakeStream)
    out: FakeStream = field(default_factory=FakeStream)
    back: FakeStream = field(default_factory=FakeStream)
    free: list[bytearray] = field(default_factory=list)
    blocks: int = 0

    def __post_init__(self) -> None:
        self.current = self.compute

    def allocate(self, nbytes: int) -> Tensor:
        """A block: the one that was freed last, or one more."""
        assert nbytes == self.block_bytes
        if not self.free:
            self.free.append(bytearray(nbytes))
            self.blocks += 1
        memory = self.free.pop()
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        # Work that is queued knows addresses only, as a device does: it keeps nothing alive.
        weakref.finalize(tensor.untyped_storage(), self.free.append, memory).atexit = False
        return tensor

    def write(self, x: Tensor, value: int) -> None:
        """Queue a computation that fills ``x``."""
        self.compute.queue.append(partial(ctypes.memset, x.data_ptr(), value, x.numel()))

    def read(self, x: Tensor, values: list[bytes]) -> None:
        """Queue a computation that appends the content of ``x`` to ``values``."""
        address, nbytes = x.data_ptr(), x.numel()
        self.compute.queue.append(lambda: values.append(ctypes.string_at(address, nbytes)))

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy on the current stream."""
        addresses = target.data_ptr(), source.data_ptr()
        self.current.queue.append(partial(ctypes.memmove, *addresses, source.numel()))

    def progress(self, steps: int | None = None) -> None:
        """Do ``steps`` pieces of work of streams chosen at random; all there is by default."""
        every = [self.compute, self.out, self.back]
        while steps is None or steps > 0:
            self.draw.shuffle(every)
            if not any(stream.step() for stream in every):
                break
            steps = None if steps is None else steps - 1
        if steps is None:
            assert not any(stream.queue for stream in every), "streams wait for each other"


@contextlib.contextmanager
def fake_device(seed: int, *, block_bytes: int) -> Iterator[Device]:
    """Streams, events and memory of the runtime are those of the device that is given."""
    device = Device(random.Random(seed), block_bytes)
    empty = torch.empty

    @contextlib.contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        before, device.current = device.current, stream
        yield
        device.current = before

    def empty_or_block(*args: Any, **kwargs: Any) -> Tensor:
        return device.allocate(args[0]) if args[0] else empty(*args, **kwargs)

    lanes = (streams.Lane(device.out), streams.Lane(device.back))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "_new_event", FakeEvent)
        patch.setattr(streams, "lanes", lambda index: lanes)
        patch.setattr(streams, "unpin", lambda memory: None)
        patch.setattr(torch.cuda, "current_stream", lambda device_: device.current)
        patch.setattr(torch.cuda, "stream", on)
        patch.setattr(torch, "empty", empty_or_block)
        patch.setattr(streams, "_copy", device.copy)
        yield device
