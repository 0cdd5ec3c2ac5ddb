"""The CUDA tier: its order, on streams that are simulated."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from functools import partial

import pytest
from torch import Tensor

from fxremat.runtime import streams
from fxremat.runtime.arena import Arena, lease_of
from fxremat.runtime.lease import Arrival
from fxremat.runtime.streams import PinnedBlock, StreamLease, Traffic
from tests.fake_streams import Device, FakeEvent, FakeStream, fake_device
from tests.moving import CPU
from tests.stream_waits import left_out, waits

NBYTES = 64


def lease_on(block: PinnedBlock) -> StreamLease:
    return StreamLease(block, nbytes=block_bytes(block), device=CPU)


def block_bytes(block: PinnedBlock) -> int:
    assert block.bytes is not None
    return block.bytes.nbytes


def pinned(device: Device, *, slots: int) -> PinnedBlock:
    return device.pinned(device.host_memory(slots * NBYTES))


def made(device: Device, value: int) -> Tensor:
    """A tensor that a computation fills with ``value``."""
    x = device.allocate(NBYTES)
    device.write(x, value)
    return x


def step(device: Device, lease: StreamLease, *, first: int) -> tuple[list[bytes], list[bytes]]:
    """Four tensors through three slots, the last into that of the first on its way back.

    Returns what must be read, and a list of what will have been.
    """
    values: list[bytes] = []
    slots = [0, NBYTES, 2 * NBYTES, 0]
    xs = [made(device, first + i) for i in range(3)]
    for x, slot in zip(xs, slots, strict=False):
        lease.offload(x, offset=slot)
        device.progress(device.draw.randrange(3))
    del x
    for slot in slots[:3]:
        lease.release(offset=slot)
        del xs[0]
        made(device, 99)  # in the memory that was dropped just now
    back = lease.prefetch(offset=slots[0], nbytes=NBYTES, device=CPU)
    late = made(device, first + 3)
    lease.offload(late, offset=slots[3])
    Arrival.wait(back)
    device.read(back, values)
    lease.release(offset=slots[3])
    del late, back
    for slot in (slots[3], slots[2], slots[1]):
        # In memory that computations which are still queued write to, or read from.
        back = lease.prefetch(offset=slot, nbytes=NBYTES, device=CPU)
        device.progress(device.draw.randrange(4))
        Arrival.wait(back)
        device.read(back, values)
        device.write(back, 98)
        del back
    return [bytes([first + i]) * NBYTES for i in (0, 3, 2, 1)], values


@pytest.mark.parametrize("seed", range(40))
def test_any_order_of_the_streams_gives_the_same(seed: int):
    with fake_device(seed) as device:
        block = pinned(device, slots=3)
        steps = []
        for number in range(4):
            # The next step begins on the same memory while the last is still to be run.
            steps.append(step(device, lease_on(block), first=10 * number + 1))
            device.progress(device.draw.randrange(12))
        device.progress()
        for expected, values in steps:
            assert values == expected
        assert device.blocks == 3
        assert device.races == []
        block.release()


@pytest.mark.parametrize("seed", range(10))
def test_what_stays_on_the_device_can_be_prefetched(seed: int):
    """Without a release, nothing but the copies themselves orders the copies."""
    with fake_device(seed) as device:
        lease = lease_on(pinned(device, slots=1))
        for value in (5, 6):
            x = made(device, value)
            lease.offload(x, offset=0)
            back = lease.prefetch(offset=0, nbytes=NBYTES, device=CPU)
            values: list[bytes] = []
            Arrival.wait(back)
            device.read(back, values)
            device.progress()
            assert values == [bytes([value]) * NBYTES]
            lease.release(offset=0)
        assert device.races == []


def test_copies_wait_for_those_that_overlap_and_no_others():
    """Slots of other sizes in the same bytes: to wait for a copy is to wait for all before it."""
    with fake_device(0) as device:
        traffic = Traffic()
        ranges = {(0, 128): "whole", (192, 256): "apart", (64, 128): "part"}
        events = {traffic.record(device.out, *both): name for both, name in ranges.items()}

        def waits(begin: int, end: int) -> set[str]:
            stream = FakeStream(device, "B")
            traffic.hold_back(stream, begin, end)
            records = {id(event.last): name for event, name in events.items()}
            return {records[id(record)] for record in stream.queue}

        assert waits(0, 64) == {"whole"}
        assert waits(32, 65) == {"whole", "part"}
        assert waits(128, 192) == set()
        assert waits(100, 300) == {"part", "apart"}
        assert traffic.record(device.out, 64, 128) in events
        events[traffic.record(device.out, 0, 256)] = "all"
        assert waits(64, 65) == {"all"}


def test_steps_of_many_sizes_leave_few_copies_to_wait_for():
    """Slots of all sizes, step after step, in a block that plans of other sizes share."""
    with fake_device(0) as device:
        traffic = Traffic()
        for step in range(2000):
            nbytes = 64 + device.draw.randrange(64)
            for slot in range(4):
                traffic.record(device.out, slot * nbytes, (slot + 1) * nbytes)
            if step % 100 == 99:
                stream = FakeStream(device, "B")
                traffic.hold_back(stream, 0, 512)
                assert len(stream.queue) <= 12


@pytest.mark.parametrize("seed", range(10))
def test_memory_of_a_prefetch_that_was_given_up_is_safe(seed: int):
    with fake_device(seed) as device:
        lease = lease_on(pinned(device, slots=1))
        x = made(device, 5)
        lease.offload(x, offset=0)
        lease.release(offset=0)
        del x
        back = lease.prefetch(offset=0, nbytes=NBYTES, device=CPU)
        memory = back.data_ptr()
        del back
        other = made(device, 7)
        assert other.data_ptr() == memory
        device.progress()
        assert other.eq(7).all()
        assert device.races == []


def test_memory_of_an_offload_that_was_given_up_is_safe():
    """A step that ends before the release: what it drops may still be read by the copy."""
    with fake_device(0) as device:
        lease = lease_on(pinned(device, slots=1))
        x = made(device, 5)
        lease.offload(x, offset=0)
        memory = x.data_ptr()
        del x
        assert made(device, 7).data_ptr() == memory
        assert device.races == []


@pytest.mark.parametrize("left", [False, True], ids=["", "left_out"])
@pytest.mark.parametrize("call", ["self.event.synchronize", "stream.synchronize"])
def test_where_a_stream_cannot_be_made_to_wait_the_host_does(call: str, left: bool):
    """Without that, what comes next in the memory is not after the copy."""
    (wait,) = [wait for wait in waits() if wait.call == call]

    def refuse(*_given: object) -> None:
        raise RuntimeError("CUDA error")

    def copied(target: Tensor, source: Tensor) -> None:
        device.copy(target, source)
        patch.setattr(FakeEvent, "record", refuse)

    with fake_device(0) as device, contextlib.ExitStack() as stack:
        if left:
            stack.enter_context(left_out(wait))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        lease = lease_on(pinned(device, slots=1))
        x = made(device, 5)
        lease.offload(x, offset=0)
        lease.release(offset=0)
        del x
        if call == "self.event.synchronize":
            back = lease.prefetch(offset=0, nbytes=NBYTES, device=CPU)
            patch.setattr(FakeStream, "wait_event", refuse)
            del back
        else:
            patch.setattr(streams, "_copy", copied)
            with pytest.raises(RuntimeError, match="CUDA error"):
                lease.prefetch(offset=0, nbytes=NBYTES, device=CPU)
        patch.undo()
        other = made(device, 7)
        device.progress()
        assert bool(device.races) == left
        assert left or other.eq(7).all()


def test_what_was_released_is_waited_for_once():
    """To drop it later, or never, has the computations wait for nothing."""
    with fake_device(0) as device:
        lease = lease_on(pinned(device, slots=1))
        x = made(device, 5)
        lease.offload(x, offset=0)
        lease.release(offset=0)
        queued = len(device.compute[0].queue)
        del x
        assert len(device.compute[0].queue) == queued


class Interrupt(BaseException):
    """Raised somewhere within a call of the runtime."""


def interrupted(device: Device, run: Callable[[], object], *, after: int) -> bool:
    """Whether there was an interrupt: at chance number ``after`` of those that ``run`` has."""
    chances = iter(range(1 << 30))

    def between() -> None:
        if next(chances) == after:
            raise Interrupt

    device.between = between
    try:
        result = run()
    except Interrupt:
        return True
    finally:
        device.between = lambda: None
    del result  # not any earlier: that is no part of the call
    return False


def test_an_interrupted_offload_leaves_memory_safe_and_later_steps_right():
    count = 0
    while True:
        with fake_device(count) as device:
            block = pinned(device, slots=1)
            lease = lease_on(block)
            x = made(device, 5)
            if not interrupted(device, partial(lease.offload, x, offset=0), after=count):
                break
            del x
            safe_and_right(device, block)
        count += 1
    assert count > 6  # before and after each of: an event, a wait, a copy


def test_an_interrupted_prefetch_leaves_memory_safe_and_later_steps_right():
    count = 0
    while True:
        with fake_device(count) as device:
            block = pinned(device, slots=1)
            lease = lease_on(block)
            x = made(device, 5)
            lease.offload(x, offset=0)
            lease.release(offset=0)
            del x
            come_back = partial(lease.prefetch, offset=0, nbytes=NBYTES, device=CPU)
            if not interrupted(device, come_back, after=count):
                break
            safe_and_right(device, block)
        count += 1
    assert count > 6


def safe_and_right(device: Device, block: PinnedBlock) -> None:
    """Memory that was dropped is used again; so is the host's, and then it is given up."""
    kept = [made(device, 6), made(device, 7)]
    expected, values = there_and_back(device, lease_on(block))
    block.release()
    device.progress()
    assert values == expected
    assert [int(x[0]) for x in kept] == [6, 7]
    assert device.races == []


