"""Recomputation and offloading together, optimal among memory-persistent schedules.

Beaumont, Eyraud-Dubois, Shilova, "Efficient combination of rematerialization and offloading
for training DNNs" (NeurIPS 2021), supplement, appendices A and B. With ``I^x_i`` the input
of stage ``i`` (boundary ``i``, or saved set ``i - 1`` that has it), kept on the device or
offloaded whole:

    OC_x(i, A, Δ_F, Δ_B)  time of everything from forward i to backward i, when A bytes of
                          earlier values stay on the device all that time, Δ_F bytes wait
                          to be offloaded as it begins, and Δ_B bytes are to be there
                          when it ends
    C_Δ(i, j, A, Δ)       time from the gradient after stage j to the one before stage i,
                          when Δ bytes are to be there when it ends

    OC_x = min(OC^{F_all}_x, OC^{F_ck}_x)                                             Eq. (1)
    OC^{F_all}_x = u_F + ε_F + min over v of OC_1(i + 1, A^v, Δ_F^v, Δ_B^v) + u_B + ε_B
    OC^{F_ck}_x  = min over j, v of Σ u_F[i … j] + ε_F + OC_0(j + 1, A^v, Δ_F^v, Δ_B^v)
                                    + C_Δ(i, j, A + I^x_i, Δ_B)
    C_Δ = min(C_Δ^{F_all}, C_Δ^{F_ck})                                                Eq. (2)

with the new state of table 2 (``I^x_i`` is offloaded for ``v = 1``, joins ``A`` for ``v = 2``)

    Δ_F^v = max(Δ_F + [v = 1] I^x_i - (forward time) β, 0)
    Δ_B^v = max(Δ_B - (backward time) β, 0) + [v = 1] I^x_i

The idle times ``ε`` are Lemma 1: ``(need - free + waiting) / β`` seconds before a forward, or
after a backward, if that is positive. ``waiting`` is ``Δ_F`` when the first forward starts and
``Δ_B`` when the backward ends, so ``M^x_{F_i} = A + I^x_i + Δ_F`` and ``M^x_{B_i} = A + I^x_i +
Δ_B``: ``I^x_i`` counts once, whole, whether it is about to leave or has just come back. Between
the phases ``ε_G = (Δ_F + Δ_B) / β`` empties both. Nothing else idles.

How it is computed differs, the optimum does not (each is explained where it is done):

* ``intervals``: ``C_Δ`` as the fronts of all pairs (work, lag), not as a table over ``Δ``.
* ``sweep``: ``OC`` from the input on, by labels that beat each other, not by all states.

So only memory is in slots (and only that of the intervals after the turn), rounded up; what
waits for the link is exact. In a table, ``u β`` would be rounded down to slots: where a stage
takes less time than a slot's transfer, as most do with 50 slots, nothing would ever arrive.

Where the supplement is wrong or silent, by comparison with an exhaustive search:

* In ``OC^{F_ck}``, ``j`` goes up to the last stage before the loss: the text stops one earlier,
  and so finds nothing at low memory.
* In ``OC^{F_ck}`` the amount prefetched is ``C_Δ(i, j, A + I^x_i, Δ_B) β``, ``I^x_i`` included.
* In ``C_Δ^{F_ck}`` the text wants forwards up to ``j - 1`` to fit. Those up to ``i'`` have to.
  With the papers' costs it is the same, as later ones run with more in memory.
* Lemma 1 does not say that waiting helps only until nothing waits. That is what the separate
  conditions "the final sequence is valid if" are for; without them plans come out that
  do not fit.
* The last stage may also be run forward alone and rebuilt after the turn. In ``rotor`` that
  only helps if rebuilds are cheap. Here it does with the papers' costs, too: its saved
  set does not have to lie beside what still waits to be offloaded.
* Bandwidths may differ by direction. With one shared link nothing changes: the phases do
  not overlap.
* Boundaries may share storages. What a boundary adds is exact as in ``rotor``; but a value
  whose boundary has a storage of another boundary is never offloaded. Anything else would
  have to know which of its holders leaves first.
* ``rebuild_s`` and ``rebuild_bytes`` as in ``rotor``: a rebuild is one step to Lemma 1.

The supplement has ``O(L² N³ + L³ N²)`` time for ``N`` slots. Here it is ``O(L³ N w²)`` for fronts
of up to ``w`` entries and ``O(L² K²)`` for up to ``K`` labels at a node, both mostly far less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxremat.ir import Infeasible, Problem, Solution, Solved
from fxremat.solvers import rotor
from fxremat.solvers.pofo.build import available, build
from fxremat.solvers.pofo.emit import fluid_schedule, fluid_seconds, whole_schedule
from fxremat.solvers.pofo.search import bound_s, least_memory, limits_of, search
from fxremat.solvers.pofo.steps import Computations, plan_of
from fxremat.solvers.pofo.sweep import Limits, Sweep
from fxremat.solvers.quantize import whole_count

__all__ = ["Outcome", "explore", "solve"]

_SLACKS = (0.2, 0.1, 0.05, 0.02, 0.0)
"""Labels that are this much of the best time better than another, in all, beat it too: rough
searches first, so that the finer ones have a good time to beat."""

ROTOR_SLOTS = 2000
"""Of the schedule without transfers that every plan has to beat."""

_LONG = 12
"""Shorter chains rarely need rough searches."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a search has found.

    Attributes:
        problem: the problem.
        plans: the plans that were the best at some time, in this order, the best last.
        alone: the schedule without offloading, if there is one.
        seconds: time of the best in the supplement's model: fluid transfers, none across the turn.
        bound_s: no schedule of that model takes less, for sizes in slots. One whose offloads go on
            after the turn may (``whole`` allows for it), and so may one that is not persistent.
        exact: ``seconds`` is optimal in that model, for sizes in slots: nothing was left out.
    """

    problem: Problem
    plans: tuple[Computations, ...]
    alone: Solved | None
    seconds: float
    bound_s: float
    exact: bool

    def fluid(self) -> Solved:
        """The best with fluid transfers: of the supplement's model, or ``whole`` if that is faster.

        A fluid transfer gives back no later, and takes no earlier, than a whole one that runs at
        the same time. So with fluid transfers each operation of a schedule of whole ones starts
        no later: it stays valid, and takes at most the time that is said, which is that with
        whole ones.
        """
        budget, link = available(self.problem), self.problem.link
        plan = self.plans[-1]
        seconds = fluid_seconds(plan, budget, link)
        found = [Solved(fluid_schedule(plan, budget, link), seconds), self.whole()]
        if self.alone is not None:
            found.insert(0, self.alone)
        return min(found, key=lambda solved: solved.makespan_s)

    def whole(self, budget_bytes: int | None = None) -> Solved:
        """The best of all these plans with whole transfers.

        Args:
            budget_bytes: no less than the problem's, which is taken if None. Whole transfers
                take more memory than fluid ones, so plans for a tighter budget may be faster.

        Raises:
            ValueError: the budget is less than the problem's.
        """
        if budget_bytes is None:
            budget_bytes = self.problem.budget_bytes
        if budget_bytes < self.problem.budget_bytes:
            raise ValueError(
                f"budget_bytes is {budget_bytes}, the plans are for {self.problem.budget_bytes}"
            )
        budget = available(replace(self.problem, budget_bytes=budget_bytes))
        link = self.problem.link
        found = [Solved(*whole_schedule(plan, budget, link)) for plan in self.plans]
        if self.alone is not None:
            found.insert(0, self.alone)
        return min(found, key=lambda solved: solved.makespan_s)


def solve(
    problem: Problem, *, slots: int = 50, labels: int = 600, relaxed: bool = False
) -> Solution:
    """The fastest memory-persistent schedule with offloading that the search finds.

    It is optimal in the supplement's model, for sizes in slots, unless more than ``labels`` labels
    were wanted somewhere (see ``Outcome.exact``), never slower than ``rotor`` with as many slots
    or 2000, and exact where a slot is one byte. Without a link it does not offload.

    In that model nothing is transferred across the turn: all offloads are done before the first
    backward. A schedule that recomputes nothing and offloads across the turn (``offload``) may
    so be faster: who wants the better of the two has to ask for both.

    Args:
        problem: the chain, its costs, the budget and the link.
        slots: sizes after the turn are rounded up to the budget's ``slots``-th part.
        labels: how many ways to have come so far are kept at a node.
        relaxed: give the optimum with fluid transfers, and a schedule for these, or the schedule
            for whole ones where that is faster, see ``Outcome.fluid``. Else one for whole
            transfers and its time with them: the fastest of all plans that were the best at
            some time during the search. It is valid, not optimal.

    Returns:
        ``Solved``, or ``Infeasible`` with the exact least budget of any such schedule.

    Raises:
        ArgumentError: ``slots`` or ``labels`` is no whole number of at least 1; nothing else is
            looked at then.
        ValueError: the sizes are too large to add up.
    """
    found = explore(problem, slots=slots, labels=labels)
    if isinstance(found, Infeasible):
        return found
    return found.fluid() if relaxed else found.whole()


def explore(problem: Problem, *, slots: int = 50, labels: int = 600) -> Outcome | Infeasible:
    """All that ``solve`` finds; see there."""
    slots = whole_count(slots, name="slots")
    labels = whole_count(labels, name="labels")
    sweep = build(problem, slots=slots)
    least_bytes, decisions = least_memory(sweep)
    least_bytes += problem.costs.fixed_bytes
    if problem.budget_bytes < least_bytes:
        return Infeasible(least_bytes)
    plans = [plan_of(sweep, decisions)]
    limits = limits_of(sweep)
    limits.best_s[0] = fluid_seconds(plans[0], sweep.budget, problem.link)
    alone = _without_transfers(problem, slots)
    if alone is not None and alone.makespan_s < limits.best_s[0]:
        limits.best_s[0] = alone.makespan_s
    lost = _search(sweep, limits, plans, labels, slack=0.0, recompute=False)
    for slack in _SLACKS if len(problem.chain) >= _LONG else _SLACKS[-1:]:
        if lost and slack < 0.05:  # finer ones would lose more
            break
        lost = _search(sweep, limits, plans, labels, slack=slack, recompute=True)
    seconds = float(limits.best_s[0])
    exact = lost == 0 and not sweep.fronts.lost.any()
    bound = seconds if exact else min(seconds, bound_s(sweep, limits))
    return Outcome(problem, tuple(plans), alone, seconds, bound, exact)


def _without_transfers(problem: Problem, slots: int) -> Solved | None:
    """What rotor finds: many slots cost it little, and a plan here must not be slower."""
    found = [rotor.solve(problem, slots=n) for n in {slots, max(slots, ROTOR_SLOTS)}]
    solved = [solution for solution in found if isinstance(solution, Solved)]
    return min(solved, key=lambda solution: solution.makespan_s, default=None)


def _search(
    sweep: Sweep,
    limits: Limits,
    plans: list[Computations],
    labels: int,
    *,
    slack: float,
    recompute: bool,
) -> int:
    """Add a plan if there is a better one; returns how many labels were lost."""
    slack_s = slack * float(limits.best_s[0]) / sweep.numbers.gradient.size
    limits = limits._replace(slack_s=slack_s)
    decisions, lost = search(sweep, limits, most=labels, recompute=recompute)
    if decisions is not None:
        plans.append(plan_of(sweep, decisions))
    return lost
