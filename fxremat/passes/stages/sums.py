"""When the gradients that several branches share are added up.

A parameter that two branches read collects a gradient from each. Which of the two comes last
depends on the schedule, so their sum belongs to no stage: it runs with the backward that
gives the last of what it reads, right after. Its operands and their order stay those of the
joint graph, so the sum has the same bits whatever the schedule.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence

from torch import fx

from fxremat.ir import Backward, Compute
from fxremat.passes.stages.linearize import Line

Sums = frozenset[fx.Node]
"""Sums that a backward runs."""


def home_sums(line: Line, stage: int) -> Sums:
    """Those that the backward of ``stage`` runs where it is the last of what they read."""
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
        if index + 1 < len(own) and own[index + 1].target is operator.getitem:
            continue  # nothing comes between an operation and its values
        for reader in list(waiting):
            if missing.isdisjoint(reader.all_input_nodes):
                result.append(reader)
                missing.remove(reader)
                waiting.remove(reader)
    return tuple(result)
