"""Outputs that the loss does not use: no gradient of them is ever made.

Autograd hands a compiled backward zeros for every output that got no gradient. The logits
that many models return beside their loss cost as much again that way, and a summation with
zeros. Detached inside the captured step, they cost neither.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxremat.errors import BackwardError


class Detaching(nn.Module):
    """A model some of whose outputs have no gradient.

    Args:
        original: the model.
        unused: which of its outputs, as leaves in order.
    """

    def __init__(self, original: nn.Module, unused: Collection[int]) -> None:
        super().__init__()
        self.original = original
        self.unused = tuple(unused)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        leaves, spec = pytree.tree_flatten(self.original(*args, **kwargs))
        for i in self.unused:
            leaves[i] = leaves[i].detach()
        return pytree.tree_unflatten(leaves, spec)


def refuse_gradients(outputs: Any, unused: Collection[int]) -> Any:
    """``outputs``; a backward through one of the ``unused`` ones raises.

    They require a gradient again, as the model's own do, so that nothing is lost silently.
    """
    if not unused:
        return outputs
    leaves, spec = pytree.tree_flatten(outputs)
    anchor = torch.empty(0, requires_grad=True)
    for i in unused:
        leaves[i] = _Unused.apply(leaves[i], anchor, i)  # type: ignore[no-untyped-call]
    return pytree.tree_unflatten(leaves, spec)


class _Unused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, _anchor: torch.Tensor, index: int) -> torch.Tensor:
        ctx.index, ctx.shape = index, tuple(value.shape)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, _gradient: torch.Tensor) -> Any:
        raise BackwardError(
            f"output {ctx.index} of shape {ctx.shape} gets a gradient, but the loss= given to "
            "compile does not use it, so the step was planned without one: give a loss= that "
            "uses all outputs that yours does"
        )
