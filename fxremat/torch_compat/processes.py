"""Other processes of ``torch.distributed``: who trains a model with this one, and what they share.

Private names, checked on 2.13: ``distributed_c10d._get_default_store``, the store through which a
default process group found its members.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import nn


def has_processes() -> bool:
    """Whether a process group is there."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


def own_rank() -> int:
    """The rank of this process among all."""
    return torch.distributed.get_rank()


def ranks_in(group: object = None) -> tuple[int, ...]:
    """Ranks of the processes of a group; ``None``: of all."""
    group = torch.distributed.group.WORLD if group is None else group
    return tuple(torch.distributed.get_process_group_ranks(group))  # type: ignore[arg-type]


def is_group(value: object) -> bool:
    """Whether it is a process group that this process is in."""
    return has_processes() and isinstance(value, torch.distributed.ProcessGroup)


def ranks_of(model: nn.Module) -> tuple[int, ...]:
    """Ranks of the processes that train a model together, by its wrapper or its parameters.

    Empty where neither tells: each process may train a model of its own.
    """
    if not has_processes():
        return ()
    from torch.distributed.tensor import DTensor  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    if isinstance(model, DistributedDataParallel):
        return ranks_in(model.process_group)
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    found = {tuple(sorted(mesh.mesh.flatten().tolist())) for mesh in meshes}
    return max(found, key=len, default=())


class SharedStore:
    """Bytes by name that the processes of a group share.

    Args:
        prefix: of names: others do not meet those of this one.
        base: a store; ``None``: that through which all processes found each other.
    """

    def __init__(self, prefix: str, base: Any = None) -> None:
        if base is None:
            base = torch.distributed.distributed_c10d._get_default_store()
        self._store = torch.distributed.PrefixStore(prefix, base)  # type: ignore[attr-defined]

    def put(self, name: str, data: bytes) -> None:
        """Let others have it."""
        self._store.set(name, data)  # type: ignore[arg-type]

    def get(self, name: str, timeout_s: float) -> bytes | None:
        """Bytes that a process has put there, or puts within the time; ``None``: none did."""
        try:
            self._store.wait([name], timedelta(seconds=max(timeout_s, 0.001)))
            return bytes(self._store.get(name))
        except (RuntimeError, ValueError):  # nobody did, or whoever keeps it is gone
            return None

    def count(self, name: str, more: int = 1) -> int:
        """Add to a counter; its new value."""
        return int(self._store.add(name, more))

    def drop(self, name: str) -> None:
        """Delete what nobody needs any more."""
        try:
            self._store.delete_key(name)
        except RuntimeError:  # a store that keeps all
            return
