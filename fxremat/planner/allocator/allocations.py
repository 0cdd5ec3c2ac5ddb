"""Replay what a step requests from the device's allocator.

An evaluation adds up the bytes that a step holds. An allocator that rounds, splits and caches
blocks hands out more than that. How much more is known only after replaying every request of the
emitted graphs in a model of the allocator (``planner.allocator``).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from fxremat import torch_compat
from fxremat.ir import Move, Request
from fxremat.passes.emit.program import Program
from fxremat.planner.allocator.allocator import AllocatorSettings, peaks_of
from fxremat.planner.allocator.blocks import MOST_SMALL_BYTES, SMALL_SEGMENT_BYTES
from fxremat.planner.allocator.footprints import WORKSPACE, Footprints
from fxremat.planner.context.context_bytes import ContextBytes
from fxremat.planner.decision.candidates import Candidate
from fxremat.progress import LOG
from fxremat.units import Counted

STEPS = 2
"""How many steps are replayed in a row. The first starts with an empty cache, the next with the
cache that the first one left. A third step hands out no more for any plan in the tests."""

SPARE_BYTES = SMALL_SEGMENT_BYTES
"""Reserved bytes that are added to what a replay reserves. Small blocks fill their segments
completely, so a few unplanned bytes, such as those of a metric or of the next batch's labels, make
the allocator take another segment."""

HELD_ON = -2
"""The key of what is held from the loss point to the end of the step, without the gradients of the
outputs."""

CLEARED = -3
"""The key of the first tensor that a step clears; further ones have lower keys."""


def settings_of(device: torch.device) -> AllocatorSettings | None:
    """Return the settings of the caching allocator of ``device``; ``None`` if it needs no model.

    An allocator without a model is assumed to hand out exactly what is requested. That holds on a
    CPU, and, with a warning, for CUDA's own allocator (``cudaMallocAsync``) and for plugged-in
    ones.
    """
    if device.type != "cuda":
        return None
    snapshot = torch_compat.allocator_settings()
    if snapshot is None:
        LOG.warning(
            "the allocator of %s is not torch's. It is assumed to round blocks up to 512 bytes, "
            "and to hand out all memory that it reserves",
            device,
        )
        return None
    return AllocatorSettings.read(snapshot)


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests of one training step to the device's allocator: allocations and releases.

    Attributes:
        given_bytes: sizes of the tensors that exist before the step and after it.
        calls: requests of each call of a stage's forward or backward, including the copies from the
            host that precede it.
        loss_point: requests between forward and backward, the last releases of the forward first.
        loss_point_index: index of the first call after the loss point.
        end: requests after the last call.
        unplaced_bytes: bytes that are held in blocks of unknown size. A replay counts them as held
            throughout, even if they are released before the loss.
        cleared: allocations of tensors that exist before the step, and are freed between forward
            and backward: gradients of the previous step.
    """

    given_bytes: tuple[int, ...]
    calls: tuple[tuple[Request, ...], ...]
    loss_point: tuple[Request, ...]
    loss_point_index: int
    end: tuple[Request, ...]
    unplaced_bytes: int
    cleared: tuple[Request, ...] = ()

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests of the step, except for ``given_bytes``, in order of execution.

        What it clears comes first: each step makes it, to be cleared by the next one.
        """
        yield from self.cleared
        for index, requests in enumerate(self.calls):
            if index == self.loss_point_index:
                yield from self.loss_point
                yield from ((key, -nbytes) for key, nbytes in self.cleared)
            yield from requests
        yield from self.end


def requests_of_step(
    program: Program,
    context_bytes: ContextBytes,
    footprints: Footprints,
    moves: Sequence[Move] = (),
    *,
    in_pieces: bool = False,
) -> Requests:
    """Return the allocations and releases of one step that runs ``program``.

    The memory of a loss outside the model is one request after the gradients of the outputs, except
    for its small blocks.

    Args:
        program: the calls of the step.
        context_bytes: memory of the step that these calls do not allocate.
        footprints: what each call allocates and releases.
        moves: storages that are in host memory for part of the step.
        in_pieces: whether to use the measured requests of an operation where there are any.
            Otherwise its workspace is one request right after its results.

    Ensures: at each point the sum of the requests is what an evaluation reports as held.
    """
    calls: list[tuple[Request, ...]] = []
    joint = program.line.joint
    nbytes = joint.storages.nbytes
    released: defaultdict[int, list[Request]] = defaultdict(list)
    fetched: defaultdict[int, list[Request]] = defaultdict(list)
    for move in moves:
        released[move.release].append((move.storage, -move.nbytes))
        fetched[move.prefetch].append((move.storage, move.nbytes))
    for index, call in enumerate(program.calls):
        asked = footprints.requests(call.block, kept=call.kept, in_pieces=in_pieces)
        if index < program.loss_point and index in released:
            asked = (*released[index], *asked)
        if index in fetched:
            asked = (*fetched[index], *asked)
        if call.handed:
            asked = (*asked, *((s, -nbytes[s]) for s in sorted(call.handed)))
        calls.append(asked)
    at_loss_point = released[program.loss_point]
    tangents = [(i, nbytes[i]) for i in sorted(joint.storages.of(joint.tangents))]
    cleared = context_bytes.cleared_each_bytes
    more_bytes = context_bytes.tangent_bytes + sum(cleared) - sum(size for _, size in tangents)
    made = [(key, size) for key, size in (*tangents, (HELD_ON, more_bytes)) if size > 0]
    loss_bytes = context_bytes.loss_point_bytes - sum(size for _, size in made)
    small = sum(size for _, size in made if size <= MOST_SMALL_BYTES)
    small_bytes = min(max(context_bytes.loss_point_small_bytes - small, 0), loss_bytes)
    given = context_bytes.given_each_bytes
    return Requests(
        given_bytes=_without_empty(_without(given, cleared)),
        cleared=tuple((CLEARED - i, size) for i, size in enumerate(cleared) if size),
        calls=tuple(calls),
        loss_point=(*at_loss_point, *made, *_transient(loss_bytes, small_bytes)),
        loss_point_index=program.loss_point,
        end=_transient(context_bytes.end_bytes),
        unplaced_bytes=context_bytes.given_bytes - sum(given),
    )


def _without(sizes: Iterable[int], removed: Iterable[int]) -> Iterator[int]:
    """Yield ``sizes`` without the first ones that are equal to those of ``removed``."""
    left = Counter(removed)
    for nbytes in sizes:
        if left[nbytes]:
            left[nbytes] -= 1
        else:
            yield nbytes


def _without_empty(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(nbytes for nbytes in sizes if nbytes)


def _transient(nbytes: int, small_bytes: int = 0) -> tuple[Request, ...]:
    """Return requests that allocate ``nbytes`` in all, and then free them again.

    ``small_bytes`` of them are allocated in blocks of the small pool, the others in one block.
    """
    pieces = range(0, small_bytes, MOST_SMALL_BYTES)
    small = [min(MOST_SMALL_BYTES, small_bytes - begin) for begin in pieces]
    sizes = _without_empty((max(nbytes - small_bytes, 0), *small))
    asked = [(WORKSPACE, size) for size in sizes]
    return (*asked, *((key, -size) for key, size in reversed(asked)))


@dataclass(frozen=True, slots=True)
class Allocated:
    """Peak memory of a step, as torch's caching allocator counts it.

    Attributes:
        allocated_bytes: peak bytes of the blocks that the allocator has handed out.
        reserved_bytes: peak bytes that the allocator has taken from the device. For a plan, this
            includes ``SPARE_BYTES``.
    """

    allocated_bytes: int
    reserved_bytes: int

    def counted_bytes(self, counted: Counted) -> int:
        """Return ``reserved_bytes`` if ``counted`` is ``"reserved"``, else ``allocated_bytes``."""
        return self.reserved_bytes if counted == "reserved" else self.allocated_bytes


def replay_requests(requests: Requests, settings: AllocatorSettings) -> Allocated:
    """Simulate the allocator for ``STEPS`` steps, from an empty cache, and return the peaks."""
    allocated_bytes, reserved_bytes = peaks_of(settings, requests.given_bytes, (*requests,), STEPS)
    return Allocated(
        allocated_bytes + requests.unplaced_bytes, reserved_bytes + requests.unplaced_bytes
    )


@dataclass(frozen=True, slots=True)
class Allocations:
    """Computes a schedule's peak memory as the device's allocator counts it, with a cache.

    Attributes:
        footprints: what each call of the step allocates and releases.
        context_bytes: memory of the step that no call allocates.
        settings: settings of the device's allocator; ``None`` if it hands out exactly what is
            requested and reserves no more.
        budget_on: which of the two peaks the budget limits.
        replayed: the peaks that were computed, by the candidate's key.
    """

    footprints: Footprints
    context_bytes: ContextBytes
    settings: AllocatorSettings | None = None
    budget_on: Counted = "allocated"
    replayed: dict[Hashable, Allocated] = field(default_factory=dict)

    def of(self, candidate: Candidate, program: Callable[[], Program]) -> Allocated:
        """Return the allocator's peaks for a candidate schedule, at least its ``peak_bytes`` each.

        ``program`` returns the calls of the candidate. It is called only if the allocator must be
        simulated for them.
        """
        if self.settings is None:
            return Allocated(candidate.peak_bytes, candidate.peak_bytes)
        if candidate.key not in self.replayed:
            requests = requests_of_step(
                program(), self.context_bytes, self.footprints, candidate.moves, in_pieces=True
            )
            taken = replay_requests(requests, self.settings)
            # How a workspace is requested in pieces was measured at one size only.
            allocated_bytes = max(taken.allocated_bytes, candidate.peak_bytes)
            reserved_bytes = max(taken.reserved_bytes, allocated_bytes) + SPARE_BYTES
            self.replayed[candidate.key] = Allocated(allocated_bytes, reserved_bytes)
        return self.replayed[candidate.key]


def crowded(
    program: Program,
    context_bytes: ContextBytes,
    footprints: Footprints,
    *,
    limit_bytes: int,
) -> dict[str, int]:
    """Return the sizes of values that are in use while more than ``limit_bytes`` are held.

    A value is in use while an operation reads or allocates it. Other values that are held at that
    time are left out: the operation would hold them as well if it ran in parts.

    Returns:
        By the name of the operation that computes them, the bytes of the largest such value.
    """
    line = program.line
    table = line.joint.storages
    given = table.of((*line.joint.given, *line.joint.tangents))
    requests = requests_of_step(program, context_bytes, footprints)
    largest: dict[str, int] = {}
    held_bytes = context_bytes.given_bytes
    for index, call in enumerate(program.calls):
        if index == requests.loss_point_index:
            held_bytes += sum(nbytes for _, nbytes in requests.loss_point)
            held_bytes -= sum(nbytes for _, nbytes in requests.cleared)
        now_bytes = held_bytes
        for step in footprints.steps(call.block):
            now_bytes += table.total(step.allocates)
            if now_bytes + step.workspace_bytes > limit_bytes and step.node is not None:
                read = table.of((step.node, *call.block.sources(step.node)))
                for storage in {*read, *step.allocates} - given:
                    name, nbytes = table.owner[storage].name, table.nbytes[storage]
                    largest[name] = max(nbytes, largest.get(name, 0))
            now_bytes -= table.total(s for s in step.releases if s not in call.kept)
        held_bytes += sum(nbytes for _, nbytes in requests.calls[index])
    return largest
