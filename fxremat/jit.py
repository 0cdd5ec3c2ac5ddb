"""Loops that numba compiles: with or without a folder for its cache, and quickly."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numba
from numba.core import event, types
from numba.extending import intrinsic

_njit: Any = numba.njit
_types: Any = types
_event: Any = event

F = TypeVar("F", bound=Callable[..., Any])


def entry(function: F) -> F:
    """Compile a function with numba, for callers in Python.

    It releases the interpreter lock. Where no folder is writable, numba's cache is not used; that
    is so, for example, where the package is installed read-only and the user has no home.
    """
    return _compiled(function)


def helper(function: F) -> F:
    """Compile a function with numba, for callers that numba compiles; Python cannot call it.

    numba takes half the time or less if it need not convert Python's arguments. An option of
    numba, ``inline="always"``, would take longer from the second call on: numba analyzes such a
    function again for each. LLVM inlines the function all the same.

    Raises:
        TypeError: when Python calls it.
    """
    compiled: Any = _compiled(function, no_cpython_wrapper=True)

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise TypeError(f"{function.__qualname__} is a helper, which only compiled code can call")

    # Else numba would register what it compiles, and a call by Python would jump to address 0.
    compiled._insert = lambda *_args, **_kwargs: None
    compiled._compile_for_args = refuse
    return cast(F, compiled)


def _compiled(function: F, **options: bool) -> F:
    options |= {"nogil": True, "no_cfunc_wrapper": True}
    compiled: F
    try:
        compiled = _njit(cache=True, **options)(function)
    except RuntimeError:  # numba has no folder for its cache
        _warn_once()
        compiled = _njit(**options)(function)
    _ignore_literals(compiled)
    return compiled


def _ignore_literals(compiled: Any) -> None:
    """Have numba compile a function once for all integers, not again for each constant argument."""
    template_of = compiled.get_call_template

    def get_call_template(args: Sequence[Any], kws: dict[str, Any]) -> Any:
        unnamed = [_types.unliteral(each) for each in args]
        return template_of(unnamed, {name: _types.unliteral(each) for name, each in kws.items()})

    compiled.get_call_template = get_call_template


def _pointer(_context: Any, array: Any, first: Any) -> tuple[Any, Callable[..., Any]]:
    """Return a pointer to an entry of a contiguous array, which a compiled loop indexes from there.

    numba compiles an access by a pointer in half the time that it takes for one by an array: there
    is no shape, and negative indices do not count from the end. Nothing checks a place, so a loop
    that writes must bound it by itself. The array must outlive the pointer: use it for arguments.

    Args:
        array: an array of any number of dimensions.
        first: the place of the entry, as if the array were flattened.
    """

    if array.layout != "C":
        raise TypeError(f"a pointer needs a contiguous array, but got {array}")

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = context.cast(builder, args[1], signature.args[1], _types.intp)
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.gep(data, [place])

    return _types.CPointer(array.dtype)(array, first), generate


class _WithoutCollection(event.Listener):
    """Pauses Python's garbage collection while numba compiles a loop of this package.

    numba makes so many objects for a while that a fifth of the time would go into collecting them.
    numba compiles in one thread at a time.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._was_enabled = False

    def on_start(self, event: Any) -> None:
        if not self._depth:
            self._was_enabled = _is_ours(event) and gc.isenabled()
            if self._was_enabled:
                gc.disable()
        self._depth += 1

    def on_end(self, _event: Any) -> None:
        self._depth -= 1
        if not self._depth and self._was_enabled:
            gc.enable()


def _is_ours(event: Any) -> bool:
    """Return whether an event of numba's is about a loop of this package."""
    module: str = event.data["dispatcher"].py_func.__module__ or ""
    return module.partition(".")[0] == __name__.partition(".")[0]


pointer: Any = intrinsic(_pointer)
"""See :func:`_pointer`: ``pointer(array, first)`` in compiled code."""

_event.register("numba:compile", _WithoutCollection())


@functools.cache
def _warn_once() -> None:
    logging.getLogger("fxremat").warning(
        "numba has no writable cache folder, so every process compiles the planner's loops again, "
        "which takes some 10 seconds: set NUMBA_CACHE_DIR to a folder that this user can write to"
    )
