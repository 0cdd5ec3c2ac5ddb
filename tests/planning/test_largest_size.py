"""The largest size that fits, of numbers alone."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fxremat.planning.largest_size import largest_fitting


class Asked:
    """A step that takes ``fixed + each * size`` bytes, and what was asked of it."""

    def __init__(self, fixed: int, each: int, *, off: int = 0) -> None:
        self.fixed, self.each, self.off = fixed, each, off
        self.guessed: list[int] = []
        self.tried: list[int] = []

    def largest(self, budget: int, *, first: int, most: int) -> int | None:
        def bytes_at(size: int) -> int:
            self.guessed.append(size)
            return max(0, self.fixed + self.each * size + self.off)

        def least_at(size: int) -> int:
            self.tried.append(size)
            return self.fixed + self.each * size

        return largest_fitting(bytes_at, least_at, first=first, budget_bytes=budget, most=most)


@given(
    fixed=st.integers(0, 10**6),
    each=st.integers(0, 10**4),
    off=st.integers(-(10**5), 10**5),
    budget=st.integers(1, 2 * 10**6),
    first=st.integers(1, 500),
    most=st.integers(1, 2000),
)
def test_it_fits_and_one_more_does_not(
    fixed: int, each: int, off: int, budget: int, first: int, most: int
):
    """However far off the guesses are."""
    found = Asked(fixed, each, off=off).largest(budget, first=first, most=most)
    sizes = [n for n in range(1, most + 1) if fixed + each * n <= budget]
    assert found == (max(sizes) if sizes else None)


@pytest.mark.parametrize("first", [1, 7, 100, 5000])
def test_few_are_tried_where_bytes_grow_evenly(first: int):
    asked = Asked(10**6, 12_345)
    assert asked.largest(10**7, first=first, most=1 << 20) == (10**7 - 10**6) // 12_345
    assert len(asked.tried) <= 2
    assert len(asked.guessed) <= 40


def test_few_are_tried_where_trying_shows_how_to_do_with_less():
    each, tried = 2000, []

    def least_at(size: int) -> int:
        nonlocal each
        tried.append(size)
        each = 1000
        return 10**5 + each * size

    def roughly_at(size: int) -> int:
        return int(1.05 * (10**5 + each * size))

    found = largest_fitting(roughly_at, least_at, first=8, budget_bytes=10**7, most=1 << 20)
    assert found == (10**7 - 10**5) // 1000
    assert len(tried) <= 5


@given(
    each=st.integers(1, 100),
    lost=st.integers(0, 10**6),
    guess=st.integers(1, 10**5),
    budget=st.integers(10**4, 10**7),
)
@example(each=23, lost=58_480, guess=61_896, budget=7_441_946)  # once 44 of them
def test_few_are_tried_where_near_will_do(each: int, lost: int, guess: int, budget: int):
    """Be it that above some size far more is taken than was guessed."""
    tried = []

    def least_at(size: int) -> int:
        tried.append(size)
        return each * size * (1 if size <= lost else 10)

    options = {"first": 1, "budget_bytes": budget, "most": guess, "guess": guess, "near": 64}
    found = largest_fitting(lambda size: each * size, least_at, **options)
    best = max(min(lost, budget // each, guess), min(budget // (10 * each), guess))
    assert best - best // 32 - 1 <= (found or 0) <= best
    assert tried[0] == guess and len(tried) <= 24
