"""Local search on the exact sweep: use the memory that the solver's model leaves over.

The solver rounds sizes up, charges what it keeps as if nothing else held the same storage,
and knows a few save options a stage. Here storages are kept one by one, wherever the sweep
of the whole program has room between a stage's forward and its backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fxremat.ir import Backward, Forward, Keep
from fxremat.passes.candidate import Candidate, Sweeps
from fxremat.passes.options import Kept, Options

MOST_FAILURES = 6
"""Changes in a row that turn out too large before the search gives up."""


@dataclass(frozen=True, slots=True)
class _Change:
    """Keep ``mask`` of ``stage``: this many seconds less, this many bytes more meanwhile."""

    stage: int
    mask: int
    gained_s: float
    more_bytes: int


def improve(start: Candidate, sweeps: Sweeps, *, ceiling_bytes: int) -> Iterator[Candidate]:
    """Keep more of what is rebuilt, the most time saved first.

    Args:
        start: the candidate to set out from.
        sweeps: makes candidates.
        ceiling_bytes: no exact peak may be above.

    Yields candidates, each faster than the one before.
    """
    best, failures = start, 0
    refused: set[tuple[int, int]] = set()
    while failures < MOST_FAILURES:
        room = _room(best, ceiling_bytes)
        fitting = [
            change
            for change in _changes(best.kept, sweeps.options)
            if change.more_bytes <= room.get(change.stage, -1)
            and (change.stage, change.mask) not in refused
        ]
        if not fitting:
            return
        change = max(fitting, key=lambda c: c.gained_s)
        tried = sweeps.candidate(best.schedule, {**best.kept, change.stage: change.mask})
        if tried.peak_bytes <= ceiling_bytes and tried.total_s < best.total_s:
            best, failures = tried, 0
            refused.clear()
            yield best
        else:
            refused.add((change.stage, change.mask))
            failures += 1


def _changes(kept: Kept, options: Options) -> Iterator[_Change]:
    """Keeping one storage more, or what another option keeps, wherever that is faster."""
    for stage, mask in kept.items():
        parts = options.parts[stage]
        before_s, before_bytes = parts.recompute_s(mask), parts.numbers.kept_bytes(mask)
        singles = {mask | 1 << i for i in range(len(parts.storages))}
        others = {*singles, *options.masks[stage], parts.numbers.required} - {mask}
        for other in sorted(others):
            gained_s = before_s - parts.recompute_s(other)
            if gained_s > 0:
                more = parts.numbers.kept_bytes(other) - before_bytes
                yield _Change(stage, other, gained_s, more)


def _room(candidate: Candidate, ceiling_bytes: int) -> dict[int, int]:
    """For each stage: bytes left at the worst moment between its last ``F_all`` and ``B``."""
    sweep, program = candidate.sweep, candidate.program
    begin: dict[int, int] = {}
    room: dict[int, int] = {}
    for index, call in enumerate(program.calls):
        op = call.op
        if isinstance(op, Forward) and op.keep is Keep.ALL:
            begin[op.stage] = index
        if isinstance(op, Backward) and op.stage in begin:
            first = begin[op.stage]
            most = max(sweep.peaks_bytes[first:index], default=0)
            if first < program.turn:
                most = max(most, sweep.turn_bytes)
            room[op.stage] = ceiling_bytes - most
    return room
