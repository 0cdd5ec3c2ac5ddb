"""Operations with an ordered effect, such as printing, which must run exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Effect:
    """Runs an operator that does more than compute its results.

    A call takes a token, and the arguments of the operator. It returns another token, and the
    results of the operator. Tokens have no elements; they order effects, because each effect reads
    the token of the one before it.

    Args:
        operator: the operator.
        results: each of its results as :func:`empty_results` makes it: shape, strides, dtype and
            device of a tensor, or ``None`` for anything else.

    Attributes:
        repeatable: ``False``, since a second run would have the effect again.
    """

    repeatable = False

    def __init__(self, operator: Any, results: Sequence[tuple[Any, ...] | None]) -> None:
        self.__name__ = self.__qualname__ = f"effect_of_{operator.__name__.replace('.', '_')}"
        self.__module__ = "fxremat.effects"
        self.operator, self._results = operator, tuple(results)

    def __repr__(self) -> str:
        return self.__name__

    def __call__(self, _token: Tensor | None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Run the operator, and return a token and the results."""
        results = self.operator(*args, **kwargs)
        return torch.empty(0), *(results if isinstance(results, tuple) else (results,))

    def stand_in(self, *_args: Any, **_kwargs: Any) -> tuple[Any, ...]:
        """Return results of the same sizes, without any effect."""
        made = (
            None
            if result is None
            else torch.empty_strided(*result[:2], dtype=result[2], device=result[3])
            for result in self._results
        )
        return torch.empty(0), *made
