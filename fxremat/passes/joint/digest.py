"""Digest traced steps, equally in every process."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint.sizes import LAYOUTS, Following, Layout


@dataclass(frozen=True, slots=True)
class Digests:
    """Digests of a traced step: two traces of the same step have the same, in any process.

    Attributes:
        operations: digest of the operations and their data flow.
        code: digest of the whole trace, with sizes, dtypes, strides, storages, devices, constants
            of operations, and names of nodes, which occur in emitted code. It does not depend on
            values of tensors.
        inputs: dtype and shape of each parameter, buffer and argument.
    """

    operations: str
    code: str
    inputs: tuple[str, ...]


def digest(
    module: fx.GraphModule, *, forward_output_count: int, mutated_primals: Sequence[int]
) -> Digests:
    """Return the digests of a joint graph as AOTAutograd traced it.

    Args:
        module: the joint graph.
        forward_output_count: how many of its outputs belong to the forward.
        mutated_primals: indices of the primals that the forward mutates.
    """
    writer = _Writer()
    lines = [writer.line(node) for node in module.graph.nodes]
    counts = f"{forward_output_count} {sorted(mutated_primals)}"
    inputs = [
        _shape(_value(node))
        for node in module.graph.find_nodes(op="placeholder")
        if not torch_compat.is_tangent(node)
    ]
    return Digests(
        operations=_sum(edges for edges, _ in lines),
        code=_sum([counts, *(whole for _, whole in lines)]),
        inputs=tuple(inputs),
    )


def structure_digest(module: fx.GraphModule) -> str:
    """Return a digest of a graph, and of graphs that it calls, that all shards of a step share.

    The digest depends on sizes, dtypes, strides, storages, dimensions, floats, and all arguments of
    collectives. It does not depend on integers that an operation computes with or that say which
    part of a tensor is taken, nor on names and storage offsets, which follow from them.
    """
    return _sum(_lines(_Writer(parts=False), module))


def _lines(writer: _Writer, module: fx.GraphModule) -> Iterator[str]:
    """Yield the text of each node, and a digest of each graph that one calls."""
    for node in module.graph.nodes:
        _edges, whole = writer.line(node)
        yield whole
        called = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(called, fx.GraphModule):
            yield structure_digest(called)


def _sum(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class _Writer:
    """Writes nodes as text, with nodes, storages, devices and process groups numbered in order.

    Args:
        parts: write all integers and names; otherwise leave out what :func:`structure_digest` does
            not depend on.
    """

    def __init__(self, *, parts: bool = True) -> None:
        self._parts = parts
        self._numbers: defaultdict[str, dict[object, int]] = defaultdict(dict)

    def _number(self, kind: str, item: object) -> int:
        numbers = self._numbers[kind]
        return numbers.setdefault(item, len(numbers))

    def line(self, node: fx.Node) -> tuple[str, str]:
        """Return two texts for ``node``: its operation and inputs; and everything about it."""
        self._number("node", node)
        target = target_name(node.target) if node.op == "call_function" else node.op
        sources = [self._number("node", source) for source in node.all_input_nodes]
        number = torch_compat.sequence_number(node)
        whole = (
            target,
            node.name if self._parts else "",
            str(node.target) if node.op == "get_attr" else "",
            written(self._portable(node, node.args), self._reference),
            written(self._portable(node, dict(node.kwargs)), self._reference),
            written(_value(node), self._reference, self._tensor),
            # Sequence numbers differ between processes; which of them are equal does not.
            "" if number is None else str(self._number("sequence", number)),
            str(torch_compat.is_backward_node(node)),
            *map(self._layout, node.meta.get(LAYOUTS, ())),
        )
        return f"{target} {sources}", repr(whole)

    def _portable(self, node: fx.Node, arguments: Any) -> Any:
        """Return ``arguments`` with numbers in place of devices and process groups.

        The names of these differ between processes.
        """
        group = torch_compat.group_of(node)

        def numbered(value: object) -> object:
            if isinstance(value, torch.device):
                return self._device(value)
            if isinstance(value, str) and value == group:
                return f"group {self._number('group', value)}"
            return value

        if not self._parts:
            arguments = torch_compat.without_parts(node, arguments)
        if isinstance(arguments, dict):
            return {name: numbered(value) for name, value in arguments.items()}
        return tuple(map(numbered, arguments))

    def _device(self, device: torch.device) -> str:
        if str(device) == device.type:  # a device without an index
            return device.type
        return f"{device.type} {self._number('device', str(device))}"

    def _layout(self, layout: Layout) -> str:
        return repr(layout if self._parts else replace(layout, offset=0))

    def _reference(self, node: fx.Node) -> str:
        return f"%{self._number('node', node)}"

    def _tensor(self, tensor: torch.Tensor) -> str:
        if tensor.layout is not torch.strided:
            return f"{_shape(tensor)} {tensor.layout}"
        storage = self._number("storage", torch_compat.storage_key(tensor))
        nbytes = tensor.untyped_storage().nbytes()
        strides, offset = tuple(tensor.stride()), tensor.storage_offset() if self._parts else ""
        device = self._device(tensor.device)
        return f"{_shape(tensor)} {strides} {offset} of {storage} {nbytes} {device}"


def _value(node: fx.Node) -> object:
    """Return the traced value of a node; for an object such as a mesh, the name of its class."""
    value = node.meta.get("val")
    return type(value).__name__ if torch_compat.is_opaque(value) else value


def _shape(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def written(
    value: object,
    node: Callable[[fx.Node], str],
    tensor: Callable[[torch.Tensor], str] = repr,
) -> str:
    """Return an argument or a value of an operation as text.

    1, 1.0 and True are written differently, and so are 0.0 and -0.0.

    Args:
        value: what is written.
        node: returns the text of a node.
        tensor: returns the text of a tensor.
    """
    if isinstance(value, fx.Node):
        return node(value)
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(written(item, node, tensor) for item in value)}]"
    if isinstance(value, dict):
        items = (f"{name}: {written(value[name], node, tensor)}" for name in value)
        return f"{{{', '.join(items)}}}"
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return f"slice{written(parts, node, tensor)}"
    if isinstance(value, Following):
        return str(value)  # the expression; its value is among the sizes of tensors
    if isinstance(value, float):
        return value.hex()
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    return f"{type(value).__name__} {value}"  # a dtype, a device, a layout, a memory format


def target_name(target: object) -> str:
    """Return the name of the function that an operation calls."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"
