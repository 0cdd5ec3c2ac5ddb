"""Units: operations that are compiled once, as few kernels, and run as one operation."""

from __future__ import annotations

import logging
import operator
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint.sizes import Layout, evaluated, layouts_of

LOG = logging.getLogger("fxremat")

MOST_SIZES = 128
"""For which it is known what runs; which was met first goes first."""

Run = Callable[[list[Any]], Any]
"""Takes inputs in a list, which it empties; returns what the unit does."""


@dataclass(frozen=True, slots=True)
class Input:
    """What a unit takes.

    Attributes:
        layout: how it was traced to lie in memory.
        dtype: of it.
        sure: it always lies so; what libraries make may lie otherwise than its trace.
    """

    layout: Layout
    dtype: torch.dtype
    sure: bool


class Unit:
    """A few operations as one, which emitted graphs call by name.

    Equal units are one object: what is computed again runs the same kernels as the first time.

    Args:
        name: in emitted code; it says what is computed, and is another for any other unit.
        graph: placeholders, operations, and a tuple of tensors in storages of their own.
        inputs: what it takes.
        hints: the sizes that the operations follow, by name, and their values at the capture.
        device: of all tensors.

    It takes the inputs, and the sizes in their order; it returns a tensor, or a list of several.
    """

    def __init__(
        self,
        name: str,
        graph: fx.Graph,
        inputs: Sequence[Input],
        hints: Mapping[str, int],
        device: torch.device,
    ) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = "fxremat.units"
        self.graph = graph
        self.inputs = tuple(inputs)
        self.hints = dict(hints)
        self.device = device
        self.eager = False
        self._unsure = [i for i, own in enumerate(self.inputs) if not own.sure]
        self._runs: dict[tuple[int, ...], Run] = {}
        self._any_size: tuple[Run, Callable[..., bool]] | None = None
        self._lock = threading.RLock()

    def __call__(self, *args: Any) -> Any:
        """Run it; kernels are made for sizes that come for the first time."""
        count = len(self.inputs)
        key = args[count:]
        for i in self._unsure:
            key += args[i].stride()
        run = self._runs.get(key)
        if run is None:
            run = self._run_for(args[:count], tuple(map(int, args[count:])))
        return run([*args[:count]])

    def __repr__(self) -> str:
        return self.__name__

    @property
    def operations(self) -> tuple[str, ...]:
        """Names of what it computes, in order."""
        targets = (n.target for n in self.graph.nodes if n.op == "call_function")
        return tuple(str(t).split(".")[1] for t in targets if t is not operator.getitem)

    def compile(self) -> None:
        """Make its kernels for the sizes of the capture, where all lies as traced."""
        sizes = tuple(self.hints.values())
        key = sizes
        for i in self._unsure:
            key += tuple(map(int, self.inputs[i].layout.stride))
        if key not in self._runs:
            self._compile(key, sizes, [_place(own.layout, self.hints) for own in self.inputs])

    def _run_for(self, tensors: Sequence[torch.Tensor], sizes: tuple[int, ...]) -> Run:
        """What runs for these inputs, made now if it must be."""
        key = sizes
        for i in self._unsure:
            key += tensors[i].stride()
        with self._lock:
            if key not in self._runs:
                self._compile(key, sizes, [(tuple(t.shape), tuple(t.stride())) for t in tensors])
            return self._runs[key]

    def _compile(self, key: tuple[int, ...], sizes: tuple[int, ...], places: list[Place]) -> None:
        """Have kernels made, for these sizes or, the second time, for all."""
        named = dict(zip(self.hints, sizes, strict=True))
        as_traced = places == [_place(own.layout, named) for own in self.inputs]
        run = self._for_any_size(sizes) if named != self.hints and as_traced else None
        if run is None:
            run = self._made(named, places)
        if len(self._runs) > MOST_SIZES:  # those of the capture come first, and stay
            self._runs.pop(next(islice(self._runs, 1, None)))
        self._runs[key] = self._checked(key, run, named)

    def _kernels(self, sizes: Mapping[str, Any], places: Sequence[Place]) -> Run:
        dtypes = [own.dtype for own in self.inputs]
        return torch_compat.compile_kernels(
            lambda _symbols: (self._settled(sizes), list(zip(places, dtypes, strict=True))),
            self.device,
        )

    def _for_any_size(self, sizes: tuple[int, ...]) -> Run | None:
        """Kernels for all sizes at once, where they hold for ``sizes``."""
        if self.eager:
            return None
        if self._any_size is None:
            dtypes = [own.dtype for own in self.inputs]

            def described(symbols: Mapping[str, Any]) -> torch_compat.Described:
                places = [_place(own.layout, symbols) for own in self.inputs]
                return self._settled(symbols), list(zip(places, dtypes, strict=True))

            try:
                self._any_size = torch_compat.compile_for_sizes(described, self.device, self.hints)
            except Exception as error:
                LOG.info("%s is compiled for each size: %s", self, error)
                self._any_size = _never_run, _no_size
        run, holds = self._any_size
        return (lambda args: run([*args, *sizes])) if holds(*sizes) else None

    def _made(self, sizes: Mapping[str, int], places: Sequence[Place]) -> Run:
        """Kernels, or the operations as they are where none can be made."""
        try:
            if not self.eager:
                return self._kernels(sizes, places)
        except Exception as error:
            self.eager = True
            self.__qualname__ += "_as_it_is"  # costs of its kernels are not its own
            LOG.debug("why %s is not compiled", self, exc_info=True)
            warnings.warn(
                f"{self} ({', '.join(self.operations)}) could not be compiled and runs operation "
                f"by operation: {type(error).__name__}: {error}",
                stacklevel=2,
            )
        module = fx.GraphModule(torch.nn.Module(), self._settled(sizes))
        return lambda args: module(*args)

    def _settled(self, sizes: Mapping[str, Any]) -> fx.Graph:
        """The graph with numbers in place of what follows the sizes."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.graph, {}))

        for node in graph.nodes:
            node.args = fx.node.map_aggregate(node.args, lambda value: evaluated(value, sizes))
            node.kwargs = fx.node.map_aggregate(node.kwargs, lambda value: evaluated(value, sizes))
        return graph

    def _checked(self, key: tuple[int, ...], run: Run, sizes: Mapping[str, int]) -> Run:
        """``run``, with its results put right when they are seen for the first time."""
        output = self.graph.output_node()
        wanted: list[fx.Node] = list(output.args[0])  # type: ignore[arg-type]
        single = len(wanted) == 1

        def first(args: list[Any]) -> Any:
            given = {torch_compat.storage_key(t) for t in args}
            results = list(run(args))
            wrong = _wrong(given, results, [_place(_layout(n), sizes) for n in wanted])
            final = (lambda args: _put_right(list(run(args)), wrong)) if wrong else run
            self._runs[key] = (lambda args: final(args)[0]) if single else final
            _put_right(results, wrong)
            return results[0] if single else results

        return first


Place = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides."""


