"""Recomputation and offloading together, optimal among memory-persistent schedules.

Beaumont, Eyraud-Dubois, Shilova, "Efficient combination of rematerialization and offloading for
training DNNs" (NeurIPS 2021), supplement, appendices A and B. With ``I^x_i`` the input of stage
``i`` (boundary ``i``, or saved set ``i - 1`` that contains it), kept on the device or offloaded as
a whole:

    OC_x(i, A, Δ_F, Δ_B)  time of everything from forward i to backward i, when A bytes of
                          earlier values stay on the device all that time, Δ_F bytes wait
                          to be offloaded at its begin, and Δ_B bytes have to be on the
                          device at its end
    C_Δ(i, j, A, Δ)       time from the gradient after stage j to the one before stage i,
                          when Δ bytes have to be on the device at its end

    OC_x = min(OC^{F_all}_x, OC^{F_ck}_x)                                             Eq. (1)
    OC^{F_all}_x = u_F + ε_F + min over v of OC_1(i + 1, A^v, Δ_F^v, Δ_B^v) + u_B + ε_B
    OC^{F_ck}_x  = min over j, v of Σ u_F[i … j] + ε_F + OC_0(j + 1, A^v, Δ_F^v, Δ_B^v)
                                    + C_Δ(i, j, A + I^x_i, Δ_B)
    C_Δ = min(C_Δ^{F_all}, C_Δ^{F_ck})                                                Eq. (2)

with the new state of table 2 (``I^x_i`` is offloaded for ``v = 1``, joins ``A`` for ``v = 2``)

    Δ_F^v = max(Δ_F + [v = 1] I^x_i - (forward time) β, 0)
    Δ_B^v = max(Δ_B - (backward time) β, 0) + [v = 1] I^x_i

The idle times ``ε`` are those of Lemma 1: ``(need - free + waiting) / β`` seconds before a forward,
or after a backward, if that is positive. ``waiting`` is ``Δ_F`` when the first forward starts and
``Δ_B`` when the backward ends, so ``M^x_{F_i} = A + I^x_i + Δ_F`` and ``M^x_{B_i} = A + I^x_i +
Δ_B``: ``I^x_i`` counts once, as a whole, whether it is about to leave or has just come back.
Between the phases ``ε_G = (Δ_F + Δ_B) / β`` empties both. There is no other idle time.

The computation differs from the supplement, the optimum does not:

* ``intervals`` computes ``C_Δ`` as the fronts of all pairs (work, lag), not as a table over ``Δ``.
* ``sweep`` computes ``OC`` from the input on, by labels that dominate each other, not by all
  states.

So only memory is in slots, rounded up, and only that of the intervals after the loss point. What
waits for the link is exact. In a table, ``u β`` would be rounded down to slots: where a stage takes
less time than a slot's transfer, as most do with 50 slots, nothing would ever arrive.

An exhaustive search showed where the supplement is wrong or silent:

* In ``OC^{F_ck}``, ``j`` has to go up to the last stage before the loss. The text stops one
  earlier, and so finds no schedule at low memory.
* In ``OC^{F_ck}`` the amount prefetched is ``C_Δ(i, j, A + I^x_i, Δ_B) β``, including ``I^x_i``.
* In ``C_Δ^{F_ck}`` the text requires that forwards up to ``j - 1`` fit. Those up to ``i'`` have to.
  With the papers' costs this is the same, as later ones run with more in memory.
* Lemma 1 does not say that waiting helps only until nothing waits. The separate conditions "the
  final sequence is valid if" are needed for that; without them some plans do not fit.
* The last stage may also be run forward by itself and rebuilt after the loss point. In ``rotor``
  that only helps if rebuilds are cheap. Here it helps with the papers' costs too: its saved set
  need not be in memory together with what still waits to be offloaded.
* Bandwidths may differ by direction. With one shared link nothing changes: the phases do not
  overlap.
* Boundaries may share storages. What a boundary adds is exact as in ``rotor``, but a value whose
  boundary has a storage of another boundary is never offloaded. Otherwise the state would have to
  include which of its holders is freed first.
* ``rebuild_s`` and ``rebuild_bytes`` are as in ``rotor``: a rebuild is one step for Lemma 1.

Complexity: the supplement has ``O(L² N³ + L³ N²)`` time for ``N`` slots. Here it is ``O(L³ N w²)``
for fronts of up to ``w`` entries and ``O(L² K²)`` for up to ``K`` labels per node, both usually far
less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxremat.ir import Infeasible, Problem, Solution, Solved
from fxremat.solvers import rotor
from fxremat.solvers.papers.pofo.build import available, build
from fxremat.solvers.papers.pofo.emit import fluid_schedule, fluid_seconds, whole_schedule
from fxremat.solvers.papers.pofo.search import bound_s, least_memory, limits_of, search
from fxremat.solvers.papers.pofo.steps import Computations, plan_of
from fxremat.solvers.papers.pofo.sweep import Limits, Sweep
from fxremat.solvers.quantize import whole_count

__all__ = ["Outcome", "explore", "solve"]

_SLACKS = (0.2, 0.1, 0.05, 0.02, 0.0)
"""Slacks of successive searches: a label also dominates another if it is worse by at most this
share of the best time, over the whole schedule. Rough searches come first, so that finer ones start
from a good time."""

ROTOR_SLOTS = 2000
"""Number of slots for the schedule without transfers, which every plan has to beat."""

_LONG = 12
"""Number of stages of a chain from which on rough searches are run."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a search of ``explore``.

    Attributes:
        problem: the problem.
        plans: the successive best plans of the search, the best one last.
        without_transfers: the schedule without offloading; ``None`` if there is none.
        seconds: time of the best plan in the model of the paper's supplement, with fluid transfers,
            none across the loss point.
        bound_s: no schedule of that model takes less, for sizes in slots. A schedule whose offloads
            continue after the loss point may (``whole`` allows that), and so may one that is not
            memory-persistent.
        exact: whether ``seconds`` is optimal in that model, for sizes in slots, since nothing was
            dropped.
    """

    problem: Problem
    plans: tuple[Computations, ...]
    without_transfers: Solved | None
    seconds: float
    bound_s: float
    exact: bool

    def fluid(self) -> Solved:
        """Return the fastest schedule found with fluid transfers, which move memory byte by byte.

        It is that of the supplement's model, or ``whole`` if that is faster. A fluid transfer frees
        memory no later, and allocates it no earlier, than a whole one that runs at the same time.
        So a schedule of whole transfers stays valid with fluid ones, and takes at most the time
        returned, which is that with whole ones.
        """
        budget, link = available(self.problem), self.problem.link
        plan = self.plans[-1]
        seconds = fluid_seconds(plan, budget, link)
        candidates = [Solved(fluid_schedule(plan, budget, link), seconds), self.whole()]
        if self.without_transfers is not None:
            candidates.insert(0, self.without_transfers)
        return min(candidates, key=lambda solved: solved.makespan_s)

    def whole(self, budget_bytes: int | None = None) -> Solved:
        """Return the fastest schedule of all plans if transfers free and allocate all at once.

        Args:
            budget_bytes: a budget that is at least the problem's; ``None``: the problem's. Whole
                transfers need more memory than fluid ones, so plans for a tighter budget may be
                faster.

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
        candidates = [Solved(*whole_schedule(plan, budget, link)) for plan in self.plans]
        if self.without_transfers is not None:
            candidates.insert(0, self.without_transfers)
        return min(candidates, key=lambda solved: solved.makespan_s)


