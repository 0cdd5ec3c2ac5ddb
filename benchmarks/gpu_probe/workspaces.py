"""What libraries keep of the device's memory once they have run, in each thread and stream."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from benchmarks.gpu_probe.probe import Finding, Probe
from fxremat.costs.measured.workspaces import library_workspaces
from fxremat.units import format_bytes


def workspaces(probe: Probe) -> None:
    """Growth of allocated memory over operations whose results are dropped, in a new process."""
    if not probe.cuda:
        probe.ask("on a CPU", lambda: Finding("no library keeps device memory"))
        return
    warmed = probe.part.endswith("warmed")
    if warmed:
        warm = functools.partial(library_workspaces, probe.device)
        probe.ask("the warm-up", lambda: _grown(probe.device, warm, None))
    device = probe.device
    x = torch.ones(512, 512, device=device, requires_grad=True)
    half = torch.ones(512, 512, device=device, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.ones(512, device=device)
    side: Any = torch.cuda.Stream(device)
    products: dict[str, Callable[[], object]] = {
        "mm": lambda: x @ x,
        "mm again": lambda: x @ x,
        "mm, bf16": lambda: half @ half,
        "bmm": lambda: x[None] @ x[None],
        "Linear with bias": lambda: functional.linear(x, x, bias),
        "Linear with bias, bf16": lambda: functional.linear(half, half, bias.bfloat16()),
        "backward of mm": lambda: _backward(x @ x, x),
        "backward of mm again": lambda: _backward(x @ x, x),
        "backward of Linear": lambda: _backward(functional.linear(x, x, bias), x),
        "backward of Linear, bf16": lambda: _backward(functional.linear(half, half), half),
        "convolution and backward": lambda: _convolution(device),
        "mm on another stream": lambda: _on(side, lambda: x @ x),
        "mm on another stream again": lambda: _on(side, lambda: x @ x),
        "backward on another stream": lambda: _on(side, lambda: _backward(x @ x, x)),
    }
    # The first product of a thread on a stream is where cuBLAS takes its workspace.
    first = {"mm", "backward of mm", "mm on another stream", "backward on another stream"}
    for what, product in products.items():
        free = what in first and (not warmed or "another stream" in what)
        probe.ask(what, lambda p=product, f=free: _grown(device, p, None if f else 0))


def _grown(device: torch.device, run: Callable[[], object], assumed: int | None) -> Finding:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    grown = torch.cuda.memory_allocated(device) - before
    return Finding(
        format_bytes(grown),
        "" if assumed is None else format_bytes(assumed),
        None if assumed is None else grown == assumed,
        {"grown_bytes": grown},
    )


def _backward(y: torch.Tensor, x: torch.Tensor) -> None:
    """In the thread of autograd."""
    torch.autograd.grad(y.sum(), x)


def _convolution(device: torch.device) -> None:
    images = torch.ones(8, 16, 64, 64, device=device, requires_grad=True)
    kernel = torch.ones(16, 16, 3, 3, device=device, requires_grad=True)
    torch.autograd.grad(functional.conv2d(images, kernel, padding=1).sum(), (images, kernel))


def _on(stream: Any, run: Callable[[], object]) -> None:
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
