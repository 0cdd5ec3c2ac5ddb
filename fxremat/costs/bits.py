"""Whether operations that are computed in parts give the bits that they give at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fxremat.costs.cache import CostCache
from fxremat.costs.execute import undisturbed
from fxremat.costs.synthetic import made_up
from fxremat.passes.joint.digest import written
from fxremat.passes.joint.graph import is_tensor
from fxremat.passes.joint.sizes import evaluated
from fxremat.passes.split.parts import (
    INTEGERS,
    Changed,
    Parts,
    Witness,
    are_equal,
    is_true,
    same_bits,
)
from fxremat.passes.split.rules import Result
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

NOT_FINITE = (float("inf"), -float("inf"), float("nan"))

ZEROS, OTHERS = 1 / 4, 1 / 256
"""Shares of one comparison's numbers that are zeros of either sign, and that are not finite."""

SINGLE = (0.5, 0.0, -0.0, float("nan"), float("inf"))
"""What a tensor without dimensions may be."""

CANDIDATES, AT_ONCE = 1 << 18, 1 << 13
"""Among so many numbers some are looked for that show in which places a pointwise kernel computes
by which formula; so many are computed at once, as planning has a budget too."""


def other_bits(
    parts: Parts, given: Sequence[torch.Tensor], sizes: tuple[int, ...], *, cache: CostCache
) -> Changed:
    """Return which bits of a run differ from those of its operations at once.

    The run is compared as it is emitted, with random numbers, and with some that are zeros of
    either sign, infinite or NaN. A single operation is compared with random numbers several times,
    and with zeros of either sign. A run's witnesses are given numbers of which a pointwise kernel
    computes another value in a vector than one by one: these show each place where it does so in
    the parts and not at once, or the other way round.

    Args:
        parts: the run.
        given: tensors that lie as those that it takes; their numbers do not matter.
        sizes: that it follows.
        cache: answers; new ones are added.

    Ensures: the random generators are as before.

    All results are returned where there is no memory to compute the run twice, or a kernel refuses
    made-up numbers, as a binary cross entropy does those outside of 0 to 1.
    """
    key = (str(parts), *sizes, *map(tensor_key, given))
    if key not in cache.other_bits:
        every = Changed(frozenset(range(len(parts.outputs))))
        with undisturbed(parts.device):
            try:
                cache.other_bits[key] = _other_bits(parts, given, sizes, cache)
            except torch.OutOfMemoryError:
                return every
            except (RuntimeError, ValueError, IndexError) as error:
                LOG.info("%s stays whole, as it takes no made-up numbers: %s", parts, error)
                cache.other_bits[key] = every
            finally:
                if parts.device.type == "cuda":  # blocks left over would be handed out whole
                    torch.cuda.empty_cache()
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
        tensors = [fill(tensor) for tensor in given]
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
    return zip(_listed(whole), _listed(changed), strict=True)


def _shows(
    witness: Witness,
    parts: Parts,
    given: Sequence[torch.Tensor],
    sizes: tuple[int, ...],
    cache: CostCache,
) -> bool:
    """Whether a pointwise operation computes a number by another formula than at once."""
    named = dict(zip(parts.hints, sizes, strict=True))
    own = [named[name] for name in witness.parts.hints]
    numbers = contrast(witness.node, cache)
    args = [*(_random(given[place]) for place in witness.taken), *numbers, *own]
    return bool(numbers) and not all(
        are_equal(one, other) for one, other in _both(witness.parts, args)
    )


