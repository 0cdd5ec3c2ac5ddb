"""The public functions that are given a model: compile, plan, frontier, max_batch, estimate."""

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
from fxremat.costs.devices import Device, read_device
from fxremat.effort import Effort
from fxremat.errors import ArgumentError, BudgetError, SizesError, refuse
from fxremat.graph.pool import frontier_over
from fxremat.graph.pools import all_pools
from fxremat.loop.optimizer_state import check_optimizers
from fxremat.module.compiled import CompiledModule, compile_module, original_of
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
        model: the module to train; it is captured in training mode and not changed.
        sample: arguments of one call, on the model's device: a tensor, a tuple, a dict of
            keywords or a :class:`Sample`. ``None``: the first training call is the sample.
        budget: the most bytes that a step may have allocated: ``"6 GiB"``, bytes as an
            int, a share in (0, 1] of the peak with everything kept as a float or as
            ``"50%"``, or ``"min"``, the least that is feasible. A share and ``"min"`` are resolved
            for the usual loop (see ``assume``), and again when the state of an optimizer has
            become known; ``"min"`` grows where a later call needs more. Text that ends in
            ``" reserved"``, such as ``"22 GiB reserved"``, ``"50% reserved"`` or
            ``"min reserved"``, limits all that the device's allocator takes for the step,
            including its cache and the unused parts of its blocks, instead of the blocks that it
            has handed out, which ``torch.cuda.max_memory_allocated`` reports. On a CPU both are
            the same.
        reserve: bytes of the budget that the plan leaves free.
        optimizer: an optimizer of the model, its class, or the name of one of ``torch.optim``, as
            ``"AdamW"``, or a list of these: the state that it keeps is counted from the start.
            Without it, state is counted once it exists.
        loss: computes a scalar from the outputs, outside the model; what it needs is measured, and
            outputs that it does not use get no gradient (a backward through one raises).
            ``"own"``: the model computes its own loss and returns it, as ``.loss``, ``["loss"]``,
            first of a tuple, or as its only output. A :class:`Loss` has a target as well, or drops
            outputs that are not used. ``None``: three times the bytes of the outputs are set aside.
        accumulate: count a second set of gradients, to which those of each step are added.
            Gradients that exist already are counted anyway.
        offload: ``"auto"``: activations may also travel to host memory and back, while the
            device computes, where that is faster than recomputing them; ``"only"``: nothing is
            recomputed; ``"conv"``: in addition, nothing travels but inputs of convolutions and
            poolings (Hascoet et al.); ``False``: nothing travels. A :class:`HostMemory` limits
            how much of it is used, and says where it is.
        bits: ``"exact"``: gradients are bitwise those of the step without a plan. Runs of
            operations whose results for some rows (of the batch, the sequence, or both) follow
            from these rows only may be computed in parts, one after the other: a loss over a
            vocabulary without its logits, an MLP without its hidden layer. They are considered
            where nothing else fits, where a step takes 1.2 times as long as with everything kept,
            and for a loss whose gradient is an eighth of what a step allocates, or more. Only
            operations are computed in parts that were seen to give the same bits so, at the
            step's sizes, on this machine. ``"rounding"``: others are computed in parts as well,
            and the input of a BatchNorm may be rebuilt from the output of the leaky ReLU behind
            it; gradients are equal to rounding. With ``executor="inductor"`` and with ``ranks``
            runs are in parts only with ``"rounding"``; with ``ranks`` never where the model is
            captured as several graphs. A :class:`Bits` also verifies bits while it trains.
        effort: how much of planning may go into further forms of the step that are not needed to
            fit, such as those in parts; in multiples of what is usual, which takes some seconds of
            CPU. ``0``: only forms that are needed to fit; ``math.inf``: all. An :class:`Effort`
            also says which forms and which solvers are used. ``explain()`` says what was left out.
        executor: ``"inductor"``: pointwise operations and reductions run as kernels that Inductor
            makes, which takes seconds to a minute here. At every budget gradients are bitwise
            those of the same kernels with everything kept, which are not eager's.
        dynamic: ``None``: the second size of an argument that is met is captured with symbols in
            place of sizes, and all others run from that; ``True``: so is the first one;
            ``False``: each is captured by itself.
        plan: a plan of this step, or the file that :meth:`Plan.save` wrote it into: it is
            followed, and nothing is measured or planned. All options but the folder of host memory
            must be as when it was made. ``budget`` may be left out then.
        regions: ``"auto"``: the graphs that the model is captured in are *regions* of one step,
            within one budget. Nothing of a model that breaks the graph runs here: its first
            training call captures it and runs each line once. Until one call was watched from
            begin to end, calls follow the plan of least memory of each region; from then on the
            plans of all regions are chosen together. What the model does only at its first call
            breaks no later one: at the second call it is captured as one graph where it can be.
            ``"one"``: a model that breaks the graph is refused. Names of modules, such as a
            model's layers: these are regions by themselves, and those that are alike are captured
            and measured once.
        in_flight: how many forwards may wait for their backward, as microbatches of a pipeline's
            stage do: what the budget leaves above the model is divided by them. More than one
            imply ``accumulate``.
        strict: ``True``: a later step that no plan keeps within the budget raises ``BudgetError``.
            ``False``: once a step has run to its end, such a step follows the plan of least memory,
            with a ``BudgetWarning`` that says what grew and which budget would do.
        assume: what least budgets, ``"min"`` and shares have room for. ``"usual"``: the steps of
            the usual loop from the second one on, in which the previous outputs are still held and
            gradients may exist, set to zero. ``"strict"``: one step, before which neither exists;
            other networks of the process are not counted either.
        ranks: processes that train the model together, and what they do where they differ: the
            first of them plans, by the most that any of them measures, and all follow. ``None``:
            those of the model's ``DistributedDataParallel``, ``fully_shard`` or ``DTensor``s;
            where nothing refers to others, each process plans for itself.
        policy: is called with an :class:`Operation` for each forward operation of a captured
            graph, at the sizes of the capture, and says what plans do with its results: ``"keep"``:
            those that the backward reads are saved, and never computed again; ``"recompute"``:
            they are not saved from forward to backward, but computed again where the backward
            reads them; ``"offload"``: they are saved in host memory, which needs ``offload``;
            ``None``: the planner decides, as it does without a policy. Tags of
            ``torch.utils.checkpoint``'s selective checkpointing that are no hints (``MUST_SAVE``,
            ``MUST_RECOMPUTE``, ``MUST_CPU_OFFLOAD``) say the same where the policy returns
            ``None``.

    Returns a module that trains exactly as ``model`` does, and shares all it has.

    Raises:
        BudgetError: the budget cannot be read, is below the least feasible one, or ``plan``
            does not keep to it. A training call of a model of several regions raises it where
            no plans of them fit together, or three steps in a row took more.
        PlanError: ``plan`` cannot be read, or is one of another step.
        ArgumentError: another argument cannot be read or has a former name, ``loss`` returns no
            scalar, or ``optimizer`` is of another model.
        SampleError: the sample is of another kind, or on another device than the model.
        NoGradientError: nothing requires a gradient.
        CaptureError: the model breaks the graph where that is refused, or with ``offload`` or
            ``plan``; or a CUDA graph is being captured.
        CostError: an operation cannot be measured.
        HostMemoryError: the host memory that the plan takes cannot be had.
        RankError: processes do not agree, or one of them does not come in time.
        Exception: what the model itself raises at the sample, as it is.
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
        model: the module to train; it is not changed.
        sample: arguments of one call, as for :func:`compile`.
        budget: the most bytes that a step may have allocated, as for :func:`compile`.
        check: hold the plan against CP-SAT, which finds and proves the fastest schedule of a chain
            of up to 12 stages, in up to two minutes: ``cross_check`` of the plan, and a line of
            ``explain()``, have its seconds and the gap, or say why there are none. Not with
            ``offload``.
        **options: of :func:`compile`, but ``regions``.

    Raises:
        FxrematError: the errors of :func:`compile`; a ``CaptureError`` where the model breaks the
            graph; an ``ArgumentError`` where ``check`` is no truth value, comes with ``offload``,
            or ortools is missing.
    """
    if read_bool("check", check):
        check_solver_usable(options.get("offload", False))
    made = compile(model, sample, budget, **_whole("plan", options))
    made._training.loop.leave()  # it does not train
    (found,) = made.plans
    return cross_checked(found) if check else found


def frontier(
    model: nn.Module, sample: object, *, counted: Counted = "allocated", **options: Any
) -> Frontier:
    """Return the least step time at every budget, by recomputation alone.

    All points come from the tables that plans are made from: no solver runs for a point. At the
    least peaks runs of operations are computed in parts, as ``bits`` and ``effort`` allow.

    Args:
        model: the module to train; it is not changed.
        sample: arguments of one call, as for :func:`compile`.
        counted: which bytes peaks are in: ``"allocated"`` or ``"reserved"``, as budgets are.
        **options: of :func:`compile`, but ``budget`` and ``regions``. ``offload`` changes nothing
            here.

    Returns points of peak bytes and seconds of a step.

    Raises:
        FxrematError: the errors of :func:`compile`.
    """
    if counted not in get_args(Counted):
        refuse("counted", counted, "'allocated' or 'reserved'")
    made = compile(model, sample, f"100% {counted}", **_whole("frontier", options))
    made._training.loop.leave()  # it does not train
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
    """Return the largest batch that fits ``budget``, and the one of the most samples a second.

    The step is captured and measured once, at the sample, which need not fit itself. All else is
    computed; nothing is run of any other size but convolutions, whose libraries must be asked what
    memory they take, and, at the answer, what is computed in parts, to compare its bits. An answer
    that needs such parts is compiled, and smaller ones are tried where that is refused.
    Only sizes that the model takes are answered: even ones, say, where it views its batch as pairs.

    Args:
        model: the module to train.
        sample: as for :func:`compile`. Sizes that are equal in it vary together, so its batch
            should differ from its other sizes, and be at least 2.
        budget: ``"6 GiB"``, ``"6 GiB reserved"``, or bytes as an int.
        dim: the batch: a dimension of the sample's first tensor; or a pair, an argument's index
            or name and a dimension of it.
        most: the largest size that is asked for; none beyond 2^20 is anyway.
        **options: of :func:`compile`, but ``dynamic``, ``plan``, ``regions``, ``in_flight`` and
            ``ranks``.

    Returns sizes, their least budgets and predicted seconds. The first time that a size beyond the
    largest is compiled may find it to fit yet, or the largest to be one too many, where kernels
    take other memory there than they say.

    Raises:
        BudgetError: the budget is no number of bytes, or no size fits.
        ArgumentError: a dimension does not exist, does not vary or varies only with another of
            the same argument; an option cannot be read.
        SizesError: the model computes something that cannot follow sizes that vary.
        SampleError, NoGradientError, CaptureError, CostError, HostMemoryError: as
            :func:`compile`.
    """
    model, call, limit = original_of(read_model(model)), Sample.of(sample), read_most(most)
    read = Budget.read(budget)
    budget_bytes = read.nbytes
    if budget_bytes is None:
        raise BudgetError(f"budget is {budget!r}: give bytes as '6 GiB' or an int")
    options = _whole("max_batch", options)
    asked = read_dim(model, call, dim)
    try:
        made = compile(model, call, f"100% {read.counted}", dynamic=True, **options)
    except SizesError as error:
        raise SizesError(
            error.found,
            "max_batch captures all sizes at once, which this model does not let it: ask for the "
            "plan of each size by itself, fxremat.plan(model, sample, budget) for a sample of that "
            "size; it raises a BudgetError where the size does not fit",
        ) from None
    made._training.loop.leave()  # it does not train
    (graph,) = made._training.graphs
    (context,) = graph.calls.plans

    def trains(resized: Sample) -> bool:
        try:
            tried = compile(model, resized, budget, dynamic=False, **options)
        except BudgetError:
            return False
        tried._training.loop.leave()
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
    """Estimate a training step on a device that need not be present; nothing is allocated.

    The step is captured without data and planned as :func:`compile` plans it. Bytes follow from
    shapes: on a CPU they are those of :func:`compile`, but for what operations take while they
    run, which no shape tells, and for which ``workspace_bytes`` are set aside. Seconds are the
    least that the device could take, by its figures.

    Args:
        model: the module to train: on ``torch.device("meta")``, without data, or a real one,
            wherever it is. It is not changed.
        sample: as for :func:`compile`; its tensors may be on ``meta``.
        device: the name of one, such as ``"cpu"``, ``"H100"`` or ``"A100"``, a :class:`Device`, or
            the path of a file that :meth:`Device.save` wrote.
        budget: as for :func:`compile`: plan for it, too. One that does not fit is no error.
        dim: the batch, as for :func:`max_batch`: find the sizes of it that fit the budget, which
            must then be bytes.
        most: the largest size of it that is asked for.
        costs: a plan of this step, made where it runs, or the file it was saved in: what was
            measured for it is used in place of estimates.
        verify: make the plan once more on this machine's CUDA device, or on what stands in for
            one, and follow it for some steps, of a copy without data: what torch's allocator has
            handed out, and taken, is in ``verified``. That memory must be there.
        **options: of :func:`compile`, but ``dynamic``, ``plan``, ``regions``, ``in_flight``,
            ``ranks`` and ``executor``: operations run as eager runs them. Which of them keep their
            bits in parts is measured where they run, so nothing is in parts but with
            ``bits="rounding"``.

    Returns the least budget, the peak with everything kept, the frontier between them and what was
    asked for beside.

    Raises:
        ArgumentError: an argument or an option cannot be read, or the dimension does not vary.
        BudgetError: the budget cannot be read.
        PlanError: ``costs`` cannot be read.
        CostError: ``costs`` are those of another step.
        SampleError, NoGradientError, CaptureError: as :func:`compile`.
        torch.OutOfMemoryError: ``verify`` needs more memory than the CUDA device has.
    """
    model, call, limit = original_of(read_model(model)), Sample.of(sample), read_most(most)
    _refuse("estimate", options)
    if read_bool("verify", verify):
        check_device_present()
    target, given = read_device(device), None if budget is None else Budget.read(budget)
    if dim is not None and (given is None or given.nbytes is None):
        raise ArgumentError("dim= needs a budget= in bytes", argument="dim", value=dim)
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
    "plan": "makes one plan, for all that a model does",
    "frontier": "shows one graph, of all that a model does",
    "max_batch": "plans one step of one process, captured for all sizes at once",
    "estimate": "runs nothing: it captures one step, for one process, as eager would run it",
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
            message = f"{option.name}= is not for {function}, which {_WHY[function]}: leave it out"
            raise ArgumentError(message, argument=option.name, value=options[option.name])
