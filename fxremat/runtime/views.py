"""Tensors in memory that has come back as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def tensor_in(
    memory: torch.Tensor,
    dtype: torch.dtype,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
) -> torch.Tensor:
    """The tensor that lies in ``memory`` (``uint8``) at ``offset``, counted in its elements."""
    whole = memory.numel() - memory.numel() % dtype.itemsize
    return memory[:whole].view(dtype).as_strided(size, stride, offset)