def solve(
    problem: Problem, *, slots: int = 50, labels: int = 600, relaxed: bool = False
) -> Solution:
    """Find the fastest memory-persistent schedule that recomputes and offloads.

    The model is that of the supplement of Beaumont, Eyraud-Dubois, Shilova (NeurIPS 2021).

    It is optimal in the supplement's model, for sizes in slots, unless labels were dropped because
    a node had more than ``labels`` (see ``Outcome.exact``). It is never slower than ``rotor`` with
    as many slots, or with 2000, and exact if a slot is one byte. Without a link it does not
    offload.

    In that model nothing is transferred across the loss point: all offloads end before the first
    backward. So a schedule that recomputes nothing and offloads across the loss point (``offload``)
    may be faster.

    Args:
        problem: the chain, its costs, the budget and the link.
        slots: sizes after the loss point are rounded up to multiples of the budget divided by
            ``slots``.
        labels: maximum number of labels (partial plans) at a node.
        relaxed: if true, return the optimum with fluid transfers, or a schedule for whole ones
            where that is faster, see ``Outcome.fluid``. Else return a schedule for whole transfers,
            and its time with them: the fastest of all plans that were the best so far during the
            search. It is valid, but not optimal.

    Returns:
        ``Solved``, or ``Infeasible`` with the exact least budget of any such schedule.

    Raises:
        ArgumentError: ``slots`` or ``labels`` is not a whole number of at least 1. This is checked
            first.
        ValueError: the sizes are too large to add up.
    """
    outcome = explore(problem, slots=slots, labels=labels)
    if isinstance(outcome, Infeasible):
        return outcome
    return outcome.fluid() if relaxed else outcome.whole()


def explore(problem: Problem, *, slots: int = 50, labels: int = 600) -> Outcome | Infeasible:
    """Run the search of ``solve``, and return its plans and bounds.

    Arguments and errors are those of ``solve``. ``Infeasible`` has the least budget, as there.
    """
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
    without_transfers = _without_transfers(problem, slots)
    if without_transfers is not None and without_transfers.makespan_s < limits.best_s[0]:
        limits.best_s[0] = without_transfers.makespan_s
    lost = _search(sweep, limits, plans, labels, slack=0.0, recompute=False)
    for slack in _SLACKS if len(problem.chain) >= _LONG else _SLACKS[-1:]:
        if lost and slack < 0.05:  # finer ones would lose more
            break
        lost = _search(sweep, limits, plans, labels, slack=slack, recompute=True)
    seconds = float(limits.best_s[0])
    exact = lost == 0 and not sweep.fronts.lost.any()
    bound = seconds if exact else min(seconds, bound_s(sweep, limits))
    return Outcome(problem, tuple(plans), without_transfers, seconds, bound, exact)


def _without_transfers(problem: Problem, slots: int) -> Solved | None:
    """Return rotor's fastest schedule with ``slots`` or more slots; ``None`` if none fits.

    More slots cost it little, and a plan must not be slower than it.
    """
    solutions = [rotor.solve(problem, slots=n) for n in {slots, max(slots, ROTOR_SLOTS)}]
    solved = [solution for solution in solutions if isinstance(solution, Solved)]
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
    """Search once, and add the plan to ``plans`` if it is the best so far.

    Args:
        limits: the bounds, and the best time so far, which is lowered.
        plans: plans found so far.
        labels: maximum number of labels at a node.
        slack: share of the best time by which a label may be worse and still dominate another.
        recompute: whether plans may recompute.

    Returns:
        The number of labels dropped because of ``labels``.
    """
    slack_s = slack * float(limits.best_s[0]) / sweep.numbers.gradient.size
    limits = limits._replace(slack_s=slack_s)
    decisions, lost = search(sweep, limits, most=labels, recompute=recompute)
    if decisions is not None:
        plans.append(plan_of(sweep, decisions))
    return lost
