"""Graphs of torch.fx: the code that runs them, and properties of their operations."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.graph import _BoxedCodeGen

from fxremat.torch_compat.collectives import is_collective

BoxedCallable = Callable[[list[Any]], Sequence[Any]]


def boxed(function: BoxedCallable) -> BoxedCallable:
    """Mark ``function`` as taking its arguments in one list, which it may empty, and return it."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def boxed_code(graph: fx.Graph) -> None:
    """Make the code generated for ``graph`` take its arguments in one list, which it empties."""
    graph.set_codegen(_Code())


class _Code(_BoxedCodeGen):
    """Generates code that takes its arguments by one assignment, and names operators globally.

    In a step of small operations, looking up an operator takes noticeable time: four lookups and a
    Python function.
    """

    def _gen_python_code(self, *args: Any, **kwargs: Any) -> Any:
        made: Any = super()._gen_python_code(*args, **kwargs)

        def called(match: re.Match[str]) -> str:
            packet = getattr(getattr(torch.ops, match[1]), match[2])
            operator = getattr(packet, match[3])
            if type(operator) is not torch._ops.OpOverload:
                return match[0]
            name = "__".join(match.groups())  # no node has such a name
            made.globals[name] = operator._op
            return f"{name}("

        made.src = _TAKES.sub(_taken_at_once, _OPERATOR.sub(called, made.src))
        return made


_OPERATOR = re.compile(r"(?<![\w.])torch\.ops\.(\w+)\.(\w+)\.(\w+)\(")

_TAKES = re.compile(r"    args_iter = iter\(args_list\)\n((?:    \w+ = next\(args_iter\)\n)+)")


def _taken_at_once(match: re.Match[str]) -> str:
    names = ", ".join(line.split(" = ")[0].strip() for line in match[1].splitlines())
    return f"    [{names}] = args_list\n"


def graph_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Return a module that runs ``graph``, whose code is generated on first use."""
    from torch.fx._lazy_graph_module import (  # noqa: PLC0415
        _make_graph_module,
        _use_lazy_graph_module,
    )

    with _use_lazy_graph_module(True):
        made: fx.GraphModule = _make_graph_module(root, graph)
    return made


def is_clone(node: fx.Node) -> bool:
    """Return whether ``node`` copies its argument."""
    return node.target is torch.ops.aten.clone.default


def objects_of(node: fx.Node) -> list[Any]:
    """Return the attributes of its module that ``node`` reads and that are no tensors.

    These are graphs that it runs, functions, or objects of user-defined classes.
    """
    module = node.graph.owning_module
    if node.op != "call_function" or module is None:
        return []
    read = (n for n in node.all_input_nodes if n.op == "get_attr")
    values = (operator.attrgetter(str(n.target))(module) for n in read)
    return [value for value in values if not isinstance(value, torch.Tensor)]


def draws_random_numbers(node: fx.Node) -> bool:
    """Return whether running ``node`` advances a random generator."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        graphs = [g for g in objects_of(node) if isinstance(g, fx.GraphModule)]
        graphs += getattr(target, "graphs", ())
        return any(draws_random_numbers(inner) for graph in graphs for inner in graph.graph.nodes)
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    # Fused attention has the tag, but draws nothing without dropout.
    arguments = _named_arguments(node, target)
    probability = arguments.get("dropout_p", arguments.get("dropout", arguments.get("p")))
    if isinstance(probability, (int, float)) and probability == 0.0:
        return False
    return arguments.get("train") is not False


def _named_arguments(node: fx.Node, target: torch._ops.OpOverload) -> dict[str, Any]:
    schema = target._schema.arguments
    named = {a.name: a.default_value for a in schema if a.has_default_value()}
    named.update({a.name: value for a, value in zip(schema, node.args, strict=False)})
    named.update(node.kwargs)
    return named


PART = "a part"
"""Replaces an integer that may differ between processes."""

_PLACES = ("start", "end", "index", "storage_offset")
"""Arguments that say which part of a tensor is taken."""

_NUMBERS = ("Tensor", "Optional[Tensor]", "number", "Optional[number]")
"""Types of arguments that an operation computes with."""


def without_parts(node: fx.Node, arguments: Any) -> Any:
    """Return ``arguments`` of ``node`` with :data:`PART` in place of some integers.

    These may differ between processes: they are numbers that it computes with, or that say which
    part of a tensor is taken. ``arguments`` are a tuple, or a dictionary by name.
    """

    def replaced(value: object) -> object:
        return PART if type(value) is int else value

    if node.target is operator.getitem and not isinstance(arguments, dict):
        return tuple(map(replaced, arguments))
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or is_collective(node):
        return arguments
    formal = target._schema.arguments
    if isinstance(arguments, dict):
        parts = {a.name for a in formal if _is_part(a)}
        return {name: replaced(v) if name in parts else v for name, v in arguments.items()}
    pairs = zip(formal, arguments, strict=False)
    return tuple(replaced(value) if _is_part(a) else value for a, value in pairs)


def _is_part(argument: Any) -> bool:
    return argument.name in _PLACES or str(argument.type) in _NUMBERS
