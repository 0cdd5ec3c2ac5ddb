"""The public functions that are given a model: compile, plan, frontier, max_batch, estimate."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fxremat import torch_compat
from fxremat.capture.isolation import generators_restored, in_training
from fxremat.capture.sample import Sample, check_gradients
from fxremat.costs.devices import Device, read_device
from fxremat.errors import ArgumentError, BudgetError, SizesError
from fxremat.graph.pool import frontier_over
from fxremat.graph.pools import all_pools
from fxremat.loop.optimizer_state import check_optimizers
from fxremat.module.compiled import CompiledModule, compile_module, original_of
from fxremat.module.verify import check_device_present, check_solver_usable, cross_checked, verified
from fxremat.options.arguments import (
    Arguments,
    Assume,
    Executor,
    Offload,
    Optimizers,
    Split,
    read_bool,
    read_model,
    read_plan,
)
from fxremat.options.budget import Budget, Readable
from fxremat.options.loss import Loss
from fxremat.planner.search import DEFAULT_GENERATORS
from fxremat.planning.choose import usual_context
from fxremat.progress import shown
from fxremat.ranks.peers import Peers, Ranks
from fxremat.report.estimate import Estimate
from fxremat.report.frontier import Batches, Frontier
from fxremat.report.plan import Plan
from fxremat.runtime import cuda_graph
from fxremat.sizing.estimate import Asked, estimate_step
from fxremat.sizing.max_batch import Batching, Dim, read_dims, read_most
from fxremat.units import Counted


def compile(
    model: nn.Module,
    sample: object = None,
    budget: Readable | None = None,
    *,
    reserve: int | str = 0,
    optimizer: Optimizers | str | None = None,
    loss: Loss | None = None,
    target: Any = None,
    drop_unused: bool = False,
    accumulate: bool = False,
    offload: Offload = False,
    host_limit: int | str | None = None,
    host_dir: str | os.PathLike[str] | None = None,
    exact: bool = True,
    split: Split = "exact",
    effort: float = 1.0,
    budget_on: Counted = "allocated",
    executor: Executor = "eager",
    dynamic: bool | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    fullgraph: bool = False,
    regions: Iterable[str] = (),
    in_flight: int = 1,
    strict: bool = False,
    assume: Assume = "usual",
    verify_bits: int = 0,
    ranks: Ranks | None = None,
    generators: Iterable[str] = DEFAULT_GENERATORS,
) -> CompiledModule:
    """Make ``model`` train within ``budget``, at the least step time that can be found.

    Args:
        model: the module to train; it is captured in training mode and not changed.
        sample: arguments of one call, on the model's device: a tensor, a tuple, a dict of
            keywords or a :class:`Sample`. ``None``: the first training call is the sample.
        budget: the most bytes that a step may have allocated: ``"6 GiB"``, bytes as an
            int, a share in (0, 1] of the peak with everything kept as a float or as
            ``"50%"``, or ``"min"``, the least that is feasible. A share and ``"min"`` are resolved
            for the usual loop (see ``assume``), and once more when the state of an optimizer has
            become known; ``"min"`` becomes more where a later call needs more.
        reserve: bytes of the budget to leave alone.
        optimizer: an optimizer of the model, its class, or the name of one of ``torch.optim``, as
            ``"AdamW"``, or a list of these: the state that it keeps is counted from the start.
            Without it, state is counted once it exists.
        loss: computes a scalar from the outputs, or from the outputs and ``target``, outside
            the model; what it needs is measured, and outputs that it does not use get no
            gradient (a backward through one raises). ``"own"`` for a model that computes its
            own loss and returns it, as ``.loss``, ``["loss"]``, first of a tuple, or alone.
            Without it, three times the bytes of the outputs are set aside.
        target: what a ``loss`` such as ``torch.nn.CrossEntropyLoss()`` compares the outputs
            with, for ``loss(model(x), target)``: a tensor of the sample's size, or a tuple or
            dict of some. It is counted as held throughout the step.
        drop_unused: return ``None`` in place of the outputs that ``loss`` does not use, such
            as logits beside a loss: nobody can hold them, so they are counted no longer than
            the step itself needs them.
        accumulate: count a second set of gradients, into which each step's are added.
            Gradients that exist already are counted anyway.
        offload: ``"auto"``: activations may also travel to host memory and back, beside
            the computations, where that is faster than recomputing them; ``"only"``:
            nothing is recomputed; ``"conv"``: nor does anything travel but inputs of
            convolutions and poolings (Hascoet et al.); ``False``: nothing travels.
        host_limit: with ``offload``: the most host memory to use, ``"8 GiB"`` or bytes; else
            as much as the plan takes. It is allocated here, once, and freed with the returned
            module.
        host_dir: with ``offload``, where the step runs on a CPU: folder of the file that
            stands for host memory, on a fast disk or in memory; the system's for temporary
            files if None.
        exact: ``False``: the input of a BatchNorm may be rebuilt from the output of the leaky
            ReLU behind it, which frees the norm's input at little time, but gives gradients
            up to rounding, not the same bits.
        split: ``"exact"``: runs of operations whose results for some rows (of the batch, the
            sequence, or both) follow from these rows alone may be computed in parts, one after the
            other: a loss over a vocabulary without its logits, an MLP without its hidden layer.
            That is looked at where nothing else fits, or takes 1.2 times what everything kept
            does, and of a loss whose gradient is an eighth of what a step allocates, or more: it
            is in parts wherever that takes less than 0.9 times as long. Only operations are in
            parts that were seen to give the same bits so, at the step's sizes, here. ``True``:
            others, too, with results up to rounding; ``False``: none. With ``executor="inductor"``
            and with ``ranks`` some are with ``True`` alone, with ``ranks`` none where the model is
            captured as several graphs.
        effort: how much of planning may go into further forms of the step, those in parts, that
            are not needed to fit; in multiples of what is usual, which takes some seconds of CPU,
            or half as long as all else of a long step. It is counted in operations that are looked
            at, not by a clock, so the same step gets the same plan anywhere. ``0``: only forms that
            are needed to fit; ``math.inf``: all. ``explain()`` says what was not looked at.
        budget_on: ``"reserved"``: the budget is for all that the device's allocator takes for
            the step, its cache and what lies fallow in it included, not for the blocks that it
            has handed out, which ``torch.cuda.max_memory_allocated`` tells. The same on a CPU.
        executor: ``"inductor"``: pointwise operations and reductions run as kernels that Inductor
            makes, which takes seconds to a minute here. At every budget gradients are bitwise
            those of the same kernels with everything kept, which are not eager's.
        dynamic: ``None``: the second size of an argument that is met is captured with symbols in
            place of sizes, and all others run from that; ``True``: the first one already;
            ``False``: each is captured by itself.
        plan: a plan of this step, or the file that :meth:`Plan.save` wrote it into: it is
            followed, and nothing is measured or planned. Everything but ``host_dir`` must be
            as it was made. ``budget`` may be left out then.
        fullgraph: ``True``: a model that breaks the graph is refused. ``False``: the graphs that
            it is captured in are *regions* of one step, within one budget. Nothing of such a model
            runs here: its first training call captures it, runs each line once and what leaves
            least of each region, as do calls until one was watched from begin to end; from then
            on a plan for each is chosen together. What the model does at its first call alone
            breaks no later one: at the second call it is captured as one graph where it can be.
        regions: names of modules, such as a model's layers, that are regions of their own; those
            that are alike are captured and measured once.
        in_flight: so many forwards may wait for their backward, as microbatches of a pipeline's
            stage do: what the budget leaves beside the model is divided by them. More than one
            imply ``accumulate``.
        strict: ``True``: a later step that no plan keeps within the budget raises ``BudgetError``.
            ``False``: once a step has run to its end, such a step follows the plan of least memory,
            with a ``BudgetWarning`` that says what grew and which budget would do.
        assume: what least budgets, ``"min"`` and shares are to have room for. ``"usual"``: the
            steps of the usual loop from the second one on, in which the previous outputs are still
            held and gradients may exist, set to zero. ``"strict"``: one step, before which there is
            neither; other networks of the process are not counted either.
        verify_bits: ``n``: in every ``n``-th step one run of operations that ``split="exact"``
            computes in parts is computed at once as well, on the numbers of the step, where the
            budget has room for that above the plan's peak. If bits differ, the step has those of
            the operations at once, a ``BudgetWarning`` names the run, and later plans do without
            it. Steps that are measured for later plans, such as the first ones, are left out.
            ``0``: never.
        ranks: processes that train the model together, and what they do where they differ: the
            first of them plans, by the most that any measures, and all follow. ``None``: those of
            the model's ``DistributedDataParallel``, ``fully_shard`` or ``DTensor``s; where nothing
            tells of others, each process plans for itself.
        generators: names of solvers whose schedules the planner looks at, and goes on from by local
            search: ``"rotor"``, ``"equiv_chain"``, ``"join"``, ``"store_all"``, ``"periodic"``,
            ``"revolve"`` or ``"pofo"`` (see :func:`fxremat.solve`). ``"join"`` and
            ``"equiv_chain"`` have some for branches that meet alone. Least budgets are then those
            of these.

    Returns a module that trains exactly as ``model`` does, and shares all it has.

    Raises:
        BudgetError: the budget cannot be read, is below the least feasible one, or ``plan``
            does not keep to it. A training call of a model of several regions raises it where
            no plans of them fit together, or three steps in a row took more.
        PlanError: ``plan`` cannot be read, or is one of another step.
        ArgumentError: another argument cannot be read, ``loss`` returns no scalar, or
            ``optimizer`` is of another model.
        SampleError: the sample is of another kind, or on another device than the model.
        NoGradientError: nothing requires a gradient.
        CaptureError: the model breaks the graph where that is refused, or with ``offload`` or
            ``plan``; or a CUDA graph is being captured.
        CostError: an operation cannot be measured.
        HostMemoryError: the host memory that the plan takes cannot be had.
        RankError: processes do not agree, or one of them does not come in time.
        Exception: what the model itself raises at the sample, as it is.
    """
    # The others go by their own names to Arguments.read.
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
    """The plan that :func:`compile` would follow for a model that is captured as one graph.

    Args:
        model: the module to train; it is not changed.
        sample: arguments of one call, as for :func:`compile`.
        budget: the most bytes that a step may have allocated, as for :func:`compile`.
        check: hold the plan against CP-SAT, which finds and proves the fastest schedule of a chain
            of up to 12 stages, in up to two minutes: ``cross_check`` of the plan, and a line of
            ``explain()``, have its seconds and the gap, or say why there are none. Not with
            ``offload``.
        **options: of :func:`compile`, but ``fullgraph`` and ``regions``.

    Raises:
        FxrematError: the errors of :func:`compile`; a ``CaptureError`` where the model breaks the
            graph; an ``ArgumentError`` where ``check`` is no truth value, comes with ``offload``,
            or ortools is missing.
    """
    if read_bool("check", check):
        check_solver_usable(options.get("offload", False))
    made = compile(model, sample, budget, **_whole(options))
    made._training.loop.leave()  # it does not train
    (found,) = made.plans
    return cross_checked(found) if check else found


def frontier(model: nn.Module, sample: object, **options: Any) -> Frontier:
    """The least step time at every budget, by recomputation alone.

    All points come from the tables that plans are made from: no solve a point. With the least
    peaks runs of operations are computed in parts, as ``split`` lets them be.

    Args:
        model: the module to train; it is not changed.
        sample: arguments of one call, as for :func:`compile`.
        **options: of :func:`compile`, but ``budget``, ``fullgraph`` and ``regions``. ``offload``
            changes nothing here.

    Returns points of peak bytes and seconds of a step.

    Raises:
        FxrematError: the errors of :func:`compile`.
    """
    made = compile(model, sample, 1.0, **_whole(options))
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
    dim: Dim | list[Dim] = 0,
    most: int | None = None,
    **options: Any,
) -> Batches:
    """The largest batch that fits ``budget``, and the one of the most samples a second.

    The step is captured and measured once, at the sample, which need not fit itself. All else is
    computed; nothing is run of any other size but convolutions, whose libraries must be asked what
    memory they take, and, at the answer, what is computed in parts, to compare its bits. An answer
    that needs such parts is compiled, and smaller ones are tried where that is refused.
    Only sizes that the model takes are answered: even ones, say, where it views its batch as pairs.

    Args:
        model: the module to train.
        sample: as for :func:`compile`. Sizes that are equal in it vary together, so its batch
            should differ from its other sizes, and be at least 2.
        budget: ``"6 GiB"``, or bytes as an int.
        dim: the batch: a dimension of the sample's first tensor; or a pair, an argument's index
            or name and a dimension of it. A list of these asks for all sizes that fit together:
            for some sizes of the others the largest of the first.
        most: the largest size that is asked for; none beyond 2^20 is anyway.
        **options: of :func:`compile`, but ``dynamic``, ``plan``, ``in_flight`` and ``ranks``.

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
    budget_bytes = Budget.read(budget).nbytes
    if budget_bytes is None:
        raise BudgetError(f"budget is {budget!r}: give bytes as '6 GiB' or an int")
    _refuse(options, ("dynamic", "plan"), "max_batch, which captures all sizes at once")
    _refuse(options, ("in_flight", "ranks"), "max_batch, which knows of one step")
    asked = read_dims(model, call, dim)
    try:
        made = compile(model, call, 1.0, dynamic=True, **_whole(options))
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
            tried = compile(model, resized, budget_bytes, dynamic=False, **_whole(options))
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


