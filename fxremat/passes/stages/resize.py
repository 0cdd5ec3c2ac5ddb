"""Resize a line: the same stages, with every tensor as large as it is at other sizes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint.graph import JointGraph, build_storage_table
from fxremat.passes.joint.sizes import LAYOUTS, Layout, Scale, Size, Values, evaluated, lay
from fxremat.passes.stages.linearize import Line, StageNodes


def resize(line: Line, values: Values) -> Line:
    """Return ``line`` at other sizes, to be measured there.

    Cuts, pinned tensors and the order of operations stay, even where others would be better.

    Args:
        line: the stages at the sizes of the capture.
        values: a number for each symbol of ``line.joint.sizes``.

    Ensures: nodes and storages have the same indices in both lines.
    """
    resizer = _Resizer(line.joint.sizes.named(values))
    joint = resizer.joint(line.joint)
    resized: Line = resizer.mapped(line, joint=joint, segments=line.segments)
    return resized


@dataclass(slots=True)
class _Resizer:
    """Copies a graph, and data that refers to its nodes, at other sizes."""

    sizes: dict[str, int]
    new: dict[fx.Node, fx.Node] = field(default_factory=dict)
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    made: dict[Size | Scale, Size | Scale] = field(default_factory=dict)

    def joint(self, joint: JointGraph) -> JointGraph:
        """Return a copy of ``joint`` at the new sizes."""
        graph = fx.Graph()
        for node in joint.module.graph.nodes:
            self._copy(node, graph)
        resized: JointGraph = self.mapped(
            joint,
            module=torch_compat.graph_module(joint.module, graph),
            storages=build_storage_table(graph),
            sizes=replace(joint.sizes, hints=tuple(self.sizes.values())),
        )
        return resized

    def mapped(self, data: Any, **others: Any) -> Any:
        """Return a copy of a dataclass, with nodes and sizes replaced by those of the copied graph.

        Args:
            data: the dataclass.
            others: values of fields that are set as they are.
        """
        names = [f.name for f in fields(data) if f.init and f.name not in others]
        return replace(data, **{n: self._value(getattr(data, n)) for n in names}, **others)

    def _copy(self, node: fx.Node, graph: fx.Graph) -> None:
        arguments = self._value(node.args), self._value(node.kwargs)
        new = graph.create_node(node.op, node.target, *arguments, node.name, node.type)
        self.new[node] = new
        new.meta = dict(node.meta)
        if isinstance(node.meta.get("val"), (Size, Scale)):
            new.meta["val"] = self._value(node.meta["val"])
        if node.op != "output" and LAYOUTS in node.meta:
            lay(new, self._value(node.meta[LAYOUTS]), self.storages)

    def _value(self, value: Any) -> Any:
        """Return ``value`` with nodes and sizes in it replaced by those of the copied graph."""
        if isinstance(value, fx.Node):
            return self.new[value]
        if isinstance(value, (Size, Scale)):
            return self._number(value)
        if isinstance(value, (tuple, list, frozenset)):
            return type(value)(map(self._value, value))
        if isinstance(value, dict):
            return {self._value(name): self._value(item) for name, item in value.items()}
        if isinstance(value, slice):
            return slice(*map(self._value, (value.start, value.stop, value.step)))
        return self.mapped(value) if isinstance(value, (StageNodes, Layout)) else value

    def _number(self, old: Size | Scale) -> Size | Scale:
        """Return a number at the new sizes; equal ones are evaluated once, because that is slow."""
        if old not in self.made:
            number = evaluated(old, self.sizes)
            names = {name: self.sizes[name] for name in old.names}
            if isinstance(old, Size):
                self.made[old] = Size(number, old.expression, names)
            else:
                self.made[old] = Scale(number, repr(old), names)
        return self.made[old]
