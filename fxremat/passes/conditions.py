"""Conditions that passes require and ensure.

Each is a function of a graph, of the graph before the pass, and of what passes are given. It yields
the nodes that violate it; the first line of its docstring states it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.contract import PassConfig, Violation
from fxremat.passes.joint import rng
from fxremat.passes.joint.effects import has_ordered_effect
from fxremat.passes.joint.fixed_sizes import is_symbolic
from fxremat.passes.joint.graph import is_getitem, is_tensor, tensors_of
from fxremat.passes.joint.sparse import makes_sparse
from fxremat.passes.step_graph import StepGraph

Violations = Iterator[Violation]


def results_of(graph: StepGraph) -> Sequence[object]:
    """Return the outputs of ``graph`` as one sequence: results of the forward, then gradients."""
    results: Any = graph.module.graph.output_node().args[0]
    return tuple(_leaves(results))


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def objects_are_in_operations(
    graph: StepGraph, *, before: StepGraph, config: PassConfig
) -> Violations:
    """No operation reads a graph or another object that is no tensor as an attribute of the module.

    Yields the operations that violate this.
    """
    for node in graph.nodes:
        if torch_compat.objects_of(node):
            yield node, "reads an object as an attribute"


def launches_are_operations(
    graph: StepGraph, *, before: StepGraph, config: PassConfig
) -> Violations:
    """Each launch of a user's Triton kernel is an operation that returns its results in order.

    Yields torch's own launches, which name the kernel by a number that is local to the process.
    """
    for node in graph.nodes:
        if torch_compat.user_launch(node) is not None:
            yield node, "is a launch by a number that has no meaning in another process"


def sparse_tensors_are_inputs(
    graph: StepGraph, *, before: StepGraph, config: PassConfig
) -> Violations:
    """No operation returns a sparse tensor, and no output has a sparse gradient.

    Yields the nodes that violate this, each with the problem.
    """
    for node in graph.nodes:
        if makes_sparse(node):
            yield node, "is sparse, so its storages are unknown"


def effects_run_once(graph: StepGraph, *, before: StepGraph, config: PassConfig) -> Violations:
    """Each operator with an ordered effect is an operation that runs exactly once.

    Yields torch's own ones, and those that nothing orders.
    """
    for node in graph.nodes:
        if has_ordered_effect(node):
            yield node, "may run a second time"


def sizes_are_numbers(graph: StepGraph, *, before: StepGraph, config: PassConfig) -> Violations:
    """No size is a symbol of torch.

    Yields the nodes that violate this, each with the problem.
    """
    for node in graph.nodes:
        if is_symbolic(node):
            yield node, "has a size that is a symbol"


def tensors_are_on_target(graph: StepGraph, *, before: StepGraph, config: PassConfig) -> Violations:
    """Each dense tensor is on the device that the step is estimated for.

    Yields the nodes that violate this, each with the problem.
    """
    for node in (n for n in graph.nodes if "val" in n.meta):
        for tensor in tensors_of(node):
            is_placed = config.target is None or tensor.device.type == config.target.type
            if tensor.layout is torch.strided and not is_placed:
                yield node, f"is on {tensor.device}, not on {config.target}"


def operations_are_classified(
    graph: StepGraph, *, before: StepGraph, config: PassConfig
) -> Violations:
    """Each operation is of the forward or of the backward.

    Yields the output node if the pass ``build`` has not run.
    """
    if graph.classified is None:
        yield graph.module.graph.output_node(), "belongs to a graph without classified operations"


def nothing_is_detached(graph: StepGraph, *, before: StepGraph, config: PassConfig) -> Violations:
    """No operation is a detach: the tensor that is detached stands for it.

    Yields each ``detach`` node.
    """
    for node in graph.nodes:
        if node.target is torch.ops.aten.detach.default:
            yield node, "detaches a tensor"


def values_follow(graph: StepGraph, *, before: StepGraph, config: PassConfig) -> Violations:
    """The values of an operation with several directly follow it.

    Yields each ``getitem`` node that does not directly follow the operation whose result it picks.
    """
    last: fx.Node | None = None
    for node in graph.nodes:
        if is_getitem(node):
            if node.all_input_nodes[0] is not last:
                yield node, f"does not follow {node.args[0]}"
        else:
            last = node


def nothing_is_dead(graph: StepGraph, *, before: StepGraph, config: PassConfig) -> Violations:
    """Each operation is read or returned, advances a random generator, or has an ordered effect.

    Yields the nodes that violate this, each with the problem.
    """
    for node in graph.nodes:
        if node.op != "call_function" or is_getitem(node) or rng.has_effect(node):
            continue
        if not any(user.users or not is_getitem(user) for user in node.users):
            yield node, "is read by nothing"


def draws_are_recorded(graph: StepGraph, *, before: StepGraph, config: PassConfig) -> Violations:
    """Each random draw of the forward reads a recorded state of its generator.

    Yields the nodes that violate this, each with the problem.
    """
    for node in graph.joint.forward:
        if rng.draws(node) and not rng.is_draw(node):
            yield node, "draws from a generator whose state is not recorded"


def results_lie_as_before(graph: StepGraph, *, before: StepGraph, config: PassConfig) -> Violations:
    """Results and gradients have the shapes, strides and dtypes that they had.

    They are compared with those of ``before``. Yields the nodes that violate this, each with the
    problem.
    """
    output = graph.module.graph.output_node()
    for now, then in zip(results_of(graph), results_of(before), strict=True):
        if isinstance(now, fx.Node) != isinstance(then, fx.Node):
            yield output, f"returns {now}, and returned {then}"
        elif isinstance(now, fx.Node) and isinstance(then, fx.Node):
            after, earlier = (list(map(described_layout, tensors_of(n))) for n in (now, then))
            if after != earlier:
                yield now, f"is a result that lies as {after}, and lay as {earlier}"


def described_layout(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return dtype, shape and strides at the sizes of the capture, to compare layouts by.

    The stride of a dimension with fewer than two elements says nothing, and is replaced by 0.
    """
    shape = tuple(map(torch_compat.hint_of, tensor.shape))
    if tensor.layout is not torch.strided:
        return tensor.dtype, shape
    stride = tuple(map(torch_compat.hint_of, tensor.stride()))
    counted = tuple(s if n > 1 else 0 for n, s in zip(shape, stride, strict=True))
    return tensor.dtype, shape, counted if 0 not in shape else ()


