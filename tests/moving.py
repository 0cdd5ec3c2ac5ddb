"""Stand-ins for copies: late, held back, failing, fatal."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fxremat.runtime import transfer as ops
from fxremat.runtime.watch import Interceptor, interceptors

CPU = torch.device("cpu")


@contextlib.contextmanager
def intercept_copies(interceptor: Interceptor) -> Iterator[None]:
    """``interceptor`` is called in the place of every copy that runs inside.

    On the CPU that is in the thread that copies; on CUDA where the copy is launched, with the
    stream of the transfer as the current one.
    """
    interceptors.append(interceptor)
    try:
        yield
    finally:
        interceptors.remove(interceptor)


@contextlib.contextmanager
def delayed(seed: int, *, most_s: float = 0.05) -> Iterator[None]:
    """Each copy begins up to ``most_s`` late."""
    draw = random.Random(seed)

    def late(copy: Callable[[], None]) -> None:
        time.sleep(draw.uniform(0, most_s))
        copy()

    with intercept_copies(late):
        yield


@contextlib.contextmanager
def held_back() -> Iterator[threading.Event]:
    """No copy begins before the event is set."""
    go = threading.Event()

    def hold(copy: Callable[[], None]) -> None:
        assert go.wait(20)
        copy()

    with intercept_copies(hold):
        try:
            yield go
        finally:
            go.set()


@contextlib.contextmanager
def failing(
    error: BaseException, *, after: int = 0, times: int = 1 << 30
) -> Iterator[threading.Event]:
    """``times`` copies from number ``after`` on raise.

    While the event is clear no copy begins.
    """
    made = [0]
    go = threading.Event()
    go.set()

    def fail(copy: Callable[[], None]) -> None:
        assert go.wait(20)
        made[0] += 1
        if after < made[0] <= after + times:
            raise error
        copy()

    with intercept_copies(fail):
        yield go


def there_and_back(x: Tensor, host: Tensor, offset: int = 0) -> Tensor:
    """``x`` after its storage has been to host memory."""
    nbytes = x.untyped_storage().nbytes()
    ops.offload(x, host, offset)
    ops.release(x, host, offset)
    fresh = ops.prefetch(host, offset, nbytes, x.device)
    ops.wait(fresh)
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(
        fresh.untyped_storage(), x.storage_offset(), x.shape, x.stride()
    )


def bits(x: Tensor) -> bytes:
    """What lies in a tensor, as bytes."""
    return bytes(x.contiguous().flatten().view(torch.uint8).tolist())
