"""The joint graph with runs that are computed in parts."""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import networkx as nx
import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint import rng
from fxremat.passes.joint.build import rebuilt
from fxremat.passes.joint.digest import target_name, written
from fxremat.passes.joint.graph import (
    JointGraph,
    add_call,
    is_tensor,
    operation_of,
    values_of,
)
from fxremat.passes.joint.sizes import LAYOUTS, Size, layouts_of, names_in, symbol
from fxremat.passes.split.beside import gathered
from fxremat.passes.split.losses import by_rows, gradients_beside, has_losses
from fxremat.passes.split.memory import Memory
from fxremat.passes.split.parts import ROWS, Changed, Output, Parts, Witness, filled
from fxremat.passes.split.rules import Way, for_rows, is_pointwise
from fxremat.passes.split.run import Looks, Run, place_of
from fxremat.passes.split.runs import Large, Ways, is_sum_of_products, runs_of
from fxremat.runtime.expected import Expected

Tensors = Sequence[torch.Tensor]

OtherBits = Callable[[Parts, Tensors], Changed]
"""What differs where a run is computed in parts: the run, and tensors that lie as those that it
takes.
"""


def split(
    joint: JointGraph,
    large: Large,
    other_bits: OtherBits | None,
    *,
    beside: bool,
    expected: dict[str, Expected],
    looks: Looks,
) -> fx.GraphModule | None:
    """The graph of ``joint``, with runs in parts where values are large.

    Args:
        joint: the step; it is not changed.
        large: values that are not to exist whole, and what one part of a run holds.
        other_bits: asked of each operation whose kernel may round otherwise in parts, then of each
            run as it will be emitted; ``None``: results may differ by rounding.
        beside: gradients of losses are computed with them where that can be.
        expected: see :func:`~fxremat.passes.split.losses.gradients_beside`.
        looks: at operations, in search of runs.

    Ensures: random draws keep their order; results and gradients lie as they did.

    Returns ``None`` where nothing can be computed in parts, or the looks run out.
    """
    if not has_losses(joint):
        return _in_parts(joint, large, other_bits, looks)
    joint = rebuilt(joint, by_rows(joint.module))
    exact = other_bits is not None
    if beside:
        foreseen = expected if exact else None
        early = rebuilt(joint, gradients_beside(joint, large.most_bytes, foreseen))
        found = _in_parts(early, large, other_bits, looks)
        if not exact or (found is not None and gathered(found)):
            return found
    return _in_parts(joint, large, other_bits, looks)


def _in_parts(
    joint: JointGraph, large: Large, other_bits: OtherBits | None, looks: Looks
) -> fx.GraphModule | None:
    """The graph of ``joint``, whose losses are ready for it, as :func:`split` returns it."""
    refused: set[tuple[fx.Node, Way]] = set()
    exact, known = other_bits is not None, Ways()
    while True:
        found = runs_of(joint, large, exact=exact, refused=refused, known=known, looks=looks)
        if looks.are_out:
            return None
        runs = [_Sized.of(run, joint, large, exact=exact) for run in found]
        new = {pair for own in runs for pair in _refused(own, joint, other_bits)}
        if not new and other_bits is not None:
            new = {pair for own in runs for pair in _changed(own, joint, other_bits)}
        if not new:
            return _Writer(joint, runs, exact=exact).write() if runs else None
        refused |= new


def _refused(
    own: _Sized, joint: JointGraph, other_bits: OtherBits | None
) -> Iterator[tuple[fx.Node, Way]]:
    """Operations of a run, and how it computes them, that cannot be: all run again without them."""
    if own.part_rows >= own.run.rows:  # there is one part
        yield from ((target, own.run.ways[target]) for target in own.run.targets)
    elif other_bits is not None:
        for node, way in own.run.ways.items():
            if way.same_bits or is_pointwise(node):  # the run has a witness
                continue
            if other_bits(*_alone(node, way, own, joint)):
                yield node, way


