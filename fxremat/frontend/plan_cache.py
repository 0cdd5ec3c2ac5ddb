"""The plans of one captured graph, and the choice among them at each call."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from fxremat import torch_compat
from fxremat.costs.workspaces import library_workspaces
from fxremat.errors import BudgetError, CostError
from fxremat.frontend.agreed import AGREED, agreed_corrections
from fxremat.frontend.comparison import runs_in
from fxremat.frontend.corrections import Corrections, Taken, warn_counted
from fxremat.frontend.emission import Planned
from fxremat.frontend.largest import advised
from fxremat.frontend.loop import Loop
from fxremat.frontend.outside import FIRST
from fxremat.frontend.pipeline import Planner
from fxremat.frontend.regions import Regions
from fxremat.frontend.shortfall import Shortfall, excess_bytes, warn
from fxremat.passes.emit.code import Around, Emitted
from fxremat.passes.joint.graph import allocated_bytes
from fxremat.passes.joint.sizes import Values, evaluated, layouts_of
from fxremat.passes.split.beside import computed_anew
from fxremat.passes.split.parts import Parts
from fxremat.planner.context import StepContext
from fxremat.planner.context_bytes import made_outputs, own_gradients
from fxremat.progress import LOG
from fxremat.report.plan import Plan
from fxremat.runtime import cuda_graph
from fxremat.runtime.counted import Count
from fxremat.runtime.gradients import Contributors, Gradients, adds, leaves_among, with_gradients
from fxremat.runtime.profile import WATCH_EVERY, MemoryProfile
from fxremat.runtime.steps import Step
from fxremat.units import format_bytes, format_seconds

RESOLVED = 3
"""Steps, from the second one on, at which a share or ``"min"`` is resolved again."""

MOST_FOLLOWED = 8
"""Calls of a region whose plans are looked for first: it may be called so often in a step."""

_NONE: Mapping[int, object] = MappingProxyType({})

_NO_PRIMALS: frozenset[int] = frozenset()

MOST_PLANS = 512
"""Plans of a plan cache that are kept; that which was used longest ago goes first."""


class _LessHeldError(Exception):
    """What a call found is not so any more."""


@dataclass(slots=True, eq=False)
class Compiled:
    """A plan in use.

    Attributes:
        planned: the plan, its graphs and its host memory.
        plan_cache: to which it belongs.
        context: that it was made for.
        plain: its graphs compute nothing twice, nor beside a loss, and use no host memory.
        watches: so many steps of it are watched, or until one was seen to its end.
        followed: the context of the latest call that followed it, which may need no other plan.
        shortfall: why it takes more than the budget; ``None``: it does not.
    """

    planned: Planned
    plan_cache: PlanCache
    context: StepContext
    watches: int = 4
    followed: StepContext | None = None
    shortfall: Shortfall | None = None
    _runs: tuple[Values, tuple[torch_compat.BoxedCallable, ...]] | None = None
    _held: tuple[StepContext, int] | None = None
    plain: bool = field(init=False)

    def __post_init__(self) -> None:
        graphs, form = self.planned.graphs, self.planned.plan.form
        self.plain = not (graphs.recomputes or graphs.arena or form.beside)

    @property
    def plan(self) -> Plan:
        """The plan, for people: what a step does not need is computed when somebody asks."""
        with self.plan_cache.loop.planning:
            self._restate()
            self.planned = self.planned.completed()
            return self.planned.plan

    def _restate(self) -> None:
        """Let the plan's figures be those of the latest call, where it was made for another one."""
        planner, followed = self.plan_cache.planner, self.followed
        if followed in (None, self.context) or planner.together is not None or self.shortfall:
            return
        assert followed is not None
        with contextlib.suppress(BudgetError, CostError):
            now, plan = planner.again(followed), self.planned.plan
            same = (now.plan.schedule, now.plan.form) == (plan.schedule, plan.form)
            if same and now.plan.decision == plan.decision:
                found = replace(now.plan, measured_peak_bytes=plan.measured_peak_bytes)
                self.planned = replace(now, plan=found, graphs=self.planned.graphs)
                self.context = followed
        planner.step.measuring_bytes = 0  # that was for a reader, between steps

    def at(self, values: Values) -> tuple[torch_compat.BoxedCallable, ...]:
        """The forward and the backward where the symbols are ``values``."""
        runs = self._runs  # another thread may put those of other numbers there
        if runs is None or runs[0] != values:
            graphs: tuple[Emitted, ...] = self.planned.graphs.both
            if values != tuple(n for _, n in self.planned.plan.sizes):
                names = self.plan_cache.planner.step.sizes.named(values)
                graphs = tuple(graph.at(names) for graph in graphs)
            runs = self._runs = values, tuple(graph.forward for graph in graphs)
        return runs[1]

    def call_through(self, around: Around | None) -> None:
        """Have calls of stages made by what ``around`` makes of them; ``None``: as ever."""
        for graph in self.planned.graphs.both:
            graph.call_through(around)
        self._runs = None  # of other sizes

    def held_bytes(self, context: StepContext) -> int:
        """Device memory of what a forward leaves, beside what others hold, at a call."""
        held = self._held  # another thread may put that of another call there
        if held is None or held[0] is not context:
            turn_bytes = self.plan_cache.planner.step.turn_bytes(context)
            held = self._held = context, self.planned.plan.waiting_bytes + turn_bytes
        return held[1]


