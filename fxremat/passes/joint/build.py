"""Normalize AOTAutograd's joint graph, classify its operations, and verify it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.errors import CaptureError, GraphError, SizesError
from fxremat.passes.joint import batchnorm, rng, user_kernels
from fxremat.passes.joint.constraints import constraint_of
from fxremat.passes.joint.fixed_sizes import is_symbolic
from fxremat.passes.joint.graph import (
    JointGraph,
    backward_nodes,
    build_storage_table,
    is_tensor,
    replace_tensors,
    tensors_of,
    values_of,
)
from fxremat.passes.joint.masks.replace import CanReplace, replace_masks
from fxremat.passes.joint.sizes import Sizes, describe_like

SMALL_BYTES = 512
"""Equal operations are one whatever the lifetime of their result if it takes at most this."""


def build_joint_graph(
    module: fx.GraphModule,
    *,
    forward_output_count: int,
    mutated_primals: Sequence[int],
    exact: bool = True,
    shared: bool = True,
    sizes: Sizes | None = None,
    can_replace: CanReplace | None = None,
) -> JointGraph:
    """Build the joint graph of a step from what AOTAutograd traced.

    Args:
        module: the traced joint graph; it is copied, not changed.
        forward_output_count: how many of its outputs belong to the forward.
        mutated_primals: indices of the primals that the forward mutates.
        exact: compute every value as it was traced. Otherwise inputs of norms may be rebuilt from
            outputs, see :mod:`fxremat.passes.joint.batchnorm`.
        shared: also merge equal operations whose result is large, if it is kept for the backward.
        sizes: the symbols that the graph follows; ``module`` has numbers in their place.
        can_replace: returns whether attention can be called without a mask that follows a rule;
            ``None``: all masks stay.

    Requires: ``module`` is functional, and no size is a symbol of torch
        (:func:`fxremat.passes.joint.fixed_sizes.fix_sizes`).
    Ensures: no ``detach`` is left; equal operations are one; the values of an operation, and waits
        for it, directly follow it; every operation is of the forward or of the backward; no forward
        operation reads a backward one.

    Raises:
        CaptureError: an operation waits for other processes in a way whose cost is unknown.
        SizesError: a size is a symbol.
        GraphError: the graph is not what AOTAutograd promises.
    """
    symbolic = next(filter(is_symbolic, module.graph.nodes), None)
    if symbolic is not None:
        raise SizesError(f"sizes of {symbolic.name} are symbols, but fxremat plans fixed sizes")
    _check_collectives(module.graph)
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    owner = torch_compat.graph_module(module, graph)
    _drop_opaque_gradients(graph, forward_output_count)
    _erase_detach(graph)
    user_kernels.make_results_inside(graph)
    if can_replace is not None:
        replace_masks(graph, sizes or Sizes(), can_replace)
    _gather_operations(graph)
    _eliminate_dead_code(graph)
    batchnorm.drop_running_statistics(graph)
    batchnorm.read_results(graph)
    if not exact:
        batchnorm.rebuild_norm_inputs(graph)
    _keep_old_values(graph, forward_output_count, mutated_primals)
    traced = _classify(owner, forward_output_count, mutated_primals)
    _merge_duplicates(traced, shared=shared)
    _gather_operations(graph)
    forward = frozenset(traced.forward)
    rng.record_states(graph, [node for node in graph.nodes if node in forward])
    _lint(graph)
    joint = _classify(owner, forward_output_count, mutated_primals)
    _verify(joint)
    return replace(joint, sizes=sizes or Sizes())


def rebuilt(joint: JointGraph, module: fx.GraphModule) -> JointGraph:
    """Return the joint graph of ``module``, which a pass made from the graph of ``joint``.

    Args:
        joint: the joint graph before the pass.
        module: the graph after it, with the same inputs and results. Its ``getitem`` nodes, and
            waits for collectives, are moved directly after the operation that they belong to.

    Raises:
        GraphError: the graph is not what :func:`build_joint_graph` ensures.
    """
    _gather_operations(module.graph)
    _lint(module.graph)
    mutated = [i for i, primal in enumerate(joint.primals) if primal in joint.mutated]
    made = _classify(module, len(joint.forward_outputs), mutated)
    _verify(made)
    return replace(made, sizes=joint.sizes)


def _check_collectives(graph: fx.Graph) -> None:
    """Raise ``CaptureError`` for a collective without a local stand-in that can be measured."""
    for node in graph.nodes:
        if torch_compat.is_collective(node) and torch_compat.alone(node.target) is None:
            raise CaptureError(
                f"{node.target} waits for other processes"
                f"{torch_compat.described_lines(node)}\n"
                "fxremat does not know what this collective costs: use one of "
                "torch.distributed._functional_collectives that reduces, gathers, scatters or "
                "exchanges",
                code="FXR306",
            )


def _drop_opaque_gradients(graph: fx.Graph, forward_output_count: int) -> None:
    """Make ``graph`` return ``None`` in place of gradients that are no tensors, such as a mesh.

    The caller of the backward has these objects already.
    """
    output = graph.output_node()
    results = _flat(output.args[0])
    gradients = [
        node if isinstance(node, fx.Node) and is_tensor(node) else None
        for node in results[forward_output_count:]
    ]
    output.args = ((*results[:forward_output_count], *gradients),)  # type: ignore[arg-type]


def _erase_detach(graph: fx.Graph) -> None:
    """Erase each ``detach``; what read its result reads its input instead.

    So both tensors are in one stage.
    """
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _gather_operations(graph: fx.Graph) -> None:
    """Move the ``getitem`` nodes of an operation, and waits for it, directly after it.

    A wait for a collective returns the result of the collective itself, so its traced value becomes
    a view of that result.
    """
    for node in list(graph.nodes):
        for value in reversed(values_of(node)):
            node.append(value)
    for node in reversed(list(graph.nodes)):
        if torch_compat.is_wait(node):
            collective = torch_compat.awaited(node)
            max([collective, *values_of(collective)]).append(node)
            value = node.all_input_nodes[0].meta["val"]
            node.meta["val"] = value.view_as(value)


def _eliminate_dead_code(graph: fx.Graph) -> None:
    """Erase operations that nothing reads, except those with an effect, such as random draws."""
    for node in reversed(list(graph.nodes)):
        removable = node.op in ("call_function", "get_attr")
        if removable and not node.users and not rng.has_effect(node):
            graph.erase_node(node)


def _keep_old_values(
    graph: fx.Graph, forward_output_count: int, mutated_primals: Sequence[int]
) -> None:
    """Insert a copy of each primal whose old value may be read after the forward has replaced it.

    Two kinds of readers need no copy: operations that only lead to outputs of the forward, which
    run once, and BatchNorms, which are recomputed without their running statistics.
    """
    primals = [n for n in graph.nodes if n.op == "placeholder" and not torch_compat.is_tangent(n)]
    once = _only_for_outputs(graph, forward_output_count)
    for primal in (primals[i] for i in mutated_primals):
        readers = [
            user
            for user in primal.users
            if user.op != "output" and user not in once and not batchnorm.updates_statistics(user)
        ]
        if readers:
            with graph.inserting_after(primals[-1]):
                old = graph.call_function(torch.ops.aten.clone.default, (primal,))
            describe_like(old, primal, primal.meta["val"].clone())
            old.meta["partitioner_tag"] = "is_forward"
            for user in readers:
                user.replace_input_with(primal, old)


def _only_for_outputs(graph: fx.Graph, forward_output_count: int) -> set[fx.Node]:
    """Return outputs of the forward, and nodes that are read only on the way to these."""
    outputs = set(_flat(graph.output_node().args[0])[:forward_output_count])
    once: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in outputs or (node.users and once.issuperset(node.users)):
            once.add(node)
    return once


def _merge_duplicates(joint: JointGraph, *, shared: bool) -> None:
    """Replace equal forward operations, such as a mask for each layer, by the first of them.

    Equal operations give the same bits. They are merged only where that takes no memory: where the
    result is a view, takes at most :data:`SMALL_BYTES`, or, with ``shared``, is kept for the
    backward anyway. The graph of ``joint`` is changed; every tensor in it keeps its bits, and no
    result becomes an alias of another.
    """
    table = joint.storages
    given = table.of(joint.given)
    returned = table.of((*joint.results, *joint.gradients))
    first_of: dict[object, fx.Node] = {}
    moved: dict[int, torch.Tensor] = {}

    def base_of(tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the storage that ``tensor`` is in after all merges so far."""
        while torch_compat.storage_key(tensor) in moved:
            tensor = moved[torch_compat.storage_key(tensor)]
        return tensor

    for node in joint.forward:
        if rng.has_effect(node) or batchnorm.updates_statistics(node):
            continue
        # Arguments are compared as text, so that 1, 1.0 and True, or 0.0 and -0.0, differ.
        call = node.target, repr(node.args), repr(node.kwargs)
        decided = constraint_of(node)
        first = first_of.setdefault((call, decided and decided.answer), node)
        if first is node:
            continue
        storages = frozenset(table.of_node[first]) - given
        free = (
            table.is_view(first)
            or table.total(storages) <= SMALL_BYTES
            or (shared and storages <= joint.saved)
        )
        if free and returned.isdisjoint({*storages, *table.of_node[node]}):
            node.replace_all_uses_with(first)
            joint.module.graph.erase_node(node)
            for erased, kept in zip(tensors_of(node), tensors_of(first), strict=True):
                # A view that stays may be of a tensor that was erased before.
                old, new = base_of(erased), base_of(kept)
                if torch_compat.storage_key(old) != torch_compat.storage_key(new):
                    moved[torch_compat.storage_key(old)] = new

    def in_kept_storage(tensor: torch.Tensor) -> torch.Tensor:
        base = base_of(tensor)
        if base is tensor:
            return tensor
        offset = int(tensor.storage_offset())
        return torch_compat.fake_tensor(
            tensor, base.untyped_storage(), tensor.shape, tensor.stride(), offset
        )

    if moved:
        replace_tensors(joint.module.graph, in_kept_storage)


