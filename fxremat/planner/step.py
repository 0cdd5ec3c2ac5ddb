"""A measured line as integer arrays, for the compiled loops that evaluate decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import fx

from fxremat.costs.cost import Measured
from fxremat.costs.options import Options
from fxremat.errors import CostError, ScheduleError
from fxremat.ir.schedule import Codes
from fxremat.passes.joint import rng
from fxremat.passes.joint.batchnorm import NORMALIZED_VALUES, is_inverse, updates_statistics
from fxremat.passes.joint.graph import is_getitem, is_tensor
from fxremat.passes.stages.block import Mode, dependencies
from fxremat.passes.stages.linearize import Line
from fxremat.planner.places import (
    ARENA,
    COLUMNS,
    MODES,
    ROOM,
    TABLE,
    TOP,
    UNKNOWN,
    At,
    Flags,
    Floats,
    Ints,
)

MOST_ROOM = 1 << 27
"""Numbers of a step that no evaluation should need."""


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """What of a step is not the same at every size; shapes as in :class:`At`."""

    nbytes: Ints
    workspace: Ints
    forward_s: Floats
    backward_s: Floats
    once_s: Floats

    @staticmethod
    def of(measured: Measured, options: Options, number: Mapping[fx.Node, int]) -> Numbers:
        """Bytes and seconds of a measured line."""
        return Numbers(
            np.array(measured.line.joint.storages.nbytes, dtype=np.int64),
            _workspace(measured, number),
            np.array([s.forward_s for s in measured.stages]),
            np.array([s.backward_s for s in measured.stages]),
            _once_s(measured.line, options, tuple(number)),
        )

    @staticmethod
    def nothing(line: Line, number: Mapping[fx.Node, int]) -> Numbers:
        """Of a line of which only the calls are asked for: no workspace, no time."""
        stages = np.zeros(len(line.stages))
        return Numbers(
            np.array(line.joint.storages.nbytes, dtype=np.int64),
            np.zeros((3, len(number)), dtype=np.int64),
            stages,
            stages,
            np.zeros((2, len(number))),
        )


@dataclass(slots=True)
class Step:
    """A measured line as numbers, with room to work in: not for two threads at once.

    Attributes:
        data: integers.
        seconds: of what takes time.
        at: where each lies.
        number: of each node.
        nodes: by number.
        storages: of the value of each forward node.
        around: the context bytes that ``data`` holds now.
        numbers: those of ``data`` and ``seconds`` that are of one size.
    """

    data: Ints
    seconds: Floats
    at: At
    number: dict[fx.Node, int]
    nodes: tuple[fx.Node, ...]
    storages: tuple[tuple[int, ...], ...]
    numbers: Numbers
    around: object = None

    def load(self, numbers: Numbers) -> None:
        """Work at another size from now on. Blocks are the same there, what they do is not."""
        from fxremat.planner.extract import resize  # noqa: PLC0415

        if numbers is self.numbers:
            return
        self.numbers = numbers
        for place, integers in (
            (self.at.nbytes, numbers.nbytes),
            (self.at.workspace, numbers.workspace.ravel()),
        ):
            self.data[place : place + integers.size] = integers
        for place, seconds in (
            (self.at.forward_s, numbers.forward_s),
            (self.at.backward_s, numbers.backward_s),
            (self.at.once_s, numbers.once_s.ravel()),
        ):
            self.seconds[place : place + seconds.size] = seconds
        resize(self.data, self.seconds, self.at)

    def surround(self, key: object, nbytes: Sequence[int], handed: Iterable[fx.Node]) -> None:
        """Evaluate for other context bytes from now on.

        Args:
            key: the object by which they are known again.
            nbytes: given throughout, needed at the turn, held from it on, needed at the end.
            handed: gradients that are given back as soon as they are made.
        """
        data, at = self.data, self.at
        data[at.around : at.around + len(nbytes)] = nbytes
        data[at.handed : at.handed + at.nodes] = 0
        data[[at.handed + self.number[node] for node in handed]] = 1
        self.around = key

    def flags(self, held: bytes) -> Flags:
        """A number for each node from a bit for each; none are set if ``held`` is empty."""
        if not held:
            return np.zeros(self.at.nodes, dtype=np.uint8)
        return np.unpackbits(np.frombuffer(held, dtype=np.uint8), count=self.at.nodes)

    def evaluate(self, codes: Codes, held: Flags) -> tuple[Ints, Floats, float]:
        """Replay a decision: its calls, seconds of each, and of all; see ``replay.evaluate``."""
        # Loading numba takes longer than all else in the package: not at import.
        from fxremat.planner.replay import ROWS, evaluate  # noqa: PLC0415

        calls, call_s = np.zeros((ROWS, codes.size), dtype=np.int64), np.zeros(codes.size)
        total_s = self.run(evaluate, codes, held, calls, call_s)
        return calls, call_s, float(total_s)

    def run(self, kernel: Callable[..., Any], *args: object) -> Any:
        """What ``kernel`` returns, once there is room enough for all blocks at once.

        Raises:
            CostError: it runs an operation that was never measured.
            ScheduleError: it reads what nothing computes.
        """
        from fxremat.planner.replay import TOO_LONG  # noqa: PLC0415

        found = kernel(self.data, self.seconds, self.at, *args)
        while self.totals()["ended"] == TOO_LONG and self.data.size < MOST_ROOM:
            arena = self.data.size - self.at.arena  # twice the room for blocks
            self.data = np.concatenate([self.data, np.zeros(arena, dtype=np.int64)])
            self.data[self.at.counts + ROOM] = self.data.size
            found = kernel(self.data, self.seconds, self.at, *args)
        self._check()
        return found

    def totals(self) -> dict[str, int]:
        """What the last evaluation found of the whole step."""
        names = ("calls", "turn", "peak_bytes", "turn_bytes", "end_bytes", "ended", "node")
        total = self.at.total
        values = self.data[total : total + len(names)].tolist()
        return dict(zip(names, values, strict=True))

    def _check(self) -> None:
        """Raise what the last evaluation found wrong."""
        from fxremat.planner.replay import NEVER_COMPUTED, TOO_LONG, UNTIMED  # noqa: PLC0415

        totals = self.totals()
        if not totals["ended"]:
            return
        if totals["ended"] == TOO_LONG:
            raise ScheduleError("a schedule runs more than can be evaluated at once")
        node = self.nodes[totals["node"]]
        if totals["ended"] == NEVER_COMPUTED:
            raise ScheduleError(f"{node.name} is read but no operation computes it")
        what = "timed" if totals["ended"] == UNTIMED else "measured in this way"
        raise CostError(
            f"{node.name} ({node.target}) is run by a schedule but was never {what}; "
            "please report this model"
        )


class _Layout:
    """Puts arrays one after the other."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}
        self._data: list[tuple[int, Ints]] = []
        self._seconds: list[Floats] = []
        self._size = self._seconds_size = 0

    def put(self, **arrays: Iterable[int] | Ints) -> None:
        """Integers."""
        for name, values in arrays.items():
            array = np.asarray(list(values) if not isinstance(values, np.ndarray) else values)
            self.places[name] = self._size
            self._data.append((self._size, array.astype(np.int64).ravel()))
            self._size += array.size

    def put_lists(self, **lists: Iterable[Sequence[int]]) -> None:
        """Lists: where each begins, and all of them one after the other."""
        for name, each in lists.items():
            own = list(each)
            first = self._size + len(own) + 1
            ends = first + np.cumsum([0, *map(len, own)], dtype=np.int64)
            self.put(**{name: np.concatenate([ends, np.array([i for o in own for i in o], int)])})

    def put_seconds(self, **arrays: Floats) -> None:
        """Seconds."""
        for name, array in arrays.items():
            self.places[name] = self._seconds_size
            self._seconds.append(array.astype(np.float64).ravel())
            self._seconds_size += array.size

    def room(self, **sizes: int) -> None:
        """Zeros."""
        for name, size in sizes.items():
            self.places[name] = self._size
            self._size += size

    def arrays(self) -> tuple[Ints, Floats]:
        """All that was put."""
        data = np.zeros(self._size, dtype=np.int64)  # no memory is touched where nothing is put
        for place, values in self._data:
            data[place : place + values.size] = values
        return data, np.concatenate(self._seconds)