MOST_BUFFERS = 256
"""Sizes of which the largest buffers around inputs are remembered; the oldest go first."""


@dataclass(slots=True)
class PlanCache:
    """One captured graph, and a plan for each context in which it was called.

    Attributes:
        planner: makes plans.
        loop: around the model.
        regions: of the model.
        output_count: how many results of the forward go to its caller.
        gradients: primals that get a gradient, and which of the tensors that go in each is.
        passed: places of the backward's results that are inputs of the forward, and these.
        corrections: that its steps have taught.
        returned: places of the gradients that the backward's caller asks for, all or a few.
        plans: by context, the one used last at the end.
        contributors: to the gradients of the graph's leaves.
        calls: their numbers, from the first on; no two threads get the same.
        on_cuda: whether its step runs there.
    """

    planner: Planner
    loop: Loop
    regions: Regions
    output_count: int
    gradients: dict[int, int]
    passed: dict[int, int]
    corrections: Corrections
    returned: tuple[int, ...] = ()
    plans: dict[StepContext, Compiled] = field(default_factory=dict)
    contributors: Contributors = field(default_factory=Contributors)
    calls: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    on_cuda: bool = True
    _own: frozenset[int] = frozenset()
    _made: tuple[int, ...] = ()
    _without: tuple[int, ...] = ()  # primals that get no gradient
    _storages: tuple[tuple[int, Any], ...] = ()  # of primals, and their bytes as expressions
    _buffers: dict[Values, int] = field(default_factory=dict)  # bytes beyond these, by sizes
    _device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # of the step
    _latest: tuple[Any, StepContext, Compiled] | None = None  # and what was found at that call
    _resolved: int = 0
    _changed_bits: list[Parts] = field(default_factory=list)  # runs that had others in parts
    _trained: bool = False  # the tensors that it computes a gradient of are known to the regions
    _counts: bool = True  # the allocator does
    _is_sized: bool = True
    _found: tuple[tuple[Any, ...], StepContext] | None = None  # at a call of a region, and in it
    _followed: tuple[tuple[StepContext, Compiled], ...] = ()  # at calls of regions, the latest

    @staticmethod
    def of(
        planner: Planner,
        joint: fx.GraphModule,
        inputs: Mapping[int, Tensor],
        regions: Regions,
        *,
        output_count: int,
        kept: Plan | None = None,
    ) -> PlanCache:
        """The plan cache of a graph, with its first plan.

        Args:
            planner: makes plans.
            joint: the captured graph.
            inputs: values of its primals, where known.
            regions: of the model, with the loop around it.
            output_count: how many results of the forward go to its caller.
            kept: a plan that is followed, instead of making one.

        Raises:
            BudgetError, PlanError, HostMemoryError, …: as planning raises them.
        """
        plan_cache = PlanCache(
            planner,
            regions.loop,
            regions,
            output_count,
            torch_compat.differentiated_primals(joint, forward_output_count=output_count),
            torch_compat.passed_primals(joint, forward_output_count=output_count),
            Corrections.of(planner, regions.loop),
        )
        values = [inputs.get(i) for i in range(len(torch_compat.primal_values(joint, ())))]
        plan_cache._without = tuple(i for i in range(len(values)) if i not in plan_cache.gradients)
        plan_cache._storages = tuple(
            (i, layout.storage_bytes)
            for i, node in enumerate(planner.step.placeholders[: len(values)])
            for layout in layouts_of(node)
        )
        plan_cache._device = planner.step.device
        plan_cache.on_cuda = plan_cache._device.type == "cuda"
        plan_cache._counts = torch_compat.counted_bytes(planner.step.device) is not None
        plan_cache._is_sized = bool(planner.step.sizes.hints)
        found = plan_cache._context_of(plan_cache._find(values, planner.step.sizes.hints)[0])
        context = regions.context_unknown(planner, found) if regions.several else found
        planned = planner.first(context, kept=kept, least=regions.several)
        if regions.several:
            made = [v for i in plan_cache.gradients if isinstance(v := values[i], Tensor)]
            regions.check_least(planner, found, made)
        plan_cache._own = own_gradients(planner.step.joint)
        plan_cache._made = made_outputs(planner.step.joint)
        plan_cache.plans[context] = Compiled(planned, plan_cache, context)
        return plan_cache

    def _compare(self, compiled: Compiled, number: int, values: Values) -> None:
        """Let a run of a plan be compared with its operations at once, where that is asked for."""
        comparison, planner, plan = self.loop.comparison, self.planner, compiled.planned.plan
        form = plan.form
        if not comparison.every:
            return
        if not any(self.loop.in_flight):
            comparison.cancel()
        if not form.has_parts or not comparison.is_due(number, measured=self.loop.watcher.is_on):
            return
        step, sizes = planner.step, planner.step.sizes.named(values)
        runs = runs_in(form, [node.target for node in step.variant(form).line.nodes])
        traced = step.traced(values).measured

        def takes_bytes(run: Parts) -> int:
            workspace_bytes = traced.most_workspace_bytes(run.whole)
            return run.compared_bytes(sizes, workspace_bytes=workspace_bytes)

        room_bytes, refuse = plan.budget_bytes - plan.counted_bytes, self._changed_bits.append
        comparison.begin(runs, number, room_bytes, takes_bytes=takes_bytes, refuse=refuse)

    def _refuse(self) -> None:
        """Plan without runs that have other bits in parts."""
        with self.loop.planning:
            while self._changed_bits:
                self.planner.refuse(self._changed_bits.pop())
            self.plans.clear()
            self._followed, self._latest = (), None
            self.corrections.changes += 1

    def begin(
        self, args: list[Any], *, ended_by: str = ""
    ) -> tuple[Step, torch_compat.BoxedCallable]:
        """A call of the graph begins, planned for what it finds.

        Args:
            args: the primals.
            ended_by: the user's line after which the step leaves the graph, and why.

        Returns the step, and what runs its forward.

        Raises:
            BudgetError: no plan that was found fits; nothing has run.
        """
        loop, several = self.loop, self.regions.several
        loop.called()
        loop.optimizers.watcher.end()
        if not several:
            loop.watcher.end()
        number = next(self.calls)
        together = self.planner.together
        if together is not None and 1 < number <= AGREED:
            self.corrections.take(agreed_corrections(together, self.corrections.seen))
        if self._changed_bits:
            self._refuse()
        values = self.planner.step.sizes.values(args) if self._is_sized else ()
        sizes = self._shaping(values) if values else values
        context, compiled, leaves = self._plan_at(args, sizes, ended_by)
        captured = self.planner.step
        if captured.measuring_bytes:
            measuring_bytes, captured.measuring_bytes = captured.measuring_bytes, 0
            loop.check_measuring(measuring_bytes, args, captured.device)
        arena = None if compiled.plain else compiled.planned.graphs.arena
        if arena is not None:
            cuda_graph.refuse_host_memory(arena.nbytes)
        count = None
        if several:
            self.regions.begin()
        else:
            teaches = together is None or number < AGREED
            is_due = number % WATCH_EVERY == 0 or (loop.outside.nbytes and number <= FIRST)
            if is_due and not compiled.watches:
                compiled.watches = 1
            if compiled.watches and teaches and self.corrections.are_watched(sizes):
                learn = functools.partial(
                    _learn, context, compiled, is_first=not loop.budget.trained
                )
                compiled.watches -= loop.watcher.begin(self.planner.step.device, learn)
            if self._counts:
                count = self._count(context)
        forward, backward = compiled.at(values)
        self._compare(compiled, number, values)
        step = Step(
            compiled,
            backward,
            context=context,
            leaves=leaves,
            passed={i: args[own] for i, own in self.passed.items()} if self.passed else _NONE,
            count=count,
            missing=self._missing(context, leaves) if loop.caller.accumulate else _NO_PRIMALS,
            kept=loop.in_flight.kept(loop.in_flight.waiting()) if context.kept_bytes else (),
        )
        return step, forward

    def _count(self, context: StepContext) -> Count | None:
        """Begin to count what a call takes that finds ``context``."""
        step = self.planner.step

        def there_bytes() -> int:
            """What is given but for what is allocated later, as a correction has shown."""
            return step.given_bytes(context) - step.late_bytes - context.correction.more_bytes

        return Count.begin(step.device, there_bytes)

    def left(self, step: Step, results: list[Any]) -> list[Any]:
        """A forward has run.

        Args:
            step: that :meth:`begin` has told of.
            results: of the emitted forward.

        Returns the outputs and the step's token.
        """
        saved = results[self.output_count :]
        del results[self.output_count :]
        # Autograd makes the results lead to the step: it must not lead to them.
        returned = set(map(id, results))
        saved = [t.detach() if id(t) in returned else t for t in saved]
        held_bytes = step.plan.held_bytes(step.context)
        step.keep(saved, [results[i] for i in self._made], held_bytes=held_bytes)
        self.loop.in_flight.add(step)
        if self.regions.several:
            self.regions.left(step)
        else:
            self.loop.watcher.left(step)
        results.append(step.token())
        return results

    def backward(self, step: Step, args: list[Any]) -> Sequence[Any]:
        """Run the backward of a step.

        Args:
            step: of which.
            args: its token and the tangents; emptied.

        Returns the gradients, by primal; ``None`` for those that are handed over. Of primals that
        are parts of a tensor without one, the first stands for all.

        Raises:
            BackwardError: what the step needs is gone, or was written to.
        """
        in_flight, watcher = self.loop.in_flight, self.loop.watcher
        self._back(step)
        gradients = Gradients(
            step.leaves,
            places=self.gradients,
            own=self._own,
            contributors=self.contributors,
            others=in_flight.has_others(step),
        )
        tangents = self._tangents(step, args)
        values: list[Any] = step.take()
        values.extend(args[1:])
        args.clear()
        values.append(gradients)
        beside = not (step.plan.plain or self.regions.several)
        beside = beside and bool(step.plan.planned.plan.form.beside)
        anew = computed_anew() if beside else 0
        try:
            if self.on_cuda:
                with torch_compat.without_autotuning():
                    step.backward(values)
            else:  # nothing is tried out
                step.backward(values)
        except BaseException as error:
            abandon(values, error)
            raise
        if tangents is not None:
            apart = len({tangent.key for tangent in tangents}) == len(tangents)
            released = apart and not any(tangents)
            self.corrections.saw_tangents(released=released)
            if not released and self.regions.several:
                self.regions.choose_again()
        if self.regions.several:
            self.regions.done(step)
            if not self._trained:
                self._trained = True
                leaves = (leaf for i in self.gradients if (leaf := step.leaves[i]) is not None)
                self.regions.trained.update((id(leaf), weakref.ref(leaf)) for leaf in leaves)
        elif watcher.is_on and any(in_flight):
            watcher.after(step)  # what follows is another step's
        if beside:
            self.corrections.foresaw(is_so=anew == computed_anew())
        returned: list[Any] = gradients.finish()
        if step.count is not None:
            self._counted(step, step.count.peak_bytes())
        self.loop.budget.trained = True
        if gradients.asked_for:
            in_flight.returned(returned)
        if step.passed:
            returned = [step.passed.get(place, own) for place, own in enumerate(returned)]
        if len(self.returned) == len(returned):
            return returned
        return [returned[place] for place in self.returned]

    def _tangents(self, step: Step, args: Sequence[Any]) -> list[torch_compat.StorageAlive] | None:
        """Gradients of outputs that a backward is to release; ``None``: nobody asks.

        That of a loss, one number, is held by who calls ``backward()``: plans have room for it.
        """
        if not self.corrections.checks_tangents(watched=self.loop.watcher.is_watching(step)):
            return None
        joint = self.planner.step.joint
        return [
            torch_compat.StorageAlive(tangent)
            for node, tangent in zip(joint.tangents, args[1:], strict=True)
            if isinstance(tangent, Tensor)
            and joint.released.issuperset(joint.storages.of_node[node])
            and tangent.numel() > 1
        ]

    def _counted(self, step: Step, peak_bytes: int | None) -> None:
        """A step has ended; what the allocator tells of it, if that tells anything."""
        budget_bytes = self.loop.budget.nbytes or 0
        most_bytes = max(budget_bytes, step.plan.planned.plan.counted_bytes)
        if peak_bytes is None or peak_bytes <= most_bytes or self.loop.watcher.is_watching(step):
            return
        if step.context.waiting or step.number != self.loop.in_flight.latest:
            return  # of several at once it tells of none
        step.plan.watches += 1
        warn_counted(peak_bytes, budget_bytes)

    def _back(self, step: Step) -> None:
        """Note what is there as a backward begins that was not when its forward ran."""
        if self.regions.several:
            self.regions.back(step, self.loop.in_flight)
        context: StepContext = step.context
        watched = self.loop.watcher.is_watching(step)
        if self.regions.several and not watched:
            return
        now = with_gradients(step.leaves)
        if watched:
            gone = context.existing - now
            nbytes = [
                replace(context, existing=those).gradient_bytes(self.planner.step.joint)
                for those in (gone, gone & step.missing)
            ]
            outputs = [alive.nbytes for alive in step.kept if not alive]
            self.loop.watcher.back(step, gone=nbytes[0], never=nbytes[1], released=outputs)
        sums = self.contributors.summing == torch_compat.current_backward()
        nothing = not (now or sums or context.existing or context.kept_bytes)
        if nothing or self.regions.several:
            return
        self.corrections.backward_began(
            context, outputs=any(step.kept), gradients=bool(now & context.existing)
        )
        came: list[Set[int]] = [now - context.existing]
        if sums:
            # Autograd holds those of other steps, which may be all that was planned for.
            came.append(self.gradients.keys() - (context.existing - now))
        if any(came):
            self.corrections.gradients_came(context, came)

    def _shaping(self, values: Values) -> Values:
        """``values``, without those that no tensor follows: a counter is none of a plan's sizes."""
        hints = self.planner.step.sizes.hints
        shaping = self.planner.step.shaping
        return tuple(values[i] if i in shaping else hints[i] for i in range(len(values)))

    def _missing(self, context: StepContext, leaves: Sequence[Tensor | None]) -> frozenset[int]:
        return context.existing - with_gradients(leaves)

    def _find(
        self, values: Sequence[object], sizes: Values
    ) -> tuple[tuple[Any, ...], list[Tensor | None]]:
        """What a call with these primals finds, and the leaves among them that get gradients.

        It is what a context begins with, in the order of its fields: cheaper to make and compare.
        """
        loop, made = self.loop, self.gradients
        waiting, kept_bytes = loop.in_flight.now()
        leaves = leaves_among(values)
        existing = with_gradients(leaves)
        for primal in self._without:
            if primal not in existing:
                leaves[primal] = None
        added: frozenset[int] = frozenset()
        if loop.caller.accumulate:
            existing |= {primal for primal in made if leaves[primal] is not None}
        if existing:
            alone = () if waiting else self.contributors.alone
            own = ((primal, leaves[primal]) for primal in existing if primal in made)
            added = frozenset(
                primal
                for primal, leaf in own
                if leaf is not None and (leaf.grad is None or (primal in alone and adds(leaf)))
            )
        found = (
            sizes,
            existing,
            added,
            len(waiting),
            sum([step.held_bytes for step in waiting]),
            kept_bytes,
            loop.optimizers.beyond(self.planner.step.optimizer_bytes),
            0 if self.planner.together else loop.networks_bytes(),
            torch_compat.bucket_bytes(),
            self._workspace_bytes() if self.on_cuda else 0,
            self._slack_bytes() if self.on_cuda else 0,
            loop.spread_bytes() if self.passed else 0,
            0 if self.planner.together else self._buffer_bytes(values, sizes),
        )
        return found, leaves

    def _buffer_bytes(self, values: Sequence[object], sizes: Values) -> int:
        """Return the most bytes by which inputs' storages exceeded planned ones at ``sizes``.

        A loop that slices buffers of many sizes has a new plan only where one is larger than all.
        """
        device = self._device
        nbytes: dict[int, int] = {}
        for primal, storage_bytes in self._storages:
            value = values[primal]
            if type(value) is not Tensor or value.device != device:
                continue  # parameters stay as they were captured
            taken = value.untyped_storage().nbytes()
            if taken != storage_bytes:
                planned = evaluated(storage_bytes, self.planner.step.sizes.named(sizes))
                more = allocated_bytes(taken, device) - allocated_bytes(planned, device)
                key = torch_compat.storage_key(value)
                nbytes[key] = min(more, nbytes.get(key, more))  # the largest is planned for
        more_bytes = sum(more for more in nbytes.values() if more > 0)
        most_bytes = self._buffers.get(sizes, 0)
        if more_bytes > most_bytes:
            if len(self._buffers) >= MOST_BUFFERS:
                self._buffers.pop(next(iter(self._buffers)))
            self._buffers[sizes] = most_bytes = more_bytes
        return most_bytes

    def _context_of(self, found: tuple[Any, ...]) -> StepContext:
        """The context of a call, with all that steps before have taught."""
        context = self.corrections.held(StepContext(*found))
        if self.regions.several:
            return context
        with self.loop.planning:
            return self.corrections.applied(self.planner.shared_out(context))

    def _plan_at(
        self, args: Sequence[object], sizes: Values, ended_by: str
    ) -> tuple[StepContext, Compiled, list[Tensor | None]]:
        """The context of a call, the plan that it follows, and the leaves among its primals."""
        found, leaves = self._find(args, sizes)
        if self.regions.several:
            if self._found is None or self._found[0] != found:
                self._found = found, self._context_of(found)
            context = self._found[1]
            if context.kept_bytes and self.regions.chooses(self.planner, context):
                gc.collect()  # what nobody can see any more
                found, leaves = self._find(args, sizes)
                context = self._context_of(found)
            return *self._region(context, args, ended_by), leaves
        if self.loop.budget.is_relative or self.loop.optimizers.has_news:
            self._resolve_budget(found)
        now = (found, self.corrections.changes, self.loop.budget.nbytes)
        latest = self._latest
        if latest is not None and latest[0] == now:
            return *latest[1:], leaves
        while True:
            changes = self.corrections.changes
            with contextlib.suppress(_LessHeldError):  # less each time
                context, compiled = self._plan_for(self._context_of(found))
                break
            found, leaves = self._find(args, sizes)
        # Steps in flight may be of other kinds, or share the budget out anew.
        alone = not context.waiting and self.loop.caller.in_flight == 1
        stays = alone and self.plans.get(context) is compiled
        compiled.followed = context
        now = (found, changes, self.loop.budget.nbytes)
        self._latest = (now, context, compiled) if stays and compiled.shortfall is None else None
        return context, compiled, leaves

    def _resolve_budget(self, found: tuple[Any, ...]) -> None:
        """Resolve a share, or ``"min"``, again: once the loop is known, and when state has changed.

        Ranks that must follow the same plans keep the bytes that they have agreed on.
        """
        optimizers, budget = self.loop.optimizers, self.loop.budget
        has_news, optimizers.has_news = optimizers.has_news, False
        if not budget.is_relative or budget.nbytes is None or self.planner.together is not None:
            return
        if self.on_cuda:
            budget.add_workspaces(self._workspace_bytes())
        is_early = budget.usual and budget.trained and self._resolved < RESOLVED
        if not (has_news or is_early):
            return
        with self.loop.planning:
            context = self._context_of(found)
            if context.waiting or self.loop.caller.in_flight > 1:
                return
            *_, context = (context, *self.corrections.relaxed(context))
            self.planner.resolve_again(context)
        self._resolved += 1

    def _workspace_bytes(self) -> int:
        """What libraries hold beyond what they did when the graph was captured."""
        step = self.planner.step
        before = step.caller.library_bytes_on(step.device)
        return sum(library_workspaces(step.device)) - sum(before)

    def _slack_bytes(self) -> int:
        """Of blocks on the device; none where processes plan together: it is each one's own."""
        return 0 if self.planner.together else self.loop.slack_bytes(self.planner.step.device)

    def _new_plan(self, context: StepContext) -> tuple[StepContext, Planned, Shortfall | None]:
        """A plan for a context, what it takes for true, and why it is above the budget if it is.

        Where nothing fits beside gradients that exist, or outputs of earlier steps, but would if
        these were gone before the backward, they are taken to be, until one shows otherwise.

        Steps that wait were planned without knowing of this one. Where nothing fits beside what
        they hold, but would beside the least that they could, this step takes the least that it
        can, and they leave room for it from now on.
        """
        for relaxed in (context, *self.corrections.relaxed(context)):
            # What is known is asked first: a search measures, and takes memory for that.
            if self.planner.fits(relaxed, thorough=False):
                if relaxed is not context:
                    self.corrections.assume(relaxed)
                return relaxed, self.planner.again(relaxed), None
        try:
            return context, self.planner.again(context), None
        except CostError:  # as beside a profiler
            if not context.scaled:
                raise
            return self._new_plan(self.corrections.unscaled(context))
        except BudgetError as error:
            failed = error.with_traceback(None)
        for relaxed in self.corrections.relaxed(context):
            if self.planner.fits(relaxed):
                self.corrections.assume(relaxed)
                return relaxed, self.planner.again(relaxed), None
        if context.waiting or context.kept_bytes:
            torch_compat.drop_failed_backward()
            gc.collect()  # what nobody can run backwards, or see, any more
            waiting = list(self.loop.in_flight)
            held_bytes = sum(step.held_bytes for step in waiting)
            held_bytes += self.loop.in_flight.kept_bytes(waiting)
            if held_bytes < context.waiting_bytes + context.kept_bytes:
                raise _LessHeldError
        if not self.corrections.teach_waiting(context):
            if self.planner.grown(failed):
                return context, self.planner.again(context), None
            if self.loop.budget.may_raise:
                raise advised(self.planner, failed, context)
            shortfall = Shortfall.of(self.planner, context, failed)
            return context, self.planner.again(context, least=True), shortfall
        planned = self.planner.again(context, least=True)
        plan = planned.plan
        budget_bytes = self.loop.budget.nbytes or 0
        over = excess_bytes(plan.counted_bytes, budget_bytes)
        if over:
            warn(
                f"this step takes {plan.counted_bytes} bytes, {over} ({format_bytes(over)}) more "
                f"than its budget of {budget_bytes}: {context.waiting} earlier ones hold "
                f"{context.waiting_bytes} bytes for their backward, and were planned without "
                "knowing of this one. From now on they leave room for it"
            )
        return context, planned, None

    def _as_good(self, context: StepContext) -> Compiled | None:
        """A plan for a call that found less and still fits, or one that recomputes nothing and
        computes nothing in parts.

        No other is faster. Where the allocator's blocks are replayed, sums say nothing.
        """
        if self.planner.step.joint.device.type == "cuda":
            return None
        now = self.planner.step.around(context)
        for compiled in reversed(self.plans.values()):
            plan, made_for = compiled.planned.plan, compiled.context
            if made_for.sizes != context.sizes or made_for.added != context.added:
                continue
            if compiled.shortfall is not None:
                continue
            if context.scaled > made_for.scaled and plan.form.beside:
                continue
            then = self.planner.step.around(made_for)
            if now.tangents_stay > then.tangents_stay:
                continue
            differences = (
                now.given_bytes - then.given_bytes,
                now.loss_point_bytes - then.loss_point_bytes,
                now.backward_bytes - then.backward_bytes,
            )
            more_bytes = sum(max(0, n) for n in differences)
            graphs = compiled.planned.graphs
            kept = not (graphs.recomputes or graphs.arena or plan.form.has_parts)
            fits = plan.counted_bytes + more_bytes <= plan.budget_bytes
            if fits and (min(differences) >= 0 or kept):
                return compiled
        return None

    def _region(
        self,
        context: StepContext,
        values: Sequence[object],
        ended_by: str,
    ) -> tuple[StepContext, Compiled]:
        """The plan for a call of one of several regions."""
        with self.loop.planning, self.regions.telling():
            found, known = self.regions.enter(self.planner, context, values, ended_by)
            for made_for, latest in self._followed:
                if made_for is found and known:
                    return found, latest
            compiled = self.plans.pop(found, None)
            if compiled is None:
                try:
                    planned = self.planner.again(found, least=not known)
                except BudgetError as error:
                    if self.regions.together:
                        raise
                    if known and self.regions.grow_to(error.least_budget_bytes):
                        planned = self.planner.again(found)
                    else:
                        # More is there than in the steps that were watched.
                        self.regions.no_room()
                        found = self.regions.context_unknown(self.planner, context)
                        planned = self.planner.again(found, least=True)
                compiled = self._new(planned, found)
            self._keep(found, compiled)
            self._followed = ((found, compiled), *self._followed[: MOST_FOLLOWED - 1])
            return found, compiled

    def _keep(self, context: StepContext, compiled: Compiled) -> None:
        if len(self.plans) >= MOST_PLANS:
            self.plans.pop(next(iter(self.plans)))
            self._followed = ()
        self.plans[context] = compiled

    def _new(self, planned: Planned, context: StepContext) -> Compiled:
        compiled = Compiled(planned, self, context)
        _tell(planned.plan)
        # Of several regions each call has a correction.
        if self.loop.host is not None and not self.regions.several and self._supersedes(context):
            self.loop.host.drop_idle()
        if self.loop.on_new is not None:
            self.loop.on_new(compiled)
        return compiled

    def _supersedes(self, context: StepContext) -> bool:
        """Whether a plan for the same sizes, from before a correction, has host memory."""
        return any(
            made_for.sizes == context.sizes
            and made_for.correction != context.correction
            and own.planned.graphs.arena is not None
            for made_for, own in self.plans.items()
        )

    def _known(self, context: StepContext) -> Compiled | None:
        """The plan that was made for a context, unless the budget has another value by now."""
        compiled = self.plans.pop(context, None)
        shortfall = None if compiled is None else compiled.shortfall
        if shortfall is not None and shortfall.budget_bytes != self.loop.budget.nbytes:
            return None
        return compiled

    def _plan_for(self, context: StepContext) -> tuple[StepContext, Compiled]:
        """The plan for a context, one that is there or a new one; and what it takes for true."""
        with self.loop.planning:
            compiled = self._known(context) or self._as_good(context)
            if compiled is None:
                context, planned, shortfall = self._new_plan(context)
                compiled = self._new(planned, context)
                compiled.shortfall = shortfall
                over = planned.plan.counted_bytes > (self.loop.budget.nbytes or 0)
                if shortfall is None and over:
                    return context, compiled  # for this time only
            if compiled.shortfall is not None:
                compiled.shortfall.warn()
            if context.sizes not in self.planner.estimated:  # else it is measured once it can be
                self._keep(context, compiled)
            return context, compiled


