"""Runs the training calls of a model as they are planned."""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fxremat import torch_compat
from fxremat.capture.errors import capture_refusal, release_frames
from fxremat.capture.isolation import attributes_replaced, hook_dicts
from fxremat.capture.sample import Sample, has_gradient, model_error, places_of
from fxremat.capture.unused_outputs import Unused, forward_of, refuse_gradients
from fxremat.compiler.entry import Backend, Entry, SeparateCapture, trace_only
from fxremat.costs.measured.measure import device_of
from fxremat.errors import CaptureError, CostError, FxrematError, message_of
from fxremat.planner.context.context_bytes import model_bytes
from fxremat.runtime import cuda_graph
from fxremat.training.training import CaptureAborted, DryRunFinished, Training


class Runner:
    """The training forward of one model, as Dynamo captures it.

    The model is captured as one graph where that is possible, and nothing of it runs during the
    capture. Where it is not, the model is captured in pieces from its next call on, while that call
    runs: the code between the graphs, which Dynamo leaves to Python, may write, draw or print, and
    runs once.

    Args:
        original: the model; the forward of a ``DistributedDataParallel`` runs outside the capture.
        training: the training of the model, which plans its steps.
        unused: the outputs that get no gradient.
        dynamic: see :class:`Entry`.
        whole: whether the model must be captured as one graph.
        regions: the modules that are captured separately; ``whole`` must be false with any.
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
        self._inner = inner = torch_compat.wrapped_by(original)
        training.model_name = type(inner).__name__
        self._forward = forward_of(inner, unused)
        self._dynamic = dynamic
        self._must_be_whole = whole
        self._whole = Entry(
            self._forward,
            Backend(training),
            dynamic=dynamic,
            whole=True,
            failures=self._capture_failures,
            on_failure=self._switch_to_pieces,
        )
        self._pieces: Entry | None = None
        self._hooks: list[dict[int, Any]] | None = None  # set once a whole capture has failed
        self._retried_with: list[int] | None = None  # the numbers of hooks at the latest retry
        self._run: Callable[..., Any] = self._whole
        if unused is not None or inner is not original:
            self._run = self._call_captured if unused is None else self._call_detaching
        if inner is not original:
            self._run = torch_compat.wrapped_anew(original, _with_forward(inner, self._run))
        self._regions = tuple(regions)
        self._device = device_of(original)
        if regions:
            training.regions.warnings.breaks = None  # they are asked for
            self.capture_in_pieces()
        # Dynamo keeps compiled code longer than this object lives.
        weakref.finalize(self, training.close).atexit = False
        training.loop.model, training.loop.device = weakref.ref(original), self._device
        unwatch = training.loop.optimizers.watch(original, self._device)
        weakref.finalize(self, unwatch).atexit = False

    def release(self) -> None:
        """Delete all attributes, including references to the model: nothing runs it any more."""
        self.__dict__.clear()

    @property
    def may_retry_whole(self) -> bool:
        """Whether to try again to capture the model, now captured in pieces, as one graph.

        What the model does in its first call only breaks no later capture, and neither does a hook
        that was removed. A retry requires that the model was trained, that no step is in flight,
        and that the number of hooks has changed since the latest retry. Processes that train
        together never retry: all of them would have to succeed at the same call.
        """
        if self._hooks is None or not self.training.regions.called:
            return False
        loop = self.training.loop
        if self._retried_with == list(map(len, self._hooks)):
            return False
        return loop.peers is None and not any(loop.in_flight)

    def traces_whole(self, call: Sample) -> bool:
        """Return whether the model, now captured in pieces, traces as one graph at this call."""
        self._retried_with = list(map(len, self._hooks or ()))
        error = trace_only(self._forward, call.args, call.kwargs, dynamic=self._dynamic)
        # A failed trace is in a reference cycle, together with the batch.
        self.training.regions.captured |= error is not None
        return error is None

    def capture_in_pieces(self) -> None:
        """Capture the model in pieces from the next call on."""
        self.training.regions.several = True
        self._separate = SeparateCapture(self._inner, self._regions)
        dynamic, training = self._dynamic, self.training
        self._pieces = Entry(self._forward, Backend(training), dynamic=dynamic, whole=False)
        if self._run is self._whole:
            self._run = self._call_pieces

    def _call_detaching(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the captured forward; a backward through a detached one raises."""
        outputs, detached = self._call_captured(*args, **kwargs)
        return refuse_gradients(outputs, detached) if detached else outputs

    def _call_captured(self, *args: Any, **kwargs: Any) -> Any:
        """Run the captured forward, as one graph or in pieces, and return its outputs."""
        run = self._whole if self._pieces is None else self._call_pieces
        return run(*args, **kwargs)

    def _switch_to_pieces(
        self, failed: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the outputs of the model in pieces, after its capture as one graph failed.

        Nothing of the call has run yet. All later calls run in pieces, too.
        """
        training = self.training
        try:
            why = self._reason_not_whole(failed, Sample(args, kwargs))
        finally:
            del failed  # this frame would be in a cycle with it
        training.refuse_single_graph_options(message_of(why))
        self._hooks = hook_dicts(self._inner)
        self.capture_in_pieces()
        if not training.dry_run:
            training.regions.begin_call(
                training.loop, self._device, lambda: self._resident_bytes(args, kwargs)
            )
        training.regions.captured = True  # what failed is in a reference cycle, with the batch
        return self._call_pieces(*args, **kwargs)

    def _call_pieces(self, *args: Any, **kwargs: Any) -> Any:
        if self.training.dry_run:
            raise DryRunFinished
        if self.training.fixed_sizes and self._dynamic is None:
            self._dynamic = False
            self.capture_in_pieces()
        assert self._pieces is not None
        try:
            with self._separate:
                return self._pieces(*args, **kwargs)
        except CaptureAborted as aborted:
            raise aborted.error from None

    def _capture_failures(self) -> tuple[type[Exception], ...]:
        """Return the exception classes that mean a failed capture; in a dry run all do."""
        return (Exception,) if self.training.dry_run else torch_compat.capture_failures()

    def _reason_not_whole(self, error: BaseException, call: Sample) -> CaptureError:
        """Return the reason why a call cannot be captured as one graph.

        Raises:
            Exception: ``error``, if a capture in pieces would fail as well; what the model itself
                raises at the call; the reason, if the model must be captured as one graph.
        """
        cause = torch_compat.failure_cause(error)
        cuda_graph.refuse_planning()
        of_planning = cause is not error or isinstance(cause, FxrematError)
        if of_planning and not isinstance(
            cause, (CaptureError, *torch_compat.data_dependent_errors())
        ):
            raise error
        if torch_compat.may_be_the_models(cause):
            raised = model_error(self._inner, call)
            if raised is not None:
                raise raised
        if self._must_be_whole and isinstance(error, torch_compat.capture_failures()):
            raise error
        why = cause if isinstance(cause, CaptureError) else capture_refusal(self._inner, cause)
        if self._must_be_whole:
            raise why from error
        return why

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        captured: Callable[..., Any] | None = None,
    ) -> Any:
        """Run the forward as planned, and return its outputs.

        Args:
            args: the positional arguments of the call.
            kwargs: the keyword arguments of the call.
            captured: the callable to run in place of the captured forward.

        Raises:
            BudgetError: this call needs more than the budget.
            CaptureError: new shapes or flags lead to code that cannot be captured.
            Exception: what the model itself raises.
        """
        training, loop, regions = self.training, self.training.loop, self.training.regions
        call = loop.call
        before = call.resident, call.arguments
        call.resident = lambda: _resident(self.original, args, kwargs)
        call.arguments = lambda: places_of(args, kwargs)
        try:
            if not training.dry_run:
                if loop.outside.is_due():
                    given = (t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
                    loop.look_outside(given)
                regions.called = True
                if regions.several:
                    regions.begin_call(
                        loop, self._device, lambda: self._resident_bytes(args, kwargs)
                    )
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
            release_frames(error)
            regions.call_raised()
            raise
        finally:
            call.resident, call.arguments = before  # a batch must not outlive its step
        failure = self._error_to_raise(failed, Sample(args, kwargs))
        try:
            release_frames(failed)
            release_frames(failure)
            raise failure
        finally:
            del failed, failure  # this frame would be in a cycle with them

    def _resident_bytes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the bytes on the device that count as held when a call begins.

        They include tensors of the model, the arguments, and what other networks hold.
        """
        loop = self.training.loop
        nbytes = model_bytes(_resident(self.original, args, kwargs), loop.caller, self._device)
        nbytes += loop.optimizers.more_bytes
        return nbytes + loop.slack_bytes(self._device) + loop.networks_bytes()

    def _error_to_raise(self, error: BaseException, call: Sample) -> BaseException:
        """Return the error to raise to the user after the capture of ``call`` raised ``error``."""
        cause = torch_compat.failure_cause(error)
        of_planning = (FxrematError, torch.OutOfMemoryError, torch.AcceleratorError)
        raised = cause if isinstance(cause, of_planning) else model_error(self._inner, call)
        if isinstance(cause, CostError):  # the operation may fail in the model as well
            raised = model_error(self._inner, call) or cause
        if raised is not None:
            raised.__suppress_context__ |= raised is cause  # the context is not the model's
            return raised
        data_dependent = isinstance(cause, torch_compat.data_dependent_errors())
        if cause is error or data_dependent:
            cause = capture_refusal(self._inner, cause)
            cause.__cause__ = error
        cause.__suppress_context__ = True  # the context is not the model's
        return cause

    def plan_without_running(self, call: Sample, *, hooked: bool) -> None:
        """Capture a call as one graph and plan it, but run nothing of it.

        Args:
            call: the arguments.
            hooked: whether hooks of the model still have to run on these arguments.

        Raises:
            CaptureError: no output of the call has a gradient, or only operations that are not
                captured make one and the model must be captured as one graph.
            FxrematError: see :meth:`run`.
        """
        training = self.training
        whole: Callable[..., Any] = self._call_captured
        untouched: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        if hooked and self._inner._forward_pre_hooks:  # they may change the arguments
            whole = _with_forward(self._inner, self._call_captured)
            untouched = functools.partial(attributes_replaced, self._inner, lambda tensor: tensor)
        training.dry_run = True
        try:
            if self._pieces is None:
                with contextlib.suppress(DryRunFinished), untouched():
                    self.run(call.args, call.kwargs, captured=whole)
        finally:
            training.dry_run = False
        if not training.plans and self._pieces is None:
            self._leave_unplanned(call)

    def _leave_unplanned(self, call: Sample) -> None:
        """Run a model without a plan from its next call on, as its capture has no backward.

        Autograd differentiates outputs that are views of inputs or parameters by itself.

        Args:
            call: the arguments of the call that was captured.

        Raises:
            CaptureError: no output of the call has a gradient, or the model must be captured as
                one graph.
        """
        name = type(self.original).__name__
        if not has_gradient(self._inner, call):
            raise CaptureError(
                f"{name} computes nothing with a gradient from this sample: there is no step to "
                "plan",
                code="FXR305",
            )
        why = f"{name} returns only views of its parameters and inputs: there is no step to plan"
        if self._must_be_whole:
            raise CaptureError(f"{why}. Omit regions='one'", code="FXR305")
        self.training.refuse_single_graph_options(why)
        self.training.regions.warnings.only_views = True
        self._hooks = hook_dicts(self._inner)
        self.capture_in_pieces()


def _with_forward(model: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """Return a module with the attributes and hooks of ``model``, but with another ``forward``."""

    class Quiet:
        def __init_subclass__(cls, **_options: Any) -> None:
            """Do nothing, so that a base class that registers its subclasses ignores this one."""

    attributes = {"forward": property(lambda _self: forward)}
    bases = (Quiet, type(model))
    cls = types.new_class(type(model).__name__, bases, {}, lambda body: body.update(attributes))
    module: nn.Module = object.__new__(cls)
    object.__setattr__(module, "__dict__", model.__dict__)
    return module


def _resident(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a model, and those in the arguments of a call."""
    given = (value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor))
    return (*torch_compat.tensors_of_module(model), *given)