def numbering(line: Line) -> dict[fx.Node, int]:
    """The number of each node that an evaluation knows."""
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
"""For each stage and each of its save options: tensors that its backward rebuilds."""


def step_of(line: Line, number: dict[fx.Node, int], rebuilt: Rebuilt, numbers: Numbers) -> Step:
    """A line as numbers, but for its context bytes.

    Args:
        line: the stages.
        number: of each node, see :func:`numbering`.
        rebuilt: by the stages' save options.
        numbers: of its size.
    """
    nodes = tuple(number)
    layout = _Layout()
    _put_nodes(layout, line, number)
    _put_stages(layout, line, number, rebuilt)
    _put_operations(layout, line, number)
    _put_numbers(layout, numbers)
    layout.put(longest=_longest_blocks(line))
    counts = {
        "stages": len(line.stages),
        "nodes": len(nodes),
        "storage_count": len(line.joint.storages.nbytes),
        "forward_count": sum(len(stage.forward) for stage in line.stages),
        "sum_count": len(line.sums),
    }
    counts["width"] = max(counts["nodes"], counts["storage_count"])
    _put_room(layout, counts, dependencies=_count_reads(nodes))
    data, seconds = layout.arrays()
    at = At.of({**layout.places, **counts})
    data[at.counts + TOP], data[at.counts + ROOM] = at.arena, data.size
    storages = tuple(line.joint.storages.of_node[n] for n in nodes[: at.forward_count])
    return Step(data, seconds, at, number, nodes, storages, numbers)


