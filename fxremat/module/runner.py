"""Runs the training calls of a model as they are planned."""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fxremat import torch_compat
from fxremat.capture.errors import let_go, refused, shortened
from fxremat.capture.isolation import (
    attributes_replaced,
    generators_restored,
    hooks_of,
    in_training,
)
from fxremat.capture.sample import Sample, call_without_data, own_error, places_of
from fxremat.capture.unused_outputs import Unused, forward_of, refuse_gradients
from fxremat.compiler.entry import Backend, Entry, SeparateCapture
from fxremat.costs.measure import device_of
from fxremat.errors import CaptureError, CostError, FxrematError
from fxremat.options.agreed import agreed_arguments
from fxremat.options.arguments import Arguments
from fxremat.options.loss import target_bytes
from fxremat.options.measured_needs import LossNeeds, needs_of_loss
from fxremat.planner.context_bytes import model_bytes
from fxremat.progress import CAPTURE, shown, silent
from fxremat.ranks.peers import Peers
from fxremat.runtime import cuda_graph
from fxremat.training.training import PlannedOnly, RefusedError, Training


class Runner:
    """The training forward of one model.

    It is captured as one graph where it can be, and nothing of it runs for that. Where it cannot,
    it is captured in pieces from its next call on, while that runs: what Dynamo leaves to Python
    between them may write, draw or print, and is run once.

    Args:
        original: the model; a ``DistributedDataParallel`` runs around what is captured.
        training: plans its steps.
        unused: outputs that get no gradient; ``needs`` has what else their loss takes.
        dynamic: see :class:`Entry`.
        whole: it must be one graph.
        regions: modules that are captured each by itself; not whole, then.
    """

    def __init__(
        self,
        original: nn.Module,
        training: Training,
        unused: Unused | None = None,
        *,
        dynamic: bool | None = None,
        whole: bool = True,
        regions: Sequence[nn.Module] = (),
    ) -> None:
        self.original = original
        self.training = training
        self.needs: LossNeeds | None = None
        self._inner = inner = torch_compat.wrapped_by(original)
        training.model = type(inner).__name__
        self._forward = forward_of(inner, unused)
        self._dynamic = dynamic
        self._must_be_whole = whole
        self._whole = Entry(
            self._forward,
            Backend(training),
            dynamic=dynamic,
            whole=True,
            failures=self._failures,
            instead=self._not_whole,
        )
        self._pieces: Entry | None = None
        self._hooks: list[dict[int, Any]] | None = None  # where it could not be captured whole
        self._tried: list[int] | None = None  # again, when there were so many hooks
        self._run: Callable[..., Any] = self._whole
        if unused is not None or inner is not original:
            self._run = self._captured if unused is None else self._planned
        if inner is not original:
            self._run = torch_compat.wrapped_anew(original, _with_forward(inner, self._run))
        self._regions = tuple(regions)
        if regions:
            training.regions.warnings.breaks = None  # they are asked for
            self._capture_separately()
        self._device = device_of(original)
        # Dynamo keeps compiled code for longer than this lives.
        weakref.finalize(self, training.close).atexit = False
        training.loop.model, training.loop.device = weakref.ref(original), self._device
        unwatch = training.loop.optimizers.watch(original, self._device)
        weakref.finalize(self, unwatch).atexit = False

    @staticmethod
    def of(
        model: nn.Module,
        call: Sample,
        asked: Arguments,
        *,
        hooked: bool,
        needs: LossNeeds | None = None,
        detaches: bool = True,
    ) -> Runner:
        """Plan the step of one call, as asked; the model is not changed.

        Args:
            model: the model.
            call: arguments.
            asked: of :func:`fxremat.compile`.
            hooked: hooks of the model are still to run on the arguments.
            needs: what a loss was seen to take that is no longer told of.
            detaches: outputs that a loss does not use get no gradient. Where steps before gave
                them zeros, later ones must too: an optimizer passes a parameter by that has none.

        Raises:
            BudgetError, PlanError, ArgumentError, SampleError, CaptureError, CostError,
            HostMemoryError: see :func:`fxremat.compile`.
        """
        peers = Peers.of(model, asked.ranks)
        with shortened():
            if peers is None:
                return Runner._of(model, call, asked, None, hooked, needs, detaches)
            with peers.telling():
                asked = agreed_arguments(peers, asked)
                return Runner._of(model, call, asked, peers, hooked, needs, detaches)

    @staticmethod
    def _of(
        model: nn.Module,
        call: Sample,
        asked: Arguments,
        peers: Peers | None,
        hooked: bool,
        needs: LossNeeds | None,
        detaches: bool,
    ) -> Runner:
        """As :meth:`of`, with what all processes have agreed to be asked for."""
        regions = asked.modules(torch_compat.wrapped_by(model))
        if torch_compat.is_sharded(model):
            return _of_sharded(model, asked, regions, peers)
        with (
            generators_restored(model, (call.args, call.kwargs)),
            in_training(model),
            torch.enable_grad(),
            shown(here=peers is None or peers.leads) as progress,
        ):
            progress(CAPTURE)
            needs = _needs_of_loss(torch_compat.wrapped_by(model), call, asked, needs)
            if needs is not None and not detaches:
                needs = replace(needs, unused=None)
            training = Training.of(
                asked,
                model,
                progress,
                peers=peers,
                needs=needs,
                target_bytes=target_bytes(asked.loss, model, call, device_of(model)),
            )
            unused = needs.unused if needs else None
            if unused is not None:
                unused = replace(unused, dropped=asked.drop_unused)
            runner = Runner(
                model,
                training,
                unused,
                dynamic=asked.dynamic,
                whole=asked.fullgraph,
                regions=regions,
            )
            runner.needs = needs
            try:
                runner._plan_only(call, hooked=hooked)
            except BaseException:
                runner.release()  # it is in circles, and would hold the model
                raise
            training.progress = silent
            training.kept = None  # it is of this shape
        return runner

    def release(self) -> None:
        """Let go of the model: nobody calls it any more."""
        self.__dict__.clear()

    @property
    def may_be_whole(self) -> bool:
        """Whether a model in pieces is to be tried again as one graph, as no step is going on: what
        it does at its first call alone breaks no later one, nor does a hook that is removed.

        Processes that train together would have to find out at the same call: they do not try.
        """
        if self._hooks is None or self._tried == list(map(len, self._hooks)):
            return False
        loop = self.training.loop
        return loop.peers is None and not any(loop.in_flight)

    def _planned(self, *args: Any, **kwargs: Any) -> Any:
        """What is captured, with outputs that have a gradient in the model's own."""
        outputs, detached = self._captured(*args, **kwargs)
        return refuse_gradients(outputs, detached) if detached else outputs

    def _captured(self, *args: Any, **kwargs: Any) -> Any:
        """Call what is captured: as one graph, or in pieces once that could not be."""
        run = self._whole if self._pieces is None else self._in_pieces
        return run(*args, **kwargs)

    def _not_whole(self, failed: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model in pieces, as it could not be captured as one graph: nothing has run."""
        training = self.training
        try:
            why = self._why_not_whole(failed, Sample(args, kwargs))
        finally:
            del failed  # this frame is its own
        training.refuse_parts(str(why))
        self._hooks = hooks_of(self._inner)
        self._capture_separately()
        if not training.dry:
            training.regions.begin_call(
                training.loop, self._device, lambda: self._there_bytes(args, kwargs)
            )
        training.regions.captured = True  # what failed is in circles, with the batch
        return self._in_pieces(*args, **kwargs)

    def _in_pieces(self, *args: Any, **kwargs: Any) -> Any:
        if self.training.dry:
            raise PlannedOnly
        if self.training.no_symbols and self._dynamic is None:
            self._dynamic = False
            self._capture_separately()
        assert self._pieces is not None
        try:
            with self._separate:
                return self._pieces(*args, **kwargs)
        except RefusedError as refusal:
            raise refusal.error from None

    def _failures(self) -> tuple[type[Exception], ...]:
        """What may come up when it cannot be captured whole: where nothing runs, anything."""
        return (Exception,) if self.training.dry else torch_compat.capture_failures()

    def _why_not_whole(self, error: BaseException, call: Sample) -> CaptureError:
        """Why a call cannot be captured as one graph, where that is no reason to fail.

        Raises what is, and what the model itself raises at the call.
        """
        cause = torch_compat.failure_cause(error)
        cuda_graph.refuse_planning()
        planning = cause is not error or isinstance(cause, FxrematError)
        if planning and not isinstance(
            cause, (CaptureError, *torch_compat.data_dependent_errors())
        ):
            raise error
        if torch_compat.may_be_the_models(cause):
            own = own_error(self._inner, call)
            if own is not None:
                raise own
        if self._must_be_whole and isinstance(error, torch_compat.capture_failures()):
            raise error
        why = cause if isinstance(cause, CaptureError) else refused(self._inner, cause)
        if self._must_be_whole:
            raise why from error
        return why

    def detaches_more_than(self, before: Runner | None) -> bool:
        """Whether a tensor gets no gradient, as its output is detached, that had one in steps by
        ``before``: zeros, which an optimizer does not pass by.
        """
        if before is None or self.needs is None or self.needs.unused is None:
            return False
        return not before.training.regions.trained.keys() <= self.training.trained.keys()

    def is_whole_now(self, call: Sample) -> bool:
        """Whether a model in pieces can be one graph by now; see :attr:`may_be_whole`."""
        self._tried = list(map(len, self._hooks or ()))
        is_whole = _traced(self._forward, call, self._dynamic) is None
        self.training.regions.captured |= not is_whole  # what failed is in circles, with the batch
        return is_whole

    def _capture_separately(self) -> None:
        """Capture the model in pieces from now on."""
        self.training.regions.several = True
        self._separate = SeparateCapture(self._inner, self._regions)
        dynamic, training = self._dynamic, self.training
        self._pieces = Entry(self._forward, Backend(training), dynamic=dynamic, whole=False)
        if self._run is self._whole:
            self._run = self._in_pieces

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        captured: Callable[..., Any] | None = None,
    ) -> Any:
        """Run the forward as planned; what Dynamo raises comes out as what really went wrong.

        Args:
            args: of the call.
            kwargs: of the call.
            captured: is called in place of what runs at the user's calls.

        Raises:
            BudgetError: this call needs more than the budget.
            CaptureError: new shapes or flags lead to code that cannot be captured.
        """
        training, loop, regions = self.training, self.training.loop, self.training.regions
        call = loop.call
        before = call.resident, call.arguments
        call.resident = lambda: _resident(self.original, args, kwargs)
        call.arguments = lambda: places_of(args, kwargs)
        try:
            if not training.dry:
                if loop.outside.is_due():
                    given = (t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
                    loop.look_outside(given)
                regions.called = True
                if regions.several:
                    regions.begin_call(loop, self._device, lambda: self._there_bytes(args, kwargs))
            outputs = (captured or self._run)(*args, **kwargs)
            if regions.several:
                regions.end_call(loop, outputs)
                is_one = isinstance(outputs, torch.Tensor)
                loop.in_flight.returned((outputs,) if is_one else tree_leaves(outputs))
            return outputs
        except torch_compat.capture_failures() as error:
            failed = error
            regions.call_raised()
        except BaseException as error:
            let_go(error)
            regions.call_raised()
            raise
        finally:
            call.resident, call.arguments = before  # a batch must not outlive its step
        failure = self._failure(failed, Sample(args, kwargs))
        try:
            let_go(failed)
            let_go(failure)
            raise failure
        finally:
            del failed, failure  # this frame is theirs

    def _there_bytes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """What is there when a call begins."""
        loop = self.training.loop
        nbytes = model_bytes(_resident(self.original, args, kwargs), loop.caller, self._device)
        nbytes += loop.optimizers.more_bytes
        return nbytes + loop.slack_bytes(self._device) + loop.networks_bytes()

    def _failure(self, error: BaseException, call: Sample) -> BaseException:
        """What really went wrong when ``call`` could not be captured."""
        cause = torch_compat.failure_cause(error)
        of_planning = (FxrematError, torch.OutOfMemoryError, torch.AcceleratorError)
        own = cause if isinstance(cause, of_planning) else own_error(self._inner, call)
        if isinstance(cause, CostError):  # what cannot be run alone may be what never can
            own = own_error(self._inner, call) or cause
        if own is not None:
            own.__suppress_context__ |= own is cause  # nothing that the model did
            return own
        data_dependent = isinstance(cause, torch_compat.data_dependent_errors())
        if cause is error or data_dependent:
            cause = refused(self._inner, cause)
            cause.__cause__ = error
        cause.__suppress_context__ = True  # nothing that the model did
        return cause

    def _plan_only(self, call: Sample, *, hooked: bool) -> None:
        """Let Dynamo capture the call as one graph and plan it, but run nothing of it."""
        training = self.training
        whole: Callable[..., Any] = self._captured
        untouched: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        if hooked and self._inner._forward_pre_hooks:  # they may give the forward other arguments
            whole = _with_forward(self._inner, self._captured)
            untouched = functools.partial(attributes_replaced, self._inner, lambda tensor: tensor)

        def run() -> None:
            with contextlib.suppress(PlannedOnly), untouched():
                self.run(call.args, call.kwargs, captured=whole)

        training.dry = True
        try:
            if self._pieces is None:
                run()
        finally:
            training.dry = False
        if not training.plans and self._pieces is None:
            raise CaptureError(
                f"{type(self.original).__name__} computes nothing with a gradient from this "
                "sample: there is no step to plan"
            )


def _needs_of_loss(
    model: nn.Module, call: Sample, asked: Arguments, known: LossNeeds | None
) -> LossNeeds | None:
    """What a loss outside the model needs, where that is told and the model can be one graph.

    Nothing is run of any other model: its steps show what their loss needs.
    """
    if asked.loss is None and known is None:
        return None
    if not asked.fullgraph:  # else it is told why by the capture itself, as of the model's errors
        error = _traced(model.forward, call, asked.dynamic)
        if error and not torch_compat.may_be_the_models(torch_compat.failure_cause(error)):
            return None
    outputs = call_without_data(model, call)
    if outputs is None:
        return None
    if asked.loss is not None:
        return needs_of_loss(asked.loss, outputs)
    return known.of(outputs) if known is not None else None


def _traced(forward: Callable[..., Any], call: Sample, dynamic: bool | None) -> Exception | None:
    """Have Dynamo trace a call as one graph, and run nothing; what it raised, if it could not."""

    def planned_only(*_args: Any) -> Any:
        raise PlannedOnly

    entry = Entry(forward, lambda *_given: planned_only, dynamic=dynamic, whole=True)
    try:
        entry(*call.args, **call.kwargs)
    except PlannedOnly:
        return None
    except Exception as error:
        return error
    return CaptureError("nothing of it is captured")


def initialize(model: nn.Module, call: Sample) -> None:
    """Have Dynamo make parameters that a call makes, as it does where it captures one."""
    inner = torch_compat.wrapped_by(model)
    error = _traced(inner.forward, call, dynamic=None)
    if error is not None:
        let_go(error)


def _of_sharded(
    model: nn.Module, asked: Arguments, regions: Sequence[nn.Module], peers: Peers | None
) -> Runner:
    """The runner of a model whose parameters are there only while they are needed.

    Calls of its modules gather them from other processes: none is made but the user's. What is
    gathered, or reduced, may go a moment later than in the steps that were watched.
    """
    training = Training.of(asked, model, peers=peers)
    training.refuse_parts("fully_shard has hooks around its modules")
    training.regions.late_bytes = torch_compat.late_bytes(model)
    runner = Runner(model, training, dynamic=asked.dynamic, regions=regions, whole=False)
    if not asked.fullgraph:
        runner._capture_separately()
    return runner


def _with_forward(model: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """``model`` with another forward, and all else it has: its hooks run around that."""

    class Quiet:
        def __init_subclass__(cls, **_options: Any) -> None:
            """Nothing: whoever lists subclasses of the model's class has it already."""

    own = {"forward": property(lambda _self: forward)}
    bases = (Quiet, type(model))
    made = types.new_class(type(model).__name__, bases, {}, lambda body: body.update(own))
    found: nn.Module = object.__new__(made)
    object.__setattr__(found, "__dict__", model.__dict__)
    return found


def _resident(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    given = (value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor))
    return (*torch_compat.tensors_of_module(model), *given)
