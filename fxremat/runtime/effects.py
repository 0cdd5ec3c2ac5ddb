"""Operations with an ordered effect, such as printing, which must run exactly once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Effect:
    """Runs an operator that does more than compute its results.

    A call takes a token, and further arguments. It returns another token, and the results of the
    operator. Tokens have no elements; they order effects, because each effect reads the token of
    the one before it.

    Args:
        run: takes and returns what a call does.
        results: what describes each result but the token: shape, strides, dtype and device of a
            tensor, or ``None`` for anything else.

    Attributes:
        repeatable: ``False``, since a second run would have the effect again.
    """

    repeatable = False

    def __init__(
        self, run: Callable[..., tuple[Any, ...]], results: Sequence[tuple[Any, ...] | None]
    ) -> None:
        self.__name__ = self.__qualname__ = run.__name__
        self.__module__ = "fxremat.effects"
        self._run, self._results = run, tuple(results)

    def __repr__(self) -> str:
        return self.__name__

    def __call__(self, token: Tensor | None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Run the operator, and return a token and the results."""
        return self._run(token, *args, **kwargs)

    def stand_in(self, *_args: Any, **_kwargs: Any) -> tuple[Any, ...]:
        """Return results of the same sizes, without any effect."""
        made = (
            None
            if result is None
            else torch.empty_strided(*result[:2], dtype=result[2], device=result[3])
            for result in self._results
        )
        return torch.empty(0), *made
