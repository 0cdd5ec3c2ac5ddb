"""Numbers that reveal which formula a pointwise kernel of a CPU uses for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import fx

from fxremat.costs.measured.cache import CostCache
from fxremat.passes.joint.digest import written
from fxremat.passes.joint.graph import is_tensor
from fxremat.passes.parts.bits import INTEGERS, same_bits

CANDIDATES, AT_ONCE = 1 << 18, 1 << 13
"""How many numbers are searched, and how many are computed at once, since planning has a memory
budget too."""

SINGLES = 64
"""How many candidates are tried as the only number of a tensor."""

OF_NO_DIMENSIONS = (1 / 3, 0.0, -0.0, float("nan"), float("inf"))
"""Values of a tensor without dimensions. The first is not exact in half precision."""

NOT_FINITE = (float("inf"), -float("inf"), float("nan"))

Numbers = list[torch.Tensor]
"""A tensor of numbers for each tensor that an operation reads."""


def contrasts(node: fx.Node, cache: CostCache) -> list[Numbers] | None:
    """Return numbers for which the formulas of a pointwise kernel give different results.

    A kernel may use one formula for numbers that fill a vector, another for numbers that it
    computes one by one, and others where a tensor has a single number. Candidates for a
    half-precision operation of one tensor are all numbers; others are random, special or arbitrary
    bits.

    Args:
        node: the operation.
        cache: results of former calls. A new one is added.

    Returns:
        For each formula that differs from the vector formula, numbers for which it does. The list
        is empty where the kernel computes all candidates alike or is not a CPU's, and ``None``
        where the kernel refuses the candidates, so that nothing is known.
    """
    tensors = [n for n in node.all_input_nodes if is_tensor(n)]
    if not all(n.meta["val"].device.type == "cpu" for n in tensors):
        return []
    read = [(n.meta["val"].dtype, n.meta["val"].dim() > 0) for n in tensors]
    singles = [*_subsets_of_single_numbers(tensors)]
    places = {n: i for i, n in enumerate(tensors)}
    arguments = written((node.args, dict(node.kwargs)), lambda n: f"%{places.get(n)}")
    key = (str(node.target), arguments, str((read, singles)))
    if key not in cache.contrasts:
        try:
            cache.contrasts[key] = [*_contrasts(node, tensors, singles)]
        except RuntimeError:
            cache.contrasts[key] = None
    return cache.contrasts[key]


def _contrasts(
    node: fx.Node, tensors: Sequence[fx.Node], singles: Sequence[Sequence[int]]
) -> Iterator[Numbers]:
    """Yield numbers for which another formula than that of vectors gives another result.

    The other formulas are that of a kernel that computes numbers one by one, and those of tensors
    of a single number.

    Args:
        node: the operation.
        tensors: the tensors that it reads.
        singles: sets of indices of tensors that may have a single number at the same time.
    """
    rows = [i for i, n in enumerate(tensors) if n.meta["val"].dim()]
    scalars = OF_NO_DIMENSIONS[: None if len(rows) < len(tensors) else 1]
    for scalar in scalars:
        for start in range(0, CANDIDATES, AT_ONCE):
            every = start if len(tensors) == 1 else None
            dense = [_candidates(n.meta["val"], scalar, every) for n in tensors]
            strided = [torch.stack([t, t], -1)[..., 0] if t.dim() else t for t in dense]
            place = _first_difference(node, tensors, dense, strided)
            if place is not None:
                yield _values_at(dense, place)
                break
    for subset in singles:
        for scalar in scalars:
            dense = [_candidates(n.meta["val"], scalar, None) for n in tensors]
            yield from _of_a_single_number(node, tensors, dense, subset)


def _subsets_of_single_numbers(tensors: Sequence[fx.Node]) -> Iterator[list[int]]:
    """Yield sets of tensors that may have a single number at the same time, in a part of a run.

    A set is a list of indices. Where one tensor has a single number, so has every tensor that
    broadcasts to its shape.
    """
    kinds = _kinds(tensors)
    shapes = {kind: tensors[kind].meta["val"].shape for kind in kinds if kind is not None}
    for count in range(len(shapes)):
        for some in combinations(shapes, count + 1):
            below = {a for a in shapes for b in some if _broadcasts(shapes[a], shapes[b])}
            if below <= {*some}:
                yield [i for i, kind in enumerate(kinds) if kind in some]


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Return whether a tensor of shape ``shape`` can be expanded to shape ``to``."""
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(size in (1, other) for size, other in pairs)