def _put_nodes(layout: _Layout, line: Line, number: dict[fx.Node, int]) -> None:
    """What each node reads, makes and is."""
    joint, table, nodes = line.joint, line.joint.storages, list(number)
    forward = {node for stage in line.stages for node in stage.forward}
    outside = {*joint.given, *joint.tangents}
    never_freed = table.of(outside)
    values: dict[fx.Node, list[int]] = {}
    for node in nodes:
        if is_getitem(node) and node in forward:
            values.setdefault(node.all_input_nodes[0], []).append(number[node])

    def ids(found: Iterable[fx.Node]) -> list[int]:
        return list(dict.fromkeys(number[n] for n in found))

    def read_by(node: fx.Node, mode: Mode) -> list[int]:
        return [] if node in outside else ids(dependencies(node, mode))

    def made_again(node: fx.Node) -> int:
        count = len(table.of_node[node])
        return min(count, NORMALIZED_VALUES) if updates_statistics(node) else count

    own = {True: Mode.FIRST, False: Mode.BACKWARD}
    layout.put_lists(
        reads=(read_by(n, own[n in forward]) for n in nodes),
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
        draws=(n in forward and rng.draws(n) for n in nodes),
        is_view=(n in line.views for n in nodes),
        given=(n in outside for n in nodes),
        never_freed=(s in never_freed for s in range(len(table.nbytes))),
    )


def _put_stages(layout: _Layout, line: Line, number: dict[fx.Node, int], rebuilt: Rebuilt) -> None:
    """The stages' operations, save options and sums."""
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
        missing=(sorted(number[n] for n in missing) for own in rebuilt for missing in own),
        sum_stages=(sorted(line.sums[n]) for n in sums),
    )
    forward_s = np.zeros(forward[-1])
    layout.put_seconds(block_s=np.zeros(TABLE), again_s=forward_s, gained_s=forward_s)


def _put_numbers(layout: _Layout, numbers: Numbers) -> None:
    """What is not the same at every size."""
    layout.put(nbytes=numbers.nbytes, workspace=numbers.workspace)
    layout.put_seconds(
        forward_s=numbers.forward_s, backward_s=numbers.backward_s, once_s=numbers.once_s
    )


