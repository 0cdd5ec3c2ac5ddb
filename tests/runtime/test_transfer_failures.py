"""Transfers on the CPU tier that go wrong: typed errors, nothing lost, nothing left."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch

from fxremat.errors import TransferError
from fxremat.runtime import worker
from fxremat.runtime.arena import Arena, lease_of
from tests.moving import CPU, bits, failing, ops, there_and_back

KIB = 1024


@pytest.fixture
def arena() -> Arena:
    return Arena(64 * KIB, device=CPU)


@pytest.mark.parametrize("late", ["release", "wait", "offload", "prefetch"])
def test_what_would_end_the_worker_is_an_error_at_the_next_operation(arena: Arena, late: str):
    x = torch.randn(KIB)
    host = arena.open()
    ops.offload(x, host, 4 * KIB)
    ops.release(x, host, 4 * KIB)
    begin = time.perf_counter()
    with failing(SystemExit("killed")) as go:
        go.clear()
        fresh = ops.prefetch(host, 4 * KIB, 4 * KIB, CPU)
        ops.offload(x, host, 0)
        go.set()
        with pytest.raises(
            TransferError, match=r"(?s)not made: SystemExit: killed.*Repeat it.*FXR722"
        ):
            if late == "wait":
                ops.wait(fresh)
            ops.release(x, host, 0)
        with pytest.raises(TransferError, match=r"not made: SystemExit: killed.*Repeat it"):
            if late == "offload":
                ops.offload(x, host, 8 * KIB)
            ops.prefetch(host, 4 * KIB, 4 * KIB, CPU)
    assert time.perf_counter() - begin < 5
    assert bits(there_and_back(x, arena.open())) == bits(x)


def test_what_was_still_to_be_copied_fails_with_its_step_alone(arena: Arena):
    """What had been copied is there."""
    xs = [torch.randn(KIB) for _ in range(4)]
    host, other = arena.open(), arena.open()
    with failing(SystemExit("killed"), after=1, times=1) as go:
        go.clear()
        for i, x in enumerate(xs):
            ops.offload(x, other if i == 3 else host, 4 * KIB * i)
        go.set()
        for i, x in enumerate(xs[1:3], start=1):
            with pytest.raises(TransferError, match=r"4.0 KiB was not made: SystemExit"):
                ops.release(x, host, 4 * KIB * i)
        ops.release(xs[3], other, 12 * KIB)
    assert bits(host[: 4 * KIB]) == bits(xs[0])
    assert not host[4 * KIB :].any()
    assert bits(other[12 * KIB : 16 * KIB]) == bits(xs[3])


def test_after_a_failed_copy_the_step_gets_nothing_more(arena: Arena):
    """Neither what was copied before the failure, nor what was to be copied after it."""
    x = torch.randn(KIB)
    host = arena.open()
    there_and_back(x, host)
    with failing(OSError("no such page"), after=1, times=1) as go:
        go.clear()
        before = ops.prefetch(host, 0, 4 * KIB, CPU)
        ops.offload(x, host, 4 * KIB)
        after = ops.prefetch(host, 0, 4 * KIB, CPU).zero_()
        go.set()
        there_and_back(x, arena.open())
    for fresh in (before, after):
        with pytest.raises(TransferError, match="no such page"):
            ops.wait(fresh)
    assert bits(before) == bits(x)
    assert not after.any()


def test_a_failed_copy_fails_its_step_and_no_other(arena: Arena):
    x = torch.randn(KIB)
    failed, fine = arena.open(), arena.open()
    with failing(OSError("no such page")):
        ops.offload(x, failed, 0)
        with pytest.raises(TransferError, match=r"offload of 4.0 KiB .* OSError: no such page"):
            ops.release(x, failed, 0)
    with pytest.raises(TransferError, match="no such page"):
        ops.prefetch(failed, 0, 4 * KIB, CPU)
    with pytest.raises(TransferError, match="no such page"):
        ops.offload(x, failed, 4 * KIB)
    assert bits(there_and_back(x, fine)) == bits(x)
    with failing(OSError("no such page")):
        fresh = ops.prefetch(fine, 0, 4 * KIB, CPU)
        for _ in range(2):
            with pytest.raises(TransferError, match=r"prefetch of 4.0 KiB"):
                ops.wait(fresh)


def test_a_failed_copy_holds_nothing(arena: Arena, monkeypatch):
    def fail(target: object, source: object) -> None:
        raise OSError("no such page")

    monkeypatch.setattr(worker.np, "copyto", fail)
    x = torch.randn(KIB)
    gone = weakref.ref(x.untyped_storage())
    host = arena.open()
    gc.disable()
    try:
        with pytest.raises(TransferError, match="no such page"):
            ops.offload(x, host, 0)
            ops.release(x, host, 0)
        del x
        assert gone() is None
        lease = weakref.ref(lease_of(host))
        del host
        assert arena.leases == 0
        assert lease() is None
    finally:
        gc.enable()
