"""The Dynamo backend: captures a step, has it planned, and runs the emitted graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.budget import Budget
from fxremat.passes.cost import Progress
from fxremat.passes.surroundings import Caller
from fxremat.pipeline import Planned, plan_step
from fxremat.report.plan import Plan
from fxremat.runtime.arena import Arena
from fxremat.transfers import HostMemory


class PlannedOnly(BaseException):
    """Raised by a compiled step that was asked to plan and not to run.

    No ``Exception``, so that no handler of the traced model can take it for its own.
    """


@dataclass(slots=True)
class StepCompiler:
    """Plans each graph that Dynamo captures, all for one budget.

    Attributes:
        budget, caller: what to plan for.
        progress: told how far planning has come.
        plans: of all graphs captured so far, in order.
        latest: the plan of the graph that ran last.
        dry: compiled graphs raise :class:`PlannedOnly` instead of running.
        resident: tensors that the step being captured holds, used or not.
        host: memory to which storages may travel; ``None``: none may.
        arenas: host memory of the graphs captured so far.
    """

    budget: Budget
    caller: Caller
    progress: Progress
    plans: list[Plan] = field(default_factory=list)
    latest: Plan | None = None
    dry: bool = False
    resident: Callable[[], tuple[torch.Tensor, ...]] = tuple
    host: HostMemory | None = None
    arenas: list[Arena] = field(default_factory=list)

    def __call__(
        self, module: fx.GraphModule, example_inputs: Sequence[Any], **_options: Any
    ) -> Callable[..., Any]:
        """Compile one graph of Dynamo's."""
        planned: list[Planned] = []

        def partition(
            joint: fx.GraphModule, _joint_inputs: object, *, num_fwd_outputs: int, **_kwargs: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            result = plan_step(
                joint,
                forward_output_count=num_fwd_outputs,
                inputs=_real_inputs(joint, example_inputs),
                budget=self.budget,
                caller=replace(self.caller, resident=self.resident()),
                progress=self.progress,
                host=self.host,
            )
            if result.arena is not None:
                self.arenas.append(result.arena)
            planned.append(result)
            self.plans.append(result.plan)
            self.latest = result.plan
            return result.forward, result.backward

        def compile_forward(graph: fx.GraphModule, _inputs: object) -> Callable[..., Any]:
            return self._forward(graph, planned[-1].plan)

        backend = torch_compat.aot_autograd_backend(
            forward_compiler=compile_forward,
            backward_compiler=lambda graph, _inputs: torch_compat.boxed(graph.forward),
            inference_compiler=lambda graph, _inputs: self._inference(graph),
            partition=partition,
        )
        with torch_compat.without_donated_buffers():
            compiled: Callable[..., Any] = backend(module, example_inputs)
        return compiled

    def close(self) -> None:
        """Give host memory up: the graphs cannot run any more."""
        for arena in self.arenas:
            arena.close()

    def _forward(self, graph: fx.GraphModule, plan: Plan) -> Callable[..., Any]:
        run = graph.forward

        def forward(args: list[Any]) -> Any:
            if self.dry:
                raise PlannedOnly
            self.latest = plan
            return run(args)

        return torch_compat.boxed(forward)

    def _inference(self, graph: fx.GraphModule) -> Callable[..., Any]:
        """A graph without a backward: nothing to plan."""

        def run(args: list[Any]) -> Any:
            if self.dry:
                raise PlannedOnly
            values, args[:] = tuple(args), []
            return graph(*values)

        return torch_compat.boxed(run)


def _real_inputs(
    joint: fx.GraphModule, example_inputs: Sequence[Any]
) -> Mapping[int, torch.Tensor]:
    """Real values of the joint graph's primals, where Dynamo's inputs are real."""
    found: dict[int, torch.Tensor] = {}
    for primal, source in enumerate(torch_compat.primal_sources(joint)):
        if source is None or source >= len(example_inputs):
            continue
        value = example_inputs[source]
        if isinstance(value, torch.Tensor) and not torch_compat.is_fake(value):
            found[primal] = value
    return found
