"""The compiler of Dynamo's graphs: captures, plans and runs them."""

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
from fxremat.loop.parameters import in_host
from fxremat.planner.context.context_bytes import Caller
from fxremat.progress import LOG
from fxremat.ranks.peers import Peers
from fxremat.regions.warnings import NOT_CAPTURED
from fxremat.runtime import cuda_graph
from fxremat.runtime.host_parameter import parameter_of
from fxremat.runtime.steps import Step, latest_step
from fxremat.training.training import PACKAGE, DryRunFinished, Training

_NO_SETTINGS: Mapping[str, object] = MappingProxyType({})


def compile_graph(
    training: Training, module: fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    """Plan one graph captured by Dynamo, and return the callable that runs it as planned.

    Args:
        training: the training of the model, which plans the graph.
        module: the graph.
        example_inputs: the inputs of the graph in the call during which Dynamo captured it.

    Raises:
        CaptureError: a CUDA graph is being captured, or the graph cannot be planned.
        FxrematError: see :func:`fxremat.compile`.
    """
    cuda_graph.refuse_planning()
    module = torch_compat.inline_regions(module)
    broken = _noted_break(training, module)
    if not training.regions.several:
        training.loop.watcher.end()
    reference = training.reference()
    given = [example_inputs]  # emptied below: AOTAutograd keeps these closures alive
    place: int | None = None  # the index of the graph in ``training.graphs``

    def partition(
        joint: fx.GraphModule, _joint_inputs: object, *, num_fwd_outputs: int, **_kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        nonlocal place
        own = _resolve(reference)
        try:
            places = results_of(joint, num_fwd_outputs)
            graph = _planned_graph(own, joint, given[0], num_fwd_outputs)
        except SizesError:
            raise
        except Exception as error:
            to_raise = own.capture_error(error)
            if to_raise is error:
                raise  # an error must not be its own cause
            raise to_raise from error
        place = next(i for i, each in enumerate(own.graphs) if each is graph)
        if broken is not None:
            own.regions.warnings.note_break(broken)
        whole = tuple(range(graph.signature.primal_count))
        graph.calls.returned = () if places == whole else places
        return torch_compat.stub_graphs(joint, forward_output_count=num_fwd_outputs, places=places)

    def compile_forward(_stub: object, _inputs: object) -> Callable[..., Any]:
        torch_compat.allow_retained_graphs()
        assert place is not None  # the partition is made first
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
            return _unplanned(training, error, module, example_inputs)
    except BaseException as error:
        if not torch_compat.may_capture_again(error):
            training.regions.graph_raised()
        raise
    finally:
        given.clear()
    return run if place is None else backward_checked(run)


def _unplanned(
    training: Training, error: CaptureError, module: fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    """Return a callable that runs a graph without a plan, if the model may run so; else raise.

    Args:
        training: the training of the model.
        error: the reason why the graph cannot be planned.
        module: the graph.
        example_inputs: the inputs of the graph.

    Raises:
        CaptureError: ``error``, if the graph must not run without a plan.
    """
    if isinstance(error, SizesError):
        if not training.regions.several:
            raise error
        training.fixed_sizes = True
        LOG.info("a graph runs unchanged: %s", error)
        return module
    if not training.may_run_unplanned or torch_compat.may_capture_again(error):
        raise error
    training.regions.warnings.warn_not_planned(error)
    return torch_compat.as_it_is(module, example_inputs)


def _noted_break(training: Training, module: object) -> str | None:
    """Return the result of :func:`_graph_break`, or ``None`` with ``regions="one"``.

    If it is a reason, ``training.regions.several`` becomes true.

    Raises:
        CaptureError: an option that needs a single graph was given.
    """
    broken = None if training.options.fullgraph else _graph_break(training, module)
    if broken is not None:
        training.refuse_single_graph_options(broken)
        training.regions.several = True
    return broken


def _graph_break(training: Training, module: object) -> str | None:
    """Return why a graph is only a part of the model, or ``None`` if it may be the whole model.

    The reason is text for messages: the user's line at which the graph ends, and what ends it.
    """
    ended = torch_compat.break_of(module)
    line, inside = torch_compat.caller_of_captured(PACKAGE)
    # torch.compile does not report calls of the model: the first graph may be all of it then.
    first = training.regions.called or not any(training.loop.in_flight)
    if ended is not None or (first and not inside):
        return ended
    return f"{line or 'its caller'}: what is called there {NOT_CAPTURED}"


def _planned_graph(
    training: Training, joint: fx.GraphModule, example_inputs: Sequence[Any], output_count: int
) -> Graph:
    """Return a joint graph as a :class:`Graph` that is planned for the call that captured it.

    The processes that train together choose the plan together for first graphs, and for graphs with
    collectives. The graph is appended to ``training.graphs``.

    Args:
        training: the training of the model.
        joint: the joint forward and backward graph.
        example_inputs: the inputs of the graph in that call.
        output_count: the number of outputs of ``joint`` that belong to the forward.
    """
    regions, peers = training.regions, training.loop.peers
    together = any(map(torch_compat.is_shared, joint.graph.nodes))
    if regions.several:
        together |= any(graph.has_collectives for graph in training.graphs)
    is_first = not training.graphs or (regions.several and regions.steps < 2)
    if peers is None or not (together or is_first):
        return _graph_of(training, joint, example_inputs, output_count, None)
    with peers.reporting_failures():
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
    """Return a joint graph as a planned :class:`Graph`, or an equal one that was planned before.

    With ``peers`` all of these processes plan it together. See :func:`_planned_graph`.
    """
    inputs, options, loop = _real_inputs(joint, example_inputs), training.options, training.loop
    made = torch_compat.differentiated_primals(joint, forward_output_count=output_count)
    gradients = [inputs[primal] for primal in made if primal in inputs]
    leaves = (own for own in map(parameter_of, gradients) if own is not None)
    training.differentiated.update((id(own), weakref.ref(own)) for own in leaves)
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
                policy=options.policy,
            ),
            places=_places(inputs, loop.call.arguments()),
            store=training.store,
            fused=options.fused,
            peers=peers,
            model=training.model_name,
            from_data=several,
            may_break=_may_break(training),
        )
        model = loop.model()
        graph.parameters_in_host = () if model is None else in_host(model)
        same = (own for own in training.graphs if own.is_same(graph))
        cached = next(same, None) if several and peers is None else None
        if cached is not None:  # Dynamo's guards have failed, but the graph is the same
            training.note_recapture(torch_compat.compiled_now())
            return cached
        compiled = plan_first_call(loop, training.regions, graph, inputs, kept=training.saved_plan)
    training.graphs.append(graph)
    training.regions.captured = True
    training.latest = graph, compiled
    return graph


def _may_break(training: Training) -> bool:
    """Return whether Dynamo captures the model in several graphs if one is refused."""
    if training.options.fullgraph or training.owner is not None:
        return False
    return not training.regions.several or torch_compat.may_capture_again(CaptureError())


def _caller(training: Training, gradients: list[torch.Tensor]) -> Caller:
    """Return the bytes that the training loop holds around a call of the graph being captured.

    The memory of the loss is known for the outputs of the first graph. For later graphs of the
    whole model it is scaled by the bytes of their outputs.

    Args:
        training: the training that captures the graph.
        gradients: the tensors that the graph computes a gradient of.
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


def _resolve(reference: Callable[[], Training | None]) -> Training:
    """Return the training that a weak reference refers to; it exists while its model is called."""
    training = reference()
    assert training is not None
    return training


def _forward(
    reference: Callable[[], Training | None], place: int, ended_by: str
) -> Callable[..., Any]:
    """Return the callable that Dynamo calls as the forward of one graph: it runs the graph's plan.

    Args:
        reference: returns the training, or ``None`` once it is collected.
        place: the index of the graph in ``training.graphs``.
        ended_by: the user's line at which the graph ends, and what ends it; empty if unknown.
    """

    def forward(args: list[Any]) -> Any:
        training = _resolve(reference)
        if training.dry_run:
            raise DryRunFinished
        graph = training.graphs[place]
        try:
            step, run = begin(training.loop, training.regions, graph, args, ended_by=ended_by)
            if graph.calls.on_cuda:
                with torch_compat.without_autotuning():
                    results = list(run(args))
            else:  # no kernels are tuned on a CPU
                results = run(args)  # type: ignore[assignment]
        except BaseException as error:
            training.regions.graph_raised()
            abandon(args, error)
            raise
        training.latest = graph, step.plan
        return end_forward(step, results)

    return torch_compat.boxed(forward)


def _backward(args: list[Any]) -> Sequence[Any]:
    """Run the planned backward of a step, whose token is ``args[0]``, and return the gradients."""
    return run_backward(Step.of(args[0]), args)


def _inference(
    reference: Callable[[], Training | None], graph: fx.GraphModule
) -> Callable[..., Any]:
    """Return a callable that runs a graph without a backward; such a graph is not planned."""

    def run(args: list[Any]) -> Any:
        if _resolve(reference).dry_run:
            raise DryRunFinished
        values, args[:] = tuple(args), []
        return graph(*values)

    return torch_compat.boxed(run)


@dataclass(eq=False)
class _StepHolder:
    """An object that the autograd graph of a step holds, so that the step lives as long as it."""

    step: object


def backward_checked(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run``, a compiled forward, with :func:`check_backward` before its backward."""

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
        # Saved-tensor hooks may replace the step's token: then the autograd graph keeps the step.
        holder = _StepHolder(step if step.elsewhere else None)
        check = functools.partial(check_backward, settings=settings, _held=holder)
        torch_compat.before_backward(outputs, check)
        watcher.until_gone(holder, step)
        return outputs

    return call


def check_backward(
    _gradients: object, *, settings: Mapping[str, object] = _NO_SETTINGS, _held: object = None
) -> None:
    """Raise ``BackwardError`` if the backward that begins would compute wrong gradients.

    Args:
        settings: the kernel settings during its forward, by name; empty if nothing is recomputed.
        _held: an object that has to live as long as the backward may run.

    Raises:
        BackwardError: the gradients are to be differentiated, or other kernels would recompute
            what the forward computed.
    """
    if torch.is_grad_enabled():  # only with create_graph=True
        raise BackwardError(
            "the backward of a compiled step was requested with create_graph=True, but its "
            "gradients cannot be differentiated again. Call backward() without create_graph, or "
            "use the original model for this step",
            code="FXR703",
        )
    if not settings:
        return
    now = torch_compat.kernel_settings()
    changed = [name for name, value in settings.items() if now[name] != value]
    if changed:
        listed = ", ".join(f"{name} was {settings[name]} and is {now[name]}" for name in changed)
        raise BackwardError(
            f"between the forward and the backward of a compiled step settings changed: {listed}. "
            "Recomputed results would not be the same. Set them around both",
            code="FXR704",
        )


def _real_inputs(
    joint: fx.GraphModule, example_inputs: Sequence[Any]
) -> Mapping[int, torch.Tensor]:
    """Return the inputs (primals) of the joint graph that are tensors with data, by index."""
    values: dict[int, torch.Tensor] = {}
    for primal, value in enumerate(torch_compat.primal_values(joint, example_inputs)):
        if isinstance(value, torch.Tensor) and not torch_compat.is_fake(value):
            values[primal] = value
    return values


def _places(
    inputs: Mapping[int, torch.Tensor], arguments: Sequence[tuple[str, torch.Tensor]]
) -> dict[int, str]:
    """Return the place, such as ``args[0]``, of each primal that is an argument of the call."""
    place = {id(tensor): name for name, tensor in reversed(arguments)}
    return {i: place[id(tensor)] for i, tensor in inputs.items() if id(tensor) in place}
