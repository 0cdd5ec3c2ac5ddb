"""Units: operations that are compiled once, as few kernels, and run as one operation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint.sizes import Layout, number_at

LOG = logging.getLogger("fxremat")


class Unit:
    """A few operations as one, which emitted graphs call by name.

    Equal units are one object: what is computed again runs the same kernels as the first time.

    Args:
        name: in emitted code; it says what is computed, and is another for any other unit.
        graph: placeholders, operations, and a tuple of tensors in storages of their own.
        inputs: how each lies in memory, and its dtype.
        hints: the sizes that the operations follow, by name, and their values at the capture.
        device: of all tensors.

    It takes the inputs, and the sizes in their order; it returns a tensor, or a list of several.
    """

    def __init__(
        self,
        name: str,
        graph: fx.Graph,
        inputs: Sequence[tuple[Layout, torch.dtype]],
        hints: dict[str, int],
        device: torch.device,
    ) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = "fxremat.units"
        self.graph = graph
        self.inputs = tuple(inputs)
        self.hints = hints
        self.names = tuple(hints)
        self.device = device
        self._single = len(graph.output_node().args[0]) == 1  # type: ignore[arg-type]
        self._runs: dict[tuple[int, ...], Callable[[list[Any]], Sequence[Any]]] = {}

    def __call__(self, *args: Any) -> Any:
        """Run it, compiled for these sizes when they come for the first time."""
        count = len(self.inputs)
        sizes, tensors = args[count:], list(args[:count])
        run = self._runs.get(sizes)
        if run is None:
            run = self._compiled(sizes, tensors)
        return run(tensors)

    def __repr__(self) -> str:
        return self.__name__

    def operations(self) -> list[str]:
        """Names of what it computes, in order."""
        return [n.name for n in self.graph.nodes if n.op == "call_function"]

    def _compiled(
        self, sizes: tuple[int, ...], tensors: Sequence[torch.Tensor]
    ) -> Callable[[list[Any]], Sequence[Any]]:
        settled = self._settled(dict(zip(self.names, sizes, strict=True)))
        inputs = [(tuple(t.shape), tuple(t.stride()), t.dtype) for t in tensors]
        with torch_compat.real_execution():
            run = torch_compat.compile_kernels(settled, inputs, self.device)
            results = list(run(list(tensors)))
        made = _apart(run, tensors, results)
        if self._single:
            self._runs[sizes] = lambda tensors: made(tensors)[0]
        else:
            self._runs[sizes] = made
        return self._runs[sizes]

    def _settled(self, sizes: dict[str, int]) -> fx.Graph:
        """The graph with numbers in place of sizes."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.graph, {}))
        for node in graph.nodes:
            node.args = fx.node.map_aggregate(node.args, lambda x: _number(x, sizes))
            node.kwargs = fx.node.map_aggregate(node.kwargs, lambda x: _number(x, sizes))
        return graph


def _number(value: Any, sizes: dict[str, int]) -> Any:
    return number_at(value, sizes) if isinstance(value, int) and type(value) is not bool else value


def _apart(
    run: Callable[[list[Any]], Sequence[Any]],
    inputs: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
) -> Callable[[list[Any]], Sequence[Any]]:
    """``run``, whose results lie in storages of their own, as those of its operations do."""
    seen = {torch_compat.storage_key(t) for t in inputs}
    shared = []
    for i, tensor in enumerate(results):
        key = torch_compat.storage_key(tensor)
        if key in seen:
            shared.append(i)
        seen.add(key)
    if not shared:
        return run

    def copying(args: list[Any]) -> Sequence[Any]:
        found = list(run(args))
        for i in shared:
            found[i] = found[i].clone()
        return found

    return copying
