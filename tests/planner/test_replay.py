"""Evaluations: those of the graphs that would be emitted, and what the allocator reports."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

from fxremat.costs.measured.cost import Measured
from fxremat.effort import DEFAULT_GENERATORS
from fxremat.ir import Forward, Keep, Schedule
from fxremat.ir.schedule import Codes, coded, decoded
from fxremat.passes.emit.program import Program, keep_all
from fxremat.passes.joint.batchnorm import is_inverse
from fxremat.passes.joint.build import build_joint_graph
from fxremat.passes.joint.graph import is_tensor
from fxremat.planner.context.context_bytes import ContextBytes
from fxremat.planner.context.handed import handed_over
from fxremat.planner.decision.candidates import Evaluation
from fxremat.planner.replay.extract import make_room
from fxremat.planner.replay.places import TABLE
from fxremat.planner.search.evaluator import Evaluator
from fxremat.planner.search.search import generators_of
from tests.harness import (
    Captured,
    Held,
    capture,
    captured,
    held_bits,
    measured_peak_bytes,
    periodic,
    random_schedule,
    search_of,
)
from tests.models import ZOO
from tests.passes.test_invert import X, network
from tests.planner.test_join import random_join_schedule
from tests.reference.plain_sweep import seconds, sweep
from tests.reference.program import build_program

evaluator_of = functools.cache(lambda name: captured(name).evaluator(around(captured(name))))


def around(step: Captured) -> ContextBytes:
    """Something of everything."""
    found = step.context_bytes
    return replace(found, loss_point_bytes=found.loss_point_bytes + 100_000, end_bytes=54_321)


@pytest.mark.parametrize("name", ZOO)
def test_predicted_peak_is_the_measured_one(name: str):
    step = captured(name)
    evaluator, count = step.evaluator(), len(step.line.stages)
    for schedule in (keep_all(count), periodic(count, 3), random_schedule(count, 10)):
        candidate = evaluator.candidate(coded(schedule))
        assert measured_peak_bytes(step, step.program(schedule)) == candidate.peak_bytes, schedule


def check(step: Captured, evaluator: Evaluator, codes: Codes, held: Held) -> None:
    """An evaluation says what a sweep of the program finds."""
    candidate = evaluator.candidate(codes, held_bits(evaluator, held))
    found, program = evaluator.evaluation(candidate), evaluator.program(candidate)
    handed = handed_over(step.line, evaluator.context_bytes)
    decision = evaluator.decision(candidate)
    assert program == build_program(step.line, decoded(codes), decision, handed)
    swept = sweep(program, step.footprints, evaluator.context_bytes)
    assert found.ops == tuple(call.op for call in program.calls)
    assert found.loss_point == program.loss_point
    assert found.peaks_bytes == swept.peaks_bytes
    assert found.held_bytes == swept.held_bytes
    assert (found.loss_point_bytes, found.end_bytes) == (swept.loss_point_bytes, swept.end_bytes)
    assert candidate.peak_bytes == found.peak_bytes == swept.peak_bytes
    taken = seconds(program, step.estimated, step.options)
    assert found.seconds == pytest.approx(taken, rel=1e-12, abs=1e-12 * sum(taken))
    assert candidate.total_s == pytest.approx(sum(taken), rel=1e-12)
    assert {x.storage: (set(x.nodes), x.last, x.next) for x in found.lives} == {
        storage: ({step.line.order[n] for n in nodes}, last, after)
        for storage, (nodes, last, after) in lives(program).items()
    }


def lives(program: Program) -> dict[int, tuple[set[fx.Node], int, int]]:
    """Storages of the forward that are read after the loss point: what is in each, and its uses."""
    table, loss_point = program.line.joint.storages, program.loss_point
    last: dict[int, int] = {}
    after: dict[int, int] = {}
    for index, call in enumerate(program.calls[:loss_point]):
        used = call.block.reads | table.of(call.block.outputs)
        last.update(dict.fromkeys(used, index))
    for index, call in reversed(list(enumerate(program.calls))[loss_point:]):
        after.update(dict.fromkeys(call.block.reads, index))
    saved = {node for stage in program.line.stages for node in stage.forward}
    saved.intersection_update(program.saved)
    return {
        storage: (
            {node for node in saved if storage in table.of_node[node]},
            last.get(storage, -1),
            index,
        )
        for storage, index in after.items()
        if any(storage in table.of_node[node] for node in saved)
    }


def with_options(step: Captured, schedule: Schedule, draw: random.Random) -> Schedule:
    """Now and then a save option in place of all."""
    masks, ops = step.options.masks, []
    for op in schedule.computations:
        if isinstance(op, Forward) and op.keep is Keep.ALL and draw.random() < 0.5:
            op = replace(op, option=draw.randint(0, len(masks[op.stage])))
        ops.append(op)
    return Schedule(tuple(ops))


def some_held(step: Captured, draw: random.Random) -> Held:
    """Some tensors of each stage, of a few, or of none."""
    share = draw.choice([0.0, 0.02, 0.2])
    return {
        index: frozenset(n for n in stage.forward if is_tensor(n) and draw.random() < share)
        for index, stage in enumerate(step.measured.line.stages)
    }


def random_decision(step: Captured, seed: int) -> tuple[Codes, Held]:
    draw, line = random.Random(seed), step.measured.line
    schedule = random_schedule(len(line.stages), seed)
    if line.branch_ends:
        schedule = random_join_schedule(line, seed)
    return coded(with_options(step, schedule, draw)), some_held(step, draw)


def zoo_of_kinds() -> list[object]:
    """Lines with draws, with their loss outside, with norms; joins, with gradients to sum up."""
    quick = {"gpt", "gpt_logits", "unet", "image_recipe", "siamese", "triplet"}
    return [pytest.param(n, marks=() if n in quick else pytest.mark.slow) for n in ZOO]


@pytest.mark.parametrize("name", zoo_of_kinds())
def test_random_decisions_are_as_their_programs(name: str):
    step, evaluator = captured(name), evaluator_of(name)
    for seed in range(8):
        check(step, evaluator, *random_decision(step, seed))


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_many_random_decisions_are_as_their_programs(name: str):
    step, evaluator = captured(name), evaluator_of(name)
    for seed in range(8, 100):
        check(step, evaluator, *random_decision(step, seed))


@pytest.mark.parametrize("name", ["siamese", "composed", "triplet"])
def test_what_generators_give_is_as_its_programs(name: str):
    step, search = captured(name), search_of(name)
    draw = random.Random(0)
    for generator in generators_of(DEFAULT_GENERATORS):
        found = list(generator(search.setting))
        for codes in draw.sample(found, min(3, len(found))):
            check(step, search.evaluator, codes, some_held(step, draw))


def test_norms_undone_are_as_their_programs():
    """Their inputs are rebuilt where backwards read them; forwards were measured with that."""
    traced = capture(network(), (X,))
    joint = build_joint_graph(
        traced.traced,
        forward_output_count=traced.output_count,
        mutated_primals=traced.mutated,
        exact=False,
    )
    step = replace(traced, joint=joint)
    assert any(map(is_inverse, joint.forward))
    evaluator = step.evaluator()
    for seed in range(8):
        check(step, evaluator, *random_decision(step, seed))


def test_an_evaluation_does_not_depend_on_those_before():
    step = captured("siamese")
    evaluator = evaluator_of("siamese")
    decisions = [random_decision(step, seed) for seed in range(60)]

    def all_of(each: Evaluator) -> list[Evaluation]:
        candidates = [each.candidate(codes, held_bits(each, held)) for codes, held in decisions]
        return [each.evaluation(candidate) for candidate in candidates]

    expected = all_of(evaluator)
    assert len(set(expected)) > 30
    assert all_of(evaluator) == expected
    make_room(evaluator.arrays.data, evaluator.arrays.at, TABLE)  # forgets all blocks
    assert all_of(evaluator) == expected
    for i in (0, 30, 59):
        fresh, (codes, held) = step.evaluator(around(step)), decisions[i]
        assert fresh.evaluation(fresh.candidate(codes, held_bits(fresh, held))) == expected[i]


def test_recomputation_lowers_the_peak():
    """Comparisons would also hold if nothing were ever recomputed."""
    step = captured("gpt")
    evaluator, count = step.evaluator(), len(step.line.stages)
    recomputed = evaluator.candidate(coded(periodic(count, 2)))
    assert recomputed.peak_bytes < 0.5 * evaluator.keep_all().peak_bytes


class Workspace(nn.Module):
    """One operation whose workspace is larger than all that it reads and returns."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.tanh()).tanh()


