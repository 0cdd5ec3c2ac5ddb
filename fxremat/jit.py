"""numba's compiler of loops, and its cache where there is a folder for that."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., Any])


def njit(*, cache: bool = False, **options: Any) -> Callable[[F], F]:
    """``numba.njit``, without its cache where no folder can be written to.

    As where the package is installed read-only, for a user without a home.
    """

    def made(function: F) -> F:
        compiled: F
        try:
            compiled = numba.njit(cache=cache, **options)(function)
        except RuntimeError:  # before anything is compiled
            if not cache:
                raise
            _warn_once()
            compiled = numba.njit(**options)(function)
        return compiled

    return made


@functools.cache
def _warn_once() -> None:
    logging.getLogger("fxremat").warning(
        "numba has no folder in which it can keep compiled loops of the planner, so each process "
        "compiles them for itself, which takes a minute: set NUMBA_CACHE_DIR to a folder that this "
        "user can write to"
    )
