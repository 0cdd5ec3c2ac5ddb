"""What moves activations, on the CPU tier."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
from torch import Tensor

from fxremat.errors import TransferError
from fxremat.runtime.arena import Arena
from fxremat.runtime.lease import Arrival
from fxremat.runtime.watch import record_transfers, recording
from fxremat.torch_compat import AllocationLog
from tests.moving import CPU, bits, delayed, failing, held_back, ops, there_and_back

KIB = 1024


@pytest.fixture
def arena() -> Arena:
    return Arena(64 * KIB, device=CPU)


TENSORS = {
    "float": torch.randn(7, 5),
    "bool": torch.randn(33) > 0,
    "bfloat16": torch.randn(9, 3).bfloat16(),
    "complex": torch.randn(4, 4, dtype=torch.complex64),
    "int64": torch.arange(11),
    "expanded": torch.randn(3, 1).expand(3, 8),
    "scalar, expanded": torch.tensor(2.5).expand(16),
    "sliced": torch.randn(8, 8)[2:5, ::3],
    "transposed": torch.randn(6, 4).t(),
    "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
    "conjugate view": torch.view_as_real(torch.randn(5, dtype=torch.complex128)),
    "empty": torch.empty(0, 3),
}


@pytest.mark.parametrize("x", TENSORS.values(), ids=TENSORS)
def test_a_storage_comes_back_bit_by_bit(arena: Arena, x: Tensor):
    back = there_and_back(x, ops.open_arena(arena.id, 16 * KIB), 512)
    assert back.stride() == x.stride()
    assert back.dtype == x.dtype
    assert bits(back) == bits(x)
    assert not x.numel() or back.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_of_a_view_the_whole_storage_moves(arena: Arena):
    whole = torch.randn(100)
    view = whole[40:50]
    host = arena.open()
    ops.offload(view, host, 1024)
    ops.release(view, host, 1024)
    assert bits(host[1024:1424]) == bits(whole)
    assert not host[:1024].any()
    assert not host[1424:].any()


def test_offload_does_not_wait_and_release_does(arena: Arena):
    x = torch.randn(256)
    host = arena.open()
    with held_back() as go:
        ops.offload(x, host, 0)
        assert not host.any()
        threading.Timer(0.05, go.set).start()
        ops.release(x, host, 0)
    assert bits(host[:KIB]) == bits(x)


def test_prefetch_does_not_wait_and_wait_does(arena: Arena):
    x = torch.randn(256)
    host = arena.open()
    ops.offload(x, host, 0)
    ops.release(x, host, 0)
    with held_back() as go:
        fresh = ops.prefetch(host, 0, KIB, CPU)
        fresh.zero_()
        threading.Timer(0.05, go.set).start()
        ops.wait(fresh.view(torch.float32)[3:])
    assert bits(fresh) == bits(x)
    assert fresh.data_ptr() not in Arrival._pending
    ops.wait(fresh)


def test_what_happens_to_the_source_after_release_does_not_matter(arena: Arena):
    x = torch.randn(256)
    before = bits(x)
    host = arena.open()
    with delayed(0):
        ops.offload(x, host, 0)
        ops.release(x, host, 0)
        x.zero_()
        fresh = ops.prefetch(host, 0, KIB, CPU)
        ops.wait(fresh)
    assert bits(fresh) == before


def test_a_slot_is_reused_over_steps_under_delays(arena: Arena):
    """Three tensors in two slots: the third is offloaded while the first is on its way back."""
    slots = (0, 4 * KIB, 0)
    with delayed(1, most_s=0.01):
        for step in range(8):
            host = ops.open_arena(arena.id, 8 * KIB)
            xs = [torch.randn(KIB, generator=torch.Generator().manual_seed(10 * step + i))
                  for i in range(3)]  # fmt: skip
            expected = [bits(x) for x in xs]
            ops.offload(xs[0], host, slots[0])
            ops.offload(xs[1], host, slots[1])
            ops.release(xs[0], host, slots[0])
            ops.release(xs[1], host, slots[1])
            first = ops.prefetch(host, slots[0], 4 * KIB, CPU)
            ops.offload(xs[2], host, slots[2])
            ops.release(xs[2], host, slots[2])
            xs.clear()
            others = [ops.prefetch(host, slots[i], 4 * KIB, CPU) for i in (2, 1)]
            for fresh in (first, *others):
                ops.wait(fresh)
            assert [bits(x) for x in (first, *reversed(others))] == expected
            del host
    assert arena.allocated_bytes == arena.nbytes


def test_memory_is_released_when_told(arena: Arena):
    """The allocator's log of this thread, event by event, under delays."""
    nbytes = 32 * KIB
    host = arena.open()
    for seed in range(5):
        with delayed(seed, most_s=0.005), AllocationLog() as log:
            x = torch.empty(nbytes, dtype=torch.uint8)
            ops.offload(x, host, 0)
            ops.release(x, host, 0)
            del x
            fresh = ops.prefetch(host, 0, nbytes, CPU)
            ops.wait(fresh)
            del fresh
        assert [change for _mark, change in log.events] == [nbytes, -nbytes, nbytes, -nbytes]


