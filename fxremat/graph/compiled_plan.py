"""A plan in use: its record for people, its emitted functions, and the calls that follow it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import fx

from fxremat import torch_compat
from fxremat.graph.shortfall import Shortfall
from fxremat.ir import Form
from fxremat.passes.emit.code import Around, Emitted
from fxremat.passes.joint.sizes import Sizes, Values
from fxremat.passes.parts.early_gradients import EarlyGradients
from fxremat.passes.parts.parts import Parts
from fxremat.planner.context.step_context import StepContext
from fxremat.report.plan import Plan
from fxremat.runtime.arena import Arena

WATCHES = 4
"""Steps of a new plan that are watched, unless one was observed to its end before."""


@dataclass(slots=True, eq=False)
class CompiledPlan:
    """A plan in use.

    Attributes:
        record: the plan, for people.
        forward, backward: what it emits, at the sizes of the record.
        sizes: symbols of the graph.
        recomputes: whether anything is computed twice.
        arena: the host memory that it uses, if any.
        complete: adds to the record what takes long to compute; ``None``: it is complete.
        context: the context that the plan was made for.
        watches_left: how many further steps of it are watched.
        followed: the context of the latest call that followed it.
        shortfall: why it takes more than the budget; ``None``: it does not.
        plain: nothing is computed twice, or together with a loss, and no host memory is used.
    """

    record: Plan
    forward: Emitted
    backward: Emitted
    sizes: Sizes
    recomputes: bool
    arena: Arena | None = None
    complete: Callable[[Plan], Plan] | None = None
    context: StepContext = field(default_factory=StepContext)
    watches_left: int = WATCHES
    followed: StepContext | None = None
    shortfall: Shortfall | None = None
    plain: bool = field(init=False)
    _held: tuple[StepContext, int] | None = None
    _runs: tuple[Values, tuple[torch_compat.BoxedCallable, ...]] | None = None

    def __post_init__(self) -> None:
        self.plain = not (self.recomputes or self.arena or self.form.early_gradients)

    @property
    def form(self) -> Form:
        """How its operations are computed."""
        return self.record.form

    @property
    def both(self) -> tuple[Emitted, Emitted]:
        """The forward and the backward."""
        return self.forward, self.backward

    @property
    def forward_code(self) -> str:
        """The forward as Python, with the runs that it computes in parts."""
        return code_of(self.forward)

    @property
    def backward_code(self) -> str:
        """The backward as Python, with the runs that it computes in parts."""
        return code_of(self.backward)

    @property
    def structure_digest(self) -> str:
        """A digest of what it runs, without the constants of one process."""
        return " ".join(emitted.structure_digest() for emitted in self.both)

    def completed(self) -> Plan:
        """Return the record with all that it holds for people."""
        if self.complete is not None:
            self.record, self.complete = self.complete(self.record), None
        return self.record

    def restate(self, other: CompiledPlan) -> None:
        """Take the figures of ``other``, which decides the same for the latest call."""
        own, new = self.record, other.record
        if (new.schedule, new.form, new.decision) == (own.schedule, own.form, own.decision):
            self.record = replace(new, measured_peak_bytes=own.measured_peak_bytes)
            self.complete, self.context = other.complete, other.context

    def at(self, values: Values) -> tuple[torch_compat.BoxedCallable, ...]:
        """Return the forward and the backward where the symbols are ``values``."""
        runs = self._runs  # another thread may put those of other numbers there
        if runs is None or runs[0] != values:
            graphs: tuple[Emitted, ...] = self.both
            if values != tuple(number for _, number in self.record.sizes):
                names = self.sizes.named(values)
                graphs = tuple(graph.at(names) for graph in graphs)
            runs = self._runs = values, tuple(graph.forward for graph in graphs)
        return runs[1]

    def held_bytes(
        self, context: StepContext, loss_point_bytes: Callable[[StepContext], int]
    ) -> int:
        """Return the device memory that a forward leaves for its backward, and for its loss.

        Args:
            context: the context of the call.
            loss_point_bytes: returns what the step's own loss needs in a context.
        """
        held = self._held  # another thread may put that of another call there
        if held is None or held[0] is not context:
            nbytes = self.record.waiting_bytes + loss_point_bytes(context)
            held = self._held = context, nbytes
        return held[1]

    def call_through(self, around: Around | None) -> None:
        """Wrap the calls of stages with ``around``; ``None``: call them directly."""
        for graph in self.both:
            graph.call_through(around)
        self._runs = None  # of other sizes

    def close(self) -> None:
        """Free its host memory: its graphs cannot run any more."""
        if self.arena is not None:
            self.arena.close()


def code_of(emitted: Emitted) -> str:
    """Return the code of a graph, and the loop of each run that it calls."""
    stages = [s for s in emitted.body.stages.values() if isinstance(s, fx.GraphModule)]
    nodes = (node for stage in stages for node in stage.graph.nodes)
    targets = dict.fromkeys(node.target for node in nodes)
    runs = dict.fromkeys(
        run
        for target in targets
        for run in ((target.parts, target) if isinstance(target, EarlyGradients) else (target,))
        if isinstance(run, (Parts, EarlyGradients))
    )
    return "\n".join([emitted.code, *(run.code for run in runs)])
