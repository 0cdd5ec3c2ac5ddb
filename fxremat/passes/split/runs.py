"""Find runs of operations whose large values need exist for a few rows at a time only.

A run computes one or more results (its *targets*) from values that are small, or that cannot be
had in parts; every large value between them it computes for itself, a few rows at a time, be it
of the forward or of the backward. So no large value is kept for it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint.constraints import may_run_again
from fxremat.passes.joint.digest import written
from fxremat.passes.joint.graph import (
    JointGraph,
    StorageTable,
    is_getitem,
    is_tensor,
    operation_of,
    tensors_of,
    values_of,
)
from fxremat.passes.joint.sizes import layouts_of, product
from fxremat.passes.split.rules import Result, Rows, Way, ways
from fxremat.passes.split.run import MOST_OPERATIONS, Looks, Order, Run, place_of

Refused = Set[tuple[fx.Node, Way]]
"""Operations, and ways to compute them in parts, that are not to be taken."""


@dataclass(frozen=True, slots=True)
class Large:
    """Values that need not exist whole.

    Attributes:
        most_bytes: those that take more, and what a part holds that computes them.
        names: those of operations of these names count that take more than ``names_bytes``, too.
        names_bytes: what a part holds that computes one of them.
    """

    most_bytes: int
    names: frozenset[str] = frozenset()
    names_bytes: int = 0

    def has(self, storage: int, table: StorageTable) -> bool:
        """Whether a storage is one."""
        nbytes, is_named = table.nbytes[storage], table.owner[storage].name in self.names
        return nbytes > self.most_bytes or (is_named and nbytes > self.names_bytes)

    def part_bytes(self, run: Run, table: StorageTable) -> int:
        """What a part of a run may hold."""
        values = table.of((*run.ways, *run.rows_of))
        named = any(table.owner[i].name in self.names for i in values)
        return min(self.most_bytes, self.names_bytes) if named else self.most_bytes


class Ways:
    """Ways to compute operations in parts; those of alike operations are found once."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], tuple[Way, ...]] = {}
        self._kinds: dict[fx.Node, str] = {}

    def of(self, node: fx.Node, count: int) -> tuple[Way, ...]:
        """Ways to compute ``node`` for some of ``count`` rows at a time."""
        if node not in self._kinds:
            self._kinds[node] = _kind_of(node)
        key = self._kinds[node], repr(count), int(count)
        if key not in self._found:
            self._found[key] = ways(node, count)
        return self._found[key]


def _kind_of(node: fx.Node) -> str:
    """Equal for operations that have the same ways."""

    def described(read: fx.Node) -> str:
        tensors = [(t.dtype, t.device.type, t.layout) for t in tensors_of(read)]
        return f"%{places[read]} {[own.shape for own in layouts_of(read)]} {tensors}"

    places = {read: i for i, read in enumerate(node.all_input_nodes)}
    arguments = written((node.args, dict(node.kwargs)), described)
    return f"{node.target} {arguments} {[own.shape for own in layouts_of(node)]}"


def runs_of(
    joint: JointGraph,
    large: Large,
    *,
    exact: bool,
    refused: Refused,
    known: Ways,
    looks: Looks | None = None,
) -> list[Run]:
    """Runs in which no value is computed whole that is large.

    Args:
        joint: the step.
        large: which values are.
        exact: results must have the bits that they have at once: no sums but of products.
        refused: what is not done.
        known: ways of its operations, as far as they were asked for.
        looks: at operations; where they run out, what is returned is not all.
    """
    return _Finder(joint, large, exact, refused, known, looks or Looks()).found()


