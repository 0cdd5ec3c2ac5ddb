"""Values that follow from positions: numbers and choices that are functions of a tensor's indices.

Attention masks are mostly made of positions: query 7 sees key 5 because 5 is not after 7. Such a
tensor is described here by a formula in its indices and in the symbols of the graph. The formula
holds at all sizes, and nothing is computed to find it (:mod:`fxremat.passes.joint.masks.formulas`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy

Number = bool | int | float
"""An element of a tensor."""


@dataclass(frozen=True, slots=True)
class Affine:
    """An integer tensor: each element is a constant plus multiples of its indices.

    Attributes:
        constant: an expression in the symbols of the graph, expanded.
        slopes: the factor of the index of each dimension.
    """

    constant: Any
    slopes: tuple[int, ...]

    @staticmethod
    def of(number: int, rank: int) -> Affine:
        """Return a tensor of ``rank`` dimensions whose elements are all ``number``."""
        return Affine(expression_of(number), (0,) * rank)

    def plus(self, other: Affine, factor: int = 1) -> Affine:
        """Return the sum of this tensor and ``factor`` times another one of the same shape."""
        constant = sympy.expand(self.constant + factor * other.constant)
        slopes = zip(self.slopes, other.slopes, strict=True)
        return Affine(constant, tuple(a + factor * b for a, b in slopes))

    def shifted(self, number: int) -> Affine:
        """Return this tensor with ``number`` added to each element."""
        return Affine(self.constant + number, self.slopes)

    def scaled(self, factor: int) -> Affine:
        """Return this tensor with each element multiplied by ``factor``."""
        constant = sympy.expand(factor * self.constant)
        return Affine(constant, tuple(factor * slope for slope in self.slopes))

    def at(self, indices: Sequence[Affine], rank: int) -> Affine:
        """Return the tensor of ``rank`` dimensions that reads this one at ``indices``.

        Args:
            indices: the index in each dimension of this tensor, as a function of the indices of the
                result.
            rank: how many dimensions the result has.
        """
        result = Affine(self.constant, (0,) * rank)
        for slope, index in zip(self.slopes, indices, strict=True):
            if slope:
                result = result.plus(index, slope)
        return result

    @property
    def is_constant(self) -> bool:
        """Whether all elements are equal, and the same at all sizes."""
        return not any(self.slopes) and bool(self.constant.is_number)


@dataclass(frozen=True, slots=True)
class Area:
    """A set of positions in a tensor: those where all of some affine tensors are at least 0.

    Attributes:
        planes: the affine tensors. All positions are in the area if there are none.
        is_outside: the area is instead all positions that are not in that set. Never with a single
            plane, because its complement is a plane as well.
    """

    planes: frozenset[Affine] = frozenset()
    is_outside: bool = False


EVERYWHERE, NOWHERE = Area(), Area(is_outside=True)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A tensor whose elements are one number in an area, and another number outside of it.

    Attributes:
        area: where elements are ``inside``. Everywhere if both numbers are equal.
        inside, outside: the numbers.
    """

    area: Area
    inside: Number
    outside: Number

    @staticmethod
    def of(number: Number) -> Chosen:
        """Return a tensor whose elements are all ``number``."""
        return Chosen(EVERYWHERE, number, number)


Value = Affine | Chosen
"""What is known about the elements of a tensor."""


def expression_of(number: int) -> Any:
    """Return the sympy expression of a number, which may be a ``Size``."""
    return sympy.expand(sympy.sympify(getattr(number, "expression", int(number))))


