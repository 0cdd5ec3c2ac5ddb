"""Checks whether operations computed in parts give the same bits as at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fxremat import torch_compat
from fxremat.costs.measured.cache import CostCache
from fxremat.costs.measured.contrast import contrasts, listed, with_special
from fxremat.costs.measured.execute import undisturbed
from fxremat.costs.measured.synthetic import made_up
from fxremat.passes.joint.sizes import evaluated
from fxremat.passes.parts.bits import are_equal, is_integer, is_true
from fxremat.passes.parts.parts import Changed, Parts, Witness
from fxremat.passes.parts.rows import Result
from fxremat.passes.stages.block import tensor_key
from fxremat.progress import LOG, Note, unnoted

LEAST_DRAWS, MOST_DRAWS, ENOUGH, PLENTY = 2, 16, 1 << 20, 1 << 23
"""A run is compared several times, each time with other random numbers, until ``ENOUGH`` numbers
have been compared. The number of comparisons is from ``LEAST_DRAWS`` (1 if the run computes
``PLENTY`` numbers or more) to ``MOST_DRAWS``. Where a product's kernel rounds differently in parts,
most numbers show it."""

SHOWN_BY = 64
"""Largest number of inputs that one result may count for: where few results are computed, more
comparisons are needed."""

DRAWN = 262_147
"""Largest count of random numbers drawn for a tensor; larger tensors repeat them. It is prime, so
that rows differ."""

SOME = 4096
"""Number of entries of a tensor that are checked for a finite one; all if it has fewer."""

LARGEST = 1 << 20
"""Upper bound of made-up integers that are not indices."""

ZEROS, OTHERS = 1 / 4, 1 / 256
"""In one of the comparisons, the shares of numbers that are zeros of either sign, and that are not
finite."""


def other_bits(
    parts: Parts,
    given: Sequence[torch.Tensor],
    sizes: tuple[int, ...],
    *,
    cache: CostCache,
    note: Note = unnoted,
) -> Changed:
    """Return which results of a run have other bits if it is computed in parts instead of at once.

    The run is compared as it is emitted: with random numbers, and with some that are zeros of
    either sign, infinite or NaN. A single operation is compared with random numbers several times,
    and with zeros of either sign. The run's witnesses are operations for whose pointwise kernels
    one formula differs from another for some numbers. They are given such numbers, which reveal
    every place where parts use another formula than the whole.

    Args:
        parts: the run.
        given: tensors with the layouts of those that the run takes. Their values do not matter.
        sizes: sizes that the run depends on.
        cache: results of former calls. New ones are added.
        note: called with the most bytes that a comparison held at once.

    Returns:
        The results that differ. These are all results where a kernel refuses made-up numbers (as a
        binary cross entropy refuses numbers outside of 0 to 1), and where integers are both indices
        and converted to floating-point numbers: only 0 is a valid index everywhere, and sums of
        zeros show nothing.

    Ensures:
        The random generators are as before.

    Raises:
        torch.OutOfMemoryError: memory is too small to compute the run twice.
    """
    key = (str(parts), *sizes, *map(tensor_key, given))
    if key not in cache.other_bits:
        every = Changed(frozenset(range(len(parts.outputs))))
        if parts.integers.indices & parts.integers.values and not parts.certain:
            return every
        with undisturbed(parts.device):
            try:
                with torch_compat.noted_bytes(parts.device, note):
                    cache.other_bits[key] = _compare(parts, given, sizes, cache)
            except torch.OutOfMemoryError:
                raise  # less memory may be in use another time
            except (RuntimeError, ValueError, IndexError) as error:
                LOG.info("%s stays whole, as it takes no made-up numbers: %s", parts, error)
                cache.other_bits[key] = every
    return cache.other_bits[key]


def _compare(
    parts: Parts, given: Sequence[torch.Tensor], sizes: tuple[int, ...], cache: CostCache
) -> Changed:
    """Return what differs, in any of several comparisons, between a run in parts and at once.

    Other formulas of its witnesses are looked for first, then other bits of its results.
    """
    witnesses = frozenset(
        i
        for i, witness in enumerate(parts.witnesses)
        if _uses_other_formula(witness, parts, given, sizes, cache)
    )
    if witnesses:
        return Changed(witnesses=witnesses)
    places = frozenset(i for i, o in enumerate(parts.outputs) if o.way is not Result.UNREAD)
    changed: frozenset[int] = frozenset()
    named = dict(zip(parts.hints, sizes, strict=True))
    shapes = [parts.outputs[i].layout.shape for i in places]
    results = sum(math.prod(int(evaluated(n, named)) for n in shape) for shape in shapes)
    count = comparisons(given, results)
    # Each operation of a run of several has been compared by itself before.
    is_single = len(parts.whole) == 1
    draws = [_random] * count + [_zeros] if is_single else [_random] * -(-count // 2) + [_special]
    for fill in draws:
        tensors = [_made_up(parts, i, tensor, fill) for i, tensor in enumerate(given)]
        pairs = [*_whole_and_parts(parts, [*tensors, *sizes])]
        for i in places - changed:
            one, other = pairs[i]
            # If finite inputs give no finite result, equality shows nothing.
            is_conclusive = fill is not _random or is_true(_some(one).isfinite().any())
            if not (is_conclusive and are_equal(one, other)):
                changed |= {i}
        if changed == places:
            break
    return Changed(changed)


def _whole_and_parts(
    parts: Parts, args: Sequence[Any]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield, for each result of a run, the tensor computed at once and that computed in parts."""
    whole, changed = (parts.run(args, part_rows=rows) for rows in (None, parts.part_rows))
    return zip(listed(whole), listed(changed), strict=True)


