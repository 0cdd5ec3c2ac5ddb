"""A join converted to a chain by distance from the trunk, for comparison.

Beaumont, Herrmann, Pallez, Shilova, "Optimal memory-aware backpropagation of deep join networks"
(2019), section 4, *EQUIV-CHAIN*: stages of all branches at equal distances from the trunk form one
stage of a chain. An algorithm for chains then solves that: revolve in the paper (see
``tests.reference.join_units``), ``rotor`` here. Branches may have any lengths: a shorter one holds
its input until its stages come.

The members of a level run one after the other. Its peaks are bounded by the sum of what all members
read and write, so the schedule fits, but is not always the best of its kind.
"""

from __future__ import annotations

from fxremat.ir import (
    Backward,
    Chain,
    Compute,
    Costs,
    Forward,
    Infeasible,
    JoinProblem,
    Keep,
    Problem,
    Schedule,
    Solved,
    Stage,
    StageCosts,
)
from fxremat.solvers import rotor
from fxremat.solvers.quantize import whole_count
from fxremat.solvers.sequences import seconds_of


def solve(problem: Problem | JoinProblem, *, slots: int = 200) -> Solved | Infeasible:
    """Find the fastest memory-persistent schedule of the equivalent chain, for the join.

    That chain has one stage for all of a join's stages at the same distance from the trunk.
    ``rotor`` defines memory-persistent.

    That chain has one stage for all of a join's stages at the same distance from the trunk.

    Args:
        problem: the join. A chain is its own equivalent.
        slots: see ``rotor.solve``.

    Returns:
        ``Solved``, with the time that the schedule takes on the join, or ``Infeasible`` with the
        least budget at which this method has a schedule.

    Raises:
        ArgumentError: ``slots`` is not a whole number of at least 1. This is checked first.
        ValueError: the sizes are too large to add up.
    """
    slots = whole_count(slots, name="slots")
    line = problem if isinstance(problem, Problem) else equivalent_chain(problem)
    solution = rotor.solve(line, slots=slots)
    assert isinstance(solution, Solved | Infeasible)
    if isinstance(problem, Problem) or isinstance(solution, Infeasible):
        return solution
    schedule = as_join_schedule(problem, solution.schedule)
    ops = schedule.computations
    return Solved(schedule, seconds_of(problem.costs.stages, ops))


def equivalent_chain(problem: JoinProblem) -> Problem:
    """Return the problem of a chain that has one stage for each distance from the trunk.

    That stage stands for those of all branches at that distance; the trunk's stages follow. A
    schedule of it needs at least as much memory as the corresponding schedule of the join.
    """
    join, costs = problem.join, problem.costs
    depth = max(map(len, join.branches))
    members = [_members(problem, i) for i in range(depth)]
    boundaries = []
    for i in range(depth):
        places = [max(0, i - (depth - len(chain))) for chain in join.branches]
        ids = (s for c, p in zip(join.branches, places, strict=True) for s in c.boundaries[p])
        boundaries.append(tuple(ids))
    stages = []
    for i, level in enumerate(members):
        parts = [join.branches[b].stages[p] for b, p in level]
        saved = tuple(s for part in parts for s in part.saved)
        stages.append(Stage("+".join(part.name for part in parts), saved, i))
    trunk = [Stage(stage.name, stage.saved, depth + i) for i, stage in enumerate(join.trunk.stages)]
    chain = Chain(join.storages, (*boundaries, *join.trunk.boundaries), (*stages, *trunk))
    levels = tuple(_level_costs(problem, level) for level in members)
    return Problem(chain, Costs((*levels, *costs.trunk), costs.fixed_bytes), problem.budget_bytes)


def _members(problem: JoinProblem, level: int) -> list[tuple[int, int]]:
    """Return branch and place in it of each stage that stage ``level`` of the chain stands for."""
    branches = problem.join.branches
    depth = max(map(len, branches))
    places = ((b, level - (depth - len(chain))) for b, chain in enumerate(branches))
    return [(b, place) for b, place in places if place >= 0]


def _level_costs(problem: JoinProblem, members: list[tuple[int, int]]) -> StageCosts:
    """Return the costs of the chain's stage that runs ``members`` one after the other.

    Args:
        members: branch and place of each, as ``_members`` returns them.
    """
    costs = problem.costs
    parts = [costs.branches[b][p] for b, p in members]
    waiting = set(range(len(costs.branches))) - {b for b, _ in members}
    held = sum(part.gradient_bytes for part in parts) + costs.trunk_done_bytes
    held += sum(costs.left_bytes[b] for b in waiting)
    backward, rebuild = 0, 0  # peaks
    saved, grown = 0, 0  # bytes that earlier members have freed, and growth of their gradients
    for (b, p), part in zip(members, parts, strict=True):
        backward = max(backward, part.backward_extra_bytes + grown - saved)
        rebuild = max(rebuild, part.rebuild_bytes + grown)
        chain = problem.join.branches[b]
        saved += chain.nbytes(chain.saved_set(p))
        grown += costs.branches[b][p - 1].gradient_bytes if p else costs.left_bytes[b]
        grown -= part.gradient_bytes
    return StageCosts(
        forward_s=sum(part.forward_s for part in parts),
        backward_s=sum(part.backward_s for part in parts),
        rebuild_s=sum(part.rebuild_s for part in parts),
        gradient_bytes=held,
        forward_extra_bytes=max(part.forward_extra_bytes for part in parts),
        keep_extra_bytes=max(part.keep_extra_bytes for part in parts),
        backward_extra_bytes=backward,
        rebuild_bytes=rebuild,
    )


def as_join_schedule(problem: JoinProblem, schedule: Schedule) -> Schedule:
    """Return the schedule of the join that corresponds to one of its equivalent chain.

    Each operation is replaced by those of the stages that the chain's stage stands for. Where
    ``F_all`` is followed by its backward, each stage runs both before the next stage does.
    """
    join, line = problem.join, schedule.computations
    depth = max(map(len, join.branches))
    first = join.first_stages
    ops: list[Compute] = []
    for index, op in enumerate(line):
        if op.stage >= depth:
            stage = first[-2] + op.stage - depth
            ops.append(
                Forward(stage, op.keep, op.option) if isinstance(op, Forward) else Backward(stage)
            )
            continue
        stages = [(first[b] + p, p) for b, p in _members(problem, op.stage)]
        if isinstance(op, Backward):
            rebuilt = line[index - 1] == Forward(op.stage, Keep.ALL)
            ops += [] if rebuilt else [Backward(stage) for stage, _ in stages]
            continue
        pair = index + 1 < len(line) and line[index + 1] == Backward(op.stage)
        for stage, place in stages:
            # The chain holds all inputs in its boundary 0. In the join each branch holds its input.
            keep = Keep.INPUT if place == 0 and op.keep is Keep.NONE else op.keep
            ops.append(Forward(stage, keep))
            ops += [Backward(stage)] if pair else []
    return Schedule(tuple(ops))
