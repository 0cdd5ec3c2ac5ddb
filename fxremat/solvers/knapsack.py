"""Chooses one plan for each region of a step that was captured in pieces, within one budget.

A step calls its regions one after the other, and their backwards in the opposite order. Whatever a
region holds at the loss point exists from its forward to its backward. So each choice affects later
calls by the sum of the bytes held by earlier ones, and by nothing else: a knapsack whose items must
be taken in order (Bellman, Dynamic Programming, 1957). States are pairs (bytes held so far, cost).
All pairs that no other beats in both are kept, up to a maximum number.

Host memory that choices take is a second resource. Where the fastest take more than there is, each
byte of it is given a price in seconds, high enough that the fastest choices take no more
(Lagrangian relaxation: Everett, Generalized Lagrange multiplier method, Operations Research, 1963).
The choices of least host memory are computed exactly, so if any choices fit, some are found.

With n calls of c choices and at most s states a pass takes O(n · c · s · log s).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

N = TypeVar("N", int, npt.NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class Choice:
    """Bytes and seconds of one plan of a region (a captured piece of the step).

    Attributes:
        held_bytes: bytes that its forward leaves for its backward, including outputs.
        forward_bytes: most bytes that its forward allocates.
        backward_bytes: most bytes of it in its backward, including what the forward left.
        seconds: time of forward and backward.
        host_bytes: bytes of host memory that it takes at the loss point, where that is limited.
    """

    held_bytes: int
    forward_bytes: int
    backward_bytes: int
    seconds: float
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a region, and the bytes that exist in addition to what regions hold.

    Attributes:
        choices: plans of the region.
        forward_bytes: bytes when the forward begins.
        after_bytes: most bytes from the forward's end to the next call.
        backward_bytes: bytes when the backward begins.
        before_bytes: most bytes from the backward's end to the next call.
    """

    choices: tuple[Choice, ...]
    forward_bytes: int
    after_bytes: int
    backward_bytes: int
    before_bytes: int

    def peak_bytes(self, choice: Choice, held_bytes: N) -> N:
        """Return the peak in bytes from the call's forward to the next call, and from its backward.

        Args:
            choice: one of the call's choices.
            held_bytes: bytes that earlier calls hold: one sum, or an array of possible sums.
        """
        return held_bytes + max(
            self.forward_bytes + choice.forward_bytes,
            self.after_bytes + choice.held_bytes,
            self.backward_bytes + choice.backward_bytes,
            self.before_bytes,
        )


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice for each call, and what they take together.

    Attributes:
        chosen: index of each choice.
        peak_bytes: peak of the step.
        seconds: time of all regions.
        host_bytes: bytes of host memory that all of them take.
    """

    chosen: tuple[int, ...]
    peak_bytes: int
    seconds: float
    host_bytes: int


def solve(
    calls: Sequence[Call],
    *,
    budget_bytes: int,
    most_states: int,
    host_bytes: int | None = None,
) -> Solution | None:
    """Return the fastest choices whose peak is within a budget; ``None`` if none fit.

    Args:
        calls: calls of the step.
        budget_bytes: largest peak of the step.
        most_states: maximum number of pairs (bytes held, cost) kept after a call, at least 3. If
            there are more, some are dropped, evenly over the bytes.
        host_bytes: largest amount of host memory; ``None``: unlimited. If it is the binding limit,
            the result is the best one that some price per byte of host memory leads to.
    """

    def cheapest(cost_of: Callable[[Choice], float]) -> Solution | None:
        return _cheapest(calls, budget_bytes, most_states, cost_of)

    fast = cheapest(lambda choice: choice.seconds)
    if fast is None or host_bytes is None or fast.host_bytes <= host_bytes:
        return fast
    within = cheapest(lambda choice: choice.host_bytes)
    if within is None or within.host_bytes > host_bytes:
        return None
    while True:
        price_s = (within.seconds - fast.seconds) / (fast.host_bytes - within.host_bytes)
        now = cheapest(_priced(max(0.0, price_s)))
        assert now is not None
        if now.host_bytes <= host_bytes and now.seconds < within.seconds:
            within = now
        elif now.host_bytes > host_bytes and now.host_bytes < fast.host_bytes:
            fast = now
        else:
            return within


def least(calls: Sequence[Call], *, most_states: int, host_bytes: int | None = None) -> Solution:
    """Return the choices of the least peak that take at most ``host_bytes`` of host memory.

    Args:
        most_states: maximum number of states after a call, as in ``solve``.
        host_bytes: largest amount of host memory; ``None``: unlimited.
    """

    def cost(call: Call, choice: Choice, held_bytes: _Bytes, so_far: _Costs) -> _Costs:
        return np.maximum(so_far, call.peak_bytes(choice, held_bytes))

    best = _minimized(calls, most_states, cost)
    assert best is not None  # all costs are finite
    if host_bytes is None or best.host_bytes <= host_bytes:
        return best
    below, best = best.peak_bytes - 1, _solution(calls, [len(c.choices) - 1 for c in calls])
    while best.peak_bytes - below > 1:  # a larger budget never needs more host memory
        middle = (below + best.peak_bytes) // 2
        now = _cheapest(calls, middle, most_states, lambda choice: choice.host_bytes)
        if now is None or now.host_bytes > host_bytes:
            below = middle
        else:
            best = now
    return best


def peak_bytes(calls: Sequence[Call], chosen: Sequence[int]) -> int:
    """Return the peak in bytes of a step in which call ``k`` has its choice ``chosen[k]``."""
    return _solution(calls, chosen).peak_bytes


def rooms(calls: Sequence[Call], chosen: Sequence[int]) -> list[int]:
    """Return for each call the most further bytes from its forward's end to its backward's begin.

    They exist in addition to what this and earlier regions hold when its forward ends.

    Args:
        chosen: index of the choice of each call.
    """
    held = [call.choices[i].held_bytes for call, i in zip(calls, chosen, strict=True)]
    rooms_bytes, most_bytes = [0] * len(calls), calls[-1].after_bytes
    for k in reversed(range(len(calls))):
        call, choice = calls[k], calls[k].choices[chosen[k]]
        rooms_bytes[k] = max(most_bytes, call.after_bytes, call.backward_bytes)
        most_bytes = max(rooms_bytes[k] + held[k], call.peak_bytes(choice, 0))
    return rooms_bytes


def _cheapest(
    calls: Sequence[Call],
    budget_bytes: int,
    most_states: int,
    cost_of: Callable[[Choice], float],
) -> Solution | None:
    """Return the choices within a budget of the least sum of ``cost_of``; ``None`` if none fit."""

    def cost(call: Call, choice: Choice, held_bytes: _Bytes, so_far: _Costs) -> _Costs:
        fits = call.peak_bytes(choice, held_bytes) <= budget_bytes
        return np.where(fits, so_far + cost_of(choice), np.inf)

    return _minimized(calls, most_states, cost)


def _priced(price_s: float) -> Callable[[Choice], float]:
    """Return a function that gives a choice's seconds plus ``price_s`` per byte of host memory."""
    return lambda choice: choice.seconds + price_s * choice.host_bytes


