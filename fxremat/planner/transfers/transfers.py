"""The fastest schedule within a budget if storages may travel to host memory.

Any schedule of recomputations can be the base. ``planner.moves`` decides only from bytes what
travels of the storages that the base holds too many of, and predicts how long it takes. Bases are
the candidates of the search, from the one that recomputes nothing (transfers only) to the one with
the lowest peak (recomputation only), and schedules that are made for the budget. A good base keeps
more than fits in the budget, and recomputes only what fits next to the rest. The fastest schedules
for larger budgets also keep more, but most of them recompute operations that need these budgets,
and no transfer helps there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace

import torch

from fxremat import torch_compat
from fxremat.costs.link.bandwidth import measure_link
from fxremat.ir import MeasuredLink, Move, Solved
from fxremat.ir.schedule import Codes, coded
from fxremat.passes.stages.linearize import Line
from fxremat.planner.decision.candidates import Candidate
from fxremat.planner.decision.moves import Movable, conv_inputs, makespan_s, moved
from fxremat.planner.search.generators import Setting
from fxremat.planner.search.search import Search
from fxremat.runtime.arena import HostLimit
from fxremat.runtime.slots import slot_bytes
from fxremat.units import format_bytes


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory that tensors may be offloaded to, and which tensors may be.

    Attributes:
        only: nothing is recomputed; only offloads make room.
        conv: only inputs of convolutions and poolings are offloaded.
        limit_bytes: the most that may be used; ``None``: no limit.
        folder: folder of the file that stands for host memory on a CPU; ``None``: the system's
            folder for temporary files.
        state: optimizer state and gradients may live in host memory, too.
        all_state: all of them do that the limit allows, whatever the budget is.
        parameters: frozen parameters may live there.
        all_parameters: trained ones, too.
        link: speed of the link if the step is estimated without access to the host; ``None``: it is
            measured.
        limit: the limit that the arenas of all plans for this memory share.
    """

    only: bool = False
    conv: bool = False
    limit_bytes: int | None = None
    folder: str | None = None
    link: MeasuredLink | None = None
    state: bool = False
    all_state: bool = False
    parameters: bool = False
    all_parameters: bool = False
    limit: HostLimit = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "limit", HostLimit(self.limit_bytes))

    def __reduce__(self) -> tuple[object, ...]:
        """Return how to copy or pickle the object: a copy has its own ``limit``."""
        return HostMemory, tuple(getattr(self, own.name) for own in fields(self) if own.init)


