"""Gradients that are handed over: what the step is said to hold of them is what it holds."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from fxremat.ir.schedule import coded
from fxremat.passes.emit.program import Program, keep_all
from fxremat.planner.context.handed import handed_over, staying
from fxremat.planner.decision.candidates import Candidate
from fxremat.planner.search.evaluator import Evaluator
from tests.harness import (
    Captured,
    bare,
    capture,
    captured,
    held_bits,
    measured_peak_bytes,
    periodic,
)
from tests.models import ZOO
from tests.models.zoo import seeded
from tests.planner.test_replay import random_decision
from tests.reference.plain_sweep import sweep

WIDTH, ROWS = 24, 40


class Tied(nn.Module):
    """One weight at both ends of a chain: its gradient is there when all has run."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.gelu(x @ self.weight)
        for layer in self.layers:
            x = functional.gelu(layer(x))
        return x @ self.weight.t()


class Passed(nn.Module):
    """The gradient of one parameter is the tangent; that of two others is one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(ROWS, WIDTH))
        self.a = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.b = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(functional.gelu(x) @ (self.a + self.b)) + self.shift


class StoppedGradient(nn.Module):
    """Two branches read one encoder, of which one gives it no gradient; either may be first."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.first = first
        self.encoder = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 5 for _ in range(4))
        self.into = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        stopped = self.stopped(y) if self.first else None
        for weight in self.encoder:
            x = functional.gelu(x @ weight)
        return functional.mse_loss(x, self.stopped(y) if stopped is None else stopped)

    def stopped(self, y: Tensor) -> Tensor:
        y = self.into(y)
        for weight in self.encoder:
            y = functional.gelu(y @ weight.detach())
        return y


