"""The lower bound: below every schedule, and above nothing where something must go."""

from __future__ import annotations

import pytest

from fxremat.planner.search.bound import Moment, Recomputation, Relaxation
from tests.harness import search_of


@pytest.mark.parametrize(
    "name", ["gpt", "unet", "resnet50", "siamese_resnet", "triplet", "composed"]
)
def test_no_candidate_is_below_the_bound_of_its_own_peak(name: str):
    search = search_of(name)
    every = search.pool.members
    for candidate in every[:: max(len(every) // 8, 1)]:
        bound_s = search.bound(candidate.peak_bytes)()
        assert search.baseline.total_s <= bound_s <= candidate.total_s * (1 + 1e-9)
    least_s = search.bound(search.least.peak_bytes)()
    assert least_s > search.baseline.total_s
    assert search.bound(search.baseline.peak_bytes)() <= least_s


def bound(room_bytes: int, anyway: frozenset[int] = frozenset()) -> float:
    """Three operations in a row, each of 1 byte and 1, 2 and 4 seconds; all are read later."""
    operations = [
        Recomputation(frozenset({i}), frozenset({i - 1} if i else ()), float(2**i))
        for i in range(3)
    ]
    moment = Moment(frozenset({0, 1, 2}), anyway, 0)
    return Relaxation(tuple(operations), (moment,), (1, 1, 1)).least_s(room_bytes)


def test_what_is_cheapest_to_compute_goes_first():
    assert bound(3) == 0
    assert bound(2) == pytest.approx(1)
    assert bound(1) == pytest.approx(3)
    assert bound(0) == pytest.approx(7)
    assert bound(2, anyway=frozenset({0})) == 0
