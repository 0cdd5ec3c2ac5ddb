"""One symbolic capture stands for every size."""

from __future__ import annotations

import functools

import pytest
import torch

from fxremat.passes.emit.program import keep_all
from tests.harness import Captured, capture, periodic, random_schedule, run_traced
from tests.models.bits import assert_bitwise_equal
from tests.models.gpt import GPT, GPTConfig, tokens
from tests.models.zoo import drawn_once
from tests.sized import AtSize, capture_sized

CONFIG = GPTConfig(vocabulary=96, context=64, width=64, blocks=3, dropout=0.1, returns_logits=True)
build = drawn_once(lambda: GPT(CONFIG))


@functools.cache
def model():
    return build()


@functools.cache
def symbolic() -> Captured:
    return capture_sized(model(), sample(3, 24), dims=[(0, 1), (0, 1)])


def sample(batch, length):
    return tokens(1, vocabulary=96, batch=batch, length=length)


@pytest.mark.parametrize("size", [(3, 24), (2, 64), (5, 17), (7, 2)])
def test_bits(size):
    step = symbolic()
    static = capture(model(), sample(*size))
    at = AtSize.of(step, static)
    count = len(step.line.stages)
    truth = run_traced(static)
    for schedule in (keep_all(count), periodic(count, 2), random_schedule(count, 1)):
        ran = at.run(step.program(schedule))
        assert_bitwise_equal(ran.outputs, truth.outputs)
        assert_bitwise_equal(ran.gradients, truth.gradients)
        assert torch.equal(ran.generator, truth.generator)
