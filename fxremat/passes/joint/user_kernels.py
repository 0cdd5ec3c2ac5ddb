"""Kernels that a user has written for Triton: one operation for each launch.

torch has an operator for a launch that copies what the kernel writes to, and returns the copies by
the names of arguments. It names the kernel by its place in a table of the process, which means
nothing in another process. Here such a node calls a :class:`fxremat.runtime.user_kernels.Launch`,
whose name says which kernel it is, and which returns tensors in order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint.graph import copy_of, is_tensor, tensors_of, values_of
from fxremat.passes.joint.sizes import layouts_of
from fxremat.runtime.user_kernels import Launch, launch_of

aten = torch.ops.aten

BEFORE = 2
"""Arguments of a launch before those of the kernel: the grid, and how descriptors are made."""


def with_launches(module: fx.GraphModule) -> fx.GraphModule:
    """``module``, a joint graph, in which each launch of a user's kernel is an operation of ours.

    Args:
        module: it is not changed.

    Ensures: an operation with several results returns them in order, one with a single result
        returns that. It is ``module`` itself where it launches nothing.
    """
    if not any(map(torch_compat.user_launch, module.graph.nodes)):
        return module
    graph = copy_of(module.graph)
    for node in list(graph.nodes):
        traced = torch_compat.user_launch(node)
        if traced is not None:
            _take_over(node, traced)
    graph.lint()
    return torch_compat.graph_module(module, graph)


def _take_over(node: fx.Node, traced: torch_compat.UserLaunch) -> None:
    """Let ``node`` call a launch of ours."""
    launch = _launch(traced)
    args: Any = (traced.grid, traced.descriptors, *traced.arguments.values())
    with node.graph.inserting_before(node):
        made = node.graph.create_node("call_function", launch, args, name=launch.kernel)
    made.meta = {key: value for key, value in node.meta.items() if key != "tensor_meta"}
    values = tuple(node.meta["val"][name] for name in traced.written)
    made.meta["val"] = values[0] if len(values) == 1 else values
    for value in values_of(node):
        name: Any = value.args[1]
        if len(values) == 1:
            value.replace_all_uses_with(made)
            node.graph.erase_node(value)
        else:
            value.args = (made, traced.written.index(name))
    node.graph.erase_node(node)


def _launch(traced: torch_compat.UserLaunch) -> Launch:
    """The launch of a kernel that writes to copies of what it is given."""
    name = torch_compat.kernel_name(traced.kernel)
    lines = [torch_compat.kernel_digest(traced.kernel, traced.constants)]
    for argument, value in traced.arguments.items():
        dtypes = [t.dtype for t in tensors_of(value)] if isinstance(value, fx.Node) else []
        lines.append(f"{argument} {dtypes} {argument in traced.written}")
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    shared = launch_of(digest)
    if shared is not None:
        return shared
    return Launch(
        name,
        digest,
        torch_compat.KernelLauncher(traced.kernel, traced.constants),
        tuple(traced.arguments),
        written=traced.written,
        tuned=torch_compat.is_tuned(traced.kernel),
        repeatable=torch_compat.gives_same_bits(traced),
    )


def is_tuned(node: fx.Node) -> bool:
    """Whether ``node`` launches a kernel that Triton tunes when it is first launched."""
    return isinstance(node.target, Launch) and node.target.tuned


def runs_once(node: fx.Node) -> bool:
    """Whether ``node`` launches a kernel that may leave other bits a second time."""
    return isinstance(node.target, Launch) and not node.target.repeatable


@dataclass(frozen=True, slots=True)
class _Filled:
    """How a tensor is made of nothing: which argument its elements are, or what they are."""

    place: int | None = None
    number: int | None = None


_MAKERS: Mapping[Any, _Filled] = {
    aten.empty.memory_format: _Filled(),
    aten.empty_like.default: _Filled(),
    aten.empty_strided.default: _Filled(),
    aten.new_empty.default: _Filled(),
    aten.new_empty_strided.default: _Filled(),
    aten.zeros.default: _Filled(number=0),
    aten.zeros_like.default: _Filled(number=0),
    aten.new_zeros.default: _Filled(number=0),
    aten.ones.default: _Filled(number=1),
    aten.ones_like.default: _Filled(number=1),
    aten.new_ones.default: _Filled(number=1),
    aten.full.default: _Filled(place=1),
    aten.full_like.default: _Filled(place=1),
    aten.new_full.default: _Filled(place=2),
}


def make_results_inside(graph: fx.Graph) -> None:
    """Let launches make the tensors that a kernel writes to, where nothing else reads them.

    A user makes a tensor for the kernel to write to, and torch's operator copies it, so there were
    two for as long as the kernel runs. ``graph`` is changed.

    Requires: a settled graph.
    Ensures: equal bits, but in what a kernel leaves as it was in a tensor of no certain numbers.
    """
    for node in graph.nodes:
        if isinstance(node.target, Launch):
            made = dict(_made(node, node.target))
            if made:
                names = [node.target.names[place - BEFORE] for place in made]
                node.args = tuple(made.get(place, given) for place, given in enumerate(node.args))
                node.target = node.target.making(names)


def _made(node: fx.Node, launch: Launch) -> Iterator[tuple[int, Any]]:
    """Places of arguments that ``node`` can make itself, and how."""
    values = dict(zip(launch.written, _results(node), strict=True))
    arguments: Any = node.args
    given = [a for a in arguments if isinstance(a, fx.Node)]
    makers = {n: made for n in given if (made := _filling(n)) and [*n.users] == [node]}
    devices = {t.device for n in given if n not in makers for t in tensors_of(n)}
    for place, argument in enumerate(arguments):
        name = launch.names[place - BEFORE] if place >= BEFORE else ""
        if name not in values or argument not in makers or given.count(argument) > 1:
            continue
        (before,), after, tensor = layouts_of(argument), values[name], argument.meta["val"]
        if devices == {tensor.device} and (before.shape, before.stride) == after:
            yield place, (*after, tensor.dtype, makers[argument][0])


def _results(node: fx.Node) -> list[tuple[Any, Any]]:
    """Shape and strides of what a launch returns."""
    return [(layout.shape, layout.stride) for layout in layouts_of(node)]


def _filling(node: fx.Node) -> tuple[Any] | None:
    """The number that all elements of a tensor are, ``None`` for any; or ``None``: it is given."""
    how = _MAKERS.get(node.target) if node.op == "call_function" and is_tensor(node) else None
    if how is None:
        return None
    if how.place is None:
        return (how.number,)
    number = node.args[how.place]
    return (number,) if isinstance(number, (bool, int, float)) else None
