"""What emitted graphs call to move activations.

========== ==========================================================================
function   what it does
========== ==========================================================================
open_arena lends a step its host memory
offload    starts to copy a tensor's storage to host memory
release    returns when that storage may be dropped
prefetch   starts to copy host memory to a new storage
wait       returns when the new storage may be read
========== ==========================================================================

"Returns when" means in the order of the device: on CUDA the current stream waits, on the CPU the
thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxremat.runtime.arena import Arena, lease_of
from fxremat.runtime.lease import Arrival


def open_arena(arena: int, nbytes: int) -> Tensor:
    """Return host memory that the arena with id ``arena`` lends to a step: uint8, ``(nbytes,)``.

    Raises:
        TransferError: there is no such arena, or it is smaller.
        HostMemoryError: earlier steps use all its memory, and no more can be allocated.
    """
    return Arena.find(arena).open(nbytes)


def offload(x: Tensor, host: Tensor, offset: int) -> None:
    """Start to copy the whole storage of ``x``, of which it may be a view, to ``host[offset:]``.

    Raises:
        TransferError: it does not fit, or an earlier transfer of the step failed.
    """
    lease_of(host).offload(x, offset=offset)


def release(x: Tensor, host: Tensor, offset: int) -> None:
    """Wait until the storage of ``x`` is in host memory, so that it may be freed.

    The caller then drops its names for it; the runtime has none.

    Raises:
        TransferError: nothing was offloaded there, or a transfer of the step failed.
    """
    del x
    lease_of(host).release(offset=offset)


def prefetch(host: Tensor, offset: int, nbytes: int, device: torch.device) -> Tensor:
    """Return a new storage that starts to get what was offloaded to ``host[offset:]``.

    It is a tensor of uint8 and shape ``(nbytes,)``. It may be larger than what was offloaded, and
    is on the device where that came from.

    Raises:
        TransferError: more was offloaded there, or a transfer of the step failed.
    """
    return lease_of(host).prefetch(offset=offset, nbytes=nbytes, device=device)


def wait(x: Tensor) -> None:
    """Wait until the tensor that :func:`prefetch` returned is filled. ``x`` may be a view of it.

    Raises:
        TransferError: a transfer of the step failed.
    """
    Arrival.wait(x)
