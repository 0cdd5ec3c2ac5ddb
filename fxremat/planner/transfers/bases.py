"""Schedules of recomputations that plans with transfers start from.

``planner.moves`` decides afterwards which of the tensors that a schedule keeps across the loss
point travel to the host. So a good base keeps more than fits in the budget, and recomputes only
what fits next to the rest. The fastest schedules for larger budgets also keep more, but most of
them recompute operations that need these budgets, and no transfer helps there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fxremat.ir import Solved
from fxremat.ir.schedule import Codes, coded
from fxremat.planner.decision.candidates import Candidate, Pool
from fxremat.planner.search.generators import Setting


def of_pools(pools: Iterable[Pool], most: int) -> tuple[Candidate, ...]:
    """Return up to ``most`` candidates of each pool.

    A generator that is beaten without transfers may still have the better base for them.
    """
    return tuple(dict.fromkeys(c for pool in pools for c in pool.thinned(most)))


def relieved(setting: Setting, budget_bytes: int) -> Iterator[Codes]:
    """Yield optimal schedules under the assumption that a growing share of the kept bytes is on the
    host (``RotorTable.relieved``).
    """
    # Loading numba takes longer than all else in the package: not at import.
    from fxremat.solvers.rotor import RotorTable  # noqa: PLC0415

    chain, costs, slots = setting.chain, setting.costs, setting.effort.slots
    table = RotorTable.build(chain, costs, max_budget_bytes=budget_bytes, slots=slots)
    tried: set[bytes] = set()
    for away in setting.effort.away_shares:
        solution = table.relieved(away).schedule(budget_bytes)
        if isinstance(solution, Solved):
            codes = coded(solution.schedule)
            if codes.tobytes() not in tried:
                tried.add(codes.tobytes())
                yield codes
