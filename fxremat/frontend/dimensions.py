"""Which dimensions of a call's arguments the symbols of its step are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from fxremat.passes.joint.sizes import Sizes, Values, layouts_of, number_at


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
        """As Python says it."""
        return f"{self.place}.shape[{self.dim}]"


def dimensions_of(
    primals: Iterable[fx.Node], sizes: Sizes, places: Mapping[int, str]
) -> tuple[Dimension, ...]:
    """All of them, in order of the primals.

    Args:
        primals: of a settled graph.
        sizes: its symbols.
        places: of primals that are arguments of the call.
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
    """Places of a call's tensors, and their dtypes and shapes, as ``float32[8, 128]``.

    Args:
        primals: of a settled graph.
        sizes: a number for each of its symbols.
        places: of primals that are arguments of the call.
    """
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
