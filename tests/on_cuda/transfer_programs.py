"""What a step may ask of the operators that move memory, on a device: small programs.

Each takes its memory again where another stream may still use it: what orders that is the
runtime's duty alone.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fxremat.runtime import streams as runtime_streams
from fxremat.runtime.arena import Arena, lease_of
from fxremat.runtime.lease import Arrival, Lease
from fxremat.runtime.streams import lanes
from tests.moving import intercept_copies, ops

NBYTES = 1 << 16
MOST_TRIES = 64


class Interrupted(BaseException):
    """What ends a step between a copy and what comes after it."""


class Interruption(contextlib.ExitStack):
    """Ends what an :class:`Interrupted` has ended, and holds nothing of it.

    A generator would: from Python 3.12 on its frame is in a circle with what it is given.
    """

    def __exit__(self, kind: Any, error: object, frames: object) -> bool:
        super().__exit__(None, None, None)
        return kind is Interrupted


def interrupted_after_a_copy(number: int = 0) -> Interruption:
    """That copy is begun, and then something raises; it is over when this is left."""
    copies = itertools.count()

    def copy_and_raise(copy: Callable[[], None]) -> None:
        copy()
        if next(copies) == number:
            raise Interrupted

    interruption = Interruption()
    interruption.enter_context(intercept_copies(copy_and_raise))
    return interruption


def interrupted_before_a_wait(number: int) -> Interruption:
    """Something raises where the step would wait for one of its copies; over when this is left."""
    calls = itertools.count()

    def unless_it_is_that(wait: Callable[..., None]) -> Callable[..., None]:
        def waiting(*args: Any, **kwargs: Any) -> None:
            if next(calls) == number:
                raise Interrupted
            wait(*args, **kwargs)

        return waiting

    interruption = Interruption()
    patch = interruption.enter_context(pytest.MonkeyPatch.context())
    patch.setattr(Lease, "release", unless_it_is_that(Lease.release))
    patch.setattr(Arrival, "wait", staticmethod(unless_it_is_that(Arrival.wait)))
    return interruption


OPERATORS = ((Lease, "offload"), (Lease, "release"), (Lease, "prefetch"), (Arrival, "wait"))
ASKED: tuple[tuple[Any, str], ...] = (
    (torch.cuda.Event, "record"),
    (torch.cuda.Stream, "wait_event"),
    (runtime_streams, "_copy"),
)
"""What operators ask of the device."""


def interrupted_at_a_point(number: int, reached: list[int]) -> Interruption:
    """Something raises before or after that thing which an operator asks of the device.

    ``reached`` is not empty in the end if there was such a point. Finalizers are left alone:
    Python drops what they raise.
    """
    points, inside = itertools.count(), [False]

    def point() -> None:
        if inside[0] and next(points) == number:
            reached.append(number)
            raise Interrupted

    def with_points(asked: Callable[..., Any]) -> Callable[..., Any]:
        def between(*args: Any, **kwargs: Any) -> Any:
            point()
            result = asked(*args, **kwargs)
            point()
            return result

        return between

    def counting(operator: Callable[..., Any]) -> Callable[..., Any]:
        def operating(*args: Any, **kwargs: Any) -> Any:
            inside[0] = True
            try:
                return operator(*args, **kwargs)
            finally:
                inside[0] = False

        return operating

    interruption = Interruption()
    patch = interruption.enter_context(pytest.MonkeyPatch.context())
    for of, name in ASKED:
        patch.setattr(of, name, with_points(getattr(of, name)))
    for of, name in OPERATORS:
        changed = counting(getattr(of, name))
        patch.setattr(of, name, staticmethod(changed) if of is Arrival else changed)
    return interruption


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def made(value: int = 1) -> Tensor:
    """Something that the current stream computes."""
    return torch.full((NBYTES,), value, dtype=torch.uint8, device=device())


def take_again(address: int) -> None:
    """Compute on the current stream where something was that has been dropped."""
    held = []
    for _ in range(MOST_TRIES):
        held.append(made(255))
        if held[-1].data_ptr() == address:
            return
    raise AssertionError("the allocator did not hand the memory out again")


def leave(host: Tensor, offset: int = 0) -> None:
    """Compute something, and have it leave."""
    x = made()
    ops.offload(x, host, offset)
    ops.release(x, host, offset)
    address = x.data_ptr()
    del x
    take_again(address)


def come_back(host: Tensor, offset: int = 0) -> None:
    """Have it come back, and read it."""
    fresh = ops.prefetch(host, offset, NBYTES, device())
    ops.wait(fresh)
    fresh + 1


@functools.cache
def _two_streams() -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    # Made once: torch has few, hands them out again in turn, and two may be one.
    both = torch.cuda.Stream(), torch.cuda.Stream()
    assert len({stream.cuda_stream for stream in (*both, *(_lane_streams()))}) == 4
    return both


def _lane_streams() -> list[torch.cuda.Stream]:
    return [lane.stream for lane in lanes(device().index)]


@contextlib.contextmanager
def streams() -> Iterator[tuple[torch.cuda.Stream, torch.cuda.Stream]]:
    """Two streams that nothing orders; what was before comes before, what follows after."""
    torch.cuda.synchronize()
    yield _two_streams()
    torch.cuda.synchronize()


def step(arena: Arena) -> None:
    """A forward and a backward, twice."""
    for _ in range(2):
        host = arena.open()
        leave(host)
        come_back(host)
        del host


def steps_on_two_streams(arena: Arena) -> None:
    """One after the other for the host, in any order for the device; one block for both."""
    with streams() as both:
        for stream in (*both, *both):
            with torch.cuda.stream(stream):
                step(arena)


def held(arena: Arena) -> None:
    """What has left comes back while its memory is still held; the first of two at first."""
    host = arena.open()
    both = [made(), made()]
    for i, x in enumerate(both):
        ops.offload(x, host, i * NBYTES)
    for i, _ in enumerate(both):
        come_back(host, i * NBYTES)


def kept_on_the_host(arena: Arena) -> None:
    """What a lease holds for longer than a step is written, read and written again."""
    lease = lease_of(host := arena.open())
    for _ in range(2):
        x = made()
        lease.take(x, offset=0)
        address = x.data_ptr()
        del x
        take_again(address)
        fresh = torch.empty(NBYTES, dtype=torch.uint8, device=device())
        lease.fill(fresh, offset=0)
        fresh + 1
    del host


def dropped_forward(arena: Arena) -> None:
    """What is on its way to the host is dropped, and nobody has waited."""
    host = arena.open()
    x = made()
    ops.offload(x, host, 0)
    address = x.data_ptr()
    del x
    take_again(address)


def dropped_backward(arena: Arena) -> None:
    """What is on its way back is dropped, and nobody has waited."""
    host = arena.open()
    leave(host)
    fresh = ops.prefetch(host, 0, NBYTES, device())
    address = fresh.data_ptr()
    del fresh
    take_again(address)


def dropped_on_another_stream(arena: Arena) -> None:
    """Both, dropped where another stream is current than the one that the memory is of."""
    with streams() as (own, other):
        with torch.cuda.stream(own):
            host = arena.open()
            leave(host)
            fresh = ops.prefetch(host, 0, NBYTES, device())
            x = made()
            ops.offload(x, host, NBYTES)
            addresses = [fresh.data_ptr(), x.data_ptr()]
        with torch.cuda.stream(other):
            del fresh, x
        with torch.cuda.stream(own):
            for address in addresses:
                take_again(address)


def another_thread_in_between(arena: Arena) -> None:
    """A step on another stream, in another thread, before the lane waits for the computations."""
    with streams() as (own, other), pytest.MonkeyPatch.context() as patch:
        wait_event = torch.cuda.Stream.wait_event

        def on_the_other_stream() -> None:
            with torch.cuda.stream(other):
                step(arena)

        def wait_late(stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
            patch.undo()
            thread = threading.Thread(target=on_the_other_stream)
            thread.start()
            thread.join()
            wait_event(stream, event)

        patch.setattr(torch.cuda.Stream, "wait_event", wait_late)
        with torch.cuda.stream(own):
            step(arena)


def interrupted_offload(arena: Arena) -> None:
    """The copy has begun, and nothing else came of it."""
    host = arena.open()
    x = made()
    address = x.data_ptr()
    with interrupted_after_a_copy():
        ops.offload(x, host, 0)
    del x
    take_again(address)


def interrupted_prefetch(arena: Arena) -> None:
    """The copy has begun, and nobody has the memory it goes to."""
    host = arena.open()
    leave(host)
    hole = made()
    address = hole.data_ptr()
    del hole
    with interrupted_after_a_copy():
        ops.prefetch(host, 0, NBYTES, device())
    take_again(address)


def interrupted_anywhere(arena: Arena) -> None:
    """Steps that end at each point there is, in turn; memory is used again after each."""
    for number in range(MOST_TRIES):
        reached: list[int] = []
        with interrupted_at_a_point(number, reached):
            step(arena)
        held = [made(255) for _ in range(8)]
        del held
        if not reached:
            return
    raise AssertionError("a step asks for more than was thought")


def given_up_after_an_offload(arena: Arena) -> None:
    """The host memory goes while it is written."""
    leave(arena.open())
    arena.close()


def given_up_after_a_prefetch(arena: Arena) -> None:
    """The host memory goes while it is read."""
    host = arena.open()
    leave(host)
    come_back(host)
    del host
    arena.close()


PROGRAMS: tuple[Callable[[Arena], None], ...] = (
    step,
    steps_on_two_streams,
    held,
    kept_on_the_host,
    dropped_forward,
    dropped_backward,
    dropped_on_another_stream,
    another_thread_in_between,
    interrupted_offload,
    interrupted_prefetch,
    interrupted_anywhere,
    given_up_after_an_offload,
    given_up_after_a_prefetch,
)


def run(program: Callable[[Arena], None]) -> None:
    """Run it with host memory of its own, which is gone afterwards."""
    arena = Arena(2 * NBYTES, device=device())
    program(arena)
    arena.close()
