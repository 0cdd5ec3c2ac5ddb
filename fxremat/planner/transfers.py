"""The fastest schedule within a budget when storages may also travel to host memory.

Any schedule of recomputations can be the base: what it holds too much of travels, as
``planner.moves`` decides from bytes alone, and ``planner.timing`` predicts what that takes.
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
from fxremat.ir import MeasuredLink, Timeline
from fxremat.passes.emit.travel import Move
from fxremat.passes.stages.linearize import Line
from fxremat.planner import bases
from fxremat.planner.allocations import Allocated
from fxremat.planner.evaluation import Evaluation
from fxremat.planner.evaluator import Evaluator
from fxremat.planner.moves import Movable, conv_inputs, moved
from fxremat.planner.pool import Candidate
from fxremat.planner.search import Search
from fxremat.planner.timing import makespan_s, replay
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
class Moved:
    """A candidate with storages that travel.

    Attributes:
        candidate: the decision without them.
        moves: what travels, when.
        evaluation: with that.
        timeline: predicted.
    """

    candidate: Candidate
    moves: tuple[Move, ...]
    evaluation: Evaluation
    timeline: Timeline

    @property
    def total_s(self) -> float:
        """Of the step."""
        return self.timeline.makespan_s

    @staticmethod
    def of(
        candidate: Candidate,
        evaluation: Evaluation,
        line: Line,
        moves: tuple[Move, ...] = (),
        link: MeasuredLink | None = None,
    ) -> Moved:
        """Predict what ``moves`` do to a candidate, of which ``evaluation`` is without them."""
        if moves:
            evaluation = moved(evaluation, moves)
        return Moved(candidate, moves, evaluation, replay(evaluation, line, moves, link))

    @staticmethod
    def stays(candidate: Candidate, evaluator: Evaluator) -> Moved:
        """A candidate of which nothing travels."""
        return Moved.of(candidate, evaluator.evaluation(candidate), evaluator.line)


@dataclass(frozen=True, slots=True)
class Sent:
    """A candidate, what travels of it, and what that comes to.

    Attributes:
        candidate: the decision without moves.
        moves: what travels, when; nothing may.
        evaluation: with that.
        total_s: of the step.
    """

    candidate: Candidate
    moves: tuple[Move, ...]
    evaluation: Evaluation
    total_s: float

    @staticmethod
    def stays(candidate: Candidate, evaluator: Evaluator) -> Sent:
        """A candidate of which nothing travels."""
        return Sent(candidate, (), evaluator.evaluation(candidate), candidate.total_s)

    @property
    def host_bytes(self) -> int:
        """Of host memory that a step takes."""
        return sum(slot_bytes(move.nbytes) for move in self.moves)


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
    known: tuple[Sent, ...] = ()
    _least_found: list[tuple[int, Sent]] = field(default_factory=list, init=False, compare=False)

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
        settled = search.settled
        if host.conv:
            joint = search.measured.line.joint
            settled |= frozenset(range(len(joint.storages.nbytes))) - conv_inputs(joint)
        movable = tuple(_movable(candidate, search, settled) for candidate in candidates)
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

    def knowing(self, found: Iterable[Sent]) -> Transfers:
        """These transfers, with those found for other context bytes, as host memory allows."""
        evaluator, limit = self.search.evaluator, self._limit_bytes
        known = []
        for sent in found:
            if limit is None or sent.host_bytes <= limit:
                candidate = evaluator.candidate(sent.candidate.codes, sent.candidate.held)
                evaluation = moved(evaluator.evaluation(candidate), sent.moves)
                known.append(Sent(candidate, sent.moves, evaluation, sent.total_s))
        return replace(self, known=tuple(sorted(known, key=lambda sent: sent.total_s)))

    def graded(self, candidates: Iterable[Candidate]) -> Iterator[Sent]:
        """Candidates with everything on the device, and with ever more of it away."""
        for candidate in candidates:
            base = self._movable(candidate)
            yield Sent(candidate, (), base.evaluation, candidate.total_s)
            most, least = base.evaluation.peak_bytes, base.least_bytes
            before: tuple[Move, ...] = ()
            for grade in range(1, GRADES + 1):
                moves = base.moves(most - (most - least) * grade // GRADES) or ()
                if moves != before:
                    seconds = makespan_s(base.evaluation, self._line, moves, self.link)
                    yield Sent(candidate, moves, moved(base.evaluation, moves), seconds)
                before = moves

    def _movable(self, candidate: Candidate) -> Movable:
        return _movable(candidate, self.search, self.settled)

    def _least(self) -> tuple[int, Sent]:
        """It, and what it was found with: looked for once."""
        if not self._least_found:
            self._least_found.append(self._find_least())
        return self._least_found[0]

    def _find_least(self) -> tuple[int, Sent]:
        pairs = zip(self.movable, self.candidates, strict=True)
        each = [(self._least_bytes(base), base, candidate) for base, candidate in pairs]
        best: tuple[int, Sent] | None = None
        for least, base, candidate in sorted(each, key=lambda found: found[0]):
            if best is not None and least >= best[0]:  # what is handed out is never less
                break
            moves = base.moves(least, self._limit_bytes)
            assert moves is not None
            evaluation = moved(base.evaluation, moves)
            counted = max(least, self._counted_bytes(candidate, evaluation, moves))
            if best is None or counted < best[0]:
                best = counted, Sent(candidate, moves, evaluation, candidate.total_s)
        assert best is not None
        for sent in self.known:
            if sent.evaluation.peak_bytes < best[0]:
                counted = self._counted_bytes(sent.candidate, sent.evaluation, sent.moves)
                best = min(best, (counted, sent), key=lambda found: found[0])
        return best

    def _counted_bytes(
        self, candidate: Candidate, evaluation: Evaluation, moves: tuple[Move, ...]
    ) -> int:
        """Of the peak with ``moves``: what the budget is for."""
        taken = self.allocated(candidate, evaluation.peak_bytes, moves)
        return taken.counted_bytes(self.search.allocations.budget_on)

    def allocated(
        self, candidate: Candidate, peak_bytes: int, moves: tuple[Move, ...]
    ) -> Allocated:
        """What a candidate takes of the device when ``moves`` lower its peak to ``peak_bytes``."""
        return self.search.allocations.of(
            candidate, peak_bytes, lambda: self.search.evaluator.program(candidate), moves
        )

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
            f"what host_limit= keeps on the device: it allows {limit} bytes "
            f"({format_bytes(limit)}) of host memory, and with {taken} ({format_bytes(taken)}) "
            f"{least} bytes ({format_bytes(least)}) of the device would do"
        )

    def fastest_within(self, budget_bytes: int) -> Moved:
        """The fastest that fits.

        Requires: the budget is at least ``least_bytes``.
        """
        best = self._without_moves(budget_bytes)
        if best is not None and best.candidate is self.search.baseline:
            return best  # everything fits: nothing is done, be it free
        best = _faster(best, self._as_known(budget_bytes))
        for base, candidate in self._by_time(budget_bytes):
            if best is not None and candidate.total_s >= best.total_s:
                break
            best = _faster(best, self._moved(base, candidate, budget_bytes, best))
        if best is None or best.total_s > self.search.baseline.total_s:
            for found in self._climbed(budget_bytes):
                best = _faster(best, found)
        return best or self._at_least()

    def _moved(
        self, base: Movable, candidate: Candidate, budget_bytes: int, best: Moved | None = None
    ) -> Moved | None:
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
            evaluation = moved(base.evaluation, moves)
            over_bytes = self._counted_bytes(candidate, evaluation, moves) - budget_bytes
            if over_bytes <= 0:
                return Moved.of(candidate, base.evaluation, self._line, moves, self.link)
            aim_bytes -= over_bytes
        return None

    def _climbed(self, budget_bytes: int) -> Iterator[Moved]:
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

    def _is_enough(self, found: Moved | None) -> bool:
        return found is not None and found.total_s <= ENOUGH * self.search.baseline.total_s

    def _top(
        self, best: Moved | None, higher: Iterable[Candidate], budget_bytes: int
    ) -> Moved | None:
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

    def _at_least(self) -> Moved:
        """What the least feasible budget was found with.

        Within a limit of host memory it may fit where what is chosen for a larger budget
        does not: other storages travel then, and not always fewer bytes.
        """
        return self._moved_as(self._least()[1])

    def _moved_as(self, sent: Sent) -> Moved:
        """What was found, with when its calls run."""
        evaluation = self.search.evaluator.evaluation(sent.candidate)
        return Moved.of(sent.candidate, evaluation, self._line, sent.moves, self.link)

    def _as_known(self, budget_bytes: int) -> Moved | None:
        """The fastest that fits of what was found for other context bytes."""
        for sent in self.known:
            if self._counted_bytes(sent.candidate, sent.evaluation, sent.moves) <= budget_bytes:
                return self._moved_as(sent)
        return None

    def _without_moves(self, budget_bytes: int) -> Moved | None:
        """The best of all candidates, of which only some are bases."""
        search = self.search
        if self.host.only or budget_bytes < search.least_bytes:
            return None
        return Moved.stays(search.fastest_within(budget_bytes), search.evaluator)

    def _by_time(self, budget_bytes: int) -> list[tuple[Movable, Candidate]]:
        pairs = list(zip(self.movable, self.candidates, strict=True))
        if not self.host.only:
            for codes in bases.by_pofo(self.search.setting, budget_bytes, self.link):
                candidate = self.search.evaluator.candidate(codes)
                pairs.append((self._movable(candidate), candidate))
        return sorted(pairs, key=lambda pair: pair[1].total_s)


def _faster(best: Moved | None, found: Moved | None) -> Moved | None:
    """The first one if they are equal."""
    if best is None or (found is not None and found.total_s < best.total_s):
        return found
    return best


def _movable(candidate: Candidate, search: Search, settled: frozenset[int]) -> Movable:
    evaluator = search.evaluator
    return Movable.of(evaluator.evaluation(candidate), evaluator.step, settled)
