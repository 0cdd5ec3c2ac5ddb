"""A network as a line of stages whose boundaries are sets of storages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Storage:
    """A piece of device memory that a forward node allocates.

    Attributes:
        nbytes: its size as the device allocator counts it.
        name: for people only; identity is the index in ``Chain.storages``.
    """

    nbytes: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class Stage:
    """A run of forward nodes between two cuts, and the backward nodes that belong to it.

    Attributes:
        name: for people, e.g. ``"stage5"``.
        saved: ids of the storages computed by this stage that its backward reads
            (part of the saved set; the boundary after the stage may overlap it).
        kind: stages of equal kind have the same code, shapes, dtypes and strides.
    """

    name: str
    saved: tuple[int, ...]
    kind: int


@dataclass(frozen=True, slots=True)
class Chain:
    """Stages ``0 … L-1`` and the ``L + 1`` boundaries around them.

    ``boundaries[i]`` holds the ids of the storages that cross the cut before stage
    ``i`` (``boundaries[0]``: the input; ``boundaries[L]``: after the last stage,
    usually empty). A storage lives in a contiguous run of boundaries. Pinned
    storages, parameters and model outputs are in none of them.
    """

    storages: tuple[Storage, ...]
    boundaries: tuple[tuple[int, ...], ...]
    stages: tuple[Stage, ...]

    def __len__(self) -> int:
        return len(self.stages)

    def nbytes(self, ids: Iterable[int]) -> int:
        """Bytes of the distinct storages among ``ids``."""
        return sum(self.storages[i].nbytes for i in set(ids))

    def saved_set(self, stage: int) -> frozenset[int]:
        """What ``F_all`` adds to its input: ``ā`` with ``a^l``, without ``a^{l-1}``."""
        return self.added(stage, self.stages[stage].saved)

    def added(self, stage: int, kept: Iterable[int]) -> frozenset[int]:
        """What an ``F_all`` that keeps the storages ``kept`` adds to its input."""
        return frozenset({*kept, *self.boundaries[stage + 1]} - set(self.boundaries[stage]))
