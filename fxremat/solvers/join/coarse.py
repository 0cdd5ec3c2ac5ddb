"""A join with fewer stages: neighbours merged, so that the table of all heads stays small.

The recurrence of ``general`` takes time with the product of the branches' lengths. Where that
is too much, the neighbours that save least are merged into one stage: what either keeps, the
merged stage keeps. Every schedule of the coarse join is one of the fine join, at the same
time and within the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fxremat.ir import (
    Backward,
    Chain,
    Compute,
    Forward,
    Join,
    JoinCosts,
    Keep,
    Schedule,
    Stage,
    StageCosts,
)


@dataclass(frozen=True, slots=True)
class Coarse:
    """A join of merged stages.

    Attributes:
        join, costs: of the merged stages.
        members: for each of them the stages of the fine join, in order.
    """

    join: Join
    costs: JoinCosts
    members: tuple[tuple[int, ...], ...]

    def refine(self, schedule: Schedule) -> Schedule:
        """A schedule of the coarse join as one of the fine join."""
        return Schedule(tuple(fine for op in schedule.computations for fine in self._parts(op)))

    def _parts(self, op: Compute) -> Sequence[Compute]:
        stages = self.members[op.stage]
        if isinstance(op, Backward):
            return [Backward(stage) for stage in reversed(stages)]
        if op.keep is Keep.ALL:
            return [Forward(stage, Keep.ALL, op.option) for stage in stages]
        return [Forward(stages[0], op.keep), *(Forward(i, Keep.NONE) for i in stages[1:])]


def states_of(lengths: Sequence[int]) -> int:
    """States of the recurrence, for a join of lines of these lengths, the trunk last."""
    *branches, trunk = lengths
    states = trunk << len(branches)
    for length in branches:
        states *= length + 1
    return states


def work_of(lengths: Sequence[int]) -> int:
    """Choices that the recurrence looks at a slot."""
    return states_of(lengths) * sum(lengths)


def coarsen(join: Join, costs: JoinCosts, *, most_work: int) -> Coarse:
    """Merge neighbours, those first that save least, until ``work_of`` is ``most_work``.

    A join that is small enough stays as it is. No line is merged into nothing, so a join of
    many branches may stay above.
    """
    groups = [[[i] for i in range(len(line))] for line in join.lines]
    saved = [[line.nbytes(line.saved_set(i)) for i in range(len(line))] for line in join.lines]
    while work_of([len(parts) for parts in groups]) > most_work:
        pairs = [
            (sum(saved[b][i] for i in (*one, *other)), b, place)
            for b, parts in enumerate(groups)
            for place, (one, other) in enumerate(pairwise(parts))
        ]
        if not pairs:
            break
        _, b, place = min(pairs)
        groups[b][place : place + 2] = [groups[b][place] + groups[b][place + 1]]
    chains = [_merge(line, parts) for line, parts in zip(join.lines, groups, strict=True)]
    merged = [
        tuple(_merged_costs(line, stages, part) for part in parts)
        for line, stages, parts in zip(join.lines, costs.lines, groups, strict=True)
    ]
    firsts = join.first_stages
    return Coarse(
        Join(tuple(chains[:-1]), chains[-1]),
        JoinCosts(
            tuple(merged[:-1]),
            merged[-1],
            costs.fixed_bytes,
            costs.done_bytes,
            costs.trunk_done_bytes,
        ),
        tuple(
            tuple(firsts[b] + i for i in part) for b, parts in enumerate(groups) for part in parts
        ),
    )


def _merge(line: Chain, parts: Sequence[Sequence[int]]) -> Chain:
    stages = []
    for part in parts:
        own = [line.stages[i] for i in part]
        inner = [s for i in part[1:] for s in line.boundaries[i]]
        saved = dict.fromkeys((*(s for stage in own for s in stage.saved), *inner))
        saved = {s: None for s in saved if s not in line.boundaries[part[0]]}
        name = own[0].name if len(own) == 1 else f"{own[0].name}…{own[-1].name}"
        stages.append(Stage(name, tuple(saved), own[0].kind))
    boundaries = [line.boundaries[part[0]] for part in parts]
    return Chain(line.storages, (*boundaries, line.boundaries[-1]), tuple(stages))


def _merged_costs(line: Chain, stages: Sequence[StageCosts], part: Sequence[int]) -> StageCosts:
    """Costs of running ``part``, neighbouring stages, as one."""
    if len(part) == 1:
        return stages[part[0]]
    own = [stages[i] for i in part]
    last, head = own[-1], set(line.boundaries[part[0]])
    held: set[int] = set()
    kept = []  # bytes of the saved sets up to each stage
    for i in part:
        held |= line.saved_set(i)
        kept.append(line.nbytes(held - head))
    passing = [
        line.nbytes({*line.boundaries[i], *line.boundaries[i + 1]} - head)
        + cost.forward_extra_bytes
        for i, cost in zip(part, own, strict=True)
    ]
    keeping = [n + cost.keep_extra_bytes for n, cost in zip(kept, own, strict=True)]
    back = [
        n + cost.gradient_bytes - last.gradient_bytes + cost.backward_extra_bytes
        for n, cost in zip(kept, own, strict=True)
    ]
    end_bytes = line.nbytes(set(line.boundaries[part[-1] + 1]) - head)
    return StageCosts(
        forward_s=sum(cost.forward_s for cost in own),
        backward_s=sum(cost.backward_s for cost in own),
        rebuild_s=sum(cost.forward_s for cost in own[:-1]) + last.rebuild_s,
        gradient_bytes=last.gradient_bytes,
        forward_extra_bytes=max(0, max(passing) - end_bytes),
        keep_extra_bytes=max(0, max(keeping) - kept[-1]),
        backward_extra_bytes=max(0, max(back) - kept[-1]),
        rebuild_bytes=max(kept[-2] + last.rebuild_bytes, *keeping[:-1], *back[:-1]),
    )
