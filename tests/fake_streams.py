"""CUDA streams without CUDA: work is queued, and done later in any order that is allowed.

A stream does its work in order; a wait holds it until what the event stood for, when the
wait was queued, is done. Everything else may happen in any order. An order that is missing
is found twice: vector clocks name it when the work is queued (``races``), and the work is
done in a random order, which shows as wrong data sooner or later.

Device memory is handed out as the CUDA allocator does: what is freed goes to the stream that
it was allocated on, and is handed out again at once, in the belief that whoever gets it works
on that stream. Which stream is current is told for each thread alone, as torch does.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import random
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fxremat.runtime import arena, streams
from fxremat.runtime.memory import Bytes
from fxremat.runtime.streams import PinnedBlock
from tests.clocks import Memory, Timeline

Work = Callable[[], object]

NAMES = ("A", "B", "out", "in", "host")
"""The timelines: two streams of computations, one of copies each way, and the host."""


class Record:
    """What an event stands for from one recording to the next.

    Attributes:
        clock: what comes before it.
        done: whether that is done.
    """

    def __init__(self, clock: list[int]) -> None:
        self.clock = clock
        self.done = False


class FakeEvent:
    """An event; before its first recording nothing waits for it.

    Attributes:
        last: the last recording.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.last: Record | None = None

    def record(self, stream: FakeStream) -> None:
        with self._device.call():
            self.last = record = Record(list(stream.clock))
            stream.queue.append(partial(setattr, record, "done", True))

    def synchronize(self) -> None:
        self._device.host_waits += 1
        if self.last is not None:
            self._device.host.come_after(self.last.clock)
            self._device.progress(until=self.last)


class FakeStream(Timeline):
    """A stream.

    Attributes:
        queue: what it has not done yet.
    """

    def __init__(self, device: Device, name: str) -> None:
        super().__init__(name, index=NAMES.index(name), timelines=len(NAMES))
        self.queue: deque[Work | Record] = deque()
        self._device = device

    def wait_event(self, event: FakeEvent) -> None:
        with self._device.call():
            if event.last is not None:
                self.come_after(event.last.clock)
                self.queue.append(event.last)

    def synchronize(self) -> None:
        end = Record(list(self.clock))
        self.queue.append(partial(setattr, end, "done", True))
        self._device.host_waits += 1
        self._device.host.come_after(end.clock)
        self._device.progress(until=end)

    def enqueue(self, work: Work) -> None:
        self.come_after(self._device.host.clock)
        self.tick()
        self.queue.append(work)

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