def _classify(
    module: fx.GraphModule, forward_output_count: int, mutated_primals: Sequence[int]
) -> JointGraph:
    graph = module.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    tangents = tuple(n for n in placeholders if torch_compat.is_tangent(n))
    primals = tuple(n for n in placeholders if n not in tangents)
    outputs = tuple(_flat(graph.output_node().args[0]))
    forward_outputs = outputs[:forward_output_count]
    backward = backward_nodes(graph, tangents, forward_outputs)
    operations = [n for n in graph.nodes if n.op == "call_function"]
    return JointGraph(
        module=module,
        primals=primals,
        tangents=tangents,
        constants=tuple(n for n in graph.nodes if n.op == "get_attr"),
        forward=tuple(n for n in operations if n not in backward),
        backward=tuple(n for n in operations if n in backward),
        forward_outputs=forward_outputs,
        backward_outputs=outputs[forward_output_count:],
        mutated=frozenset(primals[i] for i in mutated_primals),
        storages=build_storage_table(graph),
    )


def _flat(value: object) -> list[object]:
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _flat(item)]
    return [value]


def _lint(graph: fx.Graph) -> None:
    try:
        graph.lint()
    except RuntimeError as error:  # it names the node
        raise GraphError(str(error)) from error


def _verify(joint: JointGraph) -> None:
    backward = {*joint.backward, *joint.tangents}
    for node in joint.forward:
        bad = backward.intersection(node.all_input_nodes)
        if bad:
            raise GraphError(f"forward node {node.name} reads backward node {min(bad, key=str)}")
    for node in (*joint.forward, *joint.backward):
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            raise GraphError(
                f"node {node.name} ({target}) writes into its arguments: "
                "let its operation name them in mutates_args",
                code="FXR622",
            )
    if len(joint.backward_outputs) != len(joint.primals):
        raise GraphError(
            f"{len(joint.backward_outputs)} gradients for {len(joint.primals)} primals"
        )
