"""Threads that solvers start."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numba


def thread_count(*, most: int | None = None) -> int:
    """Return the number of cores that this process may use, or of numba's threads if that is less.

    ``NUMBA_NUM_THREADS`` sets the latter: whoever limits the threads of compiled code means this
    package's too.

    Args:
        most: an upper bound; ``None``: none.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    threads: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]  # set at import
    allowed = min(cores, threads)
    return allowed if most is None else min(allowed, most)


class Crew:
    """A pool of at most ``most`` threads; if one is enough, tasks run in the calling thread.

    These threads are not numba's, which may not be used after a fork, nor in some builds from two
    threads at once.
    """

    def __init__(self, *, most: int) -> None:
        self.size = thread_count(most=most)
        self._pool = ThreadPoolExecutor(self.size) if self.size > 1 else None

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def run(self, tasks: Sequence[Callable[[], object]]) -> None:
        """Run all tasks, and return when they are done."""
        if self._pool is None:
            for task in tasks:
                task()
            return
        for future in [self._pool.submit(task) for task in tasks]:
            future.result()
