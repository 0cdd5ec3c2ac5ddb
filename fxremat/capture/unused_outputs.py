"""Outputs that the loss does not use: no gradient of them is ever made.

Autograd hands a compiled backward zeros for every output that got no gradient. The logits
that many models return beside their loss cost as much again that way, and a summation with
zeros. Detached inside the captured step, they cost neither. They are still there while their
caller holds them, maybe through the whole backward; not returned at all, they cost nothing.

Zeros that are summed first give the sum their layout, and a kernel that reads it may sum up in an
order that follows the layout. So that the bits are those of the step with zeros, what the step
itself makes of such an output's gradient is laid so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxremat import torch_compat
from fxremat.errors import BackwardError


@dataclass(frozen=True, slots=True)
class Unused:
    """Outputs without a gradient, as leaves in order.

    Attributes:
        leaves: which.
        count: how many leaves there are; outputs of another form are left as they are.
        dropped: ``None`` is returned in their place.
    """

    leaves: tuple[int, ...]
    count: int
    dropped: bool = False


def forward_of(model: nn.Module, unused: Unused | None) -> Callable[..., Any]:
    """What is captured of a model: hooks of the model itself run around it."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return model.forward(*args, **kwargs)

    return _detaching(forward, unused) if unused else forward


def _detaching(
    forward: Callable[..., Any], unused: Unused
) -> Callable[..., tuple[Any, tuple[int, ...]]]:
    """``forward`` with some outputs that have no gradient, or are not returned.

    What it returns is followed by which of its leaves were detached for it.
    """

    gradient_as_with_zeros = torch_compat.opaque_to_dynamo(_gradient_as_with_zeros)

    def call(*args: Any, **kwargs: Any) -> tuple[Any, tuple[int, ...]]:
        leaves, spec = pytree.tree_flatten(forward(*args, **kwargs))
        detached: tuple[int, ...] = ()
        if len(leaves) == unused.count:
            detached = tuple(i for i in unused.leaves if leaves[i].requires_grad)
        for i in detached:
            kept = gradient_as_with_zeros(leaves[i])
            leaves[i] = None if unused.dropped else kept
        if unused.dropped:
            detached = ()
        return pytree.tree_unflatten(leaves, spec), detached

    return call


def _gradient_as_with_zeros(output: torch.Tensor) -> torch.Tensor:
    """``output`` without a gradient; where the step reads it, the one that it gets from there lies
    as zeros and it would together.
    """
    zeros = torch_compat.traced_tangent(output)
    if zeros is not None:
        hooked: Any = output
        hooked.register_hook(lambda gradient: _laid_as_sum(zeros, gradient))
    return output.detach()


def _laid_as_sum(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """``second``, in the layout of the sum of both."""
    stride = torch.add(first, second).stride()  # without data: no operation of a graph reads it
    if stride == second.stride():
        return second
    shape = second.shape
    outer = sorted(range(len(shape)), key=lambda dim: (-stride[dim], shape[dim] == 1))
    dense = second.permute(outer).clone(memory_format=torch.contiguous_format)
    return dense.permute([outer.index(dim) for dim in range(len(shape))])


def refuse_gradients(outputs: Any, detached: tuple[int, ...]) -> Any:
    """``outputs``; a backward through one that was ``detached`` raises.

    They require a gradient again, as the model's own do, so that nothing is lost silently.
    """
    leaves, spec = pytree.tree_flatten(outputs)
    anchor = torch.empty(0, requires_grad=True)
    for i in detached:
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
            "uses all outputs that yours does, or none"
        )