@dataclass(slots=True)
class _Counted:
    """Ways and runs of one number of rows.

    Attributes:
        count: of rows.
        ways: of each operation that may be taken.
        giving: of each value, ways of its operation by the rows in which they give it.
        computing: runs, by each operation in them.
    """

    count: int
    ways: dict[fx.Node, tuple[Way, ...]] = field(default_factory=dict)
    giving: dict[fx.Node, dict[Rows, list[Way]]] = field(default_factory=dict)
    computing: dict[fx.Node, list[Run]] = field(default_factory=dict)

    def add(self, run: Run) -> None:
        """Let others be joined with ``run``."""
        for operation in run.ways:
            self.computing.setdefault(operation, []).append(run)

    def joins(self, run: Run) -> bool:
        """Whether a run can be joined with one that was added."""
        alike = Counter(itertools.chain.from_iterable(self.computing.get(n, ()) for n in run.ways))
        return any(
            len(run.ways) + len(other.ways) - shared <= MOST_OPERATIONS and run.joins(other)
            for other, shared in alike.items()
        )


class _Finder:
    def __init__(
        self,
        joint: JointGraph,
        large: Large,
        exact: bool,
        refused: Refused,
        known: Ways,
        looks: Looks,
    ) -> None:
        self._joint, self._meant = joint, large
        self._exact, self._refused, self._known = exact, refused, known
        self._looks = looks
        self._order = {n: i for i, n in enumerate(joint.module.graph.nodes)}
        self._backward = frozenset(joint.backward)
        self._made = frozenset((*joint.forward, *joint.backward))
        self._given = joint.storages.of((*joint.given, *joint.tangents))
        self._counted: dict[int, _Counted] = {}
        self._large: dict[fx.Node, bool] = {}
        self._near: dict[fx.Node, bool] = {}
        self._read: dict[fx.Node, list[fx.Node]] = {}
        self._made_by: dict[fx.Node, tuple[fx.Node, int]] = {}
        self._views: dict[fx.Node, dict[Rows, bool]] = {}

    def found(self) -> list[Run]:
        joint = self._joint
        returned = {*joint.results, *joint.gradients}
        waiting = {
            operation_of(n)
            for n in self._made
            if not is_getitem(n)
            and not self._is_view(n)
            and any(map(self._is_large, n.all_input_nodes))
            and not all(map(self._is_large, results_of(n)))
        }
        left = [n for n in returned if n in self._made and self._is_large(n)]
        runs: list[Run] = []
        done: set[fx.Node] = set()
        waiting.update(map(self._base, left))
        latest = sorted((-self._order[n], n) for n in waiting)
        while latest and not self._looks.are_out:
            target = heapq.heappop(latest)[1]
            if target in done:
                continue
            done.add(target)
            if not any(map(self._is_large, target.all_input_nodes)):
                continue
            run = self._run_to(target)
            if run is not None:
                runs.append(run)
                self._counted[run.rows].add(run)
                left = [n for n in run.sources if self._is_large(n)]
            else:
                left = [n for n in target.all_input_nodes if self._is_large(n)]
            for value in {*map(self._base, left)} - done:
                heapq.heappush(latest, (-self._order[value], value))
        return self._grouped(runs)

    def _base(self, value: fx.Node) -> fx.Node:
        """The operation that made what ``value`` looks at."""
        operation = operation_of(value)
        while self._is_view(operation):
            operation = operation_of(operation.all_input_nodes[0])
        return operation

    def _is_view(self, node: fx.Node) -> bool:
        return node in self._made and self._joint.storages.is_view(node)

    def _is_large(self, node: fx.Node) -> bool:
        """Whether a value is one, in memory that the step itself allocates.

        What more operations read than a run can have is not taken for one: it would be computed
        anew in run after run, as a sequence is whose moments are looked at one by one.
        """
        if node not in self._large:
            table = self._joint.storages
            own = set(table.of_node.get(node, ())) - self._given
            large = any(
                self._meant.has(i, table) and len(table.readers[i]) <= MOST_OPERATIONS for i in own
            )
            self._large[node] = large and node in self._made and is_tensor(node)
        return self._large[node]

    def _all_ways(self, node: fx.Node, own: _Counted) -> tuple[Way, ...]:
        if len(node.all_input_nodes) > MOST_OPERATIONS or not may_run_again(node):
            return ()
        if node not in own.ways:
            own.ways[node] = tuple(
                way for way in self._known.of(node, own.count) if self._may(node, way)
            )
        return own.ways[node]

    def _may(self, node: fx.Node, way: Way) -> bool:
        if (node, way) in self._refused:
            return False
        # Of sums only those of products are made in an order that parts can keep.
        is_sum = Result.SUM in way.outputs and not is_sum_of_products(node, way)
        return not (self._exact and is_sum)

    def _run_to(self, target: fx.Node) -> Run | None:
        """The run to the results of an operation, with the least that is large and whole: rather
        one that can be joined with another, then one of most rows.
        """
        least_bytes = self._bytes_of(n for n in target.all_input_nodes if self._is_large(n))
        found: list[Run] = []
        for count in self._counts(target):
            own = self._counted.setdefault(count, _Counted(count))
            for way in self._all_ways(target, own):
                run = Run(count, targets=[target])
                rows = ((value, way.outputs[place_of(value)]) for value in results_of(target))
                if not all(self._is_view_of(v, r) for v, r in rows if isinstance(r, Rows)):
                    continue
                if not self._expand(run, target, way, own):
                    continue
                whole_bytes = self._whole_bytes(run)
                if whole_bytes < least_bytes:
                    least_bytes, found = whole_bytes, [run]
                elif found and whole_bytes == least_bytes:
                    found.append(run)
        found.sort(key=lambda run: -int(run.rows))
        if len(found) < 2:
            return found[0] if found else None
        return next((run for run in found if self._counted[run.rows].joins(run)), found[0])

    def _bytes_of(self, nodes: Iterable[fx.Node]) -> int:
        table = self._joint.storages
        return table.total(table.of(nodes))

    def _whole_bytes(self, run: Run) -> int:
        return self._bytes_of(n for n in run.sources if self._is_large(n))

    def _counts(self, target: fx.Node) -> list[int]:
        """Products of dimensions of the large values that an operation reads."""
        found: dict[int, None] = {}
        for node in target.all_input_nodes:
            if self._is_large(node):
                for shape in (layout.shape for layout in layouts_of(node)):
                    for a, b in itertools.combinations(range(len(shape) + 1), 2):
                        count = product(shape[a:b])
                        if int(count) > 1:
                            found[count] = None
        return list(found)

    def _expand(self, run: Run, operation: fx.Node, way: Way, own: _Counted) -> bool:
        """Let ``run`` compute an operation so, and all that is large before it; can it?

        ``run`` is changed only where it can.
        """
        ways, rows_of = run.ways, run.rows_of
        if len(ways) >= MOST_OPERATIONS:
            return False
        self._looks.count += 1
        ways_before, rows_before = len(ways), len(rows_of)
        ways[operation] = way
        if operation not in self._read:
            self._read[operation] = [n for n in operation.all_input_nodes if is_tensor(n)]
        tensors = self._read[operation]
        ok = len(tensors) == len(way.inputs)
        for value, rows in zip(tensors, way.inputs, strict=False):
            ok = ok and self._take(run, value, rows, own)
        if not ok:
            while len(ways) > ways_before:
                ways.popitem()
            while len(rows_of) > rows_before:
                rows_of.popitem()
        return ok

    def _take(self, run: Run, value: fx.Node, rows: Rows | None, own: _Counted) -> bool:
        """Let ``run`` read ``value`` in such rows: computed in it where that is large."""
        if value in run.rows_of:
            known = run.rows_of[value]
            return known is rows or known == rows
        if rows is not None:
            if self._reads_large(value) and self._compute(run, value, rows, own):
                return True
            if not self._is_view_of(value, rows):
                return False
        run.rows_of[value] = rows
        return True

    def _reads_large(self, value: fx.Node) -> bool:
        """Whether a value is large, or computed from one that is."""
        if value not in self._near:
            near = (value, *operation_of(value).all_input_nodes)
            self._near[value] = value in self._made and any(map(self._is_large, near))
        return self._near[value]

    def _is_view_of(self, value: fx.Node, rows: Rows) -> bool:
        """Whether rows of a value are a view of it."""
        known = self._views.setdefault(value, {})
        if rows not in known:
            known[rows] = _can_be_taken(value, rows)
        return known[rows]

    def _may_run_again(self, operation: fx.Node) -> bool:
        """Whether it can run later once more: it draws nothing, and reads nothing that the forward
        writes to.
        """
        reads = operation.all_input_nodes
        draws = torch_compat.draws_random_numbers(operation)
        return not draws and self._joint.mutated.isdisjoint(reads)

    def _compute(self, run: Run, value: fx.Node, rows: Rows, own: _Counted) -> bool:
        """Let ``run`` compute ``value`` in such rows."""
        if value not in self._made_by:
            self._made_by[value] = operation_of(value), place_of(value)
        operation, index = self._made_by[value]
        way = run.ways.get(operation)
        if way is not None:
            if way.outputs[index] != rows:
                return False
            run.rows_of[value] = rows
            return True
        if value not in own.giving:
            own.giving[value] = self._giving(operation, index, own)
        for way in own.giving[value].get(rows, ()):
            if self._expand(run, operation, way, own):
                run.rows_of[value] = rows
                return True
        return False

    def _giving(self, operation: fx.Node, index: int, own: _Counted) -> dict[Rows, list[Way]]:
        """Ways in which a run computes an operation, by the rows in which they give a value."""
        found: dict[Rows, list[Way]] = {}
        for way in self._all_ways(operation, own) if self._may_run_again(operation) else ():
            given = way.outputs[index]
            if isinstance(given, Rows) and Result.SUM not in way.outputs:
                found.setdefault(given, []).append(way)
        return found

    def _grouped(self, runs: list[Run]) -> list[Run]:
        """Runs that compute the same values in the same rows, as one where none needs another."""
        order = Order(self._made, runs, self._order)
        groups: list[Run] = []
        computing: dict[fx.Node, list[int]] = {}  # places of groups, by each operation in them
        for run in sorted(runs, key=lambda run: self._order[run.targets[0]]):
            alike = {i for n in run.ways for i in computing.get(n, ())}
            joined = next((i for i in sorted(alike) if self._join(groups, i, run, order)), None)
            if joined is None:
                joined = len(groups)
                groups.append(run)
            for operation in run.ways:
                own = computing.setdefault(operation, [])
                if joined not in own:
                    own.append(joined)
        return groups

    def _join(self, groups: list[Run], place: int, run: Run, order: Order) -> bool:
        """Let a group compute what ``run`` does as well; can it?"""
        group = groups[place]
        if len({own.targets[0] in self._backward for own in (group, run)}) > 1:
            return False
        both = group.joined(run)
        if both is None:
            return False
        if self._whole_bytes(both) > max(map(self._whole_bytes, (group, run))):
            return False
        if not order.join(group, run, both):
            return False
        groups[place] = both
        return True


def results_of(node: fx.Node) -> list[fx.Node]:
    """The values that an operation returns and somebody reads."""
    return values_of(node) or [node]


def _can_be_taken(value: fx.Node, rows: Rows) -> bool:
    """Whether rows of a value are a view of it."""
    (layout,) = layouts_of(value)
    return all(
        layout.stride[i] == product((layout.stride[i + 1], layout.shape[i + 1]))
        for i in range(rows.first, rows.last - 1)
    )


def is_sum_of_products(node: fx.Node, way: Way) -> bool:
    """Whether an operation is the sum over the parts of products, which are added up in place."""
    return node.target is torch.ops.aten.mm.default and way.outputs == (Result.SUM,)
