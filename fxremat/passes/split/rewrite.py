"""Rewrite the joint graph with runs that are computed in parts."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence

import networkx as nx
import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint import rng
from fxremat.passes.joint.build import rebuilt
from fxremat.passes.joint.constraints import CONSTRAINT
from fxremat.passes.joint.graph import JointGraph, is_tensor, operation_of, values_of
from fxremat.passes.joint.sizes import LAYOUTS, Size, layouts_of
from fxremat.passes.parts.parts import Changed, Parts
from fxremat.passes.parts.rows import Way
from fxremat.passes.split.losses import by_rows, gather_gradients, gradients_with_losses, has_losses
from fxremat.passes.split.memory import Memory
from fxremat.passes.split.operation import SizedRun, as_operation, results_of_run
from fxremat.passes.split.run import Looks, Run
from fxremat.passes.split.runs import Large, runs_of
from fxremat.passes.split.ways import Ways, is_pointwise
from fxremat.runtime.expected import Expected

Tensors = Sequence[torch.Tensor]

OtherBits = Callable[[Parts, Tensors], Changed]
"""Returns what differs if a run is computed in parts, given tensors laid out as its inputs."""


def split(
    joint: JointGraph,
    large: Large,
    other_bits: OtherBits | None,
    *,
    early_gradients: bool,
    expected: dict[str, Expected],
    looks: Looks,
    most_operations: int,
) -> fx.GraphModule | None:
    """Return the graph of ``joint`` in which large values are computed for some rows at a time.

    Operations that compute or read them are replaced by runs: each is one operation, which computes
    part after part of its rows.

    Args:
        joint: the step; it is not changed.
        large: values that must not exist whole, and what one part of a run may hold.
        other_bits: returns what differs if a run is computed in parts. It is called for each
            operation whose kernel may round otherwise in parts, then for each run as it will be
            emitted. ``None``: results may differ by rounding.
        early_gradients: whether gradients of losses are computed together with them if possible.
        expected: expected gradients of the step's results; see
            :func:`~fxremat.passes.split.losses.gradients_with_losses`.
        looks: counts and limits the steps of the search for runs.
        most_operations: how many operations a run has at most.

    Ensures: random draws keep their order; results and gradients keep their layouts.

    Returns ``None`` if nothing can be computed in parts, or if the search reaches its limit.
    """
    if not has_losses(joint):
        return _in_parts(joint, large, other_bits, looks, most_operations)
    joint = rebuilt(joint, by_rows(joint.module))
    exact = other_bits is not None
    if early_gradients:
        assumed = expected if exact else None
        early = rebuilt(joint, gradients_with_losses(joint, large.least_bytes, assumed))
        module = _in_parts(early, large, other_bits, looks, most_operations)
        if not exact or (module is not None and gather_gradients(module)):
            return module
    return _in_parts(joint, large, other_bits, looks, most_operations)


def _in_parts(
    joint: JointGraph,
    large: Large,
    other_bits: OtherBits | None,
    looks: Looks,
    most_operations: int,
) -> fx.GraphModule | None:
    """Return the graph, or ``None``, as :func:`split` does, but without rewriting losses first."""
    refused: set[tuple[fx.Node, Way]] = set()
    exact, cache, large = other_bits is not None, Ways(), large.of(joint)
    while True:
        unsized = runs_of(
            joint,
            large,
            exact=exact,
            refused=refused,
            cache=cache,
            most_operations=most_operations,
            looks=looks,
        )
        if looks.are_out:
            return None
        runs = [SizedRun.of(run, joint, large, exact=exact) for run in unsized]
        new = {pair for sized in runs for pair in _refused(sized, joint, other_bits)}
        if not new and other_bits is not None:
            new = {pair for sized in runs for pair in _changed(sized, joint, other_bits)}
        if not new:
            return _Writer(joint, runs, exact=exact).write() if runs else None
        refused |= new


def _refused(
    sized: SizedRun, joint: JointGraph, other_bits: OtherBits | None
) -> Iterator[tuple[fx.Node, Way]]:
    """Yield operations of a run, with their ways, that must not be used in another search.

    These are the targets if there is a single part, and operations that parts compute with other
    bits.
    """
    if sized.part_rows >= sized.run.rows:  # there is one part
        yield from ((target, sized.run.ways[target]) for target in sized.run.targets)
    elif other_bits is not None:
        for node, way in sized.run.ways.items():
            if way.same_bits or is_pointwise(node):  # pointwise operations have witnesses
                continue
            if other_bits(*_single_operation(node, way, sized, joint)):
                yield node, way


def _changed(
    sized: SizedRun, joint: JointGraph, other_bits: OtherBits
) -> Iterator[tuple[fx.Node, Way]]:
    """Yield operations, with their ways, that have other bits if their run is computed in parts.

    Each operation may keep its bits by itself, but not with inputs that another one has laid out.
    """
    sources = sorted(sized.run.sources)
    parts = as_operation(sized, sources, joint, exact=True)
    changed = other_bits(parts, [n.meta["val"] for n in sources])
    nodes = [parts.witnesses[place].node for place in changed.witnesses]
    targets = [target for target, _, _ in results_of_run(sized.run)]
    for node in (*nodes, *(targets[place] for place in changed.results)):
        yield node, sized.run.ways[node]


def _single_operation(
    node: fx.Node, way: Way, sized: SizedRun, joint: JointGraph
) -> tuple[Parts, Tensors]:
    """Return ``node`` by itself as an operation in parts, and the fake tensors that it reads.

    Parts of inputs that the run computes itself are dense, as they are in the run.
    """
    run = Run(sized.run.rows, {node: way}, targets=[node])
    tensors = [n for n in node.all_input_nodes if is_tensor(n)]
    run.rows_of.update(zip(tensors, way.inputs, strict=True))
    sources = sorted(run.sources)
    dense = {n for n in tensors if operation_of(n) in sized.run.ways}
    single = SizedRun(run, Memory(run, joint), sized.part_rows, 0)
    parts = as_operation(single, sources, joint, exact=False, dense=dense)
    return parts, [n.meta["val"] for n in sources]


_OF_ONE = ("val", LAYOUTS, CONSTRAINT)
"""Metadata of a single result of a run."""


class _Writer:
    def __init__(self, joint: JointGraph, runs: Sequence[SizedRun], *, exact: bool) -> None:
        self._joint, self._exact = joint, exact
        self._sized = {sized.run: sized for sized in runs}
        self._run_of = {target: sized.run for sized in runs for target in sized.run.targets}
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
                for wait in _waits_for(item):
                    self._copy(wait)
        output = old.output_node()
        new = self._graph.output(fx.node.map_arg(output.args[0], self._values.__getitem__))
        new.meta = dict(output.meta)
        self._graph.lint()
        return torch_compat.graph_module(self._joint.module, self._graph)

    def _item_of(self, node: fx.Node) -> fx.Node | Run:
        operation = operation_of(node)
        return self._run_of.get(operation, operation)

    def _ordered(self) -> list[fx.Node | Run]:
        """Return the operations and runs that the step needs, each after all that it reads.

        Where that leaves a choice, they are in graph order. Random draws keep their order.
        """
        joint = self._joint
        order = {n: i for i, n in enumerate(joint.module.graph.nodes)}
        draws = [
            n for n in (*joint.forward, *joint.backward) if rng.is_state(n) or rng.has_effect(n)
        ]
        waiting: list[fx.Node | Run] = [
            self._item_of(n)
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
                    before = self._item_of(source)
                    after.add_edge(before, item)
                    waiting.append(before)
        for one, other in itertools.pairwise(draws):
            after.add_edge(self._item_of(one), self._item_of(other))

        def place(item: fx.Node | Run) -> int:
            nodes = item.targets if isinstance(item, Run) else [item]
            return max(order[n] for n in nodes)

        return list(nx.lexicographical_topological_sort(after, key=place))

    def _copy(self, node: fx.Node) -> None:
        new = self._graph.node_copy(node, self._values.__getitem__)
        self._values[node] = new

    def _call(self, run: Run) -> None:
        sources = sorted(run.sources)
        parts = as_operation(self._sized[run], sources, self._joint, exact=self._exact)
        parts = self._parts_by_name.setdefault(parts.__name__, parts)
        parts.confirm_bits(tuple(parts.hints.values()), keeps_bits=True)
        sizes = (Size.named(name, hint) for name, hint in parts.hints.items())
        args = (*(self._values[n] for n in sources), *sizes)
        made = self._graph.call_function(parts, args)  # type: ignore[arg-type]
        results = [value for _, value, _ in results_of_run(run)]
        made.meta = {
            k: v for k, v in results[-1].meta.items() if k not in (*_OF_ONE, "tensor_meta")
        }
        if len(results) == 1:
            made.meta |= {k: results[0].meta[k] for k in _OF_ONE if k in results[0].meta}
            self._values[results[0]] = made
            return
        made.meta["val"] = tuple(value.meta["val"] for value in results)
        if all(LAYOUTS in value.meta for value in results):
            made.meta[LAYOUTS] = tuple(layouts_of(value)[0] for value in results)
        for place, value in enumerate(results):
            pick = self._graph.call_function(operator.getitem, (made, place))
            pick.meta = dict(value.meta)
            self._values[value] = pick


def _waits_for(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that wait for the results of ``node``; empty if it is no collective."""
    users = (user for value in (node, *values_of(node)) for user in value.users)
    return [user for user in users if torch_compat.is_wait(user)]
