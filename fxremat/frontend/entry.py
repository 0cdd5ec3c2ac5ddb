"""The way from a call into captured code: the first sizes as numbers, all others as symbols."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fxremat import torch_compat
from fxremat.errors import SizesError


class Entry:
    """Calls a forward as it was captured.

    A capture with symbols serves all sizes. The first one has its own, with numbers: operations are
    fewer there, and what was planned for it is not planned less exactly once other sizes come.

    Args:
        forward: what is captured.
        backend: of Dynamo.
        dynamic: ``True``: symbols from the first call on; ``False``: never; ``None``: from the
            second size on, where what is computed can follow them.
        whole: it must be one graph.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        backend: Callable[..., Any],
        *,
        dynamic: bool | None,
        whole: bool,
    ) -> None:
        self._dynamic = dynamic
        self._first: list[object] | None = None
        self._given = forward, backend, whole
        own, others = (torch_compat.with_code_of_its_own(forward) for _ in range(2))
        self._own = torch_compat.compile_function(
            own, backend, whole=whole, dynamic=dynamic is not False
        )
        self._others = torch_compat.compile_function(others, backend, whole=whole, dynamic=True)
        self._marked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, captured anew where it must be."""
        if self._dynamic is False:
            return self._own(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        sizes: list[object] = [t.shape for t in tensors]
        sizes += [x for x in leaves if type(x) is int]
        if self._first is None:
            self._first = sizes
        if sizes == self._first and not self._dynamic:
            return self._own(*args, **kwargs)
        if not self._marked:  # all sizes at once, not each as it is seen to change
            torch_compat.let_sizes_vary(tensors)
        try:
            results = self._others(*args, **kwargs)
        except torch_compat.capture_failures() as error:
            whole = self._given[-1]  # else something may have run
            cause = torch_compat.failure_cause(error)
            if self._dynamic or not whole or not isinstance(cause, SizesError):
                raise
            self._only_numbers()
            return self._own(*args, **kwargs)
        self._marked = True
        return results

    def _only_numbers(self) -> None:
        """Capture each size by itself from now on: what is computed cannot follow symbols."""
        forward, backend, whole = self._given
        own = torch_compat.with_code_of_its_own(forward)
        self._own = torch_compat.compile_function(own, backend, whole=whole, dynamic=False)
        self._dynamic = False