def _learn(
    context: StepContext, compiled: Compiled, seen: MemoryProfile, *, is_first: bool
) -> None:
    """A step was watched to its end."""
    if seen.taken_bytes is not None:
        compiled.watches = 0
    plan_cache = compiled.plan_cache
    plan = compiled.planned.plan
    held_bytes = plan.predicted_held_bytes
    given_bytes = plan_cache.planner.step.given_bytes(compiled.context)
    planned = Taken(held_bytes, held_bytes - given_bytes)
    peak_bytes = plan_cache.corrections.learn(context, planned, seen, is_first=is_first)
    if seen.taken_bytes is None:  # another step began before its backward had ended
        plan_cache.loop.check_outside(max(peak_bytes, plan.counted_bytes), planned=True)
    else:
        plan_cache.loop.check_outside(peak_bytes)
    with plan_cache.loop.planning:
        if seen.taken_bytes is not None and peak_bytes != plan.measured_peak_bytes:
            plan = replace(compiled.planned.plan, measured_peak_bytes=peak_bytes)
            compiled.planned = replace(compiled.planned, plan=plan)


def _tell(plan: Plan) -> None:
    beside = ", ".join(f"{format_bytes(n)} for {what}" for what, n in plan.beside)
    LOG.info(
        "a new plan: peak %s of %s, %s a step%s",
        format_bytes(plan.counted_bytes),
        format_bytes(plan.budget_bytes),
        format_seconds(plan.predicted_s),
        f"; beside the step {beside}" if beside else "",
    )


def abandon(values: list[Any], error: BaseException) -> None:
    """An emitted graph has raised: what it was computing is gone, whoever keeps the exception.

    A notebook keeps the last one, and with its frames the activations and the host memory of a
    step that an interrupt, or a device short of memory, has ended.

    Args:
        values: that it was called with; emptied.
        error: that it has raised.
    """
    values.clear()
    traceback.clear_frames(error.__traceback__)
