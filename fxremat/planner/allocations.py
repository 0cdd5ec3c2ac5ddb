"""What a step asks of the device's allocator, in order, and what it is handed out for that.

An evaluation adds up what a step holds. An allocator that rounds, splits and keeps blocks hands out
more: which is found by replaying every request of the emitted graphs in its model
(``planner.allocator``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from fxremat import torch_compat
from fxremat.ir import Move, Request
from fxremat.passes.emit.program import Program
from fxremat.planner.allocator import (
    MOST_SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
    CachingAllocator,
)
from fxremat.planner.candidates import Candidate
from fxremat.planner.context_bytes import ContextBytes
from fxremat.planner.footprints import WORKSPACE, Footprints
from fxremat.progress import LOG
from fxremat.units import Counted

STEPS = 2
"""Steps that are replayed one after the other: the first finds the cache empty, the next one as
the first has left it. A third hands out no more in any plan of the tests' zoo."""

SPARE_BYTES = SMALL_SEGMENT_BYTES
"""Reserved beyond what a replay reserves. Small blocks fill segments to the last hole: a few bytes
that nobody told of, as a metric or the next batch's numbers take, have the allocator take one
more."""

HELD_ON = -2
"""The key of what is held from the loss point to the end, beside the gradients of the outputs."""


def settings_of(device: torch.device) -> AllocatorSettings | None:
    """The rules of a device's allocator; ``None``: it hands out what is asked for.

    That is so on a CPU. It is assumed, and said, of CUDA's own allocator (``cudaMallocAsync``)
    and of one that was plugged in.
    """
    if device.type != "cuda":
        return None
    snapshot = torch_compat.allocator_settings()
    if snapshot is None:
        LOG.warning(
            "the allocator of %s is not torch's: its blocks are assumed to be as large as asked "
            "for, rounded up to 512 bytes, and all that it reserves to be handed out",
            device,
        )
        return None
    return AllocatorSettings.read(snapshot)


@dataclass(frozen=True, slots=True)
class Requests:
    """What a step asks for, and gives back.

    Attributes:
        given_bytes: what is there before, each by itself.
        calls: during each call, the copies back that are made before it among them.
        turn: at the turn, what the forward still gives back before it first.
        turn_index: of the first call after the turn.
        end: after the last call.
        unplaced_bytes: held throughout, in blocks whose sizes are unknown, or released before the
            loss: a replay takes that for held.
    """

    given_bytes: tuple[int, ...]
    calls: tuple[tuple[Request, ...], ...]
    turn: tuple[Request, ...]
    turn_index: int
    end: tuple[Request, ...]
    unplaced_bytes: int

    def __iter__(self) -> Iterator[Request]:
        """Each request of the step, in order."""
        for index, requests in enumerate(self.calls):
            if index == self.turn_index:
                yield from self.turn
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
    """What the graphs of ``program`` ask for.

    A workspace is one request right after the results of its operation, unless all is asked for
    ``in_pieces``. So is what a loss outside the model takes, after the tangents, but for its
    small blocks.

    Ensures: the sums of the requests so far are what an evaluation says is held.
    """
    calls = []
    joint = program.line.joint
    nbytes = joint.storages.nbytes
    for index, call in enumerate(program.calls):
        released = [(m.storage, -m.nbytes) for m in moves if m.release == index < program.turn]
        fetched = [(m.storage, m.nbytes) for m in moves if m.prefetch == index]
        asked = footprints.requests(call.block, kept=call.kept, in_pieces=in_pieces)
        handed = [(s, -nbytes[s]) for s in sorted(call.handed)]
        calls.append((*released, *fetched, *asked, *handed))
    at_turn = [(m.storage, -m.nbytes) for m in moves if m.release == program.turn]
    tangents = [(i, nbytes[i]) for i in sorted(joint.storages.of(joint.tangents))]
    more_bytes = context_bytes.tangent_bytes - sum(size for _, size in tangents)
    made = [(key, size) for key, size in (*tangents, (HELD_ON, more_bytes)) if size > 0]
    loss_bytes = context_bytes.turn_bytes - sum(size for _, size in made)
    small = sum(size for _, size in made if size <= MOST_SMALL_BYTES)
    small_bytes = min(max(context_bytes.turn_small_bytes - small, 0), loss_bytes)
    given = context_bytes.given_each_bytes
    return Requests(
        given_bytes=_whole(given),
        calls=tuple(calls),
        turn=(*at_turn, *made, *_at_once(loss_bytes, small_bytes)),
        turn_index=program.turn,
        end=_at_once(context_bytes.end_bytes),
        unplaced_bytes=context_bytes.given_bytes - sum(given),
    )


