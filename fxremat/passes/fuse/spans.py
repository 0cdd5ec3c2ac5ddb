"""Within which operations may run as one: runs of stages.

Cuts between stages are many, where operations are taken apart. Where several have no operation
between them that runs alone, all but the one that the fewest bytes cross are left out: they would
cut what one kernel could compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from fxremat.passes.fuse.kinds import Kind
from fxremat.passes.joint import rng
from fxremat.passes.stages.linearize import Line


@dataclass(frozen=True, slots=True)
class Span:
    """Stages that follow each other.

    Attributes:
        forward, backward: their operations, in the order of the graph.
        leaving: tensors that cross the cut after them.
    """

    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    leaving: tuple[fx.Node, ...]


def spans_of(line: Line, kinds: Mapping[fx.Node, Kind]) -> list[Span]:
    """All of a line."""
    cuts = _cuts(line, kinds)
    order = line.order.__getitem__
    spans, first = [], 0
    for end in (*cuts, len(line.stages)):
        stages = line.stages[first:end]
        sums = line.sums  # they run with whichever stage is the last
        spans.append(
            Span(
                tuple(sorted((n for s in stages for n in s.forward), key=order)),
                tuple(sorted((n for s in stages for n in s.backward if n not in sums), key=order)),
                line.stages[end].boundary if end < len(line.stages) else (),
            )
        )
        first = end
    return spans


NEAR, MUCH = 4, 1.5
"""A cut is left out where another one, so many operations that run alone away or fewer, is
crossed by so many times fewer bytes."""


def _cuts(line: Line, kinds: Mapping[fx.Node, Kind]) -> list[int]:
    """Stages before which a span begins."""
    table = line.joint.storages
    fixed = {*line.segments.ends, len(line.stages) - 1 if line.ends_at_turn else 0}
    best: dict[int, tuple[int, int]] = {}
    alone = 0
    for index in range(1, len(line.stages)):
        before = line.stages[index - 1].forward
        alone += sum(kinds[n] is Kind.ALONE and not rng.is_state(n) for n in before)
        crossing = table.total(table.of(line.stages[index].boundary))
        if alone not in best or crossing <= best[alone][0]:
            best[alone] = crossing, index

    def stays(run: int) -> bool:
        near = (best[i][0] for i in range(run - NEAR, run + NEAR + 1) if i in best)
        return best[run][0] <= MUCH * min(near)

    return sorted({best[run][1] for run in best if stays(run)} | fixed - {0})
