"""The memory and time of a decision, call by call."""

from __future__ import annotations

from dataclasses import dataclass

from fxremat.ir import Compute


@dataclass(frozen=True, slots=True)
class Life:
    """A storage made in the forward and read after the turn, by calls ``last`` and ``next``.

    Attributes:
        storage: which.
        nbytes: its size.
        nodes: the tensors in it that the backward reads, by their index in the joint graph.
        last: -1 if no call of the forward uses it.
    """

    storage: int
    nbytes: int
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
