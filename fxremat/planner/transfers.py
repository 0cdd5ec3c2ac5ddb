"""The fastest schedule within a budget when storages may also travel to host memory.

Any schedule of recomputations can be the base: what it holds too much of travels, as
``planner.moves`` decides from bytes alone, and ``planner.moves`` predicts what that takes.
Bases are the candidates of the search, from nothing recomputed (transfers alone) to the
least peak (recomputation alone), and schedules made for the budget (``bases``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch

from fxremat import torch_compat
from fxremat.costs.bandwidth import measure_link
from fxremat.ir import MeasuredLink, Move
from fxremat.passes.stages.linearize import Line
from fxremat.planner import bases
from fxremat.planner.candidates import Candidate
from fxremat.planner.moves import Movable, conv_inputs, makespan_s, moved
from fxremat.planner.search import Search
from fxremat.runtime.arena import HostLimit
from fxremat.runtime.slots import slot_bytes
from fxremat.units import format_bytes

ENOUGH = 1 + 1e-3
"""Times what keeping everything takes: a climb ends where it comes as near."""

GRADES = 8
"""How much more is away, from nothing to as much as possible, where all of that is looked at."""

ROUNDS = 6
"""Times that more is sent away because the allocator has handed out too much."""

PATIENCE = 8
"""Faster schedules in a row that transfers make slower before a climb ends."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What the user lends of the host.

    Attributes:
        only: nothing is recomputed, transfers alone make room.
        conv: only inputs of convolutions and poolings travel.
        limit_bytes: the most of it; ``None``: as much as it takes.
        folder: of the file that stands for it where the step runs on a CPU; ``None``: the
            system's for temporary files.
        link: how fast it is, where the step is estimated and nothing is to be had of the host;
            ``None``: that is measured.
        limit: what the arenas of all plans for this memory keep to together.
    """

    only: bool = False
    conv: bool = False
    limit_bytes: int | None = None
    folder: str | None = None
    link: MeasuredLink | None = None
    limit: HostLimit = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "limit", HostLimit(self.limit_bytes))

    def __reduce__(self) -> tuple[object, ...]:
        """A copy keeps to a limit of its own."""
        return HostMemory, (self.only, self.conv, self.limit_bytes, self.folder, self.link)


@dataclass(frozen=True, slots=True)
class Transfers:
    """Candidates of a search, and what of each could travel.

    Attributes:
        search: the candidates.
        host: where to.
        link: how fast, measured with the kind of memory that will be used.
        settled: storages that stay.
        movable: what of each candidate.
        candidates: those of the search that ``host`` allows.
        known: what was found for other context bytes.
    """

    search: Search
    host: HostMemory
    link: MeasuredLink
    settled: frozenset[int]
    movable: tuple[Movable, ...]
    candidates: tuple[Candidate, ...]
    known: tuple[Candidate, ...] = ()
    _least_found: list[tuple[int, Candidate]] = field(
        default_factory=list, init=False, compare=False
    )

    @staticmethod
    def of(search: Search, host: HostMemory, link: MeasuredLink | None = None) -> Transfers:
        """Look at every candidate.

        Args:
            search: the candidates.
            host: where to.
            link: how fast; ``None``: that is measured.

        Raises:
            HostMemoryError: there is no host memory to measure with.
        """
        link = host.link or link
        if link is None:
            device = search.setting.context_bytes.device
            with torch_compat.real_execution(), torch.no_grad():
                link = measure_link(device, host_dir=host.folder, host_limit_bytes=host.limit_bytes)
        pools = (search.pool, *search.alone)
        candidates = (search.baseline,) if host.only else bases.of_pools(pools)
        settled, forced = search.settled, search.measured.line.offloaded
        if host.conv:
            joint = search.measured.line.joint
            settled |= frozenset(range(len(joint.storages.nbytes))) - conv_inputs(joint) - forced
        evaluations = map(search.evaluator.evaluation, candidates)
        movable = tuple(Movable.of(evaluation, settled, forced) for evaluation in evaluations)
        return Transfers(search, host, link, settled, movable, candidates)

    @property
    def least_bytes(self) -> int:
        """The least feasible budget."""
        return self._least()[0]

    @property
    def _line(self) -> Line:
        return self.search.measured.line

    @property
    def _limit_bytes(self) -> int | None:
        """Of host memory."""
        limits = self.host.limit_bytes, self.search.setting.context_bytes.host_bytes
        return min((limit for limit in limits if limit is not None), default=None)

    def knowing(self, found: Iterable[Candidate]) -> Transfers:
        """These transfers, with those found for other context bytes, as host memory allows."""
        evaluator, limit = self.search.evaluator, self._limit_bytes
        known = []
        for other in found:
            if limit is None or other.host_bytes <= limit:
                evaluation = evaluator.evaluation(other)
                known.append(replace(other, peak_bytes=evaluation.peak_bytes))
        return replace(self, known=tuple(sorted(known, key=lambda candidate: candidate.total_s)))

    def graded(self, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
        """Candidates with everything on the device, and with ever more of it away."""
        for candidate in candidates:
            base = self._movable(candidate)
            if not self._line.offloaded:
                yield candidate
            most, least = base.evaluation.peak_bytes, base.least_bytes
            before: tuple[Move, ...] = ()
            for grade in range(1, GRADES + 1):
                moves = base.moves(most - (most - least) * grade // GRADES) or ()
                if moves != before:
                    yield self._with_moves(candidate, base, moves)
                before = moves

    def _with_moves(
        self,
        candidate: Candidate,
        base: Movable,
        moves: tuple[Move, ...],
        total_s: float | None = None,
    ) -> Candidate:
        """``candidate`` with storages that travel; ``total_s``: of that, where it is known."""
        if total_s is None:
            total_s = makespan_s(base.evaluation, self._line, moves, self.link)
        peak_bytes = moved(base.evaluation, moves).peak_bytes
        return replace(candidate, peak_bytes=peak_bytes, total_s=total_s, moves=moves)

    def _movable(self, candidate: Candidate) -> Movable:
        evaluation = self.search.evaluator.evaluation(candidate)
        return Movable.of(evaluation, self.settled, self._line.offloaded)

    def _least(self) -> tuple[int, Candidate]:
        """It, and what it was found with: looked for once."""
        if not self._least_found:
            self._least_found.append(self._find_least())
        return self._least_found[0]

    def _find_least(self) -> tuple[int, Candidate]:
        pairs = zip(self.movable, self.candidates, strict=True)
        each = [(self._least_bytes(base), base, candidate) for base, candidate in pairs]
        best: tuple[int, Candidate] | None = None
        for least, base, candidate in sorted(each, key=lambda found: found[0]):
            if best is not None and least >= best[0]:  # what is handed out is never less
                break
            moves = base.moves(least, self._limit_bytes)
            assert moves is not None
            found = self._with_moves(candidate, base, moves)
            counted = max(least, self.search.counted_bytes(found))
            if best is None or counted < best[0]:
                best = counted, found
        assert best is not None
        for known in self.known:
            if known.peak_bytes < best[0]:
                counted = self.search.counted_bytes(known)
                best = min(best, (counted, known), key=lambda found: found[0])
        return best

    def _least_bytes(self, base: Movable) -> int:
        least = base.least_bytes
        limit = self._limit_bytes
        if limit is None or base.moves(least, limit) is not None:
            return least
        most = base.evaluation.peak_bytes
        while least < most:  # more room hardly ever takes more of the host
            middle = (least + most) // 2
            if base.moves(middle, limit) is None:
                least = middle + 1
            else:
                most = middle
        return least

    def describe_least(self) -> str:
        """What the least feasible budget is needed for."""
        limited = self._describe_limit()
        if limited is not None:
            return limited
        if not self.host.only:
            return "what neither travels nor is recomputed"
        return "what cannot travel: it is read by neighbouring operations, or held by others"

    def _describe_limit(self) -> str | None:
        """How much host memory would do with less, if that is what limits."""
        limit = self._limit_bytes
        if limit is None:
            return None
        each = [base.least_bytes for base in self.movable]
        least = min(each)
        best = [base for base, own in zip(self.movable, each, strict=True) if own == least]
        if any(base.moves(least, limit) is not None for base in best):
            return None
        taken = min(sum(slot_bytes(m.nbytes) for m in base.moves(least) or ()) for base in best)
        return (
            f"what HostMemory(limit=) keeps on the device: it allows {limit} bytes "
            f"({format_bytes(limit)}) of host memory, and with {taken} ({format_bytes(taken)}) "
            f"{least} bytes ({format_bytes(least)}) of the device would do"
        )

    def fastest_within(self, budget_bytes: int) -> Candidate:
        """The fastest that fits.

        Requires: the budget is at least ``least_bytes``.
        """
        best = self._without_moves(budget_bytes)
        if best is self.search.baseline:
            return best  # everything fits: nothing is done, be it free
        best = _faster(best, self._as_known(budget_bytes))
        for base, candidate in self._by_time():
            if best is not None and candidate.total_s >= best.total_s:
                break
            best = _faster(best, self._moved(base, candidate, budget_bytes, best))
        if best is None or best.total_s > self.search.baseline.total_s:
            for found in self._climbed(budget_bytes):
                best = _faster(best, found)
        # Within a limit of host memory the least may fit where what is chosen for a larger budget
        # does not: other storages travel then, and not always fewer bytes.
        return best or self._least()[1]

    def _moved(
        self, base: Movable, candidate: Candidate, budget_bytes: int, best: Candidate | None = None
    ) -> Candidate | None:
        """A candidate with what must travel; ``None`` if none fits, or is faster than ``best``.

        Moves are found from sums of bytes. Where more is handed out, they are found again for
        as much less.
        """
        aim_bytes = budget_bytes
        for _ in range(ROUNDS):
            moves = base.moves(aim_bytes, self._limit_bytes)
            if moves is None:
                return None
            found_s = makespan_s(base.evaluation, self._line, moves, self.link)
            if best is not None and found_s >= best.total_s:
                return None
            found = self._with_moves(candidate, base, moves, found_s)
            over_bytes = self.search.counted_bytes(found) - budget_bytes
            if over_bytes <= 0:
                return found
            aim_bytes -= over_bytes
        return None

    def _climbed(self, budget_bytes: int) -> Iterator[Candidate]:
        """The fastest of each climb, until what is away takes longer than it saves.

        Each climb goes by itself, whatever is known already, so that more candidates never
        make a step slower.
        """
        if self.host.only:
            return
        before_s = math.inf
        evaluator = self.search.evaluator
        for codes in bases.relieved(self.search.setting, budget_bytes):
            start = evaluator.candidate(codes)
            found = self._moved(self._movable(start), start, budget_bytes)
            if found is not None:
                if found.total_s > before_s:
                    return
                before_s = found.total_s
            found = self._top(found, evaluator.climb(start), budget_bytes)
            if found is not None:
                yield found
                if self._is_enough(found):
                    return

    def _is_enough(self, found: Candidate | None) -> bool:
        return found is not None and found.total_s <= ENOUGH * self.search.baseline.total_s

    def _top(
        self, best: Candidate | None, higher: Iterable[Candidate], budget_bytes: int
    ) -> Candidate | None:
        """The fastest of a climb."""
        fruitless = 0
        for candidate in higher:
            if fruitless == PATIENCE or self._is_enough(best):
                break
            if best is not None and candidate.total_s >= best.total_s:
                continue
            found = self._moved(self._movable(candidate), candidate, budget_bytes, best)
            faster = _faster(best, found)
            fruitless = 0 if faster is not best else fruitless + 1
            best = faster
        return best

    def _as_known(self, budget_bytes: int) -> Candidate | None:
        """The fastest that fits of what was found for other context bytes."""
        fitting = (c for c in self.known if self.search.counted_bytes(c) <= budget_bytes)
        return next(fitting, None)

    def _without_moves(self, budget_bytes: int) -> Candidate | None:
        """The best of all candidates, of which only some are bases."""
        if self.host.only or self._line.offloaded or budget_bytes < self.search.least_bytes:
            return None
        return self.search.fastest_within(budget_bytes)

    def _by_time(self) -> list[tuple[Movable, Candidate]]:
        pairs = zip(self.movable, self.candidates, strict=True)
        return sorted(pairs, key=lambda pair: pair[1].total_s)


def _faster(best: Candidate | None, found: Candidate | None) -> Candidate | None:
    """The first one if they are equal."""
    if best is None or (found is not None and found.total_s < best.total_s):
        return found
    return best
