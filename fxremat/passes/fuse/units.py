"""Units by what they compute: equal ones are one."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from fxremat.passes.fuse.unit import Input, Unit
from fxremat.passes.joint.digest import written
from fxremat.passes.joint.sizes import layouts_of, names_in
from fxremat.passes.joint.storage import tensors_of

MOST_NAMES, DIGITS = 4, 8
"""Operations, and digits of what tells it from any other, that the name of a unit has."""


class Units:
    """A table of units: equal ones are one."""

    def __init__(self) -> None:
        self._units: dict[str, Unit] = {}

    def __iter__(self) -> Iterator[Unit]:
        yield from self._units.values()

    def __len__(self) -> int:
        return len(self._units)

    def of(self, graph: fx.Graph, sure: Sequence[bool], device: torch.device) -> Unit:
        """The unit that runs ``graph``.

        Args:
            graph: operations.
            sure: which of its inputs surely lie as traced.
            device: of all tensors.
        """
        described, names = _described(graph)
        text = "\n".join([str(device), repr(list(sure)), *described])
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest not in self._units:
            places = graph.find_nodes(op="placeholder")
            inputs = [
                Input(layouts_of(n)[0], n.meta["val"].dtype, own)
                for n, own in zip(places, sure, strict=True)
            ]
            name = f"fused_{_told(graph)}_{digest[:DIGITS]}"
            self._units[digest] = Unit(name, graph, inputs, names, device)
        return self._units[digest]


def _described(graph: fx.Graph) -> tuple[list[str], dict[str, int]]:
    """All that makes two graphs the same, and the sizes that they follow."""
    lines: list[str] = []
    number: dict[fx.Node, int] = {}
    names: dict[str, int] = {}
    for node in graph.nodes:
        number[node] = len(number)
        target = str(node.target) if node.op == "call_function" else node.op
        args = written((node.args, dict(node.kwargs)), lambda n: f"%{number[n]}")
        layouts = layouts_of(node)
        dtypes = [str(t.dtype) for t in tensors_of(node)]
        lines.append(f"{target} {args} {layouts} {dtypes}")
        names |= names_in((node.args, node.kwargs))
        for layout in layouts:
            names |= names_in(layout.numbers)
    return lines, names


def _told(graph: fx.Graph) -> str:
    """The first operations, by name."""
    targets = [n.target for n in graph.nodes if n.op == "call_function"]
    names = (str(t).split(".")[1] for t in targets if t is not operator.getitem)
    return "_".join([*dict.fromkeys(names)][:MOST_NAMES])
