"""Modes of torch, and how operations run outside of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def real_execution() -> Iterator[None]:
    """Run operations inside on real data although a trace is active."""
    from torch._dispatch.python import no_python_dispatcher  # noqa: PLC0415
    from torch.utils._python_dispatch import _disable_current_modes  # noqa: PLC0415

    with _disable_current_modes(), no_python_dispatcher(), torch._C._DisableAutocast():
        yield


def without_dispatch_modes() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which no ``TorchDispatchMode`` is active."""
    from torch.utils._python_dispatch import _disable_current_modes  # noqa: PLC0415

    left: contextlib.AbstractContextManager[Any] = _disable_current_modes()
    return left


def in_dispatch_mode() -> bool:
    """Return whether a ``TorchDispatchMode`` that must see each operation is active in this thread.

    Dynamo compiles nothing under it. Modes that trace, or compute shapes, are such modes.
    """
    if not torch._C._len_torch_dispatch_stack():
        return False
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack  # noqa: PLC0415

    return any(
        mode.is_infra_mode() or not getattr(mode, "ignore_compile_internals", bool)()
        for mode in _get_current_dispatch_mode_stack()
    )
