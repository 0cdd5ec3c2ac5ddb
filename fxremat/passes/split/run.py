"""A run of operations that is computed in parts, and runs among the other operations of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from fxremat.passes.joint.graph import is_getitem, operation_of
from fxremat.passes.split.rules import Rows, Way

MOST_OPERATIONS = 64
"""Of a run at the most; and the most values that one of them reads, and that read one of them."""


@dataclass(slots=True)
class Looks:
    """How often operations are looked at: work that is the same in any process.

    Attributes:
        most: so often at the most; ``None``: as often as it takes.
        count: so often up to now.
    """

    most: int | None = None
    count: int = 0

    @property
    def are_out(self) -> bool:
        """Whether no more are left."""
        return self.most is not None and self.count > self.most


@dataclass(eq=False, slots=True)
class Run:
    """Operations that are computed for some rows at a time.

    It is not changed any more once it was asked for its sources.

    Attributes:
        rows: how many rows there are; may follow the sizes.
        ways: of each operation, how it is computed in parts.
        rows_of: of each value in it, and of each that it takes: rows, or ``None`` for the whole.
        targets: operations whose results it gives.
    """

    rows: int
    ways: dict[fx.Node, Way] = field(default_factory=dict)
    rows_of: dict[fx.Node, Rows | None] = field(default_factory=dict)
    targets: list[fx.Node] = field(default_factory=list)
    _sources: list[fx.Node] | None = None

    @property
    def sources(self) -> list[fx.Node]:
        """Values that it takes."""
        if self._sources is None:
            self._sources = [n for n in self.rows_of if operation_of(n) not in self.ways]
        return self._sources

    def joined(self, other: Run) -> Run | None:
        """Both as one; ``None`` where they compute a value in different rows."""
        if not self.joins(other):
            return None
        return Run(
            self.rows,
            self.ways | other.ways,
            self.rows_of | other.rows_of,
            [*self.targets, *other.targets],
        )

    def joins(self, other: Run) -> bool:
        """Whether both can be one."""
        if self.rows != other.rows:
            return False
        shared = self.ways.keys() & other.ways.keys()
        if not shared or len(self.ways) + len(other.ways) - len(shared) > MOST_OPERATIONS:
            return False
        if any(self.ways[node] != other.ways[node] for node in shared):
            return False
        values = self.rows_of.keys() & other.rows_of.keys()
        if any(self.rows_of[value] != other.rows_of[value] for value in values):
            return False
        return not (self._gives_otherwise(other) or other._gives_otherwise(self))

    def _gives_otherwise(self, other: Run) -> bool:
        """Whether ``other`` takes a result of this run in another way than parts give it."""
        for value in other.sources:
            way = self.ways.get(operation_of(value))
            if way is not None and way.outputs[place_of(value)] != other.rows_of[value]:
                return True
        return False


class Order:
    """Operations of a step, each after all that it reads, a run being one of them.

    Args:
        made: values of the step.
        runs: with one target each.
        places: of nodes in the graph.
    """

    def __init__(
        self, made: Iterable[fx.Node], runs: Iterable[Run], places: Mapping[fx.Node, int]
    ) -> None:
        self._run_of = {target: run for run in runs for target in run.targets}
        operations = dict.fromkeys(map(operation_of, sorted(made, key=places.__getitem__)))
        self._items: list[fx.Node | Run | None] = [self._run_of.get(n, n) for n in operations]
        self._place = {item: i for i, item in enumerate(self._items)}

    def join(self, one: Run, other: Run, both: Run) -> bool:
        """Let ``both`` stand for two runs, unless what it takes depends on what it gives."""
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
    """Which of the tensors that its operation returns a value is, what is no tensor left out."""
    if not is_getitem(value):
        return 0
    index = value.args[1]
    assert isinstance(index, int)
    returned = operation_of(value).meta["val"][:index]
    return sum(isinstance(other, torch.Tensor) for other in returned)
