"""Runs the training calls of a model as they are planned."""

from __future__ import annotations

import contextlib
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fxremat import optional, torch_compat
from fxremat.costs.cost import Progress
from fxremat.costs.measure import device_of
from fxremat.errors import CaptureError, FxrematError
from fxremat.frontend.arguments import Arguments
from fxremat.frontend.capture import PlannedOnly, StepCompiler
from fxremat.frontend.entry import Entry
from fxremat.frontend.outputs import Unused, forward_of, refuse_gradients
from fxremat.frontend.refused import refused
from fxremat.frontend.sample import Sample, call_without_data, own_error, places_of
from fxremat.frontend.store import Store
from fxremat.frontend.surplus import needs_of_loss, optimizer_bytes
from fxremat.frontend.untouched import generators_restored, in_training
from fxremat.planner.surroundings import Caller


class Runner:
    """The training forward of one model.

    Args:
        original: the model; a ``DistributedDataParallel`` runs around what is captured.
        compiler: plans its steps.
        unused: outputs that get no gradient.
        dynamic: see :class:`Entry`.
    """

    def __init__(
        self,
        original: nn.Module,
        compiler: StepCompiler,
        unused: Unused | None = None,
        *,
        dynamic: bool | None = None,
    ) -> None:
        self.original = original
        self.compiler = compiler
        self._unused = unused
        self._inner = inner = torch_compat.wrapped_by(original)
        self._whole = Entry(forward_of(inner, unused), compiler, dynamic=dynamic)
        self._outer: Callable[..., Any] | None = None
        if inner is not original:
            self._outer = torch_compat.wrapped_anew(original, self._whole)
        # Dynamo keeps compiled code for longer than this lives.
        weakref.finalize(self, compiler.close).atexit = False
        unwatch = compiler.optimizers.watch(original, device_of(original))
        weakref.finalize(self, unwatch).atexit = False

    @staticmethod
    def of(model: nn.Module, call: Sample, asked: Arguments) -> Runner:
        """Plan the step of one call, as asked; the model is not changed.

        Raises:
            BudgetError, PlanError, ArgumentError, SampleError, CaptureError, CostError,
            HostMemoryError: see :func:`fxremat.compile`.
        """
        with generators_restored(), in_training(model), torch.enable_grad():
            outputs = call_without_data(torch_compat.wrapped_by(model), call)
            # No outputs: they depend on data, which the capture reports.
            known = outputs is not None
            needs = needs_of_loss(asked.loss, outputs) if asked.loss and known else None
            caller = Caller(
                reserve_bytes=asked.reserve_bytes,
                held_bytes=optimizer_bytes(asked.optimizer, model),
                accumulate=asked.accumulate,
                loss_bytes=needs.nbytes if needs else None,
                budget_on=asked.budget_on,
            )
            with _progress() as progress:
                compiler = compiler_of(asked, caller, progress)
                unused = needs.unused if needs else None
                if unused is not None:
                    unused = replace(unused, dropped=asked.drop_unused)
                runner = Runner(model, compiler, unused, dynamic=asked.dynamic)
                runner._plan_only(call)
            compiler.progress = silent
            # Other captures get the same bytes, also where the budget was a share or "min".
            assert compiler.latest is not None
            if asked.kept is None:
                first = compiler.latest.planned.plan
                compiler.budget = replace(asked.budget, nbytes=first.budget_bytes, share=None)
            compiler.kept = None  # it is of this shape
        return runner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward as planned.

        Raises:
            BudgetError: this call needs more than the budget.
            CaptureError: new shapes or flags lead to code that cannot be captured.
        """
        outputs = self._captured(args, kwargs)
        detached: tuple[int, ...] = ()
        if self._unused is not None:
            outputs, detached = outputs
        return refuse_gradients(outputs, detached) if detached else outputs

    def _captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the compiled graph; what Dynamo raises comes out as what really went wrong.

        Returns the outputs; with those that were detached, if some have no use.
        """
        compiler = self.compiler
        compiler.resident = lambda: _resident(self.original, args, kwargs)
        compiler.arguments = lambda: places_of(args, kwargs)
        try:
            with torch_compat.capture_settings():
                outer = None if compiler.dry else self._outer
                return (outer or self._whole)(*args, **kwargs)
        except torch_compat.capture_failures() as error:
            failed = error
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # see family.emitted
            raise
        finally:
            compiler.resident = compiler.arguments = tuple  # a batch must not outlive its step
        raise self._failure(failed, Sample(args, kwargs))

    def _failure(self, error: BaseException, call: Sample) -> BaseException:
        """What really went wrong when ``call`` could not be captured."""
        cause = torch_compat.failure_cause(error)
        own = cause if isinstance(cause, FxrematError) else own_error(self._inner, call)
        if own is not None:
            own.__suppress_context__ = True
            return own
        data_dependent = isinstance(cause, torch_compat.data_dependent_errors())
        if cause is error or data_dependent:
            cause = refused(self._inner, cause)
        cause.__cause__ = error  # else nothing that the model did
        return cause

    def _plan_only(self, call: Sample) -> None:
        """Let Dynamo capture the call and plan it, but not run it."""
        compiler = self.compiler

        def run() -> None:
            with contextlib.suppress(PlannedOnly):
                self._captured(call.args, call.kwargs)

        compiler.dry = True
        try:
            run()
            if compiler.compiled:
                compiler.measure_overhead(run)
        finally:
            compiler.dry = False
        if not compiler.compiled:
            raise CaptureError(
                f"{type(self.original).__name__} computes nothing with a gradient from this "
                "sample: there is no step to plan"
            )


def compiler_of(asked: Arguments, caller: Caller, progress: Progress) -> StepCompiler:
    """What plans steps as asked."""
    return StepCompiler(
        asked.budget,
        caller,
        progress,
        host=asked.host,
        exact=asked.exact,
        kept=asked.kept,
        store=Store.of_environment(),
    )


def _resident(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    arguments = (t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
    return (*model.parameters(), *model.buffers(), *arguments)


def silent(_what: str, _done: int, _total: int) -> None:
    """No progress: later captures happen inside a training step."""


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal, nothing elsewhere or without tqdm."""
    found = optional.find("tqdm")
    if found is None:
        yield silent
        return
    with found.tqdm(disable=None, leave=False, unit="stage") as bar:

        def show(what: str, done: int, total: int) -> None:
            bar.set_description_str(f"fxremat: {what}", refresh=False)
            bar.total, bar.n = total, done
            bar.refresh()

        yield show