class ViewedAtOnce(nn.Module):
    """Gradients of two parameters are parts of one product; a third is read early and late."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.b = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.gelu(x * self.scale.detach())
        x = functional.gelu(x @ torch.cat([self.a, self.b], 1))
        return functional.gelu(x[:, :WIDTH] * x[:, WIDTH:] * self.scale)


def _drawn(shape: tuple[int, ...] = (ROWS, WIDTH)) -> Tensor:
    return torch.randn(shape, requires_grad=True)


OWN: dict[str, Callable[[], Captured]] = {
    "tied_ends": lambda: capture(Tied(), (_drawn(),)),
    "passed": lambda: capture(Passed(), (_drawn(),)),
    "stopped_first": lambda: capture(StoppedGradient(first=True), (_drawn(), _drawn())),
    "stopped_last": lambda: capture(StoppedGradient(first=False), (_drawn(), _drawn())),
    "viewed_at_once": lambda: capture(ViewedAtOnce(), (_drawn(),)),
}
QUICK = (*OWN, "tied", "gpt", "siamese", "triplet", "lora")


@functools.cache
def step_of(name: str) -> Captured:
    if name not in OWN:
        return captured(name)
    with seeded(0):
        return OWN[name]()


def gradients_of(step: Captured) -> dict[int, fx.Node]:
    """By primal."""
    found = enumerate(step.joint.backward_outputs)
    return {i: gradient for i, gradient in found if isinstance(gradient, fx.Node)}


def random_set(step: Captured, draw: random.Random) -> frozenset[int]:
    """None, all, or some of those that get a gradient."""
    share = draw.choice([0.0, 0.3, 0.8, 1.0])
    return frozenset(i for i in gradients_of(step) if draw.random() < share)


def swept(evaluator: Evaluator, step: Captured, candidate: Candidate) -> Program:
    """The program of a decision, of which the evaluator says what a sweep finds."""
    program, evaluation = evaluator.program(candidate), evaluator.evaluation(candidate)
    found = sweep(program, step.footprints, evaluator.context_bytes)
    assert evaluation.peaks_bytes == found.peaks_bytes
    assert evaluation.held_bytes == found.held_bytes
    assert (evaluation.loss_point_bytes, evaluation.end_bytes) == (
        found.loss_point_bytes,
        found.end_bytes,
    )
    assert candidate.peak_bytes == found.peak_bytes
    return program


def check(step: Captured, seed: int, added: frozenset[int]) -> None:
    """The evaluator, the sweep and the allocator agree."""
    evaluator = step.evaluator(replace(bare(step.joint), added=added))
    codes, held = random_decision(step, seed)
    swept(evaluator, step, evaluator.candidate(codes, held_bits(evaluator, held)))
    nothing_held = evaluator.candidate(codes)
    program = swept(evaluator, step, nothing_held)
    handed = handed_over(step.line, evaluator.context_bytes)
    dropped = frozenset(i for i, node in gradients_of(step).items() if node in handed)
    measured = measured_peak_bytes(step, program, dropped=dropped)
    assert measured == nothing_held.peak_bytes


def check_many(name: str, seeds: range) -> None:
    step = step_of(name)
    for seed in seeds:
        check(step, seed, random_set(step, random.Random(seed)))
        check(step, seed, frozenset(gradients_of(step)))


@pytest.mark.parametrize("name", QUICK)
def test_what_is_handed_over_is_gone_when_it_is_said_to_be(name: str):
    check_many(name, range(24 if name in OWN else 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OWN, *ZOO])
def test_of_any_model_what_is_handed_over_is_gone_when_it_is_said_to_be(name: str):
    check_many(name, range(24, 60))


@pytest.mark.parametrize("name", QUICK)
def test_gradients_are_handed_over_or_stay(name: str):
    step = step_of(name)
    made = set(gradients_of(step).values())
    for seed in range(8):
        around = replace(bare(step.joint), added=random_set(step, random.Random(seed)))
        handed, left = handed_over(step.line, around), staying(step.line, around)
        assert handed | left == made
        assert not handed & left
        assert handed <= {gradients_of(step)[i] for i in around.added}


def all_added(step: Captured) -> frozenset[fx.Node]:
    return handed_over(step.line, replace(bare(step.joint), added=frozenset(gradients_of(step))))


def primal_of(step: Captured, parameter: Tensor) -> int:
    (found,) = (i for i, value in enumerate(step.primals) if value is parameter)
    return found


def test_a_gradient_that_two_parameters_get_is_handed_over_with_both():
    with seeded(0):
        model = Passed()
        step = capture(model, (_drawn(),))
    a, b = primal_of(step, model.a), primal_of(step, model.b)
    node = gradients_of(step)[a]
    assert gradients_of(step)[b] is node
    for added in ({a}, {b}, {a, b}):
        around = replace(bare(step.joint), added=frozenset(added))
        assert (node in handed_over(step.line, around)) == (added == {a, b})


def test_one_that_is_read_later_stays_until_then():
    """The backward of the first layer reads ``scale``, that of the last makes its gradient."""
    with seeded(0):
        model = ViewedAtOnce()
        step = capture(model, (_drawn(),))
    gradients = gradients_of(step)
    assert gradients[primal_of(step, model.scale)] not in all_added(step)
    assert gradients[primal_of(step, model.a)] in all_added(step)


@pytest.mark.parametrize("name", ["gpt", "tied_ends", "viewed_at_once"])
def test_handing_over_lowers_what_is_there_at_the_end(name: str):
    step = step_of(name)
    plain = step.evaluator()
    added = step.evaluator(replace(bare(step.joint), added=frozenset(gradients_of(step))))
    for codes in (keep_all(len(step.line.stages)), periodic(len(step.line.stages), 2)):
        all_of, rest = (
            e.evaluation(e.candidate(coded(codes))).held_bytes[-1] for e in (plain, added)
        )
        table = step.joint.storages
        gone = table.of(all_added(step)) - table.of(step.joint.tangents)
        gone -= table.of(staying(step.line, added.context_bytes))
        gone -= table.of(n for n in step.joint.forward_outputs if isinstance(n, fx.Node))
        assert all_of - rest == table.total(gone)
        assert all_of > rest
