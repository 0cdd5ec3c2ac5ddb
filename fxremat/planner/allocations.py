"""What a step asks of the device's allocator, in order, and what it is handed out for that.

Each operation of a block asks for its results and its workspace, and gives back what it reads last.
An evaluation adds up what a step holds. An allocator that rounds, splits and keeps blocks hands out
more: which is found by replaying every request of the emitted graphs in its model
(``planner.allocator``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.ir import Move, Request
from fxremat.passes.emit.program import Program
from fxremat.passes.joint import batchnorm
from fxremat.passes.joint.graph import StorageTable, is_getitem
from fxremat.passes.stages.block import Block, Mode
from fxremat.passes.stages.linearize import Line
from fxremat.planner.allocator import (
    MOST_SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
    CachingAllocator,
)
from fxremat.planner.candidates import Candidate
from fxremat.planner.context_bytes import ContextBytes
from fxremat.progress import LOG
from fxremat.units import Counted

WorkspaceBytes = Callable[[fx.Node, Block], int]
"""Peak bytes of an operation beyond its arguments and results."""

Asked = Callable[[fx.Node, Block], tuple[Request, ...]]
"""What an operation asks for, by the places of its results; none: for these as they are returned,
and then for its workspace."""

WORKSPACE = -1
"""The key of what is asked for and given back at once."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What running a block does to memory.

    Attributes:
        peak_bytes: most bytes at any instant, less those at the start; never negative.
        change_bytes: bytes at the end, less those at the start.
    """

    peak_bytes: int
    change_bytes: int


@dataclass(frozen=True, slots=True)
class OperationRequests:
    """One operation of a block.

    Attributes:
        allocates: storages that its results take.
        releases: storages whose last reader it is, the block's inputs among them.
        workspace_bytes: needed while it runs.
        node: the operation.
        pieces: what it asks for in order; none: all results, and then its workspace.
    """

    allocates: tuple[int, ...]
    releases: tuple[int, ...]
    workspace_bytes: int
    node: fx.Node | None = None
    pieces: tuple[Request, ...] = ()


def _as_returned(_node: fx.Node, _block: Block) -> tuple[Request, ...]:
    return ()


def steps_of(
    block: Block,
    storages: StorageTable,
    workspace_bytes: WorkspaceBytes,
    asked: Asked = _as_returned,
) -> tuple[OperationRequests, ...]:
    """What each operation of ``block`` allocates and releases."""
    incoming = storages.of(block.inputs)
    staying = storages.of(block.outputs)
    last_use: dict[int, int] = {}
    position = -1
    groups: list[fx.Node] = []
    for node in block.nodes:
        if _follows(node, groups):
            continue
        groups.append(node)
        position += 1
        read = storages.of(block.sources(node))
        last_use.update(dict.fromkeys((*read, *_made(node, block, storages)), position))
    present = set(incoming)
    steps = []
    for i, node in enumerate(groups):
        read = storages.of(block.sources(node))
        results = [s for s in _made(node, block, storages) if s not in read]
        new = tuple(s for s in results if s not in present)
        # A recomputed operation also returns values that were pinned the first time:
        # that second copy is gone as soon as the results asked for are picked out.
        second = storages.total(s for s in results if s in present)
        present.update(new)
        releases = tuple(s for s, last in last_use.items() if last == i and s not in staying)
        pieces = _pieces(asked(node, block), results, frozenset(new), storages)
        nbytes = workspace_bytes(node, block) + second
        steps.append(OperationRequests(new, releases, nbytes, node, pieces))
    return tuple(steps)


def _pieces(
    asked: Sequence[Request], results: Sequence[int], new: frozenset[int], storages: StorageTable
) -> tuple[Request, ...]:
    """Requests for the results of an operation and for its workspaces.

    Second copies of values that are there are given back at the end.
    """
    if sum(key >= 0 for key, _ in asked) != len(results):
        return ()
    found: list[Request] = []
    second: list[Request] = []
    for key, nbytes in asked:
        if key < 0:
            found.append((key, nbytes))
            continue
        storage, unused = results[key], WORKSPACE - len(asked) - key
        is_new = storage in new
        found.append((storage if is_new else unused, storages.nbytes[storage]))
        if not is_new:
            second.append((unused, -storages.nbytes[storage]))
    return (*found, *second)


def _made(node: fx.Node, block: Block, storages: StorageTable) -> tuple[int, ...]:
    """Storages of the results of ``node`` as ``block`` runs it."""
    made = storages.of_node[node]
    if block.mode_of(node) is Mode.AGAIN and batchnorm.updates_statistics(node):
        return made[: batchnorm.NORMALIZED_VALUES]
    return made


def _follows(node: fx.Node, groups: list[fx.Node]) -> bool:
    """Whether ``node`` picks a result of the operation just run: both are one step then."""
    return is_getitem(node) and bool(groups) and node.args[0] is groups[-1]


def requests_of(
    steps: tuple[OperationRequests, ...],
    storages: StorageTable,
    *,
    kept: frozenset[int],
    in_pieces: bool = False,
) -> tuple[Request, ...]:
    """What running ``steps`` asks of the allocator, in order.

    Args:
        steps: of a block.
        storages: sizes.
        kept: storages that somebody outside still holds, so the block frees none of them.
        in_pieces: as each operation was seen to ask, if it was; or else, and by default, for all
            of its results, and then for all of its workspace. The sums are no less so.
    """
    asked: list[Request] = []
    for step in steps:
        if in_pieces and step.pieces:
            asked.extend(step.pieces)
        else:
            asked.extend((s, storages.nbytes[s]) for s in step.allocates)
            if step.workspace_bytes > 0:
                asked += [(WORKSPACE, step.workspace_bytes), (WORKSPACE, -step.workspace_bytes)]
        asked.extend((s, -storages.nbytes[s]) for s in step.releases if s not in kept)
    return tuple(request for request in asked if request[1])


def run(requests: tuple[Request, ...]) -> Footprint:
    """What ``requests`` come to, each counted as it is."""
    now = peak = 0
    for _, nbytes in requests:
        now += nbytes
        peak = max(peak, now)
    return Footprint(peak, now)


class Footprints:
    """Footprints of blocks of one line; what each block asks for is found once."""

    def __init__(
        self, line: Line, workspace_bytes: WorkspaceBytes, asked: Asked = _as_returned
    ) -> None:
        self._storages = line.joint.storages
        self._workspace_bytes = workspace_bytes
        self._asked = asked
        self._steps: dict[int, tuple[Block, tuple[OperationRequests, ...]]] = {}

    def of(self, block: Block, *, kept: frozenset[int]) -> Footprint:
        """What ``block`` does to memory while others hold the storages ``kept``."""
        return run(self.requests(block, kept=kept))

    def requests(
        self, block: Block, *, kept: frozenset[int], in_pieces: bool = False
    ) -> tuple[Request, ...]:
        """What ``block`` asks of the allocator while others hold the storages ``kept``."""
        kept = kept & block.reads
        return requests_of(self.steps(block), self._storages, kept=kept, in_pieces=in_pieces)

    def steps(self, block: Block) -> tuple[OperationRequests, ...]:
        """What each operation of ``block`` does."""
        if id(block) not in self._steps:  # the entry keeps the block, so its id, alive
            steps = steps_of(block, self._storages, self._workspace_bytes, self._asked)
            self._steps[id(block)] = (block, steps)
        return self._steps[id(block)][1]


STEPS = 2
"""Steps that are replayed one after the other: the first finds the cache empty, the next one as
the first has left it. A third hands out no more in any plan of the tests' zoo."""

