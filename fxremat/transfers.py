"""The fastest schedule within a budget when storages may also travel to host memory.

Any schedule of recomputations can be the base: what it holds too much of travels, as
``passes.moves`` decides from bytes alone, and ``passes.timing`` predicts what that takes.
Bases are all candidates of the search, from nothing recomputed (transfers alone) to the
least peak (recomputation alone), and the schedules of ``pofo``, which plans both at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fxremat import torch_compat
from fxremat.ir import Infeasible, Problem, Schedule, Timeline
from fxremat.passes.candidate import Candidate
from fxremat.passes.moves import Movable, Move, swept
from fxremat.passes.policy import conv_inputs
from fxremat.passes.sweep import Sweep
from fxremat.passes.timing import replay
from fxremat.runtime.bandwidth import MeasuredLink, measure_link
from fxremat.search import Search

BASES = 64
"""Candidates of a planner that are looked at."""

POFO_SLOTS, POFO_LABELS = 50, 100
"""Its search is rough: what it finds is swept exactly and its moves are chosen anew."""

POFO_STAGES = 60
"""Longer chains take it too long."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What the user lends of the host.

    Attributes:
        only: nothing is recomputed, transfers alone make room.
        conv: only inputs of convolutions and poolings travel.
        limit_bytes: the most of it; ``None``: as much as it takes.
        folder: of the file that stands for it where the step runs on a CPU; ``None``: the
            system's for temporary files.
    """

    only: bool = False
    conv: bool = False
    limit_bytes: int | None = None
    folder: str | None = None


@dataclass(frozen=True, slots=True)
class Moved:
    """A candidate with storages that travel.

    Attributes:
        candidate: the calls.
        moves: what travels, when.
        sweep: memory with that.
        timeline: predicted.
    """

    candidate: Candidate
    moves: tuple[Move, ...]
    sweep: Sweep
    timeline: Timeline

    @property
    def total_s(self) -> float:
        """Of the step."""
        return self.timeline.makespan_s

    @staticmethod
    def of(candidate: Candidate, moves: tuple[Move, ...], link: MeasuredLink | None) -> Moved:
        """Predict what ``moves`` do to a candidate."""
        program = candidate.program
        sweep = swept(candidate.sweep, moves, program.turn) if moves else candidate.sweep
        timeline = replay(program, candidate.seconds, sweep, moves, link)
        return Moved(candidate, moves, sweep, timeline)


@dataclass(frozen=True, slots=True)
class Transfers:
    """Candidates of a search, and what of each could travel.

    Attributes:
        search: the candidates.
        host: where to.
        link: how fast, measured with the kind of memory that will be used.
        settled: storages that stay.
        bases: one for each candidate that ``host`` allows.
        candidates: those.
    """

    search: Search
    host: HostMemory
    link: MeasuredLink
    settled: frozenset[int]
    bases: tuple[Movable, ...]
    candidates: tuple[Candidate, ...]

    @staticmethod
    def of(search: Search, host: HostMemory) -> Transfers:
        """Measure the link and look at every candidate.

        Raises:
            HostMemoryError: there is no host memory to measure with.
        """
        device = search.sweeps.surroundings.device
        with torch_compat.real_execution(), torch.no_grad():
            link = measure_link(device, host_dir=host.folder)
        candidates = (search.baseline,) if host.only else _bases(search)
        settled = search.settled
        if host.conv:
            joint = search.measured.line.joint
            settled |= frozenset(range(len(joint.storages.nbytes))) - conv_inputs(joint)
        bases = tuple(_movable(candidate, settled) for candidate in candidates)
        return Transfers(search, host, link, settled, bases, candidates)

    @property
    def least_bytes(self) -> int:
        """The least feasible budget."""
        return min(map(self._least_bytes, self.bases))

    def _least_bytes(self, base: Movable) -> int:
        least = base.least_bytes
        limit = self.host.limit_bytes
        if limit is None or base.moves(least, limit) is not None:
            return least
        most = base.sweep.peak_bytes
        while least < most:  # more room hardly ever takes more of the host
            middle = (least + most) // 2
            if base.moves(middle, limit) is None:
                least = middle + 1
            else:
                most = middle
        return least

    def describe_least(self) -> str:
        """What the least feasible budget is needed for."""
        if not self.host.only:
            return "what neither travels nor is recomputed"
        return "what cannot travel: it is read by neighbouring operations, or held by others"

    def fastest_within(self, budget_bytes: int) -> Moved:
        """The fastest that fits.

        Requires: the budget is at least ``least_bytes``.
        """
        best = self._without_moves(budget_bytes)
        if best is not None and best.candidate is self.search.baseline:
            return best  # everything fits: nothing is done, be it free
        for base, candidate in self._by_time(budget_bytes):
            if best is not None and candidate.total_s >= best.total_s:
                break
            moves = base.moves(budget_bytes, self.host.limit_bytes)
            if moves is not None:
                found = Moved.of(candidate, moves, self.link)
                if best is None or found.total_s < best.total_s:
                    best = found
        return best or self._at_least()

    def _at_least(self) -> Moved:
        """What the least feasible budget was found with.

        Within a limit of host memory it may fit where what is chosen for a larger budget
        does not: other storages travel then, and not always fewer bytes.
        """
        base, candidate = min(
            zip(self.bases, self.candidates, strict=True),
            key=lambda pair: self._least_bytes(pair[0]),
        )
        moves = base.moves(self._least_bytes(base), self.host.limit_bytes)
        assert moves is not None
        return Moved.of(candidate, moves, self.link)

    def _without_moves(self, budget_bytes: int) -> Moved | None:
        """The best of all candidates, of which only some are bases."""
        search = self.search
        if self.host.only or budget_bytes < search.least.peak_bytes:
            return None
        return Moved.of(search.fastest_within(budget_bytes), (), None)

    def _by_time(self, budget_bytes: int) -> list[tuple[Movable, Candidate]]:
        pairs = list(zip(self.bases, self.candidates, strict=True))
        if not self.host.only:
            for candidate in _by_pofo(self.search, budget_bytes, self.link):
                pairs.append((_movable(candidate, self.settled), candidate))
        return sorted(pairs, key=lambda pair: pair[1].total_s)


def _bases(search: Search) -> tuple[Candidate, ...]:
    """Some candidates of the search, and of each planner's alone.

    What another planner is faster than without transfers may still be the better base for them.
    """
    found = [c for own in (search.frontier, *search.alone) for c in _thinned(own)]
    return tuple({id(c): c for c in found}.values())


def _thinned(frontier: tuple[Candidate, ...]) -> list[Candidate]:
    """Some of them, evenly, the first and the last among them: neighbours are much alike."""
    last = len(frontier) - 1
    wanted = {last * i // (BASES - 1) for i in range(BASES)}
    return [frontier[i] for i in sorted(wanted)]


def _movable(candidate: Candidate, settled: frozenset[int]) -> Movable:
    return Movable.of(candidate.program, candidate.sweep, settled)


def _by_pofo(search: Search, budget_bytes: int, link: MeasuredLink) -> Iterator[Candidate]:
    """The schedules of recomputations in what ``pofo`` finds."""
    # Loading numba takes longer than all else in the package: not at import.
    from fxremat.solvers import pofo  # noqa: PLC0415

    if len(search.chain) > POFO_STAGES:
        return
    problem = Problem(search.chain, search.costs, budget_bytes, link.link())
    found = pofo.explore(problem, slots=POFO_SLOTS, labels=POFO_LABELS)
    if not isinstance(found, Infeasible):
        yield search.sweeps.candidate(Schedule(found.whole().schedule.computations))
