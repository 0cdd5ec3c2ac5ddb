"""A step that is estimated: captured without data, costed without running, planned as any other."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from fxremat import torch_compat
from fxremat.calls.place import choose_placement
from fxremat.capture.isolation import in_training
from fxremat.capture.sample import Sample, call_without_data, places_of
from fxremat.capture.unused_outputs import Unused
from fxremat.costs.estimated.devices import Device
from fxremat.errors import BudgetError, SizesError
from fxremat.graph.forms import PlanOptions
from fxremat.graph.graph import Graph
from fxremat.graph.memory_record import roles_of
from fxremat.graph.pools import all_pools
from fxremat.ir import MeasuredLink
from fxremat.loop.hosting import NOTHING
from fxremat.loop.optimizer_state import (
    copied_optimizer,
    counted_state,
    optimizer_bytes,
    with_state,
)
from fxremat.loop.parameters import movable, refuse_unmovable, within
from fxremat.loop.placement import (
    TEMPORARY,
    Placement,
    large_parameters,
    placements,
    with_least_memory,
)
from fxremat.loop.trial import StepCosts
from fxremat.options.arguments import Arguments
from fxremat.options.budget import Budget, TrainingBudget
from fxremat.options.loss import Compared, LossOfOutputs, own_loss, target_bytes
from fxremat.options.measured_needs import needs_of_loss
from fxremat.options.readers import Optimizer
from fxremat.passes.joint.graph import allocated_bytes
from fxremat.planner.allocator.allocator import AllocatorSettings
from fxremat.planner.context.context_bytes import Caller
from fxremat.planner.context.step_context import StepContext
from fxremat.planner.transfers.transfers import HostMemory
from fxremat.planning.choose import budget_contexts, needs_in
from fxremat.planning.planner import first_plan, later_plan
from fxremat.progress import CAPTURE, PLAN, Progress
from fxremat.report.estimate import Estimate, LossOf
from fxremat.report.frontier import Batches
from fxremat.report.plan import Plan
from fxremat.runtime.host_parameter import HostParameter
from fxremat.runtime.slots import assign_slots
from fxremat.sizing.fake import HOME, Captured, FakeCopies, capture
from fxremat.sizing.max_batch import Batching, Dim, NamedDim, read_dim


@dataclass(frozen=True, slots=True)
class Asked:
    """Checked arguments of :func:`fxremat.estimate`.

    Attributes:
        device: the device that memory and time are estimated for.
        options: the arguments that :func:`fxremat.compile` has as well.
        budget: the budget, or ``None`` if none was given.
        known: a plan of the step whose measured costs replace estimated ones, or ``None``.
    """

    device: Device
    options: Arguments
    budget: Budget | None
    known: Plan | None


def graph_without_data(
    model: nn.Module,
    sample: Sample,
    asked: Asked,
    copies: FakeCopies,
    progress: Progress,
    *,
    dynamic: bool,
) -> tuple[Graph, TrainingBudget, Choices]:
    """Capture a step without data, and fill its graph with candidate schedules.

    Args:
        model: the model, whose tensors are fake.
        sample: the sample, whose tensors are fake.
        asked: the arguments of the estimate.
        copies: the fake copies of tensors of the model and the sample.
        progress: receives how far planning has come.
        dynamic: whether tensor sizes become symbols.

    Returns:
        The graph, a budget that allows to keep everything, and the choices of what of the training
        state is in host memory, with the context of the captured call.

    Raises:
        CaptureError, GraphError, CostError, ArgumentError: see :func:`fxremat.estimate`.
        Exception: what the model itself raises.
    """
    progress(CAPTURE)
    inner = torch_compat.wrapped_by(model)
    device, options = torch.device(asked.device.kind), asked.options
    with torch_compat.attention_on_any_device(wanted=device.type == "cuda"):
        outputs = call_without_data(inner, sample)
        caller, unused = _caller(inner, sample, asked, copies, outputs)
        captured = capture(inner, sample, unused, dynamic=dynamic, gpu=device.type == "cuda")
    state = _state_bytes(options.optimizers, inner, device, copies)
    gradients = [captured.inputs[i] for i in captured.gradients]
    caller = replace(caller, held_bytes=counted_state(state, inner, gradients))
    named = {id(tensor): name for name, tensor in reversed(places_of(sample.args, sample.kwargs))}
    places = {i: named[id(t)] for i, t in captured.inputs.items() if id(t) in named}
    graph = Graph(
        captured.joint,
        forward_output_count=captured.output_count,
        inputs={i: _placed(t, device) for i, t in captured.inputs.items()},
        caller=caller,
        progress=progress,
        options=PlanOptions(
            host=_host(asked),
            exact=options.exact,
            split=options.split is True,  # what keeps bits is measured where the step runs
            effort=options.effort,
            policy=options.policy,
            allocator=AllocatorSettings() if device.type == "cuda" else None,
        ),
        places=places,
        roles=roles_of(captured.inputs, torch_compat.tensors_of_module(inner), places),
        costs=asked.known.measured if asked.known else None,
        target=asked.device,
        model=type(model).__name__,
    )
    existing = captured.gradients if options.accumulate else frozenset()
    host_bytes = None
    if options.host is not None and options.host.limit_bytes is not None:
        moved = [p.nbytes for p in inner.parameters() if isinstance(p, HostParameter)]
        host_bytes = max(0, options.host.limit_bytes - assign_slots(moved)[1])
    context = StepContext(graph.sizes.hints, existing, existing, host_bytes=host_bytes)
    choices = _choices(context, captured, inner, state, asked)
    budget = TrainingBudget(Budget(1.0, share=1.0), usual=options.assume == "usual")
    all_pools(graph, budget_contexts(graph, choices.context_with(choices.all[-1]), budget)[0])
    return graph, budget, choices


@dataclass(frozen=True, slots=True)
class Choices:
    """Choices of what optimizer state and gradients are in host memory.

    Attributes:
        all: the choices, from nothing to as much as the limit allows.
        context: the context of the captured call with everything on the device.
        primals: the index of each parameter among the inputs of the graph, by its ``id``.
    """

    all: Sequence[Placement]
    context: StepContext
    primals: Mapping[int, int]

    def context_with(self, placement: Placement) -> StepContext:
        """Return the context of the captured call with a choice."""
        if not placement.host_bytes:
            return self.context
        context, host_bytes = self.context, self.context.host_bytes
        hosted = frozenset(self.primals[own] for own in placement.gradients)
        return replace(
            context,
            hosted=hosted,
            added=context.added | (hosted & context.existing),
            state_bytes=-placement.state_bytes,
            step_bytes=placement.step_bytes,
            host_bytes=None if host_bytes is None else max(0, host_bytes - placement.host_bytes),
        )

    def least_bytes(self, graph: Graph, budget: TrainingBudget) -> int:
        """Return the least budget of all choices, with the candidates at hand."""
        contexts = map(self.context_with, with_least_memory(self.all))
        needs = (needs_in(graph, budget_contexts(graph, own, budget)) for own in contexts)
        return min(own.least_bytes for own in needs)


def _choices(
    context: StepContext,
    captured: Captured,
    model: nn.Module,
    state: Mapping[int, tuple[int, ...]],
    asked: Asked,
) -> Choices:
    """Return the choices of what of the training state is in host memory.

    Args:
        context: the context of the captured call with everything on the device.
        captured: the captured step.
        model: the model, whose tensors are fake.
        state: bytes of each tensor of optimizer state, by the ``id`` of a parameter.
        asked: the arguments of the estimate.
    """
    host, device = _host(asked), asked.device
    if host is None or not host.state:
        return Choices((NOTHING,), context, {})
    assert host.link is not None
    primals = {
        torch_compat.storage_key(tensor): i
        for i, tensor in captured.inputs.items()
        if i in captured.gradients and torch_compat.is_dense(tensor)
    }
    parameters = {
        primals[torch_compat.storage_key(p)]: p
        for p in model.parameters()
        if torch_compat.is_dense(p) and torch_compat.storage_key(p) in primals
    }
    # A step reads and writes a parameter and its state, and reads its gradient.
    costs = {
        id(p): StepCosts(
            TEMPORARY,
            (3 * p.nbytes + 2 * sum(state.get(id(p), ()))) / p.nbytes / device.bytes_per_s,
        )
        for p in parameters.values()
    }
    trained = large_parameters(parameters.values(), state, costs)
    sizes = [p.nbytes for p in parameters.values()]
    made = placements(trained, host.link, sizes, limit_bytes=context.host_bytes)
    by_id = {id(p): i for i, p in parameters.items()}
    return Choices(made[-1:] if host.all_state else made, context, by_id)


def _in_host(model: nn.Module, asked: Asked) -> frozenset[int]:
    """Return the ``id`` of each eligible parameter: all of them are in host memory.

    Raises:
        ArgumentError: a wrapper needs the parameters on the device.
    """
    host = asked.options.host
    if host is None or not host.parameters:
        return frozenset()
    refuse_unmovable(model)
    return frozenset(map(id, within(movable(model, trained=host.all_parameters), host.limit_bytes)))


def _host(asked: Asked) -> HostMemory | None:
    """Return the host memory of ``offload=``, with the device's link speed, or ``None``."""
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
    """Return the bytes that the training loop holds, and the outputs that get no gradient.

    Args:
        model: the model, whose tensors are fake.
        sample: the arguments of the call, whose tensors are fake.
        asked: the arguments of the estimate.
        copies: the fake copies of tensors.
        outputs: the fake outputs of the call, or ``None`` if they depend on data.
    """
    options, device = asked.options, torch.device(asked.device.kind)
    needs = None
    loss = options.loss.map(copies.of) if isinstance(options.loss, Compared) else options.loss
    if loss is not None and outputs is not None:
        needs = needs_of_loss(loss, outputs, copies.of)
    unused = needs.unused if needs else None
    if unused is not None:
        unused = replace(unused, dropped=options.drop_unused)
    tensors = (*model.parameters(), *model.buffers(), *(t for _, t in sample.tensors()))
    parts = [part for tensor in tensors for part in torch_compat.dense_parts(tensor)]
    caller = Caller(
        reserve_bytes=options.reserve_bytes,
        accumulate=options.accumulate,
        loss_bytes=needs.nbytes if needs else None,
        loss_left_bytes=needs.left_bytes if needs else 0,
        target_bytes=target_bytes(loss, model, sample, HOME, step=device),
        resident=tuple(_placed(part, device) for part in parts),
        budget_on=options.budget_on,
        library_bytes=asked.device.workspaces_bytes,
    )
    return caller, unused


