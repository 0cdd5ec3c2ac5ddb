"""Dimensions of arguments that are symbols of a step: which sizes hold, and which fit."""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
from torch import fx

from fxremat import torch_compat
from fxremat.errors import BudgetError
from fxremat.passes.joint.sizes import Sizes, Values, layouts_of, number_at
from fxremat.planner.context import StepContext

MOST_GUESSED = 12
"""Sizes whose bytes are asked for before any is tried."""

MOST_SIZE = 1 << 20
"""The largest size that is tried."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """A dimension of an argument, whose size is a symbol of the step.

    Attributes:
        place: the argument, as ``args[0]`` or ``kwargs['x']``.
        dim: which of its dimensions.
        symbol: which of the step's.
    """

    place: str
    dim: int
    symbol: int

    @property
    def name(self) -> str:
        """The dimension as Python writes it, as ``args[0].shape[1]``."""
        return f"{self.place}.shape[{self.dim}]"


def dimensions_of(
    primals: Iterable[fx.Node], sizes: Sizes, places: Mapping[int, str]
) -> tuple[Dimension, ...]:
    """All dimensions of arguments that are symbols of a settled graph, in order of its primals."""
    number = {name: i for i, name in enumerate(sizes.names)}
    return tuple(
        Dimension(places[index], dim, number[repr(size)])
        for index, node in enumerate(primals)
        if index in places
        for layout in layouts_of(node)
        for dim, size in enumerate(layout.shape)
        if repr(size) in number
    )


def arguments_of(
    primals: Sequence[fx.Node], sizes: Mapping[str, int], places: Mapping[int, str]
) -> tuple[tuple[str, str], ...]:
    """Places of a call's tensors, and their dtypes and shapes, as ``float32[8, 128]``."""
    found = []
    for index, place in sorted(places.items()):
        (layout,) = layouts_of(primals[index])
        shape = ", ".join(str(number_at(n, sizes)) for n in layout.shape)
        dtype = str(primals[index].meta["val"].dtype).removeprefix("torch.")
        found.append((place, f"{dtype}[{shape}]"))
    return tuple(found)


def groups_of(
    dimensions: Sequence[Dimension], hints: Values, values: Values
) -> tuple[tuple[Dimension, ...], ...]:
    """Dimensions that follow one another: equal at the capture, and at ``values``."""
    found: dict[tuple[int, int], list[Dimension]] = {}
    for dimension in dimensions:
        key = hints[dimension.symbol], values[dimension.symbol]
        found.setdefault(key, []).append(dimension)
    return tuple(map(tuple, found.values()))


def resized(values: Values, group: Iterable[Dimension], size: int) -> Values:
    """``values`` with ``size`` for the symbols of ``group``."""
    symbols = {dimension.symbol for dimension in group}
    return tuple(size if i in symbols else n for i, n in enumerate(values))


