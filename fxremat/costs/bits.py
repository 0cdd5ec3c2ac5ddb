"""Whether operations that are computed in parts give the bits that they give at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxremat.costs.cache import CostCache
from fxremat.costs.execute import undisturbed
from fxremat.costs.synthetic import made_up
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
                cache.keeps_bits[key] = all(once() for _ in range(comparisons(given)))
            except torch.OutOfMemoryError:
                return False
            finally:
                if parts.device.type == "cuda":  # blocks left over would be handed out whole
                    torch.cuda.empty_cache()
    return cache.keeps_bits[key]


def comparisons(given: Sequence[torch.Tensor]) -> int:
    """How often a run that takes such tensors is compared."""
    numbers = sum(tensor.numel() for tensor in given)
    return min(MOST_DRAWS, max(LEAST_DRAWS, ENOUGH // max(1, numbers)))


def _are_same(parts: Parts, expected: Any, found: Any) -> bool:
    """Whether results of a run have the same bits, but for those that nobody reads.

    Those without a finite number say nothing.
    """
    one, other = (list(r) if isinstance(r, (tuple, list)) else [r] for r in (expected, found))
    return all(
        output.way is Result.UNREAD or (_is_told(_some(a).isfinite().any()) and are_equal(a, b))
        for output, a, b in zip(parts.outputs, one, other, strict=True)
    )


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers of a tensor, from all over it."""
    flat = tensor.flatten()
    return flat[:: max(1, len(flat) // SOME)]


def are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors have the same bits."""
    pair = [torch.view_as_real(t) if t.is_complex() else t for t in (one, other)]
    pair = [t.contiguous().view(INTEGERS[t.itemsize]) for t in pair]
    return torch.equal(*pair) if one.device.type == "cpu" else _is_told(torch.eq(*pair).all())


def _is_told(answer: torch.Tensor) -> bool:
    """An answer that a device has: ``bool`` alone would lock host memory for it."""
    return bool(answer.cpu())
