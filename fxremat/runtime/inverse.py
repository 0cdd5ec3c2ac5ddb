"""The input of a BatchNorm, computed from the output of the leaky ReLU behind it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

SMALLEST_WEIGHT = 1e-6
"""Channels with a scale below it tell nothing of their input: their mean stands for it."""


_new_library: Any = torch.library.Library
_library = _new_library("fxremat", "FRAGMENT")
_library.define(
    "invert_batch_norm(Tensor z, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, "
    "float slope) -> Tensor"
)


def invert_batch_norm(
    z: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    slope: float,
) -> Tensor:
    """Undo ``z = leaky_relu((x - mean) * rstd * weight + bias, slope)``.

    Args:
        z: shape ``(batch, channels, …)``.
        weight, bias: shape ``(channels,)``, or None for ones and zeros.
        mean, rstd: of the batch, shape ``(channels,)``.
        slope: of the leaky ReLU, above 0.

    Returns ``x`` up to rounding, in the shape, dtype and strides of ``z``. Where the scale is
    nearly 0 the input is lost, and the mean is returned.
    """
    scale = rstd if weight is None else rstd * weight
    known = scale.abs() > SMALLEST_WEIGHT * rstd
    back = torch.where(known, 1 / scale, 0.0)
    shift = mean if bias is None else mean - bias * back
    y = functional.leaky_relu(z, 1 / slope)
    # One pass: a norm that scales by ``back`` and adds ``shift``.
    nothing, one = torch.zeros_like(mean), torch.ones_like(mean)
    # Not by ``functional``: in torch 2.11 that refuses an epsilon of 0, which the operator takes.
    return torch.batch_norm(
        y, back, shift, nothing, one, False, 0.0, 0.0, torch.backends.cudnn.enabled
    )


def _fake(z: Tensor, *_others: object) -> Tensor:
    return torch.empty_like(z)


_library.impl("invert_batch_norm", invert_batch_norm, "CompositeExplicitAutograd")
torch.library.register_fake("fxremat::invert_batch_norm", _fake, lib=_library)