def stages_hold_operations(
    graph: StepGraph, *, before: StepGraph, config: PassConfig
) -> Violations:
    """Each operation is in one stage, or is a view of a given tensor.

    Yields the nodes that violate this, each with the problem.
    """
    line = graph.line
    where: dict[fx.Node, int] = {}
    for index, stage in enumerate(line.stages):
        for node in (*stage.forward, *stage.backward):
            if node in where:
                yield node, f"is in stages {where[node]} and {index}"
            where[node] = index
            if line.stage_of.get(node) != index:
                yield node, f"is in stage {index}, which the line does not say of it"
    for node in (*line.joint.forward, *line.joint.backward):
        if (node in where) == (node in line.views):
            yield node, "is in no stage" if node not in where else "is a view, and in a stage"


def stages_run_in_order(graph: StepGraph, *, before: StepGraph, config: PassConfig) -> Violations:
    """Forwards in the order of stages, then backwards in the reverse order, read what has run.

    Yields nodes that read what would run later in this order.
    """
    line = graph.line
    done = {*line.joint.given, *line.joint.tangents, *line.views}
    for stage in line.stages:
        for node in stage.forward:
            yield from _unread(node, done)
    for stage in reversed(line.stages):
        for node in stage.backward:
            yield from _unread(node, done)


def _unread(node: fx.Node, done: set[fx.Node]) -> Violations:
    """Yield a violation for each input of ``node`` not in ``done``; then add ``node`` to it."""
    for source in node.all_input_nodes:
        if source not in done:
            yield node, f"reads {source.name}, which runs later"
    done.add(node)


def backwards_have_what_they_read(
    graph: StepGraph, *, before: StepGraph, config: PassConfig
) -> Violations:
    """The saved set, boundary and pinned tensors of a stage hold what its backward reads.

    Yields the nodes that violate this, each with the problem.
    """
    line = graph.line
    shared = {*line.pinned, *line.views, *line.joint.given, *line.joint.tangents}
    shared.update(line.joint.backward)
    for index, stage in enumerate(line.stages):
        held = {*stage.saved, *stage.boundary}
        for node in stage.backward:
            for source in node.all_input_nodes:
                if is_tensor(source) and source not in shared and source not in held:
                    yield node, f"reads {source.name}, which stage {index} does not hold"


def nothing_crosses_the_loss_point(
    graph: StepGraph, *, before: StepGraph, config: PassConfig
) -> Violations:
    """Where the loss is outside of the graph, only pinned tensors cross the last cut.

    The last cut is between the forward and the loss point, a stage without operations. Yields the
    nodes that violate this, each with the problem.
    """
    if graph.line.ends_at_loss_point:
        for node in graph.line.stages[-1].boundary:
            yield node, "crosses the cut before the loss point"
