"""Schedules of recomputations that plans with transfers are built on.

What of a schedule travels is chosen afterwards (``planner.moves``), from what it keeps over the
turn. So a good base keeps more than the budget has room for, and runs again only what fits
beside the rest. The fastest schedules for larger budgets keep more, too, but most run again
what needs these budgets, and no transfer helps there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fxremat.ir import Solved
from fxremat.ir.schedule import Codes, coded
from fxremat.planner.candidates import Candidate, Pool
from fxremat.planner.generators import SLOTS, Setting

MOST = 64
"""Candidates of a planner that are looked at."""

AWAY = tuple(part / 20 for part in range(21))
"""Shares of what is kept over the turn that bases are planned to have elsewhere."""


def of_pools(pools: Iterable[Pool]) -> tuple[Candidate, ...]:
    """Some candidates of each: of the best of all, and of each generator's alone.

    What another generator is faster than without transfers may still be the better base for them.
    """
    return tuple(dict.fromkeys(c for pool in pools for c in pool.thinned(MOST)))


def relieved(setting: Setting, budget_bytes: int) -> Iterator[Codes]:
    """For ever more that is away: what then fits (``RotorTable.relieved``)."""
    # Loading numba takes longer than all else in the package: not at import.
    from fxremat.solvers.rotor import RotorTable  # noqa: PLC0415

    table = RotorTable.build(
        setting.chain, setting.costs, max_budget_bytes=budget_bytes, slots=SLOTS
    )
    tried: set[bytes] = set()
    for away in AWAY:
        found = table.relieved(away).schedule(budget_bytes)
        if isinstance(found, Solved):
            codes = coded(found.schedule)
            if codes.tobytes() not in tried:
                tried.add(codes.tobytes())
                yield codes
