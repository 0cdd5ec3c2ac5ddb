"""What a stage may keep of its saved set, and the time to rebuild the rest.

A backward can rebuild a cheap tensor (a GELU, a norm) from an expensive one that was kept. The
useful choices of a stage are the Pareto set over bytes kept and seconds to rebuild. It is computed
exhaustively for few storages, else by CP-SAT within a limit of work, or greedily where ortools is
not installed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType

from torch import fx

from fxremat import optional
from fxremat.costs.measured.cost import Measured, boundary_after, stage_blocks
from fxremat.effort import Effort
from fxremat.ir import Forward, Keep, Schedule
from fxremat.passes.joint.graph import is_getitem, is_tensor
from fxremat.passes.stages.block import BlockCache, Mode, dependencies
from fxremat.planner.decision.charges import Charges


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a stage's recomputation, with storages as bit masks.

    Attributes:
        makes, reads: masks of the storages that it allocates and reads. Storages that exist in any
            case are left out.
        seconds: seconds that it takes.
    """

    makes: int
    reads: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Numbers:
    """What a stage may keep for its backward, and what recomputing the rest takes, as numbers.

    Bit ``i`` of a mask is storage ``i``.

    Attributes:
        nbytes: size of each storage.
        operations: operations in order.
        required: mask of the storages that the backward reads.
        never: mask of the storages that are never kept.
    """

    nbytes: tuple[int, ...]
    operations: tuple[Operation, ...]
    required: int
    never: int = 0

    @property
    def whole(self) -> int:
        """Mask of all storages that the backward reads and that may be kept."""
        return self.required & ~self.never

    def seconds(self, kept: int) -> float:
        """Return the seconds to recompute what the backward reads and ``kept`` does not keep."""
        needed = self.required & ~kept
        total = 0.0
        for operation in reversed(self.operations):
            if operation.makes & needed:
                total += operation.seconds
                needed |= operation.reads & ~kept
        return total

    def kept_bytes(self, kept: int) -> int:
        """Return the total bytes of the storages in the mask ``kept``."""
        return sum(n for i, n in enumerate(self.nbytes) if kept >> i & 1)


@dataclass(frozen=True)
class StageParts:
    """What a stage's backward needs of its forward, and how to compute it again.

    Attributes:
        numbers: storages and operations as numbers, which the search works on.
        storages: id in the joint graph's table of each storage of ``numbers``.
        nodes: tensors in each storage.
        charges: seconds that are charged for recomputing operations.
    """

    numbers: Numbers
    storages: tuple[int, ...]
    nodes: tuple[tuple[fx.Node, ...], ...]
    charges: Charges

    def recompute_s(self, kept: int) -> float:
        """Return the seconds charged to recompute what the backward reads and ``kept`` lacks."""
        return self.charges.of_rebuild * self.numbers.seconds(kept)

    @property
    def forced_s(self) -> float:
        """Seconds charged to recompute the storages that no plan may keep; 0 without any."""
        return self.recompute_s(self.numbers.whole) if self.numbers.never else 0.0

    def missing(self, kept: int) -> frozenset[fx.Node]:
        """Return the tensors in storages that are not in the mask ``kept``."""
        return frozenset(
            n for i, nodes in enumerate(self.nodes) if not kept >> i & 1 for n in nodes
        )

    def kept_storages(self, kept: int) -> tuple[int, ...]:
        """Return the ids in the joint graph's table of the storages in the mask ``kept``."""
        return tuple(s for i, s in enumerate(self.storages) if kept >> i & 1)


Kept = Mapping[int, int]
"""For each stage that does not keep everything, the mask of what it keeps; see
:class:`StageParts`."""


