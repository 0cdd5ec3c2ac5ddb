"""The device that a benchmark runs on: named, described, left clean, made deterministic."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

ALLOCATORS: Mapping[str, Mapping[str, str | None]] = {
    "default": {"PYTORCH_ALLOC_CONF": None, "PYTORCH_CUDA_ALLOC_CONF": None},
    "expandable": {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF": None,
    },
}
"""Settings of the caching allocator, which torch reads once in a process: the environment of
each. The variable with CUDA in its name is the older one; the other is read first."""

WAITS = re.compile(r"cu(da)?(Stream|Device|Event|Ctx)Synchronize|cudaMemcpy$")
"""Calls by which the host waits for the device."""


def device_named(name: str, *, remedy: str) -> torch.device:
    """The device that an option names, with its index, as the current one.

    Raises:
        SystemExit: there is none; one line on the standard error says so.
    """
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        print(f"no CUDA device here: {remedy}", file=sys.stderr)
        raise SystemExit(2)
    device = torch.device("cuda", device.index or 0)
    torch.cuda.set_device(device)
    return device


def describe(device: torch.device) -> dict[str, Any]:
    """What figures depend on beside the machine."""
    if device.type != "cuda":
        return {"device": "cpu", "threads": torch.get_num_threads()}
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")
    return {
        "device": torch.cuda.get_device_name(device),
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory,
        "cuda": torch.version.cuda,
        "settings": {name: os.environ[name] for name in names if name in os.environ},
    }


def forget(device: torch.device) -> None:
    """Drop compiled code, what only cycles hold, and the allocator's cache.

    Host memory of plans that nobody holds any more is given back as well.
    """
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # after a failed kernel every call fails
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()


@contextlib.contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Same inputs, same bits: the kernels that promise it, and no choice by timing.

    Others are refused: merely warned of them, torch takes flash attention's backward that adds in
    any order.

    Ensures: on leaving, everything is as it was before.
    """
    # Read when cuBLAS is first used: set it before, too, where that may be earlier.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    cudnn: Any = torch.backends.cudnn
    enabled = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    before = cudnn.deterministic, cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warned)
        cudnn.deterministic, cudnn.benchmark = before


def math_attention() -> contextlib.AbstractContextManager[Any]:
    """Attention as products and a softmax, which are deterministic on every device."""
    chosen: contextlib.AbstractContextManager[Any] = sdpa_kernel(SDPBackend.MATH)
    return chosen


def host_waits(step: Callable[[], object]) -> dict[str, int]:
    """How often the host waits for the device in a step, by the name of the CUDA call."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    step_range = torch.profiler.record_function("fxremat_step")
    # The profiler itself waits when it starts and stops: only this range counts.
    with torch.profiler.profile(activities=activities) as profile, step_range:
        step()
    events: list[Any] = list(profile.events())
    (span,) = [
        e.time_range
        for e in events
        if e.name == "fxremat_step" and e.device_type == torch.autograd.DeviceType.CPU
    ]
    found: dict[str, int] = {}
    for event in events:
        if WAITS.match(event.name) and span.start <= event.time_range.start <= span.end:
            found[event.name] = found.get(event.name, 0) + 1
    return found
