"""Allocators of devices: their settings, and a log of what they do."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

import torch

from fxremat.errors import CostError
from fxremat.torch_compat.autograd import current_backward
from fxremat.torch_compat.storages import dense_parts


def allocator_settings() -> dict[str, Any] | None:
    """Return the settings of torch's caching allocator for CUDA, by the names in its snapshot.

    Returns ``None`` if another allocator is in use: the driver's (``cudaMallocAsync``) or a
    plugged-in one.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return None
    snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    settings: dict[str, Any] = snapshot.get("allocator_settings", {})
    return settings


def counted_bytes(device: torch.device) -> tuple[int, int] | None:
    """Return the bytes that CUDA's allocator has handed out: now, and the peak so far.

    The peak is since its last reset by the user. Returns ``None`` if nothing is counted: on a CPU,
    and by a plugged-in allocator.
    """
    if device.type != "cuda" or torch.cuda.get_allocator_backend() == "pluggable":
        return None
    counts = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
    return counts["current"], counts["peak"]


def slack_bytes(device: torch.device) -> int:
    """Return how many more bytes CUDA's allocator hands out than were requested; 0 if unknown."""
    if device.type != "cuda" or torch.cuda.get_allocator_backend() != "native":
        return 0
    counts = torch.cuda.memory_stats_as_nested_dict(device)
    handed_out, asked = counts["allocated_bytes"]["all"], counts["requested_bytes"]["all"]
    return int(handed_out["current"] - asked["current"])


def blocks_of(tensors: Iterable[torch.Tensor], device: torch.device) -> list[tuple[int, int]]:
    """Return the size and the requested size of each block of CUDA's allocator that holds a tensor.

    Only blocks of ``tensors`` on ``device`` are listed.
    """
    parts = [part for t in tensors if t.device == device for part in dense_parts(t)]
    addresses = {part.untyped_storage().data_ptr() for part in parts}
    snapshot: Any = torch.cuda.memory_snapshot
    segments = (s for s in snapshot() if s["device"] == device.index)
    return [
        (block["size"], block["requested_size"])
        for segment in segments
        for block in segment["blocks"]
        if block["address"] in addresses
    ]


class AllocationLog:
    """A log of what a device's allocator does between entering and leaving the context.

    On CUDA it has the blocks that are handed out; no statistics are reset for it. It is the
    profiler of its thread, which can have one only. While it is open, its thread and the backwards
    that this thread starts record no operators, because recording one takes longer than most
    operators of a small step. An observer of the user that is no profiler, such as an
    ``ExecutionTraceObserver``, does not see them either.

    Args:
        device: the device of the allocator.
        make_way: ends this log when another one, or a profiler of the user, starts in its thread;
            ``None``: it does not make way.

    Attributes:
        events: after leaving, ``(mark, signed bytes)`` of each allocation and release, in order,
            where ``mark`` is the last name passed to :meth:`mark`. A mark itself is an event of 0
            bytes.
    """

    def __init__(
        self, device: torch.device | None = None, *, make_way: Callable[[], None] | None = None
    ) -> None:
        self.events: list[tuple[str, int]] = []
        self._make_way = make_way
        self._thread: threading.Thread | None = None
        self._on_cuda = device is not None and device.type == "cuda"

    def __enter__(self) -> AllocationLog:
        profiler: Any = torch.autograd
        _make_way()
        experimental = torch._C._profiler._ExperimentalConfig()
        state = profiler.ProfilerState.CPU
        config = profiler.ProfilerConfig(state, False, True, False, False, False, experimental)
        self._thread = threading.current_thread()
        if self._make_way is not None:
            _making_way[self] = self._make_way
        try:
            profiler._enable_profiler_legacy(config)
            _record_operators(False)
            _let_profiles_begin()
        except RuntimeError as error:
            self.forget()
            raise CostError(
                f"the allocator cannot be watched: {error}. Plan before the profiler starts: "
                "compile with, or run once, the shapes of the step that is profiled",
                code="FXR611",
            ) from error
        except BaseException:  # an interrupt
            self.__exit__()
            raise
        return self

    @property
    def can_end(self) -> bool:
        """Whether the log's profiler can be stopped here: in its thread, outside of a backward."""
        return self._thread is threading.current_thread() and current_backward() < 0

    def mark(self, name: str) -> None:
        """Set the mark of the events that follow, in the log's thread or in its backwards."""
        active: Any = torch._C._autograd._profiler_type
        if active() != torch._C._profiler.ActiveProfilerType.LEGACY:
            return
        _record_operators(True)
        with torch.autograd.profiler.record_function(_MARK + name):
            pass
        _record_operators(False)

    def forget(self) -> None:
        """Drop a log whose thread has ended, and its profiler with it."""
        _making_way.pop(self, None)
        _let_profiles_begin()

    def __exit__(self, *exc_info: object) -> None:
        try:
            threads: Any = torch._C._autograd._disable_profiler_legacy()
        except RuntimeError:  # an interrupt came before the profiler began
            return
        finally:
            _record_operators(True)
            self.forget()
        start = threads[0][0]
        records = [r for thread in threads for r in thread]
        if len(threads) > 1:
            records.sort(key=start.cpu_elapsed_us)
        current = ""
        for record in records:
            kind = record.kind()
            if kind == "push" and record.name().startswith(_MARK):
                current = record.name()[len(_MARK) :]
                self.events.append((current, 0))
            elif kind == "memory_alloc":
                change = record.cuda_memory_usage() if self._on_cuda else record.cpu_memory_usage()
                if change:  # 0 for events of the other device
                    self.events.append((current, change))

    @property
    def peak_bytes(self) -> int:
        """Most bytes that were allocated at once, less those at the start; never negative."""
        return max(0, *accumulate(change for _mark, change in self.events), 0)


@contextlib.contextmanager
def noted_bytes(device: torch.device, note: Callable[[int], object]) -> Iterator[None]:
    """Log allocations inside; at the end, call ``note`` with their peak, less bytes at the start.

    It is also called if an exception is raised. The peak is 0 if a profiler is active.

    Ensures: the cache of CUDA's allocator is empty.
    """
    log = AllocationLog(device)
    try:
        with contextlib.ExitStack() as logged:
            with contextlib.suppress(CostError):
                logged.enter_context(log)
            yield
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        note(log.peak_bytes)


def _record_operators(is_on: bool) -> None:
    """Switch the recording of operators by torch's observers on or off, for this thread."""
    torch._C._autograd._enable_record_function(is_on)


_MARK = "fxremat mark "  # no operator's name begins so

_making_way: dict[AllocationLog, Callable[[], None]] = {}
"""Logs that end when another one is needed in their thread."""


def _make_way() -> None:
    """End the logs of this thread that make way, also one that an interrupt left unowned."""
    for log, make_way in list(_making_way.items()):
        make_way()
        if log in _making_way and log.can_end:
            log.__exit__()


class _MakesWay:
    """A function of torch that begins a profile, after the logs of its thread have ended."""

    def __init__(self, begin: Callable[..., Any]) -> None:
        self.begin = begin

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _make_way()
        return self.begin(*args, **kwargs)


_profiles = threading.Lock()


def _let_profiles_begin() -> None:
    """Make a profile of the user end the logs of its thread when it begins, if there are any."""
    from torch.autograd import profiler  # noqa: PLC0415

    with _profiles:
        for name in ("_prepare_profiler", "_enable_profiler"):
            begin: Any = getattr(profiler, name)
            if isinstance(begin, _MakesWay) != bool(_making_way):
                setattr(profiler, name, _MakesWay(begin) if _making_way else begin.begin)
