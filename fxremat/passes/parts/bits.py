"""Compares tensors bit by bit, and makes tensors that are compared."""

from __future__ import annotations

import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by their size in bytes."""


def are_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether tensors have the same bits; NaNs are equal."""
    return is_true(same_bits(one, other).all())


def same_bits(one: Tensor, other: Tensor) -> Tensor:
    """Return a Boolean tensor: whether elements have the same bits, or are NaN in both tensors."""
    pair = [torch.view_as_real(t) if t.is_complex() else t for t in (one, other)]
    bits = [t.contiguous().view(INTEGERS[t.itemsize]) for t in pair]
    same = bits[0] == bits[1]
    if pair[0].is_floating_point() and not is_true(same.all()):
        same |= pair[0].isnan() & pair[1].isnan()
    return same


def is_true(answer: Tensor) -> bool:
    """Return a Boolean tensor of one element as a ``bool``.

    ``bool(answer)`` would lock host memory for the copy from a GPU.
    """
    return bool(answer.cpu())


def is_integer(tensor: Tensor) -> bool:
    """Return whether a tensor holds integers, not Booleans."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def filled(tensor: Tensor, number: Tensor) -> Tensor:
    """Return a tensor with the layout of ``tensor`` whose elements are all ``number``."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    count = 1 + sum((size - 1) * stride for size, stride in pairs)
    every = number.repeat(0 if 0 in tensor.shape else count)
    return every.as_strided(tensor.shape, tensor.stride())
