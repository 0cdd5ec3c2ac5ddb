"""Memory that libraries allocate at their first call on a GPU and never free."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from fxremat import torch_compat

_SIDE = 64
"""Rows of the square matrices that are multiplied. Any number will do."""

Product = Callable[[], torch.Tensor]

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_lock = threading.Lock()
_nbytes: dict[torch.device, tuple[int, ...]] = {}
"""Bytes of each workspace of a device, in the order in which they were allocated."""

_measured: set[tuple[torch.device, int, int]] = set()
"""Devices, threads and streams on which matrices have been multiplied."""


def library_workspaces(device: torch.device) -> tuple[int, ...]:
    """Return the bytes of each cuBLAS workspace on ``device``, of all threads that called this.

    torch holds one workspace for each cuBLAS handle and stream, and each thread has its own handle.
    So each stream has one of the thread that runs forwards, and one of autograd's thread, which
    runs backwards. Torch 2.11 holds as many again for products with a bias. The first product would
    be charged for them, so they are allocated here, for this thread and its current stream. They
    count as memory that exists before a step, each separately, as they were requested.

    Args:
        device: the device. A CPU has no workspaces.
    """
    if device.type != "cuda":
        return ()
    current = device, threading.get_ident(), torch.cuda.current_stream(device).cuda_stream
    if current not in _measured:
        with _lock, torch_compat.real_execution():
            _measure(device)
            _measured.add(current)
    return _nbytes[device]


def _measure(device: torch.device) -> None:
    """Allocate the workspaces of this thread's current stream, and record their bytes."""
    torch.cuda.synchronize(device)
    begins = device not in _nbytes
    if begins:  # free existing ones, on all devices, to measure their sizes
        torch_compat.clear_library_workspaces()
    allocated = [_allocate(each) for each in (device, *(_nbytes if begins else ()))]
    _nbytes[device] = (*_nbytes.get(device, ()), *allocated[0])


def forget_workspaces() -> None:
    """Free all workspaces that torch holds; those allocated from now on are measured again."""
    torch_compat.clear_library_workspaces()
    _nbytes.clear()
    _measured.clear()


def _allocate(device: torch.device) -> tuple[int, ...]:
    """Allocate all workspaces of a device, and return the bytes of each new one."""
    sizes: list[int] = []

    def watched(product: Product) -> None:
        before = torch.cuda.memory_allocated(device)
        product()
        sizes.append(torch.cuda.memory_allocated(device) - before)

    with torch.cuda.device(device):
        for dtype in _DTYPES:
            try:
                multiply(device, dtype, watched)
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise  # it would be allocated later, in a step
            except RuntimeError:
                continue  # not every GPU multiplies in every dtype
        torch.cuda.synchronize(device)
    return tuple(nbytes for nbytes in sizes if nbytes > 0)


def multiply(device: torch.device, dtype: torch.dtype, run: Callable[[Product], None]) -> None:
    """Multiply matrices, with and without a bias, in this thread and in a backward.

    The backward runs in autograd's thread, which runs a step's backward and all that it recomputes,
    even if a capture has disabled threads.

    Args:
        device, dtype: those of the matrices.
        run: called with each product, in the thread that is to compute it; it calls the product.
    """
    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(True):
        a, b = (torch.ones(_SIDE, _SIDE, device=device, dtype=dtype) for _ in range(2))
        bias = torch.ones(_SIDE, device=device, dtype=dtype)

        def products(_gradient: torch.Tensor | None = None) -> None:
            torch.add(a, b)  # else cuBLAS warns that this thread has not used the device before
            run(lambda: torch.mm(a, b))
            run(lambda: torch.addmm(bias, a, b))

        products()
        copied: Any = a.clone().requires_grad_().clone()
        copied.register_hook(products)
        torch.autograd.backward([copied], [b])
