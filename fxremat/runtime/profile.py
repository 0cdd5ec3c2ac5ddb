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
"""Phases of a call: its forward, what follows that, its backward, what follows that."""

DONE = "done"
"""What follows a backward, all calls' included."""

MOST_CALLS = 4096
"""Calls of a step that are watched."""

_Events = list[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes that a call had allocated, over those at its begin.

    Attributes:
        forward_bytes: most during the forward.
        left_bytes: at its end.
        turn_bytes: most from there to the backward.
        taken_bytes: at the begin of the backward; ``None``: none was seen.
        backward_bytes: most until the backward had ended.
        begin_bytes: at its begin, over those when the step began.
        after_bytes: most from the end of the forward to the next call.
        before_bytes: most from the end of the backward to the next call.
        gone_bytes: existed when the forward began, and no longer when the backward did.
        released_bytes: of these, outputs of earlier steps.
    """

    forward_bytes: int
    left_bytes: int
    turn_bytes: int
    taken_bytes: int | None = None
    backward_bytes: int = 0
    begin_bytes: int = 0
    after_bytes: int = 0
    before_bytes: int = 0
    gone_bytes: int = 0
    released_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Most during forward and backward."""
        return max(self.forward_bytes, self.turn_bytes, self.backward_bytes)


@dataclass(slots=True)
class _Watched:
    """One call.

    Attributes:
        tell: is told what was seen of it.
        step: that it has left.
        gone: bytes of each tensor that was there before and not any more at its backward, of
            which the log may have no event.
        gone_bytes: of all of them that were there.
        released_bytes: of these, outputs of earlier steps.
        ended: its backward has.
    """

    tell: Callable[[MemoryProfile], None]
    step: weakref.ref[object] | None = None
    gone: tuple[int, ...] = ()
    gone_bytes: int = 0
    released_bytes: int = 0
    ended: bool = False


WATCH_EVERY = 100
"""Where no allocator counts the peaks of steps, one of so many is watched for good."""


class Watcher:
    """Watches one step of a model at a time, in the thread that runs its forward.

    A step is one call, or several whose backwards have not run when the next begins.

    A profiler cannot be stopped inside a backward. So it ends with the graphs of the step, with the
    next step, or when somebody else needs the thread's profiler.
    """

    def __init__(self) -> None:
        self._log: torch_compat.AllocationLog | None = None
        self._thread: threading.Thread | None = None
        self._calls: list[_Watched] = []
        self._on_cuda = False
        self._tell_whole: Callable[[int, int, bool], None] | None = None
        self._graphs = 0  # of the step that are there
        self._open = False  # further ones may come

    def begin(
        self,
        device: torch.device,
        tell: Callable[[MemoryProfile], None] | None = None,
        *,
        whole: Callable[[int, int, bool], None] | None = None,
        until_closed: bool = False,
    ) -> bool:
        """Watch a step that begins; whether that can be.

        Args:
            device: of the step.
            tell: is told what was seen of its call, when it ends; ``None``: none begins yet.
            whole: is told of the step, after of each call: bytes that it had allocated over those
                at its begin, most before its first call, and most until the last of its backwards
                had ended; and whether that was seen.
            until_closed: it goes on at least until :meth:`close`, though graphs of it are gone.
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
        self._log, self._calls, self._tell_whole = log, [], whole
        self._graphs, self._open = 0, until_closed
        self._thread = threading.current_thread()
        self._on_cuda = device.type == "cuda"
        if tell is not None:
            self._call(tell)
        return True

    def join(self, tell: Callable[[MemoryProfile], None]) -> bool:
        """A call of the step that is watched begins; whether one is, in this thread."""
        if not self._is_here() or len(self._calls) >= MOST_CALLS:
            return False
        self._call(tell)
        return True

    def left(self, step: object) -> None:
        """The forward that began last has left ``step``."""
        if self._is_here() and self._calls[-1].step is None:
            self._calls[-1].step = weakref.ref(step)
            self._mark(len(self._calls) - 1, TURN)

    @property
    def is_on(self) -> bool:
        """Whether something is watched."""
        return self._log is not None

    def is_watching(self, step: object) -> bool:
        """Whether ``step`` is watched."""
        return self._place_of(step) is not None

    def until_gone(self, graph: object, step: object) -> None:
        """Go on at least as long as ``graph`` is there, if ``step`` is watched.

        Args:
            graph: lives as long as the graph of a call.
            step: what its forward has left.
        """
        if self._place_of(step) is not None:
            self._lives(graph)

    def close(self, graph: object) -> None:
        """No further call begins of the step that is watched in this thread.

        Args:
            graph: lives as long as that of all that the calls have led to.
        """
        if self._is_here():
            self._lives(graph)
            self._open = False

    def back(
        self,
        step: object,
        *,
        gone: Sequence[int] = (),
        never: Sequence[int] = (),
        released: Sequence[int] = (),
    ) -> None:
        """The backward of ``step`` begins, which is watched.

        Args:
            step: what the forward has left.
            gone: bytes of each tensor that counts as there before the forward, and is not any
                more. A CPU's allocator tells of those alone that an earlier log has seen made.
            never: of those, the ones that were not there before it either: none tells of them.
            released: bytes of each output of an earlier step that was there before the forward, and
                is not any more.
        """
        place = self._place_of(step)
        if place is None:
            return
        call = self._calls[place]
        call.gone = tuple(never if self._on_cuda else (*gone, *released))
        call.released_bytes = sum(released)
        call.gone_bytes = sum(gone) - sum(never) + sum(released)
        self._calls[place].ended = False
        self._mark(place, BACKWARD)

        def ended() -> None:
            self.after(step)
            self.done()

        torch_compat.after_backward(ended)

    def after(self, step: object) -> None:
        """The backward of ``step`` has ended, though another may go on."""
        place = self._place_of(step)
        if place is not None and not self._calls[place].ended:
            self._calls[place].ended = True
            self._mark(place, AFTER)

    def done(self) -> None:
        """A backward has ended, with all calls that took part."""
        if self._log is not None:
            self._log.mark(DONE)

    def end(self) -> None:
        """Tell what was seen, if something is watched in this thread."""
        if self._log is None or not self._is_here():
            return
        log, self._log = self._log, None
        assert log is not None
        log.__exit__()
        calls, self._calls = self._calls, []
        tell_whole, self._tell_whole = self._tell_whole, None
        events = _with_unseen(log.events, [call.gone for call in calls])
        for place, call in enumerate(calls):
            profile = _profile_of(events, place)
            more = {"gone_bytes": call.gone_bytes, "released_bytes": call.released_bytes}
            call.tell(replace(profile, **more))
        if tell_whole is not None:
            tell_whole(*_whole(events))

    def _lives(self, graph: object) -> None:
        self._graphs += 1
        weakref.finalize(graph, self._end_of, self._log).atexit = False

    def _call(self, tell: Callable[[MemoryProfile], None]) -> None:
        self._calls.append(_Watched(tell))
        self._mark(len(self._calls) - 1, FORWARD)

    def _place_of(self, step: object) -> int | None:
        if self._log is None:
            return None
        watched = (call.step is not None and call.step() is step for call in self._calls)
        return next((place for place, found in enumerate(watched) if found), None)

    def _forget(self) -> None:
        """The thread is gone in which something was watched: nothing can be told of it."""
        log, self._log = self._log, None
        if log is not None:
            log.forget()
        self._thread, self._calls, self._tell_whole = None, [], None

    def _end_of(self, log: object) -> None:
        if self._log is log:
            self._graphs -= 1
            if not self._graphs and not self._open:
                self.end()

    def _is_here(self) -> bool:
        here = self._log is not None and threading.current_thread() is self._thread
        return here and torch_compat.current_backward() < 0

    def _mark(self, place: int, phase: str) -> None:
        if self._log is not None:
            self._log.mark(_name(place, phase))


def _name(place: int, phase: str) -> str:
    return f"{phase} {place}"


def _with_unseen(events: _Events, gone: Sequence[Sequence[int]]) -> _Events:
    """``events`` with what none of them says of what was ``gone`` at each call's backward.

    An event of the same bytes, outside calls, is taken for one.
    """
    outside = tuple(_name(place, TURN) for place in range(len(gone)))
    seen: Counter[int] = Counter()
    begins = {_name(place, BACKWARD): own for place, own in enumerate(gone)}
    found: _Events = []
    before = ""
    for mark, change in events:
        if change < 0 and mark in outside:
            seen[-change] += 1
        elif not change and mark in begins:
            own = Counter(begins.pop(mark))
            found += [(before, -nbytes) for nbytes in (own - seen).elements()]
            seen -= own
        found.append((mark, change))
        before = mark
    return found


def _whole(events: _Events) -> tuple[int, int, bool]:
    """What all of a step had allocated: see :meth:`Watcher.begin`."""
    now = most = first = peak = 0
    begun = done = False
    for mark, change in events:
        now += change
        most = max(most, now)
        begun |= mark == _name(0, FORWARD)
        first = first if begun else most
        if mark == DONE and not change:
            done, peak = True, most
    return first, peak if done else most, done


def _profile_of(events: _Events, place: int) -> MemoryProfile:
    """What one call had allocated."""
    names = {_name(place, phase): phase for phase in (FORWARD, TURN, BACKWARD, AFTER)}
    own, phase, now, begin = "", "", 0, 0
    first: dict[str, int] = {}
    most: dict[str, int] = {}  # by phase, others' included
    during: dict[str, int] = {}  # by phase, alone
    for mark, change in events:
        now += change
        own = names.get(mark, "")
        phase = own or phase
        if phase and phase not in first:
            first[phase], begin = now, begin if first else now
        most[phase] = max(most.get(phase, now), now)
        if own:
            during[own] = max(during.get(own, now), now)
    left = next((first[p] for p in (TURN, BACKWARD, AFTER) if p in first), now)
    taken = first.get(BACKWARD, first.get(AFTER))
    return MemoryProfile(
        forward_bytes=during.get(FORWARD, begin) - begin,
        left_bytes=left - begin,
        turn_bytes=most.get(TURN, left) - begin,
        taken_bytes=None if taken is None else taken - begin,
        backward_bytes=max(during.get(BACKWARD, begin) - begin, 0),
        begin_bytes=begin,
        after_bytes=during.get(TURN, left) - begin,
        before_bytes=max(during.get(AFTER, begin) - begin, 0),
    )
