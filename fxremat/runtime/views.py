"""Tensors that are views of existing memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxremat import torch_compat


def look(
    base: torch.Tensor, shape: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    """Return a view of the storage of ``base``, from ``offset`` elements after its first one."""
    return _reinterpret(base, shape, stride, offset)


_reinterpret = torch_compat.reinterpreter()


def tensor_in(
    memory: torch.Tensor,
    dtype: torch.dtype,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
) -> torch.Tensor:
    """Return the tensor that lies in ``memory`` (``uint8``) at ``offset``, in its own elements."""
    whole = memory.numel() - memory.numel() % dtype.itemsize
    return memory[:whole].view(dtype).as_strided(size, stride, offset)
