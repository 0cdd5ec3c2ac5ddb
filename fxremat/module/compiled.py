"""The module that ``fxremat.compile`` returns: the user's model, but for its training forward."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxremat import torch_compat
from fxremat.capture.errors import shorten
from fxremat.capture.sample import Sample, check_sample
from fxremat.costs.measure import device_of
from fxremat.errors import FxrematError, PlanError
from fxremat.graph.shortfall import warn
from fxremat.module.runner import Runner, initialize
from fxremat.module.step_plan import latest_plan
from fxremat.module.traced_step import trace_step
from fxremat.options.arguments import Arguments
from fxremat.options.loss import own_loss
from fxremat.options.measured_needs import LossNeeds
from fxremat.progress import LOG
from fxremat.ranks.peers import Peers
from fxremat.report.plan import Plan, StepPlan
from fxremat.report.trace import StepTrace
from fxremat.runtime import cuda_graph
from fxremat.training.training import Training


@dataclass  # without slots, which Python 3.10 cannot have weak references beside
class _State:
    """What a compiled module has beside its model.

    Attributes:
        original: the model.
        asked: of ``fxremat.compile``.
        runner: of its training forward; ``None`` before the first step was planned.
        assigned: what others have put in the place of ``forward``.
        kept: the plan of what this is a copy of.
        needs: what the loss of that was seen to take, where this was pickled.
        trained: a step was run as planned, or its user was told that none is.
        warned_of_eval: that was said of steps in eval mode.
        as_it_is: under what it was called that leaves nothing to plan, and its user warned.
        starting: one thread plans the first step, others wait.
        copies: of the module that were made by ``copy.deepcopy``, and still exist.
    """

    original: nn.Module
    asked: Arguments
    runner: Runner | None = None
    assigned: Callable[..., Any] | None = None
    kept: Plan | None = None
    needs: LossNeeds | None = None
    trained: bool = False
    warned_of_eval: bool = False
    as_it_is: set[str] = field(default_factory=set)
    starting: threading.Lock = field(default_factory=threading.Lock)
    copies: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)

    def take(self, runner: Runner) -> None:
        """Let it run all calls from now on. It is in circles: with this it lets go of the model."""
        self.runner = runner
        loop = runner.training.loop
        loop.copies = self.copies
        loop.join()
        if loop.budget.usual:
            loop.outside.begin(loop.device)
        weakref.finalize(self, _release, weakref.ref(runner)).atexit = False


def _release(runner: weakref.ref[Runner]) -> None:
    found = runner()
    if found is not None:
        found.training.loop.leave()
        found.release()


class CompiledModule(nn.Module):
    """A model that trains under a byte budget.

    It is an instance of a subclass of the model's own class, under the same name, and has the
    model's own ``__dict__``: to everybody else it is the model. Its forward runs as planned; in
    eval mode and without gradients it is the model's. Hooks of the model run around it.

    Attributes:
        plan: the plan of the step that ran last (of the sample, before any step); of all its
            graphs, where it is captured in several.
        plans: one plan for each context met so far, in order.
    """

    __slots__ = ("_state",)
    _state: _State

    def __init_subclass__(cls, **_options: Any) -> None:
        """Do nothing: whoever lists subclasses of the model's class has it already."""

    @property
    def plan(self) -> Plan | StepPlan:
        """The plan of the step that ran last: a ``StepPlan`` where it runs several graphs.

        Raises:
            PlanError: no step was planned so far; of several graphs: that step followed no plans
                that were chosen together.
        """
        return latest_plan(self._training, self._parameter_names)

    def _parameter_names(self) -> dict[int, str]:
        """Names of the model's parameters, by ``id``."""
        return {id(own): name for name, own in self._state.original.named_parameters()}

    @property
    def plans(self) -> tuple[Plan, ...]:
        """One plan for each context met so far."""
        if self._state.runner is None:
            return ()
        return tuple({id(plan): plan for plan in self._training.records()}.values())

    @property
    def forward_code(self) -> str:
        """The emitted forward as Python: one line an operation."""
        return self.plan.forward_code

    @property
    def backward_code(self) -> str:
        """The emitted backward as Python: one line an operation."""
        return self.plan.backward_code

    def trace_step(self, step: Callable[[], object]) -> StepTrace:
        """Run ``step`` once and time every call and every transfer of it.

        Args:
            step: one forward and one backward of this module.

        Raises:
            PlanError: no step was planned so far, or it is of several graphs.
            ValueError: it ran the forward or the backward more or less than once.
        """
        if self._training.regions.several:
            raise PlanError(
                f"{type(self).__name__} is captured in several graphs, and trace_step times the "
                "calls of one. Use plan.save_trace(path) for what is predicted, or torch.profiler"
            )
        device = device_of(self._state.original)
        return trace_step(step, training=self._training, device=device)

    @property
    def _training(self) -> Training:
        runner = self._state.runner
        if runner is None:
            raise PlanError(
                f"no step of {type(self).__name__} is planned yet: the first training call is, or "
                "give a sample to compile"
            )
        return runner.training

    def _replicate_for_data_parallel(self) -> Any:
        raise TypeError(
            f"{type(self).__name__} is compiled and cannot be replicated by DataParallel: "
            "use DistributedDataParallel, one process a device"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        """A copy of the model, planned when it is first trained."""
        copied: CompiledModule = object.__new__(type(self))
        memo[id(self)] = copied
        original = copy.deepcopy(self._state.original, memo)
        object.__setattr__(copied, "__dict__", original.__dict__)
        asked, kept = self._of_copies()
        copied._state = _State(original, asked, kept=kept)
        copied._state.assigned = copy.deepcopy(self._state.assigned, memo)
        self._state.copies.add(copied)
        return copied

    def __reduce_ex__(self, _protocol: object) -> Any:
        """A copy without its loss, which may be of any kind, but with what that took."""
        state = self._state
        asked, kept = self._of_copies()
        needs = state.runner.needs if state.runner is not None else state.needs
        if asked.loss not in (None, own_loss):
            if state.runner is None:
                warn(_unsaved_loss(state.original))
            asked = replace(asked, loss=None)
        return _restored, (state.original, asked, kept, state.assigned, needs)

    def __copy__(self) -> CompiledModule:
        """A module of the same model, planned when it is first trained."""
        return _restored(self._state.original, *self._of_copies(), self._state.assigned)

    def _of_copies(self) -> tuple[Arguments, Plan | None]:
        """What a copy asks for, and the plan that it follows if it can."""
        asked, runner = self._state.asked, self._state.runner
        classes = (own if isinstance(own, type) else type(own) for own in asked.optimizers)
        asked = replace(asked, optimizers=tuple(dict.fromkeys(classes)))
        if asked.host is not None:
            asked = replace(asked, host=copy.copy(asked.host))  # with a limit of its own
        if runner is None:
            return asked, self._state.kept
        if runner.training.regions.several:  # a plan is one region's
            return asked, None
        return replace(asked, kept=None), self.plans[0]


def _unsaved_loss(model: nn.Module) -> str:
    name = type(model).__name__
    return (
        f"{name} is saved before its first training step, and without loss=, which may be of any "
        "kind: what the loss takes is not known yet, and who loads the module plans as if nobody "
        "had told of it. Save after a step, give compile a sample, or pass what was loaded to "
        "fxremat.compile with loss="
    )


def compiled(model: nn.Module, asked: Arguments, sample: Sample | None) -> CompiledModule:
    """``model``, planned for ``sample``, or for its first training call.

    Raises:
        FxrematError: see :func:`fxremat.compile`.
    """
    made = _wrapped(model, asked)
    if sample is not None and torch_compat.is_uninitialized(model):
        warn(
            f"{type(model).__name__} has parameters that its first call makes: the sample is not "
            "looked at, the first training call is planned, and the budget is not compared with "
            "anything before. Call the model once before fxremat.compile to have it planned there"
        )
    elif sample is not None:
        # Whoever calls may be in it; planning differentiates.
        inside = torch.is_inference_mode_enabled()
        with (
            torch_compat.without_dispatch_modes(),
            torch.inference_mode(False) if inside else contextlib.nullcontext(),
        ):
            runner = _started(made._state, sample.map(_differentiable), hooked=True)
        for graph in runner.training.graphs:
            graph.measuring_bytes = 0  # that was before training
        made._state.take(runner)
    return made


def _differentiable(value: Any) -> Any:
    """A value of a sample, of which autograd saves nothing if it was made in inference mode."""
    if isinstance(value, torch.Tensor) and value.is_inference():
        return value.clone()
    return value


def original_of(model: nn.Module) -> nn.Module:
    """The model that a compiled one was made of, by us or by torch; any other as it is."""
    if isinstance(model, CompiledModule):
        return model._state.original
    return torch_compat.uncompiled(model)


def _wrapped(model: nn.Module, asked: Arguments, kept: Plan | None = None) -> CompiledModule:
    made: CompiledModule = object.__new__(_class_of(type(model)))
    object.__setattr__(made, "__dict__", model.__dict__)
    made._state = _State(model, asked, kept=kept)
    return made


def _restored(
    original: nn.Module,
    asked: Arguments,
    kept: Plan | None,
    assigned: Callable[..., Any] | None,
    needs: LossNeeds | None = None,
) -> CompiledModule:
    """A compiled module as it was pickled, or copied."""
    made = _wrapped(original, asked, kept)
    made._state.assigned, made._state.needs = assigned, needs
    return made


_classes: weakref.WeakKeyDictionary[type[nn.Module], type[CompiledModule]]
_classes = weakref.WeakKeyDictionary()


def _class_of(model: type[nn.Module]) -> type[CompiledModule]:
    """The class of compiled modules that are of class ``model``."""
    if model not in _classes:
        own: dict[str, object] = {
            "__slots__": (),
            "__module__": model.__module__,
            "__qualname__": model.__qualname__,
            "__doc__": model.__doc__,
            "forward": _Forward(model.forward),
        }
        if torch_compat.becomes_another_class(model):
            own["cls_to_become"] = None  # it stays what it is
        bases = (CompiledModule, model)
        _classes[model] = types.new_class(model.__name__, bases, {}, lambda body: body.update(own))
    return _classes[model]


class _Forward:
    """The forward of compiled modules of one class.

    What others assign to it is theirs alone: it may call what was there before, and the model
    itself still has its own.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        @functools.wraps(forward)
        def planned(module: CompiledModule, /, *args: Any, **kwargs: Any) -> Any:
            state = module._state
            if not (state.original.training and torch.is_grad_enabled()):
                return _unplanned(state, args, kwargs)
            unplanned = _unplanned_here(state)
            if unplanned:
                return _as_it_is(state, args, kwargs, unplanned)
            runner = state.runner
            if runner is None and not _is_initialized(state, args, kwargs):
                return _as_it_is(state, args, kwargs, "before its parameters are made")
            if runner is None or (state.trained and runner.may_be_whole):
                runner = _runner(state, Sample(args, kwargs))
            state.trained = True
            try:
                return runner.run(args, kwargs)
            except FxrematError as error:
                short = error
            try:
                raise shorten(short)
            finally:
                del short  # this frame is its own

        self._planned = planned

    def __get__(self, module: CompiledModule | None, _owner: object = None) -> Any:
        if module is None:
            return self._planned
        if torch.compiler.is_compiling():  # as part of a larger model, which is captured whole
            return module._state.original.forward
        return module._state.assigned or types.MethodType(self._planned, module)

    def __set__(self, module: CompiledModule, forward: Callable[..., Any]) -> None:
        """Who takes a wrapper away again may go as far as the model's own forward."""
        function: Any = getattr(forward, "__func__", forward)
        own: Any = self._planned
        while function is not own and hasattr(own, "__wrapped__"):
            own = own.__wrapped__
        module._state.assigned = None if function is own else forward

    def __delete__(self, module: CompiledModule) -> None:
        if module._state.assigned is None:
            raise AttributeError("forward")
        module._state.assigned = None


def _unplanned(state: _State, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the model's own forward, in eval mode or without gradients."""
    if not torch.is_grad_enabled() or state.warned_of_eval:
        return state.original.forward(*args, **kwargs)
    if not state.trained:
        state.trained = True
        _warn_of_eval(state)
        return state.original.forward(*args, **kwargs)
    returned = state.original.forward(*args, **kwargs)
    if torch_compat.in_transform():
        return returned
    # An evaluation has no backward.
    for leaf in pytree.tree_leaves(returned):
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            leaf.grad_fn.register_prehook(lambda _: _warn_of_eval(state))
    return returned


def _warn_of_eval(state: _State) -> None:
    """Warn once that a model is trained in eval mode."""
    if state.warned_of_eval:
        return
    state.warned_of_eval = True
    warn(
        f"{type(state.original).__name__} is called in eval mode, with gradients: no plan is "
        "followed, and no budget holds. Call train() to train it, or use torch.no_grad()"
    )


def _unplanned_here(state: _State) -> str:
    """Under what the model is called that leaves nothing to plan; empty: under nothing such."""
    if torch_compat.in_transform():
        return "inside a transform of torch.func, as torch.func.grad or vmap"
    if torch_compat.in_dispatch_mode():
        return "under a TorchDispatchMode, as FlopCounterMode, which sees each operation"
    if torch_compat.runs_eagerly(captured=state.runner is not None):
        return "under a stance of torch.compiler that has it run eagerly"
    return ""


def _as_it_is(state: _State, args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> Any:
    """Run the model's own forward, as nothing of it is planned where it is called."""
    if where not in state.as_it_is:
        state.as_it_is.add(where)
        warn(
            f"{type(state.original).__name__} is called {where}: no plan is followed there, and no "
            "budget holds"
        )
    return state.original.forward(*args, **kwargs)


def _is_initialized(state: _State, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the model's parameters are there; those that Dynamo can make, it makes now."""
    model = state.original
    with state.starting:
        if torch_compat.is_uninitialized(model):
            initialize(model, Sample(args, kwargs))
        return not torch_compat.is_uninitialized(model)


def _runner(state: _State, call: Sample) -> Runner:
    """What runs the first training call and, until it may be another one, all others."""
    with state.starting:
        if state.runner is None:
            state.take(_started(state, call, hooked=False))
        elif state.runner.may_be_whole:
            found = _whole(state, call) if state.runner.is_whole_now(call) else None
            if found is not None:
                state.take(found)
        assert state.runner is not None
        return state.runner


def _whole(state: _State, call: Sample) -> Runner | None:
    """What runs a model in pieces as one graph from now on; ``None``: it stays in pieces."""
    try:
        found = _started(state, call, hooked=False)
        if found.detaches_more_than(state.runner):
            found = _started(state, call, hooked=False, detaches=False)
    except FxrematError as error:  # pieces keep to the budget, or say why not
        LOG.info("the model stays in pieces: %s", error)
        return None
    return None if found.training.regions.several else found


def _started(state: _State, sample: Sample, *, hooked: bool, detaches: bool = True) -> Runner:
    """Plan the first step: a copy's by the plan it was copied with, if that is one of this step.

    Args:
        state: of the module.
        sample: of a call.
        hooked: hooks of the model are still to run on it.
        detaches: see :meth:`Runner.of`.
    """
    with Peers.told_of_refusals(state.original, state.asked.ranks):
        cuda_graph.refuse_planning()
        check_sample(state.original, sample)
    start = functools.partial(
        Runner.of,
        state.original,
        sample,
        hooked=hooked,
        needs=state.needs,
        detaches=detaches,
    )
    kept = state.kept
    if kept is not None:
        asked = replace(state.asked, kept=kept)
        try:
            return start(asked)
        except PlanError:
            state.kept = None
    return start(state.asked)
