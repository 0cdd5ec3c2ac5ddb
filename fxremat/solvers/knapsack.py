"""One plan for each region of a step that was captured in pieces, within one budget.

A step calls its regions one after the other, and their backwards in the opposite order. Whatever a
region holds over the turn is there during all that comes between its forward and its backward, so
each choice bears on later calls by the sum of what earlier ones hold, and by nothing else: a
knapsack whose items must be taken in order (Bellman, Dynamic Programming, 1957). States are pairs
(bytes held so far, cost), and of those that no other beats in both all are kept, up to a number.

Host memory that choices take is a second resource. Where the fastest take more than there is, a
byte of it costs seconds, as many as lead to the fastest that take no more (Lagrange's relaxation:
Everett, Generalized Lagrange multiplier method, Operations Research, 1963); the least that do is
found exactly, so where any choices fit, some are found.

With n calls of c choices and at most s states a pass takes O(n · c · s · log s).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

N = TypeVar("N", int, npt.NDArray[np.int64])

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
        host_bytes: of host memory that it takes over the turn, where that is limited.
    """

    held_bytes: int
    forward_bytes: int
    backward_bytes: int
    seconds: float
    host_bytes: int = 0


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

    def peak_bytes(self, choice: Choice, held_bytes: N) -> N:
        """Most from its forward to the next, and from its backward to the next.

        Args:
            choice: one of its own.
            held_bytes: by earlier calls, or several sums that these may come to.
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
        host_bytes: of host memory that they take together.
    """

    chosen: tuple[int, ...]
    peak_bytes: int
    seconds: float
    host_bytes: int


def solve(
    calls: Sequence[Call], *, budget_bytes: int, host_bytes: int | None = None
) -> Solution | None:
    """The fastest choices within a budget; ``None``: there are none.

    Args:
        calls: of the step.
        budget_bytes: what its peak must not exceed.
        host_bytes: most host memory; what is found then is the fastest, or as fast as any that a
            price for a byte of it leads to. ``None``: as much as it takes.
    """
    fast = _cheapest(calls, budget_bytes, lambda choice: choice.seconds)
    if fast is None or host_bytes is None or fast.host_bytes <= host_bytes:
        return fast
    found = _cheapest(calls, budget_bytes, lambda choice: choice.host_bytes)
    if found is None or found.host_bytes > host_bytes:
        return None
    while True:
        price_s = (found.seconds - fast.seconds) / (fast.host_bytes - found.host_bytes)
        now = _cheapest(calls, budget_bytes, _priced(max(0.0, price_s)))
        assert now is not None
        if now.host_bytes <= host_bytes and now.seconds < found.seconds:
            found = now
        elif now.host_bytes > host_bytes and now.host_bytes < fast.host_bytes:
            fast = now
        else:
            return found


def least(calls: Sequence[Call], *, host_bytes: int | None = None) -> Solution:
    """The choices of the least peak, with at most so much host memory."""

    def cost(call: Call, choice: Choice, held_bytes: _Bytes, so_far: _Costs) -> _Costs:
        return np.maximum(so_far, call.peak_bytes(choice, held_bytes))

    found = _best(calls, cost)
    assert found is not None  # nothing is left out
    if host_bytes is None or found.host_bytes <= host_bytes:
        return found
    below, found = found.peak_bytes - 1, _solution(calls, [len(c.choices) - 1 for c in calls])
    while found.peak_bytes - below > 1:  # a larger budget never takes more of the host
        middle = (below + found.peak_bytes) // 2
        now = _cheapest(calls, middle, lambda choice: choice.host_bytes)
        if now is None or now.host_bytes > host_bytes:
            below = middle
        else:
            found = now
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


def _cheapest(
    calls: Sequence[Call], budget_bytes: int, of: Callable[[Choice], float]
) -> Solution | None:
    """Choices within a budget whose costs are the least together; ``None``: there are none."""

    def cost(call: Call, choice: Choice, held_bytes: _Bytes, so_far: _Costs) -> _Costs:
        fits = call.peak_bytes(choice, held_bytes) <= budget_bytes
        return np.where(fits, so_far + of(choice), np.inf)

    return _best(calls, cost)


def _priced(price_s: float) -> Callable[[Choice], float]:
    """Seconds, and so many for each byte of host memory."""
    return lambda choice: choice.seconds + price_s * choice.host_bytes


_Bytes = npt.NDArray[np.int64]
_Costs = npt.NDArray[np.float64]
_Indices = npt.NDArray[np.int64]

_Cost = Callable[[Call, Choice, _Bytes, _Costs], _Costs]
"""Of all states with one more choice, from those without; infinite: that cannot be."""


def _best(calls: Sequence[Call], cost: _Cost) -> Solution | None:
    held, costs = np.zeros(1, np.int64), np.zeros(1)
    steps: list[_Indices] = []  # by call and state: the choice, the state before
    for call in calls:
        before = np.arange(len(held))
        reached = [
            (held + choice.held_bytes, cost(call, choice, held, costs), np.full_like(before, i))
            for i, choice in enumerate(call.choices)
        ]
        held, costs, chosen = map(np.concatenate, zip(*reached, strict=True))
        kept = _kept(held, costs)
        held, costs = held[kept], costs[kept]
        steps.append(np.stack((chosen[kept], np.tile(before, len(reached))[kept])))
    if not len(held):
        return None
    state, found = int(np.argmin(costs)), []
    for step in reversed(steps):
        index, state = step[:, state].tolist()
        found.append(index)
    return _solution(calls, found[::-1])


def _kept(held_bytes: _Bytes, costs: _Costs) -> _Indices:
    """States that no other beats in both, by ascending bytes; not more than so many of them,
    evenly over the bytes, the first and the last among them.
    """
    order: _Indices = np.lexsort((costs, held_bytes))
    least = np.minimum.accumulate(np.concatenate(([np.inf], costs[order])))
    order = order[least[1:] < least[:-1]]
    if len(order) <= MOST_STATES:
        return order
    held = held_bytes[order]
    width = (held[-1] - held[0]) / (MOST_STATES - 2)
    stretch = ((held - held[0]) / width).astype(np.int64)
    last = np.append(stretch[1:] != stretch[:-1], True)  # the cheapest of a stretch
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
