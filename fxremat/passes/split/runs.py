"""Find runs of operations whose large values need to exist for a few rows at a time only.

A run computes one or more results (its *targets*) from values that are small, or that cannot be
computed in parts. It computes every large value in between itself, a few rows at a time, whether it
belongs to the forward or the backward. So no large value is kept for it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field, replace

from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint.constraints import may_run_again
from fxremat.passes.joint.graph import (
    JointGraph,
    StorageTable,
    is_getitem,
    is_tensor,
    operation_of,
)
from fxremat.passes.joint.sizes import layouts_of, names_in, product
from fxremat.passes.parts.rows import Result, Rows, Way
from fxremat.passes.split.narrow import narrow_values
from fxremat.passes.split.run import Looks, Order, Run, place_of, results_of
from fxremat.passes.split.ways import Ways, heads_of, is_sum_of_products

Refused = Set[tuple[fx.Node, Way]]
"""Operations, and ways to compute them in parts, that must not be used."""


@dataclass(frozen=True, slots=True)
class Large:
    """Which values are large: they must not exist whole, only some rows at a time.

    Attributes:
        most_bytes: values that take more are large; also what a part that computes them may hold.
        names: operations whose values are large if they take more than ``names_bytes``.
        names_bytes: also what a part that computes one of these values may hold.
        inner_bytes: values that take more are large as well, except at narrow places of the step
            (:func:`~fxremat.passes.split.narrow.narrow_values`); also what a part may hold.
            ``None``: they are not.
        narrow: ids of the storages at narrow places, if there are ``inner_bytes``.
    """

    most_bytes: int
    names: frozenset[str] = frozenset()
    names_bytes: int = 0
    inner_bytes: int | None = None
    narrow: frozenset[int] = frozenset()

    @property
    def least_bytes(self) -> int:
        """Bytes above which values are large unless they are at narrow places."""
        return min(self.most_bytes, self.inner_bytes or self.most_bytes)

    def of(self, joint: JointGraph) -> Large:
        """Return a copy with the narrow places of ``joint``."""
        if self.inner_bytes is None:
            return self
        return replace(self, narrow=narrow_values(joint))

    def has(self, storage: int, table: StorageTable) -> bool:
        """Return whether a storage, by its index in ``table``, is large."""
        nbytes, is_named = table.nbytes[storage], table.owner[storage].name in self.names
        if nbytes > self.most_bytes or (is_named and nbytes > self.names_bytes):
            return True
        is_inner = self.inner_bytes is not None and storage not in self.narrow
        return is_inner and nbytes > self.least_bytes

    def part_bytes(self, run: Run, table: StorageTable) -> int:
        """Return the most bytes that one part of ``run`` may hold."""
        values = table.of((*run.ways, *run.rows_of))
        named = any(table.owner[i].name in self.names for i in values)
        return min(self.least_bytes, self.names_bytes) if named else self.least_bytes


def runs_of(
    joint: JointGraph,
    large: Large,
    *,
    exact: bool,
    refused: Refused,
    cache: Ways,
    most_operations: int,
    looks: Looks | None = None,
) -> list[Run]:
    """Return runs that compute large values for some rows at a time.

    As few large values as possible are still computed whole.

    Args:
        joint: the step.
        large: which values are large.
        exact: whether results must have the same bits as if all rows were computed at once. Of sums
            over rows, only matrix products are allowed then.
        refused: operations, with the ways in which they must not be computed.
        cache: ways to compute operations in parts, by operation and number of rows.
        most_operations: how many operations a run has at most; also the most values that one of
            them reads, and the most operations that read one of them.
        looks: counts and limits the steps of the search; the result is incomplete at its limit.
    """
    return _Finder(joint, large, exact, refused, cache, most_operations, looks or Looks()).find()


@dataclass(slots=True)
class _RowCount:
    """What the search has found for one number of rows.

    Attributes:
        count: the number of rows.
        most_operations: how many operations a run has at most.
        ways: the allowed ways to compute each operation for some rows at a time, by their width.
        giving: ways to compute each value in rows of a width, by its dimensions that are rows.
        computing: the runs that each operation is in.
    """

    count: int
    most_operations: int
    ways: dict[tuple[fx.Node, int], tuple[Way, ...]] = field(default_factory=dict)
    giving: dict[tuple[fx.Node, int], dict[Rows, list[Way]]] = field(default_factory=dict)
    computing: dict[fx.Node, list[Run]] = field(default_factory=dict)

    def add(self, run: Run) -> None:
        for operation in run.ways:
            self.computing.setdefault(operation, []).append(run)

    def joins(self, run: Run) -> bool:
        """Return whether ``run`` can be joined with a run that :meth:`add` was called for."""
        alike = Counter(itertools.chain.from_iterable(self.computing.get(n, ()) for n in run.ways))
        most = self.most_operations
        return any(
            len(run.ways) + len(other.ways) - shared <= most and run.joins(other, most)
            for other, shared in alike.items()
        )


class _Finder:
    def __init__(
        self,
        joint: JointGraph,
        large: Large,
        exact: bool,
        refused: Refused,
        cache: Ways,
        most_operations: int,
        looks: Looks,
    ) -> None:
        self._joint, self._large_values = joint, large
        self._exact, self._refused, self._ways = exact, refused, cache
        self._most_operations, self._looks = most_operations, looks
        self._order = {n: i for i, n in enumerate(joint.module.graph.nodes)}
        self._backward = frozenset(joint.backward)
        self._made = frozenset((*joint.forward, *joint.backward))
        self._given = joint.storages.of((*joint.given, *joint.tangents))
        self._head_counts = frozenset(count for n in self._made for count in heads_of(n))
        self._by_count: dict[int, _RowCount] = {}
        self._large: dict[fx.Node, bool] = {}
        self._reads_large_cache: dict[fx.Node, bool] = {}
        self._read: dict[fx.Node, list[fx.Node]] = {}
        self._made_by: dict[fx.Node, tuple[fx.Node, int]] = {}
        self._views: dict[fx.Node, dict[Rows, bool]] = {}

    def find(self) -> list[Run]:
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
                self._by_count[run.rows].add(run)
                left = [n for n in run.sources if self._is_large(n)]
            else:
                left = [n for n in target.all_input_nodes if self._is_large(n)]
            for value in {*map(self._base, left)} - done:
                heapq.heappush(latest, (-self._order[value], value))
        return self._grouped(runs)

    def _base(self, value: fx.Node) -> fx.Node:
        """Return the operation that allocates the storage that ``value`` is a view of."""
        operation = operation_of(value)
        while self._is_view(operation):
            operation = operation_of(operation.all_input_nodes[0])
        return operation

    def _is_view(self, node: fx.Node) -> bool:
        return node in self._made and self._joint.storages.is_view(node)

    def _is_large(self, node: fx.Node) -> bool:
        """Return whether a value is large and in memory that the step itself allocates.

        Values that more operations read than a run can have are not large: they would be computed
        again in run after run, such as a sequence whose elements are read one by one.
        """
        if node not in self._large:
            table = self._joint.storages
            storages = set(table.of_node.get(node, ())) - self._given
            most = self._most_operations
            large = any(
                self._large_values.has(i, table) and len(table.readers[i]) <= most for i in storages
            )
            self._large[node] = large and node in self._made and is_tensor(node)
        return self._large[node]

    def _all_ways(self, node: fx.Node, counted: _RowCount, width: int = 1) -> tuple[Way, ...]:
        if len(node.all_input_nodes) > self._most_operations or not may_run_again(node):
            return ()
        if (node, width) not in counted.ways:
            every = self._ways.of(node, counted.count, width)
            if counted.count not in self._head_counts:  # only heads are parts of a dimension
                every = tuple(way for way in every if not way.is_wide)
            counted.ways[node, width] = tuple(w for w in every if self._is_allowed(node, w))
        return counted.ways[node, width]

    def _is_allowed(self, node: fx.Node, way: Way) -> bool:
        if (node, way) in self._refused:
            return False
        # Only sums of products are computed in an order that parts can keep.
        is_sum = Result.SUM in way.outputs and not is_sum_of_products(node, way)
        return not (self._exact and is_sum)

    def _run_to(self, target: fx.Node) -> Run | None:
        """Return the run that computes ``target`` and reads the fewest bytes of large values.

        Of equal runs it is one that can be joined with another, otherwise the one of most rows. If
        no run reads fewer of these bytes than ``target`` does, it is one by heads that can be
        joined, so that what an attention computes again is computed once; or ``None``.
        """
        own_bytes = self._bytes_of(n for n in target.all_input_nodes if self._is_large(n))
        least_bytes = own_bytes
        best: list[Run] = []
        by_heads = self._heads(target)
        for count in self._counts(target):
            counted = self._by_count.setdefault(count, _RowCount(count, self._most_operations))
            for way in self._ways_of_target(target, counted):
                run = Run(count, targets=[target])
                rows = ((value, way.outputs[place_of(value)]) for value in results_of(target))
                if not all(self._rows_are_view(v, r) for v, r in rows if isinstance(r, Rows)):
                    continue
                if not self._expand(run, target, way, counted):
                    continue
                whole_bytes = self._whole_bytes(run)
                if whole_bytes < least_bytes:
                    least_bytes, best = whole_bytes, [run]
                elif whole_bytes == least_bytes:
                    # A sum of large values would be held in float32.
                    is_sum = Result.SUM in way.outputs and self._is_large(results_of(target)[0])
                    if best or (count in by_heads and not is_sum):
                        best.append(run)
        best.sort(key=lambda run: -int(run.rows))
        is_less = least_bytes < own_bytes
        if len(best) < 2 and (is_less or not best):
            return best[0] if best else None
        joining = (run for run in best if self._by_count[run.rows].joins(run))
        return next(joining, best[0] if is_less else None)

    def _bytes_of(self, nodes: Iterable[fx.Node]) -> int:
        table = self._joint.storages
        return table.total(table.of(nodes))

    def _whole_bytes(self, run: Run) -> int:
        return self._bytes_of(n for n in run.sources if self._is_large(n))

    def _counts(self, target: fx.Node) -> list[int]:
        """Return the numbers of rows to try for ``target``.

        These are the products of adjacent dimensions of the large values that it reads, and the
        numbers of heads if one of them is the result of an attention.
        """
        counts: dict[int, None] = {}
        large = [n for n in target.all_input_nodes if self._is_large(n)]
        for shape in (layout.shape for node in large for layout in layouts_of(node)):
            for a, b in itertools.combinations(range(len(shape) + 1), 2):
                counts[product(shape[a:b])] = None
        counts |= self._heads(target)
        return [count for count in counts if int(count) > 1]

    def _heads(self, target: fx.Node) -> dict[int, None]:
        """Return the numbers of heads of attentions whose large results ``target`` reads."""
        bases = (self._base(n) for n in target.all_input_nodes if self._is_large(n))
        return dict.fromkeys(count for base in bases for count in heads_of(base))

    def _ways_of_target(self, target: fx.Node, counted: _RowCount) -> Iterator[Way]:
        """Yield the ways to compute ``target`` for some rows at a time.

        A row may be a part of a dimension of a large value that it reads, such as the head that is
        a part of a hidden state.
        """
        yield from self._all_ways(target, counted)
        count = int(counted.count)
        large = (n for n in target.all_input_nodes if self._is_large(n))
        sizes = {size for n in large for layout in layouts_of(n) for size in layout.shape}
        for size in sorted(n for n in sizes if not names_in((n, counted.count))):
            if count < size and size % count == 0:
                yield from self._all_ways(target, counted, size // count)

    def _expand(self, run: Run, operation: fx.Node, way: Way, counted: _RowCount) -> bool:
        """Add ``operation`` and the large values that it reads to ``run``; return success.

        ``way`` is the way to compute it; ``counted`` has what was found for the run's number of
        rows. On failure ``run`` is unchanged.
        """
        ways, rows_of = run.ways, run.rows_of
        if len(ways) >= self._most_operations:
            return False
        self._looks.count += 1
        ways_before, rows_before = len(ways), len(rows_of)
        ways[operation] = way
        if operation not in self._read:
            self._read[operation] = [n for n in operation.all_input_nodes if is_tensor(n)]
        tensors = self._read[operation]
        ok = len(tensors) == len(way.inputs)
        for value, rows in zip(tensors, way.inputs, strict=False):
            ok = ok and self._take(run, value, rows, counted)
        if not ok:
            while len(ways) > ways_before:
                ways.popitem()
            while len(rows_of) > rows_before:
                rows_of.popitem()
        return ok

    def _take(self, run: Run, value: fx.Node, rows: Rows | None, counted: _RowCount) -> bool:
        """Let ``run`` read ``value``, or compute it if it is large; return success.

        ``rows`` are the dimensions of ``value`` that are rows; ``None``: each part reads it whole.
        """
        if value in run.rows_of:
            existing = run.rows_of[value]
            return existing is rows or existing == rows
        if rows is not None:
            if self._reads_large(value) and self._compute(run, value, rows, counted):
                return True
            if not self._rows_are_view(value, rows):
                return False
        run.rows_of[value] = rows
        return True

    def _reads_large(self, value: fx.Node) -> bool:
        """Return whether ``value``, or a value that its operation reads, is large.

        It is not at a narrow place, so that no run computes it but the one that it is a target of.
        """
        if value not in self._reads_large_cache:
            near = (value, *operation_of(value).all_input_nodes)
            is_narrow = not self._large_values.narrow.isdisjoint(self._joint.storages.of([value]))
            may_compute = value in self._made and not is_narrow
            self._reads_large_cache[value] = may_compute and any(map(self._is_large, near))
        return self._reads_large_cache[value]

    def _rows_are_view(self, value: fx.Node, rows: Rows) -> bool:
        """Return whether some rows of ``value`` are a view of it, so that no copy is necessary."""
        cache = self._views.setdefault(value, {})
        if rows not in cache:
            cache[rows] = _are_rows_a_view(value, rows)
        return cache[rows]

    def _may_run_again(self, operation: fx.Node) -> bool:
        """Return whether an operation may be repeated: it draws nothing, reads no mutated input."""
        reads = operation.all_input_nodes
        draws = torch_compat.draws_random_numbers(operation)
        return not draws and self._joint.mutated.isdisjoint(reads)

    def _compute(self, run: Run, value: fx.Node, rows: Rows, counted: _RowCount) -> bool:
        """Add the operation of ``value``, with what it needs, to ``run``; return success.

        ``rows`` are the dimensions of ``value`` that must be rows.
        """
        if value not in self._made_by:
            self._made_by[value] = operation_of(value), place_of(value)
        operation, index = self._made_by[value]
        way = run.ways.get(operation)
        if way is not None:
            if way.outputs[index] != rows:
                return False
            run.rows_of[value] = rows
            return True
        key = value, rows.width
        if key not in counted.giving:
            counted.giving[key] = self._giving(operation, index, counted, rows.width)
        for way in counted.giving[key].get(rows, ()):
            if self._expand(run, operation, way, counted):
                run.rows_of[value] = rows
                return True
        return False

    def _giving(
        self, operation: fx.Node, index: int, counted: _RowCount, width: int
    ) -> dict[Rows, list[Way]]:
        """Return ways to compute ``operation``, by the dimensions of its result that are rows.

        Args:
            operation: the operation.
            index: the index of this result among the tensors that the operation returns.
            counted: what was found for the number of rows.
            width: the width of the rows, unless the operation has rows of different widths.
        """
        by_rows: dict[Rows, list[Way]] = {}
        if not self._may_run_again(operation):
            return by_rows
        narrow = self._all_ways(operation, counted) if width > 1 else ()
        for way in (*self._all_ways(operation, counted, width), *narrow):
            given = way.outputs[index]
            if isinstance(given, Rows) and Result.SUM not in way.outputs:
                by_rows.setdefault(given, []).append(way)
        return by_rows

    def _grouped(self, runs: list[Run]) -> list[Run]:
        """Return ``runs``, with independent ones joined if they compute values in the same rows."""
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
                places = computing.setdefault(operation, [])
                if joined not in places:
                    places.append(joined)
        return groups

    def _join(self, groups: list[Run], place: int, run: Run, order: Order) -> bool:
        """Replace ``groups[place]`` by a run that also computes ``run``; return success.

        Both must be in the forward, or both in the backward. Together they must not read more bytes
        of large values than one of them by itself.
        """
        group = groups[place]
        if len({each.targets[0] in self._backward for each in (group, run)}) > 1:
            return False
        both = group.joined(run, self._most_operations)
        if both is None:
            return False
        if self._whole_bytes(both) > max(map(self._whole_bytes, (group, run))):
            return False
        if not order.join(group, run, both):
            return False
        groups[place] = both
        return True


def _are_rows_a_view(value: fx.Node, rows: Rows) -> bool:
    (layout,) = layouts_of(value)
    return all(
        layout.stride[i] == product((layout.stride[i + 1], layout.shape[i + 1]))
        for i in range(rows.first, rows.last - 1)
    )
