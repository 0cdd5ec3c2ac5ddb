"""Where the forward is cut, by what crosses."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.passes.stages.cuts import Crossing, choose_cuts


def crossing_of(weights: list[int], saved_bytes: list[int] | None = None) -> Crossing:
    """The same storages cross a whole level run; other runs have other storages."""
    reach = [0] * len(weights)
    for position in reversed(range(len(weights))):
        following = position + 1
        level = following < len(weights) and weights[following] == weights[position]
        reach[position] = reach[following] if level else following
    return Crossing(tuple(weights), tuple(reach), tuple(saved_bytes or weights))


@pytest.mark.parametrize(
    ("weights", "cuts"),
    [
        ([], []),
        ([5], []),
        ([9, 2, 9, 2, 0], [1, 3]),  # valleys; at the end of the line, too
        ([9, 2, 9, 2, 9, 0], [1, 3]),
        ([9, 2, 2, 2, 9, 0], [1, 3]),  # a level run: where it begins, and where it ends
        ([9, 5, 5, 2, 9, 0], [3]),  # a level run on the way down is no minimum
        ([9, 2, 5, 5, 9, 0], [1]),  # nor on the way up
        ([1, 2, 3, 4, 0], [0]),
        ([0, 3, 5, 0], [0, 1]),  # where nothing crosses the line begins anew
    ],
)
def test_cuts_are_where_little_crosses(weights: list[int], cuts: list[int]):
    assert choose_cuts(crossing_of(weights), 160) == cuts


def test_there_are_never_too_many_cuts():
    weights = [value for _ in range(100) for value in (50, 1)] + [50, 0]
    saved = [7 if i < 100 else 1 for i in range(len(weights))]
    assert len(choose_cuts(crossing_of(weights, saved), 160)) == 100
    cuts = choose_cuts(crossing_of(weights, saved), 61)
    assert len(cuts) == 60
    assert all(a < b for a, b in pairwise(cuts))
    assert cuts[:50] == list(range(1, 100, 2)), "stages that save little are merged first"


@given(st.lists(st.integers(0, 20), min_size=4, max_size=60), st.integers(2, 10))
def test_cuts_go_one_by_one_between_the_stages_that_save_least(saved: list[int], most: int):
    weights = [1 + i % 2 for i in range(len(saved))]
    crossing = crossing_of(weights, saved)
    left = choose_cuts(crossing, len(saved))
    while len(left) > most - 1:
        ends = [-1, *left, len(saved) - 1]
        both = [sum(saved[a + 1 : b + 1]) for a, b in zip(ends, ends[2:], strict=False)]
        del left[both.index(min(both))]
    assert choose_cuts(crossing, most) == left
