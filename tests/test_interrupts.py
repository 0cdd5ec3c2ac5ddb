"""Ctrl-C at any instant of a step: nothing is lost, and the next step is as good as any."""

from __future__ import annotations

import gc
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.module.compiled import CompiledModule
from fxremat.runtime.arena import Arena, HostLimit
from fxremat.runtime.profile import Watcher
from fxremat.torch_compat import AllocationLog
from tests.moving import CPU, bits, ops, there_and_back

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")

WIDTH = 32


@contextmanager
def interrupts() -> Iterator[Callable[[float], None]]:
    """A function after whose argument, in seconds, this thread is interrupted."""

    def interrupt(_number: int, frame: FrameType | None) -> None:
        # Raised just when it has taken its lock, logging would never let go of it again.
        if frame is not None and frame.f_globals.get("__name__") == "logging":
            signal.setitimer(signal.ITIMER_REAL, 1e-5)
        else:
            raise KeyboardInterrupt

    # What hits in a finalizer is ignored. pytest keeps it until the test ends, with the frames that
    # were running and all that they had: a step's host memory, where it was a forward's.
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = hook


def interrupted(run: Callable[[], object], after_s: float, start: Callable[[float], None]) -> bool:
    """Whether ``run`` was interrupted; if it was faster, the interrupt is called off."""
    try:
        try:
            start(max(after_s, 1e-6))
            run()
        finally:
            start(0)
    except KeyboardInterrupt:
        return True
    return False


def travelling() -> tuple[nn.Module, CompiledModule]:
    """A model whose steps may use just the host memory that one needs."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers)
    sample = torch.randn(64, WIDTH)
    options: dict[str, Any] = {"loss": torch.sum, "offload": "only", "assume": "strict"}
    host_bytes = fxremat.plan(model, sample, "min", **options).host_bytes
    assert host_bytes > 0
    torch._dynamo.reset()
    options["offload"] = fxremat.HostMemory("only", limit=host_bytes)
    return model, fxremat.compile(model, sample, "min", **options)


def gradients(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    call(x).sum().backward()
    return [p.grad for p in model.parameters()]


def steps_interrupted(count: int) -> None:
    model, call = travelling()
    x = torch.randn(64, WIDTH)
    expected = gradients(model, model, x)
    draw = random.Random(0)
    begin_s = time.perf_counter()
    for _ in range(20):
        gradients(model, call, x)
    step_s = (time.perf_counter() - begin_s) / 20
    hits = 0
    with interrupts() as start:
        for number in range(count):
            hits += interrupted(
                lambda: gradients(model, call, x), draw.uniform(0, 1.2 * step_s), start
            )
            if number % 10 == 0:
                assert all(map(torch.equal, expected, gradients(model, call, x)))
    assert hits > count / 25  # few where the machine is busy
    gc.collect()
    arena = call._training.latest[1].arena
    assert (arena.leases, arena.allocated_bytes) == (0, call.plan.host_bytes)
    assert all(map(torch.equal, expected, gradients(model, call, x)))


def test_a_step_that_is_interrupted_holds_nothing():
    steps_interrupted(500)


@pytest.mark.slow
def test_many_steps_are_interrupted():
    steps_interrupted(10_000)


def test_an_interrupted_watch_never_keeps_the_profiler_of_its_thread():
    draw, watcher = random.Random(2), Watcher()

    def watch() -> None:
        for _ in range(4):
            watcher.begin(CPU, lambda _profile: None)
            watcher.left(nn.Identity())
            watcher.end()

    watch()
    hits = 0
    with interrupts() as start:
        for _ in range(2000):
            if interrupted(watch, draw.uniform(0, 1e-3), start):
                hits += 1
                with AllocationLog():  # raises an error if the thread is watched still
                    pass
    assert hits > 20


def test_an_interrupt_never_loses_host_memory():
    """At instants of lending alone, with one block and no more."""
    arena = Arena(4096, device=CPU, limit=HostLimit(4096))
    x = torch.randn(256)
    draw = random.Random(1)

    def lend() -> None:
        for _ in range(4):
            host = arena.open()
            there_and_back(x, host)
            del host

    hits = 0
    with interrupts() as start:
        for _ in range(500):
            hits += interrupted(lend, draw.uniform(0, 1e-3), start)
    assert hits > 20
    gc.collect()
    assert (arena.leases, arena.allocated_bytes) == (0, 4096)
    assert bits(there_and_back(x, arena.open())) == bits(x)


def test_an_exception_that_is_kept_holds_no_memory_of_its_step():
    """A notebook keeps the last traceback, frames of emitted code among it."""
    model, call = travelling()
    x = torch.randn(64, WIDTH)
    kept: list[BaseException] = []
    with interrupts() as start:
        while not kept:
            try:
                start(1e-3)
                for _ in range(1000):
                    host = ops.open_arena(arena_of(call).id, 64)
                    del host
                    gradients(model, call, x)
            except KeyboardInterrupt as error:
                start(0)
                frames = []
                traceback = error.__traceback__
                while traceback:
                    frames.append(traceback.tb_frame.f_code.co_filename)
                    traceback = traceback.tb_next
                if any(name.startswith("<fxremat") for name in frames):
                    kept.append(error)
    assert arena_of(call).leases == 0
    gradients(model, call, x)


def arena_of(call: CompiledModule) -> Arena:
    return call._training.latest[1].arena


def test_an_interrupted_wait_never_holds_up_the_worker():
    """Whoever waits may be interrupted at any instant of it; others' copies are made."""
    arena = Arena(4096, device=CPU)
    x = torch.randn(256)
    draw = random.Random(2)

    def transfers() -> None:
        host = arena.open()
        for _ in range(20):
            there_and_back(x, host)

    hits = 0
    with interrupts() as start:
        for _ in range(1500):
            hits += interrupted(transfers, draw.uniform(0, 1.5e-3), start)
    assert hits > 60
    other = threading.Thread(target=transfers, daemon=True)
    other.start()
    other.join(20)
    assert not other.is_alive(), "the worker waits for somebody who is gone"