def _whole(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(nbytes for nbytes in sizes if nbytes)


def _at_once(nbytes: int, small_bytes: int = 0) -> tuple[Request, ...]:
    """Asked for together, and given back: ``small_bytes`` of it in the small pool."""
    pieces = range(0, small_bytes, MOST_SMALL_BYTES)
    small = [min(MOST_SMALL_BYTES, small_bytes - begin) for begin in pieces]
    sizes = _whole((max(nbytes - small_bytes, 0), *small))
    asked = [(WORKSPACE, size) for size in sizes]
    return (*asked, *((key, -size) for key, size in reversed(asked)))


@dataclass(frozen=True, slots=True)
class Allocated:
    """What a step takes at most.

    Attributes:
        allocated_bytes: in blocks that the allocator has handed out.
        reserved_bytes: that the allocator has taken from the device, and for a plan what is left
            to it beside.
    """

    allocated_bytes: int
    reserved_bytes: int

    def counted_bytes(self, counted: Counted) -> int:
        """One of the two."""
        return self.reserved_bytes if counted == "reserved" else self.allocated_bytes


def replay_requests(requests: Requests, settings: AllocatorSettings) -> Allocated:
    """Replay a few steps, beginning with an empty cache."""
    allocator = CachingAllocator(settings)
    for nbytes in requests.given_bytes:
        allocator.allocate(nbytes)
    for _ in range(STEPS):
        held: dict[int, list[int]] = {}
        for key, nbytes in requests:
            if nbytes > 0:
                held.setdefault(key, []).append(allocator.allocate(nbytes))
            else:
                allocator.free(held[key].pop())
        for handles in held.values():  # results of the step
            for handle in handles:
                allocator.free(handle)
    return Allocated(
        allocator.peak_allocated_bytes + requests.unplaced_bytes,
        allocator.peak_reserved_bytes + requests.unplaced_bytes,
    )


@dataclass(frozen=True, slots=True)
class Allocations:
    """What programs of one line take; remembers each that was asked for.

    Attributes:
        footprints: of the line.
        context_bytes: of the step.
        settings: the rules of the device's allocator; ``None``: it hands out what is asked
            for, and takes no more from the device.
        budget_on: what the budget is for.
    """

    footprints: Footprints
    context_bytes: ContextBytes
    settings: AllocatorSettings | None = None
    budget_on: Counted = "allocated"
    known: dict[Hashable, Allocated] = field(default_factory=dict)

    def of(self, candidate: Candidate, program: Callable[[], Program]) -> Allocated:
        """What the graphs of a candidate take: never less than the sum that is its peak.

        Args:
            candidate: what was decided.
            program: makes the calls, if these have to be looked at.
        """
        if self.settings is None:
            return Allocated(candidate.peak_bytes, candidate.peak_bytes)
        if candidate.key not in self.known:
            requests = requests_of_step(
                program(), self.context_bytes, self.footprints, candidate.moves, in_pieces=True
            )
            taken = replay_requests(requests, self.settings)
            # Pieces of workspace that were seen at one size are not known at others.
            allocated_bytes = max(taken.allocated_bytes, candidate.peak_bytes)
            reserved_bytes = max(taken.reserved_bytes, allocated_bytes) + SPARE_BYTES
            self.known[candidate.key] = Allocated(allocated_bytes, reserved_bytes)
        return self.known[candidate.key]
