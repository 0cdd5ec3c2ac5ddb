"""The largest sizes of a step that fit a budget."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from fxremat.errors import BudgetError
from fxremat.graph.dimensions import (
    MOST_SIZE,
    Dimension,
    groups_of,
    resized,
    taken_sizes,
)
from fxremat.graph.graph import Graph
from fxremat.graph.pools import all_pools, least_bytes, least_bytes_from_scratch, rough_least_bytes
from fxremat.options.budget import TrainingBudget
from fxremat.planner.context import StepContext

MOST_GUESSED = 12
"""Sizes whose bytes are asked for before any is tried."""

CLOSE = 256
"""What takes long to find of a size is asked until the answer is off by its so-manieth at most."""

NEAR = 16
"""Where the model refuses the largest size that fits, so many below it are asked for first."""


def largest_size(
    graph: Graph,
    context: StepContext,
    group: Sequence[Dimension],
    budget_bytes: int,
    *,
    most: int,
    alone: bool = False,
    at_sizes: Callable[[StepContext], StepContext] = lambda context: context,
    takes: Callable[[StepContext], bool] = lambda _: True,
) -> int | None:
    """The largest size up to ``most`` that fits, of some dimensions that follow each other.

    Only sizes for which the captured step holds are tried, see :func:`taken_sizes`. What takes
    longer to find of a size is asked where all that takes less has let it fit: whether it does with
    nothing known, and whether parts keep their bits there.

    Args:
        graph: the captured graph.
        context: what a call finds.
        group: the dimensions.
        budget_bytes: what must not be exceeded.
        most: the largest that is tried.
        alone: a call is to fit with nothing known of other sizes.
        at_sizes: makes of a context at other sizes the one that is to fit.
        takes: whether the model takes a call.

    Returns ``None`` where not even the smallest fits.
    """
    all_pools(graph, replace(context, sizes=graph.sizes.hints))
    asked: list[Callable[[StepContext, int], int]] = [partial(least_bytes, graph, bits=False)]
    if alone:
        asked.append(partial(least_bytes_from_scratch, graph, bits=False))
    if any(own.form.keeps_bits for own in graph.variants):
        asked.append(partial(least_bytes_from_scratch if alone else least_bytes, graph))
    taken = taken_sizes(graph.sizes, context.sizes, group)
    if taken is None:
        return None

    def at(count: int) -> StepContext:
        return at_sizes(replace(context, sizes=resized(context.sizes, group, taken[count - 1])))

    # What needs least at the capture's size seldom does at one that fills the budget.
    within_bytes = itertools.chain([0], itertools.repeat(budget_bytes))

    def least_at(ask: Callable[[StepContext, int], int], count: int) -> int:
        return ask(at(count), next(within_bytes))

    own = bisect_right(taken, context.sizes[group[0].symbol])
    count, guess, fitting = bisect_right(taken, most), None, None
    for ask in asked:
        while count and count != fitting:
            fitting = largest_fitting(
                lambda count: rough_least_bytes(graph, at(count)),
                partial(least_at, ask),
                first=max(1, own),
                budget_bytes=budget_bytes,
                most=count,
                guess=guess,
                near=None if guess is None else CLOSE,
            )
            count = guess = _largest_taken(lambda c: takes(at(c)), fitting or 0, own=own)
        fitting = None
    return taken[count - 1] if count else None


def _largest_taken(takes: Callable[[int], bool], most: int, *, own: int) -> int:
    """The largest size up to ``most`` that a model takes, as it does its ``own``; 0: none."""
    if most <= 0 or takes(most):
        return most
    for size in range(most - 1, max(0, most - NEAR), -1):  # such as multiples of something
        if takes(size):
            return size
    low, high = (own if own < most else 0), most  # the sample itself need not fit
    while high - low > 1:  # such as what a table of positions has room for
        middle = (low + high) // 2
        low, high = (middle, high) if takes(middle) else (low, middle)
    return low


def advised(
    graph: Graph,
    error: BudgetError,
    context: StepContext,
    budget: TrainingBudget,
    *,
    at: Callable[[StepContext], StepContext] = lambda context: context,
) -> BudgetError:
    """``error``, that a call does not fit, with the largest sizes that do.

    Args:
        graph: the captured graph.
        error: that was raised.
        context: of the call.
        budget: of the model.
        at: makes of a context at other sizes the one that is to fit.
    """
    budget_bytes, sizes = budget.nbytes, graph.sizes
    if error.least_budget_bytes is None or budget_bytes is None:
        return error
    found: dict[str, int] = {}
    told = []
    for group in groups_of(graph.dimensions, sizes.hints, context.sizes):
        most = min(sizes.most[d.symbol] or MOST_SIZE for d in group)
        size = largest_size(graph, context, group, budget_bytes, most=most, at_sizes=at)
        if size is not None:
            found |= {d.name: size for d in group}
            told.append(f"{size} for {' = '.join(d.name for d in group)}")
    if not told:
        return error
    return BudgetError(
        f"{error}. The largest sizes that fit, each while others stay: {'; '.join(told)}",
        least_budget_bytes=error.least_budget_bytes,
        largest=found,
    )


def largest_fitting(
    roughly_at: Callable[[int], int],
    least_at: Callable[[int], int],
    *,
    first: int,
    budget_bytes: int,
    most: int,
    guess: int | None = None,
    near: int | None = None,
) -> int | None:
    """The largest size that fits; ``None`` where not even 1 does.

    Args:
        roughly_at: least bytes at a size, roughly, growing with it.
        least_at: least bytes at a size; what fits does so at every smaller size, too.
        first: where to begin.
        budget_bytes: what must not be exceeded.
        most: the largest size that may be answered.
        guess: the size that is tried first; ``None``: one that ``roughly_at`` leads to.
        near: one that is less than the largest by no more than its own so-manieth will do.

    Ensures: the answer fits, and one more does not, or is above ``most``; if ``near``, so much
    more.
    """
    low, high = 0, most + 1
    up = down = 0
    share = 1.0  # of what was guessed of a size, that it takes
    known: dict[int, int] = {}  # what sizes take, by the same schedules

    def step(size: int) -> int:
        return max(1, size // near if near else 0)

    def corrected(size: int) -> int:
        return int(share * roughly_at(size))

    while high - low > step(low):
        middle = (low + high) // 2 if high <= most else most
        if guess is None and len(known) > 1:
            guess = _crossing(known, budget_bytes, most)
        elif guess is None:
            guess = _guessed(
                corrected, first=min(low or first, most), budget_bytes=budget_bytes, most=most
            )
        if guess <= low:
            guess = min(low + step(low) * _times(up), middle)
            up += 1
        elif guess >= high:
            guess = max(high - step(high) * _times(down), middle)
            down += 1
        else:
            up = down = 0
        beside = guess + 1 if guess < most else max(1, guess - 1)
        expected, before = roughly_at(guess), roughly_at(beside)
        least_bytes = least_at(guess)
        after = roughly_at(beside)
        if after != before:  # trying has shown how to do with less
            known.clear()
        share = least_bytes * before / max(expected * after, 1)
        known[guess] = least_bytes
        low, high = (guess, high) if least_bytes <= budget_bytes else (low, guess)
        guess = None
    return low or None


def _times(tries: int) -> int:
    """How many steps to go from a bound that guesses do not move: 1, 1, 2, 4, …"""
    return 1 << max(0, tries - 1)


def _guessed(bytes_at: Callable[[int], int], *, first: int, budget_bytes: int, most: int) -> int:
    """The largest size within a budget, if bytes grow as they should; at least 1.

    They are nearly linear, so the next size asked for is where the line through two known ones
    meets the budget; in the end the middle, where they are not.
    """
    known = {first: bytes_at(first)}
    size = 2 * first if known[first] <= budget_bytes else first // 2
    while len(known) < MOST_GUESSED:
        size = min(max(size, 1), most)
        if size in known:
            break
        known[size] = bytes_at(size)
        low = max((n for n in known if known[n] <= budget_bytes), default=0)
        high = min((n for n in known if known[n] > budget_bytes and n > low), default=most + 1)
        if high - low <= 1:
            break
        size = _crossing(known, budget_bytes, most)
        if len(known) > MOST_GUESSED // 2 and low and high <= most:
            size = (low + high) // 2
        size = min(max(size, low + 1), high - 1)
    return max((n for n in known if known[n] <= budget_bytes), default=1)


def _crossing(known: dict[int, int], budget_bytes: int, most: int) -> int:
    """Where the line through the two sizes nearest to the budget meets it."""
    one, other = sorted(known, key=lambda n: abs(known[n] - budget_bytes))[:2]
    grown = known[other] - known[one]
    if grown * (other - one) <= 0:
        return most
    return one + (budget_bytes - known[one]) * (other - one) // grown
