"""Slots of host memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.runtime.slots import ALIGNMENT_BYTES, assign_slots, slot_bytes

sizes = st.lists(st.integers(0, 5000), max_size=20)


@given(sizes)
def test_no_two_share_a_byte(sizes_bytes: list[int]):
    slots = assign_slots(sizes_bytes)
    ends = [0]
    for nbytes, offset in zip(sizes_bytes, slots.offsets, strict=True):
        assert offset % ALIGNMENT_BYTES == 0
        assert offset >= ends[-1]
        ends.append(offset + nbytes)
    assert ends[-1] <= slots.total_bytes


@given(sizes)
def test_the_total_is_what_a_limit_of_host_memory_is_held_against(sizes_bytes: list[int]):
    """Which is the sum of what each takes: plans are chosen by it before slots are assigned."""
    assert assign_slots(sizes_bytes).total_bytes == sum(map(slot_bytes, sizes_bytes))


def test_sizes_are_rounded_up():
    slots = assign_slots([700, 0, 512, 1])
    assert slots.offsets == (0, 1024, 1024, 1536)
    assert slots.total_bytes == 2048


def test_nothing_needs_nothing():
    assert assign_slots([]).total_bytes == 0
    assert assign_slots([0]).total_bytes == 0


def test_negative_sizes_are_refused():
    with pytest.raises(ValueError, match="size 1 is -1"):
        assign_slots([1, -1])
