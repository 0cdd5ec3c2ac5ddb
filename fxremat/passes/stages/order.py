"""Check in which order stages may run for the first time.

Branches are independent of each other, except for what only a first forward does: it draws random
numbers from a generator that all branches share, and updates the statistics of a BatchNorm that
several branches run.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from fxremat.errors import ScheduleError
from fxremat.ir import Compute, Forward
from fxremat.passes.stages.linearize import Line


def check_draws(line: Line, ops: Sequence[Compute]) -> None:
    """Raise ``ScheduleError`` if a schedule would draw other random numbers than the traced graph.

    Args:
        line: the stages.
        ops: computations of the schedule, in order.

    Raises:
        ScheduleError: two stages that draw run for the first time in the wrong order.
    """
    if not line.segments.ends:
        return
    first_runs = dict.fromkeys(op.stage for op in ops if isinstance(op, Forward))
    for before, after in pairwise(stage for stage in first_runs if stage in line.drawing):
        if before > after:
            raise ScheduleError(
                f"stage {before} draws random numbers before stage {after}, which precedes it in "
                "the traced graph: run stages that draw for the first time in their traced order",
                code="FXR631",
            )


def any_order(line: Line) -> bool:
    """Return whether branches may run for the first time in any order.

    They may not where several draw random numbers, or where one reads a pinned tensor of another.
    """
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
