"""The public functions that take a model: compile, plan, frontier, max_batch and estimate."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import nn

from fxremat import torch_compat
from fxremat.capture.isolation import generators_restored, in_training
from fxremat.capture.sample import Sample, check_gradients
from fxremat.costs.estimated.devices import Device, read_device
from fxremat.effort import Effort
from fxremat.errors import ArgumentError, BudgetError, SizesError, refuse
from fxremat.graph.pool import frontier_over
from fxremat.graph.pools import all_pools
from fxremat.loop.optimizer_state import check_optimizers
from fxremat.module.compiled import CompiledModule, compile_module, original_of
from fxremat.module.moving import all_in_host
from fxremat.module.verify import check_device_present, check_solver_usable, cross_checked, verified
from fxremat.options.arguments import Arguments, read_model
from fxremat.options.budget import Budget, Readable
from fxremat.options.loss import Loss, LossFunction
from fxremat.options.readers import Assume, Executor, Optimizers, read_bool, read_plan
from fxremat.options.table import OPTIONS, former_refused
from fxremat.options.values import Bits, BitsKind, HostMemory, What
from fxremat.passes.joint.constraints import Policy
from fxremat.planning.choose import usual_context
from fxremat.progress import shown
from fxremat.ranks.peers import Peers, Ranks
from fxremat.report.estimate import Estimate
from fxremat.report.frontier import Batches, Frontier
from fxremat.report.plan import Plan
from fxremat.runtime import cuda_graph
from fxremat.sizing.estimate import Asked, estimate_step
from fxremat.sizing.max_batch import Batching, Dim, read_dim, read_most
from fxremat.units import Counted


@former_refused
def compile(
    model: nn.Module,
    sample: object = None,
    budget: Readable | None = None,
    *,
    reserve: int | str = 0,
    optimizer: Optimizers | str | None = None,
    loss: LossFunction | Loss | None = None,
    accumulate: bool = False,
    offload: What | Literal[False] | HostMemory = False,
    bits: BitsKind | Bits = "exact",
    effort: float | Effort = 1.0,
    executor: Executor = "eager",
    dynamic: bool | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    regions: Literal["auto", "one"] | Iterable[str] = "auto",
    in_flight: int = 1,
    strict: bool = False,
    assume: Assume = "usual",
    ranks: Ranks | None = None,
    policy: Policy | None = None,
) -> CompiledModule:
    """Make ``model`` train within ``budget``, at the least step time that can be found.

    Args:
        model: the module to train. It is captured in training mode and is not changed.
        sample: arguments of one call, on the model's device: a tensor, a tuple, a dict of
            keywords or a :class:`Sample`. If ``None``, the first training call is the sample.
        budget: the maximum number of bytes that a step may have allocated. It is text such as
            ``"6 GiB"``, or bytes as an int. A float in (0, 1], or text such as ``"50%"``, is a
            share of the peak with everything kept. ``"min"`` is the least feasible budget. A share
            and ``"min"`` are resolved for the usual loop (see ``assume``), and again once the state
            of an optimizer exists. ``"min"`` grows when a later call needs more.

            By default a budget limits the blocks that the device's allocator has handed out, which
            ``torch.cuda.max_memory_allocated`` reports. Text that ends in ``" reserved"``, such as
            ``"22 GiB reserved"``, limits all memory that the allocator takes for the step. This
            includes its cache and the unused parts of its blocks. On a CPU the two are equal.
        reserve: number of bytes of the budget that the plan leaves free.
        optimizer: an optimizer of the model, its class, the name of a class of ``torch.optim``
            such as ``"AdamW"``, or a list of these. Its state is counted from the first step on.
            If ``None``, state is counted once it exists.
        loss: a function that computes a scalar from the outputs, outside the model. Its memory is
            measured. Outputs that it does not use get no gradient, and a backward through one
            raises :class:`BackwardError`. ``"own"`` means that the model computes the loss and
            returns it, as ``.loss``, ``["loss"]``, the first element of a tuple, or its only
            output. A :class:`Loss` also has a target, or drops unused outputs. If ``None``, three
            times the bytes of the outputs are set aside, as a cross entropy would need.
        accumulate: whether to count a second set of gradients from the first step on, to which the
            gradients of each step are added. Gradients that already exist are always counted.
        offload: whether activations are moved to host memory and back while the device computes.
            ``False`` moves nothing. ``"auto"`` moves activations where that is faster than
            recomputing them. ``"only"`` recomputes nothing. ``"conv"`` recomputes nothing and moves
            only inputs of convolutions and poolings (Hascoet et al.). A :class:`HostMemory` also
            sets how much host memory is used, and where it is.
        bits: ``"exact"`` computes gradients that are bitwise those of the step without a plan.
            A run of operations may be computed in parts: for some rows of the batch or the sequence
            at a time. Its results for these rows must depend only on these rows. A loss over a
            vocabulary then needs no logits, and an MLP no hidden layer. Parts are considered where
            nothing else fits, and where a step takes 1.2 times as long as with everything kept.
            They are also considered for a loss whose gradient is at least an eighth of what a step
            allocates. Only operations that gave the same bits in parts, at the step's sizes on this
            machine, are computed in parts. ``"rounding"`` computes others in parts as well, may
            call attention without its causal mask where that changes bits, and may rebuild the
            input of a BatchNorm from the output of the leaky ReLU that follows it.
            Gradients are then equal up to rounding. With ``executor="inductor"`` and with
            ``ranks``, parts require ``"rounding"``. With ``ranks``, a model that is captured as
            several graphs is never computed in parts. A :class:`Bits` also verifies bits during
            training.
        effort: how much work planning may spend on forms of the step that are not needed to fit,
            such as those in parts. It is a multiple of the usual work, which takes some seconds of
            CPU time. ``0`` searches only forms that are needed to fit, and ``math.inf`` searches
            all. An :class:`Effort` also selects forms and solvers. ``explain()`` reports what was
            skipped.
        executor: ``"eager"`` runs eager's kernels. ``"inductor"`` runs pointwise operations and
            reductions as kernels that Inductor generates, which adds seconds to a minute to this
            call. At every budget gradients are bitwise those of the same kernels with everything
            kept, which differ from eager's. ``"inductor"`` requires a C++ compiler, or Triton on a
            GPU. It is the default of ``torch.compile(backend="fxremat")`` on a GPU where Triton
            works.
        dynamic: whether sizes are captured as symbols. ``None`` captures the second size of an
            argument with symbols in place of sizes, and runs all further sizes from that capture.
            ``True`` captures the first size with symbols as well. ``False`` captures each size
            separately.
        plan: a plan of this step, or the path of a file that :meth:`Plan.save` wrote. It is
            followed, and nothing is measured or planned. All options except the folder of host
            memory must be those that it was made with. ``budget`` may be omitted.
        regions: ``"auto"`` plans the graphs that the model is captured in as *regions* of one
            step, within one budget. A model that breaks the graph is not run by this function:
            its first training call captures it and runs each line once. Until one call has been
            observed from begin to end, calls follow the plan of least memory of each region; then
            the plans of all regions are chosen together. A graph break that occurs in the first
            call only does not affect later calls: the second call captures the model as one graph
            if possible. ``"one"`` refuses a model that breaks the graph. Names of modules, such
            as the model's layers, make each of these modules a region; equal ones are captured
            and measured once.
        in_flight: number of forwards that may wait for their backward, as microbatches of a
            pipeline's stage do. The budget above the model's memory is divided among them. A
            value above 1 implies ``accumulate``.
        strict: ``True`` raises ``BudgetError`` for a later step that no plan keeps within the
            budget. ``False`` makes such a step, once one step has run to its end, follow the plan
            of least memory, with a ``BudgetWarning`` that names what grew and a sufficient budget.
        assume: what least budgets, ``"min"`` and shares have room for. ``"usual"`` assumes steps
            of the usual loop from the second one on. In these, the previous outputs are still held
            and gradients may exist, set to zero. ``"strict"`` assumes one step, before which
            neither exists, and does not count other networks of the process.
        ranks: the processes that train the model together, and what they do if their budgets
            differ. The first of them plans, with the largest measurements of all processes, and
            all follow its plan. ``None`` uses the processes of the model's
            ``DistributedDataParallel``, ``fully_shard`` or ``DTensor``s; without these, each
            process plans for itself.
        policy: a function that is called with an :class:`Operation` for each forward operation of a
            captured graph, at the sizes of the capture, and returns what plans do with its
            results. ``"keep"`` saves the results that the backward reads and never recomputes
            them. ``"recompute"`` does not save them from forward to backward, but recomputes them
            where the backward reads them. ``"offload"`` saves them in host memory, which requires
            ``offload``. ``None`` leaves the decision to the planner. The tags ``MUST_SAVE``,
            ``MUST_RECOMPUTE`` and ``MUST_CPU_OFFLOAD`` of ``torch.utils.checkpoint``'s selective
            checkpointing have the same effect where the policy returns ``None``. Hints
            (``PREFER_...``) have no effect. ``explain()`` names the operations that were decided
            in this way, and a ``BudgetError`` reports what these decisions cost.

    Returns:
        A module that trains exactly as ``model`` does and shares all of its state.

    Raises:
        BudgetError: the budget cannot be read or is below the least feasible one, or ``plan``
            exceeds it. A training call of a model with several regions raises it if no plans of
            the regions fit together, or if three steps in a row exceeded the budget.
        PlanError: ``plan`` cannot be read, or belongs to another step.
        ArgumentError: another argument cannot be read or has a former name, ``loss`` does not
            return a scalar, or ``optimizer`` belongs to another model.
        SampleError: the sample has an unsupported type, or is on another device than the model.
        NoGradientError: no parameter or input requires a gradient.
        CaptureError: the model breaks the graph where that is refused, or with ``offload`` or
            ``plan``; or a CUDA graph is being captured.
        CostError: an operation cannot be measured.
        HostMemoryError: the host memory that the plan needs cannot be allocated.
        RankError: the processes disagree, or one of them does not arrive in time.
        Exception: what the model itself raises for the sample, unchanged.
    """
    # The others are passed to Arguments.read by their own names.
    given = {name: value for name, value in locals().items() if name not in ("model", "sample")}
    with Peers.reporting_early_failures(model, ranks):
        cuda_graph.refuse_planning()
        model = original_of(read_model(model))
        call = None if sample is None else Sample.of(sample)
        asked = Arguments.read(**given)
        check_optimizers(asked.optimizers, model, call)
    return compile_module(model, asked, call)


def plan(
    model: nn.Module, sample: object, budget: Readable, *, check: bool = False, **options: Any
) -> Plan:
    """Return the plan that :func:`compile` would follow for a model captured as one graph.

    Args:
        model: the module to train. It is not changed.
        sample: arguments of one call, as for :func:`compile`.
        budget: the maximum number of bytes that a step may have allocated, as for :func:`compile`.
        check: whether to compare the plan with CP-SAT, which searches for up to two minutes for
            the fastest schedule of a chain of up to 12 stages, and a proof. The result is
            ``cross_check`` of the plan and a line of ``explain()``: the seconds and the gap, or
            why there are none. Cannot be combined with ``offload``.
        **options: options of :func:`compile`, except ``regions``.

    Returns:
        The plan.

    Raises:
        FxrematError: the errors of :func:`compile`; a ``CaptureError`` if the model breaks the
            graph; an ``ArgumentError`` if ``check`` is not a bool or is combined with ``offload``,
            or if ortools is missing.
    """
    if read_bool("check", check):
        check_solver_usable(options.get("offload", False))
    made = compile(model, sample, budget, **_whole("plan", options))
    made._training.undo()  # it does not train
    (found,) = made.plans
    return cross_checked(found) if check else found


def frontier(
    model: nn.Module, sample: object, *, counted: Counted = "allocated", **options: Any
) -> Frontier:
    """Return the least step time at every budget, with recomputation only.

    All points come from the tables that plans are made from, so no solver runs for a point. At the
    lowest peaks runs of operations are computed in parts, as ``bits`` and ``effort`` allow.

    Args:
        model: the module to train. It is not changed.
        sample: arguments of one call, as for :func:`compile`.
        counted: the bytes that peaks are measured in, ``"allocated"`` or ``"reserved"``, as for
            budgets.
        **options: options of :func:`compile`, except ``budget`` and ``regions``. ``offload`` has
            no effect.

    Returns:
        The frontier, as points of peak bytes and seconds of a step.

    Raises:
        FxrematError: the errors of :func:`compile`.
    """
    if counted not in get_args(Counted):
        refuse("counted", counted, "'allocated' or 'reserved'")
    made = compile(model, sample, f"100% {counted}", **_whole("frontier", options))
    made._training.undo()  # it does not train
    (graph,) = made._training.graphs
    (first,) = graph.calls.plans
    context = usual_context(graph, first, made._training.loop.budget)
    with generators_restored(), in_training(original_of(model)), torch.enable_grad():
        return frontier_over(all_pools(graph, context))


def max_batch(
    model: nn.Module,
    sample: object,
    budget: str | int,
    *,
    dim: Dim = 0,
    most: int | None = None,
    **options: Any,
) -> Batches:
    """Return the largest batch size that fits ``budget``, and the one with the highest throughput.

    The step is captured and measured once, at the sample, which itself need not fit. Bytes and
    seconds of other sizes are computed from that. Two kinds of operations also run at other sizes:
    convolutions, whose libraries report the memory they take, and, at the result, operations in
    parts, to compare their bits. A result that needs such parts is compiled, and smaller sizes are
    tried if that fails. Only sizes that the model accepts are returned, such as even ones if it
    views its batch as pairs.

    Args:
        model: the module to train.
        sample: arguments of one call, as for :func:`compile`. Sizes that are equal in the sample
            vary together, so its batch size should differ from its other sizes, and be at least 2.
        budget: ``"6 GiB"``, ``"6 GiB reserved"``, or bytes as an int.
        dim: the dimension of the batch: a dimension of the sample's first tensor, or a pair of an
            argument's index or name and a dimension of that argument.
        most: the largest size to try. Sizes above 2^20 are never tried.
        **options: options of :func:`compile`, except ``dynamic``, ``plan``, ``regions``,
            ``in_flight`` and ``ranks``.

    Returns:
        Sizes with their least budgets and predicted seconds. Kernels may use other memory at a
        size than they report. So when a size near the largest is compiled for the first time, a
        larger size may turn out to fit, or the largest may be one too many.

    Raises:
        BudgetError: the budget is not a number of bytes, or no size fits.
        ArgumentError: a dimension does not exist, does not vary, or varies only together with
            another one of the same argument; or an option cannot be read.
        SizesError: the model computes something that does not support varying sizes.
        SampleError, NoGradientError, CaptureError, CostError, HostMemoryError: as for
            :func:`compile`.
    """
    model, call, limit = original_of(read_model(model)), Sample.of(sample), read_most(most)
    read = Budget.read(budget)
    budget_bytes = read.nbytes
    if budget_bytes is None:
        raise BudgetError(
            f"budget must be bytes, as '6 GiB' or an int, but got {budget!r}", code="FXR001"
        )
    options = _whole("max_batch", options)
    with all_in_host(model, Arguments.read(budget, **options).host):
        return _max_batch(model, call, budget, read, dim, limit, options)


def _max_batch(
    model: nn.Module,
    call: Sample,
    budget: str | int,
    read: Budget,
    dim: Dim,
    limit: int,
    options: dict[str, Any],
) -> Batches:
    """Return the result of :func:`max_batch`, given its arguments as it has read them."""
    budget_bytes = read.nbytes
    assert budget_bytes is not None
    asked = read_dim(model, call, dim)
    measured = {**options}
    if isinstance(host := options.get("offload"), HostMemory) and host.state:
        measured["offload"] = replace(host, state="all")  # as the largest size needs
    try:
        made = compile(model, call, f"100% {read.counted}", dynamic=True, **measured)
    except SizesError as error:
        raise SizesError(
            error.found,
            "max_batch captures all sizes at once, which this model does not support. Plan each "
            "size separately: fxremat.plan(model, sample, budget) with a sample of that size "
            "raises a BudgetError if the size does not fit",
        ) from None
    made._training.undo()  # it does not train
    (graph,) = made._training.graphs
    (context,) = graph.calls.plans

    def trains(resized: Sample) -> bool:
        try:
            tried = compile(model, resized, budget, dynamic=False, **options)
        except BudgetError:
            return False
        tried._training.undo()
        return True

    with generators_restored(), in_training(model), torch.enable_grad(), shown() as progress:
        return Batching(
            graph,
            made._training.loop.budget,
            budget_bytes,
            context,
            model,
            call,
            limit,
            progress,
            trains,
        ).over(asked)


def estimate(
    model: nn.Module,
    sample: object,
    *,
    device: Device | str | os.PathLike[str] = "cpu",
    budget: Readable | None = None,
    dim: Dim | None = None,
    most: int | None = None,
    costs: Plan | str | os.PathLike[str] | None = None,
    verify: bool = False,
    **options: Any,
) -> Estimate:
    """Estimate a training step on any device, present or not, without allocating memory.

    The step is captured without data and planned as :func:`compile` plans it. Bytes are computed
    from shapes. On a CPU they equal those of :func:`compile`, except for the workspaces of
    operations, which do not follow from shapes and for which ``workspace_bytes`` are set aside.
    Seconds are lower bounds computed from the device's figures.

    Args:
        model: the module to train, on ``torch.device("meta")`` or on any real device. It is not
            changed.
        sample: arguments of one call, as for :func:`compile`. Its tensors may be on ``meta``.
        device: the name of a device, such as ``"cpu"``, ``"H100"`` or ``"A100"``, a
            :class:`Device`, or the path of a file that :meth:`Device.save` wrote.
        budget: a budget to plan for, as for :func:`compile`. A budget that does not fit is not an
            error.
        dim: the dimension of the batch, as for :func:`max_batch`. If given, the sizes that fit
            ``budget``, which must be in bytes, are computed.
        most: the largest size to try.
        costs: a plan of this step made on the device that runs it, or the path of its file. Its
            measurements replace the estimates.
        verify: whether to make the plan again on this machine's CUDA device, or on a stand-in for
            one. Some steps then follow it, on a copy of the model without data. The memory that
            torch's allocator handed out and reserved is returned in ``verified``. The device must
            have that memory.
        **options: options of :func:`compile`, except ``dynamic``, ``plan``, ``regions``,
            ``in_flight``, ``ranks`` and ``executor``: operations run as in eager mode. Nothing is
            computed in parts, and no mask of attention is left out, unless ``bits="rounding"``,
            since whether these keep their bits is measured on the device.

    Returns:
        The least budget, the peak with everything kept, the frontier between them, and the results
        for ``budget``, ``dim`` and ``verify``.

    Raises:
        ArgumentError: an argument or an option cannot be read, or the dimension does not vary.
        BudgetError: the budget cannot be read.
        PlanError: ``costs`` cannot be read.
        CostError: ``costs`` belong to another step.
        SampleError, NoGradientError, CaptureError: as for :func:`compile`.
        torch.OutOfMemoryError: ``verify`` needs more memory than the CUDA device has.
    """
    model, call, limit = original_of(read_model(model)), Sample.of(sample), read_most(most)
    _refuse("estimate", options)
    if read_bool("verify", verify):
        check_device_present()
    target, given = read_device(device), None if budget is None else Budget.read(budget)
    if dim is not None and (given is None or given.nbytes is None):
        raise ArgumentError("dim= requires budget= in bytes", argument="dim", value=dim)
    check_gradients(model, call)
    known = read_plan("costs", costs)
    asked = Asked(
        target,
        Arguments.read(1.0 if budget is None else budget, **options),
        given,
        known,
    )
    check_optimizers(asked.options.optimizers, model, call)
    with generators_restored():
        with shown() as progress:
            found = estimate_step(model, call, asked, dim, limit, progress)
        if not verify:
            return found
        inner = torch_compat.wrapped_by(model)
        return replace(found, verified=verified(inner, call, asked.options))


_WHY = {
    "plan": "makes one plan for the whole model",
    "frontier": "describes one graph of the whole model",
    "max_batch": "plans one step of one process, captured for all sizes at once",
    "estimate": "captures one step of one process as eager would run it, and runs nothing",
}
"""Why a function does not take all options."""


def _whole(function: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return ``options`` for a model that is captured as one graph.

    Raises:
        ArgumentError: ``function`` does not take one of them.
    """
    _refuse(function, options)
    return {**options, "regions": "one"}


def _refuse(function: str, options: dict[str, Any]) -> None:
    for option in OPTIONS:
        if option.name in options and not option.taken_by(function):
            message = (
                f"{function} does not take {option.name}=, because it {_WHY[function]}: omit it"
            )
            raise ArgumentError(message, argument=option.name, value=options[option.name])
