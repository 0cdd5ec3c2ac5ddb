"""The Dynamo backend: captures a step, has it planned, and runs the emitted graphs."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, MappingProxyType
from typing import Any

import torch
from torch import fx, nn

from fxremat import torch_compat
from fxremat.costs.overhead import call_s
from fxremat.errors import BackwardError, CaptureError, SizesError
from fxremat.frontend.arguments import Arguments
from fxremat.frontend.budget import TrainingBudget
from fxremat.frontend.captured import CapturedStep
from fxremat.frontend.comparison import Comparison
from fxremat.frontend.loop import Loop
from fxremat.frontend.notices import NOT_CAPTURED
from fxremat.frontend.optimizer_state import counted_state, optimizer_bytes
from fxremat.frontend.pipeline import Planner
from fxremat.frontend.plan_cache import Compiled, PlanCache, abandon
from fxremat.frontend.ranks import Peers
from fxremat.frontend.regions import Regions
from fxremat.frontend.store import Store
from fxremat.frontend.surplus import LossNeeds
from fxremat.planner.context_bytes import Caller
from fxremat.progress import LOG, Progress, silent
from fxremat.report.plan import Plan
from fxremat.runtime import cuda_graph
from fxremat.runtime.steps import Step, latest_step

_OWN = str(Path(__file__).parents[1])

_LIBRARY = str(Path(torch.__file__).parent)

_NONE: Mapping[str, object] = MappingProxyType({})

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
class StepCompiler:
    """Plans each graph that Dynamo captures, all for one budget.

    Attributes:
        loop: around the model.
        asked: of :func:`fxremat.compile`, or of the backend.
        progress: told how far planning has come.
        plan_caches: of all graphs captured so far, in order.
        latest: the plan of the step that ran last.
        dry: compiled graphs raise :class:`PlannedOnly` instead of running.
        asked_by: whoever asked for it, which stays as long as it does.
        kept: a plan that the first graph follows.
        store: costs and plans that other processes have found.
        regions: graphs that one step runs, where it runs several.
        no_symbols: a graph with symbols in place of sizes could not be followed, and runs as it is.
        again: numbers of the steps in which code was captured though its graph was known.
        model: class of the model, where known.
        trained: tensors that graphs compute a gradient of, by ``id``.
    """

    loop: Loop
    asked: Arguments
    progress: Progress
    plan_caches: list[PlanCache] = field(default_factory=list)
    latest: Compiled | None = None
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
        self.regions = Regions(self.loop)

    @staticmethod
    def of(
        asked: Arguments,
        model: nn.Module,
        progress: Progress = silent,
        *,
        peers: Peers | None = None,
        needs: LossNeeds | None = None,
        target_bytes: tuple[int, ...] = (),
    ) -> StepCompiler:
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
        return StepCompiler(loop, asked, progress, kept=asked.kept)

    @property
    def compiled(self) -> list[Compiled]:
        """All plans that are in use."""
        found = (
            compiled for plan_cache in self.plan_caches for compiled in plan_cache.plans.values()
        )
        return list(dict.fromkeys(found))

    def measure_overhead(self, call: Callable[[], object]) -> None:
        """Find what a step takes beside its calls, for the latest plan and those to come.

        Args:
            call: leads to the forward graph and returns before it runs.
        """
        assert self.latest is not None
        planned = self.latest.planned
        if planned.measure_overhead is None:
            overhead_s = planned.plan.overhead_s
        else:
            self.progress("measure overhead")
            overhead_s = planned.measure_overhead(call)
        if self.loop.peers is not None:
            overhead_s = self.loop.peers.agree(
                "what a step takes beside its calls",
                float,
                overhead_s,
                lambda told: max(told.values()),
            )
        self.loop.overhead_s = overhead_s
        for plan_cache in self.plan_caches:
            plan_cache.know_overhead(overhead_s)

    def __call__(
        self, module: fx.GraphModule, example_inputs: Sequence[Any], **_options: Any
    ) -> Callable[..., Any]:
        """Compile one graph of Dynamo's.

        Raises:
            CaptureError: a CUDA graph is being captured.
        """
        cuda_graph.refuse_planning()
        broken = None if self.asked.fullgraph else self._broken(module)
        if broken is not None:
            self.refuse_parts(broken)
            self.regions.several = True
        if not self.regions.several:
            self.loop.watcher.end()
        call_s()  # measured before torch's tracers slow modules down
        me = self._seen_by_graphs()
        given = [example_inputs]  # AOTAutograd keeps what it is made with
        place: int | None = None  # of the graph's plan cache

        def partition(
            joint: fx.GraphModule, _joint_inputs: object, *, num_fwd_outputs: int, **_kwargs: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            nonlocal place
            own = _there(me)
            try:
                places = results_of(joint, num_fwd_outputs)
                plan_cache = own._plan_cache(joint, given[0], num_fwd_outputs)
            except SizesError:
                raise
            except Exception as error:
                refused = own.refused(error)
                if refused is error:
                    raise  # from itself it would be in a circle
                raise refused from error
            place = next(i for i, known in enumerate(own.plan_caches) if known is plan_cache)
            if broken is not None:
                own.regions.notices.broken_at(broken)
            plan_cache.returned = places
            return torch_compat.stub_graphs(
                joint, forward_output_count=num_fwd_outputs, places=places
            )

        def compile_forward(_stub: object, _inputs: object) -> Callable[..., Any]:
            torch_compat.allow_retained_graphs()
            assert place is not None  # the partition comes first
            return _forward(me, place, broken or "")

        def compile_backward(_stub: object, _inputs: object) -> Callable[..., Any]:
            return torch_compat.boxed(_backward)

        backend = torch_compat.aot_autograd_backend(
            forward_compiler=compile_forward,
            backward_compiler=compile_backward,
            inference_compiler=lambda graph, _inputs: _inference(me, graph),
            partition=partition,
            decompositions=torch_compat.decompositions() if self.asked.fused else None,
        )
        try:
            try:
                with torch_compat.without_donated_buffers():
                    run: Callable[..., Any] = backend(module, example_inputs)
            except CaptureError as error:
                return self._as_it_is(error, module, example_inputs)
        except BaseException:
            self.regions.raised()
            raise
        finally:
            given.clear()
        return run if place is None else backward_checked(run)

    def _as_it_is(
        self, error: CaptureError, module: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """What runs for a graph that cannot be planned, as ``error`` says; raises that where there
        is another way.
        """
        if isinstance(error, SizesError):
            if not self.regions.several:
                raise error
            self.no_symbols = True
            LOG.info("a graph runs as it is: %s", error)
            return module
        if not self._may_be_left:
            raise error
        self.regions.notices.left(error)
        return torch_compat.as_it_is(module, example_inputs)

    @property
    def _may_be_left(self) -> bool:
        """Whether a graph that cannot be planned may run as it is: not where it is to be tried in
        pieces, nor where other processes would have to leave it as well.
        """
        if self.asked.fullgraph or self.loop.peers is not None or self.kept is not None:
            return False
        return self.asked_by is not None or (self.regions.called and self.regions.several)

    def _seen_by_graphs(self) -> Callable[[], StepCompiler | None]:
        """How what is compiled reaches this: without holding it, unless nobody else owns it."""
        if self.asked_by is None:
            return weakref.ref(self)

        def held() -> StepCompiler:
            return self

        return held

    def refused(self, error: Exception) -> BaseException:
        """What a capture raises for ``error``."""
        if isinstance(error, CaptureError) and self._may_be_left:
            return error
        in_pieces = self.regions.called and self.regions.several
        return RefusedError(error) if in_pieces else error

    def runs_as_it_is(self, code: CodeType) -> bool:
        """Whether code is not captured any more, as that finds at each step what is known."""
        return len(self.again.get(code, ())) >= MOST_AGAIN

    def _captured_again(self, code: CodeType | None) -> None:
        if code is None or code.co_filename.startswith((_LIBRARY, _OWN)):
            return  # one code for all that is called through it
        steps = self.again.setdefault(code, set())
        steps.add(self.regions.steps)
        if len(steps) == MOST_AGAIN:
            self.regions.notices.captured_again(
                f"{code.co_filename}:{code.co_firstlineno}: {code.co_name}", MOST_AGAIN
            )

    def _broken(self, module: object) -> str | None:
        """Why a graph is not all of the model; ``None``: it is, as far as is known."""
        ended = torch_compat.break_of(module)
        line, inside = torch_compat.caller_of_captured(_OWN)
        first = self.regions.called or not any(self.loop.in_flight)  # where nobody tells of calls
        if ended is not None or (first and not inside):
            return ended
        return f"{line or 'its caller'}: what is called there {NOT_CAPTURED}"

    def refuse_parts(self, broken: str) -> None:
        """Refuse what is asked for of a model that is captured whole.

        Args:
            broken: why this one is not.

        Raises:
            CaptureError: something is.
        """
        self.regions.notices.why = self.regions.notices.why or broken
        several = "in_flight=" if self.asked.in_flight > 1 else ""
        asked = "plan=" if self.kept else several
        if asked:
            raise CaptureError(
                f"this model is captured in several graphs ({broken}), and {asked} is for one. "
                f"Leave {asked} out, or take what breaks the graph out of the forward"
            )

    def close(self) -> None:
        """Give host memory up: the graphs cannot run any more."""
        for compiled in self.compiled:
            arena = compiled.planned.graphs.arena
            if arena is not None:
                arena.close()

    def _plan_cache(
        self, joint: fx.GraphModule, example_inputs: Sequence[Any], output_count: int
    ) -> PlanCache:
        """Plan a graph for the call that it was captured from."""
        together = any(map(torch_compat.is_shared, joint.graph.nodes))
        if self.regions.several:
            together |= any(
                plan_cache.planner.step.has_collectives for plan_cache in self.plan_caches
            )
        if self.loop.peers is None or not (together or self._first_step()):
            return self._plan_cache_of(joint, example_inputs, output_count, None)
        peers = self.loop.peers
        with peers.telling():
            plan_cache = self._plan_cache_of(joint, example_inputs, output_count, peers)
        if together and self.regions.several:
            self.regions.together = True
            for own in self.plan_caches:
                own.planner.bind(peers)
        return plan_cache

    def _caller(self, gradients: list[torch.Tensor]) -> Caller:
        """What is needed beside the graph that is captured now.

        Loss and target are of the first one; of a step of several graphs, of none of them.

        Args:
            gradients: tensors that the graph computes a gradient of.
        """
        caller, first = self.loop.caller, None
        if not self.regions.several:
            model = self.loop.model()
            if model is not None:
                held_bytes = counted_state(self.loop.state, model, gradients)
                caller = replace(caller, held_bytes=held_bytes)
            if self.plan_caches:
                first = self.plan_caches[0].planner.step.caller.outputs_bytes
        return replace(caller, resident=self.loop.call.resident(), outputs_bytes=first)

    def _first_step(self) -> bool:
        """Whether what is captured is part of a step that all processes run."""
        return not self.plan_caches or (self.regions.several and self.regions.steps < 2)

    def _plan_cache_of(
        self,
        joint: fx.GraphModule,
        example_inputs: Sequence[Any],
        output_count: int,
        peers: Peers | None,
    ) -> PlanCache:
        inputs, asked = _real_inputs(joint, example_inputs), self.asked
        made = torch_compat.differentiated_primals(joint, forward_output_count=output_count)
        gradients = [inputs[primal] for primal in made if primal in inputs]
        self.trained.update((id(own), weakref.ref(own)) for own in gradients)
        with torch_compat.without_autotuning():
            traced = CapturedStep(
                joint,
                forward_output_count=output_count,
                inputs=inputs,
                caller=self._caller(gradients),
                progress=self.progress,
                places=_places(inputs, self.loop.call.arguments()),
                store=self.store,
                fused=asked.fused,
                peers=peers,
                model=self.model,
                from_data=self.regions.several,
                policy=asked.policy,
                travels=asked.host is not None,
            )
            planner = Planner(
                traced,
                self.loop.budget,
                host=asked.host,
                exact=asked.exact,
                split=asked.split,
                effort=asked.effort,
                generators=asked.generators,
            )
            again = (own for own in self.plan_caches if own.planner.step.is_same(planner.step))
            known = next(again, None) if self.regions.several and peers is None else None
            if known is not None:  # what Dynamo guards has changed, but not the graph
                self._captured_again(torch_compat.compiled_now())
                return known
            plan_cache = PlanCache.of(
                planner,
                joint,
                inputs,
                self.regions,
                output_count=output_count,
                kept=self.kept,
                rehearse=self.dry and not planner.step.has_collectives,
            )
        if not self.dry:  # a rehearsal needs the way in, which is there once all is compiled
            plan_cache.know_overhead(self.loop.overhead_s)
        self.plan_caches.append(plan_cache)
        self.regions.captured = True
        (self.latest,) = plan_cache.plans.values()
        return plan_cache


def results_of(joint: fx.GraphModule, output_count: int) -> tuple[int, ...]:
    """Let the backward of ``joint`` have a result for each primal; places of those that it had.

    Raises:
        CaptureError: they cannot be told apart.
    """
    places = torch_compat.spread_results(joint, forward_output_count=output_count)
    if places is None:
        raise CaptureError(
            "an operation has effects that are ordered, such as printing: fxremat plans graphs "
            "whose operations may run in another order. Take it out of the forward"
        )
    return places


def _there(compiler: Callable[[], StepCompiler | None]) -> StepCompiler:
    """A compiler whose graphs run: so its owner is there."""
    own = compiler()
    assert own is not None
    return own


def _forward(
    compiler: Callable[[], StepCompiler | None], place: int, ended_by: str
) -> Callable[..., Any]:
    """The forward of a graph, whose plan cache is at ``place`` among the compiler's."""

    def forward(args: list[Any]) -> Any:
        own = _there(compiler)
        if own.dry:
            raise PlannedOnly
        plan_cache = own.plan_caches[place]
        try:
            step, run = plan_cache.begin(args, ended_by=ended_by)
            if plan_cache.on_cuda:
                with torch_compat.without_autotuning():
                    results = list(run(args))
            else:  # nothing is tried out
                results = run(args)  # type: ignore[assignment]
        except BaseException as error:
            own.regions.raised()
            abandon(args, error)
            raise
        own.latest = step.plan
        return plan_cache.left(step, results)

    return torch_compat.boxed(forward)


