"""Units: operations that are compiled once, to few kernels, and run as one operation."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import islice
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.errors import FxrematWarning
from fxremat.passes.joint.digest import written
from fxremat.passes.joint.graph import is_getitem, tensors_of
from fxremat.passes.joint.sizes import evaluated, layouts_of, names_in
from fxremat.progress import LOG, Note, unnoted
from fxremat.runtime.nested import Nested

MOST_SIZES = 128
"""For how many sizes the kernels of a unit are kept; the oldest are dropped first."""

MOST_NAMES, DIGITS = 4, 8
"""How many operations, and how many digits of its digest, are in the name of a unit."""

Run = Callable[[list[Any]], Any]
"""Takes inputs in a list, which it empties; returns the results of the unit."""


Place = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides of a tensor."""


class Unit:
    """A few operations that are compiled to kernels, and run as one operation of emitted graphs.

    Equal units are one object, so a recomputation runs the same kernels as the first computation.

    Args:
        name: its unique name in emitted code, which says what is computed.
        graph: placeholders, operations, and a tuple of tensors in separate storages.
        sure: which of its inputs always have their traced layout; results of libraries may not.
        hints: the sizes that the operations follow, by name, and their values at the capture.
        device: device of all tensors.

    A call takes the inputs, and the sizes in the order of ``hints``. It returns a tensor, or a list
    of several.
    """

    def __init__(
        self,
        name: str,
        graph: fx.Graph,
        sure: Sequence[bool],
        hints: Mapping[str, int],
        device: torch.device,
    ) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = "fxremat.units"
        self.graph = graph
        self.inputs = tuple(graph.find_nodes(op="placeholder"))
        self.hints = dict(hints)
        self.device = device
        self.eager = False
        self._unsure = [i for i, is_sure in enumerate(sure) if not is_sure]
        self._runs: dict[tuple[int, ...], Run] = {}
        self._any_size: tuple[Run, Callable[..., bool]] | None = None
        self._lock = threading.RLock()

    def __call__(self, *args: Any) -> Any:
        """Return the results for the inputs and sizes in ``args``; new sizes are compiled first."""
        count = len(self.inputs)
        key = args[count:]
        for i in self._unsure:
            key += args[i].stride()
        run = self._runs.get(key)
        if run is None:
            # A step is running, and a benchmark would take memory, so rules choose the kernels.
            places = [(tuple(t.shape), tuple(t.stride())) for t in args[:count]]
            run = self._run_for(tuple(map(int, args[count:])), places, benchmarked=False)
        return run([*args[:count]])

    def __repr__(self) -> str:
        return self.__name__

    @property
    def operations(self) -> tuple[str, ...]:
        """Names of the operators that it runs, in order, such as ``mul``."""
        return _operation_names(self.graph)

    def compile(self, sizes: tuple[int, ...]) -> bool:
        """Compile kernels for ``sizes``, in the order of the hints, and for traced layouts.

        Returns ``False`` if they existed before.
        """
        places = self._traced_places(sizes)
        with self._lock:
            is_new = self._key(sizes, places) not in self._runs
            self._run_for(sizes, places, benchmarked=True)
        return is_new

    def run_once(self, sizes: tuple[int, ...]) -> None:
        """Run the kernels for ``sizes`` on zeros, which loads them and chooses the fastest ones."""
        places = self._traced_places(sizes)
        run = self._run_for(sizes, places, benchmarked=True)
        run([self._zeros(node, place) for node, place in zip(self.inputs, places, strict=True)])

    def _zeros(self, node: fx.Node, place: Place) -> torch.Tensor:
        """Return a tensor of zeros, which are valid indices, too, for an input of the unit."""
        shape, stride = place
        dtype = node.meta["val"].dtype
        return torch.empty_strided(shape, stride, dtype=dtype, device=self.device).zero_()

    def _traced_places(self, sizes: tuple[int, ...]) -> list[Place]:
        return self._places(dict(zip(self.hints, sizes, strict=True)))

    def forget(self, sizes: tuple[int, ...]) -> None:
        """Drop compiled kernels for ``sizes``, and those that were compiled for all sizes."""
        with self._lock:
            self._any_size = None
            for key in [key for key in self._runs if key[: len(sizes)] == sizes]:
                del self._runs[key]

    def _run_for(self, sizes: tuple[int, ...], places: list[Place], *, benchmarked: bool) -> Run:
        """Return the function that runs the unit for these sizes, and shapes and strides of inputs.

        It is compiled if necessary; ``benchmarked`` kernels are the fastest of several versions.
        """
        key = self._key(sizes, places)
        with self._lock:
            if key not in self._runs:
                named = dict(zip(self.hints, sizes, strict=True))
                run = None
                if named != self.hints and places == self._places(named):
                    run = self._compile_any(sizes, benchmarked=benchmarked)
                if len(self._runs) > MOST_SIZES:  # the first ones, of the capture, stay
                    self._runs.pop(next(islice(self._runs, 1, None)))
                run = run or self._compile_at(named, places, benchmarked=benchmarked)
                self._runs[key] = self._checking(key, run, named)
            return self._runs[key]

    def _key(self, sizes: tuple[int, ...], places: Sequence[Place]) -> tuple[int, ...]:
        return (*sizes, *(stride for i in self._unsure for stride in places[i][1]))

    def _places(self, sizes: Mapping[str, Any]) -> list[Place]:
        """Return the traced shape and strides of each input, for ``sizes`` by name."""
        return [_place(node, sizes) for node in self.inputs]

    def _described(
        self, sizes: Mapping[str, Any], places: Sequence[Place]
    ) -> torch_compat.Described:
        dtypes = (node.meta["val"].dtype for node in self.inputs)
        return self._graph_at(sizes), list(zip(places, dtypes, strict=True))

    def _compile_any(self, sizes: tuple[int, ...], *, benchmarked: bool) -> Run | None:
        """Return kernels that are compiled once for all sizes; ``None`` if they cannot be used."""
        if self.eager:
            return None
        if self._any_size is None:
            try:
                self._any_size = torch_compat.compile_for_sizes(
                    lambda symbols: self._described(symbols, self._places(symbols)),
                    self.device,
                    self.hints,
                    benchmarked=benchmarked,
                )
            except Exception as error:
                LOG.info("%s is compiled for each size: %s", self, error)
                self._any_size = (lambda _args: None), (lambda *_sizes: False)
        run, holds = self._any_size
        return (lambda args: run([*args, *sizes])) if holds(*sizes) else None

    def _compile_at(
        self, sizes: Mapping[str, int], places: Sequence[Place], *, benchmarked: bool
    ) -> Run:
        """Return kernels compiled for these sizes and layouts of inputs.

        If the compiler fails, return a function that runs the operations one by one.
        """
        try:
            if not self.eager:
                return torch_compat.compile_kernels(
                    lambda _symbols: self._described(sizes, places),
                    self.device,
                    benchmarked=benchmarked,
                )
        except Exception as error:
            self.eager = True
            self.__qualname__ += "_as_it_is"  # its costs are not those of its kernels
            LOG.debug("why %s is not compiled", self, exc_info=True)
            message = (
                f"{self} ({', '.join(self.operations)}) could not be compiled and runs operation "
                f"by operation: {type(error).__name__}: {error}"
            )
            torch_compat.warn(FxrematWarning(message, code="FXR210"))
        module = fx.GraphModule(torch.nn.Module(), self._graph_at(sizes))
        return lambda args: module(*args)

    def _graph_at(self, sizes: Mapping[str, Any]) -> fx.Graph:
        """Return a copy of the graph with numbers in place of expressions in the sizes."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.graph, {}))
        for node in graph.nodes:
            node.args = fx.node.map_aggregate(node.args, lambda value: evaluated(value, sizes))
            node.kwargs = fx.node.map_aggregate(node.kwargs, lambda value: evaluated(value, sizes))
        return graph

    def _checking(self, key: tuple[int, ...], run: Run, sizes: Mapping[str, int]) -> Run:
        """Return a function that calls ``run``, and checks its results the first time.

        It then replaces itself in ``_runs[key]`` by ``run``, or by a function that also copies
        results that share memory, or whose layout is not the traced one.
        """
        output = self.graph.output_node()
        wanted: list[fx.Node] = list(output.args[0])  # type: ignore[arg-type]
        single = len(wanted) == 1

        def first(args: list[Any]) -> Any:
            given = {torch_compat.storage_key(t) for t in args}
            results = list(run(args))
            wrong = _misplaced(given, results, [_place(n, sizes) for n in wanted])
            final = (lambda args: _relayout(list(run(args)), wrong)) if wrong else run
            self._runs[key] = (lambda args: final(args)[0]) if single else final
            _relayout(results, wrong)
            return results[0] if single else results

        return first


def _place(node: fx.Node, sizes: Mapping[str, Any]) -> Place:
    (layout,) = layouts_of(node)
    return (
        tuple(evaluated(n, sizes) for n in layout.shape),
        tuple(evaluated(n, sizes) for n in layout.stride),
    )


def _misplaced(
    given: Set[int], results: Sequence[torch.Tensor], places: Sequence[Place]
) -> dict[int, Place]:
    """Return the results that need a copy, by index, with the shape and strides that it must have.

    They share a storage with another result or with an input, whose storages are in ``given``, or
    have another layout.
    """
    used = set(given)
    wrong = {}
    for i, (tensor, place) in enumerate(zip(results, places, strict=True)):
        key = torch_compat.storage_key(tensor)
        if key in used or (tuple(tensor.shape), tuple(tensor.stride())) != place:
            wrong[i] = place
        used.add(key)
    return wrong


def _relayout(results: list[torch.Tensor], wrong: Mapping[int, Place]) -> list[torch.Tensor]:
    """Copy each result in ``wrong``, by index, to shape and strides given there; return all."""
    for i, (shape, stride) in wrong.items():
        results[i] = results[i].new_empty_strided(shape, stride).copy_(results[i])
    return results


class Units:
    """A table of units, in which units that compute the same are one object."""

    def __init__(self) -> None:
        self._units: dict[str, Unit] = {}

    def __iter__(self) -> Iterator[Unit]:
        yield from self._units.values()

    def compile(
        self,
        progress: Callable[[str, int, int], None],
        *,
        note: Note = unnoted,
    ) -> None:
        """Compile the kernels of all units for the sizes of the capture.

        ``progress`` is called with a title, the number of compiled units, and the number of all;
        for ``note`` see :func:`compile_units`.
        """
        wanted = [(unit, tuple(unit.hints.values())) for unit in self]

        def made(done: int) -> None:
            progress("compile kernels", done, len(wanted))

        compile_units(wanted, made, note=note)

    def of(self, graph: fx.Graph, sure: Sequence[bool], device: torch.device) -> Unit:
        """Return the unit that runs ``graph``: one with an equal graph if it is in the table.

        ``sure`` says which of its inputs certainly have their traced layout.
        """
        described, names = _described(graph)
        text = "\n".join([str(device), repr(list(sure)), *described])
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest not in self._units:
            first = [*dict.fromkeys(_operation_names(graph))][:MOST_NAMES]
            name = "_".join(["fused", *first, digest[:DIGITS]])
            self._units[digest] = Unit(name, graph, sure, names, device)
        return self._units[digest]


def compile_units(
    wanted: Sequence[tuple[Unit, tuple[int, ...]]],
    progress: Callable[[int], None] = lambda _done: None,
    *,
    note: Note = unnoted,
) -> None:
    """Compile kernels of units for given sizes, with their compilers running at the same time.

    Args:
        wanted: units, each with sizes in the order of its hints.
        progress: called with the number of compiled units.
        note: called with the peak bytes that these kernels held when they first ran, including
            buffers for choosing the fastest versions; not on a CPU.

    Ensures: on other devices each kernel has run, so that none allocates more than necessary when
        it runs again.
    """
    new: list[tuple[Unit, tuple[int, ...]]] = []

    def compile_each() -> None:
        for done, (unit, sizes) in enumerate(wanted):
            progress(done)
            if unit.compile(sizes):
                new.append((unit, sizes))
        progress(len(wanted))

    try:
        with torch_compat.compilers_side_by_side():
            compile_each()
    except BaseException as error:
        for unit, sizes in wanted:  # some of the kernels may not exist
            unit.forget(sizes)
        if not isinstance(error, Exception):
            raise
        # A compiler failed; compiling one unit at a time shows which unit it was.
        LOG.debug("kernels are compiled one after the other", exc_info=True)
        compile_each()
    new = [(unit, sizes) for unit, sizes in dict.fromkeys(new) if unit.device.type != "cpu"]
    if not new:
        return
    noted = torch_compat.noted_bytes(new[0][0].device, note)
    try:
        with noted, torch_compat.real_execution(), torch.no_grad():
            for unit, sizes in new:
                unit.run_once(sizes)
    except BaseException:
        for unit, sizes in new:  # the next call compiles and runs them again
            unit.forget(sizes)
        raise


def _described(graph: fx.Graph) -> tuple[list[str], dict[str, int]]:
    """Return a text for each node, equal for graphs that compute the same, and the graph's sizes.

    Sizes are given by name, with their values at the capture.
    """
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


def _operation_names(graph: fx.Graph) -> tuple[str, ...]:
    nodes = (n for n in graph.nodes if n.op == "call_function" and not is_getitem(n))
    return tuple(map(_operation_name, (n.target for n in nodes)))


def _operation_name(target: Any) -> str:
    if isinstance(target, Nested):
        return str(target.function.__name__)
    return str(target).split(".")[1]
