"""What is planned for groups of stages holds for the stages."""

from __future__ import annotations

import random

import pytest

from benchmarks.papers.coarse import coarsen, refined
from benchmarks.papers.networks import network
from fxremat.ir import Chain, Costs, Problem, Solved, Stage, StageCosts, Storage
from fxremat.solvers import rotor, store_all
from tests.reference.simulate import simulate


def residual(seed: int, blocks: int) -> tuple[Chain, Costs]:
    """Blocks of three stages beside which the block's input goes on."""
    rng = random.Random(seed)
    storages, boundaries, stages, costs = [Storage(rng.randint(1, 9))], [(0,)], [], []
    for _ in range(blocks):
        (carried,) = boundaries[-1]
        for inner in range(3):
            storages += [Storage(rng.randint(1, 9)), Storage(rng.randint(0, 9))]
            out = len(storages) - 2
            boundaries.append((out,) if inner == 2 else (carried, out))
            saved = tuple(s for s in (out, out + 1) if rng.random() < 0.7)
            stages.append(Stage(f"stage{len(stages)}", saved, len(stages)))
            sizes = [rng.randint(0, 9) for _ in range(5)]
            times = [rng.uniform(1, 9) for _ in range(2)]
            costs.append(StageCosts(*times, times[0] * rng.random(), *sizes))
    chain = Chain(tuple(storages), tuple(boundaries), tuple(stages))
    enough = [
        StageCosts(
            c.forward_s,
            c.backward_s,
            c.rebuild_s,
            c.gradient_bytes,
            c.forward_extra_bytes,
            c.keep_extra_bytes,
            c.backward_extra_bytes,
            chain.nbytes(chain.saved_set(i)) + c.rebuild_bytes,
        )
        for i, c in enumerate(costs)
    ]
    return chain, Costs(tuple(enough), rng.randint(0, 9))


@pytest.mark.parametrize("seed", range(60))
def test_no_more_memory_and_as_long(seed: int) -> None:
    blocks = 2 + seed % 5
    chain, costs = residual(seed, blocks)
    merged, merged_costs, cuts = coarsen(chain, costs, stages=1 + blocks * (1 + seed % 2))
    kept = store_all.solve(Problem(merged, merged_costs, 1 << 40))
    assert isinstance(kept, Solved)
    most = simulate(merged, merged_costs, kept.schedule).peak_bytes
    solved = 0
    for budget_bytes in range(most // 4, most + 1, max(1, most // 12)):
        found = rotor.solve(Problem(merged, merged_costs, budget_bytes), slots=1 << 12)
        if not isinstance(found, Solved):
            continue
        solved += 1
        planned = simulate(merged, merged_costs, found.schedule)
        done = simulate(chain, costs, refined(found.schedule.computations, cuts))
        assert done.peak_bytes <= planned.peak_bytes <= budget_bytes
        assert done.makespan_s == pytest.approx(planned.makespan_s, rel=1e-12)
    assert solved


@pytest.mark.parametrize("seed", range(20))
def test_boundaries_of_groups_share_nothing(seed: int) -> None:
    chain, costs = residual(seed, 6)
    merged, _, cuts = coarsen(chain, costs, stages=8)
    assert len(merged) == len(cuts) - 1 <= 8
    storages = [s for boundary in merged.boundaries for s in boundary]
    assert len(storages) == len(set(storages))


def test_a_stage_alone_is_as_it_was() -> None:
    of = network("resnet50")
    merged, costs, cuts = coarsen(of.chain, of.costs, stages=len(of.chain))
    alone = [g for g in range(len(merged)) if cuts[g + 1] - cuts[g] == 1]
    assert len(alone) > len(of.chain) // 2
    for group in alone:
        assert costs.stages[group] == of.costs.stages[cuts[group]]
        assert merged.saved_set(group) == of.chain.saved_set(cuts[group])


def test_no_such_groups() -> None:
    """One storage crosses every cut: all stages could only be one group."""
    chain = Chain(
        (Storage(4), Storage(2)), ((0,), (0, 1), (0,)), (Stage("a", (), 0), Stage("b", (), 1))
    )
    stage = StageCosts(1.0, 1.0, 1.0, 0, 0, 0, 0, 9)
    with pytest.raises(ValueError, match="share no storage"):
        coarsen(chain, Costs((stage, stage)), stages=2)
