"""The joint graph with runs that are computed in parts."""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
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
from fxremat.passes.split.parts import ROWS, Output, Parts
from fxremat.passes.split.rules import Way, for_rows
from fxremat.passes.split.run import Looks, Run, place_of
from fxremat.passes.split.runs import Large, Ways, is_sum_of_products, runs_of
from fxremat.runtime.expected import Expected

Tensors = Sequence[torch.Tensor]

SameBits = Callable[[Parts, Tensors, Callable[[Tensors], Tensors]], bool]
"""Whether an operation keeps its bits in parts: the operation in parts, tensors that lie as those
that it reads, and the operation at once.
"""


def split(
    joint: JointGraph,
    large: Large,
    same_bits: SameBits | None,
    *,
    beside: bool,
    expected: dict[str, Expected],
    looks: Looks,
) -> fx.GraphModule | None:
    """The graph of ``joint``, with runs in parts where values are large.

    Args:
        joint: the step; it is not changed.
        large: values that are not to exist whole, and what one part of a run holds.
        same_bits: asked of each operation whose kernel may round otherwise in parts; ``None``:
            results may differ by rounding.
        beside: gradients of losses are computed with them where that can be.
        expected: see :func:`~fxremat.passes.split.losses.gradients_beside`.
        looks: at operations, in search of runs.

    Ensures: random draws keep their order; results and gradients lie as they did.

    Returns ``None`` where nothing can be computed in parts, or the looks run out.
    """
    if not has_losses(joint):
        return _in_parts(joint, large, same_bits, looks)
    joint = rebuilt(joint, by_rows(joint.module))
    exact = same_bits is not None
    if beside:
        foreseen = expected if exact else None
        early = rebuilt(joint, gradients_beside(joint, large.most_bytes, foreseen))
        found = _in_parts(early, large, same_bits, looks)
        if not exact or (found is not None and gathered(found)):
            return found
    return _in_parts(joint, large, same_bits, looks)


def _in_parts(
    joint: JointGraph, large: Large, same_bits: SameBits | None, looks: Looks
) -> fx.GraphModule | None:
    """The graph of ``joint``, whose losses are ready for it, as :func:`split` returns it."""
    refused: set[tuple[fx.Node, Way]] = set()
    exact, known = same_bits is not None, Ways()
    while True:
        found = runs_of(joint, large, exact=exact, refused=refused, known=known, looks=looks)
        if looks.are_out:
            return None
        runs = [_Sized.of(run, joint, large, exact=exact) for run in found]
        new = {pair for own in runs for pair in _refused(own, joint, same_bits)}
        if not new:
            return _Writer(joint, runs, exact=exact).write() if runs else None
        refused |= new


def _refused(
    own: _Sized, joint: JointGraph, same_bits: SameBits | None
) -> Iterator[tuple[fx.Node, Way]]:
    """Operations of a run, and how it computes them, that cannot be: all run again without them."""
    if own.part_rows >= own.run.rows:  # there is one part
        yield from ((target, own.run.ways[target]) for target in own.run.targets)
    elif same_bits is not None:
        for node, way in own.run.ways.items():
            if not way.same_bits and not same_bits(*_alone(node, way, own, joint)):
                yield node, way


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


def _alone(
    node: fx.Node, way: Way, own: _Sized, joint: JointGraph
) -> tuple[Parts, Tensors, Callable[[Tensors], Tensors]]:
    """An operation in parts by itself, what it reads, and the operation at once."""
    run = Run(own.run.rows, {node: way}, targets=[node])
    tensors = (n for n in node.all_input_nodes if is_tensor(n))
    run.rows_of.update(zip(tensors, way.inputs, strict=True))
    sources = sorted(run.sources)

    def whole(given: Tensors) -> Tensors:
        read = dict(zip(sources, given, strict=True))
        args: Any = fx.node.map_arg(node.args, read.__getitem__)
        kwargs: Any = fx.node.map_arg(node.kwargs, read.__getitem__)
        made = node.target(*args, **kwargs)  # type: ignore[operator]
        if isinstance(made, torch.Tensor):
            return [made]
        returned = [t for t in made if isinstance(t, torch.Tensor)]
        return [returned[i] for i, _ in _results(node)]

    alone = _Sized(run, Memory(run, joint), own.part_rows, 0)
    parts = _parts(alone, sources, joint, exact=False)
    return parts, [n.meta["val"] for n in sources], whole


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


def _parts(own: _Sized, sources: Sequence[fx.Node], joint: JointGraph, *, exact: bool) -> Parts:
    """A run as one operation, which takes ``sources``."""
    run = own.run
    inside = own.memory.inside
    rows = Size(own.part_rows, symbol(ROWS), {ROWS: own.part_rows})
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {n: graph.placeholder(f"in{i}") for i, n in enumerate(sources)}
    gone = {t for t in run.targets if is_sum_of_products(t, run.ways[t])}
    for node in inside:
        if node in gone:
            continue
        args, kwargs = for_rows(node, run.ways[node], rows)
        called: Any = node.target
        over = own.memory.over.get(node)
        if over is not None:
            called, kwargs = over.variant, {**kwargs, over.argument: over.value}
        copied[node] = add_call(graph, (called, args, kwargs), copied, node.name)
        for value in values_of(node):
            picked = (copied[node], value.args[1])
            copied[value] = graph.call_function(operator.getitem, picked)
    given: list[fx.Node] = []
    outputs = []
    for target, value, i in _results_of(run):
        (layout,) = layouts_of(value)
        way = run.ways[target].outputs[i]
        outputs.append(Output(way, layout, value.meta["val"].dtype, target in gone))
        given += [copied[a] for a in target.args] if target in gone else [copied[value]]  # type: ignore[index]
    graph.output(tuple(given))
    number = {node: i for i, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        arguments = written((node.args, dict(node.kwargs)), lambda n: f"%{number[n]}")
        lines.append(f"{target_name(node.target)} {arguments}")
    ways = [run.rows_of[n] for n in sources]
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
        part_bytes=own.part_bytes,
        whole=[node for node in inside if not joint.storages.is_view(node)],
    )


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
