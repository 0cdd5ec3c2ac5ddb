"""Gather operations on values whose sizes depend on data into composites with fixed sizes.

``nonzero``, ``split`` into parts of computed lengths, or ``repeat_interleave`` return tensors whose
sizes are known only when they run. The planner needs sizes beforehand. So the operations that
compute with such tensors become one operation, up to the results whose sizes are fixed again, such
as that of ``index_add``. What the backward needs of the tensors inside crosses in one bundle.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.errors import DataSizesError
from fxremat.passes.joint.data_groups import Grouping, is_check
from fxremat.passes.joint.digest import target_name, written
from fxremat.passes.joint.graph import copy_origin, tensors_of
from fxremat.runtime.composite import COMPOSITES, Composite, bundled, value_of

BUNDLE = "fxremat_bundle"
"""Key of the metadata of nodes whose value is a bundle."""

MOST_DEPTH = 16
"""Operations after one another that a composite may have where the graph can be broken instead."""


def gather_data_sizes(
    module: fx.GraphModule, *, forward_output_count: int, bounds: bool, may_break: bool
) -> fx.GraphModule:
    """Return a joint graph in which sizes that depend on data occur only inside of composites.

    Args:
        module: the joint graph; it is not changed.
        forward_output_count: how many of its outputs belong to the forward.
        bounds: whether bundles are as large as they can be; otherwise they are as large as for
            sizes of 1, and measurements replace these.
        may_break: whether the graph can be broken where such sizes are computed instead.

    Ensures: bits stay the same; a forward composite computes nothing of the backward.

    Returns ``module`` itself if no size depends on data.

    Raises:
        DataSizesError: such a size leads out of the graph, into it, or to an operation that waits
            for other processes; or a composite would have much of the model inside, where nothing
            could be recomputed by itself, and the graph can be broken.
    """
    data = {n for n in module.graph.nodes if torch_compat.depends_on_data(n.meta.get("val"))}
    if not data:
        return module
    grouping = Grouping(module.graph, data, forward_output_count)
    made_by = (node for node in module.graph.nodes if node in data and node.op == "call_function")
    first = next(made_by, None) or next(node for node in module.graph.nodes if node in data)
    made = f"the sizes that {first.target} computes depend on data"
    line = torch_compat.described_lines(first)
    if not grouping.is_possible():
        raise DataSizesError(
            f"{made}, and lead out of the graph, or to an operation that waits for other "
            f"processes{line}\nfxremat plans sizes that do not: return tensors of fixed sizes"
        )
    grouping.group()
    if may_break and grouping.depth() > MOST_DEPTH:
        raise DataSizesError(
            f"{made}, and so do {grouping.depth()} operations after one another{line}"
        )
    graph = _Gathering(grouping, bounds).gathered()
    graph.lint()
    return torch_compat.graph_module(module, graph)


def is_bundle(node: fx.Node) -> bool:
    """Return whether the value of ``node`` is a bundle, whose tensors have sizes from data."""
    return BUNDLE in node.meta


def is_composite(node: fx.Node) -> bool:
    """Return whether ``node`` runs a composite, whose memory depends on data."""
    return any(isinstance(called, Composite) for called in (node.target, *node.args[2:3]))


@dataclass(eq=False)
class _Made:
    """A composite as it is built.

    Attributes:
        members: its nodes, in graph order.
        inner: the graph of the operations inside.
        reads: for each node outside that it reads, the placeholder inside; for each bundle that it
            reads, given as the composite that makes it and its number, too.
        copied: nodes inside, by node of the joint graph.
        saved: by bundle, the nodes whose values others read from it, with their places.
        results: the nodes with fixed sizes that are read outside.
        outer: by result, or number of a bundle, the node of the new graph.
    """

    members: list[fx.Node]
    inner: fx.Graph = field(default_factory=fx.Graph)
    reads: dict[Any, fx.Node] = field(default_factory=dict)
    copied: dict[fx.Node, fx.Node] = field(default_factory=dict)
    saved: tuple[dict[fx.Node, int], dict[fx.Node, int]] = field(default_factory=lambda: ({}, {}))
    results: list[fx.Node] = field(default_factory=list)
    outer: dict[object, fx.Node] = field(default_factory=dict)


class _Gathering:
    """Builds the graph of a grouping.

    Args:
        grouping: the groups.
        bounds: whether bundles are as large as they can be.
    """

    def __init__(self, grouping: Grouping, bounds: bool) -> None:
        self._grouping, self._bounds = grouping, bounds
        self._crossing: set[fx.Node] = set()
        self._all, self._made = self._filled()
        self._all, self._made = self._filled()  # now that it is known which values cross
        self._read = {read for made in self._all for read in made.reads}
        self._graph = fx.Graph()
        self._copied: dict[fx.Node, fx.Node] = {}

    def gathered(self) -> fx.Graph:
        """Return the new graph."""
        for made in self._all:
            made.results = [n for n in made.members if self._is_result(n)]
        for node in self._grouping.graph.nodes:
            within = self._made.get(node)
            if node not in self._grouping.data and (within is None or node in within.results):
                self._emit(node)
        return self._graph

    def _is_result(self, node: fx.Node) -> bool:
        """Return whether ``node``, in a composite, has a fixed size and is read outside of it."""
        if node in self._grouping.data:
            return False
        users = (u for u in node.users if u not in self._made and u not in self._grouping.data)
        return node in self._read or any(True for _ in users)

    def _filled(self) -> tuple[list[_Made], dict[fx.Node, _Made]]:
        """Return the composites with all that they compute inside, and the one of each member."""
        every = [_Made(members) for members in self._grouping.members()]
        self._made = {node: made for made in every for node in made.members}
        for made in every:
            for node in made.members:
                self._inside(node, made)
        return every, self._made

    def _inside(self, node: fx.Node, made: _Made) -> fx.Node:
        """Return the node of the inner graph that has the value of ``node``."""
        if node in made.copied:
            return made.copied[node]
        own = self._made.get(node)
        data = self._grouping.data
        if own is made or (node in data and self._grouping.is_repeated(node)):
            inputs = {n: self._inside(n, made) for n in node.all_input_nodes}
            copy = made.inner.node_copy(node, inputs.__getitem__)
        elif node in data:
            assert own is not None
            if self._grouping.side(own.members[0]) == self._grouping.side(made.members[0]):
                self._crossing.add(node)
            number = 0 if node in self._crossing else 1
            place = own.saved[number].setdefault(node, len(own.saved[number]))
            bundle = self._placeholder((own, number), made)
            copy = made.inner.call_function(value_of, (bundle, place))
        else:
            copy = self._placeholder(node, made)
        made.copied[node] = copy
        return copy

    def _placeholder(self, read: Any, made: _Made) -> fx.Node:
        """Return the placeholder inside of ``made`` for a node outside or for another's bundle."""
        if read not in made.reads:
            before = next(iter(made.inner.nodes), None)
            after = [*made.reads.values()][-1:]
            if after:
                with made.inner.inserting_after(after[0]):
                    made.reads[read] = made.inner.placeholder(f"in{len(made.reads)}")
            elif before is not None:
                with made.inner.inserting_before(before):
                    made.reads[read] = made.inner.placeholder("in0")
            else:
                made.reads[read] = made.inner.placeholder("in0")
        return made.reads[read]

    def _emit(self, node: fx.Node) -> None:
        """Add ``node``, or the composite that it is in, to the new graph after what it reads."""
        waiting: list[Any] = [self._made.get(node, node)]
        while waiting:
            top = waiting[-1]
            reads = list(top.reads) if isinstance(top, _Made) else top.all_input_nodes
            nodes = top.members if isinstance(top, _Made) else [top]
            draws = [
                self._grouping.draw_before[n] for n in nodes if n in self._grouping.draw_before
            ]
            before = (*reads, *draws)
            units = [n[0] if isinstance(n, tuple) else self._made.get(n, n) for n in before]
            missing = [unit for unit in units if unit is not top and not self._is_emitted(unit)]
            if missing:
                waiting += missing
                continue
            waiting.pop()
            if self._is_emitted(top):
                continue
            if isinstance(top, _Made):
                self._emit_composite(top)
            else:
                self._copied[top] = self._graph.node_copy(top, self._value)

    def _is_emitted(self, unit: Any) -> bool:
        return bool(unit.outer) if isinstance(unit, _Made) else unit in self._copied

    def _value(self, node: fx.Node) -> fx.Node:
        """Return the node of the new graph that has the value of ``node``."""
        return self._made[node].outer[node] if node in self._made else self._copied[node]

    def _emit_composite(self, made: _Made) -> None:
        target = self._composite(made)
        arguments = [
            r[0].outer[r[1]] if isinstance(r, tuple) else self._value(r) for r in made.reads
        ]
        node = self._graph.create_node("call_function", target, tuple(arguments), name=target.label)
        last = made.members[-1]
        copy_origin(last, node)
        tag = next((n.meta["recompute"] for n in made.members if "recompute" in n.meta), None)
        if tag is not None:
            node.meta["recompute"] = tag
        values: dict[Any, Any] = {n: n.meta["val"] for n in made.results}
        values |= {i: self._fake_bundle(made, own) for i, own in enumerate(made.saved) if own}
        made.outer[made] = node
        for place, (key, value) in enumerate(values.items()):
            result = node
            if len(values) > 1:
                result = self._graph.call_function(operator.getitem, (node, place))
                copy_origin(node, result)
            result.meta["val"] = value
            if isinstance(key, int):
                result.meta[BUNDLE] = True
            made.outer[key] = result
        if len(values) > 1:
            node.meta["val"] = tuple(values.values())

    def _composite(self, made: _Made) -> Composite:
        """Return what runs the operations of ``made``; equal ones are one object."""
        outputs = [made.copied[n] for n in made.results]
        for own in filter(None, made.saved):
            saved = (made.copied[n] for n in own)
            outputs.append(made.inner.call_function(bundled, (str(self._device(made)), *saved)))
        made.inner.output(tuple(outputs))
        _erase_unread(made.inner)
        digest = _digest(made)
        shared: Composite | None = COMPOSITES.of(digest)
        if shared is not None:
            return shared
        operations = [n for n in made.inner.nodes if isinstance(n.target, torch._ops.OpOverload)]
        draws = tuple(n.target for n in operations if torch_compat.draws_random_numbers(n))
        torch_compat.boxed_code(made.inner)
        names = [str(n.target).split(".")[1] for n in operations] or ["numbers"]
        return Composite(
            names[0] if len(names) == 1 else f"{names[0]}_to_{names[-1]}",
            digest,
            fx.GraphModule(torch.nn.Module(), made.inner).forward,
            draws=draws,
        )

    def _device(self, made: _Made) -> torch.device:
        tensors = (t for n in made.members for t in tensors_of(n))
        return next((t.device for t in tensors), torch.device("cpu"))

    def _fake_bundle(self, made: _Made, saved: Iterable[fx.Node]) -> torch.Tensor:
        """Return a fake tensor of as many bytes as a bundle of ``saved`` is assumed to take."""
        storages: dict[int, Any] = {}
        for node in saved:
            for tensor in tensors_of(node):
                storages[torch_compat.storage_key(tensor)] = tensor.untyped_storage().nbytes()
        nbytes = sum(torch_compat.number_with(n, most=self._bounds) for n in storages.values())
        near = (*made.members, *(n for m in made.members for n in m.all_input_nodes))
        like = next(n for n in near if next(tensors_of(n), None) is not None)
        return torch_compat.fake_bytes_like(like, max(nbytes, 1), device=self._device(made))


def _erase_unread(graph: fx.Graph) -> None:
    """Erase nodes of ``graph`` that nothing reads, except placeholders, checks and draws."""
    for node in reversed(list(graph.nodes)):
        unread = node.op == "call_function" and not node.users and not is_check(node)
        if unread and not torch_compat.draws_random_numbers(node):
            graph.erase_node(node)


def _digest(made: _Made) -> str:
    """Return a digest of the operations inside of ``made``, equal in every process."""
    number = {node: i for i, node in enumerate(made.inner.nodes)}

    def lines() -> Iterator[str]:
        for node in made.inner.nodes:
            target = target_name(node.target) if node.op == "call_function" else node.op
            arguments = (node.args, dict(sorted(node.kwargs.items())))
            yield f"{target} {written(arguments, lambda n: f'%{number[n]}')}"
        for read in made.reads:
            yield "bundle" if isinstance(read, tuple) else str([t.dtype for t in tensors_of(read)])

    return hashlib.sha256("\n".join(lines()).encode()).hexdigest()
