"""The joint graph with runs that are computed in parts."""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections.abc import Mapping, Sequence

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
from fxremat.passes.split.losses import by_rows
from fxremat.passes.split.parts import ROWS, Output, Parts
from fxremat.passes.split.rules import Result, for_rows
from fxremat.passes.split.runs import Run, SameBits, part_count, place_of, runs_of

aten = torch.ops.aten


def split(joint: JointGraph, most_bytes: int, same_bits: SameBits | None) -> fx.GraphModule | None:
    """The graph of ``joint``, with runs in parts where values take more than ``most_bytes``.

    Args:
        joint: the step; it is not changed.
        most_bytes: of a storage that is to exist whole, and of what one part of a run holds.
        same_bits: which operations may be computed in parts; ``None``: results may differ by
            rounding.

    Ensures: random draws keep their order; results and gradients lie as they did.

    Returns ``None`` where nothing can be computed in parts.
    """
    joint = rebuilt(joint, by_rows(joint.module))
    runs = runs_of(joint, most_bytes, same_bits)
    if not runs:
        return None
    return _Writer(joint, [(run, part_count(run, joint, most_bytes)) for run in runs]).write()


class _Writer:
    """Writes the new graph."""

    def __init__(self, joint: JointGraph, runs: Sequence[tuple[Run, int]]) -> None:
        self._joint = joint
        self._counts = dict(runs)
        self._run_of = {target: run for run, _ in runs for target in run.targets}
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
        order = {n: i for i, n in enumerate(self._joint.module.graph.nodes)}
        sources = sorted(run.sources, key=order.__getitem__)
        inside = sorted(run.ways, key=order.__getitem__)
        results = [
            (target, value, i)
            for target in sorted(run.targets, key=order.__getitem__)
            for i, value in _results(target)
        ]
        names = _names(run, inside, sources)
        parts = self._parts(run, inside, sources, results, names)
        args = (
            *(self._values[n] for n in sources),
            *(Size.named(name, hint) for name, hint in names.items()),
        )
        made = self._graph.call_function(parts, args)  # type: ignore[arg-type]
        last = results[-1][1]
        made.meta = {k: v for k, v in last.meta.items() if k not in ("val", LAYOUTS, "tensor_meta")}
        if len(results) == 1:
            made.meta["val"] = last.meta["val"]
            if LAYOUTS in last.meta:
                made.meta[LAYOUTS] = last.meta[LAYOUTS]
            self._values[last] = made
            return
        made.meta["val"] = tuple(value.meta["val"] for _, value, _ in results)
        if all(LAYOUTS in value.meta for _, value, _ in results):
            made.meta[LAYOUTS] = tuple(layouts_of(value)[0] for _, value, _ in results)
        for place, (_, value, _) in enumerate(results):
            pick = self._graph.call_function(operator.getitem, (made, place))
            pick.meta = dict(value.meta)
            self._values[value] = pick

    def _parts(
        self,
        run: Run,
        inside: Sequence[fx.Node],
        sources: Sequence[fx.Node],
        results: Sequence[tuple[fx.Node, fx.Node, int]],
        names: Mapping[str, int],
    ) -> Parts:
        count = self._counts[run]
        rows = Size(-(-int(run.rows) // count), symbol(ROWS), {ROWS: -(-int(run.rows) // count)})
        graph = fx.Graph()
        copied: dict[fx.Node, fx.Node] = {
            n: graph.placeholder(f"in{i}") for i, n in enumerate(sources)
        }
        gone = {t for t in run.targets if _is_sum_of_products(t, run)}
        for node in inside:
            if node in gone:
                continue
            args, kwargs = for_rows(node, run.ways[node], rows)
            copied[node] = add_call(graph, (node.target, args, kwargs), copied)
            for value in values_of(node):
                copied[value] = graph.call_function(operator.getitem, (copied[node], value.args[1]))
        given: list[fx.Node] = []
        outputs = []
        for target, value, i in results:
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
        text = "\n".join([*lines, repr((ways, outputs, run.rows, count, self._joint.device))])
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        first = [*dict.fromkeys(str(n.target).split(".")[1] for n in inside)][:3]
        name = "_".join([f"parts{count}", *first, digest])
        made = Parts(name, graph, ways, outputs, run.rows, count, names, self._joint.device)
        return self._parts_by_name.setdefault(name, made)


def _results(target: fx.Node) -> list[tuple[int, fx.Node]]:
    """The tensors that an operation returns and somebody reads, with their places."""
    if is_tensor(target):
        return [(0, target)]
    return [(place_of(value), value) for value in values_of(target)]


def _is_sum_of_products(target: fx.Node, run: Run) -> bool:
    """Whether a target is the sum over the parts of products, which are added up in place."""
    return target.target is aten.mm.default and run.ways[target].outputs == (Result.SUM,)


def _names(run: Run, inside: Sequence[fx.Node], sources: Sequence[fx.Node]) -> dict[str, int]:
    """Sizes that a run follows."""
    names = names_in((run.rows,))
    for node in inside:
        names |= names_in((node.args, node.kwargs))
        for layout in layouts_of(node):
            names |= names_in(layout.numbers)
    return names