@dataclass(frozen=True, slots=True)
class Box:
    """All positions in a tensor of some shape, at all sizes for which the graph is valid.

    Attributes:
        shape: the number of positions in each dimension, as expressions.
        most: the largest value of each symbol that has one, by its name. The least value is 1: a
            tensor without elements has no positions.
    """

    shape: tuple[Any, ...]
    most: Mapping[str, int] = field(default_factory=dict)

    def holds(self, plane: Affine) -> bool:
        """Return whether ``plane`` is certainly at least 0 at all positions."""
        least = plane.constant
        for slope, size in zip(plane.slopes, self.shape, strict=True):
            least += min(slope, 0) * (size - 1)
        return self._is_nonnegative(least)

    def _is_nonnegative(self, expression: Any) -> bool:
        expression = sympy.expand(expression)
        if expression.is_number:
            return bool(expression >= 0)
        beyond = {}
        for symbol in expression.free_symbols:
            more = sympy.Dummy(nonnegative=True, integer=True)
            most = self.most.get(str(symbol))
            falls = expression.coeff(symbol).is_negative
            beyond[symbol] = most - more if falls and most is not None else 1 + more
        terms = sympy.expand(expression.xreplace(beyond)).as_coefficients_dict()
        return all(factor >= 0 and term.is_nonnegative for term, factor in terms.items())

    def area(self, planes: Iterable[Affine], *, is_outside: bool = False) -> Area:
        """Return the simplest :class:`Area` of ``planes``, or of all other positions."""
        left = [p for p in dict.fromkeys(map(self._plain, planes)) if not self.holds(p)]
        if any(self._exclude(p, q) for p in left for q in left):
            return EVERYWHERE if is_outside else NOWHERE
        kept: list[Affine] = []
        for plane in left:
            if not any(self._implies(other, plane) for other in kept):
                kept = [other for other in kept if not self._implies(plane, other)] + [plane]
        if is_outside and len(kept) == 1:
            return Area(frozenset(map(_complement, kept)))
        return Area(frozenset(kept), is_outside)

    def _plain(self, plane: Affine) -> Affine:
        """Return ``plane`` without multiples of the indices of dimensions of size 1."""
        sizes = zip(plane.slopes, self.shape, strict=True)
        return Affine(plane.constant, tuple(0 if size == 1 else slope for slope, size in sizes))

    def _implies(self, one: Affine, other: Affine) -> bool:
        return one.slopes == other.slopes and self._is_nonnegative(other.constant - one.constant)

    def _exclude(self, one: Affine, other: Affine) -> bool:
        """Return whether certainly no position has both at least 0; they may be the same."""
        return self.holds(_complement(one)) or self._implies(one, _complement(other))

    def complement(self, area: Area) -> Area:
        """Return all positions that are not in ``area``."""
        return self.area(area.planes, is_outside=not area.is_outside)

    def both(self, one: Area, other: Area) -> Area | None:
        """Return the positions in both areas; ``None`` if no ``Area`` has exactly these."""
        if one.is_outside and not other.is_outside:
            one, other = other, one
        if not other.is_outside:
            return self.area(one.planes | other.planes)
        if one == EVERYWHERE or other == NOWHERE:
            return other
        if one.is_outside:  # neither in one set nor in the other: expressible if one contains both
            small, large = sorted((one.planes, other.planes), key=len)
            return Area(small, True) if small <= large else None
        left = [p for p in other.planes if not any(self._implies(q, p) for q in one.planes)]
        if len(left) > 1:
            return None
        return self.area(one.planes | set(map(_complement, left))) if left else NOWHERE

    def either(self, one: Area, other: Area) -> Area | None:
        """Return the positions in one area or the other; ``None`` as for :meth:`both`."""
        neither = self.both(self.complement(one), self.complement(other))
        return None if neither is None else self.complement(neither)

    def chosen(self, area: Area, inside: Number, outside: Number) -> Chosen:
        """Return a tensor that is ``inside`` in ``area`` and ``outside`` elsewhere."""
        if area == EVERYWHERE:
            return Chosen.of(inside)
        return Chosen.of(outside) if area == NOWHERE else Chosen(area, inside, outside)

    def read(self, value: Value, indices: Sequence[Affine]) -> Value:
        """Return the tensor of this shape that reads ``value`` at ``indices``, as ``Affine.at``."""
        rank = len(self.shape)
        if isinstance(value, Affine):
            return self._plain(value.at(indices, rank))
        planes = (plane.at(indices, rank) for plane in value.area.planes)
        area = self.area(planes, is_outside=value.area.is_outside)
        return self.chosen(area, value.inside, value.outside)

    def index(self, dim: int) -> Affine:
        """Return the index of dimension ``dim``, as a function of the indices."""
        slopes = [0] * len(self.shape)
        slopes[dim] = 0 if self.shape[dim] == 1 else 1
        return Affine(sympy.Integer(0), tuple(slopes))


def _complement(plane: Affine) -> Affine:
    """Return the affine tensor that is at least 0 where ``plane`` is less than 0."""
    return plane.scaled(-1).shifted(-1)
