"""Which values of a forward a backward's kernels compute for themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain, combinations

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional

from fxremat.effort import USUAL
from fxremat.passes.fuse.again import computed_again
from fxremat.passes.fuse.groups import Span, spans_of
from fxremat.passes.fuse.kinds import Kind, bases, kinds_of
from fxremat.passes.joint.build import build_joint_graph
from fxremat.passes.stages.linearize import Line, linearize
from tests.fused import taken_apart

aten = torch.ops.aten

TARGETS = {"s": aten.sum.dim_IntList, "m": aten.mm.default, "c": aten.cat.default}
"""Operations of a kind; any other is pointwise."""


@dataclass(frozen=True, slots=True)
class Value:
    """Of a forward: how it is computed, from which, and how it is read.

    Attributes:
        kind: ``+`` pointwise, ``s`` a sum, ``m`` a product, ``c`` a concatenation, ``v`` a view,
            ``u`` pointwise, and of a mutated input too.
        sources: indices of earlier values; -1 is an input.
        nbytes: of it.
        reader: ``+`` or ``m`` in the backward, or ``""``.
        held: ``l`` it leaves the span, ``p`` it is pinned, or ``""``.
    """

    kind: str
    sources: tuple[int, ...]
    nbytes: int
    reader: str
    held: str


@st.composite
def programs(draw: st.DrawFn) -> list[Value]:
    values: list[Value] = []
    for i in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from("++++++smcvu"))
        count = 1 if kind not in "+c" else draw(st.integers(1, 3))
        sources = tuple(draw(st.integers(-1, i - 1)) for _ in range(count))
        nbytes = draw(st.integers(1, 4))
        if kind == "v" and sources[0] >= 0:
            nbytes = values[sources[0]].nbytes
        reader = draw(st.sampled_from(["+", "+", "m", "", ""]))
        held = draw(st.sampled_from(["", "", "", "l", "p"]))
        values.append(Value(kind, sources, nbytes, reader, held))
    return values


@dataclass
class Built:
    line: Line
    span: Span
    kinds: dict[fx.Node, Kind]
    node: list[fx.Node]


def built(values: list[Value]) -> Built:
    """The step that a program says: a gradient for each read value."""
    graph = fx.Graph()

    def add(node: fx.Node, value: Tensor) -> fx.Node:
        node.meta["val"] = value
        return node

    def empty(nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    readers = [i for i, v in enumerate(values) if v.reader]
    primals = [
        add(graph.placeholder(f"primals_{i + 1}"), empty(16)) for i in range(len(readers) + 2)
    ]
    tangent = add(graph.placeholder("tangents_1"), empty(16))
    new = add(graph.call_function(aten.neg.default, (primals[0],)), empty(16))
    made: list[fx.Node] = []
    for i, value in enumerate(values):
        sources = [made[s] if s >= 0 else primals[1] for s in value.sources]
        if value.kind == "v":
            source = sources[0]
            node = graph.call_function(aten.view.default, (source, [-1]))
            made.append(add(node, source.meta["val"].view(-1)))
            continue
        if value.kind == "u":
            sources.append(primals[0])
        target = TARGETS.get(value.kind, aten.where.self)
        made.append(add(graph.call_function(target, (sources, i)), empty(value.nbytes)))
    gradients: list[fx.Node | None] = [None] * len(primals)
    for place, i in enumerate(readers):
        target = aten.mul.Tensor if values[i].reader == "+" else aten.mm.default
        gradients[place] = add(graph.call_function(target, (tangent, made[i])), empty(16))
    out = add(graph.call_function(aten.stack.default, (made,)), empty(1))
    graph.output((new, out, *gradients))
    module = fx.GraphModule(nn.Module(), graph)
    joint = build_joint_graph(module, forward_output_count=2, mutated_primals=[0])
    by_name = {n.name: n for n in joint.module.graph.nodes}
    node = [by_name[n.name] for n in made]
    kinds = kinds_of(joint)
    own = [n for n in joint.forward if n.name not in (new.name, out.name)]
    held = {mark: [n for n, v in zip(node, values, strict=True) if v.held == mark] for mark in "lp"}
    real = {mark: [n for n in held[mark] if kinds[n] is not Kind.VIEW] for mark in held}
    old = [n for n in own if n.args[0] in joint.mutated]
    line = replace(linearize(joint, USUAL), pinned=frozenset([*real["p"], *old]))
    return Built(line, Span(tuple(own), joint.backward, tuple(real["l"])), kinds, node)


def subsets(items: list[fx.Node]) -> Iterable[tuple[fx.Node, ...]]:
    return chain.from_iterable(combinations(items, n) for n in range(len(items) + 1))


@dataclass
class Model:
    """What computing again means, written from its description alone."""

    built: Built

    def __post_init__(self) -> None:
        made, kinds = self.built, self.built.kinds
        self.own = [n for n in made.span.forward if kinds[n] is not Kind.VIEW]
        readers = made.span.backward
        self.read = self.among(n for n in readers if kinds[n].fuses)
        self.there = self.among(n for n in readers if not kinds[n].fuses) | made.line.pinned

    def among(self, readers: Iterable[fx.Node]) -> set[fx.Node]:
        return {s for n in readers for s in self.sources(n) if s in self.own}

    def sources(self, node: fx.Node) -> list[fx.Node]:
        return list(bases(node.all_input_nodes, self.built.kinds))

    def free(self, node: fx.Node) -> bool:
        mutated = self.built.line.joint.mutated
        pointwise = self.built.kinds[node] is Kind.POINTWISE and node.target is not aten.cat.default
        return pointwise and mutated.isdisjoint(self.sources(node))

    def gives(self, kept: set[fx.Node]) -> bool:
        """Whether all that is read can be computed from what is kept, and there."""
        there = kept | self.there
        for node in self.own:
            if self.free(node) and all(s in there or s not in self.own for s in self.sources(node)):
                there = there | {node}
        return self.read <= there

    def cost(self, kept: Iterable[fx.Node]) -> int:
        table, leaving = self.built.line.joint.storages, self.built.span.leaving
        return sum(1 + (n not in leaving) * table.total(table.of_node[n]) for n in kept)

    def kept_with(self, again: frozenset[fx.Node]) -> set[fx.Node]:
        needed = self.read | {s for n in again for s in self.sources(n) if s in self.own}
        return needed - again - self.there


@given(programs())
def test_what_is_kept_is_the_least_that_gives_the_rest(values: list[Value]):
    made = built(values)
    model = Model(made)
    again = computed_again(made.line, made.span, made.kinds)
    kept = model.kept_with(again)
    note(f"again {sorted(map(str, again))}, kept {sorted(map(str, kept))}")
    assert all(model.free(n) for n in again)
    assert not again & model.there
    assert model.gives(kept)
    open_ = [n for n in model.own if n not in model.there]
    costs = {frozenset(own): model.cost(own) for own in subsets(open_) if model.gives({*own})}
    least = min(costs.values())
    assert model.cost(kept) == least
    equal = [own for own, cost in costs.items() if cost == least]
    assert all(len(again) <= len(computed_from(model, own)) for own in equal)


def computed_from(model: Model, kept: frozenset[fx.Node]) -> set[fx.Node]:
    """What must be computed again where ``kept`` is kept."""
    found: set[fx.Node] = set()
    waiting = [*(model.read - model.there - kept)]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += {s for s in model.sources(node) if s in model.own} - model.there - kept
    return found


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((4, 4, 4), []), ((4, 4, 5), [2]), ((4, 5, 5), [1, 2]), ((5, 4, 5), [2])],
)
def test_the_least_of_a_chain_is_kept_and_of_equals_the_last(
    sizes: tuple[int, ...], expected: list[int]
):
    """A product, then two pointwise values, of which the second is read."""
    kinds, readers = "m++", ("", "", "+")
    parts = zip(kinds, sizes, readers, strict=True)
    made = built([Value(k, (i - 1,), n, r, "") for i, (k, n, r) in enumerate(parts)])
    again = computed_again(made.line, made.span, made.kinds)
    assert again == {made.node[i] for i in expected}


class Block(nn.Module):
    """What a product reads stays; a mask stays; what is cheap is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.one, self.two = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.one(self.norm(x)) * 2
        return functional.dropout(self.two(gate * gate.sigmoid()), 0.5).exp()


def test_of_a_model_nothing_is_computed_again_that_must_not_be():
    step = taken_apart(Block(), torch.randn(32, 16, requires_grad=True))
    kinds = kinds_of(step.joint)
    line = step.line
    found = set()
    for span in spans_of(line, kinds):
        again = computed_again(line, span, kinds)
        assert again <= set(span.forward) - line.pinned
        assert {kinds[n] for n in again} <= {Kind.POINTWISE}
        found |= again
    products = (n for n in step.joint.backward if kinds[n] is Kind.ALONE)
    assert not found.intersection(bases((s for n in products for s in n.all_input_nodes), kinds))
    assert {str(n.target).split(".")[1] for n in found} == {"sigmoid"}
