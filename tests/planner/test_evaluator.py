"""Candidates and the decisions that they stand for; what cannot be evaluated is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxremat.costs.measured.cost import Measured
from fxremat.effort import USUAL
from fxremat.errors import CostError, ScheduleError
from fxremat.ir import Forward, Keep, Schedule
from fxremat.ir.schedule import coded, decoded
from fxremat.passes.emit.program import keep_all
from fxremat.passes.stages.block import Mode
from fxremat.planner.search.evaluator import Evaluator, carried_out
from tests.harness import (
    bare,
    captured,
    held_bits,
    measured_peak_bytes,
    numbered,
    on_release,
    periodic,
)
from tests.reference.plain_sweep import sweep
from tests.reference.program import build_program


def test_a_candidate_stands_for_its_decision():
    step = captured("unet")
    evaluator = step.evaluator()
    count = len(step.line.stages)
    least = evaluator.candidate(coded(periodic(count, 3)))
    climbed = evaluator.climb(least, USUAL)
    for candidate in (evaluator.keep_all(), least, climbed[len(climbed) // 2]):
        found = evaluator.decision(candidate)
        nodes = step.line.nodes
        kept = {stage: frozenset(nodes[i] for i in own) for stage, own in found.held}
        assert (held_bits(evaluator, kept) if kept else b"") == candidate.held
        schedule = decoded(candidate.codes)
        program = evaluator.program(candidate)
        assert program == carried_out(step.line, step.blocks, schedule, found)
        assert program == build_program(step.line, schedule, found)
        assert measured_peak_bytes(step, program) == candidate.peak_bytes


@on_release
@pytest.mark.parametrize("tangents_stay", [False, True])
@pytest.mark.parametrize("name", ["gpt_logits", "unet", "siamese"])
def test_tangents_go_with_their_last_reader_unless_somebody_holds_them(
    name: str, tangents_stay: bool
):
    step = captured(name)
    assert step.joint.released
    around = replace(bare(step.joint), tangents_stay=tangents_stay)
    evaluator = step.evaluator(around)
    for codes in (
        coded(keep_all(len(step.line.stages))),
        coded(periodic(len(step.line.stages), 2)),
    ):
        candidate = evaluator.candidate(codes)
        program = evaluator.program(candidate)
        assert sweep(program, step.footprints, around).peak_bytes == candidate.peak_bytes
        measured = measured_peak_bytes(step, program, tangents_stay=tangents_stay)
        assert measured == candidate.peak_bytes
        held = evaluator.evaluation(candidate).held_bytes[-1]
        left_bytes = step.joint.storages.total(step.joint.released) * tangents_stay
        results = step.joint.storages.of((*step.joint.results, *step.joint.gradients))
        assert held == left_bytes + step.joint.storages.total(
            results - step.joint.storages.of(step.joint.given)
        )


def test_options_of_a_schedule_are_in_its_decision():
    step = captured("unet")
    evaluator, masks = step.evaluator(), step.options.masks
    stage = next(i for i, own in enumerate(masks) if own)
    ops = list(keep_all(len(step.line.stages)))
    ops[stage] = Forward(stage, Keep.ALL, 1)
    decision = evaluator.decision(evaluator.candidate(coded(Schedule(tuple(ops)))))
    missing = {stage: step.options.parts[stage].missing(masks[stage][0])}
    assert decision.missing == numbered(step.line, missing)


def test_an_operation_of_unknown_workspace_is_named_each_time():
    step = captured("gpt_logits")
    nodes = tuple(step.line.joint.module.graph.nodes)
    costs = step.estimated.costs
    missing = next(known for known in costs.workspace_bytes if known[1] == Mode.BACKWARD.value)
    known = tuple(other for other in costs.workspace_bytes if other != missing)
    measured = Measured.of(step.line, replace(costs, workspace_bytes=known))
    evaluator = Evaluator.of(measured, step.blocks, step.options, step.context_bytes)
    for _ in range(2):
        with pytest.raises(CostError, match=nodes[missing[0]].name):
            evaluator.keep_all()


def test_an_operation_that_was_never_timed_is_named_each_time():
    step = captured("gpt_logits")
    parts = tuple(
        replace(part, charges=replace(part.charges, alone_s={})) for part in step.options.parts
    )
    options = replace(step.options, parts=parts)
    evaluator = Evaluator.of(step.estimated, step.blocks, options, step.context_bytes)
    assert evaluator.keep_all().total_s > 0
    names = [node.name for node in step.estimated.again_s]
    for _ in range(2):
        with pytest.raises(CostError) as caught:
            evaluator.candidate(coded(periodic(len(step.line.stages), 3)))
        assert str(caught.value).split()[0] in names


def test_what_nothing_computes_is_named():
    step = captured("gpt_logits")
    evaluator = step.evaluator()
    all_but_one = [op for op in keep_all(len(step.line.stages)) if op != Forward(3, Keep.ALL)]
    codes = coded(Schedule(tuple(all_but_one)))
    with pytest.raises(ScheduleError, match="no operation computes"):
        evaluator.candidate(codes)
    with pytest.raises(ScheduleError, match="no operation computes"):
        step.program(Schedule(tuple(all_but_one)))


def test_an_evaluator_works_on_after_what_it_refused():
    step = captured("gpt_logits")
    evaluator = step.evaluator()
    before = evaluator.keep_all()
    ops = keep_all(len(step.line.stages)).computations
    with pytest.raises(ScheduleError):
        evaluator.candidate(coded(Schedule(ops[1:])))
    after = evaluator.keep_all()
    assert (after.peak_bytes, after.total_s) == (before.peak_bytes, before.total_s)
