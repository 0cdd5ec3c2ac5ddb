"""Candidates: decisions with their exact peak and seconds, and pools of the best of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from fxremat.ir import Compute, Move
from fxremat.ir.schedule import Codes
from fxremat.runtime.slots import slot_bytes


@dataclass(frozen=True, slots=True)
class AcrossTurn:
    """A storage that the forward allocates and the backward reads.

    Attributes:
        storage: its id in the joint graph's table.
        nbytes: its size.
        nodes: the tensors in it that the backward reads, by their index in the joint graph.
        last: index of the last forward call that uses it; -1 if none does.
        next: index of the first backward call that reads it.
    """

    storage: int
    nbytes: int
    nodes: tuple[int, ...]
    last: int
    next: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Memory and time of each call (one forward or backward of a stage) of a schedule.

    Attributes:
        ops: for each call, the operation of the schedule that it carries out.
        loss_point: index of the first call of the backward.
        peaks_bytes: peak during each call.
        held_bytes: bytes held after each call.
        loss_point_bytes: peak between forward and backward, at the loss point.
        end_bytes: peak after the last call.
        seconds: seconds of each call.
        lives: storages that are held across the loss point, without those that the step is given.
    """

    ops: tuple[Compute, ...]
    loss_point: int
    peaks_bytes: tuple[int, ...]
    held_bytes: tuple[int, ...]
    loss_point_bytes: int
    end_bytes: int
    seconds: tuple[float, ...]
    lives: tuple[AcrossTurn, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the whole step in bytes."""
        return max((self.loss_point_bytes, self.end_bytes, *self.peaks_bytes))


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A schedule of a step with what it holds and offloads, its peak memory and its seconds.

    Attributes:
        codes: the schedule, see ``ir.schedule``.
        held: one bit for each node: whether its value is kept from its first computation on.
        peak_bytes: exact peak of the graphs that would be emitted.
        total_s: seconds of the step.
        moves: storages that are offloaded to host memory, and when.
    """

    codes: Codes
    held: bytes
    peak_bytes: int
    total_s: float
    moves: tuple[Move, ...] = ()

    @property
    def key(self) -> tuple[Hashable, ...]:
        """A hashable key made of schedule, held nodes and moves, for caches."""
        return self.codes.tobytes(), self.held, self.moves

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the offloaded storages take."""
        return sum(slot_bytes(move.nbytes) for move in self.moves)


@dataclass(frozen=True, slots=True)
class Pool:
    """A Pareto set of candidate schedules: none beats another in both peak memory and seconds.

    Attributes:
        members: candidates by ascending peak and descending seconds. The last one is the baseline,
            which recomputes nothing. It is preferred wherever it fits, even to a candidate whose
            recomputations take no time.
    """

    members: tuple[Candidate, ...]

    @staticmethod
    def of(baseline: Candidate, candidates: Iterable[Candidate]) -> Pool:
        """Return the Pareto set of ``candidates`` over peak and seconds, with ``baseline`` last."""
        best: list[Candidate] = []
        for candidate in sorted(candidates, key=lambda c: (c.peak_bytes, c.total_s)):
            if candidate.peak_bytes >= baseline.peak_bytes:
                break
            if not best or candidate.total_s < best[-1].total_s:
                best.append(candidate)
        return Pool((*best, baseline))

    @property
    def baseline(self) -> Candidate:
        """The member that recomputes nothing."""
        return self.members[-1]

    def starts(self, count: int, closer: int) -> tuple[Candidate, ...]:
        """Return the members that local search starts from, without the baseline.

        Args:
            count: number of members that are evenly spaced over their peaks; 0: no member is
                returned.
            closer: number of further members near the least peak, each half as far from it as the
                previous one.
        """
        members = self.members[:-1] if count else ()
        if len(members) <= count + closer:
            return members
        low, high = members[0].peak_bytes, members[-1].peak_bytes
        spaces = max(count - 1, 1)
        wanted = [low + (high - low) * i // spaces for i in range(count)]
        near = (high - low) // spaces
        wanted += [low + (near >> halved) for halved in range(1, closer + 1)]
        peaks = [c.peak_bytes for c in members]
        return tuple(members[i - 1] for i in sorted({bisect_right(peaks, n) for n in wanted}))

    def thinned(self, most: int) -> tuple[Candidate, ...]:
        """Return at most ``most`` members, with indices evenly spaced from first to last."""
        last = len(self.members) - 1
        places = {last * i // max(most - 1, 1) for i in range(most)}
        return tuple(self.members[i] for i in sorted(places))
