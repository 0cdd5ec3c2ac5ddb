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
    """A plan in use: its record, and the forward and backward that carry it out.

    Attributes:
        record: the plan as it is reported and saved.
        forward, backward: the emitted graphs, at the sizes of the record.
        sizes: the symbols of the captured graph.
        recomputes: whether any operation is computed twice.
        arena: the host memory to which it moves storages; ``None``: it moves none.
        complete: returns a record with the fields that take long to compute; ``None``: the record
            has them.
        context: the context that the plan was made for.
        watches_left: how many further steps that follow it have their memory measured.
        followed: the context of the latest call that followed it.
        bundled_bytes: by sizes, the most bytes that bundles of a step took: all, and the largest.
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
    bundled_bytes: dict[Values, tuple[int, int]] = field(default_factory=dict)
    shortfall: Shortfall | None = None
    plain: bool = field(init=False)
    _held: tuple[StepContext, int] | None = None
    _runs: tuple[Values, tuple[torch_compat.BoxedCallable, ...]] | None = None

    def __post_init__(self) -> None:
        self.plain = not (self.recomputes or self.arena or self.form.early_gradients)

    @property
    def form(self) -> Form:
        """How its operations are rewritten, for instance computed in parts."""
        return self.record.form

    @property
    def both(self) -> tuple[Emitted, Emitted]:
        """The emitted forward and the emitted backward."""
        return self.forward, self.backward

    @property
    def forward_code(self) -> str:
        """Python code of the forward, and of its loops that compute operations in parts."""
        return code_of(self.forward)

    @property
    def backward_code(self) -> str:
        """Python code of the backward, and of its loops that compute operations in parts."""
        return code_of(self.backward)

    @property
    def structure_digest(self) -> str:
        """Digest of both emitted graphs that does not depend on constants of one process."""
        return " ".join(emitted.structure_digest() for emitted in self.both)

    def completed(self) -> Plan:
        """Return the record, after adding the fields that take long to compute."""
        if self.complete is not None:
            self.record, self.complete = self.complete(self.record), None
        return self.record

    def restate(self, other: CompiledPlan) -> None:
        """Replace the record by that of ``other``, if it decides the same; keep the measured peak.

        Args:
            other: a plan made for the context of the latest call that followed this one.
        """
        own, new = self.record, other.record
        if (new.schedule, new.form, new.decision) == (own.schedule, own.form, own.decision):
            self.record = replace(new, measured_peak_bytes=own.measured_peak_bytes)
            self.complete, self.context = other.complete, other.context

    def at(self, values: Values) -> tuple[torch_compat.BoxedCallable, ...]:
        """Return the forward and the backward to call where the graph's symbols have ``values``."""
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
        """Return the device bytes held between forward and backward, including those of the loss.

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
        """Wrap the function of each stage with ``around``; ``None``: call stages directly."""
        for graph in self.both:
            graph.call_through(around)
        self._runs = None  # of other sizes

    def close(self) -> None:
        """Free the plan's host memory, after which its graphs cannot run."""
        if self.arena is not None:
            self.arena.close()


def code_of(emitted: Emitted) -> str:
    """Return the Python code of a graph, and of its loops that compute operations in parts."""
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