def _uses_other_formula(
    witness: Witness,
    parts: Parts,
    given: Sequence[torch.Tensor],
    sizes: tuple[int, ...],
    cache: CostCache,
) -> bool:
    """Return whether a pointwise operation may use another formula in parts than at once.

    It also may if its kernel refuses the numbers that would show it.

    Args:
        witness: the operation, with the run up to it.
        parts, given, sizes: see :func:`other_bits`.
    """
    named = dict(zip(parts.hints, sizes, strict=True))
    its_sizes = [named[name] for name in witness.parts.hints]
    contrasting = contrasts(witness.node, cache)
    if not contrasting:
        return contrasting is None
    taken = [_made_up(parts, place, given[place], _random) for place in witness.taken]
    return not all(
        are_equal(one, other)
        for numbers in contrasting
        for one, other in _whole_and_parts(witness.parts, [*taken, *numbers, *its_sizes])
    )


def _made_up(
    parts: Parts, place: int, tensor: torch.Tensor, fill: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return made-up values, laid out as ``tensor``: those of ``fill``, or integers.

    Integers are 0 where they are indices.

    Args:
        parts: the run that takes the tensor.
        place: index of the tensor among the run's inputs.
        tensor: a tensor with the layout.
        fill: returns floating-point numbers or masks, laid out as its argument.
    """
    if not is_integer(tensor):
        return fill(tensor)
    least = int(place not in parts.integers.indices)
    largest = min(LARGEST, torch.iinfo(tensor.dtype).max) if least else 0
    return _repeated(tensor, _drawn(tensor).random_(least, largest + 1))


def _random(tensor: torch.Tensor) -> torch.Tensor:
    """Return random numbers, laid out as ``tensor``."""
    return _repeated(tensor, _drawn(tensor))


def _special(tensor: torch.Tensor) -> torch.Tensor:
    """Return random numbers, zeros of either sign and non-finite ones, laid out as ``tensor``."""
    return _repeated(tensor, with_special(_drawn(tensor), ZEROS, OTHERS))


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor laid out as ``tensor``, of 0.0 and -0.0 at random places."""
    return _repeated(tensor, with_special(_drawn(tensor), zeros=1.0, others=0.0))


def _drawn(tensor: torch.Tensor) -> torch.Tensor:
    """Return as many random numbers as the storage of ``tensor`` has, at most ``DRAWN``."""
    count = min(DRAWN, _storage_numbers(tensor))
    return made_up(torch.empty(count, dtype=tensor.dtype, device=tensor.device))


def _repeated(tensor: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return a tensor laid out as ``tensor``, in a storage that repeats ``numbers``."""
    count = _storage_numbers(tensor)
    if count > len(numbers):
        numbers = numbers.repeat(-(-count // len(numbers)))
    return numbers.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _storage_numbers(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.itemsize


def comparisons(given: Sequence[torch.Tensor], results: int = 0) -> int:
    """Return how many times to compare a run that takes ``given`` and computes ``results`` numbers.

    ``results`` of 0 stands for an unknown count.
    """
    numbers = sum(tensor.numel() for tensor in given)
    if results:
        numbers = min(numbers, SHOWN_BY * results)
    least = 1 if results >= PLENTY else LEAST_DRAWS
    return min(MOST_DRAWS, max(least, ENOUGH // max(1, numbers)))


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """Return at least ``SOME`` entries of a tensor at equal distances; all if it has fewer."""
    flat = tensor.flatten()
    return flat[:: max(1, len(flat) // SOME)]
