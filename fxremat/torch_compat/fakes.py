"""Tensors without data, the modes that compute with them, and leaving those modes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fxremat.torch_compat.storages import StorageAlive, meta_storage, storage_key


def fake_mode() -> Any:
    """Return a mode in which operations compute shapes but no data.

    Its ``from_tensor`` makes copies without data. Real tensors that a forward uses from outside its
    module are treated as such copies.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: PLC0415

    # A loop needs an environment for symbols, although each size is a number.
    environment = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=environment, static_shapes=True)


def fake_mode_of(tensors: Iterable[torch.Tensor]) -> Any:
    """Return the fake mode of the first of ``tensors`` that has no data, or a new one."""
    modes = (getattr(tensor, "fake_mode", None) for tensor in tensors)
    return next((mode for mode in modes if mode is not None), None) or fake_mode()


def is_opaque(value: object) -> bool:
    """Return whether ``value`` stands for an object that no operation reads (a ``DeviceMesh``)."""
    from torch._library.fake_class_registry import FakeScriptObject  # noqa: PLC0415

    return isinstance(value, FakeScriptObject)


def is_fake(tensor: object) -> bool:
    """Return whether ``tensor`` is a tensor without data."""
    from torch._subclasses.fake_tensor import FakeTensor  # noqa: PLC0415

    return isinstance(tensor, FakeTensor)


def fake_tensor(
    like: torch.Tensor,
    storage: torch.UntypedStorage,
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int,
    *,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Return a tensor without data, with the dtype, the device and the fake mode of ``like``.

    ``device`` replaces the device of ``like``, and need not exist. ``offset`` counts elements.
    """
    from torch._subclasses.fake_tensor import FakeTensor  # noqa: PLC0415
    from torch.utils._python_dispatch import _disable_current_modes  # noqa: PLC0415

    with _disable_current_modes():
        made = torch.empty(0, dtype=like.dtype, device="meta")
        made.set_(storage, offset, tuple(shape), tuple(stride))
        return FakeTensor(getattr(like, "fake_mode", None), made, device or like.device)


def fake_bytes_like(node: fx.Node, nbytes: int) -> torch.Tensor:
    """Return a uint8 tensor on the CPU without data, in the fake mode that traced ``node``."""
    from torch._subclasses.fake_tensor import FakeTensor  # noqa: PLC0415

    value = node.meta["val"]
    for item in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(item, FakeTensor):
            with item.fake_mode:
                return torch.empty(nbytes, dtype=torch.uint8)
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")


def fake_copy(
    tensor: torch.Tensor, mode: Any, storages: dict[int, torch.UntypedStorage], device: torch.device
) -> torch.Tensor:
    """Return a tensor like ``tensor`` without data, in a fake mode and on ``device``.

    ``tensor`` may have no data itself, for instance on ``meta``, and ``device`` need not exist.
    ``storages`` maps storages of originals to those of copies; new ones are added.
    """
    from torch._subclasses.fake_tensor import FakeTensor  # noqa: PLC0415
    from torch.utils._python_dispatch import _disable_current_modes  # noqa: PLC0415

    storage = tensor.untyped_storage()
    key = storage_key(tensor)
    with _disable_current_modes(), torch.no_grad():
        if key not in storages:
            storages[key] = meta_storage(storage.nbytes())
        made = torch.empty(0, dtype=tensor.dtype, device="meta")
        made.set_(storages[key], tensor.storage_offset(), tensor.shape, tensor.stride())
        fake: torch.Tensor = FakeTensor(mode, made, device)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(fake, tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad) if tensor.is_leaf else fake


def fake_log(adopt: Callable[[Any], Any]) -> Any:
    """Return a dispatch mode that tracks the memory of tensors without data.

    Its ``peak_bytes`` are the most bytes that existed at once. Storages count from the operation
    that makes them until they are freed. ``adopt`` returns what replaces a tensor that has data, or
    is on ``meta``.
    """
    from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC0415
    from torch.utils._pytree import tree_leaves, tree_map  # noqa: PLC0415

    class FakeLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.alive: dict[int, StorageAlive] = {}
            self.peak_bytes = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            args, kwargs = tree_map(lambda x: x if is_fake(x) else adopt(x), (args, kwargs or {}))
            given = {storage_key(t) for t in tree_leaves((args, kwargs)) if is_fake(t)}
            result = func(*args, **kwargs)
            for tensor in tree_leaves(result):
                if is_fake(tensor) and storage_key(tensor) not in given:
                    self.alive.setdefault(storage_key(tensor), StorageAlive(tensor))
            self.alive = {key: one for key, one in self.alive.items() if one}
            self.peak_bytes = max(self.peak_bytes, sum(s.nbytes for s in self.alive.values()))
            return result

    return FakeLog()


def data_dependent_errors() -> tuple[type[BaseException], ...]:
    """Return the types of errors that fake tensors raise if shapes or branches depend on data."""
    from torch._subclasses.fake_tensor import (  # noqa: PLC0415
        DataDependentOutputException,
        DynamicOutputShapeException,
    )
    from torch.fx.experimental.symbolic_shapes import (  # noqa: PLC0415
        GuardOnDataDependentSymNode,
    )

    return (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


@contextlib.contextmanager
def without_shape_errors_logged() -> Iterator[None]:
    """Log nothing inside for operations whose shapes do not fit: torch raises errors anyway."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
