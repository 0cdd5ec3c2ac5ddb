"""The layout of a line's arrays: what each operation reads and makes, and what it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set

import numpy as np
from torch import fx

from fxremat.passes.joint import rng
from fxremat.passes.joint.batchnorm import NORMALIZED_VALUES, is_inverse, updates_statistics
from fxremat.passes.joint.graph import is_getitem, is_tensor
from fxremat.passes.stages.block import Mode, dependencies
from fxremat.passes.stages.linearize import Line
from fxremat.planner.replay.arrays import LineArrays, SizedNumbers
from fxremat.planner.replay.places import (
    ARENA,
    COLUMNS,
    ROOM,
    TABLE,
    TOP,
    At,
    Floats,
    Ints,
)


class _Layout:
    """Arranges named arrays one after the other, in one array of integers and one of seconds."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}
        self._data: list[tuple[int, Ints]] = []
        self._seconds: list[Floats] = []
        self._size = self._seconds_size = 0

    def put(self, **arrays: Iterable[int] | Ints) -> None:
        for name, values in arrays.items():
            array = np.asarray(list(values) if not isinstance(values, np.ndarray) else values)
            self.places[name] = self._size
            self._data.append((self._size, array.astype(np.int64).ravel()))
            self._size += array.size

    def put_lists(self, **lists: Iterable[Sequence[int]]) -> None:
        """Add several lists under each name: the places where they begin, then their items."""
        for name, each in lists.items():
            rows = list(each)
            first = self._size + len(rows) + 1
            ends = first + np.cumsum([0, *map(len, rows)], dtype=np.int64)
            items = np.array([item for row in rows for item in row], int)
            self.put(**{name: np.concatenate([ends, items])})

    def put_seconds(self, **arrays: Floats) -> None:
        for name, array in arrays.items():
            self.places[name] = self._seconds_size
            self._seconds.append(array.astype(np.float64).ravel())
            self._seconds_size += array.size

    def put_zeros(self, **sizes: int) -> None:
        for name, size in sizes.items():
            self.places[name] = self._size
            self._size += size

    def arrays(self) -> tuple[Ints, Floats]:
        data = np.zeros(self._size, dtype=np.int64)  # touches no memory where nothing was added
        for place, values in self._data:
            data[place : place + values.size] = values
        return data, np.concatenate(self._seconds)


def numbering(line: Line) -> dict[fx.Node, int]:
    """Return the number of each node of the step, from 0 on; for their order see :class:`At`."""
    joint = line.joint
    nodes: dict[fx.Node, int] = {}
    views = (n for n in joint.forward if n in line.views)
    outside = (*joint.primals, *joint.constants, *joint.tangents)
    for part in (
        *(stage.forward for stage in line.stages),
        *(stage.backward for stage in line.stages),
        views,
        outside,
    ):
        for node in part:
            nodes.setdefault(node, len(nodes))
    return nodes


Rebuilt = Sequence[Sequence[Set[fx.Node]]]
"""For each stage tensors that its backward recomputes: with everything kept, and by save option."""


def arrays_of(
    line: Line, number: dict[fx.Node, int], rebuilt: Rebuilt, numbers: SizedNumbers
) -> LineArrays:
    """Return the stages of a step as arrays of numbers, without context bytes.

    Args:
        line: the stages.
        number: the number of each node, from :func:`numbering`.
        rebuilt: for each stage and each choice of what to keep, the tensors that its backward
            recomputes.
        numbers: bytes and seconds.
    """
    nodes = tuple(number)
    layout = _Layout()
    _put_nodes(layout, line, number)
    _put_stages(layout, line, number, rebuilt)
    _put_operations(layout, line, number)
    _put_sized_numbers(layout, numbers)
    layout.put(longest=_longest_blocks(line))
    counts = {
        "stages": len(line.stages),
        "nodes": len(nodes),
        "storage_count": len(line.joint.storages.nbytes),
        "forward_count": sum(len(stage.forward) for stage in line.stages),
        "sum_count": len(line.sums),
    }
    counts["width"] = max(counts["nodes"], counts["storage_count"])
    _put_working_memory(layout, counts, dependencies=_count_reads(nodes))
    data, seconds = layout.arrays()
    at = At({**layout.places, **counts})
    data[at.counts + TOP], data[at.counts + ROOM] = at.arena, data.size
    storages = tuple(line.joint.storages.of_node[n] for n in nodes[: at.forward_count])
    return LineArrays(data, seconds, at, number, nodes, storages, numbers)


