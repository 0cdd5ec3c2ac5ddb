"""Dimensions of arguments whose sizes are symbols, and the sizes for which a graph holds."""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import sympy
from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint.sizes import Sizes, Values, layouts_of, number_at

MOST_SIZE = 1 << 20
"""The largest size that is tried."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """A dimension of an argument whose size is a symbol of the graph.

    Attributes:
        place: the argument, as ``args[0]`` or ``kwargs['x']``.
        dim: which of its dimensions.
        symbol: the index of the symbol.
    """

    place: str
    dim: int
    symbol: int

    @property
    def name(self) -> str:
        """The dimension as Python writes it, such as ``args[0].shape[1]``."""
        return f"{self.place}.shape[{self.dim}]"


def dimensions_of(
    primals: Iterable[fx.Node], sizes: Sizes, places: Mapping[int, str]
) -> tuple[Dimension, ...]:
    """Return the dimensions of arguments whose sizes are symbols, in order of the primals.

    Args:
        primals: the primals of a graph whose sizes are numbers or symbols.
        sizes: the symbols.
        places: for each primal that is an argument, by index, where it is passed.
    """
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
    """Return where each tensor argument is passed, and its type as ``float32[8, 128]``."""
    arguments = []
    for index, place in sorted(places.items()):
        (layout,) = layouts_of(primals[index])
        shape = ", ".join(str(number_at(n, sizes)) for n in layout.shape)
        dtype = str(primals[index].meta["val"].dtype).removeprefix("torch.")
        arguments.append((place, f"{dtype}[{shape}]"))
    return tuple(arguments)


def groups_of(
    dimensions: Sequence[Dimension], hints: Values, values: Values
) -> tuple[tuple[Dimension, ...], ...]:
    """Return groups of dimensions whose sizes are equal both at the capture and at ``values``.

    Args:
        dimensions: the dimensions to group.
        hints: the numbers of the symbols at the capture.
        values: other numbers of the symbols.
    """
    groups: dict[tuple[int, int], list[Dimension]] = {}
    for dimension in dimensions:
        key = hints[dimension.symbol], values[dimension.symbol]
        groups.setdefault(key, []).append(dimension)
    return tuple(map(tuple, groups.values()))


def resized(values: Values, group: Iterable[Dimension], size: int) -> Values:
    """Return ``values`` with the symbols of the dimensions in ``group`` set to ``size``."""
    symbols = {dimension.symbol for dimension in group}
    return tuple(size if i in symbols else n for i, n in enumerate(values))


def taken_sizes(sizes: Sizes, values: Values, group: Sequence[Dimension]) -> range | None:
    """Return the sizes of a group of equal dimensions for which a captured graph is valid.

    They follow from equalities that the capture has recorded, such as that a batch is even where it
    is viewed as pairs. Valid sizes are assumed to repeat with a period, so an equality that holds
    at one size only, or from some size on, excludes nothing.

    Returns ``None`` if no size is valid with the ``values`` of the other symbols.
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
    """Return the largest number in ``taken`` that is at most ``size``; if none is, its smallest."""
    return taken[max(0, bisect_right(taken, size) - 1)]


def _are_zero(sizes: Sizes, zeros: Sequence[int], values: Values) -> bool:
    """Return whether the expressions ``zeros`` of the symbols are all 0 at ``values``."""
    try:
        return not sizes.formulas(zeros)(values).any()
    except ZeroDivisionError:  # a quotient of a size by a smaller one's
        return False
