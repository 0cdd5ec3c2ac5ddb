"""Schedules of one variant of a step, and the link on which storages travel."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from fxremat import torch_compat
from fxremat.costs.bandwidth import know_link, link_key, measure_link
from fxremat.frontend.captured import CapturedStep, Variant
from fxremat.frontend.record import describe_peak
from fxremat.frontend.store import key_of
from fxremat.ir import Form, MeasuredLink, RecordedCosts
from fxremat.planner.candidates import Candidate
from fxremat.planner.context import StepContext
from fxremat.planner.resized import search_at
from fxremat.planner.search import Search
from fxremat.planner.transfers import HostMemory, Transfers
from fxremat.report.frontier import Frontier, frontier_of

FASTER = 0.9
"""A step that fits is computed in another form than as it was traced, where that takes less than so
many times its seconds."""

MOST_BASES = 16
"""Schedules of which storages travel, where all that a graph may come to is looked at."""


@dataclass(frozen=True, slots=True)
class Schedules:
    """Schedules of one variant of a step, at one size and beside certain context bytes.

    Attributes:
        search: all of them.
        transfers: those with storages that travel; ``None``: none may.
        form: how the variant computes its operations.
    """

    search: Search
    transfers: Transfers | None
    form: Form

    def at(self, variant: Variant, context: StepContext, *, budget_bytes: int | None) -> Schedules:
        """These schedules at another size, or beside other context bytes: those that can matter
        within a budget.
        """
        around = variant.around(context)
        own = self.transfers
        search = search_at(
            self.search,
            variant.measured,
            around,
            budget_bytes=budget_bytes,
            apart=own is not None,  # where they set out from
        )
        if search is self.search:
            return self
        transfers = Transfers.of(search, own.host, own.link) if own is not None else None
        return replace(self, search=search, transfers=transfers)

    def knowing(self, other: Schedules) -> Schedules:
        """These schedules, knowing those that ``other`` has for other context bytes."""
        return replace(self, search=self.search.knowing(other.search))

    def with_sent(self, found: Iterable[Candidate]) -> Schedules:
        """These schedules, knowing what travels in plans for other context bytes."""
        if self.transfers is None:
            return self
        return replace(self, transfers=self.transfers.knowing(found))

    def graded(self) -> Iterator[Candidate]:
        """Schedules from least bytes to least seconds; with transfers, ever more is away."""
        pool = self.search.pool
        if self.transfers is None:
            return iter(pool.members)
        only = self.transfers.host.only
        return self.transfers.graded((pool.baseline,) if only else pool.thinned(MOST_BASES))

    @property
    def host_limited(self) -> bool:
        """Whether there is a limit to the host memory that schedules may take."""
        return self.transfers is not None and self.transfers.host.limit_bytes is not None

    @property
    def least_bytes(self) -> int:
        """The least feasible budget."""
        return (self.transfers or self.search).least_bytes

    @property
    def costs(self) -> RecordedCosts:
        """All that the schedules rest on."""
        link = self.transfers.link if self.transfers else None
        return replace(self.search.measured.costs, link=link)

    @property
    def bound_bytes(self) -> int:
        """No feasible budget is less: what is handed out is never less than what is asked for."""
        return 0 if self.transfers else self.search.pool.members[0].peak_bytes

    def bound_s(self, budget_bytes: int) -> float:
        """Nothing that fits takes less."""
        members = () if self.transfers else reversed(self.search.pool.members)
        return next((c.total_s for c in members if c.peak_bytes <= budget_bytes), 0.0)

    def fits(self, budget_bytes: int) -> bool:
        """Whether one fits."""
        if self.transfers is None:
            return self.search.fits(budget_bytes)
        return self.least_bytes <= budget_bytes

    def describe_least(self) -> str:
        """What the least feasible budget is needed for."""
        if self.transfers is not None:
            return self.transfers.describe_least()
        search = self.search
        return describe_peak(
            search.evaluator.program(search.least),
            search.setting.context_bytes,
            search.allocations.footprints,
        )

    def fastest_within(self, budget_bytes: int) -> Candidate:
        """The fastest that fits."""
        return (self.transfers or self.search).fastest_within(budget_bytes)


def frontier_over(schedules: Sequence[Schedules]) -> Frontier:
    """The least time at every budget, by schedules of all forms, the traced one first.

    None is told to be faster than everything kept, the last one; where its loss is in parts, some
    are.
    """
    traced, *others = (own.search for own in schedules)
    kept_s = math.nextafter(traced.baseline.total_s, math.inf)
    points = traced.points()
    for own in others:
        points += [(nbytes, max(s, kept_s)) for nbytes, s in own.points(points)]
    return frontier_of(points)


def fastest(schedules: Sequence[Schedules], budget_bytes: int) -> tuple[Schedules, Candidate]:
    """The fastest schedule within a budget, and where it was found: in the traced variant where
    that is as fast, or nearly so with everything kept.

    Requires: one fits.
    """
    chosen: tuple[Schedules, Candidate] | None = None
    least_s = math.inf
    for own in schedules:
        if own.bound_s(budget_bytes) >= least_s or not own.fits(budget_bytes):
            continue
        found = own.fastest_within(budget_bytes)
        if found.total_s < least_s:
            chosen, least_s = (own, found), found.total_s
        if found is schedules[0].search.baseline:  # everything fits
            least_s *= FASTER
    assert chosen is not None
    return chosen


def below_s(schedules: Sequence[Schedules], chosen: tuple[Schedules, Candidate]) -> float:
    """The seconds that a step in one more form must take less than, to be chosen in its place."""
    own = chosen[1]
    return own.total_s * (FASTER if own is schedules[0].search.baseline else 1.0)


def least_of(schedules: Iterable[Schedules]) -> Schedules:
    """Those of the least feasible budget; nothing is replayed of others that cannot be."""
    first, *others = sorted(schedules, key=lambda own: own.bound_bytes)
    for own in others:
        if own.bound_bytes < first.least_bytes and own.least_bytes < first.least_bytes:
            first = own
    return first


def link_of(step: CapturedStep, host: HostMemory) -> MeasuredLink:
    """The link between the step's device and ``host``: given, kept, or measured now."""
    if host.link is not None:
        return host.link
    folder, limit = host.folder, host.limit_bytes
    traced = step.variants[0]
    key = link_key(traced.line.joint.device, host_dir=folder, host_limit_bytes=limit)
    name = key_of(replace(traced.origin, operations="", code="", inputs=()), link=key[1:])
    link = step.costs.link if step.costs else step.store.get("link", name, MeasuredLink)
    if link is not None:
        know_link(key, link)
        return link
    with torch_compat.real_execution(), torch.no_grad():
        link = measure_link(traced.line.joint.device, host_dir=folder, host_limit_bytes=limit)
    step.store.put("link", name, MeasuredLink, link)
    return link
