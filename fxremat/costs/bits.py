"""Whether operations that are computed in parts give the bits that they give at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fxremat import torch_compat
from fxremat.costs.cache import CostCache
from fxremat.costs.contrast import contrasts, listed, with_special
from fxremat.costs.execute import Note, undisturbed, unnoted
from fxremat.costs.synthetic import made_up
from fxremat.passes.joint.sizes import evaluated
from fxremat.passes.split.parts import (
    Changed,
    Parts,
    Witness,
    are_equal,
    is_integer,
    is_true,
)
from fxremat.passes.split.ways import Result
from fxremat.passes.stages.block import tensor_key
from fxremat.progress import LOG

LEAST_DRAWS, MOST_DRAWS, ENOUGH, PLENTY = 2, 16, 1 << 20, 1 << 23
"""How often a run is compared, each time with other random numbers: until so many numbers were, and
at least twice where its results are not plenty. Where a kernel of a product rounds otherwise in
parts, most numbers show it."""

SHOWN_BY = 64
"""Numbers of a tensor that one of a result may stand for: where few are made many are drawn."""

DRAWN = 262_147
"""So many numbers are drawn for a larger tensor, and repeated: a prime, so that rows differ."""

SOME = 4096
"""Numbers among which a finite one is looked for, at the least where there are so many."""

LARGEST = 1 << 20
"""Integers that are no indices are up to this."""

ZEROS, OTHERS = 1 / 4, 1 / 256
"""Shares of one comparison's numbers that are zeros of either sign, and that are not finite."""


def other_bits(
    parts: Parts,
    given: Sequence[torch.Tensor],
    sizes: tuple[int, ...],
    *,
    cache: CostCache,
    note: Note = unnoted,
) -> Changed:
    """Return which bits of a run differ from those of its operations at once.

    The run is compared as it is emitted, with random numbers, and with some that are zeros of
    either sign, infinite or NaN. A single operation is compared with random numbers several times,
    and with zeros of either sign. A run's witnesses are given numbers of which a pointwise kernel
    computes another value by another formula: these show each place where it does so in the parts
    and not at once, or the other way round.

    Args:
        parts: the run.
        given: tensors that lie as those that it takes; their numbers do not matter.
        sizes: that it follows.
        cache: answers; new ones are added.
        note: called with the most bytes that a comparison held at once.

    Ensures: the random generators are as before.

    All results are returned where there is no memory to compute the run twice, where a kernel
    refuses made-up numbers, as a binary cross entropy does those outside of 0 to 1, and where
    integers are indices and become floating-point numbers as well: only 0 is valid as any index,
    and sums of zeros say nothing.
    """
    key = (str(parts), *sizes, *map(tensor_key, given))
    if key not in cache.other_bits:
        every = Changed(frozenset(range(len(parts.outputs))))
        if parts.integers.indices & parts.integers.values and not parts.certain:
            return every
        with undisturbed(parts.device):
            try:
                with torch_compat.noted_bytes(parts.device, note):
                    cache.other_bits[key] = _other_bits(parts, given, sizes, cache)
            except torch.OutOfMemoryError:
                return every
            except (RuntimeError, ValueError, IndexError) as error:
                LOG.info("%s stays whole, as it takes no made-up numbers: %s", parts, error)
                cache.other_bits[key] = every
    return cache.other_bits[key]


