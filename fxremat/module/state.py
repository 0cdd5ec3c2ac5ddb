"""The state of a compiled module, and how its first step is planned."""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from fxremat import torch_compat
from fxremat.capture.errors import release_frames
from fxremat.capture.sample import Sample, check_sample
from fxremat.compiler.entry import trace_only
from fxremat.errors import FxrematError, PlanError
from fxremat.module.first_plan import plan_first_step
from fxremat.module.moving import plan_moving
from fxremat.module.runner import Runner
from fxremat.options.arguments import Arguments
from fxremat.options.measured_needs import LossNeeds
from fxremat.progress import LOG
from fxremat.ranks.peers import Peers
from fxremat.report.plan import Plan
from fxremat.runtime import cuda_graph


@dataclass(frozen=True, slots=True)
class Inherited:
    """The plan and loss memory that a copied or unpickled module takes over from its original.

    Attributes:
        plan: the plan that the first step follows, if it is a plan of that step.
        loss_needs: the measured memory of the loss, which is not pickled itself.
    """

    plan: Plan | None = None
    loss_needs: LossNeeds | None = None


NOTHING_INHERITED = Inherited()


@dataclass  # Python 3.10 cannot combine slots with weak references
class ModuleState:
    """State of a compiled module in addition to that of its model.

    Attributes:
        original: the model.
        options: the arguments of ``fxremat.compile``.
        inherited: what the first step takes over, where this module is a copy.
        runner: runs the training calls; ``None`` before the first step is planned.
        assigned: the forward that was assigned to the module, if any.
        warned: the kinds of calls that run without a plan and that the user was warned of.
        starting: the lock under which one thread plans the first step while others wait.
        copies: the modules that ``copy.deepcopy`` made of this one and that still exist.
    """

    original: nn.Module
    options: Arguments
    inherited: Inherited = NOTHING_INHERITED
    runner: Runner | None = None
    assigned: Callable[..., Any] | None = None
    warned: set[str] = field(default_factory=set)
    starting: threading.Lock = field(default_factory=threading.Lock)
    copies: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)

    @property
    def has_trained(self) -> bool:
        """Whether a training call has run as planned."""
        return self.runner is not None and self.runner.training.regions.called

    def install(self, runner: Runner) -> None:
        """Run all further training calls with ``runner``, until this state is collected.

        The runner is part of reference cycles; it releases the model when this state goes.
        """
        self.runner = runner
        loop = runner.training.loop
        loop.copies = self.copies
        loop.join()
        if loop.budget.usual:
            loop.outside.begin(loop.device)
        weakref.finalize(self, _release, weakref.ref(runner)).atexit = False

    def for_copy(self) -> tuple[Arguments, Inherited]:
        """Return the options of a copy, and the plan and loss memory that it takes over."""
        options, runner = self.options, self.runner
        classes = (own if isinstance(own, type) else type(own) for own in options.optimizers)
        options = replace(options, optimizers=tuple(dict.fromkeys(classes)))
        if options.host is not None:
            options = replace(options, host=copy.copy(options.host))  # a copy has its own limit
        if runner is None:
            return options, self.inherited
        training = runner.training
        if training.regions.several:  # the plan of one region is no plan of the step
            return options, Inherited(None, training.loss_needs)
        return replace(options, kept=None), Inherited(training.records()[0], training.loss_needs)


def _release(reference: weakref.ref[Runner]) -> None:
    runner = reference()
    if runner is not None:
        runner.training.loop.leave()
        runner.release()


def ensure_initialized(state: ModuleState, call: Sample) -> bool:
    """Create lazy parameters by tracing ``call``; return whether all parameters now exist."""
    model = state.original
    with state.starting:
        if torch_compat.is_uninitialized(model):
            inner = torch_compat.wrapped_by(model)
            error = trace_only(inner.forward, call.args, call.kwargs, dynamic=None)
            if error is not None:
                release_frames(error)
        return not torch_compat.is_uninitialized(model)


def runner_for(state: ModuleState, call: Sample) -> Runner:
    """Return the runner of a training call; plan the first step if none is planned yet.

    A model that runs in several graphs gets a new runner once it can be captured as one graph.
    """
    with state.starting:
        if state.runner is None:
            state.install(start(state, call, hooked=False))
        elif state.runner.may_retry_whole:
            whole = _start_whole(state, state.runner, call)
            if whole is not None:
                state.install(whole)
        assert state.runner is not None
        return state.runner


def _start_whole(state: ModuleState, before: Runner, call: Sample) -> Runner | None:
    """Plan a model, so far captured in pieces, as one graph, and return its new runner.

    Return ``None`` if the model must stay in pieces.

    Args:
        state: the state of the module.
        before: the runner of the pieces.
        call: the arguments of the present call.
    """
    if not before.traces_whole(call):
        return None
    try:
        runner = start(state, call, hooked=False)
        if runner.training.detaches_more_than(before.training):
            runner = start(state, call, hooked=False, detaches=False)
    except FxrematError as error:  # the pieces keep to the budget, or raise another error
        LOG.info("the model is still captured as several graphs: %s", error)
        return None
    return None if runner.training.regions.several else runner


def start(state: ModuleState, call: Sample, *, hooked: bool, detaches: bool = True) -> Runner:
    """Plan the first step, by the inherited plan if it fits this step, and return the runner.

    Args:
        state: the state of the module.
        call: the arguments of a call.
        hooked: whether hooks of the model still have to run on these arguments.
        detaches: see :func:`plan_first_step`.

    Raises:
        FxrematError: see :func:`plan_first_step`.
    """
    with Peers.reporting_early_failures(state.original, state.options.ranks):
        cuda_graph.refuse_planning()
        check_sample(state.original, call)
    plan_with: Callable[[Arguments], Runner] = functools.partial(
        plan_first_step,
        state.original,
        call,
        hooked=hooked,
        loss_needs=state.inherited.loss_needs,
        detaches=detaches,
    )
    host = state.options.host
    if host is not None and host.parameters:
        plan_with = functools.partial(plan_moving, state.original, plan_with=plan_with)
    if state.inherited.plan is not None:
        try:
            return plan_with(replace(state.options, kept=state.inherited.plan))
        except PlanError:
            state.inherited = replace(state.inherited, plan=None)
    return plan_with(state.options)