class Device:
    """Streams, memory, and what is wrong with their use.

    Attributes:
        draw: what chooses.
        compute: the streams of computations, first the one that threads begin with.
        out: of copies to the host.
        back: of copies from it.
        host: what the host has waited for.
        races: accesses that are not ordered, in words.
        wrong: computations that read something else than they should have.
        blocks: how many blocks of memory there are.
        host_waits: how often the host waited.
        between: called before and after each thing that the runtime asks of the device.
    """

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        a, b, self.out, self.back = (FakeStream(self, name) for name in NAMES[:-1])
        self.compute = (a, b)
        self.host = Timeline("host", index=NAMES.index("host"), timelines=len(NAMES))
        self.races: list[str] = []
        self.wrong: list[str] = []
        self.blocks = 0
        self.host_waits = 0
        self.between: Callable[[], None] = lambda: None
        self._thread = threading.local()
        self._free: defaultdict[tuple[FakeStream, int], list[bytearray]] = defaultdict(list)
        self._addresses: list[int] = []
        self._memories: dict[int, Memory] = {}
        # Work that is queued knows addresses only: what they are of stays mapped.
        self._kept: list[object] = []
        self._pinned: list[weakref.ref[PinnedBlock]] = []

    @property
    def current(self) -> FakeStream:
        """The current stream of this thread."""
        stream: FakeStream = getattr(self._thread, "stream", self.compute[0])
        return stream

    @contextlib.contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        """Make ``stream`` the current one of this thread."""
        before = self.current
        self._thread.stream = stream
        try:
            yield
        finally:
            self._thread.stream = before

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Something that the runtime asks of the device."""
        self.between()
        yield
        self.between()

    def order(self, first: FakeStream, second: FakeStream) -> None:
        """Make ``second`` wait for all that ``first`` has been given, as autograd does."""
        event = FakeEvent(self)
        event.record(first)
        second.wait_event(event)

    def allocate(self, nbytes: int) -> Tensor:
        """A block of the current stream: the one that was freed last, or one more."""
        stream = self.current
        pool = self._free[stream, nbytes]
        with self.call():
            if pool:
                block = pool.pop()
            else:
                block = bytearray(nbytes)
                self._note(f"block {self.blocks}", _address(block), nbytes, block)
                self.blocks += 1
            stream.come_after(self.host.clock)  # so is all that is done there
            self.races += self._memories[_address(block)].reuse(stream, what="allocates")
            tensor = torch.frombuffer(block, dtype=torch.uint8)
            weakref.finalize(tensor.untyped_storage(), pool.append, block).atexit = False
        return tensor

    def host_memory(self, nbytes: int, **asked: object) -> mmap.mmap:
        """What stands in for memory of any kind on the host."""
        del asked
        memory = mmap.mmap(-1, nbytes)
        data = np.frombuffer(memory, dtype=np.uint8)
        self._note(f"host memory {len(self._memories)}", data.ctypes.data, nbytes, data)
        return memory

    def pinned(self, memory: mmap.mmap) -> PinnedBlock:
        """A block of it, to be given up at the end."""
        block = PinnedBlock(memory)
        self._pinned.append(weakref.ref(block))
        return block

    def give_up(self) -> None:
        """Release the host memory that is still there."""
        for reference in self._pinned:
            block = reference()
            if block is not None:
                block.release()

    def unpin(self, memory: Bytes) -> None:
        """The host takes the memory away: an access to all of it."""
        known = self._memories[memory.ctypes.data]
        self.host.tick()
        self.races += known.write(self.host, 0, known.nbytes, what="unpins")

    def write(self, x: Tensor, value: int) -> None:
        """Queue a computation that fills ``x``."""
        self._access(x, write=True, what="computes")
        self.current.enqueue(partial(ctypes.memset, x.data_ptr(), value, x.numel()))

    def read(self, x: Tensor, values: list[bytes]) -> None:
        """Queue a computation that appends the content of ``x`` to ``values``."""
        self._access(x, write=False, what="computes")
        address, nbytes = x.data_ptr(), x.numel()
        self.current.enqueue(lambda: values.append(ctypes.string_at(address, nbytes)))

    def expect(self, x: Tensor, value: int) -> None:
        """Queue a computation that reads ``x``, which must be full of ``value``."""
        self._access(x, write=False, what="computes")
        self.current.enqueue(partial(self._compare, x.data_ptr(), x.numel(), value))

    def _compare(self, address: int, nbytes: int, value: int) -> None:
        found = ctypes.string_at(address, nbytes)
        if found != bytes([value]) * nbytes:
            self.wrong.append(f"{found.hex()} is read where {value:x} should be")

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy on the current stream."""
        with self.call():
            self._access(source, write=False, what="copies")
            self._access(target, write=True, what="copies")
            addresses = target.data_ptr(), source.data_ptr()
            self.current.enqueue(partial(ctypes.memmove, *addresses, source.numel()))

    def progress(self, steps: int | None = None, *, until: Record | None = None) -> None:
        """Do work of streams chosen at random.

        Args:
            steps: how many pieces of it; all there is by default.
            until: or until that is done.
        """
        every = [*self.compute, self.out, self.back]
        while (steps is None or steps > 0) and not (until is not None and until.done):
            self.draw.shuffle(every)
            if not any(stream.step() for stream in every):
                break
            steps = None if steps is None else steps - 1
        if steps is None and until is None:
            assert not any(stream.queue for stream in every), "streams wait for each other"

    def _note(self, name: str, address: int, nbytes: int, memory: object) -> None:
        bisect.insort(self._addresses, address)
        self._memories[address] = Memory(name, address=address, nbytes=nbytes)
        self._kept.append(memory)

    def _access(self, x: Tensor, *, write: bool, what: str) -> None:
        address = self._addresses[bisect.bisect_right(self._addresses, x.data_ptr()) - 1]
        memory, begin = self._memories[address], x.data_ptr() - address
        access = memory.write if write else memory.read
        # As the work that is queued next: all before it on its stream comes before it.
        by = Timeline(self.current.name, index=self.current.index, timelines=len(NAMES))
        by.come_after(self.current.clock)
        by.come_after(self.host.clock)
        by.tick()
        self.races += access(by, begin, begin + x.numel(), what=what)


def _address(block: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(block))


@contextlib.contextmanager
def fake_device(seed: int) -> Iterator[Device]:
    """Streams, events and memory of the runtime are those of the device that is given."""
    device = Device(random.Random(seed))
    empty = torch.empty

    def empty_or_block(*args: Any, **kwargs: Any) -> Tensor:
        return device.allocate(args[0]) if args[0] else empty(*args, **kwargs)

    lanes = (streams.Lane(device.out), streams.Lane(device.back))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "_new_event", partial(FakeEvent, device))
        patch.setattr(streams, "lanes", lambda index: lanes)
        patch.setattr(streams, "unpin", device.unpin)
        patch.setattr(streams, "_copy", device.copy)
        # Tensors of the fake are the CPU's: so an arena for that has pinned blocks here.
        patch.setattr(arena, "pinned_memory", device.host_memory)
        patch.setattr(arena, "file_memory", device.host_memory)
        patch.setattr(arena, "Block", device.pinned)
        patch.setattr(torch.cuda, "current_stream", lambda of: device.current)
        patch.setattr(torch.cuda, "stream", device.on)
        patch.setattr(torch, "empty", empty_or_block)
        yield device
        device.give_up()