def _other_bits(
    parts: Parts, given: Sequence[torch.Tensor], sizes: tuple[int, ...], cache: CostCache
) -> Changed:
    """What differs in one of several comparisons."""
    shown = (i for i, own in enumerate(parts.witnesses) if _shows(own, parts, given, sizes, cache))
    witnesses = frozenset(shown)
    if witnesses:
        return Changed(witnesses=witnesses)
    places = frozenset(i for i, o in enumerate(parts.outputs) if o.way is not Result.UNREAD)
    changed: frozenset[int] = frozenset()
    named = dict(zip(parts.hints, sizes, strict=True))
    shapes = [parts.outputs[i].layout.shape for i in places]
    results = sum(math.prod(int(evaluated(n, named)) for n in shape) for shape in shapes)
    count = comparisons(given, results)
    # Each operation of a run of several was compared by itself before.
    is_single = len(parts.whole) == 1
    draws = [_random] * count + [_zeros] if is_single else [_random] * -(-count // 2) + [_special]
    for fill in draws:
        tensors = [_filled(parts, i, tensor, fill) for i, tensor in enumerate(given)]
        pairs = [*_both(parts, [*tensors, *sizes])]
        for i in places - changed:
            one, other = pairs[i]
            # Without a finite number a result of finite ones says nothing.
            speaks = fill is not _random or is_true(_some(one).isfinite().any())
            if not (speaks and are_equal(one, other)):
                changed |= {i}
        if changed == places:
            break
    return Changed(changed)


def _both(parts: Parts, args: Sequence[Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Results of a run, computed at once and in parts."""
    whole, changed = (parts.run(args, part_rows=rows) for rows in (None, parts.part_rows))
    return zip(listed(whole), listed(changed), strict=True)


def _shows(
    witness: Witness,
    parts: Parts,
    given: Sequence[torch.Tensor],
    sizes: tuple[int, ...],
    cache: CostCache,
) -> bool:
    """Whether a pointwise operation computes a number by another formula than at once, or may."""
    named = dict(zip(parts.hints, sizes, strict=True))
    its_sizes = [named[name] for name in witness.parts.hints]
    contrasting = contrasts(witness.node, cache)
    if not contrasting:
        return contrasting is None
    taken = [_filled(parts, place, given[place], _random) for place in witness.taken]
    return not all(
        are_equal(one, other)
        for numbers in contrasting
        for one, other in _both(witness.parts, [*taken, *numbers, *its_sizes])
    )


def _filled(
    parts: Parts, place: int, tensor: torch.Tensor, fill: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Numbers for a tensor that a run takes: what ``fill`` makes up, or integers: 0 for indices."""
    if not is_integer(tensor):
        return fill(tensor)
    least = int(place not in parts.integers.indices)
    largest = min(LARGEST, torch.iinfo(tensor.dtype).max) if least else 0
    return _repeated(tensor, _drawn(tensor).random_(least, largest + 1))


def _random(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that lies as ``tensor``: random numbers."""
    return _repeated(tensor, _drawn(tensor))


def _special(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that lies as ``tensor``: random numbers, zeros of either sign, some not finite."""
    return _repeated(tensor, with_special(_drawn(tensor), ZEROS, OTHERS))


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that lies as ``tensor``: zeros of either sign."""
    return _repeated(tensor, with_special(_drawn(tensor), zeros=1.0, others=0.0))


def _drawn(tensor: torch.Tensor) -> torch.Tensor:
    """Random numbers for what is in the storage of a tensor, or for the first of them."""
    count = min(DRAWN, _storage_numbers(tensor))
    return made_up(torch.empty(count, dtype=tensor.dtype, device=tensor.device))


def _repeated(tensor: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """A tensor that lies as ``tensor``, whose storage is filled with ``numbers``."""
    count = _storage_numbers(tensor)
    if count > len(numbers):
        numbers = numbers.repeat(-(-count // len(numbers)))
    return numbers.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _storage_numbers(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.itemsize


def comparisons(given: Sequence[torch.Tensor], results: int = 0) -> int:
    """How often a run that takes such tensors, and makes so many numbers, is compared."""
    numbers = sum(tensor.numel() for tensor in given)
    if results:
        numbers = min(numbers, SHOWN_BY * results)
    least = 1 if results >= PLENTY else LEAST_DRAWS
    return min(MOST_DRAWS, max(least, ENOUGH // max(1, numbers)))


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers of a tensor, from all over it."""
    flat = tensor.flatten()
    return flat[:: max(1, len(flat) // SOME)]
