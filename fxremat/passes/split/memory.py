"""What a part of a run holds: how many rows it has, and what is written over what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint.graph import JointGraph, is_tensor, operation_of
from fxremat.passes.joint.sizes import layouts_of
from fxremat.passes.split.rules import SEEDED, Result
from fxremat.passes.split.run import Run
from fxremat.passes.split.runs import is_sum_of_products, results_of

MOST_PARTS = 64
"""Parts of a run at the most: each costs the launches of all its operations."""

BLOCK_ROWS, BLOCK_FACTOR = 192, 3
"""Where a sum of products must have the bits of one product, a part has so many rows, or a power of
three times as many: kernels of a CPU add up blocks of rows, of MKL's 192 or a few times that, and
parts of whole blocks are added up in their order."""

ROW_BY_ROW = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data")
)
"""Operators whose kernels for a CPU compute a place in a row from that place, and from what they
have found of the whole row before they write to it; a row is the last dimension."""


@dataclass(frozen=True, slots=True)
class Over:
    """An operation that writes its result over a value that it reads.

    Attributes:
        value: which nothing reads later.
        variant: of its operator: returns what it is given to write to.
        argument: the name by which ``variant`` is given that.
    """

    value: fx.Node
    variant: torch._ops.OpOverload
    argument: str


class Memory:
    """What a part of a run holds beside what the run takes and its results.

    Args:
        run: which operations it computes.
        joint: the step.

    Attributes:
        inside: its operations, in order.
        over: those of them that write over what they read.
        peak_bytes: that a part of all rows holds.
    """

    def __init__(self, run: Run, joint: JointGraph) -> None:
        self.inside: Sequence[fx.Node] = sorted(run.ways)
        self.over: dict[fx.Node, Over] = {}
        self._run, self._table = run, joint.storages
        self._given = self._table.of(run.sources)
        self._last = {s: n for n in self.inside for s in self._read(n)}
        self._left = self._table.of(
            value
            for target in run.targets
            for value in (target.all_input_nodes if self._is_added(target) else results_of(target))
        )
        self.peak_bytes = self._peak_bytes()

    def _read(self, node: fx.Node) -> frozenset[int]:
        return self._table.of(node.all_input_nodes)

    def _is_added(self, target: fx.Node) -> bool:
        """Whether it is added up as a product, not made."""
        return is_sum_of_products(target, self._run.ways[target])

    def _peak_bytes(self) -> int:
        """Most that is held, where all rows are one part; finds what is written over."""
        nbytes = self._table.nbytes
        live: set[int] = set()
        peak = 0
        for node in self.inside:
            is_sum = node in self._run.targets and Result.SUM in self._run.ways[node].outputs
            made = set() if is_sum else self._table.of(results_of(node)) - self._given - live
            over = self._over(node, live)
            if over is not None:
                self.over[node] = over
                live -= self._table.of([over.value])
            live |= made
            peak = max(peak, sum(nbytes[s] for s in live))
            live -= {s for s in live if self._last.get(s) in (node, None)} - self._left
        return peak

    def _over(self, node: fx.Node, live: set[int]) -> Over | None:
        """What an operation can be written over, if anything."""
        run, target = self._run, node.target
        if not isinstance(target, torch._ops.OpOverload) or not is_tensor(node):
            return None
        device = node.meta["val"].device.type
        along = target in ROW_BY_ROW and device == "cpu" and is_along_last(node)
        if not along and (torch.Tag.pointwise not in target.tags or SEEDED in target.tags):
            return None
        variant = torch_compat.out_variant(target, device)
        if variant is None:
            return None
        (layout,) = layouts_of(node)
        rows = run.ways[node].outputs[0]
        for value in node.all_input_nodes:
            storages = self._table.of([value])
            if not storages or not storages <= live or storages & self._left:
                continue
            if not all(makes_its_memory(operation_of(self._table.owner[s])) for s in storages):
                continue
            is_read_last = all(self._last[s] is node for s in storages)
            readers = [n for n in node.all_input_nodes if storages & self._table.of([n])]
            lies_alike = layouts_of(value) == (layout,) and run.rows_of.get(value) == rows
            has_dtype = value.meta["val"].dtype is node.meta["val"].dtype
            if is_read_last and readers == [value] and lies_alike and has_dtype:
                return Over(value, *variant)
        return None

    def part(self, most_bytes: int, *, exact: bool) -> tuple[int, int]:
        """Rows of a part, and bytes that it holds, at most ``most_bytes``.

        Where results are to be ``exact``, and one is a sum of products, it has whole blocks of
        rows, and may hold more.
        """
        total = int(self._run.rows)
        count = 2
        while count < MOST_PARTS and self.peak_bytes > count * most_bytes:
            count *= 2
        rows = -(-total // min(count, total))
        if exact and any(map(self._is_added, self._run.targets)):
            least, rows = rows, BLOCK_ROWS
            while rows * BLOCK_FACTOR <= least:
                rows *= BLOCK_FACTOR
        return rows, -(-self.peak_bytes * min(rows, total) // total)


def makes_its_memory(operation: fx.Node) -> bool:
    """Whether an operation returns none of what it reads, whatever that is like. One that may, such
    as a reshape, can copy a whole tensor, of whose parts it returns a view.
    """
    target = operation.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return all(returned.alias_info is None for returned in target._schema.returns)


def is_along_last(node: fx.Node) -> bool:
    """Whether a softmax or its gradient goes along the last dimension."""
    rank = len(layouts_of(node)[0].shape)
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    dim = node.args[names.index("dim")]
    return isinstance(dim, int) and dim % max(rank, 1) == rank - 1