_NOT_ESTIMATED = (
    "dynamic", "executor", "fullgraph", "in_flight", "plan", "ranks", "regions",
)  # fmt: skip


def estimate(
    model: nn.Module,
    sample: object,
    *,
    device: Device | str | os.PathLike[str] = "cpu",
    budget: Readable | None = None,
    dim: Dim | list[Dim] | None = None,
    most: int | None = None,
    costs: Plan | str | os.PathLike[str] | None = None,
    verify: bool = False,
    **options: Any,
) -> Estimate:
    """What a training step would take of a device, which need not be here; nothing is allocated.

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
        **options: of :func:`compile`, but ``dynamic``, ``plan``, ``in_flight``, ``ranks`` and
            ``executor``: operations run as eager runs them. Which of them keep their bits in parts
            is measured where they run, so nothing is in parts but with ``split=True``.

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
    _refuse(options, _NOT_ESTIMATED, "estimate, which runs one step of nothing")
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


def _whole(options: dict[str, Any]) -> dict[str, Any]:
    """``options`` for a model that is captured whole.

    Raises:
        ArgumentError: it is not to be.
    """
    _refuse(options, ("fullgraph", "regions"), "one plan, which is of all that a model does")
    return {**options, "fullgraph": True}


def _refuse(options: dict[str, Any], names: Iterable[str], why: str) -> None:
    for name in names:
        if name in options:
            message = f"{name}= is not for {why}: leave it out"
            raise ArgumentError(message, argument=name, value=options[name])
