"""The caching allocator: sequences worked by hand, and random ones against a plain one."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.planner.allocator.allocator import AllocatorSettings, CachingAllocator, peaks_of
from tests.reference.plain_allocator import KIB, MIB, PlainAllocator

GROWING = AllocatorSettings(expandable_segments=True)
Sequence = list[tuple[str, int] | tuple[str, int, int]]


def mib(number: float) -> int:
    """Bytes, of which a request may leave the last 512 incomplete."""
    return int(number * MIB)


def run(sequence: Sequence, rules: AllocatorSettings | None = None) -> list[tuple[int, int]]:
    """Allocated and reserved bytes after each entry.

    ``("+", bytes)`` allocates, on a stream if a third number names one; ``("-", i)`` frees what
    the i-th allocation gave.
    """
    allocator = CachingAllocator(rules)
    handles: list[int] = []
    after = []
    for what, number, *stream in sequence:
        if what == "+":
            handles.append(allocator.allocate(number, stream=stream[0] if stream else 0))
        else:
            allocator.free(handles[number])
        after.append((allocator.allocated_bytes, allocator.reserved_bytes))
    return after


BY_HAND: dict[str, tuple[AllocatorSettings, Sequence, list[tuple[int, int]]]] = {
    "one byte takes 512, of a segment of 2 MiB": (
        AllocatorSettings(),
        [("+", 1), ("+", 512), ("+", 513)],
        [(512, 2 * MIB), (1024, 2 * MIB), (2048, 2 * MIB)],
    ),
    "nothing takes nothing": (AllocatorSettings(), [("+", 0), ("-", 0)], [(0, 0), (0, 0)]),
    "1 MiB is small, two of them fill a segment": (
        AllocatorSettings(),
        [("+", MIB), ("+", MIB), ("+", 512)],
        [(MIB, 2 * MIB), (2 * MIB, 2 * MIB), (2 * MIB + 512, 4 * MIB)],
    ),
    "above 1 MiB a segment of 20 MiB is taken and split": (
        AllocatorSettings(),
        [("+", MIB + 1), ("+", 9 * MIB), ("+", 9 * MIB), ("+", 2 * MIB)],
        [
            (MIB + 512, 20 * MIB),
            (10 * MIB + 512, 20 * MIB),
            (20 * MIB, 20 * MIB),  # whole: 1 MiB less 512 bytes is left over
            (22 * MIB, 40 * MIB),
        ],
    ),
    "from 10 MiB on a segment is as large as asked for, in 2 MiB": (
        AllocatorSettings(),
        [("+", 10 * MIB), ("+", mib(21.2)), ("+", mib(20.5))],
        [
            (10 * MIB, 10 * MIB),
            (32 * MIB, 32 * MIB),  # 0.8 MiB left over: counted whole
            (32 * MIB + mib(20.5), 54 * MIB),  # 1.5 MiB left over: split
        ],
    ),
    "what leaves 1 MiB over is not split, 512 bytes more are": (
        AllocatorSettings(),
        [("+", 13 * MIB), ("-", 0), ("+", 13 * MIB - 512), ("-", 1)],
        [(14 * MIB, 14 * MIB), (0, 14 * MIB), (13 * MIB - 512, 14 * MIB), (0, 14 * MIB)],
    ),
    "a cached block is handed out whole": (
        AllocatorSettings(),
        [("+", 20 * MIB), ("-", 0), ("+", mib(19.5))],
        [(20 * MIB, 20 * MIB), (0, 20 * MIB), (20 * MIB, 20 * MIB)],
    ),
    "the smallest that fits is taken, not the first": (
        AllocatorSettings(),
        [("+", 30 * MIB), ("+", 12 * MIB), ("-", 0), ("-", 1), ("+", 11 * MIB), ("+", 28 * MIB)],
        [
            (30 * MIB, 30 * MIB),
            (42 * MIB, 42 * MIB),
            (12 * MIB, 42 * MIB),
            (0, 42 * MIB),
            (12 * MIB, 42 * MIB),  # whole: 1 MiB is left over
            (40 * MIB, 42 * MIB),
        ],
    ),
    "neighbours merge and are handed out as one": (
        AllocatorSettings(),
        [("+", 4 * MIB)] * 5 + [("-", 1), ("-", 3), ("-", 2), ("+", 12 * MIB)],
        [(4 * MIB * n, 20 * MIB) for n in (1, 2, 3, 4, 5, 4, 3, 2, 5)],
    ),
    "free parts that are not neighbours do not add up": (
        AllocatorSettings(),
        [("+", 4 * MIB)] * 5 + [("-", 0), ("-", 2), ("-", 4), ("+", 8 * MIB)],
        [(4 * MIB * n, 20 * MIB) for n in (1, 2, 3, 4, 5, 4, 3, 2)] + [(16 * MIB, 40 * MIB)],
    ),
    "the pools do not lend to each other": (
        AllocatorSettings(),
        [("+", 20 * MIB), ("-", 0), ("+", MIB), ("-", 1), ("+", 2 * MIB)],
        [
            (20 * MIB, 20 * MIB),
            (0, 20 * MIB),
            (MIB, 22 * MIB),
            (0, 22 * MIB),
            (2 * MIB, 22 * MIB),
        ],
    ),
    "a stream's free blocks are its own": (
        AllocatorSettings(),
        [("+", 20 * MIB, 7), ("-", 0), ("+", 20 * MIB, 8), ("-", 1), ("+", 20 * MIB, 7)],
        [
            (20 * MIB, 20 * MIB),
            (0, 20 * MIB),
            (20 * MIB, 40 * MIB),
            (0, 40 * MIB),
            (20 * MIB, 40 * MIB),
        ],
    ),
    "a segment that grows does so by 20 MiB, the small one by 2": (
        GROWING,
        [("+", mib(21.2)), ("+", 4 * MIB), ("+", 15 * MIB), ("+", 1), ("+", MIB), ("+", MIB)],
        [
            (mib(21.2) // 512 * 512 + 512, 40 * MIB),
            (mib(25.2) // 512 * 512 + 512, 40 * MIB),
            (mib(40.2) // 512 * 512 + 512, 60 * MIB),  # 14.8 MiB are left at its end
            (mib(40.2) // 512 * 512 + 1024, 62 * MIB),
            (mib(41.2) // 512 * 512 + 1024, 62 * MIB),
            (mib(42.2) // 512 * 512 + 1024, 64 * MIB),
        ],
    ),
    "a segment that grows is split to 512 bytes": (
        GROWING,
        [("+", 20 * MIB), ("-", 0), ("+", mib(19.5)), ("+", mib(1.5))],
        [(20 * MIB, 20 * MIB), (0, 20 * MIB), (mib(19.5), 20 * MIB), (21 * MIB, 40 * MIB)],
    ),
    "the end of a segment that grows is taken last": (
        GROWING,
        [("+", 6 * MIB), ("+", 2 * MIB), ("-", 0), ("+", 5 * MIB), ("+", 12 * MIB)],
        # 12 MiB are free at the end; the 6 before fit 5 as well, and 12 are left.
        [
            (6 * MIB, 20 * MIB),
            (8 * MIB, 20 * MIB),
            (2 * MIB, 20 * MIB),
            (7 * MIB, 20 * MIB),
            (19 * MIB, 20 * MIB),
        ],
    ),
    "a larger block before the end is better than a fitting end": (
        GROWING,
        [("+", 12 * MIB), ("+", 2 * MIB), ("-", 0), ("+", 5 * MIB), ("+", 6 * MIB), ("+", 7 * MIB)],
        [
            (12 * MIB, 20 * MIB),
            (14 * MIB, 20 * MIB),
            (2 * MIB, 20 * MIB),
            (7 * MIB, 20 * MIB),  # of the 12, although the end's 6 would fit closer
            (13 * MIB, 20 * MIB),  # of the 7 left of them
            (20 * MIB, 40 * MIB),  # the end, made larger
        ],
    ),
    "each stream has a segment that grows": (
        GROWING,
        [("+", 2 * MIB, 0), ("+", 2 * MIB, 1), ("+", 18 * MIB, 0)],
        [(2 * MIB, 20 * MIB), (4 * MIB, 40 * MIB), (22 * MIB, 40 * MIB)],
    ),
    "large blocks are kept whole from a size on": (
        AllocatorSettings(max_split_bytes=40 * MIB),
        [("+", 60 * MIB), ("-", 0), ("+", 30 * MIB), ("+", 45 * MIB), ("-", 2), ("+", 40 * MIB)],
        [
            (60 * MIB, 60 * MIB),
            (0, 60 * MIB),
            (30 * MIB, 90 * MIB),  # not of the 60
            (90 * MIB, 90 * MIB),  # the 60, whole: 15 are wasted
            (30 * MIB, 90 * MIB),
            (70 * MIB, 130 * MIB),  # 20 would be
        ],
    ),
    "sizes are rounded to quarters of a power of two": (
        AllocatorSettings(divisions=(4,) * 16),
        [("+", 1200 * KIB), ("+", 1537), ("+", 3000), ("+", 1024)],
        [
            (1280 * KIB, 20 * MIB),
            (1280 * KIB + 2048, 22 * MIB),
            (1280 * KIB + 2048 + 3072, 22 * MIB),
            (1280 * KIB + 2048 + 3072 + 1024, 22 * MIB),
        ],
    ),
    "each range of sizes has its own divisions": (
        AllocatorSettings(divisions=(0, 2, *(0,) * 14)),
        [("+", mib(1.1)), ("+", mib(2.1)), ("+", mib(4.1))],
        [
            (mib(1.1) // 512 * 512 + 512, 20 * MIB),
            (mib(1.1) // 512 * 512 + 512 + 3 * MIB, 20 * MIB),
            (mib(1.1) // 512 * 512 + 512 + 3 * MIB + mib(4.1) // 512 * 512 + 512, 20 * MIB),
        ],
    ),
    "segments of the large pool may be larger": (
        AllocatorSettings(large_segment_bytes=64 * MIB),
        [("+", 2 * MIB), ("+", 12 * MIB), ("-", 1), ("-", 0), ("+", 64 * MIB)],
        [
            (2 * MIB, 64 * MIB),
            (14 * MIB, 64 * MIB),
            (2 * MIB, 64 * MIB),
            (0, 64 * MIB),
            (64 * MIB, 64 * MIB),
        ],
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_sequences_worked_by_hand(name: str):
    rules, sequence, expected = BY_HAND[name]
    assert run(sequence, rules) == expected


def test_peaks_are_the_most_of_each():
    allocator = CachingAllocator()
    first = allocator.allocate(30 * MIB)
    allocator.free(first)
    allocator.allocate(2 * MIB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (2 * MIB, 30 * MIB)
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (30 * MIB, 30 * MIB)


def test_wrong_calls_are_refused():
    allocator = CachingAllocator()
    handle = allocator.allocate(5)
    allocator.free(handle)
    with pytest.raises(ValueError, match=str(handle)):
        allocator.free(handle)
    with pytest.raises(ValueError, match="-1"):
        allocator.allocate(-1)
    assert allocator.allocated_bytes == 0


@pytest.mark.parametrize(
    "wrong", [{"divisions": (4,)}, {"divisions": (3,) * 16}, {"large_segment_bytes": 1}]
)
def test_settings_that_torch_refuses_are_refused(wrong: dict[str, int]):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(AllocatorSettings(), **wrong)


def test_settings_are_read_from_a_snapshot():
    snapshot = {
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, large_segment_size_mb:32,"
        "max_non_split_rounding_mb:24,expandable_segments:True,roundup_power2_divisions:[2:8,>:4]",
        "max_split_size": 64 * MIB,
        "expandable_segments": True,
        "roundup_power2_divisions": {str(1 << i): 8 if i < 2 else 4 for i in range(16)},
    }
    assert AllocatorSettings.read(snapshot) == AllocatorSettings(
        expandable_segments=True,
        large_segment_bytes=32 * MIB,
        max_split_bytes=64 * MIB,
        max_waste_bytes=24 * MIB,
        divisions=(8, 8, *(4,) * 14),
    )


@pytest.mark.parametrize("unlimited", [-1, (1 << 64) - 1])
def test_settings_that_nobody_made_are_the_usual_ones(unlimited: int):
    snapshot = {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "max_split_size": unlimited,
        "expandable_segments": False,
        "roundup_power2_divisions": {str(1 << i): 0 for i in range(16)},
    }
    assert AllocatorSettings.read(snapshot) == AllocatorSettings.read({}) == AllocatorSettings()


sizes = st.one_of(
    st.integers(0, 5000),
    st.integers(0, 24).map(lambda n: n * MIB // 4),
    st.integers(0, 60 * MIB),
    st.sampled_from([MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 20 * MIB, 40 * MIB]),
)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("+"), sizes, st.integers(0, 1)),
        st.tuples(st.just("-"), st.integers(0, 1000), st.just(0)),
    ),
    max_size=60,
)
rule_sets = st.sampled_from(
    [
        AllocatorSettings(),
        GROWING,
        AllocatorSettings(max_split_bytes=30 * MIB),
        AllocatorSettings(max_split_bytes=30 * MIB, expandable_segments=True),
    ]
)


def check_blocks(allocator: CachingAllocator, asked: dict[int, int]) -> None:
    """Blocks do not overlap, none is lost, and neighbours are not both free."""
    blocks = allocator.blocks()
    for (begin, nbytes, free), (other, _, other_free) in itertools.pairwise(blocks):
        assert begin + nbytes <= other
        assert begin + nbytes < other or not (free and other_free)
    held = sum(nbytes for _, nbytes, free in blocks if not free)
    assert held == allocator.allocated_bytes
    assert sum(nbytes for _, nbytes, _ in blocks) == allocator.reserved_bytes
    rounded = sum(-(-nbytes // 512) * 512 for nbytes in asked.values())
    assert rounded <= allocator.allocated_bytes <= allocator.reserved_bytes


@given(actions, rule_sets)
def test_any_sequence_is_as_the_plain_one(taken: list[tuple[str, int, int]], rules):
    allocator = CachingAllocator(rules)
    plain = PlainAllocator(rules.expandable_segments, rules.max_split_bytes)
    asked: dict[int, int] = {}
    for what, number, stream in taken:
        if what == "+":
            handle = allocator.allocate(number, stream=stream)
            assert handle == plain.allocate(number, stream=stream)
            asked[handle] = number
        elif asked:
            handle = list(asked)[number % len(asked)]
            del asked[handle]
            allocator.free(handle)
            plain.free(handle)
        assert allocator.allocated_bytes == plain.allocated_bytes
        assert allocator.reserved_bytes == plain.reserved_bytes
        check_blocks(allocator, asked)
    for handle in asked:
        allocator.free(handle)
    assert allocator.allocated_bytes == 0
    whole = allocator.blocks()
    assert all(free for _, _, free in whole)
    assert len(whole) == len(plain.segments)


def test_a_release_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="nothing is allocated"):
        peaks_of(AllocatorSettings(), (), ((0, 512), (0, -512), (0, -512)), 2)


requests = st.lists(st.tuples(st.integers(0, 4), st.booleans(), sizes.filter(bool)), max_size=40)


@given(st.lists(sizes.filter(bool), max_size=4), requests, rule_sets)
def test_steps_have_the_peaks_of_the_plain_one(existing, drawn, rules):
    """Of the loops that plans depend on; what a step leaves is released at its end."""
    held: dict[int, list[int]] = {}
    asked: list[tuple[int, int]] = []
    for key, releases, nbytes in drawn:
        sizes_held = held.setdefault(key, [])
        asked.append((key, -sizes_held.pop() if releases and sizes_held else nbytes))
        if asked[-1][1] > 0:
            sizes_held.append(nbytes)
    plain = PlainAllocator(rules.expandable_segments, rules.max_split_bytes)
    for nbytes in existing:
        plain.allocate(nbytes, stream=0)
    peaks = [(plain.allocated_bytes, plain.reserved_bytes)]
    for _ in range(3):
        handles: dict[int, list[int]] = {}
        for key, nbytes in asked:
            if nbytes > 0:
                handles.setdefault(key, []).append(plain.allocate(nbytes, stream=0))
            else:
                plain.free(handles[key].pop())
            peaks.append((plain.allocated_bytes, plain.reserved_bytes))
        for handle in itertools.chain(*handles.values()):
            plain.free(handle)
    expected = tuple(map(max, zip(*peaks, strict=True)))
    assert peaks_of(rules, existing, asked, 3) == expected
