"""Cut long scans into pieces, so that what a piece saves for the backward can be recomputed.

``torch.scan`` saves values of every iteration for the backward. As one operation, all of these are
kept or recomputed at once. A scan that continues from the state at the end of another one computes
the same bits as one scan over both.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint.fixed_sizes import is_symbolic
from fxremat.passes.joint.graph import copy_of, fake_result, is_tensor, values_of
from fxremat.runtime.nested import Nested

aten = torch.ops.aten

MOST_PIECES = 4
"""The most pieces of a scan. Each piece more divides what is kept at once, and adds a state."""

LEAST_ITERATIONS = 16
"""The fewest iterations of a piece. Operations that begin and end a piece take as long as about one
iteration."""


@dataclass(eq=False, slots=True)
class _Scan:
    """A scan, and the pieces that replace it.

    Attributes:
        node: the scan.
        states: the tensors that the first iteration gets; those that the last one passes on are the
            first results.
        inputs: the tensors that have a row for each iteration.
        constants: the other tensors that it reads.
        length: the number of iterations.
        ends: where pieces begin and end.
        pieces: for each piece, the node of each result by index.
        numbers: the sequence number of each piece.
    """

    node: fx.Node
    states: list[fx.Node]
    inputs: list[fx.Node]
    constants: list[fx.Node]
    length: int
    ends: list[tuple[int, int]] = field(default_factory=list)
    pieces: list[dict[int, fx.Node]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)


def with_scans_in_pieces(module: fx.GraphModule) -> fx.GraphModule:
    """Return a joint graph in which long scans are cut, in the forward and in the backward.

    Args:
        module: the joint graph; it is not changed.

    Requires: each operator that runs graphs is a ``Nested`` node.
    Ensures: every tensor keeps its bits. A piece of the backward reads what one piece of the
        forward saves.

    Returns ``module`` itself where there is none, or where a size is a symbol.
    """
    if not any(map(_is_scan, module.graph.nodes)) or any(map(is_symbolic, module.graph.nodes)):
        return module
    graph = copy_of(module.graph)
    pairs = _pairs(graph)
    highest = max(filter(None, map(torch_compat.sequence_number, graph.nodes)), default=0)
    numbers = itertools.count(highest + 1)
    for forward, backward in pairs:
        count = min(MOST_PIECES, forward.length // LEAST_ITERATIONS)
        if count > 1:
            _cut_pair(forward, backward, count, numbers)
    graph.lint()
    return torch_compat.graph_module(module, graph)


def _is_scan(node: fx.Node) -> bool:
    """Return whether ``node`` is a scan that draws no random numbers."""
    if torch_compat.draws_random_numbers(node) or not isinstance(node.target, Nested):
        return False
    return bool(node.target.function.__name__ == "scan")


def _pairs(graph: fx.Graph) -> list[tuple[_Scan, _Scan]]:
    """Return the scans of the forward, each with the one that differentiates it."""
    scans: dict[tuple[int | None, bool], list[_Scan]] = {}
    for node in filter(_is_scan, graph.nodes):
        key = torch_compat.sequence_number(node), torch_compat.is_backward_node(node)
        scans.setdefault(key, []).append(_scan_of(node))
    pairs = []
    for (number, is_backward), own in scans.items():
        others = scans.get((number, True), [])
        is_pair = not is_backward and number is not None and len(own) == len(others) == 1
        if is_pair and own[0].length == others[0].length and all(map(_reads_tensors, own + others)):
            pairs.append((own[0], others[0]))
    return pairs


def _reads_tensors(scan: _Scan) -> bool:
    """Return whether all arguments of a scan are tensors, so that pieces are called alike."""
    read = [*scan.states, *scan.inputs, *scan.constants]
    return all(isinstance(n, fx.Node) and is_tensor(n) for n in read)


def _scan_of(node: fx.Node) -> _Scan:
    nested: Any = node.target
    (_body, states, inputs, constants), _ = nested.arguments(node.args)
    length = int(inputs[0].meta["val"].shape[0]) if inputs else 0
    return _Scan(node, [*states], [*inputs], [*constants], length)


def _cut_pair(forward: _Scan, backward: _Scan, count: int, numbers: Any) -> None:
    """Replace both scans by ``count`` pieces, with sequence numbers that say which belong together.

    The backward begins with the last iteration.
    """
    bounds = [forward.length * i // count for i in range(count + 1)]
    forward.ends = list(itertools.pairwise(bounds))
    backward.ends = [(forward.length - b, forward.length - a) for a, b in reversed(forward.ends)]
    forward.numbers = [next(numbers) for _ in forward.ends]
    backward.numbers = forward.numbers[::-1]
    _cut(forward, None)
    _cut(backward, forward)
    for scan in (backward, forward):
        _join(scan)


def _cut(scan: _Scan, other: _Scan | None) -> None:
    """Add the pieces of ``scan`` to its graph; ``other`` is the scan whose results it may read."""
    states = scan.states
    rows: dict[tuple[fx.Node, int, int], fx.Node] = {}
    for number, (begin, end) in zip(scan.numbers, scan.ends, strict=True):
        writer = _Writer(scan.node, number)
        inputs = [_rows(x, begin, end, scan, other, writer, rows) for x in scan.inputs]
        made = writer.call(scan.node.target, (*states, *inputs, *scan.constants))
        used = {*range(len(states)), *(value.args[1] for value in values_of(scan.node))}
        results = {i: writer.call(operator.getitem, (made, i)) for i in sorted(used)}
        states = [results[i] for i in range(len(states))]
        scan.pieces.append(results)


def _rows(
    x: fx.Node,
    begin: int,
    end: int,
    scan: _Scan,
    other: _Scan | None,
    writer: _Writer,
    made: dict[tuple[fx.Node, int, int], fx.Node],
) -> fx.Node:
    """Return rows ``begin`` to ``end`` of ``x``, an input of ``scan``; see :func:`_cut`.

    Those of a flipped tensor are flipped rows of it, and those of a result of ``other`` are a
    result of one of its pieces.
    """
    key = x, begin, end
    if key in made:
        return made[key]
    if x.target is aten.flip.default and x.args[1] == [0]:
        source: Any = x.args[0]
        inner = _rows(source, scan.length - end, scan.length - begin, scan, other, writer, made)
        made[key] = writer.call(aten.flip.default, (inner, [0]))
    elif other is not None and x.args[:1] == (other.node,) and (begin, end) in other.ends:
        index: Any = x.args[1]
        made[key] = other.pieces[other.ends.index((begin, end))][index]
    else:
        made[key] = writer.call(aten.slice.Tensor, (x, 0, begin, end))
    return made[key]


def _join(scan: _Scan) -> None:
    """Replace the results of ``scan`` by those of its pieces, and erase it."""
    writer = _Writer(scan.node, scan.numbers[-1])
    for value in values_of(scan.node):
        _erase_unread_flips(value)
        index: Any = value.args[1]
        if value.users:
            parts = [piece[index] for piece in scan.pieces]
            is_state = index < len(scan.states)
            new = parts[-1] if is_state else writer.call(aten.cat.default, (parts, 0))
            value.replace_all_uses_with(new)
        scan.node.graph.erase_node(value)
    scan.node.graph.erase_node(scan.node)


def _erase_unread_flips(value: fx.Node) -> None:
    for user in list(value.users):
        if user.target is aten.flip.default and not user.users:
            user.graph.erase_node(user)


@dataclass(frozen=True, slots=True)
class _Writer:
    """Adds operations before ``place``, which they replace, with the sequence number ``number``."""

    place: fx.Node
    number: int

    def call(self, target: Any, args: Sequence[Any]) -> fx.Node:
        """Add a call with its traced value, and return its node."""
        graph = self.place.graph
        with graph.inserting_before(self.place):
            node = graph.call_function(target, tuple(args))
        tensor = next(n.meta["val"] for n in self.place.all_input_nodes if is_tensor(n))
        node.meta = {k: v for k, v in self.place.meta.items() if k not in ("val", "tensor_meta")}
        node.meta["val"] = fake_result((target, node.args, {}), tensor.fake_mode)
        node.meta["seq_nr"] = self.number
        return node
