"""The optimum of automatic differentiation, made valid for networks.

In automatic differentiation a checkpoint is the input of a step, and a backward records what it
needs by itself. For a network this means an ``F_all`` before each ``B``, and only boundaries are
kept. This is the strategy *revolve* of Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal
checkpointing for heterogeneous chains" (2019), section 5.3, and ``REV`` of Beaumont, Herrmann,
Pallez, Shilova, "Optimal memory-aware backpropagation of deep join networks" (2019).

It is optimal among the memory-persistent schedules (see ``rotor``) in which ``B i`` directly
follows ``F_all i``. Every stage but the last runs at least twice.

*Heterogeneous chains* (Griewank and Walther, "Evaluating derivatives" (2008), section 12; Gruslys
et al., "Memory-efficient backpropagation through time" (2016), appendix C). With ``C(s, t, m)`` as
in ``rotor``:

    C(s, s, m) = rebuild + backward; of the last stage as in rotor
    C(s, t, m) = min over s < s' <= t of
                 Σ forward_s[s … s' - 1] + C(s', t, m - step(s, s')) + C(s, s' - 1, m)

This is rotor without ``C_all``, and is solved by rotor's kernels in ``O(L³ slots)`` time.

*Homogeneous chains* (Griewank and Walther, "Algorithm 799: revolve" (2000), Theorem 6.1). With
memory for ``c`` checkpoints, including boundary 0, ``l`` steps take ``r l - C(c + r, r - 1)``
forwards in addition to those that record, where ``r`` is the least number with ``C(c + r, r) >=
l``. ``_split`` returns the next checkpoint without a table: ``O(L)``, exact in bytes. It is used
where the chain is homogeneous within the budget, see ``_checkpoints``.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from fxremat.ir import Costs, Problem, Schedule, Solution, Solved
from fxremat.solvers import rotor
from fxremat.solvers.numbers import Numbers, numbers_of
from fxremat.solvers.quantize import whole_count
from fxremat.solvers.sequences import base_bytes, seconds_of, walk


def solve(problem: Problem, *, slots: int = 500) -> Solution:
    """Find the fastest memory-persistent schedule that keeps boundaries only.

    Every ``B i`` directly follows ``F_all i``.

    Args:
        problem: the chain, its costs and the budget.
        slots: as for ``rotor.solve``. It is not used for a homogeneous chain.

    Returns:
        ``Solved``, or ``Infeasible`` with the exact least budget of any such schedule.

    Raises:
        ArgumentError: ``slots`` is not a whole number of at least 1. This is checked first.
        ValueError: the sizes are too large to add up.
    """
    slots = whole_count(slots, name="slots")
    chain, costs = problem.chain, problem.costs
    available_bytes = problem.budget_bytes - base_bytes(chain, costs)
    checkpoints = _checkpoints(costs, numbers_of(chain, costs), available_bytes)
    if checkpoints is None:
        return rotor.solve(problem, slots=slots, tapes_late=True)

    def pick(s: int, t: int, free: int) -> tuple[int, int, int]:
        return s if s == t else s + _split(t - s + 1, free), free - 1, free

    ops = walk(pick, 0, len(chain) - 1, checkpoints)
    return Solved(Schedule(tuple(ops)), seconds_of(costs.stages, ops))


def _checkpoints(costs: Costs, numbers: Numbers, available_bytes: int) -> int | None:
    """Return how many checkpoints of a homogeneous chain fit in addition to what a backward needs.

    Boundary 0 is one of them; the input of the stage whose backward is next is none. A chain is
    homogeneous if all forwards that can be repeated take the same time, each boundary adds the same
    bytes to any earlier one, all backwards leave memory for the same number of checkpoints, and no
    sweep of forwards needs more than a backward and one boundary. Then a schedule fits if and only
    if it never keeps more boundaries than this number.

    Returns:
        The number; ``None`` if nothing fits or the chain is not homogeneous.
    """
    count = len(costs.stages)
    needs = numbers.leaf_bytes
    room = available_bytes - int(needs[:, 0].max())
    if room < 0:
        return None
    if count == 1:
        return 1
    # The last forward is never repeated, and the boundary after it never kept.
    forward_s = {stage.forward_s for stage in costs.stages[:-1]}
    steps = set(numbers.step[:, :count][np.triu_indices(count, 1)].tolist())
    if len(forward_s) > 1 or len(steps) > 1:
        return None
    step = int(steps.pop())
    sweep = int(numbers.sweep[: count - 1, 1:count].max()) + int(numbers.gradient.max())
    if sweep > step + int(needs[:, 0].max()):
        return None
    if step == 0:
        return count
    checkpoints = room // step
    if checkpoints == 0 or checkpoints != (available_bytes - int(needs.min())) // step:
        return None
    return min(checkpoints, count)


def _split(length: int, checkpoints: int) -> int:
    """Return the place of the second checkpoint of ``length >= 2`` stages; the first is at 0.

    It is the greatest of the optimal places (Griewank and Walther 2000, section 3). With ``η(c, r)
    = C(c + r, c)`` and ``η(c, r - 1) < length <= η(c, r)``, one more stage in either part costs one
    more repetition, not two. With a single checkpoint there is no second one: all but the last
    stage are run, and the last one gets its input directly.
    """
    if checkpoints == 1:
        return length - 1
    repeats = _repeats(length, checkpoints)
    early = _reach(checkpoints, repeats - 1)
    if length >= early + _reach(checkpoints - 1, repeats - 1):
        return early
    return max(_reach(checkpoints, repeats - 2), length - _reach(checkpoints - 1, repeats - 1))


def _reach(checkpoints: int, repeats: int) -> int:
    """Return the most stages that can be reversed with no stage advanced over ``repeats`` times.

    It is ``η(c, r)`` of Griewank and Walther (2000), for ``checkpoints`` and ``repeats``.
    """
    return math.comb(checkpoints + repeats, checkpoints) if repeats >= 0 else 0


def _repeats(count: int, checkpoints: int) -> int:
    return next(r for r in itertools.count() if _reach(checkpoints, r) >= count)
