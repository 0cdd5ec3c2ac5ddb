"""Optimal canonical recomputation of a join of heterogeneous stages.

Beaumont, Herrmann, Pallez, Shilova, "Optimal memory-aware backpropagation of deep join networks"
(2019), Theorem 3, generalized from unit costs to bytes and seconds. A position in a branch replaces
a number of steps, the trunk (a chain) replaces the loss (the paper's turn), and rotor's chain
recurrence replaces ``Opt_0``.

``J(p, h, t, m)`` is the least time to get from the gradient after trunk stage ``t`` to those at the
heads ``p``, when boundary ``p[b]`` of every branch ``b`` (its *head*) is held and ``m`` further
bytes are free; ``h[b]`` says whether the head of ``b`` is part of the saved set of the stage before
it. With ``C`` from ``rotor`` for a single line:

    J(ends, h, t, m) = C_trunk(0, t, m)
    J(p, h, t, m) = least of, over the branches b with p[b] = s short of the end,
      least over save options o of forward_s[s]
          + J(p[b] := s + 1, h[b] := 1, t, m - saved(s, o)) + backward_s(s, o)      (all)
      Σ forward_s[s … s' - 1] + J(p[b] := s', h[b] := 0, t, m - step(s, s'))
          + C_b(s, s' - 1, m + back(p, h, b))                   for s < s' <= end   (ck)
    and, over the cuts 0 < q <= t of the trunk,
      Σ of all forwards from the heads to cut q + C_trunk(q, t, m - step(p, q))
          + J(p, h, q - 1, m)                                                    (trunk)

where ``back(p, h, b)`` is what the segment's backward has more than its forward had: the other
branches' heads have been freed by then (except those in saved sets), and their gradients, ``δ`` at
``p``, are held instead. With unit costs it is the ``- (k - 1)`` of Theorem 3. The first and the
last line have no counterpart in the paper, whose loss point is a single step: (trunk) drops the
ends, and runs the branches again for the first part of the trunk. For one branch this is rotor on
the whole line.

Complexity: ``O(2^k T Π(L_b + 1) (Σ L_b + T) slots)`` time, ``O(2^k T Π(L_b + 1) slots)`` memory.

It is optimal for the *canonical* schedules, which for unit costs contain an optimal one (Theorem
1). They are memory-persistent. A segment runs without another branch in between. What was
checkpointed last is backpropagated first, so segments run backward in the reverse order of their
forwards. A checkpoint that is read again is backpropagated before any other is used. With
heterogeneous costs the best canonical schedule is almost always the best memory-persistent
schedule, but not always (in about one of sixty random instances it is not; the smallest are in
``tests/solvers/test_join.py``):

* The best order of backwards depends on gradients and saved sets, the best order of forwards on the
  workspace of the forwards. Only if no forward needs more than is held at the loss point are all
  orders of forwards equal, as the proof of Theorem 1 assumes. Else both may require the same branch
  first, which a canonical schedule cannot do.
* A segment of one branch may stop where its boundary is small, for another branch to continue,
  before its last forwards. That was the case in 1 of 43 instances in which the best schedule was
  not canonical.

Where boundaries share storages, ``back`` counts as freed only what begins with the head's own
boundary. That is exact if the boundaries of a branch share nothing or there is one branch, and
conservative otherwise: schedules fit, and a better one may be missed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fxremat.ir import Compute, Infeasible, Join, JoinCosts, JoinProblem, Problem, Schedule, Solved
from fxremat.solvers import rotor
from fxremat.solvers.join import walk
from fxremat.solvers.join.numbers import JoinNumbers, base_bytes, join_numbers, state_count
from fxremat.solvers.join.tables import Choices, JoinLeast, JoinTable, fill, fill_least
from fxremat.solvers.kernels import Table, filled
from fxremat.solvers.least import Least
from fxremat.solvers.numbers import Floats, Numbers
from fxremat.solvers.quantize import BudgetTable, fitting, quantum_bytes, slots_down, whole_count
from fxremat.solvers.sequences import seconds_of

LARGEST_TABLE_BYTES = 1 << 30
"""Maximum size of the table; ``solve`` uses fewer slots where it would be larger."""

MOST_STATES = 1 << 23
"""Maximum number of states of a join, for which a table has at least 15 slots."""


def solve(problem: Problem | JoinProblem, *, slots: int = 200) -> Solved | Infeasible:
    """Find the fastest canonical schedule within the budget.

    A canonical schedule runs every segment of a branch without another branch in between, and
    segments backward in the reverse order of their forwards; see the module.

    Args:
        problem: the join, its costs and the budget. A chain is passed to ``rotor``.
        slots: sizes are rounded up to multiples of the budget divided by ``slots``. It is reduced
            where the table would exceed a gibibyte. The result is exact if that multiple is one
            byte.

    Returns:
        ``Solved``, or ``Infeasible`` with the exact least budget of any canonical schedule. If a
        budget only fits without rounding, up to eight times the slots are tried, and after that the
        result is a schedule derived from the least memory.

    Raises:
        ArgumentError: ``slots`` is not a whole number of at least 1. This is checked first.
        ValueError: the sizes are too large to add up, or there are too many branches or stages.
    """
    slots = whole_count(slots, name="slots")
    if isinstance(problem, Problem):
        solution = rotor.solve(problem, slots=slots)
        assert isinstance(solution, Solved | Infeasible)
        return solution
    join, costs = problem.join, problem.costs
    plans = fitting(
        lambda number: JoinPlans.build(
            join, costs, max_budget_bytes=problem.budget_bytes, slots=number
        ),
        problem.budget_bytes,
        slots=slots,
        most_slots=max(1, LARGEST_TABLE_BYTES // (8 * _checked_state_count(join)) - 1),
    )
    return plans.schedule(problem.budget_bytes)


def least_budget(join: Join, costs: JoinCosts) -> tuple[int, Schedule]:
    """Return the exact least budget in bytes of any canonical schedule, and a schedule within it.

    Of choices with equal memory the recurrence takes the faster one.

    Raises:
        ValueError: the join or the costs are malformed, or too large to add up.
    """
    JoinProblem(join, costs, 0)  # validates
    _checked_state_count(join)
    lines, least = _least(*join_numbers(join, costs))
    needs = _root_bytes(least)
    ops = walk.least_ops(join, lines, least, needs)
    return base_bytes(join, costs) + needs, Schedule(ops)


@dataclass(frozen=True, slots=True, eq=False)
class JoinPlans(BudgetTable):
    """Fastest canonical schedules of a join for all budgets up to a maximum.

    The table has every ``J(p, h, t, m)`` of the module.
    """

    join: Join
    costs: JoinCosts
    max_budget_bytes: int
    quantum_bytes: int
    _lines: tuple[Table, ...]
    _table: JoinTable
    _least_lines: tuple[Least, ...]
    _least: JoinLeast

    @staticmethod
    def build(
        join: Join, costs: JoinCosts, *, max_budget_bytes: int, slots: int = 200
    ) -> JoinPlans:
        """Return the filled table; below the least budget, most of it is not filled.

        Args:
            join: the join.
            costs: its costs.
            max_budget_bytes: the greatest budget that the table covers.
            slots: number of slots.

        Raises:
            ArgumentError: ``slots`` is not a whole number of at least 1.
            ValueError: the join or the costs are malformed, or too large to add up.
        """
        slots = whole_count(slots, name="slots")
        JoinProblem(join, costs, max_budget_bytes)  # validates
        _checked_state_count(join)
        numbers, lines = join_numbers(join, costs)
        least_lines, least = _least(numbers, lines)
        base = base_bytes(join, costs)
        available = max_budget_bytes - base
        if available < _root_bytes(least):
            available = 0  # nothing will be read from the table, so do not fill it
        quantum = quantum_bytes(max(0, available), slots=slots)
        free = slots_down(max(0, available), quantum=quantum)
        # Where heads are freed, a backward has more than was ever free in the forward.
        most = slots_down(max(0, available + base - costs.fixed_bytes), quantum=quantum)
        most = max(free, min(most, 2 * slots))
        tables = tuple(filled(line, quantum=quantum, slots=most) for line in lines)
        table = _filled_table(numbers, tables, quantum, free)
        return JoinPlans(join, costs, max_budget_bytes, quantum, tables, table, least_lines, least)

    @property
    def base_bytes(self) -> int:
        """Bytes held at the start: ``fixed_bytes`` and every branch's input."""
        return base_bytes(self.join, self.costs)

    @property
    def least_budget_bytes(self) -> int:
        """Exact least budget in bytes of any canonical schedule."""
        return self.base_bytes + _root_bytes(self._least)

    def schedule(self, budget_bytes: int) -> Solved | Infeasible:
        """Return the fastest schedule for a budget, or ``Infeasible`` if it is too small.

        A budget that suffices only without rounding gets a schedule derived from the least memory.

        Raises:
            ValueError: the budget is above ``max_budget_bytes``.
        """
        if budget_bytes < self.least_budget_bytes:
            return Infeasible(self.least_budget_bytes)
        ops = self.operations(budget_bytes)
        return Solved(Schedule(ops), seconds_of(self.costs.stages, ops))

    def operations(self, budget_bytes: int) -> tuple[Compute, ...]:
        """Return the operations of ``schedule``, for a budget of at least the least budget."""
        if self.fits(budget_bytes):
            slots = self.slots_of(budget_bytes)
            return walk.table_ops(self.join, self._lines, self._table, slots)
        available_bytes = budget_bytes - self.base_bytes
        return walk.least_ops(self.join, self._least_lines, self._least, available_bytes)

    @property
    def root(self) -> Floats:
        """Least seconds of a step for every number of free slots, ``(slots + 1,)``."""
        row: Floats = self._table.values[len(self.join.trunk) - 1]
        return row


