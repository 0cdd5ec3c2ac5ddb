"""The owner of one model's training: its options, its loop with the budget, graphs and regions."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

import torch
from torch import nn

from fxremat import torch_compat
from fxremat.cache.folder import Store
from fxremat.calls.plans import record_of
from fxremat.costs.measured.measure import device_of
from fxremat.errors import CaptureError, PlanError
from fxremat.graph.compiled_plan import CompiledPlan
from fxremat.graph.graph import Graph
from fxremat.loop.comparison import Comparison
from fxremat.loop.hosting import Hosting
from fxremat.loop.loop import Loop
from fxremat.loop.optimizer_state import counted_state, optimizer_bytes
from fxremat.loop.parameters import Moved
from fxremat.options.arguments import Arguments
from fxremat.options.budget import TrainingBudget
from fxremat.options.measured_needs import LossNeeds
from fxremat.planner.context.context_bytes import Caller
from fxremat.progress import Progress, silent
from fxremat.ranks.peers import Peers
from fxremat.regions.regions import Regions
from fxremat.report.plan import Plan

PACKAGE = str(Path(__file__).parents[1])
"""The folder of this package's source."""

_TORCH = str(Path(torch.__file__).parent)

MOST_RECAPTURES = 8
"""Steps in which code is captured again although its graph is cached, before it runs unplanned."""


class DryRunFinished(BaseException):
    """Raised by a compiled graph in a dry run, in place of running.

    It is not an ``Exception``, so that no handler in the traced model catches it.
    """


