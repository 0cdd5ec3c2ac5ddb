"""Slots of host memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fxremat.runtime.slots import ALIGNMENT_BYTES, assign_slots, slot_bytes

sizes = st.lists(st.integers(0, 5000), max_size=20)


@given(sizes)
def test_no_two_share_a_byte(sizes_bytes: list[int]):
    offsets, total_bytes = assign_slots(sizes_bytes)
    ends = [0]
    for nbytes, offset in zip(sizes_bytes, offsets, strict=True):
        assert offset % ALIGNMENT_BYTES == 0
        assert offset >= ends[-1]
        ends.append(offset + nbytes)
    assert ends[-1] <= total_bytes


@given(sizes)
def test_the_total_is_what_a_limit_of_host_memory_is_held_against(sizes_bytes: list[int]):
    """Which is the sum of what each takes: plans are chosen by it before slots are assigned."""
    assert assign_slots(sizes_bytes)[1] == sum(map(slot_bytes, sizes_bytes))


def test_sizes_are_rounded_up():
    assert assign_slots([700, 0, 512, 1]) == ((0, 1024, 1024, 1536), 2048)


def test_nothing_needs_nothing():
    assert assign_slots([]) == ((), 0)
    assert assign_slots([0]) == ((0,), 0)
