"""The CUDA tier on the streams of a GPU."""

from __future__ import annotations

import pytest
import torch

from fxremat.runtime.arena import Arena, HostLimit
from fxremat.runtime.watch import record_transfers
from tests.moving import ops, there_and_back

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
MIB = 1 << 20


def busy(seconds_or_so: float) -> None:
    """Keep the current stream busy."""
    a = torch.rand(4096, 4096, device="cuda")
    for _ in range(int(seconds_or_so / 2e-3)):
        a = a @ a
        a = a / a.norm()


def test_on_cuda_a_storage_comes_back_bit_by_bit():
    arena = Arena(64 * MIB, device="cuda")
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


def test_on_cuda_slots_and_memory_are_reused_behind_a_busy_device():
    device = torch.device("cuda", torch.cuda.current_device())
    nbytes = 16 * MIB
    arena = Arena(nbytes, device=device)
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


def test_on_cuda_steps_of_other_sizes_share_memory():
    """Also while copies of earlier steps are still to run: no step waits for another's."""
    device = torch.device("cuda", torch.cuda.current_device())
    sizes = [1024 * n for n in (16, 9, 12, 20, 15, 64, 33, 40, 128, 100)]
    limit = HostLimit(2 * max(sizes))
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for number, nbytes in enumerate([*sizes, *sizes[::-1]]):
        host = Arena(nbytes, device=device, limit=limit).open()
        x = torch.full((nbytes,), number, dtype=torch.uint8, device=device)
        ops.offload(x, host, 0)
        ops.release(x, host, 0)
        del x
        back = ops.prefetch(host, 0, nbytes, device)
        del host
        ops.wait(back)
        wrong += (back != number).sum()
        del back
        assert limit.allocated_bytes <= 2 * max(sizes)
    assert int(wrong) == 0


def test_on_cuda_memory_is_released_when_told():
    device = torch.device("cuda", torch.cuda.current_device())
    nbytes = 16 * MIB
    arena = Arena(nbytes, device=device)
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


@pytest.mark.gpu
def test_on_cuda_the_host_does_not_wait_and_transfers_overlap():
    device = torch.device("cuda", torch.cuda.current_device())
    nbytes = 64 * MIB
    arena = Arena(2 * nbytes, device=device)
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
