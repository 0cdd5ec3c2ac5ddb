"""Decisions with what an evaluation of each finds, and those that no other beats."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from fxremat.ir import Compute, Move
from fxremat.ir.schedule import Codes
from fxremat.runtime.slots import slot_bytes


@dataclass(frozen=True, slots=True)
class AcrossTurn:
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
    lives: tuple[AcrossTurn, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Most memory held at any instant of the step."""
        return max((self.turn_bytes, self.end_bytes, *self.peaks_bytes))


STARTS = 10
"""Members that local search sets out from, evenly over their peaks."""

CLOSER = 4
"""More of them near the least peak, where time falls steeply: each half as far from it."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A decision, and what its evaluation comes to.

    Attributes:
        codes: the schedule, see ``ir.schedule``.
        held: a bit for each node of the step: kept from its first computation on.
        peak_bytes: exact, of the graphs that would be emitted.
        total_s: of the step.
        moves: what travels, and when.
    """

    codes: Codes
    held: bytes
    peak_bytes: int
    total_s: float
    moves: tuple[Move, ...] = ()

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Equal for equal decisions."""
        return self.codes.tobytes(), self.held, self.moves

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that a step takes."""
        return sum(slot_bytes(move.nbytes) for move in self.moves)


@dataclass(frozen=True, slots=True)
class Pool:
    """Candidates by ascending peak and falling time.

    Attributes:
        members: the last one is the baseline: nothing recomputed. Nothing beats it where it
            fits, be it free.
    """

    members: tuple[Candidate, ...]

    @staticmethod
    def of(baseline: Candidate, candidates: Iterable[Candidate]) -> Pool:
        """The best of ``candidates``, and the baseline."""
        found: list[Candidate] = []
        for candidate in sorted(candidates, key=lambda c: (c.peak_bytes, c.total_s)):
            if candidate.peak_bytes >= baseline.peak_bytes:
                break
            if not found or candidate.total_s < found[-1].total_s:
                found.append(candidate)
        return Pool((*found, baseline))

    @property
    def baseline(self) -> Candidate:
        """Nothing recomputed."""
        return self.members[-1]

    def starts(self) -> tuple[Candidate, ...]:
        """Members that local search sets out from; never the baseline."""
        members = self.members[:-1]
        if len(members) <= STARTS + CLOSER:
            return members
        low, high = members[0].peak_bytes, members[-1].peak_bytes
        wanted = [low + (high - low) * i // (STARTS - 1) for i in range(STARTS)]
        wanted += [low + ((wanted[1] - low) >> halved) for halved in range(1, CLOSER + 1)]
        peaks = [c.peak_bytes for c in members]
        return tuple(members[i - 1] for i in sorted({bisect_right(peaks, n) for n in wanted}))

    def thinned(self, most: int) -> tuple[Candidate, ...]:
        """At most so many, evenly, the first and the last among them."""
        last = len(self.members) - 1
        return tuple(self.members[i] for i in sorted({last * i // (most - 1) for i in range(most)}))
