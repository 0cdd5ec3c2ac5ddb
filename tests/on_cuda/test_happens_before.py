"""Logs made by hand: which of their accesses race."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.on_cuda.happens_before import Found, Line, check

A, B = 7, 8
"""Streams that do not wait for the default one."""
BLOCKING = 9
"""A stream that does."""
DEFAULT = 0
EVENT = 100
X = (4096, 512)
"""Bytes of the device."""


MADE: list[Line] = [
    {"call": "cudaStreamCreate", "stream": DEFAULT, "default": True, "blocking": True},
    *(
        {"call": "cudaStreamCreate", "stream": stream, "default": False, "blocking": blocking}
        for stream, blocking in ((A, False), (B, False), (BLOCKING, True), (55, True))
    ),
]


def found(*lines: Line) -> Found:
    return check([*MADE, *lines])


def reads(stream: int, *spans: tuple[int, int]) -> Line:
    return {"accesses": "sum", "stream": stream, "reads": list(spans), "writes": []}


def writes(stream: int, *spans: tuple[int, int]) -> Line:
    return {"accesses": "fill", "stream": stream, "reads": [], "writes": list(spans)}


def record(stream: int, event: int = EVENT) -> Line:
    return {"call": "cudaEventRecord", "stream": stream, "event": event}


def wait(stream: int, event: int = EVENT, *, of: int | None = A) -> Line:
    return {"call": "cudaStreamWaitEvent", "stream": stream, "event": event, "of": of}


def handed_out(stream: int, span: tuple[int, int] = X) -> Line:
    return {"call": "handed out", "stream": stream, "at": span[0], "bytes": span[1]}


def test_two_streams_race_and_the_race_says_who_and_where():
    seen = found(writes(A, X), reads(B, (4300, 8)))
    assert seen.races == [
        "sum on stream 8 reads at 0x10cc, not ordered after fill on stream 7 (write)"
    ]
    assert (seen.items, seen.accesses, seen.compared) == (2, 2, 1)


@pytest.mark.parametrize(
    ("first", "second"),
    [(writes, reads), (reads, writes), (writes, writes)],
    ids=lambda made: made.__name__,
)
def test_all_but_two_reads_race(first: Any, second: Any):
    before = [writes(A, X), record(A), wait(B)]
    assert len(found(*before, first(A, X), second(B, X)).races) == 1
    assert not found(*before, reads(A, X), reads(B, X)).races


def test_an_event_orders_what_was_before_it_and_nothing_else():
    assert not found(writes(A, X), record(A), wait(B), reads(B, X)).races
    assert found(record(A), writes(A, X), wait(B), reads(B, X)).races
    assert found(writes(A, X), record(A), reads(B, X), wait(B)).races
    assert found(writes(A, X), record(A), record(A, 101), wait(B, 102), reads(B, X)).races


def test_the_order_goes_on_over_streams_and_an_event_stands_for_its_last_record():
    through = [writes(A, X), record(A), wait(BLOCKING), record(BLOCKING, 101), wait(B, 101)]
    assert not found(*through, writes(B, X)).races
    assert found(writes(A, X), record(A), record(BLOCKING), wait(B), reads(B, X)).races


def test_an_event_that_was_not_recorded_orders_nothing():
    """Its handle may be that of one that was, and is gone."""
    assert found(writes(A, X), record(A), wait(B, of=None), reads(B, X)).races


@pytest.mark.parametrize(
    "waits_for_it",
    [
        {"call": "cudaStreamSynchronize", "stream": A},
        {"call": "the host waits", "stream": A},
        {"call": "cudaDeviceSynchronize"},
        {"call": "cudaEventSynchronize", "event": EVENT, "of": A},
        {"call": "cudaEventQuery", "event": EVENT, "of": A},
        {"call": "cudaFree", "at": 1 << 20, "bytes": 512},
    ],
    ids=lambda line: line["call"],
)
def test_what_is_queued_comes_after_what_the_host_has_waited_for(waits_for_it: Line):
    before = [writes(A, X), record(A)]
    assert not found(*before, waits_for_it, reads(B, X)).races
    assert not found(*before, waits_for_it, {"host": "reads", "reads": [X]}).races
    assert found(*before, {"host": "reads", "reads": [X]}).races
    assert found(*before, waits_for_it, writes(A, X), reads(B, X)).races


def test_what_is_queued_comes_after_what_the_host_has_done():
    host: Line = {"host": "the loader", "writes": [X]}
    assert not found(host, reads(A, X), reads(B, X)).races
    assert found(reads(A, X), host).races


def test_the_default_stream_and_blocking_ones_wait_for_each_other():
    for first, second in ((DEFAULT, BLOCKING), (BLOCKING, DEFAULT)):
        assert not found(writes(first, X), reads(second, X)).races
    assert not found(writes(55, X), writes(DEFAULT, (8192, 8)), reads(BLOCKING, X)).races
    assert found(writes(55, X), reads(BLOCKING, X)).races
    for first, second in ((DEFAULT, A), (A, DEFAULT)):
        assert found(writes(first, X), reads(second, X)).races


def test_memory_is_handed_out_again_while_another_stream_uses_it():
    before = [handed_out(A), writes(A, X), record(A), wait(B), reads(B, X)]
    assert "hands out" in found(*before, handed_out(A)).races[0]
    assert not found(*before, record(B), wait(A, of=B), handed_out(A)).races


def test_what_nobody_has_written_is_read():
    assert "nobody has written" in found(handed_out(A), reads(A, X)).races[0]
    assert not found(handed_out(A), writes(A, X), reads(A, X)).races


def test_pinned_memory_goes_while_a_copy_uses_it():
    for call in ("cudaHostUnregister", "cudaFreeHost"):
        gone: Line = {"call": call, "at": X[0], "bytes": X[1]}
        assert found(reads(A, X), gone).races
        assert not found(reads(A, X), {"call": "cudaDeviceSynchronize"}, gone).races


@pytest.mark.parametrize("call", ["cudaMalloc", "cudaHostAlloc", "cudaHostRegister", "cuMemMap"])
def test_new_memory_has_no_history(call: str):
    new: Line = {"call": call, "at": X[0], "bytes": X[1]}
    assert not found(writes(A, X), new, writes(B, X)).races
    assert found(writes(A, X), {**new, "bytes": 256}, writes(B, X)).races


def test_bytes_that_only_touch_do_not_race():
    assert not found(writes(A, X), writes(B, (X[0] + X[1], 8)), writes(B, (X[0] - 8, 8))).races
    assert found(writes(A, X), writes(B, (X[0] + X[1] - 1, 8))).races


def drawn(draw: random.Random) -> Iterator[Line]:
    """A short log of four streams, the host and a few bytes."""
    streams = [DEFAULT, A, B, BLOCKING]
    recorded: dict[int, int] = {}
    for _ in range(draw.randrange(2, 14)):
        stream, event = draw.choice(streams), EVENT + draw.randrange(2)
        begin = 4096 + draw.randrange(4)
        span = (begin, draw.randrange(1, 4))
        match draw.randrange(8):
            case 0 | 1:
                yield reads(stream, span)
            case 2 | 3:
                yield writes(stream, span)
            case 4:
                recorded[event] = stream
                yield record(stream, event)
            case 5:
                yield wait(stream, event, of=recorded.get(event))
            case 6:
                yield {"call": "cudaStreamSynchronize", "stream": stream}
            case 7:
                yield {"host": "program", draw.choice(["reads", "writes"]): [span]}


def races_by_search(log: list[Line]) -> bool:
    """Whether two accesses to a byte, one a write, are joined by no path of orders."""
    before: list[set[int]] = []
    last: dict[object, set[int]] = {}
    events: dict[int, set[int]] = {}

    def of(stream: object) -> set[int]:
        return last.setdefault(stream, set())

    for number, line in enumerate(log):
        stream = line.get("stream", "host")
        behind = set(of(stream) | of("host"))
        queued = "accesses" in line or line.get("call") == "cudaEventRecord"
        if queued and stream == DEFAULT:
            behind |= of(BLOCKING)
        if queued and stream == BLOCKING:
            behind |= of(DEFAULT)
        before.append(behind)
        match line.get("call"):
            case "cudaEventRecord":
                events[line["event"]] = behind
                last[stream] = behind
            case "cudaStreamWaitEvent":
                last[stream] = of(stream) | events.get(line["event"], set())
            case "cudaStreamSynchronize":
                last["host"] = of("host") | of(stream)
            case None:
                last[stream] = behind | {number}
    uses = [
        (number, written, set(range(begin, begin + nbytes)))
        for number, line in enumerate(log)
        for written in (False, True)
        for begin, nbytes in line.get("writes" if written else "reads", [])
    ]
    return any(
        (first_written or second_written) and first_bytes & second_bytes and i not in before[j]
        for (i, first_written, first_bytes), (j, second_written, second_bytes) in (
            itertools.combinations(uses, 2)
        )
    )


def test_clocks_find_a_race_exactly_where_a_search_does():
    outcomes = []
    for seed in range(4000):
        log = list(drawn(random.Random(seed)))
        outcomes.append(bool(found(*log).races))
        assert outcomes[-1] == races_by_search(log), f"seed {seed}"
    assert min(outcomes.count(True), outcomes.count(False)) > 800