@dataclass(frozen=True)
class Options:
    """Choices, for each stage, of what to keep for its backward instead of all that it reads.

    Attributes:
        parts: what each stage's backward reads, and how to compute it again.
        masks: for each stage, the mask of storages that each of its options keeps, most bytes
            first.
    """

    parts: tuple[StageParts, ...]
    masks: tuple[tuple[int, ...], ...]

    def at(self, measured: Measured) -> Options:
        """Return the same options with the operation times in ``measured``, without a search."""
        parts = (replace(p, charges=p.charges.at(measured, i)) for i, p in enumerate(self.parts))
        return replace(self, parts=tuple(parts))

    def kept_by(self, schedule: Schedule) -> Kept:
        """Return, by stage, the mask of storages that its last ``F_all`` in ``schedule`` keeps.

        ``F_all`` is a forward that keeps the stage's saved set, or an option's part of it. Stages
        that keep everything are left out.
        """
        kept: dict[int, int] = {}
        for op in schedule.computations:
            if isinstance(op, Forward) and op.keep is Keep.ALL:
                kept.pop(op.stage, None)
                if op.option:
                    kept[op.stage] = self.masks[op.stage][op.option - 1]
                elif self.parts[op.stage].numbers.never:
                    kept[op.stage] = self.parts[op.stage].numbers.whole
        return kept

    def missing(self, kept: Kept) -> dict[int, frozenset[fx.Node]]:
        """Return, for each stage in ``kept``, the tensors that its backward has to rebuild."""
        return {stage: self.parts[stage].missing(mask) for stage, mask in kept.items()}

    def rebuilt(self) -> list[list[frozenset[fx.Node]]]:
        """Return, for each stage, the tensors its backward recomputes, by choice of what is kept.

        The first choice is to keep everything that may be kept; the others are the stage's options.
        """
        whole = (
            parts.missing(~parts.numbers.never) if parts.numbers.never else frozenset[fx.Node]()
            for parts in self.parts
        )
        return [
            [own, *map(parts.missing, masks)]
            for own, parts, masks in zip(whole, self.parts, self.masks, strict=True)
        ]


def find_options(
    measured: Measured,
    blocks: BlockCache,
    effort: Effort,
    *,
    masks: tuple[tuple[int, ...], ...] | None = None,
) -> Options:
    """Find, for every stage, good choices of what to keep for its backward (save options).

    Stages with equal storages and operations (:class:`Numbers`) are searched once.

    Args:
        measured: the stages and their costs.
        blocks: blocks of the stages.
        effort: limits the number of options and the search for them.
        masks: options found at another size, to use instead of a search. Schedules identify options
            by their number.

    Returns:
        At most ``Effort.save_options`` options for each stage. None is better than another in both
        bytes and seconds, and none keeps everything.
    """
    count = len(measured.line.stages)
    parts = tuple(parts_of(measured, blocks, index) for index in range(count))
    if masks is not None:
        return Options(parts, masks)
    if not effort.save_options:
        return Options(parts, ((),) * count)
    masks_of: dict[Numbers, tuple[int, ...]] = {}
    for part in parts:
        if part.numbers not in masks_of:
            masks_of[part.numbers] = _prune(part.numbers, search(part.numbers, effort), effort)
    return Options(parts, tuple(masks_of[part.numbers] for part in parts))


def parts_of(measured: Measured, blocks: BlockCache, index: int) -> StageParts:
    """Return what the backward of stage ``index`` needs of its forward, and how to recompute it."""
    line = measured.line
    table = line.joint.storages
    _, again, _ = stage_blocks(line, blocks, index)
    before, after = line.stages[index].boundary, boundary_after(line, index)
    anyway = table.of((*line.joint.given, *line.pinned, *before, *after))
    bits: dict[int, int] = {}
    operations_of_stage = [n for n in again.nodes if n not in line.views]
    for node in operations_of_stage:
        for storage in table.of_node[node]:
            if storage not in anyway:
                bits.setdefault(storage, len(bits))

    def mask(nodes: Iterable[fx.Node]) -> int:
        return sum(1 << bits[s] for s in table.of(nodes) if s in bits)

    operations = []
    made = 0
    for node in operations_of_stage:
        reads = mask(dependencies(node, Mode.AGAIN))
        makes = mask((node,)) & ~made & ~reads
        made |= makes
        if makes and not is_getitem(node):
            operations.append(Operation(makes, reads, measured.again_s[node]))
    nodes: list[list[fx.Node]] = [[] for _ in bits]
    for node in line.stages[index].forward:
        if is_tensor(node) and node not in line.pinned:
            for storage in table.of_node[node]:
                if storage in bits:
                    nodes[bits[storage]].append(node)
    numbers = Numbers(
        tuple(table.nbytes[s] for s in bits),
        tuple(operations),
        mask(n for n in line.stages[index].saved),
        sum(1 << bit for storage, bit in bits.items() if storage in line.unsaved),
    )
    charges = Charges.of(measured, index)
    return StageParts(numbers, tuple(bits), tuple(map(tuple, nodes)), charges)


