"""What holding a storage would save: the recomputations that only lead to it.

Everything that is run again leads, step by step, to something that a backward reads. What
every such way out of an operation goes through post-dominates it: with that held, the
operation does not run, and what was kept for the operation alone is free. In the tree of
nearest post-dominators both are sums over all that lies below.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxremat.passes.joint.storage import is_tensor
from fxremat.passes.stages.block import Mode, dependencies, is_getitem
from fxremat.passes.stages.linearize import Line
from fxremat.planner.candidate import Candidate, Sweeps

_OUT = -1
"""Stands for the backward, where all ways out end."""


@dataclass(frozen=True, slots=True)
class Effect:
    """Of holding the results of an operation that is run again.

    Attributes:
        stage: whose operation it is.
        storages: of the results.
        nbytes: the size of those that are not held over the turn in any case.
        gained_s: seconds of what then need not run again.
        freed_bytes: held over the turn for that alone.
    """

    stage: int
    storages: frozenset[int]
    nbytes: int
    gained_s: float
    freed_bytes: int

    @property
    def key(self) -> tuple[int, frozenset[int]]:
        """Tells it from others of the same line."""
        return self.stage, self.storages


@dataclass(frozen=True, slots=True)
class Operations:
    """Forward operations of a line, by index in graph order.

    Attributes:
        nodes: the operations.
        index: of each.
        stage: of each.
        group: of each, the first operation whose results it is a value or a view of, in its
            own stage; itself, if it is none.
        users: of each, those that read it when they are run again.
        storages: of each that is a tensor, but for those that are always there.
        makes: those of them that are new, not of something that it reads and is a view of.
        settled: storages that stay in any case.
    """

    nodes: tuple[fx.Node, ...]
    index: dict[fx.Node, int]
    stage: tuple[int, ...]
    group: tuple[int, ...]
    users: tuple[tuple[int, ...], ...]
    storages: tuple[tuple[int, ...], ...]
    makes: tuple[frozenset[int], ...]
    settled: frozenset[int]

    @staticmethod
    def of(line: Line) -> Operations:
        """Those of ``line``."""
        joint, table = line.joint, line.joint.storages
        given = table.of(joint.given)
        fixed = given | table.of(line.pinned)
        outputs = table.of(n for n in joint.forward_outputs if isinstance(n, fx.Node))
        nodes = tuple(node for stage in line.stages for node in stage.forward)
        index = {node: i for i, node in enumerate(nodes)}
        stage = tuple(i for i, stage in enumerate(line.stages) for _ in stage.forward)
        storages = tuple(
            tuple(s for s in table.of_node[n] if s not in fixed) if is_tensor(n) else ()
            for n in nodes
        )
        users: list[list[int]] = [[] for _ in nodes]
        makes = [set(own) for own in storages]
        for i, node in enumerate(nodes):
            for source in dependencies(node, Mode.AGAIN):
                if source in index:
                    users[index[source]].append(i)
                    makes[i].difference_update(storages[index[source]])
        return Operations(
            nodes=nodes,
            index=index,
            stage=stage,
            group=tuple(_groups(nodes, index, stage, storages)),
            users=tuple(map(tuple, users)),
            storages=storages,
            makes=tuple(map(frozenset, makes)),
            settled=given | outputs,
        )


def _groups(
    nodes: Sequence[fx.Node],
    index: Mapping[fx.Node, int],
    stage: Sequence[int],
    storages: Sequence[Sequence[int]],
) -> Iterator[int]:
    maker: dict[tuple[int, int], int] = {}
    for i, node in enumerate(nodes):
        group = i
        if is_getitem(node) and node.all_input_nodes[0] in index:
            group = index[node.all_input_nodes[0]]
        for storage in storages[i]:
            group = maker.setdefault((stage[i], storage), group)
        yield group


def effects_of(candidate: Candidate, sweeps: Sweeps, operations: Operations) -> list[Effect]:
    """The effect of holding the results of each operation that is run again.

    Args:
        candidate: what runs again.
        sweeps: made it.
        operations: of the same line.

    Ensures: each frees at least what is said, and gains as much, as long as operations are charged
        alike in forwards and rebuilds: one that runs again several times may vanish from some
        of its calls only, which is not counted, nor is a forward that becomes a rebuild as what
        stands between it and its backward vanishes.
    """
    again, read = _runs(candidate, sweeps, operations)
    tree = _Tree.of(operations, again, read)
    gained_s = dict.fromkeys(tree.parent, 0.0)
    results: dict[int, set[int]] = {group: set() for group in tree.parent}
    for i, seconds in again.items():
        gained_s[operations.group[i]] += seconds
        results[operations.group[i]].update(operations.makes[i])
    freed_bytes = dict.fromkeys(tree.parent, 0)
    for nbytes, users in _saved(candidate, operations, again, read):
        above = tree.common(users)
        if above != _OUT:
            freed_bytes[above] += nbytes
    tree.add_up(gained_s)
    tree.add_up(freed_bytes)
    table = sweeps.line.joint.storages
    there = table.of(candidate.program.saved)
    found = []
    for group, seconds in gained_s.items():
        storages = frozenset(results[group])
        if storages and seconds > 0:
            # What is there at the turn and made again has to be held for longer.
            stage, nbytes = operations.stage[group], table.total(storages - there)
            found.append(Effect(stage, storages, nbytes, seconds, freed_bytes[group]))
    return found


def _runs(
    candidate: Candidate, sweeps: Sweeps, operations: Operations
) -> tuple[dict[int, float], set[fx.Node]]:
    """Seconds of each operation that is run again, and what backwards read themselves."""
    index = operations.index
    seconds: dict[int, float] = {}
    read: set[fx.Node] = set()
    for call in candidate.program.calls:
        block = call.block
        if block.mode is Mode.FIRST:
            continue
        charges = sweeps.options.parts[block.stage].charges
        if block.mode is Mode.BACKWARD:
            read |= block.directly
        for node in block.nodes if block.mode is Mode.AGAIN else block.again:
            i = index.get(node)
            if i is None:  # a view of what is given, which any block makes for itself
                continue
            once_s = charges.once_s(node, rebuilds=call.rebuilds or node in block.again)
            seconds[i] = seconds.get(i, 0.0) + once_s
    return seconds, read


def _saved(
    candidate: Candidate, operations: Operations, again: Container[int], read: set[fx.Node]
) -> Iterator[tuple[int, list[int]]]:
    """Size of each storage that is only held for operations that run again, and those."""
    table = candidate.program.line.joint.storages
    groups: dict[int, list[int]] = {}
    settled = set(operations.settled)
    for node in candidate.program.saved:
        storages = table.of_node[node]
        if node in read or node not in operations.index:
            settled.update(storages)
            continue
        readers = operations.users[operations.index[node]]
        for storage in storages:
            found = groups.setdefault(storage, [])
            found.extend(operations.group[reader] for reader in readers if reader in again)
    for storage, users in groups.items():
        if storage not in settled and users:
            yield table.nbytes[storage], users


@dataclass(frozen=True, slots=True)
class _Tree:
    """Nearest post-dominators of groups of operations that run again.

    Attributes:
        parent: the nearest group that all ways out of a group go through; groups last first.
        depth: how many there are.
    """

    parent: dict[int, int]
    depth: dict[int, int]

    @staticmethod
    def of(operations: Operations, again: Collection[int], read: set[fx.Node]) -> _Tree:
        """The tree of the operations ``again``."""
        users: dict[int, list[int]] = {}
        out: set[int] = set()
        for i in again:
            group = operations.group[i]
            found = users.setdefault(group, [])
            if operations.nodes[i] in read:
                out.add(group)
            for user in operations.users[i]:
                above = operations.group[user]
                if user in again and above != group:
                    found.append(above)
                    if above < group:  # a late view of an early result: no tree has it
                        out.add(group)
        tree = _Tree({}, {_OUT: 0})
        for group in sorted(users, reverse=True):
            parent = _OUT if group in out else tree.common(users[group])
            tree.parent[group] = parent
            tree.depth[group] = tree.depth[parent] + 1
        return tree

    def common(self, groups: Sequence[int]) -> int:
        """The nearest that all ways out of all of ``groups`` go through."""
        if not groups:
            return _OUT
        found = groups[0]
        for other in groups:
            while found != other:
                if self.depth[found] >= self.depth[other]:
                    found = self.parent[found]
                else:
                    other = self.parent[other]
        return found

    def add_up(self, values: dict[int, Any]) -> None:
        """Add to each group's value what lies below it."""
        for group in reversed(self.parent):  # what lies below comes before, in the graph
            if self.parent[group] != _OUT:
                values[self.parent[group]] += values[group]
