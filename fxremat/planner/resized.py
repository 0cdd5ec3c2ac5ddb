"""The search of a step at another size, or in another context: known decisions, evaluated there.

Which operations run, and in which order, is the same at every size; what they take is not. So
what was found for one size is a good start for any other: the decisions are evaluated with the
other size's numbers, those that can matter within the budget, and local search sets out from
the best few. Nothing is solved. Where something else is held beside the graphs that is so, too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from fxremat.costs.cost import Measured
from fxremat.planner.allocations import Allocations
from fxremat.planner.bound import Relaxation
from fxremat.planner.candidates import Candidate, Pool
from fxremat.planner.context_bytes import ContextBytes
from fxremat.planner.evaluator import MOST_BYTES, Evaluator
from fxremat.planner.footprints import Footprints
from fxremat.planner.search import Search

SPARE = 16
"""Members of what was found in another context that are evaluated, evenly over all."""

SPREAD = 32
"""Members that are evaluated whatever the budget, evenly over all."""

LOWEST = 8
"""More of them, of the least peaks: which is the least may change with the size."""

NEAR = 8
"""More of them on either side of where the budget lies: peaks do not keep their order."""

CLIMBS = 2
"""Of those that fit, the fastest so many are where local search sets out from."""


def search_at(
    search: Search,
    measured: Measured,
    context_bytes: ContextBytes,
    *,
    budget_bytes: int | None,
    apart: bool = False,
) -> Search:
    """``search`` at another size, or in another context.

    Args:
        search: of the size of the capture.
        measured: ``search.measured``, or ``search.measured.at(costs)`` of another size.
        context_bytes: there.
        budget_bytes: what the peak may reach there; ``None``: that is not known yet.
        apart: in another context, evaluate :attr:`Search.alone`, too; else these are the pool.

    Returns the same with the candidates that can matter within the budget; the least among
    those known, and some for any other budget. At another size it does not know what no schedule
    can do better than, and generators that are asked for more schedules go by the size of the
    capture.

    Only one of all searches of a step can be asked at a time.
    """
    same_size = measured is search.measured
    if same_size and context_bytes == search.setting.context_bytes:
        return search
    if same_size:
        evaluator = search.evaluator.within(context_bytes)
    else:
        evaluator = search.evaluator.at(measured, context_bytes)
    members = _Members(evaluator, search.pool.members)
    most = MOST_BYTES if budget_bytes is None else budget_bytes
    footprints = search.allocations.footprints
    if not same_size:
        footprints = Footprints(measured.line, measured.workspace_bytes, measured.asked)
    allocations = Allocations(
        footprints,
        context_bytes,
        search.allocations.settings,
        search.allocations.budget_on,
    )
    baseline = members.at(len(members.known) - 1)
    if same_size and budget_bytes is None:
        members.every()
    else:
        members.around(most)
    found = [*members.found.values(), *_spare(evaluator, search, SPARE)]
    solved = Pool.of(baseline, found)
    fitting = [c for c in solved.members if c.peak_bytes <= most and c is not baseline]
    for start in reversed(fitting[-CLIMBS:]) if baseline.peak_bytes > most else ():
        found += evaluator.climb(start, limit_bytes=most)
    pool = Pool.of(baseline, found)
    alone: tuple[Pool, ...] = (pool,)
    if apart and same_size:
        again = functools.cache(lambda c: evaluator.candidate(c.codes, c.held))
        alone = tuple(Pool.of(baseline, map(again, own.members)) for own in search.alone)
    return replace(
        search,
        measured=measured,
        setting=replace(
            search.setting,
            line=measured.line,
            context_bytes=context_bytes,
            kept=evaluator.evaluation(baseline),
        ),
        evaluator=evaluator,
        relaxation=(
            functools.partial(Relaxation.of, measured, evaluator.blocks, context_bytes)
            if same_size
            else None
        ),
        solved=solved,
        pool=pool,
        alone=alone,
        allocations=allocations,
    )


def least_bytes_at(search: Search, measured: Measured, context_bytes: ContextBytes) -> int:
    """The least peak at another size of what is known; as requests are asked for.

    Args:
        search: of the size of the capture.
        measured: of the other size, ``search.measured.at(costs)``.
        context_bytes: at the other size.
    """
    evaluator = search.evaluator.at(measured, context_bytes)
    members = _Members(evaluator, search.pool.members)
    lowest = [members.at(i) for i in range(min(LOWEST, len(members.known)))]
    lowest += [members.at(len(members.known) - 1), *_spare(evaluator, search, 2)]
    return min(c.peak_bytes for c in lowest)


def _spare(evaluator: Evaluator, search: Search, most: int) -> list[Candidate]:
    """The lowest of each pool of another context, and so many over all, evaluated."""
    found: list[Candidate] = []
    for pool in search.spare:
        chosen = dict.fromkeys((*pool.members[:LOWEST], *pool.thinned(most)))
        found += [evaluator.candidate(c.codes, c.held) for c in chosen]
    return found


@dataclass(frozen=True, slots=True)
class _Members:
    """Members of a pool, evaluated at another size where they are asked for."""

    evaluator: Evaluator
    known: tuple[Candidate, ...]
    found: dict[int, Candidate] = field(default_factory=dict)

    def at(self, index: int) -> Candidate:
        """One of them."""
        if index not in self.found:
            member = self.known[index]
            self.found[index] = self.evaluator.candidate(member.codes, member.held)
        return self.found[index]

    def around(self, budget_bytes: int) -> None:
        """Ask for those that can matter within a budget."""
        last = len(self.known) - 1
        self._ask(range(LOWEST))
        self._ask(last * i // (SPREAD - 1) for i in range(SPREAD))
        low, high = 0, last  # the first that does not fit, were their peaks in order
        while low < high:
            middle = (low + high) // 2
            if self.at(middle).peak_bytes <= budget_bytes:
                low = middle + 1
            else:
                high = middle
        self._ask(range(low - NEAR, low + NEAR))

    def every(self) -> None:
        """Ask for all."""
        self._ask(range(len(self.known)))

    def _ask(self, indices: Iterable[int]) -> None:
        for index in indices:
            if 0 <= index < len(self.known):
                self.at(index)
