"""Schedules of recomputations that plans with transfers are built on.

What of a schedule travels is chosen afterwards (``planner.moves``), from what it keeps over the
turn. So a good base keeps more than the budget has room for, and runs again only what fits
beside the rest. The fastest schedules for larger budgets keep more, too, but most run again
what needs these budgets, and no transfer helps there.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxremat.costs.bandwidth import MeasuredLink
from fxremat.ir import Infeasible, Problem, Schedule, Solved
from fxremat.planner.candidate import Candidate
from fxremat.planner.effects import Operations
from fxremat.planner.improve import improve
from fxremat.planner.search import SLOTS, Search

MOST = 64
"""Candidates of a planner that are looked at."""

POFO_SLOTS, POFO_LABELS = 50, 100
"""Its search is rough: what it finds is swept exactly and its moves are chosen anew."""

POFO_STAGES = 60
"""Longer chains take it too long."""

AWAY = tuple(part / 20 for part in range(21))
"""Shares of what is kept over the turn that bases are planned to have elsewhere."""


def of_search(search: Search) -> tuple[Candidate, ...]:
    """Some candidates of the search, and of each planner's alone.

    What another planner is faster than without transfers may still be the better base for them.
    """
    found = [c for own in (search.frontier, *search.alone) for c in _thinned(own)]
    return tuple({id(c): c for c in found}.values())


def _thinned(frontier: tuple[Candidate, ...]) -> list[Candidate]:
    """Some of them, evenly, the first and the last among them: neighbours are much alike."""
    last = len(frontier) - 1
    wanted = {last * i // (MOST - 1) for i in range(MOST)}
    return [frontier[i] for i in sorted(wanted)]


def by_pofo(search: Search, budget_bytes: int, link: MeasuredLink) -> Iterator[Candidate]:
    """The schedules of recomputations in what ``pofo`` finds."""
    # Loading numba takes longer than all else in the package: not at import.
    from fxremat.solvers import pofo  # noqa: PLC0415

    if len(search.chain) - search.measured.line.ends_at_turn > POFO_STAGES:
        return
    problem = Problem(search.chain, search.costs, budget_bytes, link.link())
    found = pofo.explore(problem, slots=POFO_SLOTS, labels=POFO_LABELS)
    if not isinstance(found, Infeasible):
        yield search.sweeps.candidate(Schedule(found.whole().schedule.computations))


def climbs(search: Search, budget_bytes: int) -> Iterator[tuple[Candidate, Iterator[Candidate]]]:
    """For ever more that is away: what then fits, and what local search makes of it.

    Yields what ``rotor`` finds (``RotorTable.relieved``), and candidates each of which is
    faster than the one before, and keeps more.
    """
    from fxremat.solvers.rotor import RotorTable  # noqa: PLC0415

    table = RotorTable.build(search.chain, search.costs, max_budget_bytes=budget_bytes, slots=SLOTS)
    operations = Operations.of(search.measured.line)
    tried: set[Schedule] = set()
    for away in AWAY:
        found = table.relieved(away).schedule(budget_bytes)
        if isinstance(found, Solved) and found.schedule not in tried:
            tried.add(found.schedule)
            start = search.sweeps.candidate(found.schedule)
            yield start, improve(start, search.sweeps, operations)
