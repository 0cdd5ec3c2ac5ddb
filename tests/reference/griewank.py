"""Forward steps of binomial checkpointing, by formula and as two public packages run them.

A chain of ``steps`` equal steps, ``checkpoints`` states in memory at once (that of the
first step is one of them). Every step is also run once to tape what its backward reads,
and that is counted: what a package runs is the sum of its advances and these.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest

Steps = Callable[[int, int], int]
"""Forward steps of a number of steps and of checkpoints."""


def forward_steps(steps: int, checkpoints: int) -> int:
    """Griewank and Walther 2000: ``steps + r steps - C(c + r, r - 1)``, least ``r`` that reaches.

    ``r`` is the least number with ``C(c + r, r) >= steps``.
    """
    repeats = next(r for r in itertools.count() if math.comb(checkpoints + r, r) >= steps)
    if repeats == 0:
        return steps
    return steps + repeats * steps - math.comb(checkpoints + repeats, repeats - 1)


def checkpoint_schedules_steps(steps: int, checkpoints: int) -> int:
    """Forward steps that ``checkpoint_schedules.Revolve`` asks for; skips without the package."""
    schedules = pytest.importorskip("checkpoint_schedules")
    total = 0
    for action in schedules.Revolve(steps, checkpoints):
        if isinstance(action, schedules.Forward):
            total += action.n1 - action.n0
        elif isinstance(action, schedules.EndReverse):
            break
    return total


def pyrevolve_steps(steps: int, checkpoints: int) -> int:
    """Forward steps that ``pyrevolve`` asks for; skips without the package."""
    crevolve = pytest.importorskip("pyrevolve.crevolve")
    kind = crevolve.Action
    revolve = crevolve.CRevolve(checkpoints, steps, None)
    total = 0
    while (action := revolve.revolve()) != kind.terminate:
        if action == kind.advance:
            total += revolve.capo - revolve.oldcapo
        elif action in (kind.firstrun, kind.youturn):
            total += 1  # the step is run once more, right before its backward
        elif action == kind.error:
            raise AssertionError("pyrevolve could not go on")
    return total