def test_a_prefetch_outlives_the_names_of_the_host_memory(arena: Arena):
    """Emitted code drops the host tensor after its last prefetch, and waits later."""
    x = torch.randn(KIB)
    host = arena.open()
    ops.offload(x, host, 0)
    ops.release(x, host, 0)
    with held_back() as go:
        fresh = ops.prefetch(host, 0, 4 * KIB, CPU)
        del host
        assert arena.leases == 0
        late = arena.open()
        ops.offload(torch.zeros(KIB), late, 0)
        threading.Timer(0.05, go.set).start()
        ops.wait(fresh)
    assert bits(fresh) == bits(x)


def test_a_dropped_prefetch_is_forgotten(arena: Arena):
    """Its memory is free when its copy has been made, and is nobody's arrival then."""
    host = arena.open()
    ops.offload(torch.ones(KIB), host, 0)
    with held_back() as go:
        fresh = ops.prefetch(host, 0, 4 * KIB, CPU)
        gone = weakref.ref(fresh.untyped_storage())
        address = fresh.data_ptr()
        del fresh
        assert gone() is not None
        go.set()
        there_and_back(torch.ones(3), host, 8 * KIB)
    assert gone() is None
    assert address not in Arrival._pending


def test_operations_that_do_not_fit_the_plan_are_refused(arena: Arena):
    x = torch.randn(KIB)
    host = arena.open(8 * KIB)
    with pytest.raises(TransferError, match="cannot offload 4096 bytes at offset 4608"):
        ops.offload(x, host, 4608)
    with pytest.raises(TransferError, match="cannot offload 4096 bytes at offset -1"):
        ops.offload(x, host, -1)
    with pytest.raises(TransferError, match=r"cannot release offset 512 .* nothing was offloaded"):
        ops.release(x, host, 512)
    with pytest.raises(TransferError, match=r"cannot prefetch offset 0 .* nothing was offloaded"):
        ops.prefetch(host, 0, 4 * KIB, CPU)
    ops.offload(x, host, 0)
    with pytest.raises(TransferError, match=r"cannot prefetch 4095 bytes .* 4096 were offloaded"):
        ops.prefetch(host, 0, 4095, CPU)
    with pytest.raises(TransferError, match="with meta: the host memory was made for cpu"):
        ops.prefetch(host, 0, KIB, torch.device("meta"))
    ops.release(x, host, 0)


def test_memory_that_was_not_lent_is_refused(arena: Arena):
    x, host = torch.randn(KIB), torch.zeros(8 * KIB, dtype=torch.uint8)
    for move in (
        lambda: ops.offload(x, host, 0),
        lambda: ops.release(x, host, 0),
        lambda: ops.prefetch(host, 0, KIB, CPU),
    ):
        with pytest.raises(TransferError, match="not lent to it"):
            move()
    ops.wait(x)  # nothing is under way


def test_transfers_are_recorded_as_they_ran(arena: Arena):
    x = torch.randn(KIB)
    host = arena.open()
    there_and_back(x, host)
    assert not recording()
    with delayed(5, most_s=0.02):
        begin_s = time.perf_counter()
        with record_transfers() as events:
            there_and_back(x, host)
            ops.offload(x[:8], host, 8 * KIB)
        assert not recording()
        there_and_back(x, host)
    assert [(e.kind, e.nbytes) for e in events] == [
        ("offload", 4 * KIB),
        ("prefetch", 4 * KIB),
        ("offload", 4 * KIB),
    ]
    times = [begin_s, *(t for e in events for t in (e.begin_s, e.end_s)), time.perf_counter()]
    assert times == sorted(times)


def test_failed_transfers_are_not_recorded(arena: Arena):
    x = torch.randn(KIB)
    host = arena.open()
    with record_transfers() as events:
        there_and_back(x, host)
        with failing(SystemExit()), pytest.raises(TransferError):
            ops.offload(x, host, 0)
            ops.release(x, host, 0)
    assert [e.kind for e in events] == ["offload", "prefetch"]


EXIT = """
import atexit, sys, threading, time, torch

@atexit.register  # first, so that it runs last
def threads_left():
    print([thread.name for thread in threading.enumerate()])

from fxremat.runtime.arena import Arena
from fxremat.runtime.lease import Arrival
from tests.moving import delayed, ops
arena = Arena(1 << 22, device="cpu", host_dir=sys.argv[1])
host = arena.open()
with delayed(0, most_s=0.2):
    ops.offload(torch.ones(1 << 20), host, 0)
    fresh = ops.prefetch(host, 0, 1 << 22, torch.device("cpu"))
    time.sleep(0.01)
    sys.exit(7)
"""


def test_the_interpreter_exits_in_the_middle_of_a_copy(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", EXIT, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == "['MainThread']\n"
    assert not list(tmp_path.iterdir())


def test_a_fresh_storage_may_be_larger_than_what_was_offloaded():
    """Plans count what an allocator hands out, which is more than what was asked for."""
    x = torch.arange(100, dtype=torch.uint8)
    arena = Arena(512, device=CPU)
    host = ops.open_arena(arena.id, 512)
    ops.offload(x, host, 0)
    ops.release(x, host, 0)
    fresh = ops.prefetch(host, 0, 512, CPU)
    ops.wait(fresh)
    assert fresh.numel() == 512
    assert torch.equal(fresh[:100], x)
