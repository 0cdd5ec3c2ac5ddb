"""From a captured step, a budget and what a call finds to a plan and its graphs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from fxremat.errors import BudgetError, CostError, PlanError
from fxremat.frontend.agreed import agreed_context, agreed_graphs, agreed_link
from fxremat.frontend.arguments import Split
from fxremat.frontend.budget import Budget, TrainingBudget, constrained
from fxremat.frontend.captured import CapturedStep, Variant
from fxremat.frontend.dimensions import arguments_of
from fxremat.frontend.effort import Spending
from fxremat.frontend.emission import Planned, carry_out, emit, follow, with_overhead
from fxremat.frontend.forms import MOST_BYTES, aimed, part_sizes, parted, wanted
from fxremat.frontend.largest import advised
from fxremat.frontend.ranks import Peers
from fxremat.frontend.schedules import (
    Schedules,
    below_s,
    fastest,
    frontier_over,
    least_of,
    link_of,
)
from fxremat.frontend.shortfall import Shortfall, growth, warn
from fxremat.frontend.store import differences, key_of, origin_of_plan, version_of
from fxremat.frontend.usual import usual_loop
from fxremat.ir import TRACED, Form, MeasuredLink, Origin
from fxremat.passes.emit.rewrite import BlockModules
from fxremat.passes.joint.sizes import Values
from fxremat.passes.split.losses import largest_gradient_bytes
from fxremat.passes.split.parts import Parts
from fxremat.planner.allocations import settings_of
from fxremat.planner.allocator import AllocatorSettings
from fxremat.planner.candidates import Candidate
from fxremat.planner.context import NO_CORRECTION, Correction, StepContext
from fxremat.planner.effort import DEFAULT_GENERATORS
from fxremat.planner.resized import least_bytes_at
from fxremat.planner.search import Search, generators_of
from fxremat.planner.transfers import HostMemory, Transfers
from fxremat.progress import LOG, WRITE
from fxremat.report.plan import Plan
from fxremat.units import format_bytes

LEAST = Budget("min")

MOST_BLOCKS = 4096
"""Distinct blocks whose code is kept."""

MUCH_SLOWER = 1.2
"""Forms in parts are looked at, too, where a plan takes so many times what everything kept does."""

LARGE_LOSS = 8
"""One is looked at wherever a loss's gradient takes such a part, or more, of what a step that keeps
everything allocates: it is faster where logits do not go through memory."""

MOST_AIMS = 2
"""Forms of a step in which only what takes part in a peak is in parts."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What steps in several contexts need.

    Attributes:
        full_bytes: the peak with everything kept.
        least_bytes: the least budget.
        first_bytes: the least budget in the first context.
        most_bytes: the largest least budget of all contexts.
        schedules, context: where ``least_bytes`` is needed.
    """

    full_bytes: int
    least_bytes: int
    first_bytes: int
    most_bytes: int
    schedules: list[Schedules]
    context: StepContext


class Planner:
    """Plans one captured step, for whatever a call finds.

    Args:
        step: what was captured.
        budget: of the model; all of its planners ask this one.
        host: memory to which storages may travel; ``None``: none may.
        exact: gradients must be bitwise those without a plan; else inputs of norms may be
            rebuilt from outputs where that is faster, or fits where nothing else does.
        split: runs of operations may be computed in parts where nothing else fits, or is much
            slower than everything kept: ``"exact"``, where that keeps bits; ``True``, anyhow.
        effort: how much of planning may go into forms in parts that are not needed to fit.
        allocator: rules that hold in place of those of the device's allocator.
        generators: names of solvers whose schedules are looked at.

    Attributes:
        step: as given.
        budget: as given.
        started: the plan for the call that was captured has been made.
        estimated: sizes whose workspaces could not be measured.
        sent: by sizes and variant, what travels in plans that were found apart from the others.
    """

    def __init__(
        self,
        step: CapturedStep,
        budget: TrainingBudget,
        *,
        host: HostMemory | None = None,
        exact: bool = True,
        split: Split = False,
        effort: float = 1.0,
        allocator: AllocatorSettings | None = None,
        generators: tuple[str, ...] = DEFAULT_GENERATORS,
    ) -> None:
        self.step, self.budget = step, budget
        self.sent: dict[Values, tuple[tuple[Candidate, ...], ...]] = {}
        self._host, self._exact, self._generators = host, exact, generators
        self._allocator, self._split = allocator, split
        self._effort = Spending(effort)
        self._forms: list[Form] | None = None  # that were not looked at yet
        # Forms whose peaks were looked at, down to a budget or as far as that goes.
        self._aims: set[tuple[Form, bool]] = set()
        self._slow: set[Form] = set()  # forms that were measured and not looked at
        self._coarse: Form | None = None  # the first form in parts
        self._may_unshare = False  # equal operations each by itself were not looked at yet
        self._known: list[Schedules] = []  # of each variant, at the sizes of the capture
        self._link: MeasuredLink | None = None
        self._modules = BlockModules()
        self._peers = step.peers
        self.started = self._bound = self._scaled = False
        self.tangents_stay = False  # as a backward has shown: see StepContext
        self.estimated: set[Values] = set()

    # Plans

    def first(
        self,
        context: StepContext,
        *,
        kept: Plan | None = None,
        rehearse: bool = True,
        least: bool = False,
    ) -> Planned:
        """The plan for the call that was captured.

        Args:
            context: what that call finds.
            kept: a plan to follow.
            rehearse: tell how to find what the step takes beside its calls.
            least: that of the least peak; what the budget means is not known yet.

        Raises:
            BudgetError: no schedule that was found fits the budget.
            PlanError: ``kept`` is not of this step.
            HostMemoryError: the host memory cannot be had.
            CostError: an operation cannot be measured.
        """
        planned = self._followed(kept, context) if kept else None  # nothing is measured before
        if not least:
            resolved_for, *_ = self.resolved_for(context)
            self.budget.counted = dict(self.step.described(resolved_for))
        if planned is None:
            if self._peers is not None and self._host is not None:
                self._link = agreed_link(self._peers, self._link_to(self._host))
            planned = self._shared(lambda: self._found(context, least=least))
            if least and self._peers is not None:
                self._look(
                    context
                )  # later plans are each process's: all start from these schedules
        self.started = True
        self.budget.accepted |= not least
        if kept is None and rehearse:
            planned = with_overhead(planned, self.step)
        if not least:
            self.budget.set(planned.plan.budget_bytes)
        self.step.settle()
        return planned

    def again(self, context: StepContext, *, least: bool = False) -> Planned:
        """The plan for a later call; ``least``: that of the least peak, be it above the budget.

        Raises:
            BudgetError: no schedule that was found fits the budget.
            HostMemoryError: the host memory cannot be had.
            RankError: the graph has collectives, and other processes find something else.
        """
        budget = LEAST if least else self.budget.now
        if self.together is None or not self.started:
            return self._planned(context, budget)
        agreed_context(self.together, repr((context, least)))
        return self._shared(lambda: self._planned(context, budget))

    def _found(self, context: StepContext, *, least: bool) -> Planned:
        """The plan for the captured call, looked for."""
        try:
            return self.again(context, least=least)
        except BudgetError as error:
            if self.grown(error):
                return self.again(context)
            if not self.budget.may_raise:
                Shortfall.of(self, context, error).warn()
                return self.again(context, least=True)
            least_bytes = self._unconstrained_bytes(error, context)
            self.step.settle()
            refused = advised(self, error, context, at=self.usual)
            if least_bytes is not None:
                refused = constrained(refused, least_bytes=least_bytes)
            raise refused from None

    def _unconstrained_bytes(self, error: BudgetError, context: StepContext) -> int | None:
        """Return the least budget of the captured call without what a policy, or tags, decide.

        ``None``: they decide nothing, or several processes would have to agree on its costs.
        """
        free = self.step.unconstrained() if self._peers is None else None
        if free is None or error.least_budget_bytes is None:
            return None
        planner = Planner(
            free,
            self.budget,
            host=self._host,
            exact=self._exact,
            split=self._split,
            effort=self._effort.asked,
            allocator=self._allocator,
            generators=self._generators,
        )
        contexts = planner.resolved_for(context)
        planner.within(contexts[0], self.budget.nbytes or error.least_budget_bytes - 1)
        return planner._needs(contexts).most_bytes

    def _planned(self, context: StepContext, budget: Budget) -> Planned:
        """Find the best plan, or know it."""
        step = self.step
        traced = self._variants(context.sizes, run=True, bits=True)[0]
        origin = self._origin(traced, context)
        if self._known or context.sizes != step.sizes.hints or step.costs is not None:
            found = self._made(context, origin, budget)
        else:
            key = key_of(
                origin,
                budget=(budget.nbytes, budget.share, self.budget.usual),
                host_dir=self._host.folder if self._host else None,
                ortools=version_of("ortools"),
                ranks=self._peers is not None,  # which look at other forms
            )
            kept = self._kept(key)
            found = kept or self._made(context, origin, budget).completed()
            if kept is None:
                step.store.put("plan", key, Plan, found.plan)
        arguments = arguments_of(step.joint.primals, step.sizes.named(context.sizes), step.places)
        return replace(found, plan=replace(found.plan, model=step.model, arguments=arguments))

    def _made(self, context: StepContext, origin: Origin, budget: Budget) -> Planned:
        """Search for the best plan, among schedules that are known where there are some."""
        step = self.step
        if len(self._modules.modules) > MOST_BLOCKS:  # of plans that may be gone
            self._modules = BlockModules()
            step.forget_blocks()
        contexts = self.resolved_for(context) if budget is not LEAST else (context,)
        schedules = self.within(contexts[0], budget.nbytes)
        if budget.nbytes is None and not context.region:
            schedules = self._within_share(contexts, budget, schedules)
        needs = self._needs(contexts)
        refused = self._is_refused
        budget_bytes = budget.resolve(
            full_bytes=needs.full_bytes,
            least_bytes=needs.least_bytes,
            first_bytes=needs.first_bytes,
            most_bytes=needs.most_bytes,
            needed_by=lambda: least_of(needs.schedules).describe_least() if refused else "",
            beside=step.described(needs.context),
            hint="" if self.budget.accepted else self.budget.hint,
        )
        for later in contexts[1:]:  # what they need is looked for now, not in the middle of a step
            self.within(later, budget_bytes, needed=False)
        if contexts[0] != context:
            schedules = self.within(context, budget_bytes)
        traced, least_bytes = schedules[0].search, needs.least_bytes
        chosen = fastest(schedules, budget_bytes)
        while self._wants(context, traced, chosen[1].total_s) and self._faster(
            context, schedules, budget_bytes, below_s(schedules, chosen)
        ):
            schedules = self.within(context, budget_bytes)
            chosen = fastest(schedules, budget_bytes)
            least_bytes = self._needs(contexts).least_bytes
        step.progress(WRITE)
        planned = emit(
            step,
            context,
            chosen,
            budget_bytes,
            self._modules,
            least_bytes=least_bytes,
            traced=traced,
            frontier=frontier_over(schedules if len(contexts) == 1 else needs.schedules),
            host=self._host,
            origin=origin,
        )
        if len(contexts) > 1:  # what shares are of
            before, after = (dict(step.described(c)) for c in (context, contexts[-1]))
            full = replace(
                planned.plan,
                baseline_peak_bytes=needs.full_bytes,
                usual=growth(before, after),
                zeros_budget_bytes=needs.most_bytes,
            )
            planned = replace(planned, plan=full)
        if self._effort.is_spent and self._forms:
            less = replace(planned.plan, forms_left=len(self._forms))
            planned = replace(planned, plan=less)
        if step.device.type == "cuda" and step.inputs:
            torch.cuda.empty_cache()  # blocks that measuring has left would be handed out whole
        return planned

    def _wants(self, context: StepContext, traced: Search, seconds: float) -> bool:
        """Whether one more form is looked at, where there is a plan of so many ``seconds``."""
        if context.region or self.started:  # in a step nothing is measured that is not needed
            return False
        if seconds > MUCH_SLOWER * traced.baseline.total_s:
            return True
        are_known = any(own.form.has_parts for own in self._known)
        return not are_known and self._has_large_loss(context, traced)

    def _has_large_loss(self, context: StepContext, traced: Search) -> bool:
        """Whether a loss's gradient takes a good part of what a step allocates."""
        loss_bytes = largest_gradient_bytes(traced.measured.line.joint)
        own_bytes = traced.counted_bytes(traced.baseline) - self.step.given_bytes(context)
        return LARGE_LOSS * loss_bytes >= own_bytes

    def resolved_for(self, context: StepContext) -> tuple[StepContext, ...]:
        """Contexts that a budget is resolved for: those of the usual loop, or the call's.

        A budget must reach the least of the first one. A share, ``"min"`` and the least that a plan
        names are those of the one that needs more of the first two; an error names the last, too.
        """
        if self.started or not self._is_usual(context):
            return (context,)
        loop = usual_loop(self.step, context)
        return loop.cleared, loop.between, loop.zeros

    def _is_usual(self, context: StepContext) -> bool:
        is_one = self.step.caller.in_flight == 1 and not context.region
        return is_one and self.budget.usual

    def usual(self, context: StepContext) -> StepContext:
        """The step of the usual loop that least budgets are of, at a call's sizes."""
        if not self._is_usual(context):
            return context
        loop = usual_loop(self.step, replace(context, kept_bytes=0))
        each = (loop.cleared, loop.between)
        return max(each, key=lambda own: least_of(self.within(own, None, run=False)).least_bytes)

    def _needs(self, contexts: Sequence[StepContext]) -> Needs:
        """What steps need in a context, or in those of :meth:`resolved_for`."""
        each = [self.within(context, None) for context in contexts]
        full, least = [], []
        for context, schedules in zip(contexts, each, strict=True):
            traced = schedules[0].search
            full.append(self._of_all(context, traced.counted_bytes(traced.baseline)))
            least.append(self._of_all(context, least_of(schedules).least_bytes))
        most = max(range(len(contexts[:2])), key=lambda i: (least[i], full[i]))
        return Needs(
            full_bytes=max(full[:2]),
            least_bytes=least[most],
            first_bytes=least[0],
            most_bytes=max(least),
            schedules=each[most],
            context=contexts[most],
        )

    def resolve_again(self, context: StepContext) -> None:
        """Let a share, or ``"min"``, mean what it does in the context of a call, if that is more.

        It never becomes less: steps before may have taken what it was.
        """
        needs = self._needs((context,))
        nbytes = self.budget.written.bytes_of(
            full_bytes=needs.full_bytes, least_bytes=needs.least_bytes
        )
        if nbytes > (self.budget.nbytes or 0):
            LOG.info("the budget %r is %d bytes now", self.budget.written.written, nbytes)
            self.budget.set(nbytes)

    @property
    def _is_refused(self) -> bool:
        """Whether a budget that is too small is an error: a later step grows it, or runs with a
        warning, and to describe the least peak of a large step takes seconds.
        """
        return not self.started or (self.budget.may_raise and not self.budget.grows)

    def _within_share(
        self, contexts: Sequence[StepContext], budget: Budget, schedules: list[Schedules]
    ) -> list[Schedules]:
        """Schedules where the budget is the least, or a share: of more forms until one fits."""
        context = contexts[0]
        full_bytes = self._needs(contexts).full_bytes
        nbytes = budget.bytes_of(full_bytes=full_bytes, least_bytes=0)
        while (least_bytes := least_of(schedules).least_bytes) > nbytes:
            needed = nbytes > 0
            if not (
                self._unshared(context, needed=needed)
                or self._grown(context, below_bytes=least_bytes, needed=needed)
            ):
                break
            schedules = self.within(context, None)
        return schedules

    def _kept(self, key: str) -> Planned | None:
        """A plan that was made before of such a step."""
        plan = self.step.store.get("plan", key, Plan)
        if plan is None:
            return None
        try:
            variant = self.step.variant(plan.form)
            return follow(plan, variant.blocks, self._modules, host=self._host)
        except PlanError as error:
            LOG.warning("a known plan is ignored: %s", error)
            return None

    def _followed(self, kept: Plan, context: StepContext) -> Planned:
        """A plan that was kept, with its graphs."""
        if kept.origin is None or kept.measured is None:
            raise PlanError("this plan was not made of a model: compile without plan=")
        line = self.step.line(kept.form)
        now = replace(self.step.origin(), options=kept.origin.options, held=kept.origin.held)
        variant = None
        if now == kept.origin:
            try:
                variant = self.step.take(line, kept.form, costs=kept.measured)
            except CostError as error:
                raise PlanError(f"the plan cannot be followed: {error}") from error
            now = self._origin(variant, context)
        told = tuple(differences(kept.origin, now))
        if told or variant is None:
            raise PlanError(
                f"the plan is not one of this step: {'; '.join(told)}. Compile as the plan was "
                "made, or leave plan= out to plan again",
                differs=told,
            )
        kept = replace(kept, measured_peak_bytes=None)  # it was that of another process
        return follow(kept, variant.blocks, self._modules, host=self._host)

    def _origin(self, variant: Variant, context: StepContext) -> Origin:
        """What a plan would hold for."""
        return origin_of_plan(
            variant.origin,
            self.step.caller,
            variant.around(context),
            host=self._host,
            exact=self._exact,
            split=self._split,
            effort=self._effort.asked,
            generators=self._generators,
            allocator=self._rules(),
        )

    # Processes that follow the same plans

    @property
    def together(self) -> Peers | None:
        """Processes that must follow the same plans at all calls; ``None``: there are none."""
        return self._peers if self._bound or self.step.has_collectives else None

    def bind(self, peers: Peers | None) -> None:
        """Let processes follow the same plans at all calls, as another graph of the step asks."""
        self._peers, self._bound = peers, True

    def _shared(self, find: Callable[[], Planned]) -> Planned:
        """What ``find`` leads to in the first of several processes."""
        if self._peers is None:
            return find()
        self._measure()  # all of them: they agree on that
        found: list[Planned] = []

        def make() -> Plan:
            found.append(find().completed())  # others cannot
            return found[0].plan

        with self._peers.telling():
            plan = self._peers.follow("a plan", Plan, make)
            planned = found[0] if plan is None else self._as_first(plan)
            agreed_graphs(self._peers, planned.graphs.structure_digest if planned else "none")
        assert planned is not None  # the others' differ from none
        return planned

    def _as_first(self, plan: Plan) -> Planned | None:
        """The first process's plan with constants of this one; ``None``: it cannot be followed."""
        try:
            variant = self.step.variant(plan.form)
            graphs = carry_out(plan, variant.blocks, self._modules, host=self._host)
        except PlanError:
            return None
        origin = plan.origin and replace(plan.origin, code=variant.origin.code)
        forward_code, backward_code = graphs.forward_code, graphs.backward_code
        plan = replace(plan, origin=origin, forward_code=forward_code, backward_code=backward_code)
        return Planned(plan, graphs)

    # Budgets

    def shared_out(self, context: StepContext) -> StepContext:
        """A call, with what is left alone for others that may wait beside it.

        What the budget leaves beside the model is the same for each of so many steps in flight, so
        that each may be the next whose backward runs.
        """
        count = self.step.caller.in_flight
        if count == 1 or context.waiting >= count:
            return context
        given_bytes = self.step.given_bytes(context) - context.waiting_bytes
        if self.budget.nbytes is None:  # a share of what so many take, or the least of it
            schedules = self.within(context, None)
            traced = schedules[0].search
            nbytes = self.budget.written.bytes_of(
                full_bytes=self._of_all(context, traced.counted_bytes(traced.baseline)),
                least_bytes=self._of_all(context, least_of(schedules).least_bytes),
            )
            if self._peers is not None:
                nbytes = self._peers.agree("the budget", int, nbytes, lambda n: max(n.values()))
            self.budget.set(nbytes)
        assert self.budget.nbytes is not None
        others_bytes = (count - 1) * ((self.budget.nbytes - given_bytes) // count)
        return replace(context, others_bytes=max(0, others_bytes - context.waiting_bytes))

    def _of_all(self, context: StepContext, nbytes: int) -> int:
        """The peak of all that may be in flight, where that of one with all else is ``nbytes``."""
        count = self.step.caller.in_flight
        if count == 1 or context.waiting >= count:
            return nbytes
        given_bytes = self.step.given_bytes(context)
        beside_bytes = context.waiting_bytes + context.others_bytes
        alike_bytes = given_bytes - beside_bytes + count * (nbytes - given_bytes)
        return max(nbytes, alike_bytes)  # those that wait may hold more than this one

    def grown(self, error: BudgetError) -> bool:
        """Whether the budget is ``"min"``, and then lets it be what a call needs at the least."""
        nbytes = error.least_budget_bytes
        if nbytes is None or not self.budget.grows:
            return False
        LOG.info(
            "the budget %r is %s from now on: a call needs that at the least",
            self.budget.written.written,
            format_bytes(nbytes),
        )
        self.budget.set(nbytes)
        return True

    def fits(self, context: StepContext, *, thorough: bool = True) -> bool:
        """Whether a call keeps to the budget, by schedules known or, ``thorough``, any."""
        assert self.budget.nbytes is not None
        budget_bytes = self.budget.nbytes if thorough else None
        return self.least_bytes(context, budget_bytes) <= self.budget.nbytes

    # Corrections

    def known_correction(self) -> Correction:
        """The correction that steps of the capture's sizes have taught another process."""
        step = self.step
        return step.store.get("correction", step.correction_key, Correction) or NO_CORRECTION

    def keep_correction(self, correction: Correction) -> None:
        """Let other processes know a correction for the sizes of the capture."""
        self.step.store.put("correction", self.step.correction_key, Correction, correction)

    def _measure(self) -> None:
        """Let all forms of the step be measured that are looked at first."""
        if self._forms is not None:
            return
        self._forms = []
        if self.step.variants[0].form != TRACED:  # a plan that was kept
            return
        if not self._exact:
            self.step.add(Form(exact=False))
        if self._peers is not None:  # which must all have the same forms, whatever one finds
            for form in parted(self.step.joint, exact=False) if self._split is True else ():
                self.step.add(form)
        elif self._split is True or (self._split and not self.step.has_units):
            self._forms += parted(self.step.joint, exact=self._split == "exact")
            self._coarse = self._forms[0]
        self._may_unshare = self._peers is None and not self.step.has_units

    def _grown(
        self,
        context: StepContext,
        below_bytes: int = MOST_BYTES,
        *,
        needed: bool = True,
        below_s: float = math.inf,
    ) -> bool:
        """Let schedules be known of one more form of the step, if there is one, and the effort
        allows for it or it is ``needed`` to fit.

        At the sizes of the capture one is left out whose largest operation alone takes
        ``below_bytes`` with the gradients before it, where none exists that these are added to.
        One that takes ``below_s`` with everything kept, and all in smaller parts, wait until memory
        asks for them.
        """
        if context.scaled and self._split == "exact" and not self._scaled:
            self._scaled = True
            left = self._forms or []
            there = [*left, *(own.form for own in self._known)]
            others = parted(self.step.joint, exact=True, beside=False)
            self._forms = [*(form for form in others if form not in there), *left]
        first = replace(context, sizes=self.step.sizes.hints)
        is_bound = first == context and not context.existing
        most_bytes = below_bytes - self.step.given_bytes(context) if is_bound else None
        while self._forms:
            form = self._forms[0]
            is_new = self._added(
                form, first, needed=needed, below_bytes=most_bytes, below_s=below_s
            )
            if is_new is None:
                return False
            self._forms.pop(0)
            if is_new:
                return True
        return False

    def _faster(
        self, context: StepContext, schedules: list[Schedules], budget_bytes: int, below_s: float
    ) -> bool:
        """Let schedules be known of one more form that may take less than ``below_s``."""
        if below_s > MUCH_SLOWER * schedules[0].search.baseline.total_s and (
            self._unshared(context, needed=False)
            or self._aim(context, schedules, budget_bytes, below_s=below_s, needed=False)
        ):
            return True
        return self._grown(context, below_s=below_s, needed=False)

    def _unshared(self, context: StepContext, *, needed: bool = True) -> bool:
        """Let schedules be known of the form in which equal operations are each by itself."""
        if not self._may_unshare:
            return False
        first = replace(context, sizes=self.step.sizes.hints)
        is_new = self._added(Form(shared=False), first, needed=needed)
        self._may_unshare = is_new is None
        return bool(is_new)

    def _aim(
        self,
        context: StepContext,
        schedules: list[Schedules],
        budget_bytes: int,
        *,
        needed: bool,
        below_s: float = math.inf,
    ) -> bool:
        """Let schedules be known of a form whose parts only buy what a budget lacks.

        They are added to the forms that are fastest with everything kept, at the sizes of the
        capture; where a loss is large, once its parts were looked at. A budget of 0 asks for the
        least of all: of every form, whichever was faster.
        """
        first = context.sizes == self.step.sizes.hints
        if self._coarse is None or not first or context.region or self._host is not None:
            return False
        is_loss = self._has_large_loss(context, schedules[0].search)
        if is_loss and self._coarse in (self._forms or ()):
            return False
        if self._effort.looks(self.step.joint, needed=needed, in_step=self.started) is None:
            return False
        part_bytes, is_last = part_sizes(self.step.joint)[1], budget_bytes == 0
        for own in sorted(schedules, key=lambda own: own.search.baseline.total_s):
            candidate = wanted(own.search, budget_bytes, below_s)
            count = sum(not last for _, last in self._aims)
            is_done = (own.form, is_last) in self._aims or bool(own.form.peak)
            is_done = is_done or (count >= MOST_AIMS and not is_last)
            if is_done or (is_loss and not own.form.has_parts) or candidate.total_s >= below_s:
                continue
            form = aimed(
                own.search,
                candidate,
                own.form,
                budget_bytes,
                exact=self._split == "exact",
                beside=not context.scaled,
                part_bytes=part_bytes,
            )
            is_new = form is not None and self._added(form, context, needed=needed, below_s=below_s)
            self._aims.add((own.form, is_last))
            if is_new:
                return True
        return False

    def _added(
        self,
        form: Form,
        context: StepContext,
        *,
        needed: bool,
        below_bytes: int | None = None,
        below_s: float = math.inf,
    ) -> bool | None:
        """Let schedules of a form be known; whether it is one that is computed like no other.

        ``None``: that would take more than the effort allows for, and is not ``needed`` to fit, or
        the form takes ``below_s`` or more with everything kept.
        """
        if below_s < math.inf and form in self._slow:
            return None
        looks = self._effort.looks(self.step.joint, needed=needed, in_step=self.started)
        if looks is None:
            return None
        variant = self.step.add(form, below_bytes=below_bytes, looks=looks)
        taken = variant is not None
        if not (needed or self._effort.spend(looks, self.step.joint, taken=taken)):
            return None
        if variant is None:
            return False
        if variant.measured.kept_s >= below_s:
            self._slow.add(form)
            self.step.drop(variant)
            return None
        self._known.append(self._schedules(variant, None, context))
        return True

    def grow(self, context: StepContext) -> bool:
        """Let schedules be known of one more form of the step, if there is one."""
        self._look(context)
        return self._unshared(context) or self._grown(context)

    def refuse(self, run: Parts) -> None:
        """Let no later plan compute a run in parts."""
        forms = self.step.refuse(run)
        self._known = [own for own in self._known if own.form not in forms]
        if self._forms is not None:  # else none was looked at
            self._forms = [*forms, *self._forms]  # without the run
        self.sent.clear()

    def look_at_all(self, context: StepContext) -> list[Schedules]:
        """Schedules that are known, of all forms of the step."""
        while self.grow(context):
            pass
        return self.within(context, None)

    # Schedules

    def within(
        self,
        context: StepContext,
        budget_bytes: int | None,
        *,
        run: bool = True,
        bits: bool = True,
        needed: bool = True,
    ) -> list[Schedules]:
        """Schedules of each variant, with what a call finds beside it.

        Those that are known are taken; where none fits, others are looked for.

        Args:
            context: of the call.
            budget_bytes: within which they are to be; ``None``: those that are known will do.
            run: what no law tells of at its sizes; else costs may be a little off, and those that
                are known will do.
            bits: ask whether parts keep them there; else they are taken to.
            needed: however long it takes; else where the effort allows for it.
        """
        at_first_size = run and context.sizes == self.step.sizes.hints
        new = self._look(context) and at_first_size

        def known() -> list[Schedules]:
            variants = self._variants(context.sizes, run=run, bits=bits)
            pairs = zip(self._known, variants, strict=True)
            return [
                own.at(variant, context, budget_bytes=budget_bytes)
                for own, variant in pairs
                if self._may(context, own)
            ]

        found = known()
        if not run:
            return found
        found = self._with_sent(context.sizes, found)
        if budget_bytes is None or least_of(found).least_bytes <= budget_bytes:
            return found
        # A budget that grows does so where nothing fits.
        must = needed and not (self.started and self.budget.grows)
        count = len(self._known)

        def widened(found: list[Schedules]) -> list[Schedules]:
            """Schedules that are searched for, and those of more forms until one fits."""
            if not new and (must or self._effort.allows_search(self.step.joint, count)):
                searched = self.searched(context, bits=bits)
                found = [*self._with_sent(context.sizes, searched), *found]
            while (least_bytes := least_of(found).least_bytes) > budget_bytes:
                is_new = self._unshared(context, needed=must) or self._aim(
                    context, found, budget_bytes, needed=must
                )
                is_new = is_new or self._grown(context, below_bytes=least_bytes, needed=must)
                # Last, what a budget of any size would lead to: errors name the least of that.
                if not is_new and not self._aim(context, found, 0, needed=must):
                    break
                found = self._with_sent(context.sizes, known())
                if not at_first_size and least_of(found).least_bytes > budget_bytes:
                    self._search_last(context, bits=bits)
                    found = self._with_sent(context.sizes, known())
            return found

        try:
            found = widened(found)
        except CostError:  # as in a profiler: a running job goes on with what was measured before
            if not self.started:
                raise
            found = self._with_sent(context.sizes, known())
        least_bytes = least_of(found).least_bytes
        if context.scaled and least_bytes > budget_bytes:
            return self.within(replace(context, scaled=False), budget_bytes)
        return found

    def _variants(self, sizes: Values, *, run: bool, bits: bool) -> list[Variant]:
        """The step's variants at a call's sizes, of a running job with estimated workspaces where
        they cannot be measured.
        """
        try:
            variants = self.step.at(sizes, run=run, bits=bits)
        except CostError as error:
            if not self.started:
                raise
            why = str(error)
        else:
            if run:
                self.estimated.discard(sizes)
            return variants
        self.estimated.add(sizes)
        warn(
            "the workspaces of a step of new sizes are estimated from other sizes, so it may take "
            f"more than its budget: {why}"
        )
        return self.step.at(sizes, run=False, bits=bits)

    def searched(self, context: StepContext, *, bits: bool = True) -> list[Schedules]:
        """Schedules of each variant, looked for anew; they are known from then on."""
        found = self._search(context, bits=bits)
        known = self._known or found
        self._known = [own.knowing(new) for own, new in zip(known, found, strict=True)]
        return [own for own in found if self._may(context, own)]

    def _search_last(self, context: StepContext, *, bits: bool) -> None:
        """Let schedules be known that are found at a call's sizes, of the form looked at last."""
        variant = self.step.at(context.sizes, bits=bits)[-1]
        own = self._known[-1]
        self._known[-1] = own.knowing(self._schedules(variant, own, context))

    def _may(self, context: StepContext, schedules: Schedules) -> bool:
        """Whether a call may follow them, where anything else fits.

        Exact gradients are not computed beside a loss whose gradient is not 1; of several graphs
        nothing is in parts that other processes would have to find as well.
        """
        form = schedules.form
        alone = self._peers is None or not (context.region and form.has_parts)
        return alone and not (context.scaled and form.beside and form.exact)

    def _look(self, context: StepContext) -> bool:
        """Let some schedules be known, those at the sizes of the capture; were none?"""
        new = not self._known
        if new:
            self._known = self._search(replace(context, sizes=self.step.sizes.hints))
        return new

    def _search(self, context: StepContext, *, bits: bool = True) -> list[Schedules]:
        """Schedules of each variant, searched for with what is known."""
        self._measure()
        variants = self.step.at(context.sizes, bits=bits)
        known: Sequence[Schedules | None] = self._known or [None] * len(variants)
        return [self._schedules(*pair, context) for pair in zip(variants, known, strict=True)]

    def _schedules(
        self, variant: Variant, known: Schedules | None, context: StepContext
    ) -> Schedules:
        """Schedules of a variant, searched for with those that are known of another size."""
        host = self._host
        link = None if host is None else self._link_to(host)
        search = Search.over(
            variant.measured,
            variant.blocks,
            variant.around(context),
            progress=self.step.progress,
            generators=generators_of(self._generators),
            allocator=self._rules(),
            budget_on=self.step.caller.budget_on,
            known=known.search if known else None,
        )
        transfers = None if host is None else Transfers.of(search, host, link)
        return Schedules(search, transfers, variant.form)

    def _with_sent(self, sizes: Values, schedules: list[Schedules]) -> list[Schedules]:
        """``schedules``, knowing what travels in plans that were found apart from them."""
        if sizes not in self.sent:
            return schedules
        each = itertools.zip_longest(schedules, self.sent[sizes], fillvalue=())  # forms came later
        return [own.with_sent(sent) for own, sent in each if own]

    def _rules(self) -> AllocatorSettings | None:
        """The rules of the device's allocator; ``None``: it has none."""
        return self._allocator or settings_of(self.step.device)

    def _link_to(self, host: HostMemory) -> MeasuredLink:
        """The link to host memory: once it is found it stays the same."""
        self._link = self._link or link_of(self.step, host)
        return self._link

    def least_bytes(
        self, context: StepContext, budget_bytes: int | None, *, bits: bool = True
    ) -> int:
        """The least budget of a call: see :meth:`within`."""
        return least_of(self.within(context, budget_bytes, bits=bits)).least_bytes

    def room_bytes(self, context: StepContext) -> int:
        """The least that a step allocates beyond what is there whatever its plan."""
        return min(
            own.least_bytes - own.search.setting.context_bytes.given_bytes
            for own in self.within(context, None)
        )

    def alone_bytes(
        self,
        context: StepContext,
        budget_bytes: int,
        *,
        bits: bool = True,
        exact_parts: bool = True,
    ) -> int:
        """The least budget of a call where it alone is compiled, with nothing known beforehand;
        of forms up to the first that fits. Bits are asked for of those alone that else fit; not
        ``exact_parts``: of forms alone whose parts need not keep them.
        """
        found = []
        traced, *others = self.step.variants
        if not exact_parts:
            others = [own for own in others if not own.form.keeps_bits]
        for own in (traced, *reversed(others)):  # with most in parts first
            asks = own.form.keeps_bits
            for run in (False, True) if asks and bits else (not asks,):
                variant = self.step.resized(own, context.sizes, run=run)
                nbytes = self._schedules(variant, None, context).least_bytes
                if nbytes > budget_bytes:
                    break
            found.append(nbytes)
            if nbytes <= budget_bytes:
                break
        return min(found)

    # Other sizes

    def roughly(self, context: StepContext) -> int:
        """The least budget of a call, by schedules that are known; nothing is run for it."""
        self._look(context)
        found = []
        for own, variant in zip(self._known, self.step.at(context.sizes, run=False), strict=True):
            if own.transfers is None:
                around = variant.around(context)
                found.append(least_bytes_at(own.search, variant.measured, around))
            else:
                found.append(own.at(variant, context, budget_bytes=None).least_bytes)
        return min(found)