SPARE_BYTES = SMALL_SEGMENT_BYTES
"""Reserved beyond what a replay reserves. Small blocks fill segments to the last hole: a few bytes
that nobody told of, as a metric or the next batch's numbers take, have the allocator take one
more."""

TANGENTS = -2
"""Keys from here on downwards are tangents."""


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
        unplaced_bytes: held throughout, asked for in a way that nobody knows of.
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
    nbytes = program.line.joint.storages.nbytes
    for index, call in enumerate(program.calls):
        released = [(m.storage, -m.nbytes) for m in moves if m.release == index < program.turn]
        fetched = [(m.storage, m.nbytes) for m in moves if m.prefetch == index]
        asked = footprints.requests(call.block, kept=call.kept, in_pieces=in_pieces)
        handed = [(s, -nbytes[s]) for s in sorted(call.handed)]
        calls.append((*released, *fetched, *asked, *handed))
    at_turn = [(m.storage, -m.nbytes) for m in moves if m.release == program.turn]
    each = context_bytes.tangent_each_bytes
    tangents = _whole((*each, max(0, context_bytes.tangent_bytes - sum(each))))
    made = [(TANGENTS - i, nbytes) for i, nbytes in enumerate(tangents)]
    loss_bytes = context_bytes.turn_bytes - sum(tangents)
    small = sum(nbytes for nbytes in tangents if nbytes <= MOST_SMALL_BYTES)
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
        """What the graphs of a candidate take.

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
            self.known[candidate.key] = replace(
                taken, reserved_bytes=taken.reserved_bytes + SPARE_BYTES
            )
        return self.known[candidate.key]
