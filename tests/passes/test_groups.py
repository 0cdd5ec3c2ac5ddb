"""Which operations run as one unit."""

from __future__ import annotations

import graphlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from fxremat.passes.fuse.groups import group
from fxremat.passes.fuse.kinds import Kind, bases
from fxremat.runtime import rng

aten = torch.ops.aten


@dataclass
class Graph:
    """A graph of operations that do nothing but have a kind.

    Attributes:
        nodes: operations, in order.
        kinds: of them.
        nbytes: of their values.
        parts: of those that are not of part 0.
        inputs: what is there before.
    """

    nodes: list[fx.Node]
    kinds: dict[fx.Node, Kind]
    nbytes: dict[fx.Node, int]
    parts: dict[fx.Node, int]
    inputs: list[fx.Node]

    def sources(self, node: fx.Node) -> list[fx.Node]:
        return list(dict.fromkeys(bases(node.all_input_nodes, self.kinds)))

    def groups(self, *, shared: Callable[[fx.Node], bool] = lambda _node: True) -> list[set[str]]:
        """Names of what runs as one."""
        found = self.group(shared)
        return sorted(({n.name for n in own} for own in found), key=sorted)

    def group(self, shared: Callable[[fx.Node], bool]) -> list[list[fx.Node]]:
        return group(
            self.nodes,
            self.kinds,
            self.sources,
            shared=shared,
            nbytes=lambda n: self.nbytes.get(n, 1),
            parts=self.parts,
        )


KINDS = {
    "p": Kind.POINTWISE,
    "r": Kind.REDUCTION,
    "v": Kind.VIEW,
    "m": Kind.ALONE,
    "d": Kind.ALONE,
    "g": Kind.VALUE,
}


class Builder:
    """Adds operations by name: its first letter is the kind, ``d`` is a draw."""

    def __init__(self, inputs: int) -> None:
        self.graph = fx.Graph()
        given_ = [self.graph.placeholder(f"x{i}") for i in range(inputs)]
        self.made = Graph([], {}, {}, {}, given_)
        self.by_name = {n.name: n for n in given_}

    def add(self, name: str, *sources: str, nbytes: int = 4, part: int = 0) -> None:
        target = rng.draw if name.startswith("d") else aten.cat.default
        args = ([self.by_name[s] for s in sources],)
        node = self.graph.create_node("call_function", target, args, name=name)
        assert node.name == name
        self.by_name[name] = node
        self.made.nodes.append(node)
        self.made.kinds[node] = KINDS[name[0]]
        self.made.nbytes[node] = nbytes
        if part:
            self.made.parts[node] = part


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    builder = Builder(2)
    names = [*builder.by_name]
    for i in range(draw(st.integers(1, 24))):
        kind = draw(st.sampled_from("pppprrmmdvg"))
        count = 1 if kind in "vg" else draw(st.integers(0, 3))
        sources = {draw(st.sampled_from(names)) for _ in range(count)}
        if kind == "g" and not sources & {n for n in names if n[0] in "rm"}:
            kind = "p"
        nbytes = draw(st.integers(1, 8))
        name = f"{kind}{i}"
        builder.add(
            name, *sorted(sources), nbytes=nbytes, part=draw(st.sampled_from((0, 0, 0, 0, 1, 2)))
        )
        names.append(name)
    return builder.made


def fused(graph: Graph) -> set[fx.Node]:
    """What fuses: results of what fuses, too."""
    found = {n for n in graph.nodes if graph.kinds[n].fuses}
    picks = (n for n in graph.nodes if graph.kinds[n] is Kind.VALUE)
    return found | {n for n in picks if n.all_input_nodes[0] in found}


@given(graphs(), st.booleans())
def test_no_unit_waits_for_itself_and_draws_keep_their_order(graph: Graph, shared: bool):
    groups = graph.group(lambda _node: shared)
    unit: dict[fx.Node, fx.Node] = {n: own[0] for own in groups for n in own}
    sorter: graphlib.TopologicalSorter[fx.Node] = graphlib.TopologicalSorter()

    def add(source: fx.Node, node: fx.Node) -> None:
        one, other = unit.get(source, source), unit.get(node, node)
        if one is not other:
            sorter.add(other, one)

    for node in graph.nodes:
        for source in graph.sources(node):
            add(source, node)
    for before, after in pairwise(n for n in graph.nodes if n.target is rng.draw):
        add(before, after)
    sorter.prepare()  # raises for a circle


@given(graphs(), st.booleans())
def test_all_that_fuses_is_in_one_group_with_its_like(graph: Graph, shared: bool):
    groups = graph.group(lambda _node: shared)
    members = [n for own in groups for n in own]
    assert len(members) == len(set(members))
    assert set(members) == fused(graph)
    for own in groups:
        assert own == sorted(own, key=graph.nodes.index)
        assert len({graph.parts.get(n, 0) for n in own}) == 1
        assert connected(own, graph)


def connected(own: list[fx.Node], graph: Graph) -> bool:
    """Whether each has a value or an input in common with the others."""
    found = {own[0]}
    while True:
        near = {n for m in found for n in own if linked(m, n, graph)}
        if near <= found:
            return found == set(own)
        found |= near


