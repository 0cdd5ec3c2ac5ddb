"""A wrapper of ``numba.njit`` that works without a folder for numba's cache."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., Any])


def njit(*, cache: bool = False, **options: Any) -> Callable[[F], F]:
    """Return the decorator ``numba.njit(...)``, without its cache where no folder is writable.

    That is so, for example, where the package is installed read-only and the user has no home.
    """

    def decorate(function: F) -> F:
        compiled: F
        try:
            compiled = numba.njit(cache=cache, **options)(function)
        except RuntimeError:  # raised before anything is compiled
            if not cache:
                raise
            _warn_once()
            compiled = numba.njit(**options)(function)
        return compiled

    return decorate


@functools.cache
def _warn_once() -> None:
    logging.getLogger("fxremat").warning(
        "numba has no writable cache folder, so every process compiles the planner's loops again, "
        "which takes about a minute: set NUMBA_CACHE_DIR to a folder that this user can write to"
    )
