"""Schedules of a captured step: those that are known, and what they come to at a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from fxremat import torch_compat
from fxremat.costs.bandwidth import know_link, link_key, measure_link
from fxremat.errors import BudgetError
from fxremat.frontend.agreed import agreed_link
from fxremat.frontend.captured import CapturedStep, Costed
from fxremat.frontend.dimensions import Dimension, groups_of, resized, taken_sizes
from fxremat.frontend.largest import largest_fitting
from fxremat.frontend.origin import key_of
from fxremat.frontend.ranks import Peers
from fxremat.frontend.store import Store
from fxremat.frontend.variants import StepGraph, Variant, fastest
from fxremat.ir import MeasuredLink
from fxremat.passes.joint.sizes import Values
from fxremat.planner.allocations import settings_of
from fxremat.planner.allocator import AllocatorSettings
from fxremat.planner.context import StepContext
from fxremat.planner.pool import Candidate
from fxremat.planner.resized import least_bytes_at
from fxremat.planner.search import DEFAULT_GENERATORS
from fxremat.planner.transfers import HostMemory

MOST_SIZE = 1 << 20
"""The largest size of a dimension that is tried."""

MOST_BYTES = 1 << 60
"""More than any budget."""


@dataclass(slots=True)
class Schedules:
    """Schedules of one captured step, of each of its variants.

    Attributes:
        step: the step.
        host: memory to which storages may travel; ``None``: none may.
        exact: gradients must be bitwise those without a plan; else inputs of norms may be
            rebuilt from outputs where that is faster, or fits where nothing else does.
        allocator: rules that hold in place of those of the device's allocator.
        store: bandwidths that are known.
        generators: names of solvers whose schedules are looked at.
        known: by graph; none before the first was looked for.
        sent: by sizes and graph, what travels in plans that were found apart from these.
        link: to host memory, once it is known.
    """

    step: CapturedStep
    host: HostMemory | None
    exact: bool
    allocator: AllocatorSettings | None
    store: Store
    generators: tuple[str, ...] = DEFAULT_GENERATORS
    known: list[Variant] = field(default_factory=list)
    sent: dict[Values, tuple[tuple[Candidate, ...], ...]] = field(default_factory=dict)
    link: MeasuredLink | None = None

    def rules(self, graph: StepGraph) -> AllocatorSettings | None:
        """The rules of the device's allocator; ``None``: it has none."""
        return self.allocator or settings_of(graph.device)

    def within(self, context: StepContext, budget_bytes: int | None) -> list[Variant]:
        """All variants of the step, with what a call finds beside it.

        Schedules that are known are taken; where none fits, others are looked for.

        Args:
            context: what the call finds.
            budget_bytes: within which they are to be; ``None``: those that are known will do.
        """
        first_size = context.sizes == self.step.sizes.hints
        new = self._look(context) and first_size
        variants = []
        for variant, own in zip(self.known, self.step.at(context.sizes), strict=True):
            around = own.around(context)
            if first_size:
                variants.append(variant.within(around))
            else:
                most = MOST_BYTES if budget_bytes is None else budget_bytes
                variants.append(variant.at(own.measured, around, budget_bytes=most))
        variants = self._with_sent(context.sizes, variants)
        if new or budget_bytes is None or min(w.least_bytes for w in variants) <= budget_bytes:
            return variants
        found = self._search(context)
        self.known = [variant.knowing(own) for variant, own in zip(self.known, found, strict=True)]
        return self._with_sent(context.sizes, found)

    def searched(self, context: StepContext) -> list[Variant]:
        """All variants of the step, looked for anew; what is found is known from then on."""
        found = self._search(context)
        known = self.known or found
        self.known = [variant.knowing(own) for variant, own in zip(known, found, strict=True)]
        return found

    def fits(self, context: StepContext, budget_bytes: int, *, thorough: bool = True) -> bool:
        """Whether any does at a call: of those that are known, or ``thorough``, any."""
        return self.least_bytes(context, budget_bytes if thorough else None) <= budget_bytes

    def least_bytes(self, context: StepContext, budget_bytes: int | None) -> int:
        """The least budget of a call: see :meth:`within`."""
        return min(variant.least_bytes for variant in self.within(context, budget_bytes))

    def roughly(self, context: StepContext) -> int:
        """The least budget of a call, by schedules that are known; nothing is run for it."""
        self._look(context)
        found = []
        for variant, own in zip(self.known, self.step.roughly_at(context.sizes), strict=True):
            around = own.around(context)
            if variant.transfers is None:
                found.append(least_bytes_at(variant.search, own.measured, around))
            else:
                found.append(variant.at(own.measured, around, budget_bytes=MOST_BYTES).least_bytes)
        return min(found)

    def alone_bytes(self, context: StepContext) -> int:
        """The least budget of a call where it alone is compiled, with nothing known beforehand."""
        costed = self.step.at(context.sizes)
        return min(self._variant(own, context, None).least_bytes for own in costed)

    def predicted(
        self, context: StepContext, budget_bytes: int, *, run: bool = True
    ) -> tuple[int, float]:
        """The least budget of a call that fits, and the seconds of its plan's calls.

        Args:
            context: what the call finds.
            budget_bytes: what must not be exceeded.
            run: what no law tells of; else it may be a little off.
        """
        variants = (
            self.within(context, budget_bytes)
            if run
            else self._rough_variants(context, budget_bytes)
        )
        _, found = fastest(
            variants, max(budget_bytes, min(variant.least_bytes for variant in variants))
        )
        return min(variant.least_bytes for variant in variants), found.total_s

    def _rough_variants(self, context: StepContext, budget_bytes: int) -> list[Variant]:
        """Ways that are known, where nothing is run for it."""
        costed = self.step.roughly_at(context.sizes)
        return [
            variant.at(own.measured, own.around(context), budget_bytes=budget_bytes)
            for variant, own in zip(self.known, costed, strict=True)
        ]

    def room_bytes(self, context: StepContext) -> int:
        """The least that a step allocates beyond what is there whatever its plan."""
        variants = self.within(context, None)
        return min(w.least_bytes - w.search.setting.context_bytes.given_bytes for w in variants)

    def largest(
        self, context: StepContext, group: Sequence[Dimension], budget_bytes: int, *, most: int
    ) -> int | None:
        """The largest size that fits, of some dimensions that follow each other.

        Only sizes for which the captured step holds are tried, see :func:`taken_sizes`.

        Args:
            context: what a call finds beside it.
            group: the dimensions.
            budget_bytes: what must not be exceeded.
            most: the largest that is tried.

        Returns ``None`` where not even the smallest fits.
        """
        taken = taken_sizes(self.step.sizes, context.sizes, group)
        if taken is None:
            return None

        def at(count: int) -> StepContext:
            return replace(context, sizes=resized(context.sizes, group, taken[count - 1]))

        tried = False

        def least_at(count: int) -> int:
            nonlocal tried
            # What needs least at the capture's size seldom does at one that fills the budget.
            found = self.least_bytes(at(count), budget_bytes if tried else 0)
            tried = True
            return found

        count = largest_fitting(
            lambda count: self.roughly(at(count)),
            least_at,
            first=taken.count(taken.near(context.sizes[group[0].symbol])),
            budget_bytes=budget_bytes,
            most=taken.count(most),
        )
        return None if count is None else taken[count - 1]

    def advised(
        self, error: BudgetError, context: StepContext, budget_bytes: int | None
    ) -> BudgetError:
        """``error``, that a call does not fit, with the largest sizes that do."""
        if error.least_budget_bytes is None or budget_bytes is None:
            return error
        largest: dict[str, int] = {}
        told = []
        sizes = self.step.sizes
        for group in groups_of(self.step.dimensions, sizes.hints, context.sizes):
            most = min(sizes.most[d.symbol] or MOST_SIZE for d in group)
            found = self.largest(context, group, budget_bytes, most=most)
            if found is not None:
                largest |= {d.name: found for d in group}
                told.append(f"{found} for {' = '.join(d.name for d in group)}")
        if not told:
            return error
        return BudgetError(
            f"{error}. The largest sizes that fit, each while others stay: {'; '.join(told)}",
            least_budget_bytes=error.least_budget_bytes,
            largest=largest,
        )

    def _with_sent(self, sizes: Values, variants: list[Variant]) -> list[Variant]:
        """``variants``, knowing what travels in plans that were found apart from them."""
        if sizes not in self.sent:
            return variants
        return [
            variant.with_sent(own) for variant, own in zip(variants, self.sent[sizes], strict=True)
        ]

    def _look(self, context: StepContext) -> bool:
        """Let some schedules be known, those at the sizes of the capture; were none?"""
        new = not self.known
        if new:
            self.known = self._search(replace(context, sizes=self.step.sizes.hints))
        return new

    def _search(self, context: StepContext) -> list[Variant]:
        """All variants of the step."""
        if not self.exact:
            self.step.undo_norms()
        costed = self.step.at(context.sizes)
        known: Sequence[Variant | None] = self.known or [None] * len(costed)
        return [
            self._variant(own, context, variant) for own, variant in zip(costed, known, strict=True)
        ]

    def _variant(self, costed: Costed, context: StepContext, known: Variant | None) -> Variant:
        return Variant.of(
            costed.graph,
            costed.measured,
            costed.around(context),
            host=self.host,
            progress=self.step.progress,
            allocator=self.rules(costed.graph),
            budget_on=self.step.caller.budget_on,
            generators=self.generators,
            known=known,
            link=self._link_of(costed.graph),
        )

    def agree_link(self, peers: Peers) -> None:
        """Take the slowest link to host memory of several processes for that of each of them."""
        own = self._link_of(self.step.graphs[0].graph)
        if own is not None:
            self.link = agreed_link(peers, own)

    def _link_of(self, graph: StepGraph) -> MeasuredLink | None:
        """The link to host memory: once it is found it stays the same."""
        if self.link is None and self.host is not None:
            self.link = self.host.link or self._found_link(graph, self.host)
        return self.link

    def _found_link(self, graph: StepGraph, host: HostMemory) -> MeasuredLink:
        """The link to ``host``: given, kept, or measured now."""
        folder, limit = host.folder, host.limit_bytes
        key = link_key(graph.device, host_dir=folder, host_limit_bytes=limit)
        name = key_of(replace(graph.origin, operations="", code="", inputs=()), link=key[1:])
        costs = self.step.costs
        link = costs.link if costs else self.store.get("link", name, MeasuredLink)
        if link is not None:
            know_link(key, link)
            return link
        with torch_compat.real_execution(), torch.no_grad():
            link = measure_link(graph.device, host_dir=folder, host_limit_bytes=limit)
        self.store.put("link", name, MeasuredLink, link)
        return link
