"""The input of a BatchNorm, computed from the output of the leaky ReLU that follows it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

SMALLEST_WEIGHT = 1e-6
"""Scale below which the input of a channel is lost; its mean is used instead."""


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
    """Return ``x``, given ``z = leaky_relu((x - mean) * rstd * weight + bias, slope)``.

    Args:
        z: shape ``(batch, channels, …)``.
        weight, bias: shape ``(channels,)``; ``None`` for ones and zeros.
        mean, rstd: of the batch, shape ``(channels,)``.
        slope: slope of the leaky ReLU, above 0.

    Returns:
        ``x`` up to rounding, with the shape, dtype and strides of ``z``. Channels whose scale is
        nearly 0 are filled with their mean.
    """
    scale = rstd if weight is None else rstd * weight
    invertible = scale.abs() > SMALLEST_WEIGHT * rstd
    back = torch.where(invertible, 1 / scale, 0.0)
    shift = mean if bias is None else mean - bias * back
    y = functional.leaky_relu(z, 1 / slope)
    # A norm that scales by ``back`` and adds ``shift`` takes one pass.
    zero, one = torch.zeros_like(mean), torch.ones_like(mean)
    # In torch 2.11 ``functional.batch_norm`` refuses an epsilon of 0; the operator takes it.
    return torch.batch_norm(
        y, back, shift, zero, one, False, 0.0, 0.0, torch.backends.cudnn.enabled
    )


def _fake(z: Tensor, *_others: object) -> Tensor:
    return torch.empty_like(z)


_library.impl("invert_batch_norm", invert_batch_norm, "CompositeExplicitAutograd")
torch.library.register_fake("fxremat::invert_batch_norm", _fake, lib=_library)