def _placed(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a fake tensor on ``device`` that has the storage and layout of ``tensor``.

    A tensor with data, which the model uses from outside, is replaced by a fake one first.
    """
    if tensor.device.type == device.type:
        return tensor
    if not torch_compat.is_fake(tensor):
        tensor = torch_compat.fake_mode().from_tensor(tensor)
    return torch_compat.fake_tensor(
        tensor,
        tensor.untyped_storage(),
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        device=device,
    )


def _state_bytes(
    optimizers: Sequence[Optimizer], model: nn.Module, device: torch.device, copies: FakeCopies
) -> dict[int, tuple[int, ...]]:
    """Return the bytes of each tensor of optimizer state on ``device``, by ``id`` of a parameter.

    The parameters are the fake ones of ``model``; those without state are left out.
    """
    stand_ins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def alike(parameter: torch.Tensor) -> torch.Tensor:
        own: torch.Tensor = copies.of(parameter)
        if id(own) not in stand_ins:
            made = own
            if device.type != "cpu":
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                made = nn.Parameter(empty, parameter.requires_grad)  # on no CPU, as those on a GPU
            stand_ins[id(own)] = own, made
        return stand_ins[id(own)][1]

    moved: list[Optimizer] = [own for own in optimizers if isinstance(own, type)]
    devices = {parameter.device for parameter in model.parameters()}
    instances = (own for own in optimizers if isinstance(own, torch.optim.Optimizer))
    for optimizer in with_state(instances):
        own = copied_optimizer(optimizer)
        own.param_groups = [
            {**group, "params": [alike(p) for p in group["params"] if p.device in devices]}
            for group in optimizer.param_groups
        ]
        moved.append(own)
    parameters = nn.ParameterList(map(alike, model.parameters()))
    found = optimizer_bytes(moved, parameters)
    return {
        own: tuple(allocated_bytes(nbytes, device) for nbytes in found[id(made)])
        for own, (_, made) in stand_ins.items()
        if id(made) in found
    }


def estimate_step(
    model: nn.Module,
    sample: Sample,
    asked: Asked,
    dim: Dim | None,
    most: int,
    progress: Progress,
) -> Estimate:
    """Return the estimate of memory and time of a training step.

    Args:
        model: the model.
        sample: the arguments of one call of it.
        asked: the other arguments of :func:`fxremat.estimate`.
        dim: the batch dimension to vary, as the user named it, or ``None``.
        most: the largest size of that dimension to consider.
        progress: receives how far planning has come.
    """
    copies = FakeCopies(in_host=_in_host(model, asked))
    named = None if dim is None else read_dim(model, sample, dim)
    shape = sample.map(copies.of)
    plan, batches, budget_bytes = None, None, None
    with copies.inside(model), in_training(model), torch.enable_grad():
        graph, budget, choices = graph_without_data(
            model, shape, asked, copies, progress, dynamic=False
        )
        least_bytes = choices.least_bytes(graph, budget)
        context = choices.context_with(choices.all[0])
        kept = first_plan(graph, context, budget).completed()
        progress(PLAN)
        if asked.budget is not None:
            budget_bytes = asked.budget.bytes_of(
                full_bytes=kept.baseline_peak_bytes, least_bytes=least_bytes
            )
            budget = replace(budget, written=asked.budget, nbytes=None)
            graph.started = False
            with contextlib.suppress(BudgetError):  # nothing fits
                placement = choose_placement(graph, budget, choices.all, choices.context_with)
                graph.training_state = placement.summary
                context = choices.context_with(placement)
                plan = later_plan(graph, context, budget).completed()
        if named is not None:
            batches = _batches(model, shape, asked, copies, named, most, progress)
    return Estimate(
        device=asked.device.name,
        kept=kept,
        least_budget_bytes=least_bytes,
        budget_bytes=budget_bytes,
        plan=plan,
        batches=batches,
        workspace_bytes=graph.aside_bytes(context.sizes),
        library_bytes=asked.device.library_bytes,
        memory_bytes=asked.device.memory_bytes,
        optimizer=", ".join(map(_name_of, asked.options.optimizers)) or None,
        loss=_loss_of(asked.options.loss),
    )


def _batches(
    model: nn.Module,
    sample: Sample,
    asked: Asked,
    copies: FakeCopies,
    dim: NamedDim,
    most: int,
    progress: Progress,
) -> Batches | None:
    """Return the sizes of ``dim``, up to ``most``, that fit the budget; ``None`` if none does."""
    assert asked.budget is not None and asked.budget.nbytes is not None
    try:
        graph, budget, choices = graph_without_data(
            model, sample, asked, copies, progress, dynamic=True
        )
    except SizesError as error:
        raise SizesError(
            error.found,
            "dim= captures all sizes at once, which this model does not support. Omit it, "
            "and estimate a sample of each size separately",
        ) from None
    graph.release()  # it is captured for its other sizes
    batching = Batching(
        graph,
        budget,
        asked.budget.nbytes,
        choices.context_with(choices.all[-1]),  # as the largest size needs
        torch_compat.wrapped_by(model),
        sample,
        most,
        progress,
    )
    try:
        return batching.over(dim)
    except BudgetError:
        return None


def _name_of(optimizer: Optimizer) -> str:
    return (optimizer if isinstance(optimizer, type) else type(optimizer)).__name__


def _loss_of(loss: LossOfOutputs | None) -> LossOf:
    return "unknown" if loss is None else "own" if loss is own_loss else "given"
