"""The pool: nothing dominated, whatever is put in."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fxremat.planner.decision.candidates import Candidate, Pool

CODES = np.zeros(1, dtype=np.int64)


def candidate(peak_bytes: int, total_s: float) -> Candidate:
    return Candidate(CODES, b"", peak_bytes, total_s)


CANDIDATES = st.builds(candidate, st.integers(0, 60), st.integers(0, 20).map(float))


@given(CANDIDATES, st.lists(CANDIDATES, max_size=40))
def test_members_are_those_that_none_beats(baseline: Candidate, others: list[Candidate]):
    pool = Pool.of(baseline, others)
    *members, last = pool.members
    assert pool.baseline is last is baseline
    assert set(members) <= set(others)
    for less, more in itertools.pairwise(members):
        assert less.peak_bytes < more.peak_bytes
        assert less.total_s > more.total_s
    for other in others:  # the baseline is chosen where it fits, be another one faster
        if other.peak_bytes < baseline.peak_bytes:
            better = (m for m in members if m.peak_bytes <= other.peak_bytes)
            assert min(m.total_s for m in better) <= other.total_s
    assert all(m.peak_bytes < baseline.peak_bytes for m in members)


@given(CANDIDATES, st.lists(CANDIDATES, max_size=20), st.lists(CANDIDATES, max_size=20))
def test_pools_of_pools_are_pools(
    baseline: Candidate, some: list[Candidate], others: list[Candidate]
):
    both = Pool.of(baseline, [*some, *others])
    merged = Pool.of(baseline, [*Pool.of(baseline, some).members, *others])
    assert [(c.peak_bytes, c.total_s) for c in both.members] == [
        (c.peak_bytes, c.total_s) for c in merged.members
    ]


def staircase(count: int) -> Pool:
    """Peaks ever further apart."""
    steps = [candidate(i**3, float(count - i)) for i in range(1, count + 1)]
    return Pool.of(candidate((count + 1) ** 3, 0.0), steps)


@given(st.integers(1, 300))
def test_starts_are_some_members_more_of_them_near_the_least(count: int):
    pool = staircase(count)
    starts = pool.starts(10, 4)
    assert starts[0] is pool.members[0]
    assert starts[-1] is pool.members[-2]
    assert pool.baseline not in starts
    assert list(starts) == [m for m in pool.members if m in starts]
    assert min(count, 10) <= len(starts) <= 14
    if count > 100:
        half = (pool.members[0].peak_bytes + pool.members[-2].peak_bytes) // 2
        assert sum(c.peak_bytes < half for c in starts) > len(starts) / 2


def test_a_pool_of_the_baseline_alone_has_no_starts():
    assert Pool.of(candidate(1, 1.0), []).starts(10, 4) == ()


def test_nothing_starts_where_no_start_is_asked_for():
    assert staircase(30).starts(0, 4) == ()
    assert len(staircase(30).starts(1, 0)) == 1


@given(st.integers(1, 100), st.integers(2, 40))
def test_thinned_keeps_the_ends_and_some_between_evenly(count: int, most: int):
    pool = staircase(count)
    chosen = pool.thinned(most)
    assert len(chosen) == min(most, count + 1)
    assert (chosen[0], chosen[-1]) == (pool.members[0], pool.baseline)
    places = [pool.members.index(c) for c in chosen]
    gaps = [b - a for a, b in itertools.pairwise(places)]
    assert max(gaps) - min(gaps) <= 1
