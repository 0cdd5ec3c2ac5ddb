"""The memory of a program, block after block: what evaluations are held against.

It reads the very blocks that are emitted, and shares no code with ``planner.replay``.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxremat.passes.emit.program import Program
from fxremat.planner.footprint import Footprints
from fxremat.planner.surroundings import Surroundings


@dataclass(frozen=True)
class Sweep:
    """Most memory during each call, memory after it, at the turn and at the end."""

    peaks_bytes: tuple[int, ...]
    held_bytes: tuple[int, ...]
    turn_bytes: int
    end_bytes: int

    @property
    def peak_bytes(self) -> int:
        return max((self.turn_bytes, self.end_bytes, *self.peaks_bytes))


def sweep(program: Program, footprints: Footprints, surroundings: Surroundings) -> Sweep:
    """Replay ``program``."""
    now = turn = surroundings.given_bytes
    peaks: list[int] = []
    held: list[int] = []
    for index, call in enumerate(program.calls):
        if index == program.turn:
            turn = now + surroundings.turn_bytes
            now += surroundings.tangent_bytes
        footprint = footprints.of(call.block, kept=call.kept)
        peaks.append(now + footprint.peak_bytes)
        now += footprint.change_bytes
        held.append(now)
    return Sweep(tuple(peaks), tuple(held), turn, now + surroundings.end_bytes)
