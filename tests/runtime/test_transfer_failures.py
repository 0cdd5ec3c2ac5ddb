"""Transfers on the CPU tier that go wrong: typed errors, nothing lost, nothing left."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType

import pytest
import torch
from torch import Tensor

from fxremat.errors import TransferError
from fxremat.runtime import worker
from fxremat.runtime.arena import Arena, lease_of
from tests.moving import CPU, bits, failing, ops, there_and_back

KIB = 1024


@pytest.fixture
def arena() -> Arena:
    return Arena(64 * KIB, device=CPU)


@pytest.mark.parametrize("late", ["release", "wait", "offload", "prefetch"])
def test_a_dead_worker_is_an_error_at_the_next_operation(arena: Arena, late: str, monkeypatch):
    monkeypatch.setattr(worker, "_POLL_S", 20.0)
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
        while arena_worker(host).alive():
            time.sleep(0.001)
        with pytest.raises(TransferError, match=r"not made: SystemExit: killed.*Repeat it"):
            if late == "release":
                ops.release(x, host, 0)
            elif late == "wait":
                ops.wait(fresh)
            elif late == "offload":
                ops.offload(x, host, 8 * KIB)
            else:
                ops.prefetch(host, 4 * KIB, 4 * KIB, CPU)
    assert time.perf_counter() - begin < 5
    assert bits(there_and_back(x, arena.open())) == bits(x)


def arena_worker(host: Tensor) -> worker.Worker:
    lease = lease_of(host)
    assert isinstance(lease, worker.WorkerLease)
    return lease.worker


def test_what_a_dead_worker_had_still_to_do_fails(arena: Arena):
    """Of this step and of others; what it had done is done."""
    xs = [torch.randn(KIB) for _ in range(4)]
    host, other = arena.open(), arena.open()
    with failing(SystemExit("killed"), after=1) as go:
        go.clear()
        for i, x in enumerate(xs):
            ops.offload(x, other if i == 3 else host, 4 * KIB * i)
        go.set()
        for i, x in enumerate(xs[1:], start=1):
            with pytest.raises(TransferError, match=r"4.0 KiB was not made: SystemExit"):
                ops.release(x, other if i == 3 else host, 4 * KIB * i)
    assert bits(host[: 4 * KIB]) == bits(xs[0])
    assert not host[4 * KIB :].any()
    assert not other.any()
    assert bits(there_and_back(xs[0], arena.open())) == bits(xs[0])


def meddled(run: Callable[[], None], meddle: Callable[[], None], *, line: int) -> None:
    """Run it; from its so manieth line in the worker's module on, others meddle before each."""
    lines = [0]

    def trace(frame: FrameType, event: str, _arg: object):
        if frame.f_code.co_filename != worker.__file__:
            return None
        if event == "line":
            lines[0] += 1
            if lines[0] >= line:
                meddle()
        return trace

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(None)


@pytest.mark.parametrize("line", range(1, 6))
def test_a_transfer_may_end_more_than_once(arena: Arena, line: int):
    """By the worker, and by all who wait and find it gone."""
    x = torch.randn(KIB)
    host = arena.open()
    lease, array = lease_of(host), x.numpy()
    assert isinstance(lease, worker.WorkerLease)
    transfer = worker.Transfer("offload", array, array.copy(), lease=lease)
    with pytest.raises(TransferError, match="no such page"):
        meddled(transfer.wait, lambda: transfer.fail(OSError("no such page")), line=line)


@pytest.mark.parametrize("line", range(1, 12))
def test_all_who_find_the_worker_gone_clear_up_at_once(arena: Arena, line: int):
    x = torch.randn(KIB)
    host = arena.open()
    dead, lease, array = arena_worker(host), lease_of(host), x.numpy()
    assert isinstance(lease, worker.WorkerLease)
    with failing(SystemExit("killed")), pytest.raises(TransferError):
        there_and_back(x, host)

    first, other = (worker.Transfer("offload", array, array.copy(), lease=lease) for _ in range(2))

    def submit(transfer: worker.Transfer) -> None:
        with contextlib.suppress(TransferError):
            dead.submit(transfer)

    both = (lambda: submit(first)), (lambda: submit(other))
    run = threading.Thread(target=meddled, args=both, kwargs={"line": line}, daemon=True)
    run.start()
    run.join(5)
    assert not run.is_alive()


def test_a_transfer_that_a_dying_worker_lost_is_not_waited_for(arena: Arena, monkeypatch):
    """The thread is told to exit while it waits for work: it dies with what it gets next."""
    monkeypatch.setattr(worker, "_POLL_S", 0.05)
    x = torch.randn(KIB)
    host = arena.open()
    there_and_back(x, host)
    thread = arena_worker(host)._thread
    time.sleep(0.05)
    raised = ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
    )
    assert raised == 1
    with pytest.raises(TransferError, match="SystemExit"):
        ops.offload(x, host, 4 * KIB)
        ops.release(x, host, 4 * KIB)
    thread.join(5)
    assert bits(there_and_back(x, arena.open())) == bits(x)


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
