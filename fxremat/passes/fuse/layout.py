"""Convolutions in the memory format in which libraries are fastest: channels last.

As in Inductor, inputs of convolutions and gradients of their results use that format, and what is
computed from them element by element follows. Inputs and outputs of the step keep their layout, and
random draws are made for the traced layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint.graph import copy_origin, fake_result, tensors_of
from fxremat.passes.joint.sizes import LAYOUTS

aten = torch.ops.aten

CHANNELED: Mapping[object, int] = {
    aten.convolution.default: 1,
    aten.convolution_backward.default: 2,
}
"""How many of the first arguments have channels last."""

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def with_channels_last(module: fx.GraphModule) -> fx.GraphModule:
    """Return ``module``, a prepared joint graph, with its convolutions in channels-last format.

    Ensures: ``module`` itself is returned if there are no convolutions, if sizes vary, or if
        Inductor would not change the format.
    """
    nodes = list(module.graph.nodes)
    if any(LAYOUTS in n.meta for n in nodes) or not torch_compat.prefers_channels_last(module):
        return module
    mode = torch_compat.fake_mode_of(t for n in nodes for t in tensors_of(n))
    writer = _Writer(mode)
    try:
        for node in nodes:
            writer.copy(node)
    except _StuckError:
        return module
    writer.graph.lint()
    return torch_compat.graph_module(module, writer.graph)


class _StuckError(Exception):
    """An operation runs neither with channels last nor with inputs in their traced layout."""


class _Writer:
    """Copies a graph, with convolutions, and what follows from them, in channels-last format."""

    def __init__(self, mode: Any) -> None:
        self.graph = fx.Graph()
        self._mode = mode
        self._values: dict[fx.Node, fx.Node] = {}
        self._converted: dict[fx.Node, fx.Node] = {}

    def copy(self, node: fx.Node) -> None:
        if node.op == "output":  # results keep their layout
            before = {old: self._as_before(old, node) for old in node.all_input_nodes}
            output = self.graph.output(fx.node.map_arg(node.args[0], before.__getitem__))
            output.meta = dict(node.meta)
        elif node.op == "call_function":
            self._run(node, CHANNELED.get(node.target, 0))
        else:
            self._values[node] = self.graph.node_copy(node, self._values.__getitem__)

    def _run(self, node: fx.Node, count: int) -> None:
        """Copy an operation to the new graph; its first ``count`` arguments get channels last.

        If it does not run with the layouts of the new graph, its inputs get their traced layout.
        """
        args: Any = fx.node.map_arg(node.args, self._values.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, self._values.__getitem__)
        args = tuple(
            self._to_channels_last(a, node) if i < count else a for i, a in enumerate(args)
        )
        # Random numbers are drawn in the order of memory.
        draws = torch_compat.draws_random_numbers(node)
        value = None if draws else self._try_run(node, args, kwargs)
        if value is None:  # it needs its inputs in the traced layout, as some views do
            back = {old: self._as_before(old, node) for old in node.all_input_nodes}
            args = fx.node.map_arg(node.args, back.__getitem__)
            kwargs = fx.node.map_arg(node.kwargs, back.__getitem__)
            value = self._try_run(node, args, kwargs)
        if value is None:
            raise _StuckError
        new = self.graph.create_node("call_function", node.target, args, kwargs, name=node.name)
        new.meta = {k: v for k, v in node.meta.items() if k != "tensor_meta"} | {"val": value}
        self._values[node] = new

    def _try_run(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Return the fake result of an operation for these arguments; ``None`` if it cannot run."""
        try:
            return fake_result((node.target, args, kwargs), self._mode)
        except (RuntimeError, ValueError):
            return None

    def _to_channels_last(self, new: fx.Node, reader: fx.Node) -> fx.Node:
        value = new.meta["val"]
        wanted = FORMATS.get(value.dim())
        if wanted is None or value.is_contiguous(memory_format=wanted):
            return new
        if new not in self._converted:
            self._converted[new] = self._clone(new, wanted, reader)
        return self._converted[new]

    def _as_before(self, old: fx.Node, reader: fx.Node) -> fx.Node:
        """Return a node of the new graph with the value of ``old`` in its traced layout.

        Operations that are added for it get the metadata of ``reader``, which needs it.
        """
        new = self._values[old]
        before, now = old.meta.get("val"), new.meta["val"]
        if not isinstance(before, torch.Tensor) or before.stride() == now.stride():
            return new
        if before.is_contiguous() and now.is_contiguous():
            return self._with_strides(new, before.shape, reader)
        for wanted in (torch.contiguous_format, FORMATS.get(before.dim())):
            if wanted is not None and before.is_contiguous(memory_format=wanted):
                return self._clone(new, wanted, reader)
        raise _StuckError

    def _with_strides(self, new: fx.Node, shape: torch.Size, reader: fx.Node) -> fx.Node:
        """Return ``new`` as a view of ``shape``, with the strides of a contiguous tensor.

        The stride of a dimension of size 1 means nothing: weights of one pixel have their elements
        in the same order, channels last or not.
        """
        origin = new if reader.op == "output" else reader
        for target, args in ((aten.squeeze.default, ()), (aten.view.default, ([*shape],))):
            call: Any = (target, (new, *args), {})
            new = self.graph.call_function(*call)
            new.meta["val"] = fake_result(call, self._mode)
            copy_origin(origin, new)
        return new

    def _clone(self, new: fx.Node, wanted: torch.memory_format, reader: fx.Node) -> fx.Node:
        made = self.graph.call_function(aten.clone.default, (new,), {"memory_format": wanted})
        with self._mode:
            made.meta["val"] = new.meta["val"].clone(memory_format=wanted)
        copy_origin(new if reader.op == "output" else reader, made)
        return made
