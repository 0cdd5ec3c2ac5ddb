"""Where the numbers of a step lie, and what they mean: what its builder and the loops share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxremat.jit import njit
from fxremat.passes.stages.block import Mode

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.uint8]
Packed = NDArray[Any]

FIRST, AGAIN, BACK = 0, 1, 2
"""Modes of blocks."""

MODES = {Mode.FIRST: FIRST, Mode.AGAIN: AGAIN, Mode.BACKWARD: BACK}

UNKNOWN = -1
"""In place of bytes or seconds that were never measured."""


COLUMNS = 7
"""Entries of a block, see ``planner.extract``."""

TABLE = 1 << 17
"""Entries of the tables of blocks and of footprints."""

ARENA = 1 << 22
"""Numbers that the lists of all blocks may take to begin with."""

TOP, ROOM = range(2)
"""Of ``At.counts``: where in the arena the next block's lists begin, and where the arena ends."""


class At:
    """Where the numbers of a step lie, a line of ``L`` stages with ``N`` nodes and ``S`` storages.

    Nodes are numbered: the forward's stage after stage, then the backward's, the views of what
    is given, and what is given or comes from outside. A list ``i`` of lists at ``x`` goes from
    ``data[x + i]`` to ``data[x + i + 1]``, which are places in ``data``, too.

    Attributes:
        stages, nodes, storage_count, forward_count: ``L``, ``N``, ``S``, nodes of the forward.
        longest: ``L``, numbers that the lists of a stage's block take at most.
        forward, backward: ``L + 1``, the first node of each stage's forward and backward.
        reads, reads_again: lists, what running each node reads, in its own mode and again.
        storages: lists, of each node's value.
        made_again: ``N``, how many of these a recomputation of the node makes.
        values: lists, of an operation with several: the nodes that pick them.
        value_of: ``N``, the operation whose value the node picks, or -1.
        tensor, pinned, draws, is_view, given: ``N``, what a node is.
        nbytes, never_freed: ``S``.
        workspace: ``3 N``, bytes in each mode.
        once_s: ``2 N`` seconds, of a recomputation in a forward and in a rebuild.
        forward_s, backward_s: ``L`` seconds, of a stage's whole first forward, its backward.
        inverses: lists, of each stage: operations that its first forward was measured with and
            seldom runs.
        option: ``L``, the first of each stage's lists in ``missing``.
        missing: lists, with everything kept, and of each save option: tensors that the stage's
            backward rebuilds.
        later, returned: lists, of what is read once the backward, once the forward has ended.
        sum_count, sums, sum_stages, sum_home: how many nodes add up gradients of several
            branches, which, lists of the stages whose gradients, the stage that has the node.
        around: bytes given throughout, needed at the turn, held from it on, needed at the end.
        handed: ``N``, whether it is a gradient that is given back as soon as it is made.
        random, width: four rows of ``width`` numbers by which sets are told apart.
        needed: ``N``, why each tensor is asked for now.
        saved: ``N``, whether the backward graph reads it from the forward graph.
        alive: ``S``, how many tensors that are asked for lie in a storage.
        want, chosen, again: ``N``, marks of nodes in a block.
        last, present, staying, kept, read: ``S``, marks of storages in a block.
        stack, order, own: room for nodes.
        keeps, runs, back: ``L``, a stage's save option, forwards to come, place of its backward.
        sum_at, unusual, sum_hash: the stage with whose backward each sum runs; whether a backward
            runs other sums than in the line's own order; which.
        held_hash: ``2 L``, of what each stage holds.
        stage, users, group, members, makes, settled, unheld: see :func:`_put_operations`.
        ran, direct, again_s, parent, depth, freed, gained_s, there, above, stays, begin, room:
            what ``planner.climb`` finds; ``marks, marked`` are its marks.
        block_key, block_at: table of blocks.
        block, block_s: of each block its lists, and seconds of what it runs again in a forward
            and in a rebuild.
        footprint_key, footprint: table of footprints: peak and change in bytes.
        arena: lists of blocks.
        missed: what is known of a block that is to be made.
        counts, total: see ``planner.extract`` and ``planner.replay``.
        packed: one record of all these, in which compiled loops read them as of an ``At``: a tuple
            of so many numbers is taken apart and put together with each call, which is slow to
            compile, and a record alone is slow to call with.
    """

    packed: Packed

    def __init__(self, places: Mapping[str, int]) -> None:
        kind = np.dtype([(name, np.int64) for name in places])
        self.packed = np.array([tuple(places.values())], dtype=kind)
        vars(self).update(places)

    def __getattr__(self, name: str) -> int:
        """Any other place is a number; there is none of this name."""
        raise AttributeError(name)


@njit(inline="always")
def mixed(a: int, b: int) -> int:
    """A hash of two numbers."""
    x = np.uint64(a) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(b)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int(np.int64(x ^ (x >> np.uint64(31))))


@njit(inline="always")
def find(data: Ints, table: int, one: int, two: int) -> int:
    """The entry of a table of keys with this one, or the free one where it belongs."""
    i = one & (TABLE - 1)
    while data[table + 2 * i] != 0 and (
        data[table + 2 * i] != one or data[table + 2 * i + 1] != two
    ):
        i = (i + 1) & (TABLE - 1)
    return i
