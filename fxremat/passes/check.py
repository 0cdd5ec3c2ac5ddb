"""Check a graph between two passes: what holds at any time, and the contract of each pass.

``FXREMAT_CHECK=1`` in the environment has every pass checked. Tests always check.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from torch import fx

from fxremat import torch_compat
from fxremat.errors import FxrematError, GraphError, message_of
from fxremat.passes.conditions import Violations, described_layout, results_of, sizes_are_numbers
from fxremat.passes.contract import Condition, Pass, PassConfig, Violation, statement_of
from fxremat.passes.joint import rng
from fxremat.passes.joint.graph import build_storage_table, tensors_of
from fxremat.passes.joint.sizes import LAYOUTS, Layout, layout_of, layouts_of
from fxremat.passes.step_graph import StepGraph

VARIABLE = "FXREMAT_CHECK"
"""Environment variable: 1 has every pass checked."""

MOST_SHOWN = 3
"""Violations that an error lists."""


def is_wanted() -> bool:
    """Return whether passes are to be checked: ``FXREMAT_CHECK=1`` is in the environment."""
    return os.environ.get(VARIABLE) == "1"


def run_checked(entry: Pass, graph: StepGraph, *, config: PassConfig) -> StepGraph:
    """Run a pass on ``graph``, check its contract, and return the graph that it made.

    Raises:
        GraphError: the contract is violated; the error names the nodes.
        FxrematError: as the pass raises it.
    """
    _raise_first("it requires that", entry.requires, graph, before=graph, config=config)
    fingerprint = _fingerprint(graph)
    try:
        made = entry.run(graph, config=config)
    except FxrematError as error:
        if isinstance(error, (GraphError, *entry.raises)):
            raise
        raise GraphError(
            f"it raised {type(error).__name__}, which its contract does not list: "
            f"{message_of(error)}",
            code="FXR621",
        ) from error
    if made is not graph:
        _check_unchanged(graph, fingerprint)
        _raise_first("every pass ensures that", INVARIANTS, made, before=graph, config=config)
    _raise_first("it ensures that", entry.ensures, made, before=graph, config=config)
    return made


def _raise_first(
    who: str,
    conditions: Iterable[Condition],
    graph: StepGraph,
    *,
    before: StepGraph,
    config: PassConfig,
) -> None:
    """Raise ``GraphError`` for the first of ``conditions`` that ``graph`` violates.

    Args:
        who: begins the message, such as ``"it ensures that"``.
        conditions: conditions of the contract.
        graph: the graph that is checked.
        before: the graph that the pass was given.
        config: what passes are given besides the graph.
    """
    for condition in conditions:
        violations = list(condition(graph, before=before, config=config))
        if violations:
            shown = "; ".join(map(_described, violations[:MOST_SHOWN]))
            more = len(violations) - MOST_SHOWN
            rest = f" (and {more} more)" if more > 0 else ""
            statement = statement_of(condition)
            raise GraphError(
                f"{who} {statement[0].lower()}{statement[1:]}, but {shown}{rest}", code="FXR621"
            )


def _described(violation: Violation) -> str:
    node, problem = violation
    target = f" ({node.target})" if node.op == "call_function" else ""
    return f"node {node.name}{target} {problem}"


Fingerprint = list[tuple[fx.Node, object, object, object]]
"""The nodes of a graph, and what they compute, as objects that fx replaces with every change."""


def _fingerprint(graph: StepGraph) -> Fingerprint:
    return [(n, n.target, n.args, n.kwargs) for n in graph.nodes]


def _check_unchanged(graph: StepGraph, before: Fingerprint) -> None:
    """Raise ``GraphError`` if a pass has changed ``graph``, which it was given.

    Args:
        graph: the graph.
        before: its fingerprint before the pass.
    """
    after = _fingerprint(graph)
    if len(before) != len(after):
        raise GraphError(
            f"it changed the graph that it was given, which had {len(before)} nodes and has "
            f"{len(after)}: change graph.copied()",
            code="FXR621",
        )
    for (node, *then), (other, *now) in zip(before, after, strict=True):
        if node is not other or any(a is not b for a, b in zip(then, now, strict=True)):
            raise GraphError(
                f"it changed node {node.name} of the graph that it was given: change "
                "graph.copied()",
                code="FXR621",
            )


def nodes_are_in_order(graph: StepGraph, *, before: StepGraph, config: PassConfig) -> Violations:
    """Each node reads nodes of the same graph that precede it.

    Yields the nodes that violate this, each with the problem.
    """
    done: set[fx.Node] = set()
    for node in graph.module.graph.nodes:
        for source in node.all_input_nodes:
            if source not in done:
                yield node, f"reads {source.name}, which does not precede it in the graph"
        done.add(node)


def values_are_described(graph: StepGraph, *, before: StepGraph, config: PassConfig) -> Violations:
    """Each node carries the value of its trace, and layouts that agree with it.

    Yields the nodes that violate this, each with the problem.
    """
    if graph.classified is None:
        return
    for node in graph.nodes:
        if node.op == "output":
            continue
        if "val" not in node.meta:
            yield node, "carries no traced value"
        elif LAYOUTS in node.meta:
            values = [layout_of(t).numbers for t in tensors_of(node)]
            listed = [tuple(map(int, layout.numbers)) for layout in layouts_of(node)]
            if values != listed:
                yield node, f"lies as {values}, and its layouts say {listed}"


def signature_is_kept(graph: StepGraph, *, before: StepGraph, config: PassConfig) -> Violations:
    """Primals, tangents, mutated primals, results and gradients stay, in number and order.

    They are compared with those of ``before``. Yields the nodes that violate this, each with the
    problem.
    """
    output = graph.module.graph.output_node()
    placeholders, others = (
        step.module.graph.find_nodes(op="placeholder") for step in (graph, before)
    )
    for now, then in zip(placeholders, others, strict=False):
        if now.name != then.name:
            yield now, f"is where {then.name} was among the placeholders"
    if len(placeholders) != len(others):
        yield output, f"ends a graph of {len(placeholders)} placeholders, and of {len(others)} then"
    results, earlier = results_of(graph), results_of(before)
    counts = len(results), graph.forward_output_count
    expected = len(earlier), before.forward_output_count
    if counts != expected:
        yield output, f"returns {counts} values, of both and of the forward, and not {expected}"
        return
    if graph.mutated_primals != before.mutated_primals:
        yield (
            output,
            f"returns new values of primals {graph.mutated_primals}, and not of "
            f"{before.mutated_primals}",
        )
    if before.classified is not None:
        for index, (new, old) in enumerate(zip(results, earlier, strict=True)):
            if isinstance(new, fx.Node) != isinstance(old, fx.Node):
                yield output, f"returns {new} as result {index}, and returned {old}"


def inputs_lie_as_before(graph: StepGraph, *, before: StepGraph, config: PassConfig) -> Violations:
    """Placeholders have the shapes, strides and dtypes that they had.

    They are compared with those of ``before``. Yields the nodes that violate this, each with the
    problem.
    """
    if any(sizes_are_numbers(before, before=before, config=config)):
        return
    placeholders, others = (
        step.module.graph.find_nodes(op="placeholder") for step in (graph, before)
    )
    for now, then in zip(placeholders, others, strict=True):
        after, earlier = (list(map(described_layout, tensors_of(n))) for n in (now, then))
        if after != earlier:
            yield now, f"lies as {after}, and lay as {earlier}"


def draws_keep_their_order(
    graph: StepGraph, *, before: StepGraph, config: PassConfig
) -> Violations:
    """Random draws stay, in number and order.

    They are compared with those of ``before``. Yields the nodes that violate this, each with the
    problem.
    """
    draws, others = (
        [(n, op) for n in step.nodes if rng.draws(n) for op in rng.operators_of_draw(n)]
        for step in (graph, before)
    )
    for (now, operator), (then, other) in zip(draws, others, strict=False):
        if operator != other:
            yield now, f"draws where {then.name} drew"
    if len(draws) != len(others):
        last = draws[-1][0] if draws else graph.module.graph.output_node()
        yield last, f"is the last of {len(draws)} random draws; there were {len(others)}"


def forward_precedes_backward(
    graph: StepGraph, *, before: StepGraph, config: PassConfig
) -> Violations:
    """Each operation is of the forward or of the backward, and no forward one reads a backward one.

    Primals, tangents, constants, results and gradients in the classified graph are those of the
    module. Yields the nodes that violate this, each with the problem.
    """
    if graph.classified is None:
        return
    joint = graph.classified
    gradients = {*joint.tangents, *joint.backward}
    listed = {*joint.given, *joint.forward, *gradients}
    for node in graph.nodes:
        if node.op != "output" and node not in listed:
            yield node, "is neither given nor of the forward or backward"
    for node in joint.forward:
        for source in node.all_input_nodes:
            if source in gradients:
                yield node, f"is of the forward, and reads {source.name} of the backward"
    yield from _unlisted(graph)


def _unlisted(graph: StepGraph) -> Violations:
    """Yield nodes whose role in the classified graph differs from that in its module."""
    joint, output = graph.joint, graph.module.graph.output_node()
    placeholders = tuple(graph.module.graph.find_nodes(op="placeholder"))
    if (*joint.primals, *joint.tangents) != placeholders:
        yield placeholders[0], "begins placeholders that are not the primals, then the tangents"
    if (*joint.forward_outputs, *joint.backward_outputs) != results_of(graph):
        yield output, "returns other values than the results, then the gradients"
    mutated = {joint.primals[i] for i in graph.mutated_primals}
    for node in mutated ^ joint.mutated:
        yield node, "is mutated in the graph or in its classified form, not in both"


def storages_are_consistent(
    graph: StepGraph, *, before: StepGraph, config: PassConfig
) -> Violations:
    """Each tensor lies within a storage, which has the bytes that the table says.

    The table is the ``StorageTable`` of the classified graph. Yields the nodes that violate this,
    each with the problem.
    """
    if graph.classified is None:
        return
    table, now = graph.classified.storages, build_storage_table(graph.module.graph)
    for node in graph.nodes:
        for tensor, layout in zip(tensors_of(node), layouts_of(node), strict=True):
            nbytes = _end_bytes(layout, tensor.element_size())
            if nbytes > layout.storage_bytes:
                yield (
                    node,
                    f"ends at byte {nbytes} of a storage of {int(layout.storage_bytes)} bytes",
                )
        listed, actual = table.of_node.get(node, ()), now.of_node[node]
        if listed != actual:
            yield node, f"lies in storages {actual}, and the table says {listed}"
    for storage, (nbytes, listed_bytes) in enumerate(zip(now.nbytes, table.nbytes, strict=False)):
        if nbytes != listed_bytes:
            yield now.owner[storage], f"takes {nbytes} bytes, and the table says {listed_bytes}"


def storages_are_shared_with_what_is_read(
    graph: StepGraph, *, before: StepGraph, config: PassConfig
) -> Violations:
    """Each operation allocates its results, or returns tensors in storages of what it reads.

    Yields the nodes that violate this, each with the problem.
    """
    owners: dict[int, fx.Node] = {}
    described = {node for node in graph.nodes if node.op != "output" and "val" in node.meta}
    for node in graph.nodes:
        if node not in described:
            continue
        read = {
            torch_compat.storage_key(t)
            for n in node.all_input_nodes
            if n in described
            for t in tensors_of(n)
        }
        for tensor in tensors_of(node):
            key = torch_compat.storage_key(tensor)
            owner = owners.setdefault(key, node)
            if owner is not node and key not in read and node.op == "call_function":
                yield node, f"lies in the storage of {owner.name}, and reads nothing in it"


def _end_bytes(layout: Layout, element_bytes: int) -> int:
    """Return the offset in its storage, in bytes, at which the last element of a tensor ends."""
    shape, stride = ([*map(int, numbers)] for numbers in (layout.shape, layout.stride))
    if 0 in shape:
        return 0
    last = layout.offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    return (last + 1) * element_bytes


INVARIANTS: tuple[Condition, ...] = (
    nodes_are_in_order,
    values_are_described,
    signature_is_kept,
    inputs_lie_as_before,
    draws_keep_their_order,
    forward_precedes_backward,
    storages_are_consistent,
    storages_are_shared_with_what_is_read,
)
"""What holds between any two passes."""
