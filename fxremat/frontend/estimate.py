"""A step that is estimated: captured without data, costed without running, planned as any other."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from fxremat import torch_compat
from fxremat.costs.devices import Device
from fxremat.errors import BudgetError, CaptureError, FxrematError, SizesError
from fxremat.frontend.arguments import Arguments, Optimizer
from fxremat.frontend.attention import as_on_gpu
from fxremat.frontend.batches import Batching, Dim, read_dims
from fxremat.frontend.budget import Budget
from fxremat.frontend.fake_copies import HOME, FakeCopies
from fxremat.frontend.losses import Compared, LossOfOutputs, own_loss, target_bytes
from fxremat.frontend.outputs import Unused, forward_of
from fxremat.frontend.pipeline import Planner
from fxremat.frontend.record import roles_of
from fxremat.frontend.refused import refused
from fxremat.frontend.sample import Sample, call_without_data, places_of
from fxremat.frontend.surplus import needs_of_loss, optimizer_bytes
from fxremat.frontend.untouched import in_training
from fxremat.ir import MeasuredLink, RecordedCosts
from fxremat.passes.joint.graph import allocated_bytes
from fxremat.planner.allocator import AllocatorSettings
from fxremat.planner.context import StepContext
from fxremat.planner.context_bytes import Caller
from fxremat.planner.transfers import HostMemory
from fxremat.progress import CAPTURE, PLAN, Progress
from fxremat.report.estimate import Estimate, LossOf
from fxremat.report.plan import Plan

WHOLE = Budget(1.0, share=1.0)


@dataclass(frozen=True, slots=True)
class Captured:
    """What AOTAutograd would compile.

    Attributes:
        joint: its joint graph.
        output_count: how many of its outputs are the forward's.
        inputs: copies of primals without data, by index.
        gradients: primals that get one.
    """

    joint: fx.GraphModule
    output_count: int
    inputs: Mapping[int, torch.Tensor]

    @property
    def gradients(self) -> frozenset[int]:
        """Leaves among the primals that get one."""
        made = torch_compat.differentiated_primals(
            self.joint, forward_output_count=self.output_count
        )
        return frozenset(i for i in made if i in self.inputs and self.inputs[i].is_leaf)


class _CapturedError(BaseException):
    """The joint graph is there: nothing is compiled.

    No ``Exception``, so that no handler of the traced model can take it for its own.
    """

    def __init__(self, found: Captured) -> None:
        super().__init__()
        self.found = found


def capture(
    model: nn.Module,
    sample: Sample,
    unused: Unused | None = None,
    *,
    dynamic: bool,
    gpu: bool = False,
) -> Captured:
    """Capture the step of a call; model and sample have no data.

    Args:
        model: in training mode.
        sample: of the call.
        unused: outputs without a gradient.
        dynamic: sizes of its tensors become symbols.
        gpu: operations are those that a GPU would be given.

    Raises:
        CaptureError: the model breaks the graph, or computes nothing with a gradient.
    """

    def backend(module: fx.GraphModule, inputs: Sequence[Any], **_options: Any) -> Any:
        def partition(
            joint: fx.GraphModule, _inputs: object, *, num_fwd_outputs: int, **_kwargs: Any
        ) -> Any:
            raise _CapturedError(Captured(joint, num_fwd_outputs, _values(joint, inputs)))

        def compiler(graph: fx.GraphModule, _inputs: object) -> Any:
            return graph

        aot = torch_compat.aot_autograd_backend(
            forward_compiler=compiler,
            backward_compiler=compiler,
            inference_compiler=compiler,
            partition=partition,
        )
        if gpu:
            as_on_gpu(module)
        return aot(module, inputs)

    forward = torch_compat.with_code_of_its_own(forward_of(model, unused))
    run = torch_compat.compile_function(forward, backend, whole=True, dynamic=dynamic)
    places = places_of(sample.args, sample.kwargs) if dynamic else ()
    try:
        with torch_compat.sizes_vary([t for _, t in places]):
            run(*sample.args, **sample.kwargs)
    except _CapturedError as error:
        return error.found
    except torch_compat.capture_failures() as error:
        cause = torch_compat.failure_cause(error)
        if isinstance(cause, _CapturedError):
            return cause.found
        if isinstance(cause, FxrematError):
            raise cause from None
        raise refused(model, cause) from error
    raise CaptureError(
        f"{type(model).__name__} computes nothing with a gradient from this sample: there is no "
        "step to plan"
    )


def _values(joint: fx.GraphModule, inputs: Sequence[Any]) -> dict[int, torch.Tensor]:
    found = enumerate(torch_compat.primal_values(joint, inputs))
    return {i: value for i, value in found if isinstance(value, torch.Tensor)}


@dataclass(frozen=True, slots=True)
class Asked:
    """What :func:`fxremat.estimate` was asked for, checked.

    Attributes:
        device: what is estimated for.
        options: those of :func:`fxremat.compile`.
        budget: ``None``: none was given.
        costs: of the step, in place of estimated ones.
        overhead_s: what it takes beside its calls, by who measured them.
    """

    device: Device
    options: Arguments
    budget: Budget | None
    costs: RecordedCosts | None
    overhead_s: float


@dataclass(frozen=True, slots=True)
class Dry:
    """A captured step that is never run.

    Attributes:
        planner: of it.
        context: of its calls.
        kept: the plan that keeps everything.
    """

    planner: Planner
    context: StepContext
    kept: Plan


def plan_dry(
    model: nn.Module,
    sample: Sample,
    asked: Asked,
    copies: FakeCopies,
    progress: Progress,
    *,
    dynamic: bool,
) -> Dry:
    """Capture a step and plan it, everything kept; model and sample have no data.

    Raises:
        CaptureError, GraphError, CostError, ArgumentError: as :func:`fxremat.estimate` says.
        Exception: what the model itself raises.
    """
    progress(CAPTURE)
    inner = torch_compat.wrapped_by(model)
    outputs = call_without_data(inner, sample)
    caller, unused = _caller(inner, sample, asked, copies, outputs)
    device, options = torch.device(asked.device.kind), asked.options
    captured = capture(
        inner,
        sample,
        unused,
        dynamic=dynamic,
        gpu=device.type == "cuda",
    )
    named = {id(tensor): name for name, tensor in reversed(places_of(sample.args, sample.kwargs))}
    places = {i: named[id(t)] for i, t in captured.inputs.items() if id(t) in named}
    planner = Planner(
        captured.joint,
        forward_output_count=captured.output_count,
        inputs={i: _placed(t, device) for i, t in captured.inputs.items()},
        budget=WHOLE,
        caller=caller,
        progress=progress,
        places=places,
        roles=roles_of(captured.inputs, torch_compat.tensors_of_module(inner), places),
        host=_host(asked),
        exact=options.exact,
        allocator=AllocatorSettings() if device.type == "cuda" else None,
        costs=asked.costs,
        target=asked.device,
        model=type(model).__name__,
        generators=options.generators,
    )
    existing = captured.gradients if options.accumulate else frozenset()
    context = StepContext(planner.step.sizes.hints, existing, existing)
    planned = planner.first(context, rehearse=False).completed()
    return Dry(planner, context, planned.plan.with_overhead(asked.overhead_s))


def _host(asked: Asked) -> HostMemory | None:
    """Host memory that is never taken, behind the device's link."""
    if asked.options.host is None:
        return None
    rate = asked.device.link_bytes_per_s
    # Two directions of PCIe do not hinder each other; copies on a CPU do, and computations too.
    one = asked.device.kind == "cpu"
    link = MeasuredLink(rate, rate, rate if one else 2 * rate, 1.0, one)
    return replace(asked.options.host, link=link)