def there_and_back(device: Device, lease: StreamLease) -> tuple[list[bytes], list[bytes]]:
    values: list[bytes] = []
    lease.offload(made(device, 8), offset=0)
    lease.release(offset=0)
    back = lease.prefetch(offset=0, nbytes=NBYTES, device=CPU)
    Arrival.wait(back)
    device.read(back, values)
    return [bytes([8]) * NBYTES], values


def test_the_host_does_not_wait_and_holds_nothing():
    """Nothing is done before the device gets to it, and memory is the caller's to drop."""
    with fake_device(0) as device:
        block = pinned(device, slots=1)
        assert block.bytes is not None
        lease = lease_on(block)
        x = made(device, 5)
        gone = weakref.ref(x.untyped_storage())
        lease.offload(x, offset=0)
        lease.release(offset=0)
        del x
        assert gone() is None
        assert device.host_waits == 0
        assert not block.bytes.any()
        device.progress()
        assert (block.bytes == 5).all()


def test_a_block_is_given_up_only_when_no_copy_is_under_way():
    with fake_device(0) as device:
        block = pinned(device, slots=1)
        lease = lease_on(block)
        x = made(device, 5)
        lease.offload(x, offset=0)
        back = lease.prefetch(offset=0, nbytes=NBYTES, device=CPU)
        assert device.host_waits == 0
        block.release()
        assert block.bytes is None
        assert device.host_waits > 0
        assert back.eq(5).all()
        assert device.races == []


def test_pinned_memory_is_unpinned_with_its_owner(monkeypatch: pytest.MonkeyPatch):
    """Once, and what a step still uses with the step."""
    unpinned: list[int] = []
    with fake_device(0):
        monkeypatch.setattr(streams, "unpin", lambda memory: unpinned.append(memory.ctypes.data))
        arena = Arena(NBYTES, device="cuda:0")
        idle, used = arena.open(), arena.open()
        addresses = [idle.data_ptr(), used.data_ptr()]
        assert isinstance(lease_of(used), StreamLease)
        del idle
        assert unpinned == []
        del arena
        assert unpinned == addresses[:1]
        del used
        assert unpinned == addresses
