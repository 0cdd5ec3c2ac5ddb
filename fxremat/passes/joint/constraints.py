"""Constraints on what a plan does with the results of single operations: a policy's, or a tag's.

A constraint is kept with the node, in its metadata, so that passes carry it along and none needs to
know of it. Read it with :func:`constrained_storages`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.errors import ArgumentError
from fxremat.passes.joint.graph import JointGraph, is_getitem, runs_once, tensors_of, values_of

Answer = Literal["keep", "recompute", "offload"]
"""``"keep"`` saves the results that the backward reads, and never recomputes them; ``"recompute"``
does not save them from forward to backward; ``"offload"`` saves them in host memory.
"""

By = Literal["policy", "tag"]
"""Who decides: the policy that was given, or a tag of selective checkpointing in the model."""

CONSTRAINT = "fxremat_constraint"
"""The key of a node's metadata."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A forward operation, as passed to a policy.

    Attributes:
        name: its name in the captured graph, such as ``"addmm_3"``.
        target: the operator, such as ``torch.ops.aten.addmm.default``. With
            ``executor="inductor"`` operators are decomposed as Inductor decomposes them.
        module: path of the module that runs it, such as ``"layers.0.mlp"``; empty if the graph does
            not have it.
        shape, dtype: shape and dtype of its result, or of its first result, at the sizes of the
            capture.
        nbytes: total size of its results in bytes, at the sizes of the capture.
    """

    name: str
    target: Any
    module: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


Policy = Callable[[Operation], Answer | None]
"""A function that is called once for each forward operation of a captured graph; ``None`` leaves
the decision to the planner.
"""


@dataclass(frozen=True, slots=True)
class Constraint:
    """What every plan must do with the results of an operation.

    Attributes:
        answer: to keep, recompute or offload them.
        by: who decides so: the policy, or a tag in the model.
        operation: the name of the operation in the captured graph.
    """

    answer: Answer
    by: By
    operation: str


def constrain(module: fx.GraphModule, policy: Policy | None, *, travels: bool) -> None:
    """Set a :class:`Constraint` on each forward operation that a policy or a tag decides about.

    The policy's answer takes precedence over a tag. The policy is not asked about operations whose
    results are views of their inputs: nothing is saved for them.

    Args:
        module: the captured graph, at the sizes of the capture. The metadata of its nodes changes.
        policy: is called once for each operation; ``None``: only tags count.
        travels: whether storages may be offloaded to host memory.

    Raises:
        ArgumentError: the policy fails, or returns something else than an :data:`Answer` or
            ``None``; an operation is to be offloaded though ``travels`` is false, or to be
            recomputed though a second run may give other bits.
    """
    if policy is None and not any(map(torch_compat.checkpoint_tag, module.graph.nodes)):
        return
    for node, made in _forward_operations(module.graph):
        asked = _operation(node, made)
        answer = _answer(policy, asked) if policy is not None else None
        tag = torch_compat.checkpoint_tag(node)
        if answer is not None:
            constraint = Constraint(answer, "policy", node.name)
        elif tag is not None:
            constraint = Constraint(tag, "tag", node.name)
        else:
            continue
        _check(constraint, asked, node, travels=travels)
        for own in (node, *values_of(node)):
            own.meta[CONSTRAINT] = constraint


def unconstrained(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a captured graph without constraints: the planner decides everything."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    graph.output_node().meta = dict(module.graph.output_node().meta)
    for node in graph.nodes:
        node.meta.pop(CONSTRAINT, None)
    return torch_compat.graph_module(module, graph)


def constraint_of(node: fx.Node) -> Constraint | None:
    """Return the :class:`Constraint` of ``node``; ``None`` if the planner decides about it."""
    constraint: Constraint | None = node.meta.get(CONSTRAINT)
    return constraint


def constrained_storages(joint: JointGraph, *answers: Answer) -> frozenset[int]:
    """Return ids of storages that forward operations constrained to one of ``answers`` allocate."""
    storages: set[int] = set()
    for node in joint.forward:
        own = constraint_of(node)
        if own is not None and own.answer in answers:
            read = () if is_getitem(node) else node.all_input_nodes
            storages |= frozenset(joint.storages.of_node[node]) - joint.storages.of(read)
    return frozenset(storages)


def may_run_again(node: fx.Node) -> bool:
    """Return whether no constraint forbids to recompute ``node``, by keeping or offloading it."""
    constraint = constraint_of(node)
    return constraint is None or constraint.answer == "recompute"


def describe(module: fx.GraphModule) -> tuple[str, ...]:
    """Return a text such as ``mm_1 keep`` for each constrained operation, to compare graphs by."""
    marked = ((node, constraint_of(node)) for node in module.graph.nodes if not is_getitem(node))
    return tuple(f"{node.name} {own.answer}" for node, own in marked if own is not None)


def _forward_operations(graph: fx.Graph) -> Iterator[tuple[fx.Node, list[torch.Tensor]]]:
    """Yield each forward operation that allocates memory, with its results that are not views.

    Nodes without a traced value are left out: the pass that builds the graph refuses them.
    """
    backward: set[fx.Node] = set()
    for node in graph.nodes:
        late = torch_compat.is_backward_node(node) or not backward.isdisjoint(node.all_input_nodes)
        if late or torch_compat.is_tangent(node):
            backward.add(node)
        elif node.op == "call_function" and not is_getitem(node):
            if not all("val" in own.meta for own in (node, *node.all_input_nodes)):
                continue
            read = {
                torch_compat.storage_key(t) for n in node.all_input_nodes for t in tensors_of(n)
            }
            made = [t for t in tensors_of(node) if torch_compat.storage_key(t) not in read]
            if made:
                yield node, made


def _operation(node: fx.Node, made: list[torch.Tensor]) -> Operation:
    return Operation(
        node.name,
        node.target,
        torch_compat.module_path(node),
        tuple(int(size) for size in made[0].shape),
        made[0].dtype,
        sum(int(t.numel()) * t.element_size() for t in made),
    )


def _answer(policy: Policy, asked: Operation) -> Answer | None:
    try:
        answer: object = policy(asked)
    except Exception as error:
        raise ArgumentError(
            f"policy= failed for {_named(asked)}: {type(error).__name__}: {error}",
            argument="policy",
            value=policy,
            code="FXR406",
        ) from error
    if answer is not None and answer not in get_args(Answer):
        raise ArgumentError(
            f"policy= returned {answer!r} for {_named(asked)}, but must return 'keep', "
            "'recompute', 'offload', or None to let the planner decide",
            argument="policy",
            value=answer,
            code="FXR406",
        )
    return answer  # type: ignore[return-value]


def _check(constraint: Constraint, asked: Operation, node: fx.Node, *, travels: bool) -> None:
    """Raise ``ArgumentError`` if no plan can meet a constraint of ``node``.

    Args:
        constraint: the constraint.
        asked: ``node`` as it was passed to the policy; it is named in the error.
        node: the operation.
        travels: whether storages may be offloaded to host memory.
    """
    who = "policy=" if constraint.by == "policy" else "a tag of selective checkpointing"
    if constraint.answer == "offload" and not travels:
        raise ArgumentError(
            f"{who} offloads {_named(asked)}, but offload=False: pass offload='auto'",
            argument="policy",
            value=constraint.answer,
            code="FXR406",
        )
    if constraint.answer == "recompute" and runs_once(node):
        raise ArgumentError(
            f"{who} recomputes {_named(asked)}, which must run once, because it has an effect "
            "or may give other bits the second time: keep it, or let the planner decide",
            argument="policy",
            value=constraint.answer,
            code="FXR406",
        )


def _named(asked: Operation) -> str:
    place = f" in {asked.module}" if asked.module else ""
    return f"{asked.name} ({asked.target}){place}"
