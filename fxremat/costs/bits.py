"""Whether operations that are computed in parts give the bits that they give at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxremat.costs.cache import CostCache
from fxremat.costs.execute import undisturbed
from fxremat.costs.synthetic import made_up
from fxremat.passes.joint.masks import BACKWARD, FORWARD, causal_arguments, causal_mask
from fxremat.passes.split.parts import Parts
from fxremat.passes.split.rules import Result
from fxremat.passes.stages.block import tensor_key

LEAST_DRAWS, MOST_DRAWS, ENOUGH = 2, 16, 1 << 20
"""How often an operation is compared, each time with other numbers: at least twice, and until so
many numbers were. Where a kernel of a product rounds otherwise in parts, most numbers show it; a
pointwise one may differ in the few at the end of a part, and not each number shows it."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""As large as a number, by its bytes."""

SOME = 4096
"""Numbers among which a finite one is looked for, at the least where there are so many."""

Whole = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""Computes at once what a run computes in parts, of the tensors that it takes."""


def keeps_bits(
    parts: Parts,
    given: Sequence[torch.Tensor],
    sizes: tuple[int, ...],
    *,
    whole: Whole | None,
    cache: CostCache,
) -> bool:
    """Whether a run gives the bits that it gives at once, of made-up numbers, each time.

    Args:
        parts: the run.
        given: tensors that lie as those that it takes; their numbers do not matter.
        sizes: that it follows.
        whole: computes it at once; ``None``: as ``parts`` does in one part.
        cache: answers; new ones are added.

    Ensures: the random generators are as before.

    Returns ``False``, too, where there is no memory to compute it twice.
    """
    key = (str(parts), whole is None, *sizes, *map(tensor_key, given))
    if key not in cache.keeps_bits:

        def once() -> bool:
            tensors = [made_up(tensor) for tensor in given]
            args = [*tensors, *sizes]
            expected = parts.run(args, part_rows=None) if whole is None else whole(tensors)
            return _are_same(parts, expected, parts.run(args, part_rows=parts.part_rows))

        with undisturbed(parts.device):
            try:
                cache.keeps_bits[key] = all(once() for _ in range(_draws(given)))
            except torch.OutOfMemoryError:
                return False
            finally:
                if parts.device.type == "cuda":  # blocks left over would be handed out whole
                    torch.cuda.empty_cache()
    return cache.keeps_bits[key]


def same_bits_without_mask(node: fx.Node, *, cache: CostCache) -> bool:
    """Whether attention has the bits of a causal mask with ``is_causal``, of made-up numbers.

    Args:
        node: an operation of :data:`fxremat.passes.joint.masks.IS_CAUSAL`.
        cache: answers; a new one is added.

    Ensures: the random generators are as before.

    Returns ``False`` also where memory does not suffice to compute it twice.
    """
    arguments = [n.meta["val"] if isinstance(n, fx.Node) else n for n in node.args]
    options = {k: v.meta["val"] if isinstance(v, fx.Node) else v for k, v in node.kwargs.items()}
    items = (*arguments, *options.values())
    key = (str(node.target), *options, *map(tensor_key, items))
    if key not in cache.keeps_bits:
        tensors = [item for item in arguments if isinstance(item, torch.Tensor)]
        with undisturbed(tensors[0].device):
            try:
                cache.keeps_bits[key] = all(
                    _is_same_without_mask(node.target, arguments, options)
                    for _ in range(_draws(tensors))
                )
            except torch.OutOfMemoryError:
                return False
    return cache.keeps_bits[key]


def _is_same_without_mask(
    operation: Any, arguments: Sequence[Any], options: Mapping[str, Any]
) -> bool:
    """Whether ``operation`` gives the same bits once, with a causal mask and without."""
    args = [made_up(a) if isinstance(a, torch.Tensor) else a for a in arguments]
    mask = causal_mask(options["attn_mask"])
    others = {name: value for name, value in options.items() if name != "attn_mask"}
    if operation is BACKWARD:
        args[4:6] = FORWARD(*args[1:4], attn_mask=mask, **others)
    results = operation(*args, attn_mask=mask, **others)
    of_causal = operation(*causal_arguments(operation, tuple(args)), **others)
    return all(map(_are_equal, results, of_causal))


def _draws(given: Sequence[torch.Tensor]) -> int:
    """How often a run that takes such tensors is compared."""
    numbers = sum(tensor.numel() for tensor in given)
    return min(MOST_DRAWS, max(LEAST_DRAWS, ENOUGH // max(1, numbers)))


def _are_same(parts: Parts, expected: Any, found: Any) -> bool:
    """Whether results of a run have the same bits, but for those that nobody reads.

    Those without a finite number say nothing.
    """
    one, other = (list(r) if isinstance(r, (tuple, list)) else [r] for r in (expected, found))
    return all(
        output.way is Result.UNREAD or (_is_told(_some(a).isfinite().any()) and _are_equal(a, b))
        for output, a, b in zip(parts.outputs, one, other, strict=True)
    )


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers of a tensor, from all over it."""
    flat = tensor.flatten()
    return flat[:: max(1, len(flat) // SOME)]


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors have the same bits."""
    pair = [torch.view_as_real(t) if t.is_complex() else t for t in (one, other)]
    pair = [t.contiguous().view(INTEGERS[t.itemsize]) for t in pair]
    return torch.equal(*pair) if one.device.type == "cpu" else _is_told(torch.eq(*pair).all())


def _is_told(answer: torch.Tensor) -> bool:
    """An answer that a device has: ``bool`` alone would lock host memory for it."""
    return bool(answer.cpu())
