"""One model that trains: its options, its loop with the budget, its graphs and its regions."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

import torch
from torch import nn

from fxremat.cache.folder import Store
from fxremat.calls.plans import record_of
from fxremat.errors import CaptureError, PlanError
from fxremat.graph.compiled_plan import CompiledPlan
from fxremat.graph.graph import Graph
from fxremat.loop.comparison import Comparison
from fxremat.loop.loop import Loop
from fxremat.loop.optimizer_state import counted_state, optimizer_bytes
from fxremat.options.arguments import Arguments
from fxremat.options.budget import TrainingBudget
from fxremat.options.measured_needs import LossNeeds
from fxremat.planner.context_bytes import Caller
from fxremat.progress import Progress, silent
from fxremat.ranks.peers import Peers
from fxremat.regions.regions import Regions
from fxremat.report.plan import Plan

OWN = str(Path(__file__).parents[1])

_LIBRARY = str(Path(torch.__file__).parent)

MOST_AGAIN = 8
"""Steps in which a function is captured though its graph is known: then it runs as it is."""


class PlannedOnly(BaseException):
    """Raised by a compiled step that was asked to plan and not to run.

    No ``Exception``, so that no handler of the traced model can take it for its own.
    """


class RefusedError(BaseException):
    """Raised by a capture in pieces that cannot be planned.

    No ``Exception``: after one Dynamo would run on without the graph, unplanned and, where it has
    collectives, out of step with other processes.

    Attributes:
        error: why.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(eq=False)
class Training:
    """One model that trains under one budget.

    Attributes:
        loop: the training loop around the model, which owns the budget.
        options: the user's.
        progress: receives how far planning has come.
        graphs: all that were captured so far, in order.
        latest: the graph and the plan of the call that ran last.
        dry: compiled graphs raise :class:`PlannedOnly` instead of running.
        asked_by: what owns this where no model does; it stays as long as this does.
        kept: a saved plan that the first graph follows.
        store: the cache folder.
        regions: the graphs that one step runs, where it runs several.
        no_symbols: a graph with symbols in place of sizes could not be followed, and runs as it is.
        again: numbers of the steps in which code was captured though its graph was cached.
        model: the class of the model.
        trained: tensors that graphs compute a gradient of, by ``id``.
    """

    loop: Loop
    options: Arguments
    progress: Progress
    graphs: list[Graph] = field(default_factory=list)
    latest: tuple[Graph, CompiledPlan] | None = None
    dry: bool = False
    asked_by: object = None
    kept: Plan | None = None
    store: Store = field(default_factory=Store.of_environment)
    regions: Regions = field(init=False)
    no_symbols: bool = False
    again: dict[CodeType, set[int]] = field(default_factory=dict)
    model: str = ""
    trained: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.regions = Regions(self.loop.peers)

    @staticmethod
    def of(
        asked: Arguments,
        model: nn.Module,
        progress: Progress = silent,
        *,
        peers: Peers | None = None,
        needs: LossNeeds | None = None,
        target_bytes: tuple[int, ...] = (),
    ) -> Training:
        """What plans steps as asked.

        Args:
            asked: of the user.
            model: whose parameters the optimizer steps.
            progress: is told how far planning has come.
            peers: processes that train the same model.
            needs: of a loss outside the model, where it is known.
            target_bytes: of each storage that the loss compares outputs with.

        Raises:
            ArgumentError: the optimizer's state cannot be found.
        """
        state = optimizer_bytes(asked.optimizers, model)
        caller = Caller(
            reserve_bytes=asked.reserve_bytes,
            held_bytes=counted_state(state, model, None),
            accumulate=asked.accumulate,
            in_flight=asked.in_flight,
            loss_bytes=needs.nbytes if needs else None,
            loss_left_bytes=needs.left_bytes if needs else 0,
            loss_small_bytes=needs.small_bytes if needs else 0,
            target_bytes=target_bytes,
            budget_on=asked.budget_on,
        )
        host = asked.host.limit if asked.host is not None else None
        hint = ". The state of an optimizer is not in these bytes: optimizer= counts it"
        budget = TrainingBudget(
            asked.budget,
            strict=asked.strict,
            usual=asked.assume == "usual",
            hint="" if asked.optimizers else hint,
        )
        loop = Loop(
            budget,
            caller,
            asked.optimizers,
            host=host,
            peers=peers,
            state=state,
            comparison=Comparison(asked.verify_bits),
        )
        return Training(loop, asked, progress, kept=asked.kept)

    @property
    def plans(self) -> list[CompiledPlan]:
        """All plans in use."""
        return list(
            dict.fromkeys(own for graph in self.graphs for own in graph.calls.plans.values())
        )

    def records(self) -> list[Plan]:
        """Return the records of all plans in use."""
        each = {own: graph for graph in self.graphs for own in graph.calls.plans.values()}
        return [record_of(self.loop, graph, own) for own, graph in each.items()]

    def latest_record(self) -> Plan:
        """Return the record of the plan that the latest call followed.

        Raises:
            PlanError: no call was planned.
        """
        if self.latest is None:
            raise PlanError("no step is planned yet: the first training call is")
        return record_of(self.loop, *self.latest)

    @property
    def may_be_left(self) -> bool:
        """Whether a graph that cannot be planned may run as it is: not where it is to be tried in
        pieces, nor where other processes would have to leave it as well.
        """
        if self.options.fullgraph or self.loop.peers is not None or self.kept is not None:
            return False
        return self.asked_by is not None or (self.regions.called and self.regions.several)

    def reference(self) -> Callable[[], Training | None]:
        """How what is compiled reaches this: without holding it, unless nobody else owns it."""
        if self.asked_by is None:
            return weakref.ref(self)

        def held() -> Training:
            return self

        return held

    def refused(self, error: Exception) -> BaseException:
        """What a capture raises for ``error``."""
        if isinstance(error, CaptureError) and self.may_be_left:
            return error
        in_pieces = self.regions.called and self.regions.several
        return RefusedError(error) if in_pieces else error

    def runs_as_it_is(self, code: CodeType) -> bool:
        """Whether code is not captured any more, as that finds at each step what is known."""
        return len(self.again.get(code, ())) >= MOST_AGAIN

    def note_captured_again(self, code: CodeType | None) -> None:
        """Note that code was captured though its graph is cached."""
        if code is None or code.co_filename.startswith((_LIBRARY, OWN)):
            return  # one code for all that is called through it
        steps = self.again.setdefault(code, set())
        steps.add(self.regions.steps)
        if len(steps) == MOST_AGAIN:
            self.regions.warnings.warn_captured_again(
                f"{code.co_filename}:{code.co_firstlineno}: {code.co_name}", MOST_AGAIN
            )

    def refuse_parts(self, broken: str) -> None:
        """Refuse what is asked for of a model that is captured whole.

        Args:
            broken: why this one is not.

        Raises:
            CaptureError: something is.
        """
        self.regions.warnings.why = self.regions.warnings.why or broken
        several = "in_flight=" if self.options.in_flight > 1 else ""
        asked = "plan=" if self.kept else several
        if asked:
            raise CaptureError(
                f"this model is captured in several graphs ({broken}), and {asked} is for one. "
                f"Leave {asked} out, or take what breaks the graph out of the forward"
            )

    def close(self) -> None:
        """Give host memory up: the graphs cannot run any more."""
        for compiled in self.plans:
            compiled.close()
