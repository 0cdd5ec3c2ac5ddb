"""Rows of tensors: along which dimensions an operation is computed in parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from torch import Tensor

from fxremat.passes.joint.sizes import product

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """Dimensions ``[first, last)`` of a tensor, whose positions in row-major order are its rows.

    Neither the first nor the last of them has size 1.

    Attributes:
        first, last: the dimensions.
        width: how many adjacent positions are one row, such as the query heads of one key head. It
            divides the size of the last dimension.
    """

    first: int
    last: int
    width: int = 1

    def wider(self, width: int) -> Rows:
        """Return rows that have ``width`` times as many positions each."""
        return replace(self, width=self.width * width)


class Result(Enum):
    """What a result is that is not divided into rows."""

    SUM = "sum"
    """The sum of what the parts return."""
    UNREAD = "unread"
    """Nobody reads the numbers in it, such as the seed of a dropout with probability 0."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way in which an operation can be computed for some rows at a time.

    Attributes:
        inputs: the dimensions that are rows, for each tensor that it reads: each node once, in the
            order of ``all_input_nodes``; ``None`` if each part reads it whole.
        outputs: the dimensions that are rows for each tensor that it returns, or what it is if it
            has no rows, in the order of ``layouts_of``.
        same_bits: whether each row is known to have the same bits as if all were computed at once.
    """

    inputs: tuple[Rows | None, ...]
    outputs: tuple[Rows | Result, ...]
    same_bits: bool

    @property
    def is_wide(self) -> bool:
        """Whether a row of any tensor is more than one position."""
        rows = (where for where in (*self.inputs, *self.outputs) if isinstance(where, Rows))
        return any(where.width > 1 for where in rows)

    def wider(self, width: int) -> Way:
        """Return the way to compute rows that have ``width`` times as many positions each."""
        return Way(
            tuple(where and where.wider(width) for where in self.inputs),
            tuple(w.wider(width) if isinstance(w, Rows) else w for w in self.outputs),
            self.same_bits,
        )


def part_of(shape: Shape, where: Rows, rows: int) -> Shape:
    """Return the shape of a part of a tensor, with ``rows`` rows in the dimensions ``where``."""
    ones = (1,) * (where.last - where.first - 1)
    positions = product((rows, where.width))
    return (*shape[: where.first], *ones, positions, *shape[where.last :])


def part(tensor: Tensor, way: Rows, start: int, rows: int) -> Tensor:
    """Return a view of rows ``[start, start + rows)`` of a tensor, with as many dimensions.

    ``way`` are the dimensions that are its rows.
    """
    first, last = way.first, way.last
    if last - first > 1:
        tensor = tensor.view(*tensor.shape[:first], -1, *tensor.shape[last:])
    piece = tensor.narrow(first, start * way.width, rows * way.width)
    for _ in range(last - first - 1):
        piece = piece.unsqueeze(first)
    return piece


def ranges_of(total: int, part_rows: int) -> Iterator[tuple[int, int]]:
    """Yield first row and number of rows of each part: ``part_rows``, or fewer for the last."""
    for start in range(0, total, max(part_rows, 1)):
        yield start, min(part_rows, total - start)


def indexed(name: str, way: Rows) -> str:
    """Return Python code that picks the rows ``rows`` of the tensor ``name``."""
    flat = f".flatten({way.first}, {way.last - 1})" if way.last - way.first > 1 else ""
    rows = "rows" if way.width == 1 else f"each(rows, {way.width})"
    return f"{name}{flat}[{', '.join([':'] * way.first + [rows])}]"
