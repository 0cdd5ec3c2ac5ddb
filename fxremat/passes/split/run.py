"""A run of operations that is computed in parts, and the order of runs and other operations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from fxremat.passes.joint.graph import is_getitem, operation_of, values_of
from fxremat.passes.parts.rows import Rows, Way


@dataclass(slots=True)
class Looks:
    """Counts and limits how often the search for runs tries to add an operation to one.

    Unlike time, the count is the same in all processes.

    Attributes:
        most: limit on the count; ``None``: no limit.
        count: the count so far.
    """

    most: int | None = None
    count: int = 0

    @property
    def are_out(self) -> bool:
        """Whether the limit was exceeded."""
        return self.most is not None and self.count > self.most


@dataclass(eq=False, slots=True)
class Run:
    """Operations that are computed for some rows at a time.

    It must not be changed after its sources have been read.

    Attributes:
        rows: the number of rows; may follow sizes.
        ways: for each operation, how it is computed in parts.
        rows_of: for each value that it computes or reads, the dimensions that are its rows, or
            ``None`` if each part reads the whole value.
        targets: operations whose results it returns.
    """

    rows: int
    ways: dict[fx.Node, Way] = field(default_factory=dict)
    rows_of: dict[fx.Node, Rows | None] = field(default_factory=dict)
    targets: list[fx.Node] = field(default_factory=list)
    _sources: list[fx.Node] | None = None

    @property
    def sources(self) -> list[fx.Node]:
        """Values that it reads and does not compute."""
        if self._sources is None:
            self._sources = [n for n in self.rows_of if operation_of(n) not in self.ways]
        return self._sources

    def joined(self, other: Run, most_operations: int) -> Run | None:
        """Return one run with the operations of both, or ``None`` if :meth:`joins` is false."""
        if not self.joins(other, most_operations):
            return None
        return Run(
            self.rows,
            self.ways | other.ways,
            self.rows_of | other.rows_of,
            [*self.targets, *other.targets],
        )

    def joins(self, other: Run, most_operations: int) -> bool:
        """Return whether this run and ``other`` can be one run of up to ``most_operations``.

        They must have the same number of rows and a common operation, and must compute or read each
        common value in the same rows.
        """
        if self.rows != other.rows:
            return False
        shared = self.ways.keys() & other.ways.keys()
        if not shared or len(self.ways) + len(other.ways) - len(shared) > most_operations:
            return False
        if any(self.ways[node] != other.ways[node] for node in shared):
            return False
        values = self.rows_of.keys() & other.rows_of.keys()
        if any(self.rows_of[value] != other.rows_of[value] for value in values):
            return False
        return not (self._conflicts(other) or other._conflicts(self))

    def _conflicts(self, other: Run) -> bool:
        """Return whether ``other`` reads a value in other rows than this run computes it in."""
        for value in other.sources:
            way = self.ways.get(operation_of(value))
            if way is not None and way.outputs[place_of(value)] != other.rows_of[value]:
                return True
        return False


class Order:
    """A list of a step's operations and runs, in which each is after all that it reads.

    Args:
        made: values of the step.
        runs: runs with one target each.
        places: the index of each node in the graph.
    """

    def __init__(
        self, made: Iterable[fx.Node], runs: Iterable[Run], places: Mapping[fx.Node, int]
    ) -> None:
        self._run_of = {target: run for run in runs for target in run.targets}
        operations = dict.fromkeys(map(operation_of, sorted(made, key=places.__getitem__)))
        self._items: list[fx.Node | Run | None] = [self._run_of.get(n, n) for n in operations]
        self._place = {item: i for i, item in enumerate(self._items)}

    def join(self, one: Run, other: Run, both: Run) -> bool:
        """Replace two runs in the list by ``both``, the run that joins them; return success.

        Nothing changes if an input of ``both`` depends on one of the two.
        """
        first, last = sorted((self._place[one], self._place[other]))
        needed: set[fx.Node | Run | None] = set()
        waiting = list(both.sources)
        while waiting:
            operation = operation_of(waiting.pop())
            item = self._run_of.get(operation, operation)
            if item is one or item is other:
                return False
            if item not in needed and self._place.get(item, 0) > first:
                needed.add(item)
                waiting.extend(item.sources if isinstance(item, Run) else item.all_input_nodes)
        between = [item for item in self._items[first : last + 1] if item not in (one, other)]
        self._items[first : last + 1] = [
            *(item for item in between if item in needed),
            both,
            *(item for item in between if item not in needed),
            None,
        ]
        self._place.update((self._items[i], i) for i in range(first, last + 1))
        self._run_of.update((target, both) for target in both.targets)
        return True


def place_of(value: fx.Node) -> int:
    """Return the index of ``value`` among the tensors that its operation returns."""
    if not is_getitem(value):
        return 0
    index = value.args[1]
    assert isinstance(index, int)
    returned = operation_of(value).meta["val"][:index]
    return sum(isinstance(other, torch.Tensor) for other in returned)


def results_of(node: fx.Node) -> list[fx.Node]:
    """Return the ``getitem`` nodes that pick results of ``node``, or else ``node`` itself."""
    return values_of(node) or [node]