def _layout(node: fx.Node) -> Layout:
    (layout,) = layouts_of(node)
    return layout


def _place(layout: Layout, sizes: Mapping[str, Any]) -> Place:
    return (
        tuple(evaluated(n, sizes) for n in layout.shape),
        tuple(evaluated(n, sizes) for n in layout.stride),
    )


def _wrong(
    given: Set[int], results: Sequence[torch.Tensor], places: Sequence[Place]
) -> dict[int, Place]:
    """Results that lie in storages that are ``given`` or others', or not as they would."""
    seen = set(given)
    wrong = {}
    for i, (tensor, place) in enumerate(zip(results, places, strict=True)):
        key = torch_compat.storage_key(tensor)
        if key in seen or (tuple(tensor.shape), tuple(tensor.stride())) != place:
            wrong[i] = place
        seen.add(key)
    return wrong


def _put_right(results: list[torch.Tensor], wrong: Mapping[int, Place]) -> list[torch.Tensor]:
    """``results`` with copies in place of those that are wrong, one after the other."""
    for i, (shape, stride) in wrong.items():
        results[i] = results[i].new_empty_strided(shape, stride).copy_(results[i])
    return results


def _never_run(_args: list[Any]) -> Any:
    raise AssertionError("kernels that were never made")


def _no_size(*_sizes: int) -> bool:
    return False
