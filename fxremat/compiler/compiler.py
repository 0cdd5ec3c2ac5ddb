"""The Dynamo backend: captures graphs, has them planned, and runs what is emitted."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.calls.run import abandon, begin, end_forward, plan_first_call, run_backward
from fxremat.errors import BackwardError, CaptureError, SizesError
from fxremat.graph.forms import PlanOptions
from fxremat.graph.graph import Graph
from fxremat.graph.signature import results_of
from fxremat.loop.optimizer_state import counted_state
from fxremat.planner.context_bytes import Caller
from fxremat.progress import LOG
from fxremat.ranks.peers import Peers
from fxremat.regions.warnings import NOT_CAPTURED
from fxremat.runtime import cuda_graph
from fxremat.runtime.steps import Step, latest_step
from fxremat.training.training import OWN, PlannedOnly, Training

_NONE: Mapping[str, object] = MappingProxyType({})


def compile_graph(
    training: Training, module: fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    """Compile one graph of Dynamo's.

    Raises:
        CaptureError: a CUDA graph is being captured.
    """
    cuda_graph.refuse_planning()
    regions = training.regions
    broken = None if training.options.fullgraph else _broken(training, module)
    if broken is not None:
        training.refuse_parts(broken)
        regions.several = True
    if not regions.several:
        training.loop.watcher.end()
    reference = training.reference()
    given = [example_inputs]  # AOTAutograd keeps what it is made with
    place: int | None = None  # of the graph among those of the training

    def partition(
        joint: fx.GraphModule, _joint_inputs: object, *, num_fwd_outputs: int, **_kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        nonlocal place
        own = _there(reference)
        try:
            places = results_of(joint, num_fwd_outputs)
            graph = _planned_graph(own, joint, given[0], num_fwd_outputs)
        except SizesError:
            raise
        except Exception as error:
            refused = own.refused(error)
            if refused is error:
                raise  # from itself it would be in a circle
            raise refused from error
        place = next(i for i, each in enumerate(own.graphs) if each is graph)
        if broken is not None:
            own.regions.warnings.note_break(broken)
        graph.calls.returned = places
        return torch_compat.stub_graphs(joint, forward_output_count=num_fwd_outputs, places=places)

    def compile_forward(_stub: object, _inputs: object) -> Callable[..., Any]:
        torch_compat.allow_retained_graphs()
        assert place is not None  # the partition comes first
        return _forward(reference, place, broken or "")

    def compile_backward(_stub: object, _inputs: object) -> Callable[..., Any]:
        return torch_compat.boxed(_backward)

    backend = torch_compat.aot_autograd_backend(
        forward_compiler=compile_forward,
        backward_compiler=compile_backward,
        inference_compiler=lambda graph, _inputs: _inference(reference, graph),
        partition=partition,
        decompositions=torch_compat.decompositions() if training.options.fused else None,
    )
    try:
        try:
            with torch_compat.without_donated_buffers():
                run: Callable[..., Any] = backend(module, example_inputs)
        except CaptureError as error:
            return _as_it_is(training, error, module, example_inputs)
    except BaseException:
        regions.graph_raised()
        raise
    finally:
        given.clear()
    return run if place is None else backward_checked(run)


def _as_it_is(
    training: Training, error: CaptureError, module: fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    """Return what runs for a graph that cannot be planned, unless there is another way."""
    if isinstance(error, SizesError):
        if not training.regions.several:
            raise error
        training.no_symbols = True
        LOG.info("a graph runs as it is: %s", error)
        return module
    if not training.may_be_left:
        raise error
    training.regions.warnings.warn_not_planned(error)
    return torch_compat.as_it_is(module, example_inputs)


def _broken(training: Training, module: object) -> str | None:
    """Return why a graph is not all of the model; ``None``: it is, as far as can be seen."""
    ended = torch_compat.break_of(module)
    line, inside = torch_compat.caller_of_captured(OWN)
    # Where calls of the model are not reported, the first graph may be all of it.
    first = training.regions.called or not any(training.loop.in_flight)
    if ended is not None or (first and not inside):
        return ended
    return f"{line or 'its caller'}: what is called there {NOT_CAPTURED}"


def _planned_graph(
    training: Training, joint: fx.GraphModule, example_inputs: Sequence[Any], output_count: int
) -> Graph:
    """Plan a graph for the call that it was captured from, with all processes that must follow."""
    regions, peers = training.regions, training.loop.peers
    together = any(map(torch_compat.is_shared, joint.graph.nodes))
    if regions.several:
        together |= any(graph.has_collectives for graph in training.graphs)
    is_first = not training.graphs or (regions.several and regions.steps < 2)
    if peers is None or not (together or is_first):
        return _graph_of(training, joint, example_inputs, output_count, None)
    with peers.telling():
        graph = _graph_of(training, joint, example_inputs, output_count, peers)
    if together and regions.several:
        regions.together = True
        for own in training.graphs:
            own.bind(peers)
    return graph


def _graph_of(
    training: Training,
    joint: fx.GraphModule,
    example_inputs: Sequence[Any],
    output_count: int,
    peers: Peers | None,
) -> Graph:
    """Return a planned graph: a new one, or the same one where it was captured before."""
    inputs, options, loop = _real_inputs(joint, example_inputs), training.options, training.loop
    made = torch_compat.differentiated_primals(joint, forward_output_count=output_count)
    gradients = [inputs[primal] for primal in made if primal in inputs]
    training.trained.update((id(own), weakref.ref(own)) for own in gradients)
    several = training.regions.several
    with torch_compat.without_autotuning():
        graph = Graph(
            joint,
            forward_output_count=output_count,
            inputs=inputs,
            caller=_caller(training, gradients),
            progress=training.progress,
            options=PlanOptions(
                host=options.host,
                exact=options.exact,
                split=options.split,
                effort=options.effort,
                generators=options.generators,
            ),
            places=_places(inputs, loop.call.arguments()),
            store=training.store,
            fused=options.fused,
            peers=peers,
            model=training.model,
            from_data=several,
        )
        again = (own for own in training.graphs if own.is_same(graph))
        before = next(again, None) if several and peers is None else None
        if before is not None:  # what Dynamo guards has changed, but not the graph
            training.note_captured_again(torch_compat.compiled_now())
            return before
        compiled = plan_first_call(loop, training.regions, graph, inputs, kept=training.kept)
    training.graphs.append(graph)
    training.regions.captured = True
    training.latest = graph, compiled
    return graph


def _caller(training: Training, gradients: list[torch.Tensor]) -> Caller:
    """Return what the caller of a graph holds, for the graph that is captured now.

    Loss and target are of the first graph; of a step of several graphs, of none of them.

    Args:
        training: that captures.
        gradients: tensors that the graph computes a gradient of.
    """
    loop, first = training.loop, None
    caller = loop.caller
    if not training.regions.several:
        model = loop.model()
        if model is not None:
            held_bytes = counted_state(loop.state, model, gradients)
            caller = replace(caller, held_bytes=held_bytes)
        if training.graphs:
            first = training.graphs[0].caller.outputs_bytes
    return replace(caller, resident=loop.call.resident(), outputs_bytes=first)


def _there(reference: Callable[[], Training | None]) -> Training:
    """Return what owns graphs that run: so its own owner exists."""
    own = reference()
    assert own is not None
    return own


def _forward(
    reference: Callable[[], Training | None], place: int, ended_by: str
) -> Callable[..., Any]:
    """Return the forward of the graph at ``place`` among those of a training."""

    def forward(args: list[Any]) -> Any:
        training = _there(reference)
        if training.dry:
            raise PlannedOnly
        graph = training.graphs[place]
        try:
            step, run = begin(training.loop, training.regions, graph, args, ended_by=ended_by)
            if graph.calls.on_cuda:
                with torch_compat.without_autotuning():
                    results = list(run(args))
            else:  # nothing is tried out
                results = run(args)  # type: ignore[assignment]
        except BaseException as error:
            training.regions.graph_raised()
            abandon(args, error)
            raise
        training.latest = graph, step.plan
        return end_forward(step, results)

    return torch_compat.boxed(forward)


def _backward(args: list[Any]) -> Sequence[Any]:
    """Run the backward of the step whose token is the first argument."""
    return run_backward(Step.of(args[0]), args)


def _inference(
    reference: Callable[[], Training | None], graph: fx.GraphModule
) -> Callable[..., Any]:
    """A graph without a backward: nothing to plan, but it may lead to one that has."""

    def run(args: list[Any]) -> Any:
        if _there(reference).dry:
            raise PlannedOnly
        values, args[:] = tuple(args), []
        return graph(*values)

    return torch_compat.boxed(run)


@dataclass(eq=False)
class _Hung:
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
        watcher = step.owners[0].watcher
        if step.plan.plain and not (step.elsewhere or watcher.is_on):
            torch_compat.before_backward(outputs, check_backward)
            return outputs
        recomputes = step.plan.recomputes
        settings = torch_compat.kernel_settings() if recomputes else {}
        # Where hooks put another tensor in the token's place, the graph itself keeps the step.
        held = _Hung(step if step.elsewhere else None)
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
