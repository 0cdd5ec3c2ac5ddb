"""The way from a call into captured code: the first sizes as numbers, all others as symbols."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fxremat import torch_compat
from fxremat.errors import CaptureError, SizesError
from fxremat.frontend.capture import StepCompiler


class Backend:
    """What Dynamo is given for a :class:`StepCompiler`, which goes when its owner does.

    Dynamo keeps this, and what is made for its graphs, in a cache of the user's functions and among
    their globals, for as long as these are there.
    """

    def __init__(self, compiler: StepCompiler) -> None:
        self.compiler = weakref.ref(compiler)

    def __call__(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Compile one graph of Dynamo's."""
        compiler = self.compiler()
        assert compiler is not None  # nobody else calls
        return compiler(*args, **kwargs)


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
        # All sizes at once, not each as it is seen to change.
        vary = contextlib.nullcontext() if self._marked else torch_compat.sizes_vary(tensors)
        try:
            with vary:
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


def _is_ours(found: object) -> bool:
    """Whether a backend of Dynamo's is a :class:`Backend`, or the one that is known by name."""
    return isinstance(found, Backend) or getattr(found, "__module__", "") == _BY_NAME


_BY_NAME = "fxremat.frontend.backend"


def _compiler_of(found: object) -> StepCompiler | None:
    return found.compiler() if isinstance(found, Backend) else None


def _captured_too_often(found: object, setting: str, limit: int) -> BaseException:
    error = CaptureError(
        f"this model cannot be captured once more: {setting} is {limit}, counted over all that "
        "share its code, and torch would run it without a plan. Let what changes from call to "
        "call be one capture (dynamic=True or torch._dynamo.mark_dynamic for sizes, tensors for "
        "numbers), or raise the limit"
    )
    compiler = _compiler_of(found)
    return error if compiler is None else compiler.refused(error)


def _runs_as_it_is(found: object, code: CodeType) -> bool:
    compiler = _compiler_of(found)
    return compiler is not None and compiler.runs_as_it_is(code)


torch_compat.never_uncompiled(_is_ours, _captured_too_often, _runs_as_it_is)
