"""The sweep predicts what the allocator will report, to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fxremat.passes.emit.program import keep_all
from fxremat.planner.sweep import Surroundings, Sweep, Sweeper
from tests.harness import (
    bare,
    capture,
    captured,
    measured_peak_bytes,
    periodic,
    random_schedule,
)
from tests.models import ZOO


@pytest.mark.parametrize("name", ZOO)
def test_predicted_peak_is_the_measured_one(name: str):
    step = captured(name, input_gradients=True)
    count = len(step.line.stages)
    schedules = [
        keep_all(count),
        periodic(count, 1),
        periodic(count, 3),
        *(random_schedule(count, seed) for seed in (10, 11)),
    ]
    for schedule in schedules:
        program = step.program(schedule)
        assert measured_peak_bytes(step, program) == step.sweep(program).peak_bytes, schedule


def test_recomputation_lowers_the_peak():
    """The comparison above would also hold if nothing were ever recomputed."""
    step = captured("gpt")
    count = len(step.line.stages)
    kept, recomputed = (step.sweep(step.program(s)) for s in (keep_all(count), periodic(count, 2)))
    assert recomputed.peak_bytes < 0.5 * kept.peak_bytes


class Workspace(nn.Module):
    """One operation whose workspace is larger than all that it reads and returns."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.tanh()).tanh()


def test_workspaces_are_counted():
    step = capture(Workspace(), (torch.randn(2, 8, 20, 20, dtype=torch.float64),))
    program = step.program(keep_all(len(step.line.stages)))
    predicted = step.sweep(program).peak_bytes
    without = Sweeper(step.measured.line, lambda _node, _block: 0)
    assert measured_peak_bytes(step, program) == predicted
    assert without.sweep(program, bare(step.joint)).peak_bytes < predicted


def test_what_surrounds_the_step_is_added():
    step = captured("gpt_logits")
    program = step.program(keep_all(len(step.line.stages)))
    plain = step.sweep(program)
    around = replace(bare(step.joint), given_bytes=1000)
    moved = step.sweeper.sweep(program, around)
    assert moved.peak_bytes == plain.peak_bytes + 1000
    assert moved.peaks_bytes == tuple(n + 1000 for n in plain.peaks_bytes)
    assert moved.held_bytes == tuple(n + 1000 for n in plain.held_bytes)


def test_the_turn_stands_between_forward_and_backward():
    step = captured("gpt_logits")
    program = step.program(keep_all(len(step.line.stages)))
    huge = 1 << 30
    swept = step.sweeper.sweep(program, replace(bare(step.joint), turn_bytes=huge))
    held = swept.held_bytes[program.turn - 1]
    assert swept.turn_bytes == held + huge == swept.peak_bytes
    assert max(swept.peaks_bytes) < huge


def test_tangents_are_held_from_the_turn_on():
    step = captured("gpt_logits")
    program = step.program(keep_all(len(step.line.stages)))
    none, some = (
        step.sweeper.sweep(program, Surroundings(0, turn_bytes=0, tangent_bytes=n))
        for n in (0, 4096)
    )
    change = [b - a for a, b in zip(none.held_bytes, some.held_bytes, strict=True)]
    assert change == [0] * program.turn + [4096] * (len(program.calls) - program.turn)
    assert some.end_bytes == none.end_bytes + 4096


def test_the_end_is_counted_after_the_last_call():
    step = captured("gpt_logits")
    program = step.program(keep_all(len(step.line.stages)))
    huge = 1 << 30
    swept = step.sweeper.sweep(program, replace(bare(step.joint), end_bytes=huge))
    assert swept.end_bytes == swept.held_bytes[-1] + huge == swept.peak_bytes


def test_what_is_held_after_the_step_are_its_results():
    step = captured("gpt_logits")
    joint = step.joint
    for schedule in (keep_all(len(step.line.stages)), periodic(len(step.line.stages), 2)):
        program = step.program(schedule)
        results = {
            n
            for n in (*joint.forward_outputs, *joint.backward_outputs, *joint.tangents)
            if isinstance(n, torch.fx.Node)
        }
        expected = joint.storages.of(results) - joint.storages.of(joint.given)
        assert step.sweep(program).held_bytes[-1] == joint.storages.total(expected)


@pytest.mark.parametrize(
    ("sweep", "peak"),
    [
        (Sweep((5, 9, 2), (1, 2, 3), turn_bytes=4, end_bytes=3), 9),
        (Sweep((5, 9, 2), (1, 2, 3), turn_bytes=10, end_bytes=3), 10),
        (Sweep((5, 9, 2), (1, 2, 3), turn_bytes=4, end_bytes=11), 11),
    ],
)
def test_peak_is_the_most_at_any_instant(sweep: Sweep, peak: int):
    assert sweep.peak_bytes == peak
