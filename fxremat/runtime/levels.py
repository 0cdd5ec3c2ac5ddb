"""What a step really allocates, phase by phase, seen by the allocator's own events."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from fxremat import torch_compat
from fxremat.errors import CostError

FORWARD, TURN, BACKWARD, AFTER = "forward", "turn", "backward", "after"
"""Phases of a step; what comes last is none of it."""


@dataclass(frozen=True, slots=True)
class Levels:
    """Bytes that a step had allocated, over those at its begin.

    Attributes:
        forward_bytes: most during the forward.
        left_bytes: at its end.
        turn_bytes: most from there to the backward.
        taken_bytes: at the begin of the backward; ``None``: none was seen.
        backward_bytes: most until the backward had ended.
    """

    forward_bytes: int
    left_bytes: int
    turn_bytes: int
    taken_bytes: int | None = None
    backward_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Most during forward and backward."""
        return max(self.forward_bytes, self.turn_bytes, self.backward_bytes)

    def without(self, nbytes: int) -> Levels:
        """Where so much more was freed unseen between the forward and the backward."""
        if self.taken_bytes is None or not nbytes:
            return self
        return replace(
            self,
            taken_bytes=self.taken_bytes - nbytes,
            backward_bytes=self.backward_bytes - nbytes,
        )


class Watcher:
    """Watches one step of a model at a time, in the thread that runs its forward.

    A profiler cannot be stopped inside a backward. So it ends with the graph of the step, with the
    next forward, or when somebody else needs the thread's profiler.
    """

    def __init__(self) -> None:
        self._log: torch_compat.AllocationLog | None = None
        self._thread: threading.Thread | None = None
        self._step: weakref.ref[object] | None = None
        self._tell: Callable[[Levels], None] = _nobody
        self._on_cuda = False
        self._gone: tuple[int, ...] = ()

    def begin(self, device: torch.device, tell: Callable[[Levels], None]) -> bool:
        """Watch a forward that begins, and its step; whether that can be.

        Args:
            device: of the step.
            tell: is told what was seen, when it ends.
        """
        if self._thread is not None and not self._thread.is_alive():
            self._forget()
        if self._log is not None or torch_compat.current_backward() >= 0:
            return False  # another thread's; or a forward that a backward runs again
        log = torch_compat.AllocationLog(device, make_way=self.end)
        try:
            log.__enter__()
        except CostError:
            return False
        self._log, self._tell, self._step = log, tell, None
        self._thread = threading.current_thread()
        self._on_cuda, self._gone = device.type == "cuda", ()
        self._mark(FORWARD)
        return True

    def left(self, step: object) -> None:
        """The forward has left ``step``."""
        if self._is_here() and self._step is None:
            self._step = weakref.ref(step)
            self._mark(TURN)

    def is_watching(self, step: object) -> bool:
        """Whether it is ``step`` that is watched."""
        return self._log is not None and self._step is not None and self._step() is step

    def until_gone(self, graph: object) -> None:
        """End at the latest when ``graph``, which lives as long as the step's graph, is gone."""
        weakref.finalize(graph, self._end_of, self._log).atexit = False

    def back(self, *, gone: Sequence[int] = ()) -> None:
        """The backward of the watched step begins.

        Args:
            gone: bytes of each tensor that was there before the forward, and is not any more. A
                CPU's allocator tells of those alone that an earlier log has seen made.
        """
        self._gone = () if self._on_cuda else tuple(gone)
        self._mark(BACKWARD)
        torch_compat.after_backward(self.after)

    def after(self) -> None:
        """The backward of the watched step has ended, though another may go on."""
        self._mark(AFTER)

    def end(self) -> None:
        """Tell what was seen, if something is watched in this thread."""
        if not self._is_here():
            return
        log, self._log = self._log, None
        assert log is not None
        log.__exit__()
        tell, self._tell = self._tell, _nobody
        tell(_levels(log.events).without(_unseen_bytes(log.events, self._gone)))

    def _forget(self) -> None:
        """The thread is gone in which something was watched: nothing can be told of it."""
        log, self._log = self._log, None
        if log is not None:
            log.forget()
        self._thread, self._tell = None, _nobody

    def _end_of(self, log: object) -> None:
        if self._log is log:
            self.end()

    def _is_here(self) -> bool:
        here = self._log is not None and threading.current_thread() is self._thread
        return here and torch_compat.current_backward() < 0

    def _mark(self, phase: str) -> None:
        if self._log is not None:
            self._log.mark(phase)


def _nobody(_seen: Levels) -> None:
    """Nobody asks."""


def _unseen_bytes(events: list[tuple[str, int]], gone: tuple[int, ...]) -> int:
    """What no event tells of ``gone``; an event of the same bytes is taken for one."""
    seen = Counter(-change for phase, change in events if phase == TURN)
    return sum(nbytes * count for nbytes, count in (Counter(gone) - seen).items())


def _levels(events: list[tuple[str, int]]) -> Levels:
    now = 0
    first: dict[str, int] = {}
    most: dict[str, int] = {}
    for phase, change in events:
        first.setdefault(phase, now)
        most.setdefault(phase, now)
        now += change
        most[phase] = max(most[phase], now)
    left = next((first[phase] for phase in (TURN, BACKWARD, AFTER) if phase in first), now)
    taken = first.get(BACKWARD, first.get(AFTER))
    return Levels(
        forward_bytes=most.get(FORWARD, 0),
        left_bytes=left,
        turn_bytes=most.get(TURN, left),
        taken_bytes=taken,
        backward_bytes=most.get(BACKWARD, 0),
    )