@dataclass(frozen=True, slots=True)
class Transfers:
    """Candidate schedules of a search, and the storages of each that could be offloaded.

    Attributes:
        search: the search.
        host: the host memory.
        link: its speed, measured with the kind of memory that will be used.
        immovable: ids of storages that cannot be offloaded.
        movable: the storages of each candidate that could be offloaded.
        candidates: the candidates of the search that ``host`` allows.
        previous: candidates that were chosen for other context bytes.
    """

    search: Search
    host: HostMemory
    link: MeasuredLink
    immovable: frozenset[int]
    movable: tuple[Movable, ...]
    candidates: tuple[Candidate, ...]
    previous: tuple[Candidate, ...] = ()
    _least_cache: list[tuple[int, Candidate]] = field(
        default_factory=list, init=False, compare=False
    )

    @staticmethod
    def of(search: Search, host: HostMemory, link: MeasuredLink | None = None) -> Transfers:
        """Return the candidates of a search with the storages that could be offloaded.

        The speed of the link is measured if it is given neither as ``link`` nor in ``host``.

        Raises:
            HostMemoryError: there is no host memory to measure with.
        """
        link = host.link or link
        if link is None:
            device = search.setting.context_bytes.device
            with torch_compat.real_execution(), torch.no_grad():
                link = measure_link(device, host_dir=host.folder, host_limit_bytes=host.limit_bytes)
        most, small = search.effort.base_candidates, search.effort.small_share
        candidates: tuple[Candidate, ...] = (search.baseline,)
        if not host.only:
            # A generator that is beaten without transfers may still have the better base for them.
            pools = (search.pool, *search.separate)
            candidates = tuple(dict.fromkeys(c for pool in pools for c in pool.thinned(most)))
        immovable, forced = search.immovable, search.measured.line.offloaded
        if host.conv:
            joint = search.measured.line.joint
            immovable |= frozenset(range(len(joint.storages.nbytes))) - conv_inputs(joint) - forced
        evaluations = map(search.evaluator.evaluation, candidates)
        movable = tuple(
            Movable.of(evaluation, immovable, small, forced) for evaluation in evaluations
        )
        return Transfers(search, host, link, immovable, movable, candidates)

    @property
    def least_bytes(self) -> int:
        """The least budget, in bytes, that offloads and recomputation can meet."""
        return self._least()[0]

    @property
    def _line(self) -> Line:
        return self.search.measured.line

    @property
    def _host_limit_bytes(self) -> int | None:
        limits = self.host.limit_bytes, self.search.setting.context_bytes.host_bytes
        return min((limit for limit in limits if limit is not None), default=None)

    def knowing(self, found: Iterable[Candidate]) -> Transfers:
        """Return a copy that also considers ``found``, candidates chosen for other context bytes.

        They are evaluated again. Those that exceed the limit on host memory are left out.
        """
        evaluator, limit = self.search.evaluator, self._host_limit_bytes
        previous = []
        for other in found:
            if limit is None or other.host_bytes <= limit:
                evaluation = evaluator.evaluation(other)
                previous.append(replace(other, peak_bytes=evaluation.peak_bytes))
        return replace(self, previous=tuple(sorted(previous, key=lambda c: c.total_s)))

    def graded(self, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
        """Yield each candidate without offloads, then with more and more of its storages offloaded.

        If some storages are offloaded in any case, there is no candidate without.
        """
        grades = self.search.effort.grades
        for candidate in candidates:
            base = self._movable(candidate)
            if not self._line.offloaded:
                yield candidate
            most, least = base.evaluation.peak_bytes, base.least_bytes
            before: tuple[Move, ...] = ()
            for grade in range(1, grades + 1):
                moves = base.moves(most - (most - least) * grade // grades) or ()
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
        """Return ``candidate`` with the offloads ``moves``, and with its new peak and seconds.

        ``base`` is its evaluation without offloads. ``total_s`` are its seconds, if they are known.
        """
        if total_s is None:
            total_s = makespan_s(base.evaluation, self._line, moves, self.link)
        peak_bytes = moved(base.evaluation, moves).peak_bytes
        return replace(candidate, peak_bytes=peak_bytes, total_s=total_s, moves=moves)

    def _movable(self, candidate: Candidate) -> Movable:
        evaluation = self.search.evaluator.evaluation(candidate)
        small_share = self.search.effort.small_share
        return Movable.of(evaluation, self.immovable, small_share, self._line.offloaded)

    def _least(self) -> tuple[int, Candidate]:
        """Return the least feasible budget in bytes, and a candidate that meets it."""
        if not self._least_cache:
            self._least_cache.append(self._find_least())
        return self._least_cache[0]

    def _find_least(self) -> tuple[int, Candidate]:
        pairs = zip(self.movable, self.candidates, strict=True)
        each = [(base.least_bytes, base, candidate) for base, candidate in pairs]
        limit = self._host_limit_bytes
        best: tuple[int, Candidate] | None = None
        for lowest, base, candidate in sorted(each, key=lambda entry: entry[0]):
            if best is not None:
                if lowest >= best[0]:  # the allocator never hands out less
                    break
                if limit is not None and base.moves(best[0] - 1, limit) is None:
                    continue
            least = self._limited_bytes(base, lowest)
            moves = base.moves(least, limit)
            assert moves is not None
            with_moves = self._with_moves(candidate, base, moves)
            counted = max(least, self.search.counted_bytes(with_moves))
            if best is None or counted < best[0]:
                best = counted, with_moves
        assert best is not None
        for cached in self.previous:
            if cached.peak_bytes < best[0]:
                counted = self.search.counted_bytes(cached)
                best = min(best, (counted, cached), key=lambda entry: entry[0])
        return best

    def _limited_bytes(self, base: Movable, least: int) -> int:
        """Return the least budget of ``base`` in bytes with the limit on host memory.

        ``least`` are the bytes without it.
        """
        limit = self._host_limit_bytes
        if limit is None or base.moves(least, limit) is not None:
            return least
        most = base.evaluation.peak_bytes
        while least < most:  # a larger budget hardly ever takes more host memory
            middle = (least + most) // 2
            if base.moves(middle, limit) is None:
                least = middle + 1
            else:
                most = middle
        return least

    def describe_least(self) -> str:
        """Return a phrase for an error message: what the least feasible budget is needed for."""
        limited = self._describe_limit()
        if limited is not None:
            return limited
        if not self.host.only:
            return "storages that are neither moved nor recomputed"
        return "storages that cannot be moved, since neighboring operations read them or hold them"

    def _describe_limit(self) -> str | None:
        """Return a phrase for an error message: how much host memory would lower the least budget.

        The result is ``None`` if the limit on host memory does not matter.
        """
        limit = self._host_limit_bytes
        if limit is None:
            return None
        least = min(base.least_bytes for base in self.movable)
        best = [base for base in self.movable if base.least_bytes == least]
        if any(base.moves(least, limit) is not None for base in best):
            return None
        taken = min(sum(slot_bytes(m.nbytes) for m in base.moves(least) or ()) for base in best)
        return (
            f"storages that HostMemory(limit=) keeps on the device: it allows {limit} bytes "
            f"({format_bytes(limit)}) of host memory, and with {taken} ({format_bytes(taken)}) "
            f"{least} bytes ({format_bytes(least)}) of the device suffice"
        )

    def fastest_within(self, budget_bytes: int) -> Candidate:
        """Return the fastest candidate, with the offloads that it needs, within a budget.

        Requires: the budget is at least ``least_bytes``.
        """
        best = self._without_moves(budget_bytes)
        if best is self.search.baseline:
            return best  # everything fits, so nothing travels or is recomputed
        best = _faster(best, self._cached_within(budget_bytes))
        for base, candidate in self._bases_by_time():
            if best is not None and candidate.total_s >= best.total_s:
                break
            best = _faster(best, self._moved(base, candidate, budget_bytes, best))
        if best is None or best.total_s > self.search.baseline.total_s:
            for candidate in self._climbed(budget_bytes):
                best = _faster(best, candidate)
        # With a limit on host memory the moves for this budget may exceed the limit where those
        # for the least budget do not: other storages travel, and not always fewer bytes.
        return best or self._least()[1]

    def _moved(
        self, base: Movable, candidate: Candidate, budget_bytes: int, best: Candidate | None = None
    ) -> Candidate | None:
        """Return ``candidate`` with the offloads that it needs to fit in a budget.

        The result is ``None`` if none suffice, or if it is not faster than ``best``. Offloads are
        derived from sums of bytes. If the allocator hands out more, they are derived again for a
        budget that is lower by the difference.
        """
        aim_bytes = budget_bytes
        for _ in range(self.search.effort.send_rounds):
            moves = base.moves(aim_bytes, self._host_limit_bytes)
            if moves is None:
                return None
            total_s = makespan_s(base.evaluation, self._line, moves, self.link)
            if best is not None and total_s >= best.total_s:
                return None
            with_moves = self._with_moves(candidate, base, moves, total_s)
            over_bytes = self.search.counted_bytes(with_moves) - budget_bytes
            if over_bytes <= 0:
                return with_moves
            aim_bytes -= over_bytes
        return None

    def _climbed(self, budget_bytes: int) -> Iterator[Candidate]:
        """Yield the fastest candidate of each local search, with offloads, within a budget.

        Each search starts from a schedule that holds more than the last one's; they end when
        transfers take longer than they save. No search depends on other candidates, so that more
        candidates never make a step slower.
        """
        if self.host.only:
            return
        before_s = math.inf
        evaluator, effort = self.search.evaluator, self.search.effort
        for codes in relieved_schedules(self.search.setting, budget_bytes):
            start = evaluator.candidate(codes)
            best = self._moved(self._movable(start), start, budget_bytes)
            if best is not None:
                if best.total_s > before_s:
                    return
                before_s = best.total_s
            best = self._fastest_of_climb(best, evaluator.climb(start, effort), budget_bytes)
            if best is not None:
                yield best
                if self._is_enough(best):
                    return

    def _is_enough(self, candidate: Candidate | None) -> bool:
        enough_s = (1 + self.search.effort.enough_slower) * self.search.baseline.total_s
        return candidate is not None and candidate.total_s <= enough_s

    def _fastest_of_climb(
        self, best: Candidate | None, higher: Iterable[Candidate], budget_bytes: int
    ) -> Candidate | None:
        fruitless = 0
        for candidate in higher:
            if fruitless == self.search.effort.patience or self._is_enough(best):
                break
            if best is not None and candidate.total_s >= best.total_s:
                continue
            with_moves = self._moved(self._movable(candidate), candidate, budget_bytes, best)
            faster = _faster(best, with_moves)
            fruitless = 0 if faster is not best else fruitless + 1
            best = faster
        return best

    def _cached_within(self, budget_bytes: int) -> Candidate | None:
        """Return the fastest candidate of :attr:`previous` within a budget, or ``None``."""
        fitting = (c for c in self.previous if self.search.counted_bytes(c) <= budget_bytes)
        return next(fitting, None)

    def _without_moves(self, budget_bytes: int) -> Candidate | None:
        """Return the fastest candidate that fits without offloads, or ``None`` if none does."""
        if self.host.only or self._line.offloaded or budget_bytes < self.search.least_bytes:
            return None
        return self.search.fastest_within(budget_bytes)

    def _bases_by_time(self) -> list[tuple[Movable, Candidate]]:
        pairs = zip(self.movable, self.candidates, strict=True)
        return sorted(pairs, key=lambda pair: pair[1].total_s)


def relieved_schedules(setting: Setting, budget_bytes: int) -> Iterator[Codes]:
    """Yield optimal schedules that may hold more than the budget between forward and backward.

    A growing share of the bytes kept at that point is assumed to be on the host: see
    ``RotorTable.relieved``.
    """
    # Loading numba takes longer than all else in the package: not at import.
    from fxremat.solvers.rotor import RotorTable  # noqa: PLC0415

    chain, costs, slots = setting.chain, setting.costs, setting.effort.slots
    table = RotorTable.build(chain, costs, max_budget_bytes=budget_bytes, slots=slots)
    tried: set[bytes] = set()
    for away in setting.effort.away_shares:
        solution = table.relieved(away).schedule(budget_bytes)
        if isinstance(solution, Solved):
            codes = coded(solution.schedule)
            if codes.tobytes() not in tried:
                tried.add(codes.tobytes())
                yield codes


def _faster(best: Candidate | None, other: Candidate | None) -> Candidate | None:
    """Return the faster candidate, ``best`` if they are equal."""
    if best is None or (other is not None and other.total_s < best.total_s):
        return other
    return best
