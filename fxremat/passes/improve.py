"""Local search on the exact sweep: keep single storages where that pays.

A solver of chains keeps whole boundaries and, of a saved set, what an option names. It
cannot keep a small tensor from inside a residual block and drop the large stream beside
it, nor know that two stages hold the same storage, and it rounds sizes up. Here single
storages are kept from their first computation on, and recomputations that then are not
needed disappear. Each change is swept operation by operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from fxremat.ir import Forward
from fxremat.passes.block import Mode, is_getitem
from fxremat.passes.candidate import Candidate, Held, Sweeps
from fxremat.passes.storage import is_tensor

MOST_STEPS = 40
"""Changes that a search takes at most."""

MOST_FAILURES = 10
"""Changes in a row that gain nothing before a search gives up."""


@dataclass(frozen=True, slots=True)
class _Change:
    """Keep the results of an operation of ``stage``, at this many seconds less a byte."""

    stage: int
    operation: fx.Node
    storages: frozenset[int]
    worth: float


def improve(start: Candidate, sweeps: Sweeps) -> Iterator[Candidate]:
    """Keep more and more of what is computed again, what gains most a byte first.

    What fits below the present peak goes before what raises it.

    Yields candidates, each faster than the one before.
    """
    best, steps, failures = start, 0, 0
    refused: set[fx.Node] = set()
    while steps < MOST_STEPS and failures < MOST_FAILURES:
        changes = [c for c in _changes(best, sweeps) if c.operation not in refused]
        if not changes:
            return
        change = max(changes, key=lambda c: c.worth)
        refused.add(change.operation)
        held = _with(best.held, change, sweeps)
        tried = sweeps.candidate(best.schedule, best.kept, held)
        if tried.total_s < best.total_s:
            best, steps, failures = tried, steps + 1, 0
            yield best
        else:
            failures += 1


def _with(held: Held, change: _Change, sweeps: Sweeps) -> Held:
    of_node = sweeps.line.joint.storages.of_node
    nodes = frozenset(
        node
        for node in sweeps.line.stages[change.stage].forward
        if is_tensor(node) and change.storages.issuperset(of_node[node])
    )
    return {**held, change.stage: held.get(change.stage, frozenset()) | nodes}


def _changes(candidate: Candidate, sweeps: Sweeps) -> Iterator[_Change]:
    """A change for each operation that is run again."""
    table = sweeps.line.joint.storages
    fixed = table.of((*sweeps.line.joint.given, *sweeps.line.pinned))
    room = _room(candidate)
    for call in candidate.program.calls:
        block = call.block
        again = [n for n in block.nodes if block.mode_of(n) is Mode.AGAIN]
        charges = sweeps.options.parts[block.stage].charges
        values: dict[fx.Node, list[fx.Node]] = {}
        for node in again:
            operation = node.all_input_nodes[0] if is_getitem(node) else node
            values.setdefault(operation, []).append(node)
        for operation, results in values.items():
            storages = table.of(n for n in results if is_tensor(n)) - fixed - block.reads
            gained_s = charges.least_s(operation)
            if storages and gained_s > 0:
                more = max(table.total(storages) - room.get(block.stage, 0), 1)
                yield _Change(block.stage, operation, storages, gained_s / more)


def _room(candidate: Candidate) -> dict[int, int]:
    """For each stage: bytes below the peak at the worst moment until it is first run again."""
    sweep, program = candidate.sweep, candidate.program
    begin: dict[int, int] = {}
    room: dict[int, int] = {}
    for index, call in enumerate(program.calls):
        stage = call.op.stage
        if stage not in begin:
            begin[stage] = index
            continue
        runs_again = isinstance(call.op, Forward) or call.block.again
        if stage in room or not runs_again:
            continue
        most = max(sweep.peaks_bytes[begin[stage] : index], default=0)
        if begin[stage] < program.turn <= index:
            most = max(most, sweep.turn_bytes)
        room[stage] = sweep.peak_bytes - most
    return room
