"""Units under plans drawn at random: the bits of everything kept, within the evaluated peak."""

from __future__ import annotations

import pytest
import torch

from fxremat.ir.schedule import coded
from fxremat.passes.emit.program import keep_all
from tests.fused import units_in, with_units
from tests.harness import (
    Captured,
    ask_input_gradients,
    capture,
    held_bits,
    keep_all_ran,
    measured_peak_bytes,
    run_emitted,
)
from tests.models import ZOO
from tests.models.bits import assert_bitwise_equal
from tests.models.reference import call_without_trace
from tests.planner.test_replay import random_decision

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
        step = with_units(capture(model, args, kwargs, apart=True))
    for node in units_in(step.joint.module):
        node.target.compile(
            tuple(node.target.hints.values())
        )  # making kernels takes memory, which no step pays for
    return step


def check(name: str, seeds: range) -> None:
    step = fused_step(name)
    evaluator = step.evaluator()
    expected = keep_all_ran(step)
    everything = keep_all(len(step.line.stages))
    kept_bytes = evaluator.candidate(coded(everything)).peak_bytes
    assert measured_peak_bytes(step, step.program(everything)) == kept_bytes
    for seed in seeds:
        codes, held = random_decision(step, seed)
        candidate = evaluator.candidate(codes, held_bits(evaluator, held))
        program = evaluator.program(candidate)
        assert_bitwise_equal(run_emitted(step, program), expected)
        # Less where a unit runs again beside a result of it that is held: there are two then, and
        # the second is counted as long as either is read.
        assert measured_peak_bytes(step, program) <= candidate.peak_bytes
    torch._dynamo.reset()


def test_random_plans_have_the_same_bits_within_their_peaks():
    check(QUICK, range(4))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ZOO if name != QUICK])
def test_random_plans_of_every_model(name: str):
    check(name, range(6))