def _changed(
    own: _Sized, joint: JointGraph, other_bits: OtherBits
) -> Iterator[tuple[fx.Node, Way]]:
    """Operations of a run, and how it computes them, of which the run as emitted has other bits.

    Each of its operations may keep its bits by itself, and not where it reads what another left.
    """
    sources = sorted(own.run.sources)
    parts = _parts(own, sources, joint, exact=True)
    changed = other_bits(parts, [n.meta["val"] for n in sources])
    nodes = [parts.witnesses[place].node for place in changed.witnesses]
    targets = [target for target, _, _ in _results_of(own.run)]
    for node in (*nodes, *(targets[place] for place in changed.results)):
        yield node, own.run.ways[node]


@dataclass(frozen=True, slots=True)
class _Sized:
    """A run, what a part of it holds, its rows, and its bytes."""

    run: Run
    memory: Memory
    part_rows: int
    part_bytes: int

    @classmethod
    def of(cls, run: Run, joint: JointGraph, large: Large, *, exact: bool) -> _Sized:
        memory, most_bytes = Memory(run, joint), large.part_bytes(run, joint.storages)
        return cls(run, memory, *memory.part(most_bytes, exact=exact))


def _alone(node: fx.Node, way: Way, own: _Sized, joint: JointGraph) -> tuple[Parts, Tensors]:
    """An operation in parts by itself, and what it reads.

    Parts of what the run computes itself lie densely, as they do in the run.
    """
    run = Run(own.run.rows, {node: way}, targets=[node])
    tensors = [n for n in node.all_input_nodes if is_tensor(n)]
    run.rows_of.update(zip(tensors, way.inputs, strict=True))
    sources = sorted(run.sources)
    dense = {n for n in tensors if operation_of(n) in own.run.ways}
    alone = _Sized(run, Memory(run, joint), own.part_rows, 0)
    parts = _parts(alone, sources, joint, exact=False, dense=dense)
    return parts, [n.meta["val"] for n in sources]


class _Writer:
    """Writes the new graph."""

    def __init__(self, joint: JointGraph, runs: Sequence[_Sized], *, exact: bool) -> None:
        self._joint, self._exact = joint, exact
        self._sized = {own.run: own for own in runs}
        self._run_of = {target: own.run for own in runs for target in own.run.targets}
        self._parts_by_name: dict[str, Parts] = {}
        self._graph = fx.Graph()
        self._values: dict[fx.Node, fx.Node] = {}

    def write(self) -> fx.GraphModule:
        old = self._joint.module.graph
        for node in old.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._copy(node)
        for item in self._ordered():
            if isinstance(item, Run):
                self._call(item)
            else:
                self._copy(item)
                for value in values_of(item):
                    self._copy(value)
                for wait in _waits(item):
                    self._copy(wait)
        output = old.output_node()
        new = self._graph.output(fx.node.map_arg(output.args[0], self._values.__getitem__))
        new.meta = dict(output.meta)
        self._graph.lint()
        return torch_compat.graph_module(self._joint.module, self._graph)

    def _item(self, node: fx.Node) -> fx.Node | Run:
        own = operation_of(node)
        return self._run_of.get(own, own)

    def _ordered(self) -> list[fx.Node | Run]:
        """What is needed, each after all that it reads, else as it was."""
        joint = self._joint
        order = {n: i for i, n in enumerate(joint.module.graph.nodes)}
        draws = [n for n in (*joint.forward, *joint.backward) if rng.is_state(n) or rng.draws(n)]
        waiting: list[fx.Node | Run] = [
            self._item(n)
            for n in (*joint.results, *joint.gradients, *draws)
            if n.op == "call_function"
        ]
        after = nx.DiGraph()
        while waiting:
            item = waiting.pop()
            if after.has_node(item) and after.nodes[item].get("done"):
                continue
            after.add_node(item, done=True)
            reads = item.sources if isinstance(item, Run) else item.all_input_nodes
            for source in reads:
                if source.op == "call_function":
                    before = self._item(source)
                    after.add_edge(before, item)
                    waiting.append(before)
        for one, other in itertools.pairwise(draws):
            after.add_edge(self._item(one), self._item(other))

        def place(item: fx.Node | Run) -> int:
            nodes = item.targets if isinstance(item, Run) else [item]
            return max(order[n] for n in nodes)

        return list(nx.lexicographical_topological_sort(after, key=place))

    def _copy(self, node: fx.Node) -> None:
        new = self._graph.node_copy(node, self._values.__getitem__)
        self._values[node] = new

    def _call(self, run: Run) -> None:
        """A call that computes a run in parts."""
        sources = sorted(run.sources)
        parts = _parts(self._sized[run], sources, self._joint, exact=self._exact)
        parts = self._parts_by_name.setdefault(parts.__name__, parts)
        parts.settle(tuple(parts.hints.values()), keeps_bits=True)
        sizes = (Size.named(name, hint) for name, hint in parts.hints.items())
        args = (*(self._values[n] for n in sources), *sizes)
        made = self._graph.call_function(parts, args)  # type: ignore[arg-type]
        results = [value for _, value, _ in _results_of(run)]
        made.meta = {
            k: v for k, v in results[-1].meta.items() if k not in ("val", LAYOUTS, "tensor_meta")
        }
        if len(results) == 1:
            made.meta |= {k: results[0].meta[k] for k in ("val", LAYOUTS) if k in results[0].meta}
            self._values[results[0]] = made
            return
        made.meta["val"] = tuple(value.meta["val"] for value in results)
        if all(LAYOUTS in value.meta for value in results):
            made.meta[LAYOUTS] = tuple(layouts_of(value)[0] for value in results)
        for place, value in enumerate(results):
            pick = self._graph.call_function(operator.getitem, (made, place))
            pick.meta = dict(value.meta)
            self._values[value] = pick