def _put_nodes(layout: _Layout, line: Line, number: dict[fx.Node, int]) -> None:
    """Add to ``layout`` what each node reads and makes, and its properties; see :class:`At`."""
    joint, table, nodes = line.joint, line.joint.storages, list(number)
    forward = {node for stage in line.stages for node in stage.forward}
    outside = {*joint.given, *joint.tangents}
    never_freed = table.of(outside) - joint.released
    values: dict[fx.Node, list[int]] = {}
    for node in nodes:
        if is_getitem(node) and node in forward:
            values.setdefault(node.all_input_nodes[0], []).append(number[node])

    def ids(nodes: Iterable[fx.Node]) -> list[int]:
        return list(dict.fromkeys(number[n] for n in nodes))

    def read_by(node: fx.Node, mode: Mode) -> list[int]:
        return [] if node in outside else ids(dependencies(node, mode))

    def made_again(node: fx.Node) -> int:
        count = len(table.of_node[node])
        return min(count, NORMALIZED_VALUES) if updates_statistics(node) else count

    first_mode = {True: Mode.FIRST, False: Mode.BACKWARD}
    layout.put_lists(
        reads=(read_by(n, first_mode[n in forward]) for n in nodes),
        reads_again=(read_by(n, Mode.AGAIN) for n in nodes),
        storages=(table.of_node[n] for n in nodes),
        values=(values.get(n, ()) for n in nodes),
        later=[ids(joint.gradients)],
        returned=[ids(joint.results)],
    )
    layout.put(
        made_again=map(made_again, nodes),
        value_of=(number[n.all_input_nodes[0]] if is_getitem(n) else -1 for n in nodes),
        tensor=map(is_tensor, nodes),
        pinned=(n in line.pinned for n in nodes),
        draws=map(rng.has_effect, nodes),
        is_view=(n in line.views for n in nodes),
        given=(n in outside for n in nodes),
        never_freed=(s in never_freed for s in range(len(table.nbytes))),
    )


def _put_stages(layout: _Layout, line: Line, number: dict[fx.Node, int], rebuilt: Rebuilt) -> None:
    forward = np.cumsum([0, *(len(s.forward) for s in line.stages)])
    backward = np.cumsum([forward[-1], *(len(s.backward) for s in line.stages)])
    sums = sorted(line.sums, key=lambda n: line.order[n])
    layout.put(
        forward=forward,
        backward=backward,
        option=np.cumsum([0, *map(len, rebuilt)]),
        sums=(number[n] for n in sums),
        sum_home=(line.stage_of[n] for n in sums),
    )
    layout.put_lists(
        inverses=([number[n] for n in s.forward if is_inverse(n)] for s in line.stages),
        missing=(sorted(number[n] for n in nodes) for options in rebuilt for nodes in options),
        sum_stages=(sorted(line.sums[n]) for n in sums),
    )
    forward_s = np.zeros(forward[-1])
    layout.put_seconds(block_s=np.zeros(TABLE), again_s=forward_s, gained_s=forward_s)


def _put_sized_numbers(layout: _Layout, numbers: SizedNumbers) -> None:
    layout.put(nbytes=numbers.nbytes, workspace=numbers.workspace)
    layout.put_seconds(
        forward_s=numbers.forward_s, backward_s=numbers.backward_s, once_s=numbers.once_s
    )