class CaptureAborted(BaseException):
    """Raised if a model is captured as several graphs, and one of them cannot be planned.

    It is not an ``Exception``: Dynamo would catch that and run the code without the graph,
    unplanned and, if the graph has collectives, out of step with other processes.

    Attributes:
        error: the error to raise to the user.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def room_of(loop: Loop | None) -> int | None:
    """Return the bytes that a step of an optimizer may allocate; ``None``: as few as possible."""
    return None if loop is None else loop.optimizer_room_bytes()


@dataclass(eq=False)
class Training:
    """One model that trains under one budget.

    Attributes:
        loop: the training loop of the model, which owns the budget.
        options: the arguments of :func:`fxremat.compile`.
        progress: receives how far planning has come.
        loss_needs: the measured needs of a loss outside the model; ``None``: steps show them.
        graphs: the graphs that were captured so far, in order.
        latest: the graph and the plan of the call that ran last.
        dry_run: whether compiled graphs raise :class:`DryRunFinished` instead of running.
        owner: the object that owns this, if no model does; this keeps it alive.
        saved_plan: a saved plan that the first graph follows.
        store: the cache folder.
        regions: the graphs that one step runs, if it runs several.
        fixed_sizes: whether sizes must be numbers, as a graph with symbols could not be planned.
        recaptures: the steps in which code was captured although its graph was cached, by code.
        model_name: the name of the model's class.
        differentiated: the tensors that graphs compute a gradient of, by ``id``.
        moved: parameters that were moved to host memory for it.
    """

    loop: Loop
    options: Arguments
    progress: Progress
    loss_needs: LossNeeds | None = None
    graphs: list[Graph] = field(default_factory=list)
    latest: tuple[Graph, CompiledPlan] | None = None
    dry_run: bool = False
    owner: object = None
    saved_plan: Plan | None = None
    store: Store = field(default_factory=Store.of_environment)
    regions: Regions = field(init=False)
    fixed_sizes: bool = False
    recaptures: dict[CodeType, set[int]] = field(default_factory=dict)
    model_name: str = ""
    differentiated: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    moved: Moved | None = None

    def __post_init__(self) -> None:
        self.regions = Regions(self.loop.peers)

    @staticmethod
    def of(
        options: Arguments,
        model: nn.Module,
        progress: Progress = silent,
        *,
        peers: Peers | None = None,
        needs: LossNeeds | None = None,
        target_bytes: tuple[int, ...] = (),
    ) -> Training:
        """Return a new training of a model, with its loop and budget.

        Args:
            options: the arguments of :func:`fxremat.compile`.
            model: the model whose parameters the optimizer steps.
            progress: receives how far planning has come.
            peers: the processes that train the same model.
            needs: the measured needs of a loss outside the model.
            target_bytes: the bytes of each storage that the loss compares outputs with.

        Raises:
            ArgumentError: the size of the optimizer's state cannot be determined.
        """
        state = optimizer_bytes(options.optimizers, model)
        caller = Caller(
            reserve_bytes=options.reserve_bytes,
            held_bytes=counted_state(state, model, None),
            accumulate=options.accumulate,
            in_flight=options.in_flight,
            loss_bytes=needs.nbytes if needs else None,
            loss_left_bytes=needs.left_bytes if needs else 0,
            loss_small_bytes=needs.small_bytes if needs else 0,
            target_bytes=target_bytes,
            budget_on=options.budget_on,
        )
        limit = options.host.limit if options.host is not None else None
        hint = ". The state of an optimizer is not in these bytes: optimizer= counts it"
        budget = TrainingBudget(
            options.budget,
            strict=options.strict,
            usual=options.assume == "usual",
            hint="" if options.optimizers else hint,
        )
        loop = Loop(
            budget,
            caller,
            options.optimizers,
            host=limit,
            peers=peers,
            state=state,
            comparison=Comparison(options.verify_bits),
        )
        host = options.host
        if host is not None and host.state:
            loop.hosting = Hosting.of(
                options.optimizers,
                torch_compat.wrapped_by(model),
                state,
                device=device_of(model),
                folder=host.folder,
                limit=host.limit,
            )
            reference = weakref.ref(loop)
            loop.hosting.room = lambda: room_of(reference())
        return Training(loop, options, progress, needs, saved_plan=options.kept)

    @property
    def plans(self) -> list[CompiledPlan]:
        """Plans in use by any of the graphs, each once."""
        return [*self._graphs_by_plan()]

    def records(self) -> list[Plan]:
        """Return the records of all plans in use."""
        return [record_of(self.loop, graph, own) for own, graph in self._graphs_by_plan().items()]

    def _graphs_by_plan(self) -> dict[CompiledPlan, Graph]:
        return {own: graph for graph in self.graphs for own in graph.calls.plans.values()}

    def latest_record(self) -> Plan:
        """Return the record of the plan that the latest call followed.

        Raises:
            PlanError: no call was planned.
        """
        if self.latest is None:
            raise PlanError("no step is planned yet: run a training step first", code="FXR601")
        return record_of(self.loop, *self.latest)

    @property
    def may_run_unplanned(self) -> bool:
        """Whether a graph that cannot be planned may run unchanged, without a plan.

        It may not if the model is to be captured in pieces instead, nor if other processes would
        have to run it without a plan as well.
        """
        if self.options.fullgraph or self.loop.peers is not None or self.saved_plan is not None:
            return False
        return self.owner is not None or (self.regions.called and self.regions.several)

    def reference(self) -> Callable[[], Training | None]:
        """Return a function that returns this training, or ``None`` once it is gone.

        The function keeps the training alive only if no model owns it.
        """
        if self.owner is None:
            return weakref.ref(self)

        def held() -> Training:
            return self

        return held

    def capture_error(self, error: Exception) -> BaseException:
        """Return the exception to raise from a capture that has failed with ``error``.

        If it must not be caught by Dynamo, it is a :class:`CaptureAborted`.
        """
        if isinstance(error, CaptureError) and self.may_run_unplanned:
            return error
        in_pieces = self.regions.called and self.regions.several
        return CaptureAborted(error) if in_pieces else error

    def runs_unplanned(self, code: CodeType) -> bool:
        """Return whether ``code`` is no longer captured, so that it runs without a plan.

        That is so after too many steps that captured it although its graph was cached.
        """
        return len(self.recaptures.get(code, ())) >= MOST_RECAPTURES

    def note_recapture(self, code: CodeType | None) -> None:
        """Record that ``code`` was captured in this step although its graph was cached."""
        if code is None or code.co_filename.startswith((_TORCH, PACKAGE)):
            return  # this code calls any function of the user's
        steps = self.recaptures.setdefault(code, set())
        steps.add(self.regions.steps)
        if len(steps) == MOST_RECAPTURES:
            self.regions.warnings.warn_captured_again(
                f"{code.co_filename}:{code.co_firstlineno}: {code.co_name}", MOST_RECAPTURES
            )

    def refuse_single_graph_options(self, broken: str) -> None:
        """Raise if an option was given that requires the model to be captured as one graph.

        Args:
            broken: why the model is captured in several graphs.

        Raises:
            CaptureError: such an option was given.
        """
        self.regions.warnings.why = self.regions.warnings.why or broken
        several = "in_flight=" if self.options.in_flight > 1 else ""
        option = "plan=" if self.saved_plan else several
        if option:
            raise CaptureError(
                f"this model is captured as several graphs ({broken}), but {option} requires one. "
                f"Omit {option}, or move the code that breaks the graph out of the forward",
                code="FXR304",
            )

    def detaches_more_than(self, before: Training) -> bool:
        """Return whether a parameter with a gradient in steps of ``before`` has none in this.

        Its gradient was zeros there, which an optimizer steps, unlike a gradient of ``None``.
        """
        if self.loss_needs is None or self.loss_needs.unused is None:
            return False
        return not before.regions.trained.keys() <= self.differentiated.keys()

    def undo(self) -> None:
        """Move parameters back, and have other networks not count this one: it does not train."""
        self.loop.leave()
        if self.moved is not None:
            self.moved.undo()

    def close(self) -> None:
        """Free the host memory of all plans, after which their graphs cannot run."""
        for plan in self.plans:
            plan.close()
