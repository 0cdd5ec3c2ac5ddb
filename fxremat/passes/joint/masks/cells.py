"""Combine tensors that are one number in an area and another number outside of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from fxremat.passes.joint.masks.positions import EVERYWHERE, NOWHERE, Area, Box, Chosen, Number

MOST_AREAS = 3
"""Choices by more areas are not combined."""


def combined(box: Box, values: Sequence[Chosen], compute: Callable[..., Number]) -> Chosen | None:
    """Return what ``compute`` makes of each element of ``values``.

    Positions that are in the same areas have the same numbers, so one number is computed for each
    combination of areas (a *cell*).

    Returns:
        The tensor; ``None`` if it has more than two numbers, or if no area describes where they
        are.
    """
    areas = list(dict.fromkeys(v.area for v in values if v.area != EVERYWHERE))
    if len(areas) > MOST_AREAS:
        return None
    results: dict[tuple[bool, ...], Number] = {}
    for sides in itertools.product((True, False), repeat=len(areas)):
        if _cell(box, areas, sides) == NOWHERE:
            continue
        is_in = dict(zip(areas, sides, strict=True))
        results[sides] = compute(
            *(v.inside if is_in.get(v.area, True) else v.outside for v in values)
        )
    distinct = {repr(number): number for number in results.values()}  # zeros may differ in sign
    if len(distinct) == 1:
        return Chosen.of(next(iter(distinct.values())))
    if len(distinct) > 2:
        return None
    for inside, outside in itertools.permutations(distinct):
        area = _union(box, areas, {cell: repr(n) == inside for cell, n in results.items()})
        if area is not None:
            return box.chosen(area, distinct[inside], distinct[outside])
    return None


_Side = bool | None
"""Whether a cell is inside an area; ``None``: it does not matter."""


def _cell(box: Box, areas: Sequence[Area], sides: Sequence[_Side]) -> Area | None:
    """Return the positions inside or outside of each area; ``None`` if no ``Area`` has them."""
    cell: Area | None = EVERYWHERE
    for area, is_in in zip(areas, sides, strict=True):
        if is_in is not None and cell is not None:
            cell = box.both(cell, area if is_in else box.complement(area))
    return cell


def _union(box: Box, areas: Sequence[Area], cells: Mapping[tuple[_Side, ...], bool]) -> Area | None:
    """Return the positions of some cells; ``None`` if no ``Area`` has them.

    Args:
        box: all positions.
        areas: the areas.
        cells: whether a cell is to be in the result. Other cells have no positions.
    """
    for at in range(len(areas)):  # leave out areas that make no difference
        without: dict[tuple[_Side, ...], bool] = {}
        pairs = [((*sides[:at], None, *sides[at + 1 :]), wanted) for sides, wanted in cells.items()]
        if all(without.setdefault(sides, wanted) == wanted for sides, wanted in pairs):
            cells = without
    union: Area | None = NOWHERE
    for sides in (sides for sides, wanted in cells.items() if wanted):
        cell = _cell(box, areas, sides)
        union = None if cell is None or union is None else box.either(union, cell)
    return union
