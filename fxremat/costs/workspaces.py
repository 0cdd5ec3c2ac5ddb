"""Memory that libraries take at their first call on a GPU and never give back."""

from __future__ import annotations

import functools

import torch

from fxremat import torch_compat

_SIDE = 64
"""Rows of the matrices that are multiplied: which ones does not matter."""

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def library_workspaces(device: torch.device) -> int:
    """Bytes of cuBLAS's workspaces on ``device``; 0 on a CPU.

    torch holds one for each of its handles and streams, and a thread has a handle of its own:
    there is one of the thread that runs forwards, and one of autograd's, which runs backwards.
    Whatever multiplies first would be charged with them, so they are allocated here: those
    there are already are freed first, to see their size. They are counted as given.
    """
    return _measured(device) if device.type == "cuda" else 0


_taken: list[torch.device] = []
"""Devices whose workspaces were measured: they are there from then on."""


@functools.cache
def _measured(device: torch.device) -> int:
    with torch_compat.real_execution():
        torch.cuda.synchronize(device)
        torch_compat.clear_library_workspaces()  # of all devices
        before = torch.cuda.memory_allocated(device)
        for one in (device, *_taken):
            _take(one)
        _taken.append(device)
        return torch.cuda.memory_allocated(device) - before


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
    """
    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(True):
        a, b = (torch.ones(_SIDE, _SIDE, device=device, dtype=dtype) for _ in range(2))
        bias = torch.ones(_SIDE, device=device, dtype=dtype)
        a.requires_grad_()
        torch.autograd.backward([torch.mm(a, b), torch.addmm(bias, a, b)], [b, b])
