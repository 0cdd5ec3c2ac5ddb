from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.solvers.papers.cpsat.scale import MOST_TICKS, Ticks, byte_unit

DURATIONS = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-9, 1e-3), st.floats(1.0, 36000.0)), max_size=8
)


def test_multiples_of_a_quarter_are_exact() -> None:
    ticks = Ticks.of([0.25, 1.5, 0.0, 3.0], total_s=100.0)
    assert ticks.exact
    assert [ticks.count(t) for t in (0.25, 1.5, 0.0, 3.0)] == [1, 6, 0, 12]
    assert ticks.seconds(13) == 3.25


def test_a_common_factor_is_taken_out() -> None:
    ticks = Ticks.of([1.5, 4.5], total_s=100.0)
    assert (ticks.count(1.5), ticks.count(4.5)) == (1, 3)


def test_no_durations() -> None:
    assert Ticks.of([], total_s=0.0) == Ticks.of([0.0], total_s=0.0)
    assert Ticks.of([], total_s=0.0).exact


def test_nanoseconds_beside_hours_are_rounded() -> None:
    ticks = Ticks.of([1e-9, 36000.0], total_s=40000.0)
    assert not ticks.exact
    assert ticks.count(1e-9) >= 1
    assert 40000.0 * ticks.per_s <= MOST_TICKS


@given(DURATIONS)
def test_sums_stay_small_and_near(durations: list[float]) -> None:
    total_s = sum(durations)
    ticks = Ticks.of(durations, total_s=total_s)
    counts = [ticks.count(t) for t in durations]
    assert all(count >= 0 for count in counts)
    assert sum(counts) <= MOST_TICKS + len(durations)
    for seconds, count in zip(durations, counts, strict=True):
        error_s = abs(ticks.seconds(count) - seconds)
        assert error_s <= (0.0 if ticks.exact else total_s / 2**49)
        assert math.isfinite(ticks.seconds(count))


def test_total_below_a_duration_does_no_harm() -> None:
    ticks = Ticks.of([36000.1, 1e-9], total_s=0.0)
    assert ticks.count(36000.1) <= MOST_TICKS


@pytest.mark.parametrize(
    ("sizes", "unit"), [([], 1), ([0, 0], 1), ([6, 0, 9], 3), ([1 << 50], 1 << 50)]
)
def test_byte_unit(sizes: list[int], unit: int) -> None:
    assert byte_unit(sizes) == unit
