"""BatchNorm: recomputed to the last bit, its statistics moved once a step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxremat.passes.emit.program import keep_all
from fxremat.passes.joint import batchnorm
from tests.harness import capture, captured, periodic, random_schedule, run_emitted, run_traced
from tests.models.bits import assert_bitwise_equal

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("shape", "affine"), [((8, 6), True), ((4, 6, 5), True), ((4, 6, 5, 7), True), ((8, 6), False)]
)
def test_without_statistics_the_same_bits_come_out(shape: tuple[int, ...], affine: bool):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    weight, bias = (torch.randn(6, generator=generator) if affine else None for _ in range(2))
    mean, variance = torch.zeros(6), torch.ones(6)
    first = aten._native_batch_norm_legit_functional(
        x, weight, bias, mean, variance, True, 0.1, 1e-5
    )
    again = batchnorm.STATELESS(x, weight, bias, True, 0.1, 1e-5)
    assert_bitwise_equal(list(again), list(first[: batchnorm.NORMALIZED_VALUES]))
    assert not torch.equal(first[3], mean)


class Normed(nn.Module):
    """Convolutions and norms of one width, some of which do not track."""

    def __init__(self, **options):
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm2d(6, **options) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = norm(convolution(x)).relu()
        return x


OPTIONS = [
    {},
    {"affine": False},
    {"momentum": 0.5, "eps": 1e-2},
    {"track_running_stats": False},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_any_schedule_moves_the_statistics_once(options: dict):
    step = capture(Normed(**options), (torch.randn(4, 6, 8, 8),))
    truth = run_traced(step)
    count = len(step.line.stages)
    assert count > 5
    schedules = [keep_all(count), periodic(count, 1), periodic(count, 3)]
    for schedule in (*schedules, *(random_schedule(count, seed) for seed in range(3))):
        assert_bitwise_equal(run_emitted(step, step.program(schedule)), truth)


def test_new_statistics_are_outputs_of_the_first_run_only():
    step = captured("resnet50")
    statistics = {n for n in step.joint.forward if batchnorm.is_new_statistic(n)}
    norms = [n for n in step.joint.forward if batchnorm.updates_statistics(n)]
    assert len(statistics) == 2 * len(norms) > 0
    program = step.program(periodic(len(step.line.stages), 2))
    seen = [n for call in program.calls for n in call.block.outputs if n in statistics]
    assert len(seen) == len(set(seen)) == len(statistics)


def test_the_backward_reads_no_running_statistics():
    step = captured("resnet50")
    buffers = {
        primal
        for primal, value in zip(step.joint.primals, step.primals, strict=True)
        if not value.requires_grad and value.dim() == 1
    }
    assert buffers
    assert all(buffers.isdisjoint(n.all_input_nodes) for n in step.joint.backward)
    backwards = [
        n for n in step.joint.backward if n.target is aten.native_batch_norm_backward.default
    ]
    assert backwards
    assert all(n.args[3] is None and n.args[4] is None for n in backwards)


def test_in_eval_mode_a_norm_is_left_as_it_is():
    model = Normed()
    model.norms.eval()
    step = capture(model, (torch.randn(4, 6, 8, 8),))
    assert not any(batchnorm.updates_statistics(n) for n in step.joint.forward)
    for node in step.joint.backward:
        if node.target is aten.native_batch_norm_backward.default:
            assert None not in node.args[3:5], "this backward reads the running statistics"
    truth = run_traced(step)
    count = len(step.line.stages)
    assert_bitwise_equal(run_emitted(step, step.program(periodic(count, 2))), truth)
    assert not step.mutated
