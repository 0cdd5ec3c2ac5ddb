"""Tensors that are views of existing memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxremat import torch_compat


def look(
    base: torch.Tensor, shape: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    """Return a view of the storage of ``base``, with these sizes and strides.

    It begins ``offset`` elements after the first element of ``base``.
    """
    return _reinterpret(base, shape, stride, offset)


_reinterpret = torch_compat.reinterpreter()


def tensor_in(
    memory: torch.Tensor,
    dtype: torch.dtype,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
) -> torch.Tensor:
    """Return a view of the uint8 tensor ``memory`` as elements of ``dtype``.

    Sizes, strides and offset count these elements.
    """
    whole = memory.numel() - memory.numel() % dtype.itemsize
    return memory[:whole].view(dtype).as_strided(size, stride, offset)
