"""Segments: what flows into what, and the line as branches of each depth."""

from __future__ import annotations

import pytest

from fxremat.passes.stages.position import Segments

NESTED = Segments(ends=(2, 5, 6, 10, 11, 13, 20), into=(2, 2, 7, 6, 5, 6, 7))
"""Two branches: one of two that meet, one of a plain one and one that is two in a row."""


def test_a_line_is_all_trunk():
    line = Segments()
    assert line.trunk == line.at(0) == line.at(99) == 0
    assert line.depth == 0
    assert line.path(0) == (0,)
    assert line.start(0) == 0
    assert line.branches(1) == ()
    assert line.name_of(0) == "trunk"


def test_places():
    assert [NESTED.at(place) for place in (0, 1, 2, 5, 6, 12, 19, 20, 50)] == [
        0, 0, 1, 2, 3, 5, 6, 7, 7,
    ]  # fmt: skip
    assert [NESTED.start(s) for s in range(8)] == [0, 2, 5, 6, 10, 11, 13, 20]


def test_paths_go_to_the_trunk():
    assert NESTED.path(4) == (4, 5, 6, 7)
    assert NESTED.path(0) == (0, 2, 7)
    assert NESTED.depth == 3


@pytest.mark.parametrize(
    ("segments", "meeting"),
    [((0, 1), 2), ((0, 2), 2), ((3, 4), 6), ((0, 4), 7), ((5,), 5), ((0, 7), 7)],
)
def test_where_segments_meet(segments: tuple[int, ...], meeting: int):
    assert NESTED.meeting(segments) == meeting


def test_outmost_segments():
    assert NESTED.outmost([0, 2, 7]) == {0}
    assert NESTED.outmost([0, 1, 2]) == {0, 1}
    assert NESTED.outmost([7]) == {7}
    assert NESTED.outmost([]) == frozenset()


def test_branches_of_each_depth():
    assert NESTED.branches(1) == (range(0, 6), range(6, 20))
    assert NESTED.branches(2) == (range(0, 2), range(2, 5), range(6, 10), range(10, 13))
    assert NESTED.branches(3) == (range(0, 2), range(2, 5), range(6, 10), range(10, 11))


def test_names_number_branches_within_branches():
    names = [NESTED.name_of(s) for s in range(8)]
    assert names == [
        "branch0_0", "branch0_1", "branch0", "branch1_0", "branch1_1_0", "branch1_1", "branch1",
        "trunk",
    ]  # fmt: skip