def _put_operations(layout: _Layout, line: Line, number: dict[fx.Node, int]) -> None:
    """Forward operations as recomputations: what an effect is about.

    ``stage`` of each; ``users``: lists of those that read it when they are run again; ``group``:
    the first operation of its stage whose results it is a value or a view of, itself if it is
    none; ``members``: lists of these by group; ``makes``: lists of storages that are new, not of
    something that it reads and is a view of; ``settled``: of each storage, whether it stays in
    any case. Storages that are always there are left out.
    """
    joint, table = line.joint, line.joint.storages
    given = table.of(joint.given)
    fixed = given | table.of(line.pinned)
    outputs = table.of(joint.results)
    nodes = [node for stage in line.stages for node in stage.forward]
    own = [[s for s in table.of_node[n] if s not in fixed] if is_tensor(n) else [] for n in nodes]
    users: list[list[int]] = [[] for _ in nodes]
    members: list[list[int]] = [[] for _ in nodes]
    makes = [dict.fromkeys(storages) for storages in own]
    maker: dict[tuple[int, int], int] = {}
    groups = []
    for i, node in enumerate(nodes):
        for source in dependencies(node, Mode.AGAIN):
            j = number[source]
            if j < len(nodes):
                users[j].append(i)
                for storage in own[j]:
                    makes[i].pop(storage, None)
        group = i
        if is_getitem(node) and number[node.all_input_nodes[0]] < len(nodes):
            group = number[node.all_input_nodes[0]]
        for storage in own[i]:
            group = maker.setdefault((line.stage_of[node], storage), group)
        groups.append(group)
        members[group].append(i)
    layout.put(
        stage=(line.stage_of[n] for n in nodes),
        group=groups,
        settled=(s in given or s in outputs for s in range(len(table.nbytes))),
    )
    layout.put_lists(users=users, members=members, makes=map(list, makes))


def _put_room(layout: _Layout, counts: dict[str, int], *, dependencies: int) -> None:
    """What evaluations write to."""
    nodes, storages, stages = counts["nodes"], counts["storage_count"], counts["stages"]
    layout.put(
        random=np.random.default_rng(0).integers(
            1, (1 << 63) - 1, size=4 * counts["width"], dtype=np.int64
        )
    )
    for name in ("needed", "saved", "want", "chosen", "again", "order", "own"):
        layout.room(**{name: nodes})
    for name in ("ran", "direct", "parent", "depth", "freed"):
        layout.room(**{name: counts["forward_count"]})
    for name in ("alive", "last", "present", "staying", "kept", "read"):
        layout.room(**{name: storages})
    for name in ("there", "above", "stays", "marked"):
        layout.room(**{name: storages})
    for name in ("keeps", "runs", "back", "unusual", "begin", "room"):
        layout.room(**{name: stages})
    layout.room(
        around=4,
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
    """For each stage more numbers than the lists of any block of it have."""
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


def _workspace(measured: Measured, number: Mapping[fx.Node, int]) -> Ints:
    found = np.full((3, len(number)), UNKNOWN, dtype=np.int64)
    nodes = tuple(measured.line.joint.module.graph.nodes)
    for index, mode, nbytes in measured.costs.workspace_bytes:
        found[MODES[Mode(mode)], number[nodes[index]]] = nbytes
    return found


def _once_s(line: Line, options: Options, nodes: Sequence[fx.Node]) -> Floats:
    found = np.full((2, len(nodes)), float(UNKNOWN))
    for i, node in enumerate(nodes):
        if node in line.views or is_getitem(node):
            found[:, i] = 0.0
        elif node in line.stage_of:
            charges = options.parts[line.stage_of[node]].charges
            if node in charges.alone_s:
                found[0, i] = charges.once_s(node, rebuilds=False)
                found[1, i] = charges.once_s(node, rebuilds=True)
    return found
