"""Optimal memory-persistent recomputation of a chain.

Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains:
how to train deep neural networks with limited memory" (2019), section 4.2.

``C(s, t, m)`` is the least time to get from the gradient after stage ``t`` to the gradient before
stage ``s``, when boundary ``s`` is held and ``m`` further bytes are free:

    C(s, s, m) = forward + backward, or rebuild + backward after the loss point   Eq. (1)
    C(s, t, m) = min(C_all(s, t, m), min over s < s' <= t of C_ck(s, s', t, m))   Eq. (2)
    C_ck  = Σ forward_s[s … s' - 1] + C(s', t, m - step(s, s')) + C(s, s' - 1, m)
    C_all = min over options o of forward_s[s] + C(s + 1, t, m - saved(s, o)) + backward_s(s, o)

The first cut runs ``F_ck s, F_none s + 1, …, F_none s' - 1``; its bound on ``m`` counts these
forwards and no others. Differences from the paper:

* Boundaries are sets of storages. ``step(s, s')`` is what boundary ``s'`` adds to boundary ``s``.
  That is exact, not a bound: a storage is in a contiguous run of boundaries, so whatever boundary
  ``s'`` or anything after it shares with memory held before, it shares with boundary ``s'`` itself.
* ``F_all`` keeps the whole saved set or an option's part of it (``SaveOption``), both in the first
  sweep and in recomputations. The paper only has the whole set.
* The interval of the last stage has a second way: run its forward, keep only the input, and rebuild
  before its backward. An exhaustive search showed that this is needed: where ``rebuild_bytes`` is
  small it fits into less memory. With the papers' costs it never does.
* What is kept at the loss point may take less memory than its bytes (``relieved``). The intervals
  that end with the last stage are exactly those of the first sweep.

A schedule is *memory-persistent* if

* what is checkpointed (a boundary kept by ``F_ck`` or ``F_all``, a saved set) stays until the
  backward of its stage: ``F_none`` never reads a kept boundary,
* forwards start from the deepest boundary in memory, so none runs between ``F_all i`` and ``B i``
  unless the gradient after stage ``i`` is still to come,
* the next operation reads what ``F_none`` writes.

The first condition is the papers' definition (section 4.1: "any checkpointed value is kept in
memory until it is used in the backward phase"). Their Theorem 1 uses the second as if it followed
from the first. It does not: where gradients grow during the backward, recomputing early, while a
deeper checkpoint is held, can need less memory.

Complexity: ``O(L³ slots)`` time and ``O(L² slots)`` memory. Only values are kept, and a schedule is
read from them by computing the sums again (``O(L²)``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fxremat.ir import Chain, Compute, Costs, Infeasible, Problem, Schedule, Solution, Solved
from fxremat.ir.schedule import Codes, decoded
from fxremat.solvers import store_all
from fxremat.solvers.kernels import Table, added_bytes, filled, last_filled, read_out
from fxremat.solvers.least import Least, choose_least
from fxremat.solvers.numbers import (
    MOST_BYTES,
    Floats,
    Ints,
    Numbers,
    numbers_of,
    unit_bytes,
    without_saved_sets,
)
from fxremat.solvers.quantize import BudgetTable, fitting, quantum_bytes, slots_down, whole_count
from fxremat.solvers.sequences import base_bytes, seconds_of, walk

_LARGEST_TABLE_BYTES = 1 << 29
"""Maximum size of the table of a retry with more slots."""


def solve(problem: Problem, *, slots: int = 500, tapes_late: bool = False) -> Solution:
    """Find the fastest memory-persistent schedule within the budget.

    In such a schedule whatever is checkpointed stays in memory until the backward of its stage;
    the module has the full definition. Theorem 1 of Beaumont et al. (2019). ``O(L³ slots)`` time,
    ``O(L² slots)`` memory.

    Args:
        problem: the chain, its costs and the budget.
        slots: sizes are rounded up to multiples of the budget divided by ``slots``. The result is
            exact if that does not exceed the greatest common divisor of all sizes.
        tapes_late: whether ``B i`` must follow directly after ``F_all i``, which excludes
            ``C_all``.

    Returns:
        ``Solved``, or ``Infeasible`` with the exact least budget of any such schedule. If a budget
        only fits without rounding, up to eight times the slots are tried, and after that the result
        is a schedule derived from the least memory. If a budget fits everything without rounding,
        the schedule never takes longer than keeping everything.

    Raises:
        ArgumentError: ``slots`` is not a whole number of at least 1. This is checked first.
        ValueError: the sizes are too large to add up.
    """
    slots = whole_count(slots, name="slots")
    chain, costs = problem.chain, problem.costs
    least = Least.of(_numbers(chain, costs, tapes_late))
    least_bytes = base_bytes(chain, costs) + least.root_bytes
    if problem.budget_bytes < least_bytes:
        return Infeasible(least_bytes)
    rows = len(chain) * (len(chain) + 1) // 2
    table = fitting(
        lambda number: RotorTable.build(
            chain,
            costs,
            max_budget_bytes=problem.budget_bytes,
            slots=number,
            tapes_late=tapes_late,
        ),
        problem.budget_bytes,
        slots=slots,
        most_slots=max(slots, _LARGEST_TABLE_BYTES // (8 * rows) - 1),
    )
    solution = table.schedule(problem.budget_bytes)
    kept = store_all.solve(problem)  # due to rounding, the table may miss that this fits
    if tapes_late or isinstance(kept, Infeasible) or isinstance(solution, Infeasible):
        return solution
    return min(kept, solution, key=lambda solved: solved.makespan_s)


def least_budget(chain: Chain, costs: Costs) -> tuple[int, Schedule]:
    """Return the least budget in bytes of any memory-persistent schedule, and a schedule within it.

    Of choices with equal memory the recurrence takes the faster one. ``O(L³)``.

    Raises:
        ValueError: the chain or the costs are malformed, or too large to add up.
    """
    Problem(chain, costs, 0)  # validates
    least = Least.of(numbers_of(chain, costs))
    ops = _least_ops(least, least.root_bytes)
    return base_bytes(chain, costs) + least.root_bytes, Schedule(tuple(ops))


@dataclass(frozen=True, slots=True, eq=False)
class RotorTable(BudgetTable):
    """Fastest memory-persistent schedules of a chain for all budgets up to a maximum.

    The table has every ``C(s, t, m)`` of the module, for up to ``slots`` free slots.
    """

    chain: Chain
    costs: Costs
    max_budget_bytes: int
    quantum_bytes: int
    slots: int
    _table: Table
    _outer: Table  # used for intervals that end with the last stage
    _least: Least

    @staticmethod
    def build(
        chain: Chain,
        costs: Costs,
        *,
        max_budget_bytes: int,
        slots: int = 500,
        tapes_late: bool = False,
    ) -> RotorTable:
        """Return the filled table. ``O(L³ slots)``, by as many threads as ``thread_count`` returns.

        It has fewer slots than requested where all sizes are multiples of a larger one.

        Args:
            chain: the chain.
            costs: its costs.
            max_budget_bytes: the greatest budget that the table covers.
            slots: number of slots.
            tapes_late: as for ``solve``.

        Raises:
            ArgumentError: ``slots`` is not a whole number of at least 1.
            ValueError: the chain or the costs are malformed, or too large to add up.
        """
        slots = whole_count(slots, name="slots")
        Problem(chain, costs, max_budget_bytes)  # validates
        numbers = numbers_of(chain, costs)
        available_bytes = min(max(0, max_budget_bytes - base_bytes(chain, costs)), MOST_BYTES)
        quantum = max(quantum_bytes(available_bytes, slots=slots), unit_bytes(numbers))
        if tapes_late:
            numbers = without_saved_sets(numbers)
        used = slots_down(available_bytes, quantum=quantum)
        table = filled(numbers, quantum=quantum, slots=used)
        least = Least.of(numbers)
        return RotorTable(chain, costs, max_budget_bytes, quantum, used, table, table, least)

    def relieved(self, away: float) -> RotorTable:
        """Return the table of schedules that do not hold all that they keep at the loss point.

        A share of it is assumed to be elsewhere, for example in host memory, whenever another stage
        runs. The schedule is within its budget only if that holds. It is a base for plans with
        transfers: it keeps more than others, and its recomputations fit in addition to what stays
        in memory. ``O(L² slots)``.

        Args:
            away: the share, from 0 (this table) to 1.

        Raises:
            ValueError: ``away`` is not from 0 to 1.
        """
        if not 0.0 <= away <= 1.0:
            raise ValueError(f"away is {away}, must be a share from 0 to 1")
        numbers = self._table.numbers
        stays = numbers._replace(
            saved=_staying(numbers.saved, away),
            step=_staying(numbers.step, away),
        )
        return replace(self, _outer=last_filled(self._table, stays))

    @property
    def base_bytes(self) -> int:
        """Bytes held under any schedule: ``fixed_bytes`` and boundary 0."""
        return base_bytes(self.chain, self.costs)

    @property
    def least_budget_bytes(self) -> int:
        """Exact least budget in bytes of any memory-persistent schedule."""
        return self.base_bytes + self._least.root_bytes

    def schedule(self, budget_bytes: int) -> Solved | Infeasible:
        """Return the fastest schedule for a budget, or ``Infeasible`` if none fits. ``O(L²)``.

        A budget that suffices only without rounding gets a schedule derived from the least memory.

        Raises:
            ValueError: the budget is above ``max_budget_bytes``.
        """
        ops: Sequence[Compute]
        if self.fits(budget_bytes):
            ops = decoded(self.codes(budget_bytes)).computations
        elif budget_bytes >= self.least_budget_bytes:
            available_bytes = min(budget_bytes - self.base_bytes, MOST_BYTES)
            ops = _least_ops(self._least, available_bytes)
        else:
            return Infeasible(self.least_budget_bytes)
        return Solved(Schedule(tuple(ops)), seconds_of(self.costs.stages, ops))

    @property
    def root(self) -> Floats:
        """Least seconds of a step for every number of free slots, ``(slots + 1,)``."""
        row: Floats = self._outer.values[len(self.chain) - 1]
        return row

    def codes(self, budget_bytes: int) -> Codes:
        """Return the operations of ``schedule`` as integers (``ir.schedule.Codes``).

        The table has to have a schedule for the budget, see ``fits``.

        Raises:
            ValueError: the budget is above ``max_budget_bytes``.
        """
        codes: Codes = read_out(self._table, self._outer, self.slots_of(budget_bytes))
        if not codes.size:
            raise AssertionError(f"no choice gives the table's value for {budget_bytes} bytes")
        return codes


def _numbers(chain: Chain, costs: Costs, tapes_late: bool) -> Numbers:
    numbers = numbers_of(chain, costs)
    return without_saved_sets(numbers) if tapes_late else numbers


def _least_ops(least: Least, available_bytes: int) -> list[Compute]:
    """Return the operations of a schedule within ``available_bytes`` in addition to boundary 0.

    ``available_bytes`` are at least the least memory of the chain.
    """

    def pick(s: int, t: int, m: int) -> tuple[int, int, int]:
        choice, _, _ = choose_least(least, s, t, m)
        return choice, m - added_bytes(least.numbers, s, choice), m

    return walk(pick, 0, len(least.memory) - 1, available_bytes)


def _staying(nbytes: Ints, away: float) -> Ints:
    """Return each of ``nbytes`` reduced by the share ``away``."""
    return nbytes - (nbytes * away).astype(np.int64)
