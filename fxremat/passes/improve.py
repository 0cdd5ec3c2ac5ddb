"""Local search on the exact sweep: use the memory that the solver's model leaves over.

The solver rounds sizes, charges each boundary as if nothing else held its storages, and
knows a few options a stage. Here storages are kept or dropped one by one, and each change
is swept operation by operation before it is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fxremat.ir import Backward, Forward, Keep
from fxremat.passes.options import Kept, Options
from fxremat.passes.program import Program
from fxremat.passes.sweep import Sweep

MOST_FAILURES = 6
"""Changes in a row that turn out too large before the search gives up."""


@dataclass(frozen=True, slots=True)
class Tried:
    """What comes of keeping some storages."""

    program: Program
    sweep: Sweep
    total_s: float


@dataclass(frozen=True, slots=True)
class _Change:
    """Keep ``mask`` of ``stage``: this many seconds less, this many bytes more meanwhile."""

    stage: int
    mask: int
    gained_s: float
    more_bytes: int


def improve(
    kept: Kept,
    start: Tried,
    options: Options,
    *,
    budget_bytes: int,
    attempt: Callable[[Kept], Tried],
) -> tuple[Kept, Tried]:
    """Keep more of what is rebuilt, as long as the exact peak stays within the budget.

    Args:
        kept: what each stage keeps, of those that do not keep everything.
        start: what comes of it.
        options: of the stages.
        budget_bytes: for the exact peak.
        attempt: builds and sweeps the program that keeps something else.

    Returns the best found and what comes of it, never slower than ``start``.
    """
    best, now = dict(kept), start
    failures = 0
    refused: set[tuple[int, int]] = set()
    while failures < MOST_FAILURES:
        room = _room(now, budget_bytes)
        fitting = [
            change
            for change in _changes(best, options)
            if change.more_bytes <= room[change.stage]
            and (change.stage, change.mask) not in refused
        ]
        if not fitting:
            break
        change = max(fitting, key=lambda c: c.gained_s)
        tried = attempt({**best, change.stage: change.mask})
        if tried.sweep.peak_bytes <= budget_bytes and tried.total_s < now.total_s:
            best[change.stage], now = change.mask, tried
            refused.clear()
            failures = 0
        else:
            refused.add((change.stage, change.mask))
            failures += 1
    return best, now


def _changes(kept: Kept, options: Options) -> Iterator[_Change]:
    """Keeping one storage more, or what another option keeps, wherever that is faster."""
    for stage, mask in kept.items():
        parts = options.parts[stage]
        before_s, before_bytes = parts.recompute_s(mask), parts.numbers.kept_bytes(mask)
        singles = {mask | 1 << i for i in range(len(parts.storages))} - {mask}
        for other in (singles | set(options.masks[stage]) | {parts.numbers.required}) - {mask}:
            gained_s = before_s - parts.recompute_s(other)
            if gained_s > 0:
                more = parts.numbers.kept_bytes(other) - before_bytes
                yield _Change(stage, other, gained_s, more)


def _room(tried: Tried, budget_bytes: int) -> dict[int, int]:
    """For each stage: bytes left at the worst moment between its last ``F_all`` and ``B``."""
    peaks = tried.sweep.peaks_bytes
    turn = tried.program.turn
    begin: dict[int, int] = {}
    room: dict[int, int] = {}
    for index, call in enumerate(tried.program.calls):
        if isinstance(call.op, Forward):
            if call.op.keep is Keep.ALL:
                begin[call.op.stage] = index
        elif isinstance(call.op, Backward) and call.op.stage in begin:
            first = begin[call.op.stage]
            most = max(peaks[first:index], default=0)
            if first < turn:
                most = max(most, tried.sweep.turn_bytes)
            room[call.op.stage] = budget_bytes - most
    return room