def _backward(args: list[Any]) -> Sequence[Any]:
    """The backward of whichever graph it is, as its step tells."""
    step = Step.of(args[0])
    plan_cache: PlanCache = step.plan.plan_cache
    return plan_cache.backward(step, args)


def _inference(
    compiler: Callable[[], StepCompiler | None], graph: fx.GraphModule
) -> Callable[..., Any]:
    """A graph without a backward: nothing to plan, but it may lead to one that has."""

    def run(args: list[Any]) -> Any:
        if _there(compiler).dry:
            raise PlannedOnly
        values, args[:] = tuple(args), []
        return graph(*values)

    return torch_compat.boxed(run)


@dataclass(eq=False)
class _Graph:
    """Hangs on the graph of a step, and goes with it; so does what it holds."""

    step: object


def backward_checked(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, a compiled step; its backward is refused where it could not be right."""

    def call(*args: Any) -> Any:
        try:
            outputs = run(*args)
        finally:
            step = latest_step()
        if step is None:  # an inference graph
            torch_compat.before_backward(outputs, check_backward)
            return outputs
        watcher = step.plan.plan_cache.loop.watcher
        if step.plan.plain and not (step.elsewhere or watcher.is_on):
            torch_compat.before_backward(outputs, check_backward)
            return outputs
        recomputes = step.plan.planned.graphs.recomputes
        settings = torch_compat.kernel_settings() if recomputes else {}
        # Where hooks put another tensor in the token's place, the graph itself keeps the step.
        held = _Graph(step if step.elsewhere else None)
        check = functools.partial(check_backward, settings=settings, _held=held)
        torch_compat.before_backward(outputs, check)
        watcher.until_gone(held, step)
        return outputs

    return call


def check_backward(
    _gradients: object, *, settings: Mapping[str, object] = _NONE, _held: object = None
) -> None:
    """A backward begins.

    Args:
        settings: those of its forward that must hold; none if nothing is computed again.
        _held: what lives as long as the backward may run.

    Raises:
        BackwardError: it is to be differentiated, or what it computes again would be computed
            by other kernels than the first time.
    """
    if torch.is_grad_enabled():  # exactly then
        raise BackwardError(
            "the backward of a compiled step was asked for with create_graph=True: its gradients "
            "cannot be differentiated again. Call backward() without create_graph, or use the "
            "original model for this step"
        )
    if not settings:
        return
    now = torch_compat.kernel_settings()
    changed = [name for name, value in settings.items() if now[name] != value]
    if changed:
        told = ", ".join(f"{name} was {settings[name]}, is {now[name]}" for name in changed)
        raise BackwardError(
            f"between the forward and the backward of a compiled step settings changed: {told}. "
            "What is computed again would not be the same: set them around both"
        )


def _real_inputs(
    joint: fx.GraphModule, example_inputs: Sequence[Any]
) -> Mapping[int, torch.Tensor]:
    """Real values of the joint graph's primals, where Dynamo's inputs are real."""
    found: dict[int, torch.Tensor] = {}
    for primal, value in enumerate(torch_compat.primal_values(joint, example_inputs)):
        if isinstance(value, torch.Tensor) and not torch_compat.is_fake(value):
            found[primal] = value
    return found


def _places(
    inputs: Mapping[int, torch.Tensor], arguments: Sequence[tuple[str, torch.Tensor]]
) -> dict[int, str]:
    """Places in the call, by primal, of primals that are its arguments."""
    place = {id(tensor): name for name, tensor in reversed(arguments)}
    return {i: place[id(tensor)] for i, tensor in inputs.items() if id(tensor) in place}
