"""Pools: the candidates of one variant of a graph, at one size and in one context."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fxremat.costs.measured.cost import Measured
from fxremat.effort import Effort
from fxremat.graph.memory_record import describe_peak
from fxremat.ir import Form, RecordedCosts
from fxremat.planner.context.context_bytes import ContextBytes
from fxremat.planner.decision.candidates import Candidate
from fxremat.planner.search.resized import search_at
from fxremat.planner.search.search import Search
from fxremat.planner.transfers.transfers import Transfers
from fxremat.report.frontier import Frontier, frontier_of


@dataclass(frozen=True, slots=True)
class Pool:
    """The candidates, schedules with or without transfers, of one variant in one context.

    Attributes:
        search: the candidates without transfers.
        transfers: the candidates with transfers to host memory; ``None``: nothing may be moved.
        form: how the variant computes its operations.
    """

    search: Search
    transfers: Transfers | None
    form: Form

    def at(self, measured: Measured, held: ContextBytes, *, budget_bytes: int | None) -> Pool:
        """Return the pool with its candidates evaluated at another size or in another context.

        Args:
            measured: the variant's costs there.
            held: what is held there.
            budget_bytes: only candidates that can matter within it are evaluated; ``None``: all.
        """
        transfers = self.transfers
        search = search_at(
            self.search,
            measured,
            held,
            budget_bytes=budget_bytes,
            separately=transfers is not None,  # transfers set out from each generator's candidates
        )
        if search is self.search:
            return self
        if transfers is not None:
            transfers = Transfers.of(search, transfers.host, transfers.link)
        return replace(self, search=search, transfers=transfers)

    def knowing(self, other: Pool) -> Pool:
        """Return this pool with the candidates of ``other``, of another context, in addition."""
        return replace(self, search=self.search.knowing(other.search))

    def with_sent(self, candidates: Iterable[Candidate]) -> Pool:
        """Return a copy of this pool that also considers the transfers of ``candidates``."""
        if self.transfers is None:
            return self
        return replace(self, transfers=self.transfers.knowing(candidates))

    def graded(self) -> Iterator[Candidate]:
        """Yield candidates by ascending bytes; if storages may move, each with ever more moved."""
        pool = self.search.pool
        if self.transfers is None:
            return iter(pool.members)
        only, most = self.transfers.host.only, self.effort.graded_bases
        return self.transfers.graded((pool.baseline,) if only else pool.thinned(most))

    @property
    def effort(self) -> Effort:
        """Settings that bounded the search for candidates."""
        return self.search.effort

    @property
    def held(self) -> ContextBytes:
        """Bytes that are held in the pool's context beyond what the graph allocates."""
        return self.search.setting.context_bytes

    @property
    def baseline(self) -> Candidate:
        """The candidate that keeps everything, so it recomputes and moves nothing."""
        return self.search.baseline

    @property
    def full_bytes(self) -> int:
        """Peak bytes with everything kept."""
        return self.search.counted_bytes(self.search.baseline)

    @property
    def host_limited(self) -> bool:
        """Whether candidates may use host memory, and only a limited number of bytes of it."""
        return self.transfers is not None and self.transfers.host.limit_bytes is not None

    @property
    def least_bytes(self) -> int:
        """Bytes of the least budget that a candidate keeps to."""
        return (self.transfers or self.search).least_bytes

    @property
    def costs(self) -> RecordedCosts:
        """Measured costs that the candidates rest on, including the link to host memory."""
        link = self.transfers.link if self.transfers else None
        return replace(self.search.measured.costs, link=link)

    @property
    def bound_bytes(self) -> int:
        """Lower bound of :attr:`least_bytes` that does not simulate the allocator; may be 0."""
        return 0 if self.transfers else self.search.pool.members[0].peak_bytes

    def bound_s(self, budget_bytes: int) -> float:
        """Return a lower bound of the seconds of any candidate that keeps to ``budget_bytes``."""
        members = () if self.transfers else reversed(self.search.pool.members)
        return next((c.total_s for c in members if c.peak_bytes <= budget_bytes), 0.0)

    def fits(self, budget_bytes: int) -> bool:
        """Return whether a candidate keeps to ``budget_bytes``."""
        if self.transfers is None:
            return self.search.fits(budget_bytes)
        return self.least_bytes <= budget_bytes

    def describe_least(self) -> str:
        """Return which operation needs the least feasible budget, as a phrase for a message."""
        if self.transfers is not None:
            return self.transfers.describe_least()
        search = self.search
        program = search.evaluator.program(search.least)
        return describe_peak(program, self.held, search.allocations.footprints)

    def fastest_within(self, budget_bytes: int) -> Candidate:
        """Return the fastest candidate that keeps to ``budget_bytes``."""
        return (self.transfers or self.search).fastest_within(budget_bytes)


def frontier_over(pools: Sequence[Pool]) -> Frontier:
    """Return the least time at each budget, over the pools of all forms, the traced one first.

    The last point is the time with everything kept. No point is faster, although a step whose loss
    is computed in parts may be.
    """
    traced, *others = (pool.search for pool in pools)
    kept_s = math.nextafter(traced.baseline.total_s, math.inf)
    points = traced.points()
    for search in others:
        points += [(nbytes, max(s, kept_s)) for nbytes, s in search.points(points)]
    return frontier_of(points)


def fastest(pools: Sequence[Pool], budget_bytes: int) -> tuple[Pool, Candidate]:
    """Return the fastest candidate within a budget, and its pool.

    The traced variant, the first, is preferred where it is as fast, or nearly so with everything
    kept. Requires: a candidate fits.
    """
    chosen: tuple[Pool, Candidate] | None = None
    least_s = math.inf
    for pool in pools:
        if pool.bound_s(budget_bytes) >= least_s or not pool.fits(budget_bytes):
            continue
        candidate = pool.fastest_within(budget_bytes)
        if candidate.total_s < least_s:
            chosen, least_s = (pool, candidate), candidate.total_s
        if candidate is pools[0].baseline:  # everything fits
            least_s *= pool.effort.faster
    assert chosen is not None
    return chosen


def below_s(pools: Sequence[Pool], chosen: Candidate) -> float:
    """Return the seconds that a candidate in a further form must beat to replace ``chosen``."""
    return chosen.total_s * (pools[0].effort.faster if chosen is pools[0].baseline else 1.0)


def least_of(pools: Iterable[Pool]) -> Pool:
    """Return the pool with the least feasible budget.

    The allocator is simulated only for pools whose lower bound is below the least so far.
    """
    first, *others = sorted(pools, key=lambda pool: pool.bound_bytes)
    for pool in others:
        if pool.bound_bytes < first.least_bytes and pool.least_bytes < first.least_bytes:
            first = pool
    return first
