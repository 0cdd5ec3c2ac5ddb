"""Memory that libraries take at their first call on a GPU and never give back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from fxremat import torch_compat

_SIDE = 64
"""Rows of the matrices that are multiplied: which ones does not matter."""

Product = Callable[[], torch.Tensor]

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_lock = threading.Lock()
_nbytes: dict[torch.device, tuple[int, ...]] = {}
"""Of each of a device's workspaces, which are there from their first measurement on."""

_known: set[tuple[torch.device, int, int]] = set()
"""Devices, threads, and the streams on which these have multiplied."""


def library_workspaces(device: torch.device) -> tuple[int, ...]:
    """Bytes of each of cuBLAS's workspaces on ``device`` for all that has called this.

    On a CPU there are none.

    torch holds one for each of its handles and streams, and a thread has a handle of its own: for
    each stream there is one of the thread that runs forwards, and one of autograd's, which runs
    backwards. Torch 2.11 holds as many more for products with a bias. Whatever multiplies first
    would be charged with them, so they are allocated here, for this thread and its current
    stream. They are counted as given, each by itself: so they were asked of the allocator.
    """
    if device.type != "cuda":
        return ()
    own = device, threading.get_ident(), torch.cuda.current_stream(device).cuda_stream
    if own not in _known:
        with _lock, torch_compat.real_execution():
            _measure(device)
            _known.add(own)
    return _nbytes[device]


def _measure(device: torch.device) -> None:
    """Add those of this thread's current stream to the workspaces of ``device``."""
    torch.cuda.synchronize(device)
    begins = device not in _nbytes
    if begins:  # those there are already are freed, on all devices, to see their size
        torch_compat.clear_library_workspaces()
    taken = [_take(each) for each in (device, *(_nbytes if begins else ()))]
    _nbytes[device] = (*_nbytes.get(device, ()), *taken[0])


def forget_workspaces() -> None:
    """Free all that torch holds; what is taken from now on is counted anew."""
    torch_compat.clear_library_workspaces()
    _nbytes.clear()
    _known.clear()


def _take(device: torch.device) -> tuple[int, ...]:
    """Have all workspaces of a device allocated; bytes of each that was not there."""
    taken: list[int] = []

    def watched(product: Product) -> None:
        before = torch.cuda.memory_allocated(device)
        product()
        taken.append(torch.cuda.memory_allocated(device) - before)

    with torch.cuda.device(device):
        for dtype in _DTYPES:
            try:
                multiply(device, dtype, watched)
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise  # what was not allocated now would be later, in a step
            except RuntimeError:
                continue  # not every GPU multiplies in every dtype
        torch.cuda.synchronize(device)
    return tuple(nbytes for nbytes in taken if nbytes > 0)


def multiply(device: torch.device, dtype: torch.dtype, run: Callable[[Product], None]) -> None:
    """Have matrices multiplied, with and without a bias, here and in a backward.

    That is autograd's thread, where a step's backward and all that it recomputes runs, also where
    a capture has forbidden threads.

    Args:
        device: of the matrices.
        dtype: of their numbers.
        run: called with each product, in the thread that is to compute it.
    """
    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(True):
        a, b = (torch.ones(_SIDE, _SIDE, device=device, dtype=dtype) for _ in range(2))
        bias = torch.ones(_SIDE, device=device, dtype=dtype)

        def products(_gradient: torch.Tensor | None = None) -> None:
            torch.add(a, b)  # or cuBLAS warns that this thread has not used the device before
            run(lambda: torch.mm(a, b))
            run(lambda: torch.addmm(bias, a, b))

        products()
        copied: Any = a.clone().requires_grad_().clone()
        copied.register_hook(products)
        torch.autograd.backward([copied], [b])
