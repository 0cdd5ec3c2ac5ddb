"""Values for measuring: real where they exist, made up with the traced strides elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.errors import CostError
from fxremat.passes.joint.graph import JointGraph, attribute_of

CHUNK = 1 << 14
"""Number of 8-bit numbers that are drawn at a time, since each takes four bytes until it is
rounded."""


class Synthesizer:
    """Gives each node a tensor with its traced dtype, shape, strides and storage.

    Made-up floating-point values are random, so that no kernel takes a shortcut for zeros, and
    small, so that none overflows. Made-up integers and masks are zero, which is a valid index
    everywhere. Integers that the forward computes are real.

    Args:
        joint: the graph.
        real: values of nodes, where there are any.
    """

    def __init__(self, joint: JointGraph, real: Mapping[fx.Node, torch.Tensor]) -> None:
        self._held: dict[fx.Node, torch.Tensor] = {}
        self._real = dict(real)
        for node in joint.constants:
            self._real[node] = attribute_of(joint.module, node)

    def hold(self, values: Mapping[fx.Node, torch.Tensor]) -> None:
        """Use these values for their nodes, until :meth:`keep_only` drops them."""
        self._held.update(values)

    def held(self) -> tuple[torch.Tensor, ...]:
        """Return the values that were passed to :meth:`hold` and have not been dropped."""
        return tuple(self._held.values())

    def keep_only(self, nodes: Iterable[fx.Node]) -> None:
        """Drop all values that were passed to :meth:`hold`, except those of ``nodes``."""
        kept = set(nodes)
        self._held = {n: t for n, t in self._held.items() if n in kept}

    def of(self, nodes: Iterable[fx.Node]) -> dict[fx.Node, torch.Tensor]:
        """Return the held, real or made-up value of each of ``nodes``.

        Made-up values of one storage share memory.
        """
        made: dict[int, torch.Tensor] = {}
        return {node: self._value(node, made) for node in nodes}

    def _value(self, node: fx.Node, made: dict[int, torch.Tensor]) -> torch.Tensor:
        if node in self._held:
            return self._held[node]
        if node in self._real:
            return self._real[node]
        traced = node.meta["val"]
        if not isinstance(traced, torch.Tensor):
            size: torch.Tensor = traced  # not a tensor, but a size that the graph takes
            return size
        if traced.layout is not torch.strided:
            raise CostError(
                f"input {node.name} is a tensor of layout {traced.layout} without data, so nothing "
                "that reads it can be measured. Capture the step with real tensors",
                code="FXR612",
            )
        key = torch_compat.storage_key(traced)
        if key not in made:
            made[key] = _base(traced, std=0.1)
        base = made[key]
        if base.dtype != traced.dtype:
            base = base.view(torch.uint8).view(traced.dtype)
        return base.as_strided(traced.shape, traced.stride(), traced.storage_offset())


def made_up(traced: torch.Tensor) -> torch.Tensor:
    """Return random numbers of scale 1, random masks, or integers 0, laid out as ``traced``."""
    base = _base(traced, std=1.0)
    if traced.dtype is torch.bool:
        base.bernoulli_(0.5)
    return base.as_strided(traced.shape, traced.stride(), traced.storage_offset())


def _base(traced: torch.Tensor, *, std: float) -> torch.Tensor:
    """Return a flat tensor as large as the storage of ``traced``: random numbers, or zeros."""
    count = int(traced.untyped_storage().nbytes()) // traced.element_size()
    base = torch.zeros(count, dtype=traced.dtype, device=traced.device)
    if traced.is_floating_point() and traced.itemsize == 1:  # torch draws no 8-bit ones
        for start in range(0, count, CHUNK):
            chunk = base[start : start + CHUNK]
            chunk.copy_(torch.empty(len(chunk), device=traced.device).normal_(std=std))
    elif traced.is_floating_point() or traced.is_complex():
        base.normal_(std=std)
    return base
