"""The CUDA tier: its order on streams that are simulated, and on those of a GPU."""

from __future__ import annotations

import mmap
import weakref

import pytest
import torch
from torch import Tensor

from fxremat.runtime import arena as arena_module
from fxremat.runtime import streams
from fxremat.runtime.arena import Arena, lease_of
from fxremat.runtime.lease import Arrival
from fxremat.runtime.streams import PinnedBlock, StreamLease, Traffic
from fxremat.runtime.watch import record_transfers
from tests.fake_streams import Device, FakeStream, fake_device
from tests.moving import CPU, ops, there_and_back

NBYTES = 64


def lease_on(block: PinnedBlock) -> StreamLease:
    return StreamLease(block, nbytes=block_bytes(block), device=CPU)


def block_bytes(block: PinnedBlock) -> int:
    assert block.bytes is not None
    return block.bytes.nbytes


def pinned(slots: int) -> PinnedBlock:
    return PinnedBlock(mmap.mmap(-1, slots * NBYTES))


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
    with fake_device(seed, block_bytes=NBYTES) as device:
        block = pinned(3)
        steps = []
        for number in range(4):
            # The next step begins on the same memory while the last is still to be run.
            steps.append(step(device, lease_on(block), first=10 * number + 1))
            device.progress(device.draw.randrange(12))
        device.progress()
        for expected, values in steps:
            assert values == expected
        assert device.blocks == 3
        block.release()


@pytest.mark.parametrize("seed", range(10))
def test_what_stays_on_the_device_can_be_prefetched(seed: int):
    """Without a release, nothing but the copies themselves orders the copies."""
    with fake_device(seed, block_bytes=NBYTES) as device:
        lease = lease_on(pinned(1))
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


def test_copies_wait_for_those_that_overlap_and_no_others():
    """Slots of other sizes in the same bytes."""
    with fake_device(0, block_bytes=NBYTES) as device:
        traffic = Traffic()
        ranges = {(0, 128): "whole", (192, 256): "apart", (64, 128): "part"}
        events = {traffic.event(*both): name for both, name in ranges.items()}
        for event in events:
            event.record(device.out)

        def waits(begin: int, end: int) -> set[str]:
            stream = FakeStream()
            traffic.hold_back(stream, begin, end)
            records = {id(event.last): name for event, name in events.items()}
            return {records[id(record)] for record in stream.queue}

        assert waits(0, 64) == {"whole"}
        assert waits(32, 65) == {"whole", "part"}
        assert waits(128, 192) == set()
        assert waits(100, 300) == {"whole", "part", "apart"}
        assert traffic.event(64, 128) in events
        events[traffic.event(0, 256)] = "all"
        assert waits(64, 65) == {"all"}


@pytest.mark.parametrize("seed", range(10))
def test_memory_of_a_prefetch_that_was_given_up_is_safe(seed: int):
    with fake_device(seed, block_bytes=NBYTES) as device:
        lease = lease_on(pinned(1))
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


def test_the_host_does_not_wait_and_holds_nothing():
    """Nothing is done before the device gets to it, and memory is the caller's to drop."""
    with fake_device(0, block_bytes=NBYTES) as device:
        block = pinned(1)
        assert block.bytes is not None
        lease = lease_on(block)
        x = made(device, 5)
        gone = weakref.ref(x.untyped_storage())
        lease.offload(x, offset=0)
        lease.release(offset=0)
        del x
        assert gone() is None
        assert not block.bytes.any()
        device.progress()
        assert (block.bytes == 5).all()


def test_a_block_is_given_up_only_when_no_copy_is_under_way():
    with fake_device(0, block_bytes=NBYTES) as device:
        block = pinned(1)
        lease = lease_on(block)
        x = made(device, 5)
        lease.offload(x, offset=0)
        with pytest.raises(AssertionError, match="the host waits"):
            block.release()
        device.progress()
        back = lease.prefetch(offset=0, nbytes=NBYTES, device=CPU)
        with pytest.raises(AssertionError, match="the host waits"):
            block.release()
        device.progress()
        assert back.eq(5).all()
        block.release()
        assert block.bytes is None


