"""A run of operations as one operation, with what shows whether it keeps its bits."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxremat.passes.joint.digest import target_name, written
from fxremat.passes.joint.graph import (
    JointGraph,
    add_call,
    is_tensor,
    operation_of,
    values_of,
)
from fxremat.passes.joint.sizes import Size, layouts_of, names_in, symbol
from fxremat.passes.parts.bits import filled, is_integer
from fxremat.passes.parts.parts import ROWS, Integers, Made, Output, Parts, Witness
from fxremat.passes.split.memory import Memory
from fxremat.passes.split.run import Run, place_of, results_of
from fxremat.passes.split.runs import Large
from fxremat.passes.split.ways import for_rows, is_pointwise, is_sum_of_products, reads_indices


@dataclass(frozen=True, slots=True)
class SizedRun:
    """A run of operations, and the number of rows that it computes at a time.

    Attributes:
        run: the run.
        memory: the memory that a part of it takes.
        part_rows: how many rows a part has.
        part_bytes: bytes that a part holds besides inputs and results of the run.
    """

    run: Run
    memory: Memory
    part_rows: int
    part_bytes: int

    @classmethod
    def of(cls, run: Run, joint: JointGraph, large: Large, *, exact: bool) -> SizedRun:
        """Return ``run`` with as many rows in a part as ``large`` allows.

        ``exact``: whether results must have the same bits as if all rows were computed at once.
        """
        memory, most_bytes = Memory(run, joint), large.part_bytes(run, joint.storages)
        return cls(run, memory, *memory.part(most_bytes, exact=exact))


def as_operation(
    sized: SizedRun,
    sources: Sequence[fx.Node],
    joint: JointGraph,
    *,
    exact: bool,
    dense: Set[fx.Node] = frozenset(),
    marked: fx.Node | None = None,
) -> Parts:
    """Return a callable that computes a run for some rows at a time; it takes ``sources``.

    Args:
        sized: the run.
        sources: the values that it reads, in the order of the arguments.
        joint: the step.
        exact: whether results must have the same bits as if all rows were computed at once.
        dense: sources whose parts are copied to dense tensors.
        marked: an operation of the run, or ``None``. In place of each tensor it reads one that is
            filled with a number; these numbers are additional arguments.
    """
    run = sized.run
    inside = sized.memory.inside
    graph, outputs = _one_part(sized, sources, dense, marked)
    at_once = _at_once(sized, sources, marked)
    lines = [*_lines(graph), *_lines(at_once)]
    ways = [run.rows_of[n] for n in sources]
    ways += [None] * len(_tensor_inputs(marked))
    text = "\n".join(
        [*lines, repr((ways, outputs, run.rows, sized.part_rows, exact, joint.device))]
    )
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    first = [*dict.fromkeys(str(n.target).split(".")[1] for n in inside)][:3]
    name = "_".join(["parts", *first, digest])
    return Parts(
        name,
        graph,
        ways,
        outputs,
        run.rows,
        sized.part_rows,
        _size_names(run, inside),
        joint.device,
        exact=exact,
        certain=all(way.same_bits for way in run.ways.values()),
        part_bytes=sized.part_bytes,
        whole=[node for node in inside if not joint.storages.is_view(node)],
        at_once=at_once,
        witnesses=lambda: (
            _witness(n, sized, sources, joint) for n in inside if exact and _is_uneven(n, run)
        ),
        integers=_integers(inside, sources),
        made=[*_allocations(run, inside, joint)],
        held=sized.memory.held,
    )


def _allocations(run: Run, inside: Sequence[fx.Node], joint: JointGraph) -> Iterator[Made]:
    """Yield each tensor that the operations allocate if all rows are computed at once.

    It has the indices of the operations in ``inside`` from which and until which the tensor exists.
    """
    table = joint.storages
    last = {s: i for i, n in enumerate(inside) for s in table.of(n.all_input_nodes)}
    last |= dict.fromkeys(table.of(value for _, value, _ in results_of_run(run)), len(inside))
    allocated = set(table.of(run.sources))
    for i, node in enumerate(inside):
        for value in results_of(node):
            new = table.of([value]) - allocated
            allocated |= new
            for storage in new:
                yield Made(layouts_of(value)[0], i, last.get(storage, i))


def _integers(inside: Sequence[fx.Node], sources: Sequence[fx.Node]) -> Integers:
    """Return which integer ``sources`` are read as indices, and which are converted to floats."""
    held = {n: {i} for i, n in enumerate(sources) if is_integer(n.meta["val"])}
    indices: set[int] = set()
    values: set[int] = set()
    for node in inside:
        read = set().union(*(held.get(n, ()) for n in node.all_input_nodes))
        if reads_indices(node):
            indices |= read
        results = [n for n in results_of(node) if is_tensor(n)]
        for result in results:
            if is_integer(result.meta["val"]):
                held[result] = read
        if not reads_indices(node) and any(n.meta["val"].is_floating_point() for n in results):
            values |= read
    return Integers(frozenset(indices), frozenset(values))


def _lines(graph: fx.Graph) -> Iterator[str]:
    """Yield each node's operation and arguments as a text that names no nodes."""
    number = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        arguments = written((node.args, dict(node.kwargs)), lambda n: f"%{number[n]}")
        yield f"{target_name(node.target)} {arguments}"


def _tensor_inputs(node: fx.Node | None) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if is_tensor(n)] if node is not None else []


def _is_uneven(node: fx.Node, run: Run) -> bool:
    """Return whether ``node`` is pointwise, and an element's bits may depend on its position."""
    return not run.ways[node].same_bits and is_pointwise(node)