def _kinds(tensors: Sequence[fx.Node]) -> list[int | None]:
    """Return, for each tensor, the index of the first one of equal shape.

    It is ``None`` for a tensor without dimensions. Tensors of one shape have one shape in a part
    too: all or none of them have a single number.
    """
    shapes = [str(tuple(n.meta["val"].shape)) for n in tensors]
    return [
        shapes.index(s) if n.meta["val"].dim() else None
        for n, s in zip(tensors, shapes, strict=True)
    ]


def _of_a_single_number(
    node: fx.Node, tensors: Sequence[fx.Node], dense: Numbers, subset: Sequence[int]
) -> Iterator[Numbers]:
    """Yield numbers, if found, whose result differs if some tensors have a single number.

    Args:
        node: the operation.
        tensors: the tensors that it reads.
        dense: candidates for each of these.
        subset: indices of the tensors that have a single number.
    """
    for i in range(SINGLES):
        single = {place: dense[place][i].reshape(1) for place in subset}
        repeated = {place: number.repeat(AT_ONCE) for place, number in single.items()}
        one, other = (
            [replaced.get(place, t) for place, t in enumerate(dense)]
            for replaced in (repeated, single)
        )
        place = _first_difference(node, tensors, one, other)
        if place is not None:
            yield _values_at(one, place)
            return


def _first_difference(
    node: fx.Node, tensors: Sequence[fx.Node], one: Numbers, other: Numbers
) -> int | None:
    """Return the index of the first entry whose bits differ between the results for two inputs.

    Returns ``None`` if all bits are equal.
    """
    results = [_results(node, tensors, values) for values in (one, other)]
    pairs = zip(*results, strict=True)
    differs = torch.stack([~same_bits(a, b.expand_as(a)) for a, b in pairs]).any(0)
    return int(differs.nonzero()[0]) if differs.any() else None


def _values_at(values: Numbers, place: int) -> Numbers:
    return [t[place].clone() if t.dim() else t for t in values]


def _results(node: fx.Node, tensors: Sequence[fx.Node], values: Numbers) -> Numbers:
    """Return the results of ``node`` with ``values`` in place of the ``tensors`` that it reads."""
    given = dict(zip(tensors, values, strict=True))

    def value_of(read: fx.Node) -> Any:
        return given[read] if read in given else read.meta["val"]

    target: Any = node.target
    args: Any = fx.node.map_arg(node.args, value_of)
    kwargs: Any = fx.node.map_arg(node.kwargs, value_of)
    return listed(target(*args, **kwargs))


def _candidates(tensor: torch.Tensor, scalar: float, start: int | None) -> torch.Tensor:
    """Return a flat tensor of numbers to try in place of ``tensor``.

    For a tensor without dimensions it is ``scalar``. Half-precision numbers from ``start`` on are
    enumerated if ``start`` is given. Other numbers are random, special or arbitrary bits.
    """
    if not tensor.dim():
        return torch.full((), scalar).to(tensor.dtype)
    made = torch.empty(AT_ONCE, dtype=tensor.dtype)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return made.random_(2)
    made.normal_()
    if tensor.is_floating_point():
        bits = INTEGERS[tensor.itemsize]
        if start is not None and bits is torch.int16:
            each = (torch.arange(start, start + AT_ONCE) % 2**16 - 2**15).to(bits)
            return each.view(tensor.dtype)
        any_bits = torch.empty(AT_ONCE, dtype=bits).random_(torch.iinfo(bits).min, None)
        made = torch.where(torch.rand(AT_ONCE) < 1 / 4, any_bits.view(tensor.dtype), made)
    return with_special(made, zeros=1 / 4, others=1 / 8)


def with_special(numbers: torch.Tensor, zeros: float, others: float) -> torch.Tensor:
    """Replace some numbers in place by zeros of either sign, infinities and NaN; return all.

    Args:
        numbers: random numbers, which are changed.
        zeros: share that becomes zeros.
        others: share that becomes infinite or NaN.
    """
    if not numbers.is_floating_point():
        return numbers
    drawn = torch.rand(numbers.shape, device=numbers.device)
    numbers.masked_fill_(drawn < zeros, 0.0).masked_fill_(drawn < zeros / 2, -0.0)
    for i, number in enumerate(NOT_FINITE):
        from_, to = (1 - others * (i + end) / len(NOT_FINITE) for end in (1, 0))
        numbers.masked_fill_((drawn >= from_) & (drawn < to), number)
    return numbers


def listed(results: Any) -> list[torch.Tensor]:
    """Return the results of an operation as a list, also if it returns a single tensor."""
    return list(results) if isinstance(results, (tuple, list)) else [results]
