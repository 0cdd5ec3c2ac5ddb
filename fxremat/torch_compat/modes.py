"""Modes of torch: how operations run whatever is active around them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def real_execution() -> Iterator[None]:
    """Run operations for real although a trace is going on."""
    from torch._dispatch.python import no_python_dispatcher  # noqa: PLC0415
    from torch.utils._python_dispatch import _disable_current_modes  # noqa: PLC0415

    with _disable_current_modes(), no_python_dispatcher(), torch._C._DisableAutocast():
        yield
