"""Host memory: seconds to have it, and bandwidth each way and both."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from benchmarks.gpu_probe.probe import Finding, Probe
from fxremat.costs.link.bandwidth import measure_link
from fxremat.runtime.memory import file_memory, folder_of, pinned_memory, unpin
from fxremat.units import format_bytes

T = TypeVar("T")

SIZES = (1, 8, 32)
"""In GiB; in MiB in a trial."""

PATIENCE_S = 10.0
"""What a plan may spend on the host memory of a large model before it must say so."""

LAUNCH_S = 1e-3


def pinning(probe: Probe) -> None:
    """Seconds of each size, then the link."""
    unit = 1 << 20 if probe.tiny or not probe.cuda else 1 << 30
    for size in SIZES:
        probe.ask(
            f"{format_bytes(size * unit)} to have", lambda n=size * unit: _had(probe.device, n)
        )
    probe.ask("bandwidth, each way and both", lambda: _link(probe.device))
    if probe.cuda:
        probe.ask("host time to launch 256 MiB", lambda: _launched(probe.device))


def _had(device: torch.device, nbytes: int) -> Finding:
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if nbytes > available // 2:
        return Finding(f"left out: {format_bytes(available)} of memory are free")
    if device.type != "cuda":
        taken_s, memory = _timed(lambda: file_memory(nbytes, folder=folder_of(None)))
        memory.close()
        return Finding(f"{taken_s:.3f} s", figures={"seconds": taken_s})
    taken_s, memory = _timed(lambda: pinned_memory(nbytes, device=device))
    freed_s, _ = _timed(lambda: unpin(np.frombuffer(memory, dtype=np.uint8)))
    memory.close()
    return Finding(
        f"{taken_s:.2f} s, {freed_s:.2f} s to give back",
        f"at most {PATIENCE_S:.0f} s",
        taken_s <= PATIENCE_S,
        {"seconds": taken_s, "freed_s": freed_s, "bytes_per_s": nbytes / taken_s},
    )


def _timed(run: Callable[[], T]) -> tuple[float, T]:
    begin_s = time.perf_counter()
    found = run()
    return time.perf_counter() - begin_s, found


def _link(device: torch.device) -> Finding:
    link = measure_link(device)
    ways = (link.offload_bytes_per_s, link.prefetch_bytes_per_s, link.both_bytes_per_s)
    text = ", ".join(f"{way / 1e9:.1f}" for way in ways)
    figures = {
        "offload_bytes_per_s": ways[0],
        "prefetch_bytes_per_s": ways[1],
        "both_bytes_per_s": ways[2],
        "slowdown": link.slowdown,
        "shared": link.shared,
    }
    return Finding(
        f"{text} GB/s, computations × {link.slowdown:.2f}",
        "one lane" if link.shared else "both ≥ 1.2 × the slower, × ≤ 1.1",
        link.shared or (ways[2] >= 1.2 * min(ways[:2]) and link.slowdown <= 1.1),
        figures,
    )


def _launched(device: torch.device) -> Finding:
    """A copy from registered memory must not hold the host up."""
    nbytes = 256 << 20
    memory = pinned_memory(nbytes, device=device)
    array = np.frombuffer(memory, dtype=np.uint8)
    host = torch.from_numpy(array)
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    launches = []
    for _ in range(5):
        torch.cuda.synchronize(device)
        launched_s, _ = _timed(lambda: there.copy_(host, non_blocking=True))
        whole_s, _ = _timed(lambda: torch.cuda.synchronize(device))
        launches.append((launched_s, launched_s + whole_s))
    launched_s, whole_s = min(launches)
    unpin(array)
    return Finding(
        f"{launched_s * 1e3:.3f} ms of {whole_s * 1e3:.1f} ms",
        f"at most {LAUNCH_S * 1e3:.0f} ms",
        launched_s <= LAUNCH_S,
        {"launched_s": launched_s, "whole_s": whole_s},
    )