def taken_sizes(sizes: Sizes, values: Values, group: Sequence[Dimension]) -> range | None:
    """The sizes, from 1 on, of dimensions that follow each other for which a captured step holds.

    Equalities that the capture found tell them: that a batch is even, where it is viewed as pairs.
    One that holds at a single size, or at all from some size on, limits nothing here: sizes repeat.

    Returns ``None`` where there is none beside the other ``values``.
    """
    own = sizes.hints[group[0].symbol]
    divisors = {n for zero in sizes.zeros for n in torch_compat.divisors_in(zero.expression)}
    period = math.lcm(*divisors)
    beyond = resized(sizes.hints, group, own + period)
    zeros = [zero for zero in sizes.zeros if _are_zero(sizes, [zero], beyond)]

    def holds(size: int) -> bool:
        return _are_zero(sizes, zeros, resized(values, group, size))

    now = values[group[0].symbol]
    first = next((n for n in (now, own, *range(1, period + 1)) if holds(n)), None)
    if first is None:
        return None
    step = period
    for prime in sorted({p for n in divisors for p in sympy.factorint(n)}):
        while step % prime == 0 and all(holds(first + i * step // prime) for i in range(1, prime)):
            step //= prime
    return range((first - 1) % step + 1, sys.maxsize, step)


def nearest(taken: range, size: int) -> int:
    """The largest of ``taken`` that is at most ``size``; the smallest where there is none."""
    return taken[max(0, bisect_right(taken, size) - 1)]


def _are_zero(sizes: Sizes, zeros: Sequence[int], values: Values) -> bool:
    try:
        return not sizes.formulas(zeros)(values).any()
    except ZeroDivisionError:  # a quotient of a size by a smaller one's
        return False


def largest_size(
    sizes: Sizes,
    context: StepContext,
    group: Sequence[Dimension],
    budget_bytes: int,
    *,
    most: int,
    roughly: Callable[[StepContext], int],
    least_bytes: Callable[[StepContext, int], int],
) -> int | None:
    """The largest size up to ``most`` that fits, of some dimensions that follow each other.

    Only sizes for which the captured step holds are tried, see :func:`taken_sizes`.

    Args:
        sizes: of the step.
        context: what a call finds.
        group: the dimensions.
        budget_bytes: what must not be exceeded.
        most: the largest that is tried.
        roughly: least bytes of a call, roughly.
        least_bytes: of a call, by schedules that are known where these fit the bytes given.

    Returns ``None`` where not even the smallest fits.
    """
    taken = taken_sizes(sizes, context.sizes, group)
    if taken is None:
        return None

    def at(count: int) -> StepContext:
        return replace(context, sizes=resized(context.sizes, group, taken[count - 1]))

    tried = False

    def least_at(count: int) -> int:
        nonlocal tried
        # What needs least at the capture's size seldom does at one that fills the budget.
        found = least_bytes(at(count), budget_bytes if tried else 0)
        tried = True
        return found

    count = largest_fitting(
        lambda count: roughly(at(count)),
        least_at,
        first=max(1, bisect_right(taken, context.sizes[group[0].symbol])),
        budget_bytes=budget_bytes,
        most=bisect_right(taken, most),
    )
    return None if count is None else taken[count - 1]


def advised(
    error: BudgetError,
    sizes: Sizes,
    groups: Iterable[Sequence[Dimension]],
    largest: Callable[[Sequence[Dimension], int], int | None],
) -> BudgetError:
    """``error``, that a call does not fit, with the largest sizes that do.

    Args:
        error: of the call.
        sizes: of the step.
        groups: dimensions that follow one another.
        largest: finds the largest size of a group, up to a given one, that fits.
    """
    found: dict[str, int] = {}
    told = []
    for group in groups:
        size = largest(group, min(sizes.most[d.symbol] or MOST_SIZE for d in group))
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
) -> int | None:
    """The largest size that fits; ``None`` where not even 1 does.

    Args:
        roughly_at: least bytes at a size, roughly, growing with it.
        least_at: least bytes at a size; what fits does so at every smaller size, too.
        first: where to begin.
        budget_bytes: what must not be exceeded.
        most: the largest size that may be answered.

    Ensures: the answer fits, and one more does not, or is above ``most``.
    """
    low, high = 0, most + 1
    up = down = 0
    share = 1.0  # of what was guessed of a size, that it takes
    known: dict[int, int] = {}  # what sizes take, by the same schedules

    def corrected(size: int) -> int:
        return int(share * roughly_at(size))

    while high - low > 1:
        middle = (low + high) // 2 if high <= most else most
        if len(known) > 1:
            guess = _crossing(known, budget_bytes, most)
        else:
            guess = _guessed(
                corrected, first=min(low or first, most), budget_bytes=budget_bytes, most=most
            )
        if guess <= low:
            guess = min(low + _step(up), middle)
            up += 1
        elif guess >= high:
            guess = max(high - _step(down), middle)
            down += 1
        else:
            up = down = 0
        beside = guess + 1 if guess < most else max(1, guess - 1)
        expected, before = roughly_at(guess), roughly_at(beside)
        least_bytes = least_at(guess)
        if roughly_at(beside) == before:
            share = least_bytes / max(expected, 1)
        else:  # trying has shown how to do with less
            known.clear()
        known[guess] = least_bytes
        low, high = (guess, high) if least_bytes <= budget_bytes else (low, guess)
    return low or None


def _step(tries: int) -> int:
    """How far to go from a bound that guesses do not move: 1, 1, 2, 4, …"""
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