def search(numbers: Numbers, effort: Effort) -> list[int]:
    """Return masks of storages to keep, Pareto-optimal in bytes and seconds, most bytes first.

    All masks are tried if there are few storages, else those found by CP-SAT, or greedily without
    ortools.
    """
    count = len(numbers.nbytes)
    if count <= effort.tried_storages:
        return _pareto(numbers, range(1 << count))
    cp_model = optional.find("ortools.sat.python.cp_model")
    if cp_model is None:
        return _pareto(numbers, greedy_masks(numbers, effort))
    return _pareto(numbers, _by_cpsat(numbers, effort, cp_model))


def _pareto(numbers: Numbers, masks: Iterable[int]) -> list[int]:
    """Return the masks that no other one beats in bytes and seconds, most bytes first.

    Masks that keep everything are left out.
    """
    allowed = dict.fromkeys(m & ~numbers.never for m in masks) if numbers.never else masks
    scored = sorted((numbers.kept_bytes(m), numbers.seconds(m), m) for m in allowed)
    best_s, front = float("inf"), []
    for _, seconds, mask in scored:
        if seconds < best_s:
            best_s = seconds
            front.append(mask)
    front.reverse()
    whole = numbers.kept_bytes(numbers.whole)
    return [mask for mask in front if numbers.kept_bytes(mask) < whole]