def _parts(
    own: _Sized,
    sources: Sequence[fx.Node],
    joint: JointGraph,
    *,
    exact: bool,
    dense: Set[fx.Node] = frozenset(),
    marked: fx.Node | None = None,
) -> Parts:
    """A run as one operation, which takes ``sources``.

    Args:
        own: the run.
        sources: in this order.
        joint: the step.
        exact: its results must have the bits of the operations at once.
        dense: parts of these sources are made dense.
        marked: an operation that reads numbers in place of tensors; it takes these as well.
    """
    run = own.run
    inside = own.memory.inside
    graph, outputs = _one_part(own, sources, dense, marked)
    number = {node: i for i, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        arguments = written((node.args, dict(node.kwargs)), lambda n: f"%{number[n]}")
        lines.append(f"{target_name(node.target)} {arguments}")
    at_once = _at_once(own, sources, marked)
    ways = [run.rows_of[n] for n in sources]
    ways += [None] * len(_tensors(marked))
    text = "\n".join([*lines, repr((ways, outputs, run.rows, own.part_rows, exact, joint.device))])
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    first = [*dict.fromkeys(str(n.target).split(".")[1] for n in inside)][:3]
    name = "_".join(["parts", *first, digest])
    return Parts(
        name,
        graph,
        ways,
        outputs,
        run.rows,
        own.part_rows,
        _names(run, inside),
        joint.device,
        exact=exact,
        certain=all(way.same_bits for way in run.ways.values()),
        part_bytes=own.part_bytes,
        whole=[node for node in inside if not joint.storages.is_view(node)],
        at_once=at_once,
        witnesses=[
            _witness(n, own, sources, joint) for n in inside if exact and _is_uneven(n, run)
        ],
    )


def _tensors(node: fx.Node | None) -> list[fx.Node]:
    """Tensors that an operation reads."""
    return [n for n in node.all_input_nodes if is_tensor(n)] if node is not None else []


def _is_uneven(node: fx.Node, run: Run) -> bool:
    """Whether the bits of what a pointwise operation computes may depend on where it is."""
    return not run.ways[node].same_bits and is_pointwise(node)


def _witness(node: fx.Node, own: _Sized, sources: Sequence[fx.Node], joint: JointGraph) -> Witness:
    """What shows by which formula an operation of a run computes each number."""
    needed, waiting = {node}, [node]
    while waiting:
        for value in _tensors(waiting.pop()):
            operation = operation_of(value)
            if operation in own.run.ways and operation not in needed:
                needed.add(operation)
                waiting.append(operation)
    run = Run(own.run.rows, {n: own.run.ways[n] for n in own.run.ways if n in needed})
    run.targets.append(node)
    read = {v for n in needed for v in _tensors(n)}
    run.rows_of.update((v, rows) for v, rows in own.run.rows_of.items() if v in read)
    taken = [n for n in sources if n in {*run.sources}]
    sized = _Sized(run, Memory(run, joint), own.part_rows, 0)
    parts = _parts(sized, taken, joint, exact=False, marked=node)
    return Witness(node, parts, tuple(sources.index(n) for n in taken))


def _one_part(
    own: _Sized, sources: Sequence[fx.Node], dense: Set[fx.Node], marked: fx.Node | None
) -> tuple[fx.Graph, list[Output]]:
    """What computes one part of a run, and the results of the run."""
    run, inside = own.run, own.memory.inside
    rows = Size(own.part_rows, symbol(ROWS), {ROWS: own.part_rows})
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
        over = own.memory.over.get(node)
        if over is not None:
            called, kwargs = over.variant, {**kwargs, over.argument: over.value}
        _add(graph, node, (called, args, kwargs), copied, numbers if node is marked else {})
    given: list[fx.Node] = []
    outputs = []
    for target, value, i in _results_of(run):
        (layout,) = layouts_of(value)
        way = run.ways[target].outputs[i]
        outputs.append(Output(way, layout, value.meta["val"].dtype, target in gone))
        given += [copied[a] for a in target.args] if target in gone else [copied[value]]  # type: ignore[index]
    graph.output(tuple(given))
    return graph, outputs


def _at_once(own: _Sized, sources: Sequence[fx.Node], marked: fx.Node | None) -> fx.Graph:
    """The operations of a run as they were traced."""
    graph = fx.Graph()
    copied, numbers = _placeholders(graph, sources, marked)
    for node in own.memory.inside:
        call = node.target, node.args, node.kwargs
        _add(graph, node, call, copied, numbers if node is marked else {})
    graph.output(tuple(copied[value] for _, value, _ in _results_of(own.run)))
    return graph


def _placeholders(
    graph: fx.Graph, sources: Sequence[fx.Node], marked: fx.Node | None
) -> tuple[dict[fx.Node, fx.Node], dict[fx.Node, fx.Node]]:
    """Placeholders of sources, and of numbers for the tensors that an operation reads."""
    copied = {n: graph.placeholder(f"in{i}") for i, n in enumerate(sources)}
    numbers = {n: graph.placeholder(f"number{i}") for i, n in enumerate(_tensors(marked))}
    return copied, numbers


def _add(
    graph: fx.Graph,
    node: fx.Node,
    call: tuple[Any, Any, Any],
    copied: dict[fx.Node, fx.Node],
    numbers: Mapping[fx.Node, fx.Node],
) -> None:
    """Add the call that stands for ``node`` to a graph, with its values; it reads ``numbers`` in
    place of what these belong to.
    """
    marked = {n: graph.call_function(filled, (copied[n], own)) for n, own in numbers.items()}
    copied[node] = add_call(graph, call, {**copied, **marked}, node.name)
    for value in values_of(node):
        picked = (copied[node], value.args[1])
        copied[value] = graph.call_function(operator.getitem, picked)


def _results_of(run: Run) -> list[tuple[fx.Node, fx.Node, int]]:
    """Operations that a run is computed for, with each tensor that is read, and its place."""
    return [(target, value, i) for target in sorted(run.targets) for i, value in _results(target)]


def _waits(node: fx.Node) -> list[fx.Node]:
    """The waits for what an operation returns, if it is a collective."""
    users = (user for own in (node, *values_of(node)) for user in own.users)
    return [user for user in users if torch_compat.is_wait(user)]


def _results(target: fx.Node) -> list[tuple[int, fx.Node]]:
    """The tensors that an operation returns and somebody reads, with their places."""
    if is_tensor(target):
        return [(0, target)]
    return [(place_of(value), value) for value in values_of(target)]


def _names(run: Run, inside: Sequence[fx.Node]) -> dict[str, int]:
    """Sizes that a run follows."""
    names = names_in((run.rows,))
    for node in inside:
        names |= names_in((node.args, node.kwargs))
        for layout in layouts_of(node):
            names |= names_in(layout.numbers)
    return names
