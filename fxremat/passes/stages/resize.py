"""A line at another size: the same stages, every tensor as large as it is there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.joint.sizes import (
    LAYOUTS,
    Layout,
    Scale,
    Size,
    Values,
    evaluated,
    layouts_of,
)
from fxremat.passes.joint.storage import build_storage_table
from fxremat.passes.stages.linearize import Line, StageNodes


def resize(line: Line, values: Values) -> Line:
    """``line`` as it is where the symbols of its sizes are ``values``.

    For whoever measures at that size. Nothing is chosen anew: cuts, what is pinned and the order
    of operations stay, whatever else would be better there.

    Args:
        line: of a settled graph.
        values: a number for each of ``line.joint.sizes``.

    Ensures: nodes and storages are told by the same indices in both.
    """
    return _Resizer(line.joint.sizes.named(values)).line(line)


@dataclass(slots=True)
class _Resizer:
    sizes: dict[str, int]
    new: dict[fx.Node, fx.Node] = field(default_factory=dict)
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    made: dict[Size | Scale, Size | Scale] = field(default_factory=dict)

    def line(self, line: Line) -> Line:
        """The whole."""
        joint = self._joint(line.joint)
        return replace(
            line,
            joint=joint,
            stages=tuple(map(self._stage, line.stages)),
            pinned=frozenset(map(self.new.__getitem__, line.pinned)),
            views=frozenset(map(self.new.__getitem__, line.views)),
            stage_of={self.new[n]: stage for n, stage in line.stage_of.items()},
            role_of={self.new[n]: role for n, role in line.role_of.items()},
            order={self.new[n]: place for n, place in line.order.items()},
            sums={self.new[n]: stages for n, stages in line.sums.items()},
        )

    def _nodes(self, nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
        return tuple(self.new[n] for n in nodes)

    def _stage(self, stage: StageNodes) -> StageNodes:
        return StageNodes(
            forward=self._nodes(stage.forward),
            backward=self._nodes(stage.backward),
            boundary=self._nodes(stage.boundary),
            saved=self._nodes(stage.saved),
            pinned=self._nodes(stage.pinned),
        )

    def _joint(self, joint: JointGraph) -> JointGraph:
        graph = fx.Graph()
        for node in joint.module.graph.nodes:
            self._copy(node, graph)
        return replace(
            joint,
            module=torch_compat.graph_module(joint.module, graph),
            primals=self._nodes(joint.primals),
            tangents=self._nodes(joint.tangents),
            constants=self._nodes(joint.constants),
            forward=self._nodes(joint.forward),
            backward=self._nodes(joint.backward),
            forward_outputs=tuple(map(self._value, joint.forward_outputs)),
            backward_outputs=tuple(map(self._value, joint.backward_outputs)),
            mutated=frozenset(map(self.new.__getitem__, joint.mutated)),
            storages=build_storage_table(graph),
            sizes=replace(joint.sizes, hints=tuple(self.sizes.values())),
        )

    def _copy(self, node: fx.Node, graph: fx.Graph) -> None:
        new = graph.create_node(
            node.op,
            node.target,
            self._value(node.args),
            self._value(node.kwargs),
            node.name,
            node.type,
        )
        self.new[node] = new
        new.meta = dict(node.meta)
        value = node.meta.get("val")
        if isinstance(value, (Size, Scale)):
            new.meta["val"] = self._value(value)
        if node.op == "output" or LAYOUTS not in node.meta:
            return
        new.meta[LAYOUTS] = tuple(map(self._layout, layouts_of(node)))
        layouts = iter(new.meta[LAYOUTS])

        def resized(item: Any) -> Any:
            return self._tensor(item, next(layouts)) if isinstance(item, torch.Tensor) else item

        if isinstance(value, (tuple, list)):
            new.meta["val"] = type(value)(map(resized, value))
        else:
            new.meta["val"] = resized(value)

    def _value(self, value: Any) -> Any:
        """An argument with the nodes and sizes of the copy."""
        if isinstance(value, fx.Node):
            return self.new[value]
        if isinstance(value, (Size, Scale)):
            return self._number(value)
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._value, value))
        if isinstance(value, dict):
            return {name: self._value(item) for name, item in value.items()}
        if isinstance(value, slice):
            return slice(*map(self._value, (value.start, value.stop, value.step)))
        return value

    def _number(self, old: Size | Scale) -> Size | Scale:
        """A number of the copy; few of a graph's are distinct, and making one is slow."""
        if old not in self.made:
            number = evaluated(old, self.sizes)
            names = {name: self.sizes[name] for name in old.names}
            if isinstance(old, Size):
                self.made[old] = Size(number, old.expression, names)
            else:
                self.made[old] = Scale(number, repr(old), names)
        return self.made[old]

    def _layout(self, layout: Layout) -> Layout:
        return Layout(
            self._value(layout.shape),
            self._value(layout.stride),
            self._value(layout.offset),
            self._value(layout.storage_bytes),
        )

    def _tensor(self, traced: torch.Tensor, layout: Layout) -> torch.Tensor:
        key = torch_compat.storage_key(traced)
        if key not in self.storages:
            self.storages[key] = torch_compat.meta_storage(layout.storage_bytes)
        return torch_compat.fake_tensor(
            traced, self.storages[key], layout.shape, layout.stride, layout.offset
        )
