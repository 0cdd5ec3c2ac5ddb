"""How many threads a solver may start of its own."""

from __future__ import annotations

import os

import numba


def thread_count(*, most: int | None = None) -> int:
    """The cores that this process may run on, or as many threads as numba may, if that is less.

    ``NUMBA_NUM_THREADS`` sets the latter: who keeps compiled code to few threads means this
    package's, too.

    Args:
        most: what no caller wants more than; ``None``: there is no such number.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    threads: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]  # set at import
    allowed = min(cores, threads)
    return allowed if most is None else min(allowed, most)
