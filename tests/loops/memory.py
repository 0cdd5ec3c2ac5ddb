"""What the allocator does while Python code runs, from ``torch.profiler`` alone.

Nothing of fxremat is used, so that it is measured by something that knows nothing of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "loops mark "


@contextmanager
def sizes_known() -> Iterator[None]:
    """Have the allocator remember how large blocks are.

    Else it tells of a release only where the block was allocated under a profiler: what a
    recording finds there at its start would never seem to go.
    """
    (library,) = (Path(torch.__file__).parent / "lib").glob("*c10.*")
    flag = ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_report_cpu_memory_usage")
    before, flag.value = flag.value, True
    try:
        yield
    finally:
        flag.value = before


class Recording:
    """Allocations and releases of this thread, on the CPU.

    Attributes:
        changes: ``(instant, signed bytes)`` of each, in order, once the recording is over.
        marks: instants by name.
        spans: ``(start, end, name)`` of every operation and annotation.
    """

    def __init__(self) -> None:
        self.changes: list[tuple[int, int]] = []
        self.marks: dict[str, int] = {}
        self.spans: list[tuple[int, int, str]] = []

    def mark(self, name: str) -> None:
        """Name this instant."""
        with record_function(_MARK + name):
            pass

    def _read(self, events: Iterable[Any]) -> None:
        for event in events:
            name, start = event.name(), event.start_ns()
            if name == "[memory]":
                self.changes.append((start, event.nbytes()))
            elif name.startswith(_MARK):
                self.marks[name.removeprefix(_MARK)] = start
            else:
                self.spans.append((start, event.end_ns(), name))
        self.changes.sort(key=lambda change: change[0])  # equal instants stay in their order

    def held_at_start(self) -> int:
        """Bytes that were allocated before the recording and released in it.

        Whoever drops everything before the recording ends learns what there was at its start.
        """
        return -sum(nbytes for _instant, nbytes in self.changes)

    def peak(self, start: str, end: str, *, held_bytes: int) -> tuple[int, str]:
        """Most bytes between two marks, and the outermost operation that runs then.

        Args:
            start, end: names of marks.
            held_bytes: allocated when the recording began.
        """
        first, last = self.marks[start], self.marks[end]
        levels = accumulate((nbytes for _, nbytes in self.changes), initial=held_bytes)
        instants = [self.marks[start], *(instant for instant, _ in self.changes)]
        inside = [(b, t) for t, b in zip(instants, levels, strict=True) if first <= t <= last]
        most, when = max(inside, key=lambda level: level[0])
        outer = [span for span in self.spans if span[0] <= when <= span[1]]
        return most, min(outer)[2] if outer else ""


@contextmanager
def recording() -> Iterator[Recording]:
    """Record what happens in the context."""
    found = Recording()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield found
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    found._read(profiler.profiler.kineto_results.events())


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, a storage that several share counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
