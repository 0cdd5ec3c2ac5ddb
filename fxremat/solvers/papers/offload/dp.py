"""The best set of whole activations to offload, if transfers can be interrupted.

Beaumont, Eyraud-Dubois, Shilova, "Optimal GPU-CPU offloading strategies for deep neural network
training" (2019), section 5, Algorithm 1 (DYNPROG). In the fluid model of docs/design/0007, with
activations that move entirely or not at all, it computes the best ordered schedule (see
``phases``). Stage by stage, with ``x_0 … x_{i-1}`` decided,

    K      bytes of these that stay in device memory,
    Δ_F    bytes still to offload at the end of F_{i-1}; where that is none, minus what the link
           could have offloaded since the last was copied and read,
    Δ_B    the same for B in the mirror: bytes to prefetch before B_{i-1} starts,

and ``IDLE_i(K, Δ_F, Δ_B)`` is the least idle time of forwards and backwards ``0 … i - 1``:

    ε_F  = max(0, K + Δ_F⁺ + own_F(i) - M) / β                          Eq. (1)
    Δ_F' = (Δ_F⁺ + |x_i| - (ε_F + u_F) β)⁺   if x_i is offloaded        Eq. (2)
    Δ_F' = Δ_F - (ε_F + u_F) β, K' = K + |x_i|   if not                 Eq. (4)
    ε_B, Δ_B' in the same way, but Δ_B' = |x_i| + (Δ_B - (ε_B + u_B) β)⁺   Eq. (6), (7), (8)
    ε_G  = max(0, (Δ_F + Δ_B) / β, when O reaches what B_j needs, when R what F_j needs)

where ``own_F(i)`` is ``OffloadChain.forward_bytes``: ``K + Δ_F⁺ + own_F(i)`` is ``M_{F_i} + ex_i^F
+ |x_{i+1}|``. Differences from the paper:

* ``K`` is the state in place of ``M_F``. Only ``K`` is rounded: to slots, upwards. Times and ``Δ``
  stay exact, so rounding errors do not add up over the stages.
* A state is dropped if another of the same ``K`` is as good even after it has waited until no more
  is left to move: ``IDLE₁ + (Δ_F¹ - Δ_F²)⁺ / β + (Δ_B¹ - Δ_B²)⁺ / β ≤ IDLE₂``. It is also dropped
  if it cannot become better than the best of two simple choices: GREEDY's, and everything.
* ``ε_G`` is exact, see ``phases``. (9) and (10) are not: they leave out what backwards free.
* In (2) ``Δ_F'`` is at least 0. Otherwise a prefetch of ``x_i`` could start before ``F_i`` is done.
* Lemma 3, that ordered schedules suffice, does not hold. An exhaustive search showed that while
  ``F_i`` still reads ``x_i``, already copied, the link can prefetch part of an earlier activation;
  in order it has to wait (``test_order_costs_time``). With one link for each direction, order also
  prevents moving one activation out and another in at the same time.

Complexity: ``O(L N log N)`` for ``N`` states per stage, if few are incomparable at equal ``K``.
Problem 2 is weakly NP-complete. Where the times lead to too many states (for more than about 100
stages), states whose ``Δ`` are in the same slots are merged, as all are in the paper.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fxremat.ir import Problem, Solution
from fxremat.jit import entry
from fxremat.solvers.numbers import Floats, Ints
from fxremat.solvers.papers.offload.greedy import eager
from fxremat.solvers.papers.offload.line import OffloadChain
from fxremat.solvers.papers.offload.phases import plan, solve_by
from fxremat.solvers.quantize import quantum_bytes, slots_up, whole_count

_MOST_STATES = 1 << 15
"""Maximum number of states; beyond, states with equal slots of ``K`` and ``Δ`` are merged."""


def solve(problem: Problem, *, slots: int = 500, relaxed: bool = False) -> Solution:
    """Offload the set of activations that is best in the fluid model.

    In that model transfers may be interrupted, and free and allocate memory byte by byte.

    Args:
        problem: the chain, its costs, the budget and the link. Without a link nothing moves.
        slots: what stays in memory is rounded up to multiples of the budget divided by ``slots``.
            The choice is optimal if that multiple is one byte.
        relaxed: if true, return the schedule with transfers byte by byte, and its time; else the
            one that moves the same activations, each freed and allocated at once.

    Returns:
        ``Solved``, or ``Infeasible`` with the exact least budget, which is that of all schedules
        without recomputation.

    Raises:
        ArgumentError: ``slots`` is not a whole number of at least 1. This is checked first.
        ValueError: a storage crosses two cuts, or the sizes are too large to add up.
    """
    slots = whole_count(slots, name="slots")
    return solve_by(problem, partial(_choose, slots=slots), whole=not relaxed)


def _choose(line: OffloadChain, *, slots: int) -> list[int]:
    """Return the bytes to offload of each activation, all or nothing, for the shortest step."""
    quantum = quantum_bytes(line.budget, slots=slots)
    everything = [size if i in line.movable else 0 for i, size in enumerate(line.sizes)]
    simple = [eager(line, rounded=True), everything]
    times = [_fluid_s(line, amounts) for amounts in simple]
    best_s, best = min(zip(times, simple, strict=True))
    if best_s <= line.compute_s:
        return best
    result = search(line, quantum, below_s=best_s - line.compute_s)
    return result[1] if result is not None and _fluid_s(line, result[1]) < best_s else best


def _fluid_s(line: OffloadChain, amounts: list[int]) -> float:
    planned = plan(line, amounts, whole=False)
    return float("inf") if planned is None else planned.makespan_s


class _States(NamedTuple):
    """States of the dynamic program after a stage; each array has an entry per state.

    The symbols are those of Algorithm 1 of Beaumont, Eyraud-Dubois, Shilova (2019).

    Attributes:
        kept: ``K``, slots of earlier activations that stay in device memory.
        forth, back: ``Δ_F`` and ``Δ_B``, bytes still to offload and to prefetch.
        idle_s: ``IDLE``, idle seconds of the operations so far.
        parent: index of the preceding state, among those of the stage before.
        moved: whether the last activation is offloaded.
    """

    kept: Ints
    forth: Floats
    back: Floats
    idle_s: Floats
    parent: Ints
    moved: NDArray[np.bool_]

    def only(self, which: Ints | NDArray[np.bool_]) -> _States:
        """Return the states with the indices ``which``, or where the mask ``which`` is true."""
        return _States._make(values[which] for values in self)


def search(
    line: OffloadChain, quantum: int, *, below_s: float = float("inf")
) -> tuple[float, list[int]] | None:
    """Find what to offload, by Algorithm 1 of Beaumont, Eyraud-Dubois, Shilova (2019).

    Args:
        line: the chain.
        quantum: bytes of a slot.
        below_s: upper bound of the idle time to find.

    Returns:
        The least idle time in seconds and the bytes to offload of each activation; ``None`` if no
        idle time is below ``below_s``, with sizes rounded up to ``quantum``.
    """
    zeros_s, zeros = np.zeros(1), np.zeros(1, dtype=np.int64)
    states = _States(zeros, zeros_s, zeros_s, zeros_s, zeros, np.zeros(1, dtype=np.bool_))
    history: list[_States] = []
    rest_s = line.compute_s
    for i in line.movable:
        rest_s -= line.forward_s[i] + line.backward_s[i]
        states = _extended(line, i, states, quantum)
        backlog_s = states.forth / line.offload_rate + states.back / line.prefetch_rate
        # Moving the backlog takes time, of which the rest of the step hides rest_s.
        least_s = states.idle_s + np.maximum(0.0, backlog_s - rest_s)
        states = _thinned(states.only(least_s < below_s), backlog_s[least_s < below_s], quantum)
        states = states.only(np.lexsort((states.idle_s, states.kept)))
        states = states.only(_undominated(*states[:4], line.offload_rate, line.prefetch_rate))
        history.append(states)
    total_s = _totals(line, states, quantum)
    if not total_s.size or total_s.min() >= below_s:
        return None
    amounts = [0] * len(line.sizes)
    at = int(total_s.argmin())
    for i, states in zip(reversed(line.movable), reversed(history), strict=True):
        amounts[i] = line.sizes[i] if states.moved[at] else 0
        at = int(states.parent[at])
    return float(total_s.min()), amounts


def _run(
    line: OffloadChain, i: int, states: _States, quantum: int
) -> tuple[_States, Floats, Floats]:
    """Run forward and backward of stage ``i`` from every state in which both fit.

    Returns:
        The states with idle seconds added to ``idle_s``, and for each of them the bytes that the
        link can move until the end of the forward, and from the start of the backward.
    """
    kept = states.kept * quantum
    forward_room = line.budget - line.forward_bytes[i] - kept
    backward_room = line.budget - line.most_backward_bytes[i] - kept
    possible = np.flatnonzero((forward_room >= 0) & (backward_room >= 0))
    forth = states.forth[possible]
    back = states.back[possible]
    forward_idle = np.maximum(0.0, forth - forward_room[possible]) / line.offload_rate  # Eq. (1)
    backward_idle = np.maximum(0.0, back - backward_room[possible]) / line.prefetch_rate  # Eq. (6)
    idle_s = states.idle_s[possible] + forward_idle + backward_idle
    stays = np.zeros(possible.size, dtype=np.bool_)
    after = _States(states.kept[possible], forth, back, idle_s, possible, stays)
    forward_moved = (forward_idle + line.forward_s[i]) * line.offload_rate
    backward_moved = (backward_idle + line.backward_s[i]) * line.prefetch_rate
    return after, forward_moved, backward_moved


def _extended(line: OffloadChain, i: int, states: _States, quantum: int) -> _States:
    """Return the states after stage ``i`` if activation ``x_i`` is kept, and if it is offloaded."""
    base, forward_moved, backward_moved = _run(line, i, states, quantum)
    size = line.sizes[i]
    stays = base._replace(
        kept=base.kept + slots_up(size, quantum=quantum),
        forth=base.forth - forward_moved,  # Eq. (4)
        back=base.back - backward_moved,  # Eq. (8)
    )
    if not size:
        return stays
    goes = base._replace(
        forth=np.maximum(0.0, np.maximum(0.0, base.forth) + size - forward_moved),  # Eq. (2)
        back=size + np.maximum(0.0, base.back - backward_moved),  # Eq. (7)
        moved=np.ones(base.moved.size, dtype=np.bool_),
    )
    return _States._make(map(np.concatenate, zip(stays, goes, strict=True)))


def _thinned(states: _States, backlog_s: Floats, quantum: int) -> _States:
    """Return at most ``_MOST_STATES`` of the states.

    Of states with equal slots of ``K``, ``Δ_F`` and ``Δ_B`` the one is kept with the least sum of
    idle seconds and ``backlog_s``, the seconds to move what is left. Slots of ``Δ`` are doubled
    until few enough remain.
    """
    cell = quantum
    while states.kept.size > _MOST_STATES:
        forth, back = np.floor(states.forth / cell), np.floor(states.back / cell)
        order = np.lexsort((states.idle_s + backlog_s, back, forth, states.kept))
        keys = np.stack((states.kept[order], forth[order], back[order]))
        first = np.append(True, np.any(keys[:, 1:] != keys[:, :-1], axis=0))
        states, backlog_s = states.only(order[first]), backlog_s[order[first]]
        cell *= 2
    return states


def _totals(line: OffloadChain, states: _States, quantum: int) -> Floats:
    """Return for each state the idle seconds of the whole step; infinite where it does not fit.

    They include the stages without a decision, and the time between the phases (``ε_G``).
    """
    index = np.arange(states.kept.size)
    totals = np.full(states.kept.size, np.inf)
    decided = len(line.movable)
    for i in range(decided, len(line)):
        states, forward_moved, backward_moved = _run(line, i, states, quantum)
        index = index[states.parent]
        states = states._replace(
            forth=states.forth - forward_moved, back=states.back - backward_moved
        )
    # Offloaded are before[decided] - K bytes. An operation that needs more memory than these free
    # limits ε_G, less its distance in time from the loss point. Operations for which that matters
    # run up to the loss point without a gap.
    kept = states.kept * quantum
    away = line.before[decided]
    after_s = before_s = 0.0
    late = soon = -np.inf
    for i in reversed(range(len(line))):
        missing = line.before[i] - line.budget - away
        late = max(late, (line.backward_bytes[i] + missing) / line.offload_rate - after_s)
        after_s += line.backward_s[i]
        late = max(late, (line.after_backward_bytes[i] + missing) / line.offload_rate - after_s)
        soon = max(soon, (line.forward_bytes[i] + missing) / line.prefetch_rate - before_s)
        before_s += line.forward_s[i]
    gap = states.forth / line.offload_rate + states.back / line.prefetch_rate
    gap = np.maximum(gap, late + (kept + states.forth) / line.offload_rate)  # Eq. (9)
    gap = np.maximum(gap, soon + (kept + states.back) / line.prefetch_rate)  # Eq. (10)
    totals[index] = states.idle_s + np.maximum(0.0, gap)
    return totals


@entry
def _undominated(
    kept: Ints, forth: Floats, back: Floats, idle_s: Floats, offload_rate: float, rate: float
) -> Ints:
    """Return the indices of states that no other of equal ``kept`` dominates.

    A state dominates another if it has no more left to move after idling as long as the other.

    Args:
        kept, forth, back, idle_s: arrays of the states, sorted by ``kept`` and ``idle_s``.
        offload_rate: bytes per second from the device to the host.
        rate: bytes per second from the host to the device.
    """
    count = kept.size
    indices = np.empty(count, dtype=np.int64)
    size = 0
    first = 0
    for state in range(count):
        if size and kept[indices[size - 1]] != kept[state]:
            first = size
        dominated = False
        for position in range(size - 1, first - 1, -1):
            other = indices[position]
            waits = idle_s[other]
            waits += max(0.0, forth[other] - forth[state]) / offload_rate
            waits += max(0.0, back[other] - back[state]) / rate
            if waits <= idle_s[state]:
                dominated = True
                break
        if not dominated:
            indices[size] = state
            size += 1
    return indices[:size]
