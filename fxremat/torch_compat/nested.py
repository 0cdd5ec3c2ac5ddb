"""Higher-order operators: operations that run inner graphs, such as ``torch.cond``.

Private names, checked with torch 2.13: ``torch._ops.HigherOrderOperator``, the operators ``cond``,
``while_loop``, ``invoke_subgraph`` and ``with_effects``, and the order of their arguments;
``_WARNINGS_SHOWN`` and ``_validate_device`` of ``flex_attention``.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx


def is_higher_order(target: object) -> bool:
    """Return whether ``target`` is an operator whose arguments may be graphs."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def has_ordered_effect(target: object) -> bool:
    """Return whether ``target`` is the operator that runs another one with an ordered effect.

    Its arguments are a token, the operator, and the operator's arguments. Its results are a token
    and the operator's results. Tokens order the effects; their values are not read.
    """
    return is_higher_order(target) and getattr(target, "__name__", "") == "with_effects"


def inline_regions(module: fx.GraphModule) -> fx.GraphModule:
    """Return a graph of Dynamo with the bodies of nested compile regions in place of their calls.

    A region is code that is captured once and called several times, as
    ``torch.compiler.nested_compile_region`` marks it. Returns ``module`` itself if it calls none.
    """
    if not any(map(_is_region, module.graph.nodes)):
        return module
    graph = fx.Graph()
    attributes: dict[str, Any] = {}
    graph.output(_copy_inlined(module, graph, {}, attributes))
    for name, value in attributes.items():
        setattr(module, name, value)  # a graph of Dynamo belongs to this capture
    graph.output_node().meta = dict(module.graph.output_node().meta)
    for node in reversed(list(graph.find_nodes(op="get_attr"))):
        if not node.users:
            graph.erase_node(node)
    made = fx.GraphModule(module, graph)
    made.meta = dict(module.meta)
    return made


def _is_region(node: fx.Node) -> bool:
    named = getattr(node.target, "__name__", "")
    return is_higher_order(node.target) and named == "invoke_subgraph"


def _copy_inlined(
    module: fx.GraphModule,
    graph: fx.Graph,
    copies: dict[fx.Node, Any],
    attributes: dict[str, Any],
) -> Any:
    """Copy the nodes of ``module`` to ``graph``, and return what the output of ``module`` is.

    Args:
        module: the graph to copy, whose regions are inlined.
        graph: it is changed.
        copies: the copy of each node; it is changed. Placeholders that it has are not copied.
        attributes: what the copies read as attributes, by the names that they use; it is changed.
    """
    regions: dict[fx.Node, Sequence[Any]] = {}
    for node in module.graph.nodes:
        if node.op == "output":
            return fx.map_arg(node.args[0], copies.__getitem__)
        if node in copies:
            continue
        if _is_region(node):
            body, _identifier, *operands = node.args
            called: Any = operator.attrgetter(str(body.target))(module)
            inner = dict(
                zip(
                    called.graph.find_nodes(op="placeholder"),
                    fx.map_arg(operands, copies.__getitem__),
                    strict=True,
                )
            )
            regions[node] = _copy_inlined(called, graph, inner, attributes)
        elif node.target is operator.getitem and node.args[0] in regions:
            copies[node] = regions[node.args[0]][node.args[1]]
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op in ("get_attr", "call_module"):  # names are unique within a region only
                copies[node].target = f"inlined_{len(attributes)}"
                value = operator.attrgetter(str(node.target))(module)
                attributes[copies[node].target] = value
    raise AssertionError("a graph has no output")


@contextlib.contextmanager
def without_attention_warning() -> Iterator[None]:
    """Keep torch from warning inside that FlexAttention is called without ``torch.compile``.

    Torch warns once in a process, so that a call outside still may.
    """
    module: Any = sys.modules.get("torch.nn.attention.flex_attention")
    shown: set[str] = getattr(module, "_WARNINGS_SHOWN", set())
    hidden = {"flex_attention_performance"} - shown
    shown |= hidden
    try:
        yield
    finally:
        shown -= hidden


@contextlib.contextmanager
def attention_on_any_device(*, wanted: bool) -> Iterator[None]:
    """Let FlexAttention be differentiated on a CPU inside, which torch refuses, for tracing.

    Nothing changes unless this is ``wanted``.
    """
    module: Any = sys.modules.get("torch.nn.attention.flex_attention")
    if not wanted or module is None:
        yield
        return
    with _tracing:
        original = module._validate_device
        module._validate_device = lambda *_tensors: None
        try:
            yield
        finally:
            module._validate_device = original


_tracing = threading.RLock()
"""Held by the thread in which torch does not check on which device FlexAttention runs."""


def with_all_branches(target: Any) -> Callable[..., Any]:
    """Return a function that runs each branch of an operator once, and returns results as it does.

    Which branch of ``cond`` runs, and how often the body of ``while_loop`` runs, depends on data.
    For other operators, the function is the operator.
    """
    name = getattr(target, "__name__", "") if is_higher_order(target) else ""
    run: Callable[..., Any] = _ALL_BRANCHES.get(name, target)
    return run


def _both_branches(
    _predicate: object, true: Callable[..., Any], false: Callable[..., Any], operands: Sequence[Any]
) -> Any:
    true(*operands)
    return false(*operands)


def _two_iterations(
    condition: Callable[..., Any],
    body: Callable[..., Any],
    carried: Sequence[Any],
    constant: Sequence[Any] = (),
) -> Any:
    """Run a loop for two iterations, between which the carried tensors exist twice."""
    for _ in range(2):
        condition(*carried, *constant)
        carried = body(*carried, *constant)
    return tuple(carried)


_ALL_BRANCHES: dict[str, Callable[..., Any]] = {
    "cond": _both_branches,
    "while_loop": _two_iterations,
}
"""By name of an operator: a function with its arguments that runs each of its graphs."""
