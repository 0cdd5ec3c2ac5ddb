"""The plans of one captured graph, and the choice among them at each call."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from fxremat import torch_compat
from fxremat.frontend.pipeline import Planned, Planner
from fxremat.planner.situation import Situation
from fxremat.planner.surroundings import own_gradients
from fxremat.report.plan import Plan
from fxremat.runtime import cuda_graph
from fxremat.runtime.gradients import Contributors, Gradients, adds, leaf_of
from fxremat.runtime.steps import InFlight, Step
from fxremat.units import format_bytes, format_seconds

LOG = logging.getLogger("fxremat")

MOST_PLANS = 64
"""Plans of a family that are kept; that which was used longest ago goes first."""


@dataclass(slots=True, eq=False)
class Compiled:
    """A plan in use.

    Attributes:
        planned: the plan, its graphs and its host memory.
        forward, backward: what runs.
    """

    planned: Planned
    forward: torch_compat.BoxedCallable
    backward: torch_compat.BoxedCallable

    @staticmethod
    def of(planned: Planned) -> Compiled:
        """A plan to run."""
        graphs = planned.graphs
        return Compiled(planned, emitted(graphs.forward.forward), emitted(graphs.backward.forward))


@dataclass(slots=True)
class Family:
    """One captured graph, and a plan for each situation in which it was called.

    Attributes:
        planner: makes plans.
        in_flight: steps of the whole model whose backward has not run.
        accumulate: gradients exist at every call, or will.
        output_count: how many results of the forward go to its caller.
        gradients: primals that get a gradient, and which of the tensors that go in each is.
        plans: by situation, the one used last at the end.
        contributors: to the gradients of the graph's leaves.
    """

    planner: Planner
    in_flight: InFlight
    accumulate: bool
    output_count: int
    gradients: dict[int, int]
    plans: dict[Situation, Compiled] = field(default_factory=dict)
    contributors: Contributors = field(default_factory=Contributors)
    _own: frozenset[int] = frozenset()
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @staticmethod
    def of(
        planner: Planner,
        joint: fx.GraphModule,
        values: Sequence[object],
        *,
        in_flight: InFlight,
        accumulate: bool,
        output_count: int,
        kept: Plan | None = None,
    ) -> Family:
        """That of a graph, with its first plan.

        Args:
            planner: makes plans.
            joint: the captured graph.
            values: of its primals, where known.
            in_flight: steps of the whole model.
            accumulate: a set of gradients is counted at every call.
            output_count: how many results of the forward go to its caller.
            kept: a plan that is followed, instead of making one.

        Raises:
            BudgetError, PlanError, HostMemoryError, …: as planning raises them.
        """
        gradients = torch_compat.differentiated_primals(joint, forward_output_count=output_count)
        family = Family(planner, in_flight, accumulate, output_count, gradients)
        situation, _ = family._find(values)
        planned = planner.first(situation, kept=kept)
        family._own = own_gradients(planner.joint)
        family.plans[situation] = Compiled.of(planned)
        return family

    def forward(self, args: list[Any]) -> tuple[list[Any], Compiled]:
        """Run the forward as planned for what this call finds.

        Args:
            args: the primals; emptied.

        Returns the outputs and the step's token, and the plan.

        Raises:
            BudgetError: no plan that was found fits; nothing has run.
        """
        situation, leaves = self._find(args)
        compiled = self._plan_for(situation)
        plan, arena = compiled.planned.plan, compiled.planned.graphs.arena
        if arena is not None:
            cuda_graph.refuse_host_memory(arena.nbytes)
        results = list(compiled.forward(args))
        saved = results[self.output_count :]
        del results[self.output_count :]
        step = Step(compiled, saved, held_bytes=plan.waiting_bytes, leaves=leaves)
        self.in_flight.add(step)
        results.append(step.token())
        return results, compiled

    def backward(self, args: list[Any]) -> Sequence[Any]:
        """Run the backward of a step.

        Args:
            args: the step's token and the tangents; emptied.

        Returns the gradients, by primal; ``None`` for those that are handed over.

        Raises:
            BackwardError: what the step needs is gone, or was written to.
        """
        step = Step.of(args[0])
        gradients = Gradients(
            step.leaves,
            places=self.gradients,
            own=self._own,
            contributors=self.contributors,
            others=any(other is not step for other in self.in_flight),
        )
        values: list[Any] = step.take()
        values.extend(args[1:])
        args.clear()
        values.append(gradients)
        step.plan.backward(values)
        return gradients.finish()

    def _find(self, values: Sequence[object]) -> tuple[Situation, list[Tensor | None]]:
        """What a call with these primals finds, and the leaves among them that get gradients."""
        leaves: list[Tensor | None] = [None] * len(values)
        existing: list[int] = []
        added: list[int] = []
        waiting = list(self.in_flight)
        alone = self.contributors.alone
        for primal in self.gradients:
            leaf = leaves[primal] = leaf_of(values[primal])
            if leaf is None or not (self.accumulate or leaf.grad is not None):
                continue
            existing.append(primal)
            if leaf.grad is None or (primal in alone and not waiting and adds(leaf)):
                added.append(primal)
        situation = Situation(
            frozenset(existing),
            frozenset(added),
            len(waiting),
            sum(step.held_bytes for step in waiting),
            torch_compat.bucket_bytes(),
        )
        return situation, leaves

    def _plan_for(self, situation: Situation) -> Compiled:
        """The plan for a situation: one that is there, or a new one."""
        with self._lock:
            compiled = self.plans.pop(situation, None)
            if compiled is None:
                compiled = Compiled.of(self.planner.again(situation))
                _tell(compiled.planned.plan)
                if len(self.plans) >= MOST_PLANS:
                    self.plans.pop(next(iter(self.plans)))
            self.plans[situation] = compiled
            return compiled


def _tell(plan: Plan) -> None:
    beside = ", ".join(f"{format_bytes(n)} for {what}" for what, n in plan.beside)
    LOG.info(
        "a new plan: peak %s of %s, %s a step%s",
        format_bytes(plan.counted_bytes),
        format_bytes(plan.budget_bytes),
        format_seconds(plan.predicted_s),
        f"; beside the step {beside}" if beside else "",
    )


def emitted(run: torch_compat.BoxedCallable) -> torch_compat.BoxedCallable:
    """How an emitted graph is called: with the algorithms that were measured.

    What it was computing is gone when it raises, whoever keeps the exception: a notebook keeps
    the last one, and with its frames the activations and the host memory of a step that an
    interrupt, or a device short of memory, has ended.
    """

    def call(args: list[Any]) -> Sequence[Any]:
        try:
            with torch_compat.without_autotuning():
                return run(args)
        except BaseException as error:
            args.clear()
            traceback.clear_frames(error.__traceback__)
            raise

    return call
