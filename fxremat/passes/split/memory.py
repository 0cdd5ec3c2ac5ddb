"""What a part of a run holds: its number of rows, and which operations run in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint.graph import JointGraph, is_tensor, operation_of
from fxremat.passes.joint.sizes import layouts_of
from fxremat.passes.parts.rows import Result
from fxremat.passes.split.run import Run, results_of
from fxremat.passes.split.ways import SEEDED, is_sum_of_products

MOST_PARTS = 64
"""How many parts a run has, unless they still have many rows: each part launches all operations."""

MANY_ROWS = 1024
"""A part of at least as many rows may be divided whatever the number of parts: launching takes
little of its time."""

MUCH_BYTES = 256 << 20
"""Parts that hold more are divided further: launches take little of their time. A mask of attention
for 500,000 tokens is as large as some thousand such parts."""

BLOCK_ROWS, BLOCK_FACTOR = 192, 3
"""Rows of a part if a sum of products must have the bits of one product, or this times a power of
``BLOCK_FACTOR``. Kernels of a CPU add up blocks of rows, MKL's of 192 or a few times that; parts of
whole blocks are added up in the same order."""

ROW_BY_ROW = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data")
)
"""Operators whose kernels for a CPU compute an element from the same element, and from what they
have found of its whole row before they write to it; a row is the last dimension."""


@dataclass(frozen=True, slots=True)
class InPlace:
    """An operation that writes its result over a value that it reads.

    Attributes:
        value: the value, which nothing reads later.
        variant: the ``out=`` overload of its operator.
        argument: the name of that overload's argument for the tensor to write to.
    """

    value: fx.Node
    variant: torch._ops.OpOverload
    argument: str


class Memory:
    """The memory that one part of a run takes, besides inputs and results of the run.

    Args:
        run: operations that are computed for some rows at a time; these rows are a part.
        joint: the step.

    Attributes:
        inside: the run's operations, in order.
        in_place: operations that write their result over a value that they read.
        held: for each operation, the bytes of each value that is held while it runs, if one part
            has all rows; they may follow the sizes of the step.
        peak_bytes: the most bytes held at once if one part has all rows.
    """

    def __init__(self, run: Run, joint: JointGraph) -> None:
        self.inside: Sequence[fx.Node] = sorted(run.ways)
        self.in_place: dict[fx.Node, InPlace] = {}
        self.held: list[tuple[int, ...]] = []
        self._run, self._table = run, joint.storages
        self._given = self._table.of(run.sources)
        self._last = {s: n for n in self.inside for s in self._read_storages(n)}
        self._outlives = self._table.of(
            value
            for target in run.targets
            for value in (
                target.all_input_nodes if self._is_added_up(target) else results_of(target)
            )
        )
        self.peak_bytes = self._peak_bytes()

    def _read_storages(self, node: fx.Node) -> frozenset[int]:
        return self._table.of(node.all_input_nodes)

    def _is_added_up(self, target: fx.Node) -> bool:
        """Return whether ``target`` is the sum of a matrix product from each part."""
        return is_sum_of_products(target, self._run.ways[target])

    def _peak_bytes(self) -> int:
        """Return the most bytes held at once if one part has all rows.

        Also fill ``in_place`` and ``held``.
        """
        nbytes = self._table.nbytes
        live: set[int] = set()
        peak = 0
        for node in self.inside:
            is_sum = node in self._run.targets and Result.SUM in self._run.ways[node].outputs
            made = set() if is_sum else self._table.of(results_of(node)) - self._given - live
            in_place = self._in_place(node, live)
            if in_place is not None:
                self.in_place[node] = in_place
                live -= self._table.of([in_place.value])
            live |= made
            peak = max(peak, sum(nbytes[s] for s in live))
            self.held.append(tuple(self._table.asked_bytes[s] for s in sorted(live)))
            live -= {s for s in live if self._last.get(s) in (node, None)} - self._outlives
        return peak

    def _in_place(self, node: fx.Node, live: set[int]) -> InPlace | None:
        """Return how ``node`` can run in place, or ``None`` if it cannot.

        ``live`` has the storages that the part holds before the operation.
        """
        run, target = self._run, node.target
        if not isinstance(target, torch._ops.OpOverload) or not is_tensor(node):
            return None
        device = node.meta["val"].device.type
        row_by_row = target in ROW_BY_ROW and device == "cpu" and is_along_last(node)
        if not row_by_row and (torch.Tag.pointwise not in target.tags or SEEDED in target.tags):
            return None
        variant = torch_compat.out_variant(target, device)
        if variant is None:
            return None
        (layout,) = layouts_of(node)
        rows = run.ways[node].outputs[0]
        for value in node.all_input_nodes:
            storages = self._table.of([value])
            if not storages or not storages <= live or storages & self._outlives:
                continue
            if not all(makes_its_memory(operation_of(self._table.owner[s])) for s in storages):
                continue
            is_read_last = all(self._last[s] is node for s in storages)
            readers = [n for n in node.all_input_nodes if storages & self._table.of([n])]
            lies_alike = layouts_of(value) == (layout,) and run.rows_of.get(value) == rows
            has_dtype = value.meta["val"].dtype is node.meta["val"].dtype
            if is_read_last and readers == [value] and lies_alike and has_dtype:
                return InPlace(value, *variant)
        return None

    def part(self, most_bytes: int, *, exact: bool) -> tuple[int, int]:
        """Return the number of rows of a part, and the bytes that it holds.

        These are at most ``most_bytes`` if :data:`MOST_PARTS` parts are enough, or parts of
        :data:`MANY_ROWS` rows, or if that is at least :data:`MUCH_BYTES`. If results must be
        ``exact``, bit by bit, and one is a sum of matrix products, a part has whole blocks of
        :data:`BLOCK_ROWS` rows, and may hold more.
        """
        total = int(self._run.rows)
        count, enough_bytes = 2, max(most_bytes, MUCH_BYTES)
        most = max(MOST_PARTS, total // MANY_ROWS)
        while self.peak_bytes > count * (most_bytes if 2 * count <= most else enough_bytes):
            count *= 2
        rows = -(-total // min(count, total))
        if exact and any(map(self._is_added_up, self._run.targets)):
            least, rows = rows, BLOCK_ROWS
            while rows * BLOCK_FACTOR <= least:
                rows *= BLOCK_FACTOR
        return rows, -(-self.peak_bytes * min(rows, total) // total)


def makes_its_memory(operation: fx.Node) -> bool:
    """Return whether an operation always allocates its results, and never returns views of inputs.

    Others, such as a reshape, can copy a whole tensor but return a view of a part of it.
    """
    target = operation.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return all(returned.alias_info is None for returned in target._schema.returns)


def is_along_last(node: fx.Node) -> bool:
    """Return whether a softmax or its gradient is computed along the last dimension."""
    rank = len(layouts_of(node)[0].shape)
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    dim = node.args[names.index("dim")]
    return isinstance(dim, int) and dim % max(rank, 1) == rank - 1
