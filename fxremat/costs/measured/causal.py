"""Compares the bits of attention with a mask and without, by running its kernels both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.costs.measured.bits import comparisons
from fxremat.costs.measured.cache import CostCache
from fxremat.costs.measured.execute import HeldBytes, undisturbed
from fxremat.costs.measured.synthetic import made_up
from fxremat.passes.joint.masks.replace import KERNELS, Kernel
from fxremat.passes.joint.masks.rules import arguments_of
from fxremat.passes.joint.sizes import Following, layouts_of
from fxremat.passes.parts.bits import are_equal
from fxremat.passes.stages.block import Key, tensor_key

LONGEST = 2048
"""Kernels are compared for at most this many queries and keys, so that no mask is larger.

They compute blocks of at most 512, so longer sequences run the same code more often."""

LENGTHS = (100, 330, 1000)
"""Other numbers of queries to compare where these follow sizes.

The kernel of a CPU has another size of blocks below 192, and below 768, queries."""

FEW = 2
"""How many items and heads are compared at other lengths than the traced one: each is computed by
itself."""

ALIGNED = 16
"""Rows of masks begin at multiples of this many elements, as kernels of a GPU need."""

GRADIENTS = ("grad_out", "grad_out_")
KEYS = ("key", "value")

Lengths = tuple[int, int]
"""Numbers of queries and of keys."""


class MaskBits:
    """Compares attention with a mask that follows a rule and attention without it.

    Args:
        cache: results of former calls. New ones are added.

    Attributes:
        measuring_bytes: most bytes that were held at once for a comparison.
    """

    def __init__(self, cache: CostCache) -> None:
        self.measuring_bytes = 0
        self._cache = cache

    def are_kept(self, node: fx.Node, causal: bool) -> bool:
        """Return whether an attention has the same bits without its mask.

        Kernels are compared for made-up numbers: for the traced shapes, or with fewer queries and
        keys where there are more than ``LONGEST``. If the length follows sizes, they are also
        compared for ``LENGTHS``. Numbers that are not finite reach earlier queries through a mask,
        but not without it. This function is a ``CanReplace`` of
        :mod:`fxremat.passes.joint.masks.replace`.

        Args:
            node: an operation of ``KERNELS`` that reads a mask.
            causal: whether the mask is causal, and replaced by ``is_causal``; otherwise it excludes
                nothing.

        Returns:
            Whether it has. ``False`` also where the kernels cannot be run, for example for lack of
            memory.

        Ensures:
            The random generators are as before.
        """
        traced = {name: _traced(value) for name, value in arguments_of(node).items()}
        lengths = _lengths(node)
        key: Key = (str(node.target), causal, lengths, *map(tensor_key, traced.values()))
        if key not in self._cache.unmasked:
            try:
                with undisturbed(traced["query"].device):
                    same = all(self._are_same(node, traced, causal, own) for own in lengths)
                self._cache.unmasked[key] = same
            except RuntimeError:
                return False
        return self._cache.unmasked[key]

    def _are_same(
        self, node: fx.Node, traced: Mapping[str, Any], causal: bool, lengths: Lengths
    ) -> bool:
        operation: Any = node.target
        kernel: Kernel = KERNELS[operation]
        computed = [name for name, _ in kernel.results]
        laid = {
            name: _laid(name, value, traced, kernel, lengths)
            for name, value in traced.items()
            if name not in computed
        }
        tensors = [value for value in laid.values() if isinstance(value, torch.Tensor)]
        return all(
            self._are_same_for_random_numbers(operation, kernel, laid, causal)
            for _ in range(comparisons(tensors))
        )

    def _are_same_for_random_numbers(
        self, operation: Any, kernel: Kernel, laid: Mapping[str, Any], causal: bool
    ) -> bool:
        given = {
            name: made_up(value) if isinstance(value, torch.Tensor) else value
            for name, value in laid.items()
        }
        each = _not_expanded(given[kernel.mask])
        each.copy_(_mask_like(each, causal))
        if kernel.forward is not None:
            names = [a.name for a in kernel.forward._schema.arguments]
            options = {"compute_log_sumexp": True, **given}
            results = kernel.forward(**{name: options[name] for name in names if name in options})
            given.update((name, results[place]) for name, place in kernel.results)
        masked = operation(**given)
        unmasked = operation(**given | {kernel.mask: None, "is_causal": causal})
        held = HeldBytes(given["query"].device)
        held.add([*filter(_is_tensor, (*given.values(), *masked, *unmasked))])
        self.measuring_bytes = max(self.measuring_bytes, held.nbytes)
        pairs = zip(masked, unmasked, strict=True)
        # A seed of dropout is drawn even if there is none.
        return all(are_equal(a, b) for a, b in pairs if _is_tensor(a) and a.is_floating_point())


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _traced(value: Any) -> Any:
    """Return the value that an argument was traced with."""
    value = value.meta["val"] if isinstance(value, fx.Node) else value
    return float(value) if isinstance(value, Following) and isinstance(value, float) else value


def _lengths(node: fx.Node) -> tuple[Lengths, ...]:
    """Return the numbers of queries and keys to compare ``node`` with, those it has first."""
    given = arguments_of(node)
    traced = [layouts_of(given[name])[0].shape[-2] for name in ("query", "key")]
    first = [n if n <= LONGEST else LONGEST // 2 + n % (LONGEST // 2) for n in map(int, traced)]
    follow = [isinstance(n, Following) for n in traced]
    others = [[other if f else n for n, f in zip(first, follow, strict=True)] for other in LENGTHS]
    every = [first, *(others if any(follow) else ())]
    return tuple(dict.fromkeys((queries, keys) for queries, keys in every))


def _laid(
    name: str, value: Any, traced: Mapping[str, Any], kernel: Kernel, lengths: Lengths
) -> Any:
    """Return ``value`` with another number of queries and keys, without data.

    Args:
        name: the name of the argument.
        value: the traced value of the argument; what is no tensor is returned as it is.
        traced: the traced values of all arguments.
        kernel: the operator.
        lengths: the numbers of queries and keys.
    """
    query, key = traced["query"], traced["key"]
    if not isinstance(value, torch.Tensor) or lengths == (query.shape[-2], key.shape[-2]):
        return value
    shape, row = list(map(int, value.shape)), 1
    if name in ("query", *GRADIENTS):
        shape[-2] = lengths[0]
    elif name in KEYS:
        shape[-2] = lengths[1]
    elif name == kernel.mask:
        shape[-2:] = [n if old > 1 else 1 for n, old in zip(lengths, shape[-2:], strict=True)]
        row = ALIGNED
    else:
        return value
    narrow = query.dim() == 4 and query.shape[1] == key.shape[1]
    for dim in range(len(shape) - 2) if narrow else ():
        shape[dim] = min(shape[dim], FEW)
    stride, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (value.stride(dim), -dim)):
        if value.stride(dim) or shape[dim] == 1:
            stride[dim] = step
            step = -(-step * shape[dim] // row) * row
    storage = torch_compat.meta_storage(step * value.element_size())
    return torch_compat.fake_tensor(value, storage, shape, stride, 0)


def _not_expanded(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask with one entry for each dimension over which it is expanded."""
    for dim, stride in enumerate(mask.stride()):
        if stride == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask


def _mask_like(mask: torch.Tensor, causal: bool) -> torch.Tensor:
    """Return a mask with the dtype of ``mask``, for as many queries and keys.

    It is Boolean, or has 0 where a key is visible and negative infinity elsewhere. It is causal, or
    excludes nothing.
    """
    visible = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device)
    if causal:
        visible.tril_()
    if mask.dtype is torch.bool:
        return visible
    return torch.zeros_like(visible, dtype=mask.dtype).masked_fill_(
        visible.logical_not_(), -torch.inf
    )
