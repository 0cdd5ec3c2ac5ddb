"""What running a block requests from the device's allocator, in order.

Each operation of a block requests its results and its workspace, and releases what it reads last.
Compiled loops sum that up (``planner.memory``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from fxremat.ir import Request
from fxremat.passes.joint import batchnorm
from fxremat.passes.joint.graph import StorageTable, is_getitem
from fxremat.passes.stages.block import Block, Mode
from fxremat.passes.stages.linearize import Line

WorkspaceBytes = Callable[[fx.Node, Block], int]
"""Returns the peak bytes of an operation beyond its arguments and results."""

Asked = Callable[[fx.Node, Block], tuple[Request, ...]]
"""Returns the requests of an operation, with the places of its results as keys. Without any, the
operation is taken to request its results in their order, and then its workspace."""

WORKSPACE = -1
"""The key of requests that are released by the same operation."""


@dataclass(frozen=True, slots=True)
class OperationRequests:
    """What one operation of a block allocates and releases. Storages are ids in the graph's table.

    Attributes:
        allocates: storages of its results.
        releases: storages that it is the last of the block to use, including inputs of the block.
        workspace_bytes: bytes needed only while it runs.
        node: the operation.
        pieces: its requests in order, if they were measured; if empty, all results come before the
            workspace.
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
    """Return what each operation of ``block`` allocates and releases, in order of execution.

    Args:
        block: the operations of one call of a stage.
        storages: the storages of the graph.
        workspace_bytes: returns the workspace of an operation in bytes.
        asked: returns the measured requests of an operation to the allocator, or none.
    """
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
        # A recomputed operation also returns values that are pinned already. This second copy
        # is freed as soon as the other results are picked out.
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
    """Return the requests ``asked`` with ids of storages as the keys of results.

    A second copy of an existing value gets a separate key, and is released at the end.

    Args:
        asked: measured requests of an operation. A key from 0 on is a place in ``results``; keys of
            workspaces are negative.
        results: the storages of the results.
        new: those of them that do not exist yet.
        storages: sizes of storages.

    Returns:
        The requests; none if those in ``asked`` do not match ``results``.
    """
    if sum(key >= 0 for key, _ in asked) != len(results):
        return ()
    requests: list[Request] = []
    second: list[Request] = []
    for key, nbytes in asked:
        if key < 0:
            requests.append((key, nbytes))
            continue
        storage, unused = results[key], WORKSPACE - len(asked) - key
        is_new = storage in new
        requests.append((storage if is_new else unused, storages.nbytes[storage]))
        if not is_new:
            second.append((unused, -storages.nbytes[storage]))
    return (*requests, *second)


def _made(node: fx.Node, block: Block, storages: StorageTable) -> tuple[int, ...]:
    """Return the storages of the results of ``node`` in ``block``; a rerun BatchNorm has fewer."""
    made = storages.of_node[node]
    if block.mode_of(node) is Mode.AGAIN and batchnorm.updates_statistics(node):
        return made[: batchnorm.NORMALIZED_VALUES]
    return made


def _follows(node: fx.Node, groups: list[fx.Node]) -> bool:
    """Return whether ``node`` picks a result of the last of ``groups``, and so belongs to it."""
    return is_getitem(node) and bool(groups) and node.args[0] is groups[-1]


def requests_of(
    steps: tuple[OperationRequests, ...],
    storages: StorageTable,
    *,
    kept: frozenset[int],
    in_pieces: bool = False,
) -> tuple[Request, ...]:
    """Return the allocator requests of running the operations ``steps`` one after the other.

    Args:
        steps: requests of the operations of a block.
        storages: sizes of storages.
        kept: storages that are held outside of the block, so that the block frees none of them.
        in_pieces: use measured requests where there are any. Otherwise an operation requests all
            its results and then its workspace, which takes at least as many bytes.
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


class Footprints:
    """Allocator requests of blocks of a step, cached: thousands of schedules share their blocks."""

    def __init__(
        self, line: Line, workspace_bytes: WorkspaceBytes, asked: Asked = _as_returned
    ) -> None:
        self._storages = line.joint.storages
        self._workspace_bytes = workspace_bytes
        self._asked = asked
        self._steps: dict[int, tuple[Block, tuple[OperationRequests, ...]]] = {}
        self._requests: dict[tuple[int, frozenset[int], bool], tuple[Request, ...]] = {}

    def requests(
        self, block: Block, *, kept: frozenset[int], in_pieces: bool = False
    ) -> tuple[Request, ...]:
        """Return the allocator requests of running ``block`` if it does not free ``kept``.

        For ``in_pieces`` see :func:`requests_of`.
        """
        key = id(block), kept & block.reads, in_pieces
        if key not in self._requests:
            steps = self.steps(block)
            self._requests[key] = requests_of(
                steps, self._storages, kept=key[1], in_pieces=in_pieces
            )
        return self._requests[key]

    def steps(self, block: Block) -> tuple[OperationRequests, ...]:
        """Return what each operation of ``block`` allocates and releases, in order of execution."""
        if id(block) not in self._steps:  # the entry keeps the block, so its id, alive
            steps = steps_of(block, self._storages, self._workspace_bytes, self._asked)
            self._steps[id(block)] = (block, steps)
        return self._steps[id(block)][1]