def test_pinned_memory_is_unpinned_with_its_owner(monkeypatch: pytest.MonkeyPatch):
    """Once, and what a step still uses with the step."""
    unpinned: list[int] = []
    with fake_device(0, block_bytes=NBYTES):
        monkeypatch.setattr(
            arena_module, "pinned_memory", lambda nbytes, *, device: mmap.mmap(-1, nbytes)
        )
        monkeypatch.setattr(streams, "unpin", lambda memory: unpinned.append(memory.ctypes.data))
        arena = Arena.create(NBYTES, device="cuda:0")
        idle, used = arena.open(), arena.open()
        addresses = [idle.data_ptr(), used.data_ptr()]
        assert isinstance(lease_of(used), StreamLease)
        del idle
        assert unpinned == []
        del arena
        assert unpinned == addresses[:1]
        del used
        assert unpinned == addresses


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
MIB = 1 << 20


def busy(seconds_or_so: float) -> None:
    """Keep the current stream busy."""
    a = torch.rand(4096, 4096, device="cuda")
    for _ in range(int(seconds_or_so / 2e-3)):
        a = a @ a
        a = a / a.norm()


@pytest.mark.cuda
@needs_cuda
def test_on_cuda_a_storage_comes_back_bit_by_bit():
    arena = Arena.create(64 * MIB, device="cuda")
    for x in (
        torch.randn(1000, 1000, device="cuda"),
        torch.randn(999, device="cuda").bfloat16()[3:],
        torch.rand(77, device="cuda") > 0.5,
        torch.randn(8, 1, device="cuda").expand(8, 100),
    ):
        host = ops.open_arena(arena.id, 64 * MIB)
        assert host.is_pinned()
        assert there_and_back(x, host, 512).equal(x)
        del host
    torch.cuda.synchronize()
    assert arena.allocated_bytes == 64 * MIB


@pytest.mark.cuda
@needs_cuda
def test_on_cuda_slots_and_memory_are_reused_behind_a_busy_device():
    device = torch.device("cuda", torch.cuda.current_device())
    nbytes = 16 * MIB
    arena = Arena.create(nbytes, device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for number in range(1, 9):
        busy(0.01)
        host = arena.open()
        x = torch.full((nbytes,), number, dtype=torch.uint8, device=device)
        ops.offload(x, host, 0)
        ops.release(x, host, 0)
        del x
        other = torch.full((nbytes,), 255, dtype=torch.uint8, device=device)
        other.add_(1)
        del other
        back = ops.prefetch(host, 0, nbytes, device)
        del host
        ops.wait(back)
        wrong += (back != number).sum()
        del back
    assert int(wrong) == 0
    assert arena.allocated_bytes == nbytes


@pytest.mark.cuda
@needs_cuda
def test_on_cuda_memory_is_released_when_told():
    device = torch.device("cuda", torch.cuda.current_device())
    nbytes = 16 * MIB
    arena = Arena.create(nbytes, device=device)
    before = torch.cuda.memory_allocated(device)
    host = arena.open()
    x = torch.ones(nbytes, dtype=torch.uint8, device=device)
    ops.offload(x, host, 0)
    ops.release(x, host, 0)
    del x
    assert torch.cuda.memory_allocated(device) == before
    back = ops.prefetch(host, 0, nbytes, device)
    ops.wait(back)
    del back
    assert torch.cuda.memory_allocated(device) == before


@pytest.mark.cuda
@needs_cuda
def test_on_cuda_the_host_does_not_wait_and_transfers_overlap():
    device = torch.device("cuda", torch.cuda.current_device())
    nbytes = 64 * MIB
    arena = Arena.create(2 * nbytes, device=device)
    host = arena.open()
    x = torch.ones(nbytes, dtype=torch.uint8, device=device)
    there_and_back(x, host, nbytes)
    torch.cuda.synchronize()
    with record_transfers() as events, torch.cuda.device(device):
        busy(0.05)
        torch.cuda.set_sync_debug_mode("error")
        try:
            ops.offload(x, host, 0)
            back = ops.prefetch(host, nbytes, nbytes, device)
            ops.release(x, host, 0)
            ops.wait(back)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not torch.cuda.current_stream().query()
    offload, prefetch = sorted(events, key=lambda event: event.kind)
    assert (offload.nbytes, prefetch.nbytes) == (nbytes, nbytes)
    assert max(offload.begin_s, prefetch.begin_s) < min(offload.end_s, prefetch.end_s)
