"""Make an operation of each launch of a Triton kernel of the user.

torch's operator for a launch copies the tensors that the kernel writes to, and returns the copies
by the names of arguments. It refers to the kernel by its index in a table of the process, which has
no meaning in another process. Here such a node calls a
:class:`fxremat.runtime.user_kernels.Launch`, which is named after the kernel and returns tensors in
order.
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

FIRST_ARGUMENT = 2
"""Index of the first argument of the kernel among those of a launch.

The grid, and how descriptors are made, precede it."""


def with_launches(module: fx.GraphModule) -> fx.GraphModule:
    """Return a joint graph in which each launch of a user's Triton kernel is a ``Launch`` node.

    Args:
        module: the joint graph; it is not changed.

    Ensures: an operation with several results returns them in order; one with a single result
        returns that.

    Returns ``module`` itself where it launches nothing.
    """
    if not any(map(torch_compat.user_launch, module.graph.nodes)):
        return module
    graph = copy_of(module.graph)
    for node in list(graph.nodes):
        traced = torch_compat.user_launch(node)
        if traced is not None:
            _replace(node, traced)
    graph.lint()
    return torch_compat.graph_module(module, graph)


def _replace(node: fx.Node, traced: torch_compat.UserLaunch) -> None:
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
    """Return the ``Launch`` that runs a traced launch; equal launches are one object."""
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
    """Return whether ``node`` launches a kernel that Triton autotunes at its first launch."""
    return isinstance(node.target, Launch) and node.target.tuned


@dataclass(frozen=True, slots=True)
class _Elements:
    """What a factory function, such as ``torch.full``, sets the elements of its tensor to.

    With neither attribute, it does not set them.

    Attributes:
        number: a number that is always the same.
        argument: the index of the argument that is the number.
    """

    number: int | None = None
    argument: int | None = None


_FACTORIES: Mapping[Any, _Elements] = {
    aten.empty.memory_format: _Elements(),
    aten.empty_like.default: _Elements(),
    aten.empty_strided.default: _Elements(),
    aten.new_empty.default: _Elements(),
    aten.new_empty_strided.default: _Elements(),
    aten.zeros.default: _Elements(number=0),
    aten.zeros_like.default: _Elements(number=0),
    aten.new_zeros.default: _Elements(number=0),
    aten.ones.default: _Elements(number=1),
    aten.ones_like.default: _Elements(number=1),
    aten.new_ones.default: _Elements(number=1),
    aten.full.default: _Elements(argument=1),
    aten.full_like.default: _Elements(argument=1),
    aten.new_full.default: _Elements(argument=2),
}


def make_results_inside(graph: fx.Graph) -> None:
    """Make launches allocate the tensors that kernels write to, where nothing else reads them.

    A user allocates a tensor for the kernel to write to, and torch's operator copies it, so that
    both exist while the kernel runs. ``graph`` is changed.

    Requires: no size is a symbol of torch.
    Ensures: bits stay the same, except of elements that neither the user nor the kernel sets.
    """
    for node in graph.nodes:
        if isinstance(node.target, Launch):
            made = dict(_arguments_to_make(node, node.target))
            if made:
                names = [node.target.names[index - FIRST_ARGUMENT] for index in made]
                node.args = tuple(made.get(index, arg) for index, arg in enumerate(node.args))
                node.target = node.target.making(names)


def _arguments_to_make(node: fx.Node, launch: Launch) -> Iterator[tuple[int, Any]]:
    """Yield the index of each argument that the launch ``node`` can allocate itself, and how.

    The second item is shape, strides, dtype, and the number that all elements are set to (``None``:
    they are not set).
    """
    shapes = [(layout.shape, layout.stride) for layout in layouts_of(node)]
    results = dict(zip(launch.written, shapes, strict=True))
    arguments: Any = node.args
    nodes = [a for a in arguments if isinstance(a, fx.Node)]
    elements = {n: own for n in nodes if (own := _elements_of(n)) and [*n.users] == [node]}
    devices = {t.device for n in nodes if n not in elements for t in tensors_of(n)}
    for index, argument in enumerate(arguments):
        name = launch.names[index - FIRST_ARGUMENT] if index >= FIRST_ARGUMENT else ""
        if name not in results or argument not in elements or nodes.count(argument) > 1:
            continue
        (before,), after, tensor = layouts_of(argument), results[name], argument.meta["val"]
        if devices == {tensor.device} and (before.shape, before.stride) == after:
            yield index, (*after, tensor.dtype, elements[argument][0])


def _elements_of(node: fx.Node) -> tuple[Any] | None:
    """Return ``(number,)`` if ``node`` calls a factory function, such as ``zeros``.

    The number is what all elements of the tensor are set to; ``None`` where they are not set.
    Returns ``None``, and no tuple, for other nodes, and where the number is not a constant.
    """
    if node.op != "call_function" or not is_tensor(node) or node.target not in _FACTORIES:
        return None
    filled = _FACTORIES[node.target]
    if filled.argument is None:
        return (filled.number,)
    number = node.args[filled.argument]
    return (number,) if isinstance(number, (bool, int, float)) else None
