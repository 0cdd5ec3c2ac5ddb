"""Local search on the exact sweep: keep single storages where that pays.

A solver of chains keeps whole boundaries and, of a saved set, what an option names. It
cannot keep a small tensor from inside a residual block and drop the large stream beside
it, nor know that two stages hold the same storage, and it rounds sizes up. Here single
storages are kept from their first computation on; recomputations that then are not needed
disappear, and with them what was kept for those alone. Each change is swept operation by
operation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from fxremat.ir import Forward
from fxremat.passes.joint.storage import is_tensor
from fxremat.planner.candidate import Candidate, Sweeps
from fxremat.planner.decision import Held
from fxremat.planner.effects import Effect, Operations, effects_of

MOST_STEPS = 150
"""Times that a search takes something on at most."""

MOST_FAILURES = 10
"""Changes in a row that gain nothing before a search gives up."""

STEP_SHARE = 1 / 128
"""Of the start's peak: what a step may take on together if the first is not larger."""

ALIKE = 0.8
"""Changes are taken together that gain this part a byte of what the best one does."""


def improve(start: Candidate, sweeps: Sweeps, operations: Operations) -> Iterator[Candidate]:
    """Keep more and more of what is computed again, what gains most a byte first.

    What fits below the present peak goes before what raises it. Layers that are alike
    have changes that are alike: a few are taken at once.

    Args:
        start: where the search begins.
        sweeps: made it, and makes others.
        operations: of the same line.

    Yields candidates, each faster than the one before.
    """
    best, steps, failures = start, 0, 0
    refused: set[tuple[int, frozenset[int]]] = set()
    step_bytes = int(start.peak_bytes * STEP_SHARE)
    changes = _changes(best, sweeps, operations, refused)
    while changes and steps < MOST_STEPS and failures < MOST_FAILURES:
        for taken in _together(changes, step_bytes):
            tried = sweeps.candidate(best.schedule, best.kept, held_with(best.held, taken, sweeps))
            if tried.total_s < best.total_s:
                best, steps, failures = tried, steps + 1, 0
                changes = _changes(best, sweeps, operations, refused)
                yield best
                break
        else:
            refused.add(changes.pop(0)[1].key)
            failures += 1


def _together(changes: list[tuple[float, Effect]], step_bytes: int) -> Iterator[list[Effect]]:
    """The best few that are alike, and the best one alone."""
    (most, first), *others = changes
    taken = [first]
    left_bytes = step_bytes - first.nbytes
    for worth, effect in others:
        if worth < ALIKE * most or effect.nbytes > left_bytes:
            break
        taken.append(effect)
        left_bytes -= effect.nbytes
    if len(taken) > 1:
        yield taken
    yield [first]


def _changes(
    candidate: Candidate,
    sweeps: Sweeps,
    operations: Operations,
    refused: Collection[tuple[int, frozenset[int]]],
) -> list[tuple[float, Effect]]:
    """What could be held, with its seconds less a byte more, the best first."""
    room = _room(candidate)

    def worth(effect: Effect) -> float:
        more_bytes = effect.nbytes - effect.freed_bytes - room.get(effect.stage, 0)
        return effect.gained_s / max(more_bytes, 1)

    found = [
        (worth(e), e) for e in effects_of(candidate, sweeps, operations) if e.key not in refused
    ]
    return sorted(found, key=lambda change: -change[0])


def held_with(held: Held, changes: Sequence[Effect], sweeps: Sweeps) -> Held:
    """``held``, and the results of the operations of ``changes``."""
    of_node = sweeps.line.joint.storages.of_node
    changed = dict(held)
    for change in changes:
        nodes = frozenset(
            node
            for node in sweeps.line.stages[change.stage].forward
            if is_tensor(node) and change.storages.issuperset(of_node[node])
        )
        changed[change.stage] = changed.get(change.stage, frozenset()) | nodes
    return changed


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
