"""A decision, which tells one step of a line from another, and its memory and time call by call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from fxremat.ir import Compute, Schedule

Tensors = Mapping[int, frozenset[fx.Node]]
"""Tensors of the forward by the index of the stage that makes them."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The order of stage computations, and what each forward keeps.

    Attributes:
        schedule: the computations in order.
        missing: for each stage of whose saved set not all is kept: what its backward rebuilds.
        held: tensors that a stage keeps from its first forward on, whatever the schedule.
    """

    schedule: Schedule
    missing: Tensors
    held: Tensors


@dataclass(frozen=True, slots=True)
class Life:
    """A storage made in the forward and read after the turn, by calls ``last`` and ``next``.

    Attributes:
        storage: which.
        nodes: numbers of the tensors in it that the backward reads.
        last: -1 if no call of the forward uses it.
    """

    storage: int
    nodes: tuple[int, ...]
    last: int
    next: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Memory and time of the calls that carry a decision out.

    Attributes:
        ops: the operation of the schedule that each call carries out.
        turn: index of the first call of the backward.
        peaks_bytes: most memory held during each call.
        held_bytes: memory held after each call.
        turn_bytes: most memory held at the turn.
        end_bytes: most memory held after the last call.
        seconds: of each call.
        lives: storages that cross the turn, but for those that are given.
    """

    ops: tuple[Compute, ...]
    turn: int
    peaks_bytes: tuple[int, ...]
    held_bytes: tuple[int, ...]
    turn_bytes: int
    end_bytes: int
    seconds: tuple[float, ...]
    lives: tuple[Life, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Most memory held at any instant of the step."""
        return max((self.turn_bytes, self.end_bytes, *self.peaks_bytes))
