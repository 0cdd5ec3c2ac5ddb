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
from fxremat.planner.context.step_context import StepContext


def largest_size(
    graph: Graph,
    context: StepContext,
    group: Sequence[Dimension],
    budget_bytes: int,
    *,
    most: int,
    uncached: bool = False,
    at_sizes: Callable[[StepContext], StepContext] = lambda context: context,
    takes: Callable[[StepContext], bool] = lambda _: True,
) -> int | None:
    """Return the largest size, up to ``most``, of some equal dimensions that fits a budget.

    Only sizes for which the captured graph is valid are tried, see :func:`taken_sizes`. Checks that
    take longer are made only at sizes that pass the faster ones: whether the size fits without
    cached candidates, and whether parts keep their bits there.

    Args:
        graph: the captured graph.
        context: the context of a call.
        group: the dimensions, which always have equal sizes.
        budget_bytes: the peak that must not be exceeded.
        most: the largest size that is tried.
        uncached: whether the call is to fit even if nothing is cached of other sizes.
        at_sizes: maps a context at other sizes to the one that is to fit.
        takes: returns whether the model accepts a call in a context.

    Returns ``None`` if not even the smallest size fits.
    """
    all_pools(graph, replace(context, sizes=graph.sizes.hints))
    asked: list[Callable[[StepContext, int], int]] = [partial(least_bytes, graph, bits=False)]
    if uncached:
        asked.append(partial(least_bytes_from_scratch, graph, bits=False))
    if any(own.form.keeps_bits for own in graph.variants):
        asked.append(partial(least_bytes_from_scratch if uncached else least_bytes, graph))
    taken = taken_sizes(graph.sizes, context.sizes, group)
    if taken is None:
        return None

    def at(count: int) -> StepContext:
        return at_sizes(replace(context, sizes=resized(context.sizes, group, taken[count - 1])))

    # What needs least at the capture's size seldom does at one that fills the budget.
    within_bytes = itertools.chain([0], itertools.repeat(budget_bytes))

    def least_at(ask: Callable[[StepContext, int], int], count: int) -> int:
        return ask(at(count), next(within_bytes))

    own, effort = bisect_right(taken, context.sizes[group[0].symbol]), graph.options.effort
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
                near=None if guess is None else effort.size_close,
            )
            count = guess = _largest_taken(
                lambda c: takes(at(c)), fitting or 0, own=own, near=effort.size_near
            )
        fitting = None
    return taken[count - 1] if count else None


def _largest_taken(takes: Callable[[int], bool], most: int, *, own: int, near: int) -> int:
    """Return the largest size up to ``most`` that a model accepts; 0 if there is none.

    Args:
        takes: returns whether the model accepts a size.
        most: the largest size.
        own: a size that the model accepts.
        near: how many of the largest sizes are tried one by one, before sizes are bisected.
    """
    if most <= 0 or takes(most):
        return most
    for size in range(most - 1, max(0, most - near), -1):  # such as multiples of something
        if takes(size):
            return size
    # The sample itself need not fit. What is taken may end where a table of positions does.
    return bisected(takes, own if own < most else 0, most)


def advised(
    graph: Graph,
    error: BudgetError,
    context: StepContext,
    budget: TrainingBudget,
    *,
    at: Callable[[StepContext], StepContext] = lambda context: context,
) -> BudgetError:
    """Return ``error``, that a call does not fit, extended by the largest sizes that do.

    Args:
        graph: the captured graph.
        error: the error that was raised.
        context: the context of the call.
        budget: the budget of the model.
        at: maps a context at other sizes to the one that is to fit.
    """
    budget_bytes, sizes = budget.nbytes, graph.sizes
    if error.least_budget_bytes is None or budget_bytes is None:
        return error
    largest: dict[str, int] = {}
    texts = []
    for group in groups_of(graph.dimensions, sizes.hints, context.sizes):
        most = min(sizes.most[d.symbol] or MOST_SIZE for d in group)
        size = largest_size(graph, context, group, budget_bytes, most=most, at_sizes=at)
        if size is not None:
            largest |= {d.name: size for d in group}
            texts.append(f"{size} for {' = '.join(d.name for d in group)}")
    if not texts:
        return error
    return BudgetError(
        f"{error.message}. The largest sizes that fit, with all others unchanged: "
        f"{'; '.join(texts)}",
        least_budget_bytes=error.least_budget_bytes,
        largest=largest,
        code=error.code,
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
    """Return the largest size that fits a budget; ``None`` if not even 1 does.

    ``roughly_at``, which costs little, is bisected for the size at which ``least_at``, which costs
    much, is called next.

    Args:
        roughly_at: returns about the least bytes at a size, growing with it.
        least_at: returns the least bytes at a size; what fits does so at every smaller size, too.
        first: the size that bisecting begins with.
        budget_bytes: the bytes that must not be exceeded.
        most: the largest size that may be returned.
        guess: the size that is tried first; ``None``: one that ``roughly_at`` leads to.
        near: the result may be smaller than the largest size by its own value divided by ``near``;
            ``None``: it may not.

    Ensures: the result fits, and one more does not, or is above ``most``; with ``near``, that much
    more does not.
    """
    low, high = 0, most + 1
    up = down = 1  # steps away from a bound at which the guess stays
    share = 1.0  # of the rough bytes of a size, that it takes

    def step(size: int) -> int:
        return max(1, size // near if near else 0)

    def seems_to_fit(size: int) -> bool:
        return share * roughly_at(size) <= budget_bytes

    while high - low > step(low):
        middle = (low + high) // 2 if high <= most else most
        if guess is None:
            guess = bisected(seems_to_fit, low, high, first=low or first)
        if guess <= low:
            guess, up = min(low + step(low) * up, middle), 2 * up
        elif guess >= high - 1 and high <= most:
            guess, down = max(high - step(high) * down, middle), 2 * down
        next_to = guess + 1 if guess < most else max(1, guess - 1)
        expected, before = roughly_at(guess), roughly_at(next_to)
        least_bytes = least_at(guess)
        # Trying may have shown how to do with less, at other sizes as well.
        share = least_bytes * before / max(expected * roughly_at(next_to), 1)
        low, high = (guess, high) if least_bytes <= budget_bytes else (low, guess)
        guess = None
    return low or None


def bisected(fits: Callable[[int], bool], low: int, high: int, *, first: int | None = None) -> int:
    """Return the largest number between ``low`` and ``high`` that fits; ``low`` if none does.

    Args:
        fits: returns whether a number fits; if it does, every smaller number does as well.
        low: an exclusive bound, below all numbers that are tried.
        high: an exclusive bound, above them.
        first: the number that is tried first; from there on it is doubled, or halved, until the
            answer lies between two that were tried. ``None``: the middle is tried first.
    """
    size = (low + high) // 2 if first is None else min(max(first, low + 1), high - 1)
    tried = {True, False} if first is None else set()
    while high - low > 1:
        is_fitting = fits(size)
        low, high = (size, high) if is_fitting else (low, size)
        tried.add(is_fitting)
        size = (low + high) // 2 if len(tried) > 1 else 2 * size if is_fitting else size // 2
        size = min(max(size, low + 1), high - 1)
    return low
