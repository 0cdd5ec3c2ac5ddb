"""Layouts of kernels' results. Kernels are run where their fake implementation may be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxremat import torch_compat
from fxremat.costs.measured.cache import CostCache
from fxremat.costs.measured.execute import HeldBytes, undisturbed
from fxremat.costs.measured.synthetic import made_up
from fxremat.passes.joint.sizes import Layout, layout_of
from fxremat.passes.stages.block import Key, tensor_key

aten = torch.ops.aten

PRODUCTS = frozenset((aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default))
"""Operations whose results are contiguous, whatever they read."""


class KernelLayouts:
    """Determines the layouts that kernels of a device give their results.

    Kernels are run only where an argument is not contiguous. For other arguments, fake kernels give
    the layouts of the real ones.

    Args:
        cache: results of former calls. New ones are added.

    Attributes:
        measuring_bytes: most bytes that were held at once to determine a layout.
    """

    def __init__(self, cache: CostCache) -> None:
        self.measuring_bytes = 0
        self._cache = cache

    def left(
        self, target: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Sequence[Layout] | None:
        """Return the layouts that a kernel gives its results.

        Returns ``None`` if they are those of its fake kernel, or if the kernel cannot be run. This
        function is a :data:`fxremat.passes.joint.layouts.Left`.

        Ensures:
            The random generators are as before.
        """
        given, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        given = [_at_capture(value) for value in given]
        if not _is_doubtful(target, [t for t in given if isinstance(t, torch.Tensor)]):
            return None
        key: Key = (str(target), str(spec), *map(tensor_key, given))
        if key not in self._cache.left:
            self._cache.left[key] = self._measure(target, given, spec)
        return self._cache.left[key]

    def _measure(self, target: Any, given: Sequence[Any], spec: Any) -> tuple[Layout, ...] | None:
        device = next(t.device for t in given if isinstance(t, torch.Tensor))
        try:
            with undisturbed(device):
                real = [made_up(v) if isinstance(v, torch.Tensor) else v for v in given]
                args, kwargs = pytree.tree_unflatten(real, spec)
                results = [t for t in pytree.tree_leaves(target(*args, **kwargs)) if _is_tensor(t)]
        except (RuntimeError, ValueError, TypeError, IndexError):
            return None
        read = {torch_compat.storage_key(t) for t in real if isinstance(t, torch.Tensor)}
        held = HeldBytes(device)
        for value in (*real, *results):
            held.add(value)
        self.measuring_bytes = max(self.measuring_bytes, held.nbytes)
        if any(torch_compat.storage_key(t) in read for t in results):
            return None
        return tuple(map(layout_of, results))


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _at_capture(value: Any) -> Any:
    """Return an argument with symbolic sizes replaced by their values at the capture."""
    if isinstance(value, torch.SymInt):
        return torch_compat.hint_of(value)
    if not isinstance(value, torch.Tensor) or not torch_compat.has_symbols(value):
        return value
    hint = torch_compat.hint_of
    storage = torch_compat.meta_storage(hint(value.untyped_storage().nbytes()))
    return torch_compat.fake_tensor(
        value,
        storage,
        tuple(map(hint, value.shape)),
        tuple(map(hint, value.stride())),
        hint(value.storage_offset()),
    )


def _is_doubtful(target: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the real kernel may give another layout than the fake one."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    if target in PRODUCTS:
        return False
    schema = target._schema
    if schema.is_mutable or any(result.alias_info is not None for result in schema.returns):
        return False
    if not all(t.layout is torch.strided for t in tensors):
        return False
    return any(not t.is_contiguous() for t in tensors)
