"""The search of a step at another size or in another context: cached decisions, evaluated again.

Which operations run, and in which order, is the same at every size; what they take is not. So the
decisions of one size are good starting points for any other. Those that can matter within the
budget are evaluated with the other size's numbers, and local search starts from the best few.
Nothing is solved again. The same holds in another context, where other memory is held outside the
graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from fxremat.costs.measured.cost import Measured
from fxremat.effort import Effort
from fxremat.planner.allocator.allocations import Allocations
from fxremat.planner.allocator.footprints import Footprints
from fxremat.planner.context.context_bytes import ContextBytes
from fxremat.planner.decision.candidates import Candidate, Pool
from fxremat.planner.search.bound import Relaxation
from fxremat.planner.search.evaluator import MOST_BYTES, Evaluator
from fxremat.planner.search.search import Search


def search_at(
    search: Search,
    measured: Measured,
    context_bytes: ContextBytes,
    *,
    budget_bytes: int | None,
    separately: bool = False,
) -> Search:
    """Return a search with the schedules of ``search``, evaluated at another size or context.

    Args:
        search: the search at the size of the capture.
        measured: ``search.measured``, or ``search.measured.at(costs)`` of another size.
        context_bytes: the context bytes there.
        budget_bytes: limit on the peak there; ``None`` if it is not known yet.
        separately: in another context, also evaluate :attr:`Search.separate`; otherwise the pool
            takes its place.

    Returns:
        A search over the candidates that can matter within the budget, the lowest of the cached
        ones, and some for any other budget. At another size it has no lower bound on the seconds,
        and generators that are asked for more schedules work with the size of the capture.

    Only one of all searches of a step may be used at a time.
    """
    same_size = measured is search.measured
    if same_size and context_bytes == search.setting.context_bytes:
        return search
    if same_size:
        evaluator = search.evaluator.within(context_bytes)
    else:
        evaluator = search.evaluator.at(measured, context_bytes)
    footprints = search.allocations.footprints
    if not same_size:
        footprints = Footprints(measured.line, measured.workspace_bytes, measured.asked)
    allocations = Allocations(
        footprints,
        context_bytes,
        search.allocations.settings,
        search.allocations.budget_on,
    )
    most = MOST_BYTES if budget_bytes is None else budget_bytes
    solved, pool = _pools(search, evaluator, most, evaluates_all=same_size and budget_bytes is None)
    separate: tuple[Pool, ...] = (pool,)
    if separately and same_size:
        again = functools.cache(lambda c: evaluator.candidate(c.codes, c.held))
        separate = tuple(
            Pool.of(pool.baseline, map(again, other.members)) for other in search.separate
        )
    return replace(
        search,
        measured=measured,
        setting=replace(
            search.setting,
            line=measured.line,
            context_bytes=context_bytes,
            kept=evaluator.evaluation(pool.baseline),
        ),
        evaluator=evaluator,
        relaxation=(
            functools.partial(
                Relaxation.of, measured, evaluator.blocks, context_bytes, search.effort.moments
            )
            if same_size
            else None
        ),
        solved=solved,
        pool=pool,
        separate=separate,
        allocations=allocations,
    )


def _pools(
    search: Search, evaluator: Evaluator, most_bytes: int, *, evaluates_all: bool
) -> tuple[Pool, Pool]:
    """Return the pool of ``search``, evaluated again, and the pool after a further local search.

    Local search starts from the fastest that fit in ``most_bytes``, unless everything kept fits.
    """
    effort = search.effort
    cached = _EvaluatedMembers(evaluator, search.pool.members, effort)
    baseline = cached.at(len(cached.members) - 1)
    if evaluates_all:
        cached.evaluate_all()
    else:
        cached.evaluate_near(most_bytes)
    spare = _spare(evaluator, search, effort.spare_candidates)
    candidates = [*cached.evaluated.values(), *spare]
    solved = Pool.of(baseline, candidates)
    fitting = [c for c in solved.members if c.peak_bytes <= most_bytes and c is not baseline]
    fastest = reversed(fitting[max(len(fitting) - effort.again_starts, 0) :])
    for start in fastest if baseline.peak_bytes > most_bytes else ():
        candidates += evaluator.climb(start, effort, limit_bytes=most_bytes)
    return solved, Pool.of(baseline, candidates)


def least_bytes_at(search: Search, measured: Measured, context_bytes: ContextBytes) -> int:
    """Return the lowest peak, in bytes, of the schedules of ``search`` at another size.

    Peaks are sums of the bytes requested; an allocator may round them up. ``measured`` is
    ``search.measured.at(costs)`` of that size.
    """
    evaluator = search.evaluator.at(measured, context_bytes)
    members = _EvaluatedMembers(evaluator, search.pool.members, search.effort)
    count = len(members.members)
    lowest = [members.at(i) for i in (*range(min(search.effort.lowest, count)), count - 1)]
    lowest += _spare(evaluator, search, 2)
    return min(c.peak_bytes for c in lowest)


def _spare(evaluator: Evaluator, search: Search, most: int) -> list[Candidate]:
    """Evaluate schedules from pools of other contexts, and return them.

    They are, of each pool in ``search.spare``, those with the lowest peaks, and ``most`` others.
    """
    candidates: list[Candidate] = []
    for pool in search.spare:
        chosen = dict.fromkeys((*pool.members[: search.effort.lowest], *pool.thinned(most)))
        candidates += [evaluator.candidate(c.codes, c.held) for c in chosen]
    return candidates


@dataclass(frozen=True, slots=True)
class _EvaluatedMembers:
    """Members of a pool that are evaluated at another size or in another context when needed."""

    evaluator: Evaluator
    members: tuple[Candidate, ...]
    effort: Effort
    evaluated: dict[int, Candidate] = field(default_factory=dict)

    def at(self, index: int) -> Candidate:
        if index not in self.evaluated:
            member = self.members[index]
            self.evaluated[index] = self.evaluator.candidate(member.codes, member.held)
        return self.evaluated[index]

    def evaluate_near(self, budget_bytes: int) -> None:
        """Evaluate members with peaks near ``budget_bytes``, the lowest ones, and a few others."""
        last, spread, near = len(self.members) - 1, self.effort.spread, self.effort.near_budget
        self._evaluate(range(self.effort.lowest))
        self._evaluate(last * i // max(spread - 1, 1) for i in range(spread))
        low, high = 0, last  # finds the first that does not fit, as if peaks were in order
        while low < high:
            middle = (low + high) // 2
            if self.at(middle).peak_bytes <= budget_bytes:
                low = middle + 1
            else:
                high = middle
        self._evaluate(range(low - near, low + near))

    def evaluate_all(self) -> None:
        self._evaluate(range(len(self.members)))

    def _evaluate(self, indices: Iterable[int]) -> None:
        for index in indices:
            if 0 <= index < len(self.members):
                self.at(index)