def _caller(
    model: nn.Module, sample: Sample, asked: Asked, copies: FakeCopies, outputs: object
) -> tuple[Caller, Unused | None]:
    """What is needed beside the step, and outputs without a gradient."""
    options, device = asked.options, torch.device(asked.device.kind)
    needs = None
    loss = options.loss.map(copies.of) if isinstance(options.loss, Compared) else options.loss
    if loss is not None and outputs is not None:
        needs = needs_of_loss(loss, outputs, copies.of)
    unused = needs.unused if needs else None
    if unused is not None:
        unused = replace(unused, dropped=options.drop_unused)
    tensors = (*model.parameters(), *model.buffers(), *(t for _, t in sample.tensors()))
    caller = Caller(
        reserve_bytes=options.reserve_bytes,
        held_bytes=_optimizer_bytes(options.optimizer, model, device, copies),
        accumulate=options.accumulate,
        loss_bytes=needs.nbytes if needs else None,
        target_bytes=target_bytes(loss, model, sample, HOME, step=device),
        resident=tuple(_placed(t, device) for t in tensors),
        budget_on=options.budget_on,
        library_bytes=asked.device.library_bytes,
    )
    return caller, unused


def _placed(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor without data, of the same storage, on ``device``."""
    if tensor.device.type == device.type:
        return tensor
    return torch_compat.fake_tensor(
        tensor,
        tensor.untyped_storage(),
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        device=device,
    )


def _optimizer_bytes(
    optimizer: Optimizer | None, model: nn.Module, device: torch.device, copies: FakeCopies
) -> tuple[int, ...]:
    """Bytes of each tensor that an optimizer would keep on ``device``."""

    def alike(parameter: torch.Tensor) -> torch.Tensor:
        if device.type == "cpu":
            found: torch.Tensor = copies.of(parameter)
            return found
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        return nn.Parameter(empty, parameter.requires_grad)  # on no CPU, as those on a GPU

    if isinstance(optimizer, torch.optim.Optimizer):
        own = copy.copy(optimizer)
        own.param_groups = [
            {**group, "params": list(map(alike, group["params"]))} for group in own.param_groups
        ]
        optimizer = own
    parameters = nn.ParameterList(map(alike, model.parameters()))
    return tuple(allocated_bytes(n, device) for n in optimizer_bytes(optimizer, parameters))


def estimate_step(
    model: nn.Module,
    sample: Sample,
    asked: Asked,
    dim: Dim | list[Dim] | None,
    most: int,
    progress: Progress,
) -> Estimate:
    """All that :func:`fxremat.estimate` returns."""
    copies = FakeCopies()
    dims = () if dim is None else read_dims(model, sample, dim)
    shape = sample.map(copies.of)
    with copies.inside(model), in_training(model), torch.enable_grad():
        dry = plan_dry(model, shape, asked, copies, progress, dynamic=False)
        progress(PLAN)
        plan = _within(dry, asked)
        batches = None
        if dims and asked.budget is not None and asked.budget.nbytes is not None:
            try:
                sized = plan_dry(model, shape, asked, copies, progress, dynamic=True)
            except SizesError as error:
                raise SizesError(
                    error.found,
                    "dim= captures all sizes at once, which this model does not let it: leave it "
                    "out, and estimate a sample of each size by itself",
                ) from None
            batching = Batching(
                sized.planner.schedules,
                asked.budget.nbytes,
                sized.context,
                torch_compat.wrapped_by(model),
                shape,
                asked.overhead_s,
                most,
                progress,
            )
            with contextlib.suppress(BudgetError):  # none fits
                batches = batching.over(dims)
    budget_bytes = None
    if asked.budget is not None:
        budget_bytes = asked.budget.bytes_of(
            full_bytes=dry.kept.baseline_peak_bytes, least_bytes=dry.kept.least_budget_bytes
        )
    return Estimate(
        device=asked.device.name,
        kept=dry.kept,
        budget_bytes=budget_bytes,
        plan=plan,
        batches=batches,
        workspace_bytes=dry.planner.step.aside_bytes(dry.context.sizes),
        library_bytes=asked.device.library_bytes,
        memory_bytes=asked.device.memory_bytes,
        optimizer=_name_of(asked.options.optimizer),
        loss=_loss_of(asked.options.loss),
    )


def _name_of(optimizer: Optimizer | None) -> str | None:
    if optimizer is None:
        return None
    return (optimizer if isinstance(optimizer, type) else type(optimizer)).__name__


def _loss_of(loss: LossOfOutputs | None) -> LossOf:
    return "unknown" if loss is None else "own" if loss is own_loss else "told"


def _within(dry: Dry, asked: Asked) -> Plan | None:
    """The fastest plan within the budget, if there is one and anything fits."""
    if asked.budget is None:
        return None
    dry.planner.budget = asked.budget
    try:
        planned = dry.planner.again(dry.context)
    except BudgetError:
        return None
    return planned.completed().plan.with_overhead(asked.overhead_s)
