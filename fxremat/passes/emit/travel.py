"""Storages that travel to host memory and back in emitted graphs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True, slots=True)
class Move:
    """A storage that is on the host for part of the step.

    Places are indices of calls, and mean the instant before that call. One that is the
    turn lies in the forward for ``offload`` and ``release``, in the backward for the
    others.

    Attributes:
        storage: which.
        nbytes: its size.
        nodes: the tensors in it that the backward reads.
        offload: its copy to the host begins, right after the last call that reads it.
        release: its device memory is given back, once that copy is done.
        prefetch: device memory is taken and the copy back begins.
        wait: the call that reads it next.
    """

    storage: int
    nbytes: int
    nodes: tuple[fx.Node, ...]
    offload: int
    release: int
    prefetch: int
    wait: int


@dataclass(frozen=True, slots=True)
class Travel:
    """What travels to host memory, and where it lies there.

    Attributes:
        moves: when each storage leaves and comes back.
        offsets: of each, in bytes from the start of a step's host memory.
        nbytes: of that memory.
        arena: the number by which emitted code finds it.
    """

    moves: tuple[Move, ...]
    offsets: dict[int, int]
    nbytes: int
    arena: int

    def names(self) -> dict[str, int]:
        """What the code of a step that follows its sizes calls these numbers, and what they are.

        For the same moves at other sizes the code needs no more than these.
        """
        slots = {slot_name(storage): offset for storage, offset in self.offsets.items()}
        sizes = {bytes_name(move.storage): move.nbytes for move in self.moves}
        return {**slots, **sizes, HOST_BYTES: self.nbytes}


HOST_BYTES = "HOST_BYTES"
"""Of the step's host memory, in code that follows sizes."""


def slot_name(storage: int) -> str:
    """Where a storage lies in it."""
    return f"SLOT{storage}"


def bytes_name(storage: int) -> str:
    """How large a storage is."""
    return f"BYTES{storage}"
