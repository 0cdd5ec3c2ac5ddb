"""Progress of planning, one line per phase, on the standard error output or in the log."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from fxremat import optional

if TYPE_CHECKING:
    from rich.console import RenderableType

LOG = logging.getLogger("fxremat")

CAPTURE, MEASURE, PLAN, WRITE = "capture", "measure", "plan", "write"

COMPILE = "compiling the planner, once"
"""Name of the phase in which numba compiles the planner's loops, which numba then caches."""

REFRESH_S = 0.1
"""Shortest time between two updates of a bar, in seconds."""

LOG_EVERY_S = 10.0
"""Time between two log records of one phase, in seconds."""


class Progress(Protocol):
    """A callback that is notified of progress. A new phase name ends the previous phase."""

    def __call__(self, what: str, done: int = 0, total: int = 0, /) -> None:
        """Show how far a phase is.

        Args:
            what: name of the phase.
            done: number of parts that are done.
            total: number of parts; 0 where it is unknown.
        """


def silent(_what: str, _done: int = 0, _total: int = 0, /) -> None:
    """Show nothing: a :class:`Progress` for plans that are made inside a training step."""


Note = Callable[[int], object]
"""A callback that takes the most bytes that something held at once while a step was measured."""


def unnoted(_nbytes: int) -> None:
    """Ignore a number of bytes: a :data:`Note` for measuring outside of a training step."""


def wanted() -> bool:
    """Return whether progress is to be shown at all; ``FXREMAT_PROGRESS=0`` turns it off."""
    return os.environ.get("FXREMAT_PROGRESS") != "0"


