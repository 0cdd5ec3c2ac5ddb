"""Whether the parts of a plan that was read go together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from fxremat.ir import Compute, Copy, Forward, Lane
from fxremat.report.memory import StepMemory
from fxremat.report.plan import Plan


def check_plan(plan: Plan) -> None:
    """Raise ``ValueError`` if parts of a plan are inconsistent, so that it could not be displayed.

    Each index must refer to an existing stage, storage or tensor, and sequences with one item for
    each of the same things must have equal lengths. Whether a step can follow the plan is decided
    when it is compiled.

    Raises:
        ValueError: the parts are inconsistent; the message says where.
    """
    if plan.budget_bytes < 1:
        raise ValueError(f"budget_bytes: {plan.budget_bytes}")
    if not plan.frontier.points:
        raise ValueError("frontier: no points")
    _check_chain(plan)
    _check_schedule(plan)
    _check_moves(plan)
    if plan.memory != StepMemory():
        _check_memory(plan)
    if plan.kept is not None:
        _as_many("kept", plan.kept.peaks_bytes, "its calls", len(plan.kept.seconds))
        _inside("kept.loss_point", [plan.kept.loss_point], len(plan.kept.seconds) + 1)


def _check_chain(plan: Plan) -> None:
    chain, count = plan.chain, len(plan.chain)
    _as_many("chain.boundaries", chain.boundaries, "stages and one", count + 1)
    _as_many("costs.stages", plan.costs.stages, "stages", count)
    _as_many("held_bytes", plan.held_bytes, "stages", count)
    storages = len(chain.storages)
    for boundary in chain.boundaries:
        _inside("chain.boundaries", boundary, storages)
    for stage, costs in zip(chain.stages, plan.costs.stages, strict=True):
        _inside("chain.stages", stage.saved, storages)
        for option in costs.options:
            _inside("costs.stages", option.kept, storages)
    _inside("branch_ends", plan.branch_ends, count + 1)


def _check_schedule(plan: Plan) -> None:
    count = len(plan.chain)
    events = [event.op for event in plan.timeline.events]
    computed = [op for op in (*plan.schedule, *events) if isinstance(op, Compute)]
    _inside("schedule", (op.stage for op in computed), count)
    _inside("timeline", (op.stage for op in events if isinstance(op, Copy)), count)
    for op in computed:
        if isinstance(op, Forward):
            _inside("option", [op.option], len(plan.costs.stages[op.stage].options) + 1)
    forwards = {op.stage for op in plan.schedule if isinstance(op, Forward)}
    if len(forwards) < count:
        raise ValueError(f"schedule: forwards of {len(forwards)} of {count} stages")
    calls = [event.op for event in plan.timeline.events if event.lane is Lane.COMPUTE]
    if not all(isinstance(op, Compute) for op in calls):
        raise ValueError("timeline: calls that compute nothing")


def _check_moves(plan: Plan) -> None:
    copies = [e for e in plan.timeline.events if e.lane is Lane.D2H and isinstance(e.op, Copy)]
    moves = plan.decision.moves
    _as_many("decision.moves", moves, "copies", len(copies))
    if len({move.storage for move in moves}) < len(moves):
        raise ValueError("decision.moves: a storage travels twice")


def _check_memory(plan: Plan) -> None:
    memory, events = plan.memory, plan.timeline.events
    calls = sum(event.lane is Lane.COMPUTE for event in events)
    _as_many("memory.calls", memory.calls, "calls", calls)
    _as_many("memory.modules", memory.modules, "stages", len(plan.chain))
    # An instant begins with a call or an allocation, and ends with a call.
    most = 2 * (calls + len(memory.lives) + 1)
    _inside("memory.end", [memory.end], most)
    _inside("memory.loss_point", [memory.loss_point], memory.end + 1)
    instants = (*memory.calls, memory.end)
    if any(first >= after for first, after in itertools.pairwise(instants)):
        raise ValueError("memory.calls: not in order")
    _inside("memory.calls", memory.calls, memory.end + 1)
    _inside("memory.tensors", (1 + tensor.stage for tensor in memory.tensors), len(plan.chain) + 1)
    _inside("memory.tensors", (1 + t.line for t in memory.tensors), len(memory.lines) + 1)
    if any(seconds < 0 for seconds in memory.again_s):
        raise ValueError("memory.again_s: less than 0 seconds")
    for own in memory.waiting:
        _inside("memory.waiting", [own.tensor, *own.needs], len(memory.tensors))
        _inside("memory.waiting.calls", own.calls, calls)
        _inside("memory.waiting.runs", own.runs or (), len(memory.again_s))
    for life in memory.lives:
        _inside("memory.lives", [life.tensor], len(memory.tensors))
        if not 0 <= life.begin < life.end <= memory.end + 1:
            raise ValueError(f"memory.lives: from {life.begin} to {life.end} of {memory.end}")


def _as_many(place: str, given: Sequence[object], what: str, expected: int) -> None:
    if len(given) != expected:
        raise ValueError(f"{place}: {len(given)}, not {expected} as {what}")


def _inside(place: str, numbers: Iterable[int], end: int) -> None:
    for number in numbers:
        if not 0 <= number < end:
            raise ValueError(f"{place}: {number} is not among {end}")
