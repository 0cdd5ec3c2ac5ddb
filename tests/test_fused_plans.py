"""Units under plans drawn at random: the same bits as everything kept, at the evaluated peak."""

from __future__ import annotations

import pytest
import torch

from fxremat.passes.fuse.rewrite import fuse
from fxremat.passes.fuse.twice import computed_twice
from fxremat.passes.fuse.units import Units
from fxremat.passes.joint.build import rebuilt
from fxremat.passes.stages.linearize import linearize
from tests.harness import (
    Captured,
    ask_input_gradients,
    capture,
    keep_all_ran,
    measured_peak_bytes,
    run_emitted,
)
from tests.models import ZOO
from tests.models.bits import assert_bitwise_equal
from tests.models.reference import call_without_trace
from tests.test_replay import random_decision

QUICK = "outputs"
"""Few units: compiling takes seconds."""


def fused_step(name: str) -> Captured:
    """The step of a zoo model, with units."""
    entry = ZOO[name]
    model = entry.build()
    args, kwargs = entry.sample(0)
    ask_input_gradients((args, kwargs))
    if entry.hooks_at_first_call:
        call_without_trace(entry, model)
    with entry.context():
        step = capture(model, args, kwargs, apart=True)
    for how in (computed_twice, lambda line: fuse(line, Units())):
        module = how(linearize(step.joint))
        step.joint = rebuilt(step.joint, module, mutated_primals=step.mutated)
    return step


def check(name: str, seeds: range) -> None:
    step = fused_step(name)
    evaluator = step.evaluator()
    expected = keep_all_ran(step)
    for seed in seeds:
        codes, held = random_decision(step, seed)
        candidate = evaluator.candidate(codes, evaluator.held_bits(held))
        program = evaluator.program(candidate)
        assert_bitwise_equal(run_emitted(step, program), expected)
        assert measured_peak_bytes(step, program) == candidate.peak_bytes
    torch._dynamo.reset()


def test_random_plans_have_the_same_bits_at_their_peaks():
    check(QUICK, range(4))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ZOO if name != QUICK])
def test_random_plans_of_every_model(name: str):
    check(name, range(6))
