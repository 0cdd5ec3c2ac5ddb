"""The join of Beaumont et al. 2019 as a model: unit sizes, unit times, steps that are counted.

A step is a sine: its backward needs its input alone. The loss point multiplies each end with the
next one's value, so that every gradient takes the place of an end. A branch's input is a copy,
so that it takes a slot as in the paper, and making it again takes for ever.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor, fx, nn

from fxremat.costs.measured.cost import Measured, StageSeconds
from fxremat.effort import Effort
from fxremat.ir import Solved
from fxremat.passes.emit.rewrite import BlockModules, rewrite
from fxremat.planner.decision.candidates import Candidate
from fxremat.planner.search.generators import chain_schedules
from fxremat.planner.search.join import equivalent_schedules, join_schedules
from fxremat.planner.search.search import Search
from fxremat.progress import silent
from tests.harness import Captured, bare, capture
from tests.reference.join_units import UnitTable

UNIT = 1 << 12
"""Entries of an activation."""

FOR_EVER_S = 1e6

MOST_CHOICES = 5_000_000_000
"""Looked at to fill a table: no stages of three branches of thirty are merged."""


class UnitJoin(nn.Module):
    def __init__(self, lengths: tuple[int, ...]):
        super().__init__()
        self.lengths = lengths

    def forward(self, *inputs: Tensor) -> Tensor:
        ends = []
        for x, length in zip(inputs, self.lengths, strict=True):
            y = x.clone()
            for _ in range(length):
                y = y.sin()
            ends.append(y)
        others = [*ends[1:], ends[0]]
        parts = [(e * o.detach()).sum() for e, o in zip(ends, others, strict=True)]
        return torch.stack(parts).sum()


def captured_join(lengths: tuple[int, ...]) -> Captured:
    inputs = [torch.rand(UNIT, requires_grad=True) for _ in lengths]
    return capture(UnitJoin(lengths), tuple(inputs))


def unit_search(step: Captured) -> Search:
    """All candidates, a step taking a second and nothing else any time."""
    line = step.measured.line
    stages = []
    for stage in line.stages:
        names = Counter(str(n.target) for n in stage.forward)
        forward_s = float(names["aten.sin.default"]) + FOR_EVER_S * names["aten.clone.default"]
        stages.append(StageSeconds(forward_s, 0.0, 0.0))
    costs = replace(step.measured.costs, stages=tuple(stages))
    measured = Measured.of(line, costs)
    return Search.over(
        measured,
        step.blocks,
        bare(step.joint),
        progress=silent,
        generators=(chain_schedules, equivalent_schedules, join_schedules),
        effort=Effort(join_choices=MOST_CHOICES),
    )


def budget_bytes(search: Search, slots: int) -> int:
    """A slot more, as ``unit_problem`` says, and room for the scalars of the loss point."""
    unit = 4 * UNIT
    return search.costs.fixed_bytes + (slots + 1) * unit + unit // 2


def counted_steps(search: Search, chosen: Candidate) -> Counter[str]:
    """How often the emitted graphs run each operation of the forward, block by block."""
    evaluator = search.evaluator
    peaks_bytes = evaluator.evaluation(chosen).peaks_bytes
    graphs = rewrite(evaluator.program(chosen), peaks_bytes, BlockModules())
    counts: Counter[str] = Counter()
    for graph in graphs:
        for statement in graph.body.statements:
            stage = graph.body.stages.get(str(statement.target))
            if not isinstance(stage, fx.GraphModule):
                continue
            name = re.sub(r"_(forward|backward|rebuild).*", "", str(statement.target))
            for inner in stage.graph.find_nodes(
                op="call_function", target=torch.ops.aten.sin.default
            ):
                counts[name] += bool(inner)
    return counts


def optimal_steps(lengths: tuple[int, ...], slots: int) -> int:
    """Forward steps of the paper's optimum."""
    found = UnitTable.build(lengths, slots).solve()
    assert isinstance(found, Solved)
    return round(found.makespan_s) - sum(lengths) - 1