def _checked_state_count(join: Join) -> int:
    count = state_count([len(line) for line in join.lines])
    if count > MOST_STATES:
        raise ValueError(
            f"join.branches have {[len(b) for b in join.branches]} stages and join.trunk "
            f"{len(join.trunk)}: {count} states, more than {MOST_STATES}; merge stages, or move "
            "short branches into the trunk"
        )
    return count


def _root_bytes(least: JoinLeast) -> int:
    return int(least.memory[least.numbers.trunk_gradient.size - 1])


def _least(numbers: JoinNumbers, lines: tuple[Numbers, ...]) -> tuple[tuple[Least, ...], JoinLeast]:
    """Return the tables of least memory: of each line by itself, and of the join."""
    chains = tuple(map(Least.of, lines))
    inner = [np.triu_indices(len(chain.memory)) for chain in chains]  # in the rows' order
    states = numbers.heads * numbers.trunk_gradient.size << numbers.lengths.size
    least = JoinLeast(
        numbers,
        memory=np.zeros(states, dtype=np.int64),
        seconds=np.zeros(states),
        segment_memory=np.concatenate([c.memory[i] for c, i in zip(chains, inner, strict=True)]),
        segment_s=np.concatenate([c.seconds[i] for c, i in zip(chains, inner, strict=True)]),
    )
    fill_least(least, Choices.room(numbers))
    return chains, least


def _filled_table(
    numbers: JoinNumbers, lines: tuple[Table, ...], quantum: int, slots: int
) -> JoinTable:
    states = numbers.heads * numbers.trunk_gradient.size << numbers.lengths.size
    table = JoinTable(
        numbers,
        quantum=quantum,
        values=np.empty((states, slots + 1)),
        segments=np.concatenate([*map(_with_forwards, lines[:-1]), lines[-1].values]),
    )
    fill(table, Choices.room(numbers))
    return table


def _with_forwards(table: Table) -> Floats:
    """Return the seconds of a line's intervals including those of each interval's first forwards.

    They are ``C(s, t, m)`` of ``rotor`` plus the seconds of forwards ``s … t``.
    """
    prefix_s = table.numbers.prefix_s
    first, last = np.triu_indices(len(prefix_s) - 1)  # in the rows' order
    takes = prefix_s[last + 1] - prefix_s[first]
    values: Floats = table.values - prefix_s[first][:, None] + takes[:, None]
    return values
