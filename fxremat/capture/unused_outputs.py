"""Outputs that the loss does not use, and for which no gradient is computed.

Autograd passes zeros to a compiled backward for every output that has no gradient. The logits that
many models return together with their loss then cost their bytes twice, and an addition of zeros.
Outputs that are detached inside the captured step cost neither. Their caller may hold them through
the whole backward; outputs that are not returned at all cost nothing.

The first summand of a gradient determines the layout of the sum, and a kernel that reads the sum
may add in an order that follows the layout. So that all bits are those of a step with zeros, the
gradient that the step itself computes of a detached output is given the layout of that sum.
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
    """The outputs of a model that get no gradient, as leaves of the tree of its outputs.

    Attributes:
        leaves: the indices of these leaves.
        count: the number of all leaves; outputs with another number are not changed.
        dropped: whether the model returns ``None`` in their place.
    """

    leaves: tuple[int, ...]
    count: int
    dropped: bool = False


def forward_of(model: nn.Module, unused: Unused | None) -> Callable[..., Any]:
    """Return the forward of ``model`` to capture, without its own hooks.

    With ``unused`` it detaches or drops these outputs; see :func:`_detaching`.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        return model.forward(*args, **kwargs)

    return _detaching(forward, unused) if unused else forward


def _detaching(
    forward: Callable[..., Any], unused: Unused
) -> Callable[..., tuple[Any, tuple[int, ...]]]:
    """Return a function that calls ``forward`` and detaches or drops the ``unused`` outputs.

    It returns the outputs, and the indices of the leaves that it has detached.
    """

    detached_with_layout = torch_compat.opaque_to_dynamo(_detached_with_layout)

    def call(*args: Any, **kwargs: Any) -> tuple[Any, tuple[int, ...]]:
        leaves, spec = pytree.tree_flatten(forward(*args, **kwargs))
        detached: tuple[int, ...] = ()
        if len(leaves) == unused.count:
            detached = tuple(i for i in unused.leaves if leaves[i].requires_grad)
        for i in detached:
            output = detached_with_layout(leaves[i])
            leaves[i] = None if unused.dropped else output
        if unused.dropped:
            detached = ()
        return pytree.tree_unflatten(leaves, spec), detached

    return call


def _detached_with_layout(output: torch.Tensor) -> torch.Tensor:
    """Return ``output`` detached, and give its gradient the strides that autograd would.

    Autograd would add zeros, the gradient of the unused output, to its gradient inside the step.
    """
    zeros = torch_compat.traced_tangent(output)
    if zeros is not None:
        hooked: Any = output
        hooked.register_hook(lambda gradient: _in_layout_of_sum(zeros, gradient))
    return output.detach()


def _in_layout_of_sum(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return ``second`` with the strides that ``first + second`` has."""
    stride = torch.add(
        first, second
    ).stride()  # traced on fake tensors; the graph drops it as unused
    if stride == second.stride():
        return second
    shape = second.shape
    outer = sorted(range(len(shape)), key=lambda dim: (-stride[dim], shape[dim] == 1))
    dense = second.permute(outer).clone(memory_format=torch.contiguous_format)
    return dense.permute([outer.index(dim) for dim in range(len(shape))])


def refuse_gradients(outputs: Any, detached: tuple[int, ...]) -> Any:
    """Return ``outputs`` in which the ``detached`` leaves require a gradient, as in the model.

    A backward through one of them raises ``BackwardError``, so that no gradient is lost silently.
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
            "compile does not use it, so the step was planned without one: pass a loss= that "
            "uses all outputs that yours does, or none",
            code="FXR706",
        )
