"""The Dynamo backend: captures a step, has it planned, and runs the emitted graphs."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.costs.calls import call_s
from fxremat.costs.cost import Progress
from fxremat.errors import BackwardError
from fxremat.frontend.budget import Budget
from fxremat.frontend.pipeline import Planned, plan_step
from fxremat.frontend.store import Store
from fxremat.passes.emit.code import ScheduleModule
from fxremat.planner.surroundings import Caller
from fxremat.planner.transfers import HostMemory
from fxremat.report.plan import Plan
from fxremat.runtime import cuda_graph


class PlannedOnly(BaseException):
    """Raised by a compiled step that was asked to plan and not to run.

    No ``Exception``, so that no handler of the traced model can take it for its own.
    """


@dataclass(slots=True)
class Compiled:
    """A plan in use.

    Attributes:
        planned: the plan, its graphs and its host memory.
        graphs: those that run: AOTAutograd copies the backward.
    """

    planned: Planned
    graphs: list[ScheduleModule] = field(default_factory=list)


@dataclass(slots=True)
class StepCompiler:
    """Plans each graph that Dynamo captures, all for one budget.

    Attributes:
        budget, caller: what to plan for.
        progress: told how far planning has come.
        compiled: all graphs captured so far, in order.
        latest: the one that ran last.
        dry: compiled graphs raise :class:`PlannedOnly` instead of running.
        resident: tensors that the step being captured holds, used or not.
        host: memory to which storages may travel; ``None``: none may.
        exact: gradients must be bitwise those without a plan.
        overhead_s: what a step takes beside its calls, once that is known.
        kept: a plan that the first graph follows.
        store: costs and plans that other processes have found.
    """

    budget: Budget
    caller: Caller
    progress: Progress
    compiled: list[Compiled] = field(default_factory=list)
    latest: Compiled | None = None
    dry: bool = False
    resident: Callable[[], tuple[torch.Tensor, ...]] = tuple
    host: HostMemory | None = None
    exact: bool = True
    overhead_s: float = 0.0
    kept: Plan | None = None
    store: Store = field(default_factory=lambda: Store(None))

    def measure_overhead(self, call: Callable[[], object]) -> None:
        """Find what a step takes beside its calls, for the latest plan and those to come.

        Args:
            call: leads to the forward graph and returns before it runs.
        """
        assert self.latest is not None
        planned = self.latest.planned
        if planned.rehearsal is None:
            self.overhead_s = planned.plan.overhead_s
        else:
            self.overhead_s = planned.rehearsal.overhead_s(call)
            planned.note_overhead(self.overhead_s)
        for compiled in self.compiled:  # no rehearsal stays, and with it no batch
            compiled.planned = compiled.planned.with_overhead(self.overhead_s)

    def __call__(
        self, module: fx.GraphModule, example_inputs: Sequence[Any], **_options: Any
    ) -> Callable[..., Any]:
        """Compile one graph of Dynamo's.

        Raises:
            CaptureError: a CUDA graph is being captured.
        """
        cuda_graph.refuse_planning()
        call_s()  # measured before torch's tracers slow modules down
        found: list[Compiled] = []

        def partition(
            joint: fx.GraphModule, _joint_inputs: object, *, num_fwd_outputs: int, **_kwargs: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            with torch_compat.without_autotuning():
                result = plan_step(
                    joint,
                    forward_output_count=num_fwd_outputs,
                    inputs=_real_inputs(joint, example_inputs),
                    budget=self.budget,
                    caller=replace(self.caller, resident=self.resident()),
                    progress=self.progress,
                    host=self.host,
                    exact=self.exact,
                    kept=self.kept,
                    store=self.store,
                )
            # A rehearsal needs the way in, which is there once all is compiled.
            found.append(Compiled(result if self.dry else result.with_overhead(self.overhead_s)))
            self.compiled.append(found[-1])
            self.latest = found[-1]
            return result.graphs.forward, result.graphs.backward

        def compile_forward(graph: ScheduleModule, _inputs: object) -> Callable[..., Any]:
            torch_compat.allow_retained_graphs()
            found[-1].graphs.append(graph)
            return self._forward(graph, found[-1])

        def compile_backward(graph: ScheduleModule, _inputs: object) -> Callable[..., Any]:
            found[-1].graphs.append(graph)
            return torch_compat.boxed(emitted(graph.forward))

        backend = torch_compat.aot_autograd_backend(
            forward_compiler=compile_forward,
            backward_compiler=compile_backward,
            inference_compiler=lambda graph, _inputs: self._inference(graph),
            partition=partition,
        )
        with torch_compat.without_donated_buffers():
            run: Callable[..., Any] = backend(module, example_inputs)
        return backward_checked(run, recomputes=any(c.planned.graphs.recomputes for c in found))

    def close(self) -> None:
        """Give host memory up: the graphs cannot run any more."""
        for compiled in self.compiled:
            arena = compiled.planned.graphs.arena
            if arena is not None:
                arena.close()

    def _forward(self, graph: fx.GraphModule, compiled: Compiled) -> Callable[..., Any]:
        run = emitted(graph.forward)

        def forward(args: list[Any]) -> Any:
            if self.dry:
                raise PlannedOnly
            if compiled.planned.graphs.arena is not None:
                cuda_graph.refuse_host_memory(compiled.planned.graphs.arena.nbytes)
            self.latest = compiled
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


def backward_checked(run: Callable[..., Any], *, recomputes: bool) -> Callable[..., Any]:
    """``run``, a compiled step; its backward is refused where it could not be right.

    Where nothing is computed again the backward may run under any settings.
    """

    def call(*args: Any) -> Any:
        outputs = run(*args)
        settings = torch_compat.kernel_settings() if recomputes else {}
        torch_compat.before_backward(outputs, lambda: check_backward(settings))
        return outputs

    return call


def check_backward(settings: dict[str, object]) -> None:
    """A backward begins.

    Args:
        settings: those of its forward that must hold; none if nothing is computed again.

    Raises:
        BackwardError: it is to be differentiated, or what it computes again would be computed
            by other kernels than the first time.
    """
    if torch.is_grad_enabled():  # exactly then
        raise BackwardError(
            "the backward of a compiled step was asked for with create_graph=True: its gradients "
            "cannot be differentiated again. Call backward() without create_graph, or use the "
            "original model for this step"
        )
    now = torch_compat.kernel_settings() if settings else {}
    changed = [name for name, value in settings.items() if now[name] != value]
    if changed:
        told = ", ".join(f"{name} was {settings[name]}, is {now[name]}" for name in changed)
        raise BackwardError(
            f"between the forward and the backward of a compiled step settings changed: {told}. "
            "What is computed again would not be the same: set them around both"
        )


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