_Bytes = npt.NDArray[np.int64]
_Costs = npt.NDArray[np.float64]
_Indices = npt.NDArray[np.int64]

_Cost = Callable[[Call, Choice, _Bytes, _Costs], _Costs]
"""Computes the costs of all states with one more choice from the costs without it; infinite if
infeasible."""


def _minimized(calls: Sequence[Call], most_states: int, cost: _Cost) -> Solution | None:
    held, costs = np.zeros(1, np.int64), np.zeros(1)
    steps: list[_Indices] = []  # for each call and state: the choice, and the previous state
    for call in calls:
        before = np.arange(len(held))
        reached = [
            (held + choice.held_bytes, cost(call, choice, held, costs), np.full_like(before, i))
            for i, choice in enumerate(call.choices)
        ]
        held, costs, chosen = map(np.concatenate, zip(*reached, strict=True))
        kept = _kept(held, costs, most_states)
        held, costs = held[kept], costs[kept]
        steps.append(np.stack((chosen[kept], np.tile(before, len(reached))[kept])))
    if not len(held):
        return None
    state, chosen_backwards = int(np.argmin(costs)), []
    for step in reversed(steps):
        index, state = step[:, state].tolist()
        chosen_backwards.append(index)
    return _solution(calls, chosen_backwards[::-1])


def _kept(held_bytes: _Bytes, costs: _Costs, most_states: int) -> _Indices:
    """Return the indices of pairs that no other beats in both bytes and cost, by ascending bytes.

    If there are more than ``most_states``, return the first, the last, and others evenly over the
    bytes.
    """
    order: _Indices = np.lexsort((costs, held_bytes))
    least = np.minimum.accumulate(np.concatenate(([np.inf], costs[order])))
    order = order[least[1:] < least[:-1]]
    if len(order) <= most_states:
        return order
    held = held_bytes[order]
    width = (held[-1] - held[0]) / (most_states - 2)
    stretch = ((held - held[0]) / width).astype(np.int64)
    last = np.append(stretch[1:] != stretch[:-1], True)  # the cheapest of each stretch
    last[0] = True
    thinned: _Indices = order[last]
    return thinned


def _solution(calls: Sequence[Call], chosen: Sequence[int]) -> Solution:
    held_bytes, most_bytes, seconds, host_bytes = 0, 0, 0.0, 0
    for call, index in zip(calls, chosen, strict=True):
        choice = call.choices[index]
        most_bytes = max(most_bytes, call.peak_bytes(choice, held_bytes))
        held_bytes += choice.held_bytes
        seconds += choice.seconds
        host_bytes += choice.host_bytes
    return Solution(tuple(chosen), most_bytes, seconds, host_bytes)
