"""A slab of planned offsets, as ``benchmarks.slab`` measures it."""

from __future__ import annotations

from benchmarks.slab import Life, live_bytes, lives_of, row, slab_bytes
from fxremat.planner.allocator.allocations import Requests


def test_blocks_live_from_their_request_to_their_release():
    asked = ((7, 1000), (8, 512), (7, -1000), (7, 100))
    assert set(lives_of(asked)) == {Life(1024, 1, 3), Life(512, 2, 5), Life(512, 4, 5)}
    assert live_bytes(lives_of(asked)) == 1536


def test_what_ends_makes_room_for_what_begins():
    assert live_bytes([Life(10, 0, 2), Life(10, 2, 4)]) == 10
    assert slab_bytes([Life(10, 0, 2), Life(10, 2, 4)]) == 10


def test_blocks_that_live_at_once_lie_beside_each_other():
    apart = [Life(4, 0, 2), Life(3, 1, 3), Life(4, 2, 4)]
    assert (live_bytes(apart), slab_bytes(apart)) == (7, 7)
    # The middle one lies above the first; what comes after both finds the hole below too small.
    holes = [Life(3, 0, 2), Life(3, 1, 4), Life(4, 3, 5)]
    assert (live_bytes(holes), slab_bytes(holes)) == (7, 7)
    kept = [Life(5, 0, 2), Life(4, 1, 4), Life(6, 3, 5), Life(1, 0, 9)]
    assert slab_bytes(kept) >= live_bytes(kept) == 11


def test_what_is_given_is_beside_the_slab():
    asked = Requests(
        given_bytes=(600,),
        calls=(((0, 3 << 20), (0, -(3 << 20))), ((1, 3 << 20),)),
        loss_point=(),
        loss_point_index=1,
        end=(),
        unplaced_bytes=7,
    )
    found = row(asked, "usual")
    assert found["live_bytes"] == found["slab_bytes"] == (3 << 20) + 1024 + 7
    assert found["reserved_bytes"] == (20 << 20) + (2 << 20) + 7