def test_workspaces_are_counted():
    step = capture(Workspace(), (torch.randn(2, 8, 20, 20, dtype=torch.float64),))
    evaluator = step.evaluator()
    predicted = evaluator.keep_all().peak_bytes
    assert measured_peak_bytes(step, evaluator.program(evaluator.keep_all())) == predicted
    costs = step.estimated.costs
    none = tuple((node, mode, 0) for node, mode, _ in costs.workspace_bytes)
    without = Measured.of(step.line, replace(costs, workspace_bytes=none))
    other = Evaluator.of(without, step.blocks, step.options, evaluator.context_bytes)
    assert other.keep_all().peak_bytes < predicted


def evaluated(around: ContextBytes) -> Evaluation:
    """Everything kept of a step whose loss is outside."""
    evaluator = captured("gpt_logits").evaluator(around)
    return evaluator.evaluation(evaluator.keep_all())


def test_what_surrounds_the_step_is_there_from_when_it_is_on():
    none = ContextBytes(0, loss_point_bytes=0, tangent_bytes=0)
    plain, huge = evaluated(none), 1 << 30
    count, loss_point = len(plain.ops), plain.loss_point

    def more(around: ContextBytes) -> tuple[list[int], list[int], int, int]:
        found = evaluated(around)
        return (
            [b - a for a, b in zip(plain.peaks_bytes, found.peaks_bytes, strict=True)],
            [b - a for a, b in zip(plain.held_bytes, found.held_bytes, strict=True)],
            found.loss_point_bytes - plain.loss_point_bytes,
            found.end_bytes - plain.end_bytes,
        )

    nothing, late = [0] * count, [0] * loss_point + [4096] * (count - loss_point)
    assert more(replace(none, given_bytes=7)) == ([7] * count, [7] * count, 7, 7)
    assert more(replace(none, tangent_bytes=4096)) == (late, late, 0, 4096)
    assert more(replace(none, loss_point_bytes=huge)) == (nothing, nothing, huge, 0)
    assert more(replace(none, end_bytes=huge)) == (nothing, nothing, 0, huge)
    assert plain.loss_point_bytes == plain.held_bytes[loss_point - 1]
    assert plain.end_bytes == plain.held_bytes[-1]


def test_what_is_held_after_the_step_are_its_results():
    step = captured("gpt_logits")
    joint, evaluator, count = step.joint, step.evaluator(), len(step.line.stages)
    results = (*joint.forward_outputs, *joint.backward_outputs, *joint.tangents)
    expected = joint.storages.of(n for n in results if isinstance(n, fx.Node))
    expected -= joint.storages.of(joint.given) | joint.released
    for schedule in (keep_all(count), periodic(count, 2)):
        found = evaluator.evaluation(evaluator.candidate(coded(schedule)))
        assert found.held_bytes[-1] == joint.storages.total(expected)
