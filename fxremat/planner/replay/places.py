"""The places of a step's numbers in its arrays, shared by those who fill them and the loops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxremat.jit import helper
from fxremat.passes.stages.block import Mode

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.uint8]
Packed = NDArray[Any]

FIRST, AGAIN, BACK = 0, 1, 2
"""Modes of blocks, as numbers."""

MODES = {Mode.FIRST: FIRST, Mode.AGAIN: AGAIN, Mode.BACKWARD: BACK}

UNKNOWN = -1
"""Stands for bytes or seconds that were never measured."""


COLUMNS = 7
"""Entries of each block, see ``planner.extract``."""

TABLE = 1 << 17
"""Entries of the hash tables of blocks and of footprints."""

ARENA = 1 << 22
"""Initial number of entries for the lists of all blocks."""

TOP, ROOM = range(2)
"""Places in ``At.counts``: where the next block's lists begin in the arena, and where the arena
ends."""


class At:
    """Where each kind of number of a step begins in its arrays, for the compiled loops.

    There are ``L`` stages, ``N`` nodes and ``S`` storages. Nodes are numbered: the forward's, stage
    after stage; the backward's; views of given tensors; then what is given or comes from outside.
    List ``i`` of the lists at ``x`` goes from ``data[x + i]`` to ``data[x + i + 1]``; these are
    places in ``data``, too.

    Attributes:
        stages, nodes, storage_count, forward_count: ``L``, ``N``, ``S``, number of forward nodes.
        longest: ``L``, upper bound on the entries of the lists of a stage's block.
        forward, backward: ``L + 1``, the first node of each stage's forward and backward.
        reads, reads_again: lists, what each node reads, in its own mode and as a recomputation.
        storages: lists, the storages of each node's value.
        made_again: ``N``, how many of these a recomputation of the node returns.
        values: lists, for an operation with several results: the nodes that pick them.
        value_of: ``N``, the operation whose result the node picks, or -1.
        tensor, pinned, draws, is_view, given: ``N``, properties of a node.
        nbytes, never_freed: ``S``.
        workspace: ``3 N``, bytes in each mode.
        once_s: ``2 N`` seconds of one recomputation, in a forward and in a rebuild.
        forward_s, backward_s: ``L`` seconds of a stage's whole first forward and its backward.
        inverses: lists, for each stage: operations that are part of its measured first forward but
            seldom run in it.
        option: ``L``, the first of each stage's lists in ``missing``.
        missing: lists, with everything kept and for each save option: tensors that the stage's
            backward recomputes.
        later, returned: lists, what is read after the backward, and after the forward.
        sum_count, sums, sum_stages, sum_home: the nodes that add up gradients of several branches:
            their number, the nodes, lists of the stages that they wait for, and the stage that each
            belongs to.
        context: 4 numbers of bytes: held throughout, needed at the loss point, held from it on,
            needed at the end.
        handed: ``N``, whether the node is a gradient that is released as soon as it is computed.
        random, width: four rows of ``width`` random numbers, from which sets are hashed.
        needed: ``N``, why each tensor is asked for now.
        saved: ``N``, whether the backward graph reads it from the forward graph.
        alive: ``S``, how many needed tensors lie in a storage.
        want, chosen, again: ``N``, marks of nodes in a block.
        last, present, staying, kept, read: ``S``, marks of storages in a block.
        stack, order, listed: working memory for nodes.
        keeps, runs, back: ``L``, a stage's save option, its remaining forwards, and the place of
            its backward.
        sum_at, unusual, sum_hash: the stage with whose backward each sum runs; whether a backward
            runs other sums than on the line; a hash of its sums.
        held_hash: ``2 L``, a hash of what each stage holds.
        stage, users, group, members, makes, always_held, unheld: see :func:`_put_operations`.
        ran, direct, again_s, parent, depth, freed, gained_s, crosses, dominator, stays, begin,
            room: working memory of ``planner.climb``; ``marks`` and ``marked`` are its marks.
        block_key, block_at: hash table of blocks.
        block, block_s: the lists of each block, and the seconds of its recomputations in a forward
            and in a rebuild.
        footprint_key, footprint: hash table of footprints: peak and change in bytes.
        arena: the lists of blocks.
        missed: what a block that must be made depends on.
        counts, total: see ``planner.extract`` and ``planner.replay``.
        packed: one record of all these, which compiled loops read as an ``At``. A tuple of so many
            numbers would be slow to compile, since each call unpacks it; a record that is not
            in an array would be slow to pass.
    """

    packed: Packed

    def __init__(self, places: Mapping[str, int]) -> None:
        kind = np.dtype([(name, np.int64) for name in places])
        self.packed = np.array([tuple(places.values())], dtype=kind)
        vars(self).update(places)

    def __getattr__(self, name: str) -> int:
        """Raise ``AttributeError``. Type checkers learn here that other attributes are integers."""
        raise AttributeError(name)


@helper
def mixed(a: int, b: int) -> int:
    """Return a hash of the pair ``(a, b)`` as a 64-bit integer."""
    x = np.uint64(a) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(b)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int(np.int64(x ^ (x >> np.uint64(31))))


@helper
def find(data: Ints, table: int, one: int, two: int) -> int:
    """Return the index of the key ``(one, two)`` in the hash table at ``data[table]``.

    If the table does not have it, return the index of the free entry where it belongs.
    """
    i = one & (TABLE - 1)
    while data[table + 2 * i] != 0 and (
        data[table + 2 * i] != one or data[table + 2 * i + 1] != two
    ):
        i = (i + 1) & (TABLE - 1)
    return i
