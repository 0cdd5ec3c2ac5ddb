"""One plan for each region of a step that was captured in pieces, within one budget.

A step calls its regions one after the other, and their backwards in the opposite order. Whatever a
region holds over the turn is there during all that comes between its forward and its backward, so
each choice bears on later calls by the sum of what earlier ones hold, and by nothing else: a
knapsack whose items must be taken in order (Bellman, Dynamic Programming, 1957). States are pairs
(bytes held so far, cost), and of those that no other beats in both all are kept, up to a number.

With n calls of c choices and at most s states a pass takes O(n · c · s · log s).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MOST_STATES = 2048
"""Pairs that are kept after a call: more are thinned out, evenly over the bytes."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One plan of a region.

    Attributes:
        held_bytes: that its forward leaves for its backward, outputs included.
        forward_bytes: most that its forward allocates.
        backward_bytes: most that there is of it in its backward, what the forward left included.
        seconds: of both.
    """

    held_bytes: int
    forward_bytes: int
    backward_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a region, and what is there beside what regions hold.

    Attributes:
        choices: its plans.
        forward_bytes: when the forward begins.
        after_bytes: most from its end to the next call.
        backward_bytes: when the backward begins.
        before_bytes: most from the backward's end to the next call.
    """

    choices: tuple[Choice, ...]
    forward_bytes: int
    after_bytes: int
    backward_bytes: int
    before_bytes: int

    def peak_bytes(self, choice: Choice, held_bytes: int) -> int:
        """Most from its forward to the next, and from its backward to the next.

        Args:
            choice: one of its own.
            held_bytes: by earlier calls.
        """
        return held_bytes + max(
            self.forward_bytes + choice.forward_bytes,
            self.after_bytes + choice.held_bytes,
            self.backward_bytes + choice.backward_bytes,
            self.before_bytes,
        )


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice for each call.

    Attributes:
        chosen: indices.
        peak_bytes: of the step.
        seconds: of all regions.
    """

    chosen: tuple[int, ...]
    peak_bytes: int
    seconds: float


def solve(calls: Sequence[Call], *, budget_bytes: int) -> Solution | None:
    """The fastest choices within a budget; ``None``: there are none."""

    def cost(call: Call, choice: Choice, held_bytes: int, so_far: float) -> float | None:
        if call.peak_bytes(choice, held_bytes) > budget_bytes:
            return None
        return so_far + choice.seconds

    return _best(calls, cost)


def least(calls: Sequence[Call]) -> Solution:
    """The choices of the least peak."""

    def cost(call: Call, choice: Choice, held_bytes: int, so_far: float) -> float:
        return max(so_far, call.peak_bytes(choice, held_bytes))

    found = _best(calls, cost)
    assert found is not None  # nothing is left out
    return found


def peak_bytes(calls: Sequence[Call], chosen: Sequence[int]) -> int:
    """The peak of a step with a choice for each call."""
    return _solution(calls, chosen).peak_bytes


def rooms(calls: Sequence[Call], chosen: Sequence[int]) -> list[int]:
    """The most that there is beside what is held at its end, from each call's forward to its
    backward, where the others are as chosen.
    """
    held = [call.choices[i].held_bytes for call, i in zip(calls, chosen, strict=True)]
    found, most_bytes = [0] * len(calls), calls[-1].after_bytes
    for k in reversed(range(len(calls))):
        call, choice = calls[k], calls[k].choices[chosen[k]]
        found[k] = max(most_bytes, call.after_bytes, call.backward_bytes)
        most_bytes = max(found[k] + held[k], call.peak_bytes(choice, 0))
    return found


_Cost = Callable[[Call, Choice, int, float], float | None]


@dataclass(frozen=True, slots=True)
class _Path:
    """A state and how it was reached."""

    held_bytes: int
    cost: float
    index: int = -1
    before: _Path | None = None


def _best(calls: Sequence[Call], cost: _Cost) -> Solution | None:
    states = [_Path(0, 0.0)]
    for call in calls:
        reached = []
        for state in states:
            for index, choice in enumerate(call.choices):
                now = cost(call, choice, state.held_bytes, state.cost)
                if now is not None:
                    held_bytes = state.held_bytes + choice.held_bytes
                    reached.append(_Path(held_bytes, now, index, state))
        states = _thinned(_undominated(reached))
    if not states:
        return None
    state = min(states, key=lambda state: state.cost)
    chosen: list[int] = []
    while state.before is not None:
        chosen.append(state.index)
        state = state.before
    return _solution(calls, chosen[::-1])


def _undominated(states: list[_Path]) -> list[_Path]:
    """Those that no other beats in both bytes and cost, by ascending bytes."""
    found: list[_Path] = []
    for state in sorted(states, key=lambda state: (state.held_bytes, state.cost)):
        if not found or state.cost < found[-1].cost:
            found.append(state)
    return found


def _thinned(states: list[_Path]) -> list[_Path]:
    """At most so many, evenly over the bytes, the first and the last among them."""
    if len(states) <= MOST_STATES:
        return states
    low, high = states[0].held_bytes, states[-1].held_bytes
    width = (high - low) / (MOST_STATES - 2)
    # The last of a stretch is the cheapest there.
    by_stretch = {int((state.held_bytes - low) / width): state for state in states[1:]}
    return [states[0], *by_stretch.values()]


def _solution(calls: Sequence[Call], chosen: Sequence[int]) -> Solution:
    held_bytes, most_bytes, seconds = 0, 0, 0.0
    for call, index in zip(calls, chosen, strict=True):
        choice = call.choices[index]
        most_bytes = max(most_bytes, call.peak_bytes(choice, held_bytes))
        held_bytes += choice.held_bytes
        seconds += choice.seconds
    return Solution(tuple(chosen), most_bytes, seconds)
