"""Races in a log of the CUDA stand-in, told by vector clocks from what was asked of the device.

Two accesses to a byte, one of them a write, race unless one comes before the other whatever order
the device chooses. What comes before what: :mod:`tests.clocks`, and

* what is queued comes after all that the host had waited for;
* a legacy default stream and each blocking stream come after what the other was given;
* memory that torch's allocator hands out is a write of the stream that it is handed out for, so
  whoever used it before must be done by then, and nobody reads it before it is written.

The host is one timeline, in the order of the log, whichever of its threads asked. A tensor is all
bytes from its first to its last. Memory that is neither the device's nor pinned is never used late.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.clocks import Access, Timeline

Line = Mapping[str, Any]
Span = tuple[int, int]
"""The first byte and how many."""

MAPPED = frozenset({"cudaMalloc", "cudaHostAlloc", "cudaHostRegister", "cuMemMap"})
"""Calls after which memory is new, whatever was at its address before."""
TAKEN_FROM_THE_DEVICE = frozenset({"cudaHostUnregister", "cudaFreeHost"})
"""Calls that take pinned memory away, and wait for nobody."""


@dataclass
class Found:
    """What a log has shown.

    Attributes:
        races: in words, each once.
        items: how often a stream was given something that uses memory.
        accesses: ranges that were read, written or handed out.
        compared: pairs of accesses to the same bytes whose order was asked for.
        host_waits: how often the host learned that the device has got to some point.
        copies_beside: those of the items that are copies on another stream than operators run on.
    """

    races: list[str] = field(default_factory=list)
    items: int = 0
    accesses: int = 0
    compared: int = 0
    host_waits: int = 0
    copies_beside: int = 0


class Piece(NamedTuple):
    """Of bytes with the same history, what later accesses have to come after.

    Attributes:
        write: the last one.
        reads: those since, the last of each timeline.
        made: whether anything was written since the memory was handed out.
    """

    write: Access | None = None
    reads: tuple[Access, ...] = ()
    made: bool = True


class History:
    """Pieces of all addresses, in order."""

    def __init__(self) -> None:
        self._begins, self._pieces = [0], [Piece()]

    def pieces(self, span: Span) -> Iterator[tuple[int, Piece]]:
        """The pieces that ``span`` consists of, and where they begin."""
        first, last = self._within(span)
        return zip(self._begins[first:last], self._pieces[first:last], strict=True)

    def read(self, span: Span, access: Access) -> None:
        """Note a read."""
        first, last = self._within(span)
        for i in range(first, last):
            piece = self._pieces[i]
            others = (read for read in piece.reads if read.timeline != access.timeline)
            self._pieces[i] = piece._replace(reads=(*others, access))

    def write(self, span: Span, piece: Piece) -> None:
        """All of ``span`` is like ``piece`` now."""
        first, last = self._within(span)
        self._begins[first:last], self._pieces[first:last] = [span[0]], [piece]

    def _within(self, span: Span) -> tuple[int, int]:
        return self._cut(span[0]), self._cut(span[0] + span[1])

    def _cut(self, at: int) -> int:
        """The piece that begins at ``at``."""
        before = bisect.bisect_right(self._begins, at) - 1
        if self._begins[before] == at:
            return before
        self._begins.insert(before + 1, at)
        self._pieces.insert(before + 1, self._pieces[before])
        return before + 1


class _Check:
    def __init__(self, streams: list[Line]) -> None:
        timelines = 1 + len(streams)
        self.host = Timeline("the host", index=0, timelines=timelines)
        self.streams: dict[int, Timeline] = {}
        for i, stream in enumerate(streams, start=1):
            name = f"stream {stream['stream']}"
            self.streams[stream["stream"]] = Timeline(name, index=i, timelines=timelines)
        self.default = [self.streams[line["stream"]] for line in streams if line["default"]]
        self.blocking = [self.streams[line["stream"]] for line in streams if line["blocking"]]
        self.events: dict[int, list[int]] = {}
        self.history = History()
        self.found = Found()

    def line(self, line: Line) -> None:
        """What the next line of the log asks of the device, or of the host."""
        match line:
            case {"accesses": name, "stream": stream, "reads": reads, "writes": writes}:
                self.found.items += bool(reads or writes)
                self._access(self._queued(stream), name, reads, writes)
            case {"call": "handed out", "stream": stream, "at": at, "bytes": nbytes}:
                by = self._queued(stream)
                self._access(by, "the allocator", [], [(at, nbytes)], made=False)
            case {"host": name}:
                self.host.tick()
                self._access(self.host, name, line.get("reads", []), line.get("writes", []))
            case {"call": "cudaEventRecord", "stream": stream, "event": event}:
                self.events[event] = list(self._queued(stream).clock)
            case {"call": "cudaStreamWaitEvent", "stream": stream}:
                self._after_event(self.streams[stream], line)
            case {"call": "cudaEventSynchronize" | "cudaEventQuery"}:
                self.found.host_waits += 1
                self._after_event(self.host, line)
            case {"call": "cudaStreamSynchronize" | "the host waits", "stream": stream}:
                self.found.host_waits += 1
                self.host.come_after(self.streams[stream].clock)
            case {"call": "cudaDeviceSynchronize"}:
                self._wait_for_all()
            case {"call": "cudaFree", "at": at, "bytes": nbytes}:
                self._wait_for_all()
                self.history.write((at, nbytes), Piece())
            case {"call": call, "at": at, "bytes": nbytes} if call in TAKEN_FROM_THE_DEVICE:
                self.host.tick()
                self._access(self.host, call, [], [(at, nbytes)])
                self.history.write((at, nbytes), Piece())
            case {"call": call, "at": at, "bytes": nbytes} if call in MAPPED:
                self.history.write((at, nbytes), Piece())

    def _queued(self, stream: int) -> Timeline:
        """The stream, where what is queued now comes after all that it has to."""
        by = self.streams[stream]
        by.come_after(self.host.clock)
        if by in self.default:
            for other in self.blocking:
                by.come_after(other.clock)
        elif by in self.blocking:
            for other in self.default:
                by.come_after(other.clock)
        by.tick()
        return by

    def _after_event(self, timeline: Timeline, line: Line) -> None:
        # What was recorded before the log began stands for nothing that is in it.
        if line["of"] is not None and line["event"] in self.events:
            timeline.come_after(self.events[line["event"]])

    def _wait_for_all(self) -> None:
        self.found.host_waits += 1
        for stream in self.streams.values():
            self.host.come_after(stream.clock)

    def _access(
        self, by: Timeline, name: str, reads: list[Span], writes: list[Span], *, made: bool = True
    ) -> None:
        self.found.accesses += len(reads) + len(writes)
        time = by.clock[by.index]
        for span in reads:
            for begin, piece in self.history.pieces(span):
                what = f"{name} on {by.name} reads"
                self._compare(by, what, begin, [piece.write])
                if not piece.made:
                    self._tell(f"{what} at {begin:#x} what nobody has written")
            self.history.read(span, Access(by.index, time, f"{name} on {by.name} (read)"))
        for span in writes:
            what = f"{name} on {by.name} {'writes' if made else 'hands out'}"
            for begin, piece in self.history.pieces(span):
                self._compare(by, what, begin, [piece.write, *piece.reads])
            write = Access(by.index, time, f"{name} on {by.name} (write)")
            self.history.write(span, Piece(write, made=made))

    def _compare(
        self, by: Timeline, what: str, begin: int, earlier: Iterable[Access | None]
    ) -> None:
        for access in earlier:
            if access is not None:
                self.found.compared += 1
                if access.time > by.clock[access.timeline]:
                    self._tell(f"{what} at {begin:#x}, not ordered after {access.what}")

    def _tell(self, race: str) -> None:
        if race not in self.found.races:
            self.found.races.append(race)


def check(log: Iterable[Line]) -> Found:
    """The races of a log."""
    made: list[Line] = []
    asked: list[Line] = []
    for line in log:
        (made if line.get("call") == "cudaStreamCreate" else asked).append(line)
    # Of the hundred streams that torch makes at once, few are given anything.
    used = {line["stream"] for line in asked if "stream" in line}
    state = _Check([line for line in made if line["stream"] in used])
    for line in asked:
        state.line(line)
    items = [(line["accesses"], line["stream"]) for line in asked if "accesses" in line]
    computing = {stream for name, stream in items if name not in ("copy", "fill")}
    copying = (stream for name, stream in items if name == "copy")
    state.found.copies_beside = sum(stream not in computing for stream in copying)
    return state.found


@contextlib.contextmanager
def checked() -> Iterator[Found]:
    """What is found of all that is asked of the device inside; filled in on leaving."""
    import cuda_stand_in

    found = Found()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        torch.cuda.synchronize()
        cuda_stand_in.log_to(str(path))
        try:
            yield found
        finally:
            cuda_stand_in.log_to("")
            torch.cuda.synchronize()
        with path.open() as lines:
            seen = check(map(json.loads, lines))
    vars(found).update(vars(seen))
