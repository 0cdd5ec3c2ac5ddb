"""Hooks into transfers: record when they ran, or replace a copy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

Kind = Literal["offload", "prefetch"]

Interceptor = Callable[[Callable[[], None]], None]
"""Called with a copy in place of running it; may run it earlier, later, or not at all."""


@dataclass(frozen=True, slots=True)
class TransferRecord:
    """When a transfer between device and host memory ran.

    Attributes:
        kind: to host memory (``offload``) or from it (``prefetch``).
        nbytes: number of bytes.
        begin_s: when the copy began, on the clock of ``time.perf_counter``.
        end_s: when it had ended.
    """

    kind: Kind
    nbytes: int
    begin_s: float
    end_s: float


class Timed(Protocol):
    """A transfer under way whose times can be asked for."""

    def record(self) -> TransferRecord | None:
        """Wait for the transfer, and return its times; ``None`` if it failed."""


class _Recorder:
    def __init__(self) -> None:
        self.transfers: list[Timed] = []


_recorders: list[_Recorder] = []
interceptors: list[Interceptor] = []
"""The last of them runs in place of every copy. Tests delay copies, or make them fail."""


def recording() -> bool:
    """Return whether a :func:`record_transfers` is open, which records transfers that begin now."""
    return bool(_recorders)


def started(transfer: Timed) -> None:
    """Add ``transfer``, which begins now, to each open :func:`record_transfers`."""
    for recorder in _recorders:
        recorder.transfers.append(transfer)


@contextlib.contextmanager
def record_transfers() -> Iterator[list[TransferRecord]]:
    """Record the transfers that start inside, in the order in which they began.

    The list that is yielded is filled on leaving, which waits for the transfers. On CUDA the times
    are those of events on the streams of the transfers.

    Example:
        >>> with record_transfers() as events:
        ...     step()
        >>> sum(event.end_s - event.begin_s for event in events)  # doctest: +SKIP
    """
    records: list[TransferRecord] = []
    recorder = _Recorder()
    _recorders.append(recorder)
    try:
        yield records
    finally:
        _recorders.remove(recorder)
        times = (transfer.record() for transfer in recorder.transfers)
        records.extend(sorted((r for r in times if r is not None), key=lambda r: r.begin_s))


def perform(copy: Callable[[], None]) -> None:
    """Run ``copy``, or pass it to the last of the ``interceptors``."""
    if interceptors:
        interceptors[-1](copy)
    else:
        copy()


def timed_event() -> Any:
    """Return a CUDA event that measures time."""
    event: Any = torch.cuda.Event
    return event(enable_timing=True)


class CudaTimes:
    """Times a copy on a stream by CUDA events, on the clock of the host."""

    def __init__(self, kind: Kind, nbytes: int, stream: torch.cuda.Stream) -> None:
        self._kind: Kind = kind
        self._nbytes = nbytes
        self._stream = stream
        self._begin, self._end = timed_event(), timed_event()

    def begin(self) -> None:
        """Record the event before the copy, which is enqueued next."""
        self._begin.record(self._stream)

    def end(self) -> None:
        """Record the event after the copy, which has been enqueued."""
        self._end.record(self._stream)

    def record(self) -> TransferRecord:
        """Wait for the copy, and return when it began and ended."""
        self._end.synchronize()
        now = timed_event()
        now.record(self._stream)
        now.synchronize()
        now_s = time.perf_counter()
        begin_s = now_s - self._begin.elapsed_time(now) / 1e3
        end_s = now_s - self._end.elapsed_time(now) / 1e3
        return TransferRecord(self._kind, self._nbytes, begin_s, end_s)
