"""A run of operations that is computed in parts, and runs among the other operations of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from fxremat.passes.joint.graph import is_getitem, operation_of, values_of
from fxremat.passes.split.rules import Rows, Way

MOST_OPERATIONS = 64
"""Of a run at the most; and the most values that one of them reads, and that read one of them."""


@dataclass(eq=False, slots=True)
class Run:
    """Operations that are computed for some rows at a time.

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

    @property
    def sources(self) -> list[fx.Node]:
        """Values that it takes."""
        return [n for n in self.rows_of if operation_of(n) not in self.ways]

    def joined(self, other: Run) -> Run | None:
        """Both as one; ``None`` where they compute a value in different rows."""
        if self.rows != other.rows or self.ways.keys().isdisjoint(other.ways):
            return None
        for node, way in other.ways.items():
            if self.ways.get(node, way) != way:
                return None
        for node, rows in other.rows_of.items():
            if self.rows_of.get(node, rows) != rows:
                return None
        if self._gives_otherwise(other) or other._gives_otherwise(self):
            return None
        if len(self.ways.keys() | other.ways.keys()) > MOST_OPERATIONS:
            return None
        return Run(
            self.rows,
            self.ways | other.ways,
            self.rows_of | other.rows_of,
            [*self.targets, *other.targets],
        )

    def _gives_otherwise(self, other: Run) -> bool:
        """Whether ``other`` takes a result of this run in another way than parts give it."""
        given = ((n, v) for n in self.ways.keys() - other.ways.keys() for v in (n, *values_of(n)))
        return any(
            self.ways[operation].outputs[place_of(value)] != other.rows_of[value]
            for operation, value in given
            if value in other.rows_of
        )


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