def _put_operations(layout: _Layout, line: Line, number: dict[fx.Node, int]) -> None:
    """Add to ``layout`` how forward operations depend on each other when they run again.

    This is for local search. ``stage`` is the stage of each; ``users`` lists the operations that
    read it when they run again; ``group`` is the first operation of its stage whose result it is a
    value or a view of, or itself; ``members`` lists operations by group; ``makes`` lists storages
    that it allocates; ``always_held`` says of each storage whether every schedule holds it across
    the loss point. ``unheld`` says of each operation whether a plan may not hold what it makes.
    Storages that are held throughout the step are left out.
    """
    joint, table = line.joint, line.joint.storages
    given = table.of(joint.given)
    fixed = given | table.of(line.pinned)
    outputs = table.of(joint.results)
    nodes = [node for stage in line.stages for node in stage.forward]
    lies_in = [
        [s for s in table.of_node[n] if s not in fixed] if is_tensor(n) else [] for n in nodes
    ]
    users: list[list[int]] = [[] for _ in nodes]
    members: list[list[int]] = [[] for _ in nodes]
    makes = [dict.fromkeys(storages) for storages in lies_in]
    maker: dict[tuple[int, int], int] = {}
    groups = []
    for i, node in enumerate(nodes):
        for source in dependencies(node, Mode.AGAIN):
            j = number[source]
            if j < len(nodes):
                users[j].append(i)
                for storage in lies_in[j]:
                    makes[i].pop(storage, None)
        group = i
        if is_getitem(node) and number[node.all_input_nodes[0]] < len(nodes):
            group = number[node.all_input_nodes[0]]
        for storage in lies_in[i]:
            group = maker.setdefault((line.stage_of[node], storage), group)
        groups.append(group)
        members[group].append(i)
    layout.put(
        stage=(line.stage_of[n] for n in nodes),
        group=groups,
        unheld=(not line.unsaved.isdisjoint(makes[i]) for i in range(len(nodes))),
        always_held=(s in given or s in outputs for s in range(len(table.nbytes))),
    )
    layout.put_lists(users=users, members=members, makes=map(list, makes))


def _put_working_memory(layout: _Layout, counts: dict[str, int], *, dependencies: int) -> None:
    nodes, storages, stages = counts["nodes"], counts["storage_count"], counts["stages"]
    layout.put(
        random=np.random.default_rng(0).integers(
            1, (1 << 63) - 1, size=4 * counts["width"], dtype=np.int64
        )
    )
    for name in ("needed", "saved", "want", "chosen", "again", "order", "listed"):
        layout.put_zeros(**{name: nodes})
    for name in ("ran", "direct", "parent", "depth", "freed"):
        layout.put_zeros(**{name: counts["forward_count"]})
    for name in ("alive", "last", "present", "staying", "kept", "read"):
        layout.put_zeros(**{name: storages})
    for name in ("crosses", "dominator", "stays", "marked"):
        layout.put_zeros(**{name: storages})
    for name in ("keeps", "runs", "back", "unusual", "begin", "room"):
        layout.put_zeros(**{name: stages})
    layout.put_zeros(
        context=4,
        handed=nodes,
        stack=nodes + dependencies,
        sum_at=counts["sum_count"],
        sum_hash=2 * stages,
        held_hash=2 * stages,
        block_key=2 * TABLE,
        block_at=TABLE,
        block=COLUMNS * TABLE // 2,
        footprint_key=2 * TABLE,
        footprint=2 * TABLE,
        counts=8,
        missed=5,
        total=8,
        marks=1,
        arena=ARENA,
    )


def _longest_blocks(line: Line) -> Iterator[int]:
    """Yield, for each stage, an upper bound on the number of entries in all lists of one block."""
    for stage in line.stages:
        nodes = dict.fromkeys((*stage.forward, *stage.backward, *line.sums))
        waiting = list(nodes)
        while waiting:
            views = [n for n in waiting.pop().all_input_nodes if n in line.views]
            waiting += [n for n in views if n not in nodes]
            nodes.update(dict.fromkeys(views))
        storages = sum(len(line.joint.storages.of_node[n]) for n in nodes)
        yield 2 * len(nodes) + 4 * _count_reads(nodes) + 2 * storages


def _count_reads(nodes: Iterable[fx.Node]) -> int:
    return sum(len(node.all_input_nodes) for node in nodes)
