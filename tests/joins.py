"""Random joins for hypothesis, and joins whose optima are known."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from fxremat.ir import (
    Chain,
    Costs,
    Join,
    JoinCosts,
    JoinProblem,
    Problem,
    SaveOption,
    Stage,
    StageCosts,
    Storage,
)
from tests.paper_terms import join_from_sizes
from tests.strategies import SECONDS, SIZES, stage_costs

LENGTHS = st.sampled_from(
    [
        *[(n,) for n in range(1, 7)],
        *[(a, b) for a in range(1, 5) for b in range(1, 5)],
        *[(a, b, c) for a in (1, 2) for b in (1, 2) for c in (1, 2)],
    ]
)
"""Branch lengths that an exhaustive search answers within a second or two."""


@st.composite
def joins(
    draw: st.DrawFn,
    *,
    lengths: st.SearchStrategy[tuple[int, ...]] = LENGTHS,
    most_trunk: int = 3,
    sizes: st.SearchStrategy[int] = SIZES,
) -> Join:
    """Joins whose boundaries share nothing."""

    def some(count: int) -> list[int]:
        return [draw(sizes) for _ in range(count)]

    branches = [some(length + 1) for length in draw(lengths)]
    trunk = some(draw(st.integers(1, most_trunk)))
    return join_from_sizes(
        branches,
        [[n + draw(sizes) for n in branch[1:]] for branch in branches],
        trunk,
        [n + draw(sizes) for n in trunk],
    )


@st.composite
def sharing_joins(draw: st.DrawFn, *, most: int = 3, most_trunk: int = 3) -> Join:
    """Joins whose boundaries share storages, within a branch and across the join."""
    lengths = draw(st.lists(st.integers(1, most), min_size=1, max_size=2))
    trunk_length = draw(st.integers(1, most_trunk))
    storages: list[Storage] = []
    trunk: list[list[int]] = [[] for _ in range(trunk_length + 1)]
    lines = []

    def fill(boundaries: list[list[int]], first: int = 0) -> None:
        for begin in range(first, len(boundaries)):
            for run in draw(st.lists(st.sampled_from([1, 1, 2, 3]), max_size=2)):
                storages.append(Storage(draw(SIZES)))
                for boundary in boundaries[begin : begin + run]:
                    boundary.append(len(storages) - 1)

    def stages(boundaries: list[list[int]]) -> tuple[Stage, ...]:
        out = []
        for i, after in enumerate(boundaries[1:]):
            saved = draw(st.lists(st.sampled_from(after), max_size=1)) if after else []
            storages.append(Storage(draw(SIZES)))
            out.append(Stage("stage", (*saved, len(storages) - 1), i))
        return tuple(out)

    for length in lengths:
        boundaries: list[list[int]] = [[] for _ in range(length + 1)]
        fill([*boundaries, *trunk[1:]])
        trunk[0] += boundaries[-1]
        lines.append((boundaries, stages(boundaries)))
    fill(trunk, first=1)
    lines.append((trunk, stages(trunk)))
    chains = [Chain(tuple(storages), tuple(map(tuple, b)), s) for b, s in lines]
    return Join(tuple(chains[:-1]), chains[-1])


@st.composite
def join_costs(
    draw: st.DrawFn,
    join: Join,
    *,
    sizes: st.SearchStrategy[int] = SIZES,
    seconds: st.SearchStrategy[float] = SECONDS,
) -> JoinCosts:
    """Costs that nothing relates to each other."""
    stage = stage_costs(sizes, seconds)
    lines = [draw(st.tuples(*[stage] * len(line))) for line in join.lines]
    return JoinCosts(
        tuple(lines[:-1]),
        lines[-1],
        fixed_bytes=draw(sizes),
        done_bytes=tuple(draw(sizes) for _ in join.branches),
        trunk_done_bytes=draw(sizes),
    )


@st.composite
def costed_joins(
    draw: st.DrawFn,
    *,
    lengths: st.SearchStrategy[tuple[int, ...]] = LENGTHS,
    most_trunk: int = 3,
) -> tuple[Join, JoinCosts]:
    """Small joins that share nothing, with their costs."""
    join = draw(joins(lengths=lengths, most_trunk=most_trunk))
    return join, draw(join_costs(join))


@st.composite
def joins_with_options(
    draw: st.DrawFn,
    *,
    lengths: st.SearchStrategy[tuple[int, ...]] = LENGTHS,
    most_trunk: int = 2,
) -> tuple[Join, JoinCosts]:
    """The same with up to two save options a stage, which need not be worth having."""
    join, costs = draw(costed_joins(lengths=lengths, most_trunk=most_trunk))
    lines = []
    for line, stages in zip(join.lines, costs.lines, strict=True):
        drawn = (_with_options(draw, line, i, stage) for i, stage in enumerate(stages))
        lines.append(tuple(drawn))
    return join, replace(costs, branches=tuple(lines[:-1]), trunk=lines[-1])


def _with_options(draw: st.DrawFn, line: Chain, i: int, stage: StageCosts) -> StageCosts:
    around = sorted({*line.stages[i].saved, *line.boundaries[i + 1]})
    option = st.builds(
        SaveOption,
        kept=st.lists(st.sampled_from(around), max_size=2).map(tuple),
        recompute_s=SECONDS,
        keep_extra_bytes=SIZES,
        backward_extra_bytes=SIZES,
    )
    return replace(stage, options=tuple(draw(st.lists(option, max_size=2))))


def two_towers() -> JoinProblem:
    """Branches of 2 and 3 stages, all sizes and times unlike; used by tests of the replay."""
    join = join_from_sizes(
        [[1, 2, 3], [10, 20, 30, 40]], [[5, 6], [50, 60, 70]], [100, 0], [500, 0]
    )
    step = StageCosts(1.0, 2.0, 0.5, 0, 0, 0, 0, 0)
    costs = JoinCosts(
        (
            (replace(step, gradient_bytes=1000), replace(step, gradient_bytes=2000)),
            tuple(replace(step, gradient_bytes=n * 10_000) for n in (1, 2, 3)),
        ),
        (replace(step, gradient_bytes=100_000), step),
        fixed_bytes=10_000_000,
        done_bytes=(300, 7000),
        trunk_done_bytes=1_000_000,
    )
    return JoinProblem(join, costs, 1 << 40)


def _step(**sizes: int) -> StageCosts:
    empty = StageCosts(1.0, 1.0, 1.0, 0, 0, 0, 0, 0)
    return replace(empty, **sizes)


def same_branch_first() -> JoinProblem:
    """Branch 1 must go first, forward and back: 2 bytes, 3 for a canonical schedule.

    Its forward needs a byte of workspace, and branch 0 ends in 2 bytes. Its gradient has 2
    bytes, and a byte is needed to rebuild branch 0.
    """
    join = join_from_sizes([[0, 2], [0, 0]], [[2], [0]], [0], [0])
    costs = JoinCosts(
        (
            (_step(rebuild_bytes=1),),
            (_step(gradient_bytes=2, forward_extra_bytes=1, backward_extra_bytes=1),),
        ),
        (_step(),),
    )
    return JoinProblem(join, costs, 2)


def interrupted() -> JoinProblem:
    """Branch 0 stops at its middle while branch 1 has its widest forward.

    Its own first forward needs 5 bytes of workspace and must come first, its end has 3 bytes,
    and keeping all of branch 1's first stage needs 3 more: with 6 bytes one second is saved.
    """
    join = join_from_sizes([[0, 1, 3], [0, 1, 2]], [[1, 3], [1, 2]], [0], [0])
    none = StageCosts(0.0, 0.0, 0.0, 0, 0, 0, 0, 0)
    slow = replace(none, forward_s=1.0, rebuild_s=1.0, keep_extra_bytes=3)
    costs = JoinCosts(((replace(none, forward_extra_bytes=5), none), (slow, none)), (none,))
    return JoinProblem(join, costs, 6)


def ends_dropped() -> JoinProblem:
    """Both branches run twice: their ends have no room beside the trunk's second stage.

    In 4 bytes branch 1 must be swept first: it needs 4 on the way and leaves nothing, while
    branch 0 leaves 3.
    """
    join = join_from_sizes([[0, 3], [0, 0]], [[3], [0]], [0, 0], [0, 0])
    none = StageCosts(1.0, 1.0, 1.0, 0, 0, 0, 0, 0)
    costs = JoinCosts(
        ((none,), (replace(none, forward_extra_bytes=4, keep_extra_bytes=5),)),
        (none, replace(none, forward_extra_bytes=5, keep_extra_bytes=4)),
    )
    return JoinProblem(join, costs, 4)


def join_of(problem: Problem) -> JoinProblem:
    """A chain of at least two stages as a join: all but the last stage are the only branch."""
    chain, costs = problem.chain, problem.costs
    branch = Chain(chain.storages, chain.boundaries[:-1], chain.stages[:-1])
    trunk = Chain(chain.storages, chain.boundaries[-2:], chain.stages[-1:])
    split = JoinCosts((costs.stages[:-1],), costs.stages[-1:], costs.fixed_bytes)
    return JoinProblem(Join((branch,), trunk), split, problem.budget_bytes)


def chain_of(problem: JoinProblem) -> Problem:
    """A join of one branch after which nothing is held as a chain, the inverse of ``join_of``."""
    join, costs = problem.join, problem.costs
    (branch,) = join.branches
    boundaries = (*branch.boundaries, *join.trunk.boundaries[1:])
    chain = Chain(join.storages, boundaries, (*branch.stages, *join.trunk.stages))
    return Problem(chain, Costs(costs.stages, costs.fixed_bytes), problem.budget_bytes)
