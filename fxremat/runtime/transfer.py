"""The operations that emitted graphs move activations with.

They are operators of torch, so that graphs with them trace, print and serialize. They
are called without gradients, in graphs that are differentiated already, and have no
autograd formula: nothing flows through them.

========== ==========================================================================
operator   what it does
========== ==========================================================================
open_arena lends a step its host memory
offload    starts to copy a tensor's storage to host memory
release    returns when that storage may be dropped
prefetch   starts to copy host memory to a fresh storage
wait       returns when the fresh storage may be read
========== ==========================================================================

"May" is in the order of the device: on CUDA the current stream waits, on the CPU the
thread. A host tensor that is not of an arena is copied at once: that is what a
functionalized graph passes, which works on clones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxremat.runtime.arena import Arena, lease_of
from fxremat.runtime.lease import Arrival, whole_storage

_new_library: Any = torch.library.Library
_library = _new_library("fxremat", "DEF")
_library.define("open_arena(int arena, int nbytes) -> Tensor")
_library.define("offload(Tensor x, Tensor(a!) host, int offset) -> ()")
_library.define("release(Tensor x, Tensor(a!) host, int offset) -> ()")
_library.define("prefetch(Tensor host, int offset, int nbytes, Device device) -> Tensor")
_library.define("wait(Tensor(a!) x) -> ()")


def open_arena(arena: int, nbytes: int) -> Tensor:
    """Lend the memory of one step, uint8, shape ``(nbytes,)``, by the ``id`` of an arena.

    Raises:
        TransferError: there is no such arena, or it is smaller.
        HostMemoryError: earlier steps have all its memory, and more cannot be had.
    """
    return Arena.find(arena).open(nbytes)


def offload(x: Tensor, host: Tensor, offset: int) -> None:
    """Start to copy the whole storage of ``x``, of which it may be a part, to ``host[offset:]``.

    Raises:
        TransferError: it does not fit, or an earlier transfer of the step failed.
    """
    lease = lease_of(host)
    if lease is not None:
        lease.offload(x, offset=offset)
        return
    source = whole_storage(x)
    host[offset : offset + source.numel()].copy_(source)


def release(x: Tensor, host: Tensor, offset: int) -> None:
    """Wait until the storage of ``x`` is in host memory, so that it may be dropped.

    The caller drops its own names of it next; the runtime has none.

    Raises:
        TransferError: nothing was offloaded there, or a transfer of the step failed.
    """
    del x
    lease = lease_of(host)
    if lease is not None:
        lease.release(offset=offset)


def prefetch(host: Tensor, offset: int, nbytes: int, device: torch.device) -> Tensor:
    """Start to copy what was offloaded to a fresh storage: uint8, shape ``(nbytes,)``.

    That may be larger than what was offloaded, and is on the device where it came from.

    Raises:
        TransferError: more was offloaded there, or a transfer of the step failed.
    """
    lease = lease_of(host)
    if lease is not None:
        return lease.prefetch(offset=offset, nbytes=nbytes, device=device)
    return torch.empty(nbytes, dtype=torch.uint8, device=device).copy_(
        host[offset : offset + nbytes]
    )


def wait(x: Tensor) -> None:
    """Wait until what :func:`prefetch` returned is filled. ``x`` may be a view of it.

    Raises:
        TransferError: a transfer of the step failed.
    """
    Arrival.wait(x)


def _fake_open_arena(arena: int, nbytes: int) -> Tensor:
    del arena
    return torch.empty(nbytes, dtype=torch.uint8)


def _fake_prefetch(host: Tensor, offset: int, nbytes: int, device: torch.device) -> Tensor:
    del host, offset
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _fake_nothing(*args: object) -> None:
    del args


for _function, _fake in (
    (open_arena, _fake_open_arena),
    (offload, _fake_nothing),
    (release, _fake_nothing),
    (prefetch, _fake_prefetch),
    (wait, _fake_nothing),
):
    # One kernel for every device: which one is meant is known from the host memory.
    _library.impl(_function.__name__, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fxremat::{_function.__name__}", _fake, lib=_library)
