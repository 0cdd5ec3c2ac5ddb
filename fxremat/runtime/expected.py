"""Gradients that a step's results are expected to get."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Expected:
    """Makes the gradient that a result of a step is expected to get: the last one, and 1 at first.

    A forward reads it once, and it is never recomputed: it may have changed by then. ``name`` is
    its name in emitted code, ``value`` the value of all elements.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = "fxremat.expected"
        self.value = 1.0

    def __repr__(self) -> str:
        return self.__name__

    def __call__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the expected gradient: a tensor of this shape whose elements are all ``value``."""
        return torch.full(shape, self.value, dtype=dtype, device=device)