def _witness(
    node: fx.Node, sized: SizedRun, sources: Sequence[fx.Node], joint: JointGraph
) -> Witness:
    needed, waiting = {node}, [node]
    while waiting:
        for value in _tensor_inputs(waiting.pop()):
            operation = operation_of(value)
            if operation in sized.run.ways and operation not in needed:
                needed.add(operation)
                waiting.append(operation)
    run = Run(sized.run.rows, {n: sized.run.ways[n] for n in sized.run.ways if n in needed})
    run.targets.append(node)
    read = {v for n in needed for v in _tensor_inputs(n)}
    run.rows_of.update((v, rows) for v, rows in sized.run.rows_of.items() if v in read)
    taken = [n for n in sources if n in {*run.sources}]
    witness = SizedRun(run, Memory(run, joint), sized.part_rows, 0)
    parts = as_operation(witness, taken, joint, exact=False, marked=node)
    return Witness(node, parts, tuple(sources.index(n) for n in taken))


def _one_part(
    sized: SizedRun, sources: Sequence[fx.Node], dense: Set[fx.Node], marked: fx.Node | None
) -> tuple[fx.Graph, list[Output]]:
    """Return a graph that computes one part of a run, and a description of each result of the run.

    For the arguments see :func:`as_operation`.
    """
    run, inside = sized.run, sized.memory.inside
    rows = Size(sized.part_rows, symbol(ROWS), {ROWS: sized.part_rows})
    graph = fx.Graph()
    copied, numbers = _placeholders(graph, sources, marked)
    for n in sources:
        if n in dense:
            copied[n] = graph.call_function(torch.ops.aten.clone.default, (copied[n],))
    gone = {t for t in run.targets if is_sum_of_products(t, run.ways[t])}
    for node in inside:
        if node in gone:
            continue
        args, kwargs = for_rows(node, run.ways[node], rows)
        called: Any = node.target
        in_place = sized.memory.in_place.get(node)
        if in_place is not None:
            called, kwargs = in_place.variant, {**kwargs, in_place.argument: in_place.value}
        _add(graph, node, (called, args, kwargs), copied, numbers if node is marked else {})
    given: list[fx.Node] = []
    outputs = []
    for target, value, i in results_of_run(run):
        (layout,) = layouts_of(value)
        way = run.ways[target].outputs[i]
        outputs.append(Output(way, layout, value.meta["val"].dtype, target in gone))
        given += [copied[a] for a in target.args] if target in gone else [copied[value]]  # type: ignore[index]
    graph.output(tuple(given))
    return graph, outputs


def _at_once(sized: SizedRun, sources: Sequence[fx.Node], marked: fx.Node | None) -> fx.Graph:
    """Return a graph that computes all rows of a run at once, with the operations as traced.

    For the arguments see :func:`as_operation`.
    """
    graph = fx.Graph()
    copied, numbers = _placeholders(graph, sources, marked)
    for node in sized.memory.inside:
        call = node.target, node.args, node.kwargs
        _add(graph, node, call, copied, numbers if node is marked else {})
    graph.output(tuple(copied[value] for _, value, _ in results_of_run(sized.run)))
    return graph


def _placeholders(
    graph: fx.Graph, sources: Sequence[fx.Node], marked: fx.Node | None
) -> tuple[dict[fx.Node, fx.Node], dict[fx.Node, fx.Node]]:
    """Add placeholders to ``graph``: for each source, and for each tensor that ``marked`` reads.

    ``marked`` is an operation that reads numbers in place of tensors, or ``None``. Returns the
    placeholders in two dicts: by source, and by tensor that ``marked`` reads.
    """
    copied = {n: graph.placeholder(f"in{i}") for i, n in enumerate(sources)}
    numbers = {n: graph.placeholder(f"number{i}") for i, n in enumerate(_tensor_inputs(marked))}
    return copied, numbers


def _add(
    graph: fx.Graph,
    node: fx.Node,
    call: tuple[Any, Any, Any],
    copied: dict[fx.Node, fx.Node],
    numbers: Mapping[fx.Node, fx.Node],
) -> None:
    """Add ``call`` to ``graph`` as the copy of ``node``, and a ``getitem`` for each of its values.

    Args:
        graph: the graph.
        node: the operation that is copied.
        call: function, arguments and keywords, with nodes of the original graph.
        copied: copies of nodes; the new ones are added.
        numbers: for each tensor that is replaced by one filled with a number, the number's node.
    """
    marked = {n: graph.call_function(filled, (copied[n], number)) for n, number in numbers.items()}
    copied[node] = add_call(graph, call, {**copied, **marked}, node.name)
    for value in values_of(node):
        picked = (copied[node], value.args[1])
        copied[value] = graph.call_function(operator.getitem, picked)


def results_of_run(run: Run) -> list[tuple[fx.Node, fx.Node, int]]:
    """Return a triple for each tensor that a run returns.

    It has the operation, the tensor's node, and its index among the tensors of the operation.
    """
    return [(target, value, i) for target in sorted(run.targets) for i, value in _results(target)]


def _results(target: fx.Node) -> list[tuple[int, fx.Node]]:
    """Return index and node of each tensor that an operation returns and that is read."""
    if is_tensor(target):
        return [(0, target)]
    return [(place_of(value), value) for value in values_of(target)]


def _size_names(run: Run, inside: Sequence[fx.Node]) -> dict[str, int]:
    names = names_in((run.rows,))
    for node in inside:
        names |= names_in((node.args, node.kwargs))
        for layout in layouts_of(node):
            names |= names_in(layout.numbers)
    return names
