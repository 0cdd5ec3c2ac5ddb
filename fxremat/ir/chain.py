"""A network as a chain of stages whose boundaries are sets of storages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Storage:
    """A piece of device memory that a forward node allocates.

    Attributes:
        nbytes: size in bytes, as the device allocator counts it.
        name: name to display. A storage is identified by its index in ``Chain.storages``.
    """

    nbytes: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class Stage:
    """A run of forward nodes between two cuts, and the backward nodes that belong to it.

    Attributes:
        name: name to display, such as ``"stage5"``.
        saved: ids of the storages that this stage computes and its backward reads. With the
            boundary after the stage, which they may overlap, they are the saved set.
        kind: number that is equal for stages with the same code, shapes, dtypes and strides.
    """

    name: str
    saved: tuple[int, ...]
    kind: int


@dataclass(frozen=True, slots=True)
class Chain:
    """A network as stages ``0 … L-1`` in sequence, and the ``L + 1`` boundaries around them.

    A boundary is the set of storages that cross a cut between two stages.

    A storage is in a contiguous run of boundaries. Pinned storages, parameters and model outputs
    are in none of them.

    Attributes:
        storages: all storages; their ids are the indices in this tuple.
        boundaries: for each ``i`` the ids of the storages that cross the cut before stage ``i``.
            ``boundaries[0]`` is the input, ``boundaries[L]`` follows the last stage and is usually
            empty.
        stages: the stages, in the order of the forward.
    """

    storages: tuple[Storage, ...]
    boundaries: tuple[tuple[int, ...], ...]
    stages: tuple[Stage, ...]

    def __len__(self) -> int:
        return len(self.stages)

    def nbytes(self, ids: Iterable[int]) -> int:
        """Return the total bytes of the distinct storages among ``ids``."""
        return sum(self.storages[i].nbytes for i in set(ids))

    def saved_set(self, stage: int) -> frozenset[int]:
        """Return the ids of the storages that a forward adds to its input if it keeps everything.

        They are ``saved`` of the stage and the boundary after it, without the boundary before it.
        """
        return self.added(stage, self.stages[stage].saved)

    def added(self, stage: int, kept: Iterable[int]) -> frozenset[int]:
        """Return the ids of the storages that a forward adds to its input if it keeps ``kept``.

        They are ``kept`` and the boundary after the stage, without the boundary before it.
        """
        return frozenset({*kept, *self.boundaries[stage + 1]} - set(self.boundaries[stage]))