def on_terminal() -> bool:
    """Return whether the standard error output is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


_timings: list[dict[str, float]] = []
"""The dicts of all :func:`timed` blocks that are entered now."""


@contextlib.contextmanager
def timed() -> Iterator[dict[str, float]]:
    """Yield a dict to which the seconds of each phase that ends in the block are added, by name.

    Phases are timed even if progress is not wanted.
    """
    seconds: dict[str, float] = {}
    _timings.append(seconds)
    try:
        yield seconds
    finally:
        _timings[:] = [own for own in _timings if own is not seconds]


@contextlib.contextmanager
def shown(*, here: bool = True) -> Iterator[Progress]:
    """Yield a callback that shows phases as bars on a terminal, else as records of the logger.

    The bars are rich's, the logger is ``"fxremat"``. A phase that fails gets no line: its error
    says what failed.

    Args:
        here: whether this process shows progress; pass ``False`` where another process does.
    """
    line: _Logged = _Unshown()
    if here and wanted():
        line = _Logged()
        if on_terminal() and optional.find("rich.live") is not None:
            line = _Bar()
    elif not _timings:
        yield silent
        return
    phases = _Phases(line)
    try:
        yield phases
        phases.end()
    finally:
        phases.close()


class _Logged:
    """Logs a line when a phase ends, and one every ten seconds while it runs.

    The phase :data:`COMPILE` gets a line at its start as well. A phase may report nothing for a
    long time, for example while torch captures a model, so a thread writes these lines. The thread
    does nothing else.
    """

    def __init__(self) -> None:
        self._said = False
        self._now = "", 0, 0
        self._begun_s = 0.0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def show(self, what: str, done: int, total: int) -> None:
        if what != self._now[0]:
            self._begun_s = time.perf_counter()
        self._now = what, done, total
        if what == COMPILE and not self._said:
            self._said = True
            LOG.info("%s …", what)
        if self._thread is None:
            self._thread = threading.Thread(target=self._repeat, name="fxremat", daemon=True)
            self._thread.start()

    def _repeat(self) -> None:
        while not self._closed.wait(LOG_EVERY_S):
            (what, done, total), seconds = self._now, time.perf_counter() - self._begun_s
            LOG.info("%s …%s %.0f s", what, f" {done}/{total}," if total else "", seconds)

    def end(self, what: str, seconds: float) -> None:
        LOG.info("%s: %.1f s", what, seconds)

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()


class _Unshown(_Logged):
    """Shows nothing: phases are only timed."""

    def show(self, what: str, done: int, total: int) -> None:
        pass

    def end(self, what: str, seconds: float) -> None:
        pass


class _Bar(_Logged):
    """Shows a phase as one line of the terminal that is redrawn while the phase runs.

    No thread redraws it, since a thread would disturb measurements. One line overwrites nothing
    that others print meanwhile.
    """

    def __init__(self) -> None:
        from rich.console import Console  # noqa: PLC0415  # importing fxremat must not load rich

        super().__init__()
        self._console = Console(stderr=True)
        self._live: Any = None
        self._what, self._next_s = "", 0.0

    def show(self, what: str, done: int, total: int) -> None:
        from rich.live import Live  # noqa: PLC0415

        now_s = time.perf_counter()
        if what == self._what and now_s < self._next_s:
            return
        self._what, self._next_s = what, now_s + REFRESH_S
        if self._live is None:
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        self._live.update(_row(what, done, total), refresh=True)

    def end(self, what: str, seconds: float) -> None:
        self.close()
        self._console.print(f"fxremat: {what}: {seconds:.1f} s", markup=False, highlight=False)

    def close(self) -> None:
        live, self._live, self._what = self._live, None, ""
        if live is not None:
            live.stop()


def _row(what: str, done: int, total: int) -> RenderableType:
    """Return the line of the terminal that shows a running phase: its name, a bar, and a count."""
    from rich.progress_bar import ProgressBar  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    row = Table.grid(padding=(0, 1))
    cells: list[RenderableType] = [Text(f"fxremat: {what}", no_wrap=True)]
    if total:
        cells += [ProgressBar(total, done, width=30), Text(f"{done}/{total}", no_wrap=True)]
    row.add_row(*cells)
    return row


class _Phases:
    """Measures the time of phases, and separately the time in which numba compiles loops."""

    def __init__(self, line: _Logged) -> None:
        self._line = line
        self._now: tuple[str, int, int] | None = None
        self._begun_s = self._compiling_s = self._compiled_s = 0.0
        self._depth = 0  # compiling a loop compiles the loops that it calls
        self._listening = contextlib.ExitStack()

    def __call__(self, what: str, done: int = 0, total: int = 0, /) -> None:
        if self._now is None or self._now[0] != what:
            self.end()
            self._begun_s = time.perf_counter()
            if what == PLAN:
                self._listen()
        self._now = what, done, total
        self._line.show(*self._now)

    def end(self) -> None:
        """Show how long the running phase took, which has ended, and compiling in it."""
        if self._now is None:
            return
        seconds = time.perf_counter() - self._begun_s
        if self._compiled_s:
            self._end(COMPILE, self._compiled_s)
        self._end(self._now[0], seconds - self._compiled_s)
        self._now, self._compiled_s = None, 0.0

    def _end(self, what: str, seconds: float) -> None:
        self._line.end(what, seconds)
        for own in _timings:
            own[what] = own.get(what, 0.0) + seconds

    def close(self) -> None:
        """Stop listening to numba, and stop showing the running phase."""
        self._listening.close()
        self._line.close()

    def _listen(self) -> None:
        """Have numba call :meth:`compiling`. Importing numba here costs nothing extra."""
        self._listening.close()
        from numba.core import event  # noqa: PLC0415

        phases = self

        class Listener(event.Listener):
            def on_start(self, event: Any) -> None:
                phases.compiling(event, 1)

            def on_end(self, event: Any) -> None:
                phases.compiling(event, -1)

        self._listening.enter_context(event.install_listener("numba:compile", Listener()))

    def compiling(self, event: Any, more: int) -> None:
        """Count the time in which numba compiles a loop of this package.

        ``more`` is 1 when it begins to compile a loop, and -1 when it has compiled it.
        """
        module = event.data["dispatcher"].py_func.__module__ or ""
        if self._now is None or not module.startswith("fxremat."):
            return
        self._depth += more
        if more > 0 and self._depth == 1:
            self._compiling_s = time.perf_counter()
            self._line.show(COMPILE, 0, 0)
        elif self._depth == 0:
            self._compiled_s += time.perf_counter() - self._compiling_s
            self._line.show(*self._now)
