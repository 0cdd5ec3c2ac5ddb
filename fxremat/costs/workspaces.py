"""Memory that libraries take at their first call on a GPU and never give back."""

from __future__ import annotations

import threading

import torch

from fxremat import torch_compat

_SIDE = 64
"""Rows of the matrices that are multiplied: which ones does not matter."""

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_lock = threading.Lock()
_nbytes: dict[torch.device, int] = {}
"""Of each device's workspaces, which are there from their first measurement on."""

_known: set[tuple[torch.device, int, int]] = set()
"""Devices, threads, and the streams on which these have multiplied."""


def library_workspaces(device: torch.device) -> int:
    """Bytes of cuBLAS's workspaces on ``device`` for all that has called this; 0 on a CPU.

    torch holds one for each of its handles and streams, and a thread has a handle of its own: for
    each stream there is one of the thread that runs forwards, and one of autograd's, which runs
    backwards. Whatever multiplies first would be charged with them, so they are allocated here,
    for this thread and its current stream. They are counted as given.
    """
    if device.type != "cuda":
        return 0
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
    before = torch.cuda.memory_allocated(device)
    for each in (device, *(_nbytes if begins else ())):
        _take(each)
    taken = max(0, torch.cuda.memory_allocated(device) - before)
    _nbytes[device] = _nbytes.get(device, 0) + taken


def forget_workspaces() -> None:
    """Free all that torch holds; what is taken from now on is counted anew."""
    torch_compat.clear_library_workspaces()
    _nbytes.clear()
    _known.clear()


def _take(device: torch.device) -> None:
    """Have all workspaces of a device allocated."""
    with torch.cuda.device(device):
        for dtype in _DTYPES:
            try:
                multiply(device, dtype)
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise  # what was not allocated now would be later, in a step
            except RuntimeError:
                continue  # not every GPU multiplies in every dtype
        torch.cuda.synchronize(device)


def multiply(device: torch.device, dtype: torch.dtype) -> None:
    """Multiply matrices, with and without a bias, here and in a backward.

    That runs in autograd's thread, as a step's does, also where a capture has forbidden threads.
    What a forward does is done there, too: a recomputation does it, and until torch 2.12 a product
    with a bias has a workspace of its own, cuBLASLt's.
    """
    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(True):
        a, b = (torch.ones(_SIDE, _SIDE, device=device, dtype=dtype) for _ in range(2))
        bias = torch.ones(_SIDE, device=device, dtype=dtype)
        a.requires_grad_()
        product = torch.mm(a, b)
        product.register_hook(lambda gradient: torch.addmm(bias, gradient, b))
        torch.autograd.backward([product, torch.addmm(bias, a, b)], [b, b])