def greedy_masks(numbers: Numbers, effort: Effort) -> list[int]:
    """Return masks of storages to keep, chosen greedily for several limits on their bytes.

    Each limit is a share of all bytes. For each there are two starts. One keeps everything
    required, and removes storages by least time to rebuild per byte until the rest fits. The other
    keeps nothing. Both then add storages by most time saved per byte while these fit. Losses and
    gains are only updated when they come first. That changes nothing where the loss of a storage
    never decreases as more is removed, and its gain never increases as more is added.
    """
    whole, free = numbers.kept_bytes(numbers.whole), _without_bytes(numbers)
    thinned = _thinned(numbers, numbers.whole | free)
    masks = [free, *thinned]
    count = effort.save_options
    for share in range(1, count + 1):
        masks += _greedy_within(numbers, whole * share // (count + 1), thinned)
    return masks


def _greedy_within(numbers: Numbers, limit_bytes: int, thinned: Sequence[int]) -> list[int]:
    """Return two masks filled up to ``limit_bytes``: nothing, and the first of ``thinned`` to fit.

    ``thinned`` has masks with ever fewer bytes, from :func:`_thinned`.
    """
    fitting = next(m for m in thinned if numbers.kept_bytes(m) <= limit_bytes)
    return [_filled(numbers, mask, limit_bytes) for mask in (_without_bytes(numbers), fitting)]


def _thinned(numbers: Numbers, mask: int) -> list[int]:
    """Remove the storages of ``mask`` one by one; return the mask at first and after each removal.

    The next one is that whose removal adds the fewest seconds of recomputation per byte.
    """
    masks = [mask]
    heap = [(0.0, i) for i in _set_bits(mask) if numbers.nbytes[i]]
    while heap:
        now_s = numbers.seconds(mask)
        _, i = heapq.heappop(heap)
        loss = (numbers.seconds(mask & ~(1 << i)) - now_s) / numbers.nbytes[i]
        if heap and loss > heap[0][0]:
            heapq.heappush(heap, (loss, i))
            continue
        mask &= ~(1 << i)
        masks.append(mask)
    return masks


def _filled(numbers: Numbers, mask: int, limit_bytes: int) -> int:
    """Return ``mask`` with more storages, up to ``limit_bytes``.

    Those that save the most seconds per byte are added first.
    """
    room_bytes = limit_bytes - numbers.kept_bytes(mask)
    heap = [(-math.inf, i) for i in range(len(numbers.nbytes)) if not mask >> i & 1]
    while heap:
        now_s = numbers.seconds(mask)
        _, i = heapq.heappop(heap)
        if numbers.nbytes[i] > room_bytes:
            continue
        gain = (now_s - numbers.seconds(mask | 1 << i)) / numbers.nbytes[i]
        if heap and -gain > heap[0][0]:
            heapq.heappush(heap, (-gain, i))
        elif gain > 0:
            mask |= 1 << i
            room_bytes -= numbers.nbytes[i]
    return mask


def fastest_within(numbers: Numbers, limit_bytes: int, effort: Effort) -> int:
    """Return the mask of at most ``limit_bytes`` to keep with the fewest seconds to recompute.

    It is optimal where CP-SAT proves that within its limit of work. Without ortools it is chosen
    greedily.
    """
    thinned = _thinned(numbers, numbers.required | _without_bytes(numbers))
    masks = _greedy_within(numbers, limit_bytes, thinned)
    cp_model = optional.find("ortools.sat.python.cp_model")
    if cp_model is not None:
        masks += _exact_within(numbers, limit_bytes, cp_model, effort.solve_work)
    return min(masks, key=lambda mask: (numbers.seconds(mask), numbers.kept_bytes(mask), mask))


def _by_cpsat(numbers: Numbers, effort: Effort, cp_model: ModuleType) -> list[int]:
    """Return the fastest mask by CP-SAT for each of several limits, each a share of all bytes."""
    whole = numbers.kept_bytes(numbers.whole)
    masks = [_without_bytes(numbers)]
    count, work = effort.save_options, effort.solve_work
    for share in range(1, count + 1):
        masks += _exact_within(numbers, whole * share // (count + 1), cp_model, work)
    return masks


def _exact_within(
    numbers: Numbers, limit_bytes: int, cp_model: ModuleType, most_work: float
) -> list[int]:
    """Return the fastest mask within ``limit_bytes`` by CP-SAT, as a list.

    The list is empty if CP-SAT finds none within ``most_work``, in its deterministic unit of time.
    A storage exists in the backward if it is kept or computed again. An operation that runs again
    needs all that it reads.
    """
    unit_s = max(numbers.seconds(0) / 1e6, 1e-12)
    model = cp_model.CpModel()
    kept = [model.new_bool_var(f"kept{i}") for i in range(len(numbers.nbytes))]
    runs = [model.new_bool_var(f"runs{i}") for i in range(len(numbers.operations))]
    maker = {
        i: run
        for operation, run in zip(numbers.operations, runs, strict=True)
        for i in _set_bits(operation.makes)
    }
    for i in _set_bits(numbers.required):
        model.add_bool_or(kept[i], maker[i])
    for i in _set_bits(numbers.never):
        model.add(kept[i] == 0)
    for operation, run in zip(numbers.operations, runs, strict=True):
        for i in _set_bits(operation.reads):
            model.add_bool_or(kept[i], maker[i], run.Not())
    model.add(sum(n * k for n, k in zip(numbers.nbytes, kept, strict=True)) <= limit_bytes)
    weights = [round(operation.seconds / unit_s) for operation in numbers.operations]
    model.minimize(sum(w * run for w, run in zip(weights, runs, strict=True)))
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = most_work
    solver.parameters.random_seed = 0
    solver.parameters.num_workers = 1
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return []
    return [sum(1 << i for i, k in enumerate(kept) if solver.value(k))]


def _without_bytes(numbers: Numbers) -> int:
    """Return the mask of storages without bytes."""
    return sum(1 << i for i, nbytes in enumerate(numbers.nbytes) if not nbytes)


def _set_bits(mask: int) -> list[int]:
    return [i for i in range(mask.bit_length()) if mask >> i & 1]


def _prune(numbers: Numbers, masks: Sequence[int], effort: Effort) -> tuple[int, ...]:
    """Return at most ``effort.save_options`` of ``masks``, those that shape the curve most.

    The curve is that of seconds over bytes kept. The mask that adds the least area to it goes
    first.
    """
    points = [
        (numbers.kept_bytes(numbers.whole), numbers.seconds(numbers.whole), -1),
        *((numbers.kept_bytes(m), numbers.seconds(m), m) for m in masks),
    ]
    while len(points) > effort.save_options + 1:
        areas = [
            (before[0] - point[0]) * (after[1] - point[1])
            for before, point, after in zip(points, points[1:], points[2:], strict=False)
        ]
        del points[1 + areas.index(min(areas))]
    return tuple(mask for _, _, mask in points[1:])
