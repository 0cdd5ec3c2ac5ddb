"""What depends on the order in which a schedule runs the stages: sums of gradients, random draws.

Branches are independent of each other, but for two things. A parameter that two branches read
collects a gradient from each. Which of the two comes last depends on the schedule, so their sum
belongs to no stage: it runs with the backward that gives the last of what it reads, right after.
Its operands and their order stay those of the joint graph, so the sum has the same bits whatever
the schedule. And a first forward draws random numbers, from a generator that all branches share,
and moves the statistics of a BatchNorm that several branches run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from torch import fx

from fxremat.errors import ScheduleError
from fxremat.ir import Backward, Compute, Forward
from fxremat.passes.joint.graph import is_getitem
from fxremat.passes.stages.linearize import Line

Sums = frozenset[fx.Node]
"""Sums of gradients that a backward runs."""


def home_sums(line: Line, stage: int) -> Sums:
    """Sums that the backward of ``stage`` runs where stages go back in descending order."""
    return frozenset(n for n in line.sums if line.stage_of[n] == stage)


def sums_at(line: Line, ops: Sequence[Compute]) -> dict[int, Sums]:
    """For each stage the sums that run with its backward in a schedule."""
    if not line.sums:
        return {}
    when = {op.stage: index for index, op in enumerate(ops) if isinstance(op, Backward)}
    found: dict[int, set[fx.Node]] = defaultdict(set)
    for node, stages in line.sums.items():
        found[max(stages, key=lambda stage: when.get(stage, -1))].add(node)
    return {stage: frozenset(found[stage]) for stage in range(len(line.stages))}


def backward_nodes(line: Line, stage: int, sums: Sums) -> tuple[fx.Node, ...]:
    """What the backward of ``stage`` runs, each sum as soon as all that it reads is there."""
    own = [n for n in line.stages[stage].backward if n not in line.sums]
    waiting = sorted(sums, key=lambda n: line.order[n])
    missing = {*own, *waiting}
    result: list[fx.Node] = []
    for index, node in enumerate(own):
        result.append(node)
        missing.remove(node)
        if index + 1 < len(own) and is_getitem(own[index + 1]):
            continue  # nothing comes between an operation and its values
        for reader in list(waiting):
            if missing.isdisjoint(reader.all_input_nodes):
                result.append(reader)
                missing.remove(reader)
                waiting.remove(reader)
    return tuple(result)


def check_draws(line: Line, ops: Sequence[Compute]) -> None:
    """Refuse a schedule that would draw other numbers than the original graph.

    Raises:
        ScheduleError: two stages that draw run for the first time in the wrong order.
    """
    if not line.segments.ends:
        return
    first_runs = dict.fromkeys(op.stage for op in ops if isinstance(op, Forward))
    for before, after in pairwise(stage for stage in first_runs if stage in line.drawing):
        if before > after:
            raise ScheduleError(
                f"stage {before} draws random numbers before stage {after}, which drew first"
            )


def any_order(line: Line) -> bool:
    """Whether branches may run for the first time in any order."""
    segments = line.segments
    if len({segments.at(stage) for stage in line.drawing} - {segments.trunk}) > 1:
        return False
    for index, stage in enumerate(line.stages):
        path = segments.path(segments.at(index))
        for node in stage.pinned:
            users = (line.stage_of[u] for u in node.users if u in line.stage_of)
            if path[0] != segments.trunk and not {segments.at(u) for u in users} <= {*path}:
                return False
    return True