def linked(one: fx.Node, other: fx.Node, graph: Graph) -> bool:
    def made_by(node: fx.Node) -> fx.Node:
        return node.all_input_nodes[0] if graph.kinds.get(node) is Kind.VALUE else node

    first, second = graph.sources(one), graph.sources(other)
    common = {*map(made_by, first)} & {*map(made_by, second)}
    return one in second or other in first or bool(common)


@given(graphs())
def test_groups_do_not_depend_on_chance(graph: Graph):
    assert graph.group(lambda _node: True) == graph.group(lambda _node: True)


def chain(*parts: tuple[str, Iterable[str]], inputs: int = 1) -> Graph:
    builder = Builder(inputs)
    for name, sources in parts:
        builder.add(name, *sources)
    return builder.made


def test_a_chain_is_one_and_a_product_parts_it():
    graph = chain(("p1", ["x0"]), ("r1", ["p1"]), ("m1", ["r1"]), ("p2", ["m1"]), ("p3", ["p2"]))
    assert graph.groups() == [{"p1", "r1"}, {"p2", "p3"}]


def test_a_way_round_by_a_product_parts_a_unit():
    """``p3`` reads ``p1`` and what a product makes of it: it cannot run with it."""
    graph = chain(("p1", ["x0"]), ("m1", ["p1"]), ("p3", ["p1", "m1"]))
    assert graph.groups() == [{"p1"}, {"p3"}]


def test_a_way_round_by_the_order_of_draws_parts_a_unit():
    """``p1`` leads to the first draw and ``p2`` needs the second."""
    parts = [("m1", ["x0"]), ("p1", ["m1"]), ("d1", ["p1"]), ("d2", ["x1"]), ("p2", ["d2", "m1"])]
    assert chain(*parts, inputs=2).groups() == [{"p1"}, {"p2"}]


def test_readers_of_one_input_are_one_where_they_may_be():
    graph = chain(("p1", ["x0"]), ("r2", ["x0"]))
    assert graph.groups() == [{"p1", "r2"}]
    assert graph.groups(shared=lambda _node: False) == [{"p1"}, {"r2"}]


def test_readers_of_values_of_one_operation_are_one():
    graph = chain(
        ("m1", ["x0"]),
        ("g1", ["m1"]),
        ("g2", ["m1"]),
        ("p1", ["g1"]),
        ("p2", ["g2", "x1"]),
        inputs=2,
    )
    assert graph.groups() == [{"p1", "p2"}]


def test_a_view_is_no_wall():
    graph = chain(("p1", ["x0"]), ("v1", ["p1"]), ("p2", ["v1"]))
    assert graph.groups() == [{"p1", "p2"}]


def test_results_of_a_reduction_are_with_it_and_those_of_a_product_are_not():
    graph = chain(("r1", ["x0"]), ("g1", ["r1"]), ("m2", ["x0"]), ("g2", ["m2"]))
    assert graph.groups() == [{"r1", "g1"}]


@pytest.mark.parametrize("part", [1, 2])
def test_parts_are_never_one_unit(part: int):
    builder = Builder(1)
    builder.add("p1", "x0")
    builder.add("p2", "p1", part=part)
    builder.add("p3", "p2", part=part)
    builder.add("p4", "p3", "p1")
    assert builder.made.groups(shared=lambda _node: False) == [{"p1"}, {"p2", "p3"}, {"p4"}]


def sink(*, before: int, own: int, also: bool = False) -> list[set[str]]:
    """Of ``p2``, which reads a product's value and is read after the next product alone."""
    builder = Builder(2)
    builder.add("m1", "x0", nbytes=before)
    builder.add("p1", "m1", nbytes=own)
    builder.add("p2", "m1", nbytes=own)
    builder.add("m2", "p1")
    builder.add("p3", *("p2", "m2", *(["m1"] if also else [])))
    return builder.made.groups()


def test_what_is_read_late_is_computed_late_where_that_holds_no_more():
    early, late = [{"p1", "p2"}, {"p3"}], [{"p1"}, {"p2", "p3"}]
    assert sink(before=4, own=4) == late
    assert sink(before=4, own=5) == late
    assert sink(before=5, own=4) == early
    assert sink(before=5, own=4, also=True) == late  # it is held anyway


def test_what_needs_nothing_is_computed_with_what_reads_the_same():
    """``p2`` could run at once; later, a kernel reads its input anyway."""
    parts = [("m1", ["x0"]), ("p1", ["m1", "x1"]), ("p2", ["x1"]), ("m2", ["p2"])]
    assert chain(*parts, inputs=2).groups() == [{"p1", "p2"}]
    needed = [("p2", ["x1"]), ("m2", ["p2"]), ("m1", ["m2"]), ("p1", ["m1", "x1"])]
    assert chain(*needed, inputs=2).groups() == [{"p1"}, {"p2"}]


def test_what_is_read_outside_is_computed_early():
    builder = Builder(1)
    builder.add("m1", "x0")
    builder.add("p2", "m1")
    builder.add("m2", "m1")
    builder.add("p3", "p2", "m2")
    assert builder.made.groups() == [{"p2", "p3"}]
    builder.graph.output(builder.by_name["p2"])
    assert builder.made.groups() == [{"p2"}, {"p3"}]
