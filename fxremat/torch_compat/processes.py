"""Processes of ``torch.distributed``: which of them train a model together, and what they share.

Private names, checked with torch 2.13: ``distributed_c10d._get_default_store``, the store through
which the default process group was initialized.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import nn


def has_processes() -> bool:
    """Return whether the default process group of ``torch.distributed`` is initialized."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


def own_rank() -> int:
    """Return the global rank of this process."""
    return torch.distributed.get_rank()


def ranks_in(group: object = None) -> tuple[int, ...]:
    """Return the ranks of the processes of a group; ``None`` stands for all processes."""
    group = torch.distributed.group.WORLD if group is None else group
    return tuple(torch.distributed.get_process_group_ranks(group))  # type: ignore[arg-type]


def is_group(value: object) -> bool:
    """Return whether ``value`` is a process group that this process is in."""
    return has_processes() and isinstance(value, torch.distributed.ProcessGroup)


def ranks_of(model: nn.Module) -> tuple[int, ...]:
    """Return the ranks of the processes that train a model together.

    They are derived from its wrapper or its parameters. If neither says, the result is empty: each
    process may train another model.
    """
    if not has_processes():
        return ()
    from torch.distributed.tensor import DTensor  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    if isinstance(model, DistributedDataParallel):
        return ranks_in(model.process_group)
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    ranks = {tuple(sorted(mesh.mesh.flatten().tolist())) for mesh in meshes}
    return max(ranks, key=len, default=())


class SharedStore:
    """Bytes by name that the processes of a group share.

    All names get a ``prefix``, which keeps stores separate. ``base`` is the store below; ``None``:
    the one through which all processes were initialized.
    """

    def __init__(self, prefix: str, base: Any = None) -> None:
        if base is None:
            base = torch.distributed.distributed_c10d._get_default_store()
        self._store = torch.distributed.PrefixStore(prefix, base)  # type: ignore[attr-defined]

    def put(self, name: str, data: bytes) -> None:
        """Publish ``data`` to the other processes under ``name``."""
        self._store.set(name, data)  # type: ignore[arg-type]

    def get(self, name: str, timeout_s: float) -> bytes | None:
        """Wait for the bytes that a process publishes under ``name``, and return them.

        Returns ``None`` after ``timeout_s``.
        """
        try:
            self._store.wait([name], timedelta(seconds=max(timeout_s, 0.001)))
            return bytes(self._store.get(name))
        except (RuntimeError, ValueError):  # the timeout, or the end of the process with the store
            return None

    def count(self, name: str, more: int = 1) -> int:
        """Add ``more`` to the counter ``name``, which all processes share; return its new value."""
        return int(self._store.add(name, more))

    def drop(self, name: str) -> None:
        """Delete the entry ``name``, which no process needs any more."""
        try:
            self._store.delete_key(name)
        except RuntimeError:  # a store that cannot delete
            return
