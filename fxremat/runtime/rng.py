"""Random draws that a recomputation repeats.

The emitted forward records the generator's state just before a draw that will be
repeated; the recomputation draws from that state and leaves the generator as it was,
so that it ends a step where it would have ended without recomputation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def record_state(device: str) -> Tensor:
    """The state of the default generator of ``device``: a uint8 tensor on the CPU."""
    kind = torch.device(device)
    if kind.type == "cuda":
        return torch.cuda.get_rng_state(kind)
    return torch.get_rng_state()


CUDA_STATE_BYTES = 16
"""A seed and an offset."""


def state_bytes(device: str) -> int:
    """Size of what :func:`record_state` returns; the device need not be here."""
    if torch.device(device).type == "cuda":
        return CUDA_STATE_BYTES
    return torch.get_rng_state().numel()


def restore_state(device: str, state: Tensor) -> None:
    """Put the default generator of ``device`` into ``state``."""
    kind = torch.device(device)
    if kind.type == "cuda":
        torch.cuda.set_rng_state(state, kind)
    else:
        torch.set_rng_state(state)


def draw(state: Tensor, device: str, op: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The first draw: ``state`` was recorded just before, so there is nothing to restore."""
    del state, device
    return op(*args, **kwargs)


def redraw(state: Tensor, device: str, op: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Draw again what ``op`` drew from ``state``."""
    now = record_state(device)
    restore_state(device, state)
    try:
        return op(*args, **kwargs)
    finally:
        restore_state(device, now)
