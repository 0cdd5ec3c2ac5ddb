"""Slots of host memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.runtime.slots import Life, assign_slots

lives = st.lists(
    st.builds(
        lambda nbytes, begin, length: Life(nbytes, begin, begin + length),
        st.integers(0, 5000),
        st.integers(0, 20),
        st.integers(1, 8),
    ),
    max_size=20,
)


def rounded(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


def most_at_once(given_lives: list[Life], alignment: int) -> int:
    return max(
        (
            sum(rounded(b.nbytes, alignment) for b in given_lives if b.begin <= at.begin < b.end)
            for at in given_lives
        ),
        default=0,
    )


@given(lives, st.sampled_from([1, 64, 512]))
def test_overlapping_lives_share_no_byte(given_lives: list[Life], alignment: int):
    slots = assign_slots(given_lives, alignment_bytes=alignment)
    assert len(slots.offsets) == len(given_lives)
    used: dict[int, list[range]] = {}
    for life, offset in zip(given_lives, slots.offsets, strict=True):
        assert offset >= 0
        assert offset % alignment == 0
        place = range(offset, offset + life.nbytes)
        assert place.stop <= slots.total_bytes
        for position in range(life.begin, life.end):
            for other in used.setdefault(position, []):
                assert place.stop <= other.start or other.stop <= place.start
            if life.nbytes:
                used[position].append(place)


@given(lives, st.sampled_from([1, 512]))
def test_total_is_between_the_most_at_once_and_the_sum(given_lives: list[Life], alignment: int):
    total = assign_slots(given_lives, alignment_bytes=alignment).total_bytes
    assert total <= sum(rounded(life.nbytes, alignment) for life in given_lives)
    assert total >= most_at_once(given_lives, alignment)


@given(lives, st.integers(1, 4000))
def test_equal_sizes_need_the_most_at_once(given_lives: list[Life], nbytes: int):
    equal = [Life(nbytes, life.begin, life.end) for life in given_lives]
    assert assign_slots(equal).total_bytes == most_at_once(equal, 512)


def test_the_smallest_gap_is_taken():
    """Where the last life is placed there are gaps of 9 and of 7 bytes."""
    given_lives = [
        Life(10, 0, 9),
        Life(9, 0, 3),
        Life(8, 0, 9),
        Life(7, 0, 3),
        Life(6, 0, 9),
        Life(5, 5, 9),
    ]
    slots = assign_slots(given_lives, alignment_bytes=1)
    assert slots.offsets == (0, 10, 19, 27, 34, 27)
    assert slots.total_bytes == 40


def test_one_after_the_other_share_a_slot():
    assert assign_slots([Life(700, 0, 4), Life(600, 4, 6)]).total_bytes == 1024
    assert assign_slots([Life(700, 0, 5), Life(600, 4, 6)]).total_bytes == 2048


def test_nothing_needs_nothing():
    assert assign_slots([]).total_bytes == 0
    assert assign_slots([Life(0, 0, 1)]).total_bytes == 0


@pytest.mark.parametrize("life", [Life(-1, 0, 1), Life(1, 2, 2), Life(1, 2, 1)])
def test_impossible_lives_are_refused(life: Life):
    with pytest.raises(ValueError, match="life 1 has"):
        assign_slots([Life(1, 0, 1), life])
