"""Random draws that a recomputation repeats.

The emitted forward records the state of the generator right before a draw that will be repeated.
The recomputation draws from that state and then restores the generator, so that a step leaves it in
the same state as without recomputation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def record_state(device: str) -> Tensor:
    """Return the state of the default generator of ``device``: a uint8 tensor on the CPU."""
    kind = torch.device(device)
    if kind.type == "cuda":
        return torch.cuda.get_rng_state(kind)
    return torch.get_rng_state()


CUDA_STATE_BYTES = 16
"""Bytes of a seed and an offset."""


def state_bytes(device: str) -> int:
    """Return how many bytes :func:`record_state` returns for ``device``, which need not exist."""
    if torch.device(device).type == "cuda":
        return CUDA_STATE_BYTES
    return torch.get_rng_state().numel()


def restore_state(device: str, state: Tensor) -> None:
    """Set the default generator of ``device`` to ``state``."""
    kind = torch.device(device)
    if kind.type == "cuda":
        torch.cuda.set_rng_state(state, kind)
    else:
        torch.set_rng_state(state)


def draw(state: Tensor, device: str, op: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return the result of ``op``, which draws for the first time.

    ``state`` was recorded right before, so nothing is restored.
    """
    del state, device
    return op(*args, **kwargs)


def redraw(state: Tensor, device: str, op: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return the result of ``op``, drawn again from ``state``, and restore the generator."""
    now = record_state(device)
    restore_state(device, state)
    try:
        return op(*args, **kwargs)
    finally:
        restore_state(device, now)