def _random(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that lies as ``tensor``: random numbers."""
    return _repeated(tensor, _drawn(tensor))


def _special(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that lies as ``tensor``: random numbers, zeros of either sign, some not finite."""
    return _repeated(tensor, _with_special(_drawn(tensor), ZEROS, OTHERS))


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that lies as ``tensor``: zeros of either sign."""
    return _repeated(tensor, _with_special(_drawn(tensor), zeros=1.0, others=0.0))


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


def _with_special(numbers: torch.Tensor, zeros: float, others: float) -> torch.Tensor:
    """Random numbers some of which are made zeros of either sign, infinite or NaN."""
    if not numbers.is_floating_point():
        return numbers
    drawn = torch.rand(numbers.shape, device=numbers.device)
    numbers.masked_fill_(drawn < zeros, 0.0).masked_fill_(drawn < zeros / 2, -0.0)
    for i, number in enumerate(NOT_FINITE):
        from_, to = (1 - others * (i + end) / len(NOT_FINITE) for end in (1, 0))
        numbers.masked_fill_((drawn >= from_) & (drawn < to), number)
    return numbers


def contrast(node: fx.Node, cache: CostCache) -> list[torch.Tensor]:
    """Find numbers of which a pointwise operation's kernel computes another value in a vector than
    one by one.

    Candidates for a half-precision operation of one tensor are all numbers; others are random,
    special, or any bits.

    Args:
        node: the operation.
        cache: answers; a new one is added.

    Returns one for each tensor that it reads; none where it computes all candidates alike, or is
    not for a CPU.
    """
    tensors = [n for n in node.all_input_nodes if is_tensor(n)]
    if not all(n.meta["val"].device.type == "cpu" for n in tensors):
        return []
    read = [(n.meta["val"].dtype, n.meta["val"].dim() > 0) for n in tensors]
    places = {n: i for i, n in enumerate(tensors)}
    arguments = written((node.args, dict(node.kwargs)), lambda n: f"%{places.get(n)}")
    key = (str(node.target), arguments, str(read))
    if key not in cache.contrasts:
        cache.contrasts[key] = _contrast(node, tensors)
    return cache.contrasts[key]


def _contrast(node: fx.Node, tensors: Sequence[fx.Node]) -> list[torch.Tensor]:
    has_single = not all(n.meta["val"].dim() for n in tensors)
    for single in SINGLE if has_single else SINGLE[:1]:
        for start in range(0, CANDIDATES, AT_ONCE):
            dense = [_candidates(n.meta["val"], single, start, len(tensors)) for n in tensors]
            one_by_one = [torch.stack([t, t], -1)[..., 0] if t.dim() else t for t in dense]
            try:
                results = [_computed(node, tensors, values) for values in (dense, one_by_one)]
            except RuntimeError:  # it does not take a single dimension
                return []
            differs = torch.stack([~same_bits(a, b) for a, b in zip(*results, strict=True)]).any(0)
            if differs.any():
                first = int(differs.nonzero()[0])
                return [t[first].clone() if t.dim() else t for t in dense]
    return []


def _computed(
    node: fx.Node, tensors: Sequence[fx.Node], values: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Results of an operation for ``values`` in place of the tensors that it reads."""
    given = dict(zip(tensors, values, strict=True))

    def value_of(read: fx.Node) -> Any:
        return given[read] if read in given else read.meta["val"]

    target: Any = node.target
    args: Any = fx.node.map_arg(node.args, value_of)
    kwargs: Any = fx.node.map_arg(node.kwargs, value_of)
    return _listed(target(*args, **kwargs))


def _candidates(tensor: torch.Tensor, single: float, start: int, count: int) -> torch.Tensor:
    """Numbers from ``start`` on for one of ``count`` tensors; ``single`` for one without
    dimensions.
    """
    if not tensor.dim():
        return torch.full((), single).to(tensor.dtype)
    made = torch.empty(AT_ONCE, dtype=tensor.dtype)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return made.random_(2)
    made.normal_()
    if tensor.is_floating_point():
        bits = INTEGERS[tensor.itemsize]
        if count == 1 and bits is torch.int16:  # all of them, each several times
            each = (torch.arange(start, start + AT_ONCE) % 2**16 - 2**15).to(bits)
            return each.view(tensor.dtype)
        any_bits = torch.empty(AT_ONCE, dtype=bits).random_(torch.iinfo(bits).min, None)
        made = torch.where(torch.rand(AT_ONCE) < 1 / 4, any_bits.view(tensor.dtype), made)
    return _with_special(made, zeros=1 / 4, others=1 / 8)


def comparisons(given: Sequence[torch.Tensor], results: int = 0) -> int:
    """How often a run that takes such tensors, and makes so many numbers, is compared."""
    numbers = sum(tensor.numel() for tensor in given)
    if results:
        numbers = min(numbers, SHOWN_BY * results)
    least = 1 if results >= PLENTY else LEAST_DRAWS
    return min(MOST_DRAWS, max(least, ENOUGH // max(1, numbers)))


def _listed(results: Any) -> list[torch.Tensor]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers of a tensor, from all over it."""
    flat = tensor.flatten()
    return flat[:: max(1, len(flat) // SOME)]
