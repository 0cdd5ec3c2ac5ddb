"""Plans the first step of a model: captures one call of it, and runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fxremat import torch_compat
from fxremat.capture.errors import frames_removed
from fxremat.capture.isolation import generators_restored, in_training
from fxremat.capture.sample import Sample, call_without_data
from fxremat.compiler.entry import trace_only
from fxremat.costs.measured.measure import device_of
from fxremat.module.runner import Runner
from fxremat.options.agreed import agreed_arguments
from fxremat.options.arguments import Arguments
from fxremat.options.loss import target_bytes
from fxremat.options.measured_needs import LossNeeds, needs_of_loss
from fxremat.progress import CAPTURE, shown, silent
from fxremat.ranks.peers import Peers
from fxremat.training.training import Training


def plan_first_step(
    model: nn.Module,
    call: Sample,
    options: Arguments,
    *,
    hooked: bool,
    loss_needs: LossNeeds | None = None,
    detaches: bool = True,
) -> Runner:
    """Plan the step of one call, and return the runner of the model's training calls.

    Args:
        model: the model, which is not changed.
        call: the arguments of the call.
        options: the arguments of :func:`fxremat.compile`.
        hooked: whether hooks of the model still have to run on the call's arguments.
        loss_needs: the measured memory of a loss that ``options`` no longer contain, as in a module
            that was pickled.
        detaches: whether outputs that the loss does not use get no gradient. It must be false
            where earlier steps gave them zeros: an optimizer skips a parameter without a gradient.

    Raises:
        BudgetError, PlanError, ArgumentError, SampleError, CaptureError, CostError,
        HostMemoryError: see :func:`fxremat.compile`.
    """
    peers = Peers.of(model, options.ranks)
    with frames_removed():
        if peers is None:
            return _planned(model, call, options, None, hooked, loss_needs, detaches)
        with peers.reporting_failures():
            options = agreed_arguments(peers, options)
            return _planned(model, call, options, peers, hooked, loss_needs, detaches)


def _planned(
    model: nn.Module,
    call: Sample,
    options: Arguments,
    peers: Peers | None,
    hooked: bool,
    loss_needs: LossNeeds | None,
    detaches: bool,
) -> Runner:
    """Return the runner of a model, planned for one call; all processes have these options.

    See :func:`plan_first_step`, with ``peers`` as the processes that train together.
    """
    regions = options.modules(torch_compat.wrapped_by(model))
    if torch_compat.is_sharded(model):
        return _sharded_runner(model, options, regions, peers)
    with (
        generators_restored(model, (call.args, call.kwargs)),
        in_training(model),
        torch.enable_grad(),
        shown(here=peers is None or peers.leads) as progress,
    ):
        progress(CAPTURE)
        needs = _loss_needs(torch_compat.wrapped_by(model), call, options, loss_needs)
        if needs is not None and not detaches:
            needs = replace(needs, unused=None)
        training = Training.of(
            options,
            model,
            progress,
            peers=peers,
            needs=needs,
            target_bytes=target_bytes(options.loss, model, call, device_of(model)),
        )
        unused = needs.unused if needs else None
        if unused is not None:
            unused = replace(unused, dropped=options.drop_unused)
        runner = Runner(
            model,
            training,
            unused,
            dynamic=options.dynamic,
            whole=options.fullgraph,
            regions=regions,
        )
        try:
            runner.plan_without_running(call, hooked=hooked)
        except BaseException:
            runner.release()  # it is in a reference cycle, which would hold the model
            raise
        training.progress = silent
        training.saved_plan = None  # it is a plan of these shapes only
    return runner


def _sharded_runner(
    model: nn.Module, options: Arguments, regions: Sequence[nn.Module], peers: Peers | None
) -> Runner:
    """Return the runner of a model sharded by ``fully_shard``, which nothing is planned for yet.

    Calls of its modules gather parameters from other processes, so that only the user's calls may
    run the model. A tensor that is gathered or reduced may be freed later than in the steps that
    were measured.
    """
    training = Training.of(options, model, peers=peers)
    training.refuse_single_graph_options("fully_shard has hooks around its modules")
    training.regions.late_bytes = torch_compat.late_bytes(model)
    runner = Runner(model, training, dynamic=options.dynamic, regions=regions, whole=False)
    if not options.fullgraph:
        runner.capture_in_pieces()
    return runner


def _loss_needs(
    model: nn.Module, call: Sample, options: Arguments, inherited: LossNeeds | None
) -> LossNeeds | None:
    """Return the memory of a loss outside the model; ``None`` if only running steps can show it.

    It is measured on outputs without data, if the model can be captured as one graph.
    """
    if options.loss is None and inherited is None:
        return None
    if not options.fullgraph:  # otherwise the capture itself raises, and so does the model
        error = trace_only(model.forward, call.args, call.kwargs, dynamic=options.dynamic)
        if error and not torch_compat.may_be_the_models(torch_compat.failure_cause(error)):
            return None
    outputs = call_without_data(model, call)
    tensors = (value for value in tree_leaves(outputs) if isinstance(value, torch.Tensor))
    if outputs is None or not all(map(torch_compat.is_dense, tensors)):
        return None
    if options.loss is not None:
        return needs_of_loss(options.loss, outputs)
    return inherited.of(outputs) if inherited is not None else None
