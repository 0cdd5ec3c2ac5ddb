"""Emitted graphs: what goes in and out, who shares code, what things are called."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor, fx, nn

from fxremat.ir import Backward, Forward
from fxremat.passes.emit.body import GIVE, Variable
from fxremat.passes.emit.program import keep_all
from fxremat.passes.emit.rewrite import BlockModules, rewrite
from fxremat.passes.stages.block import Mode, block_key
from tests.harness import (
    SEED,
    Made,
    capture,
    captured,
    periodic,
    random_schedule,
    run_emitted,
    run_traced,
)
from tests.models.bits import assert_bitwise_equal
from tests.planner.test_handed import OWN, step_of
from tests.planner.test_replay import random_decision

models = pytest.mark.parametrize("name", ["gpt", "resnet50", "outputs", "gru", "inplace"])


@models
def test_the_backward_takes_what_the_forward_hands_over(name: str):
    step = captured(name)
    count = len(step.line.stages)
    for schedule in (keep_all(count), periodic(count, 2), random_schedule(count, 1)):
        program = step.program(schedule)
        forward, backward = rewrite(program, step.sweep(program).peaks_bytes, BlockModules())
        taken = [v.name for v in forward.body.takes]
        assert taken == [n.name for n in step.joint.primals]
        results = forward.body.statements[-1].arguments
        assert len(results) == step.output_count + len(program.saved)
        *inputs, receiver = (v.name for v in backward.body.takes)
        assert len(inputs) == len(program.saved) + len(step.joint.tangents)
        for result, placed in zip(results[step.output_count :], inputs, strict=False):
            assert isinstance(result, Variable)
            assert result.name == placed
        assert inputs[len(program.saved) :] == [n.name for n in step.joint.tangents]
        assert receiver == "gradients"
        assert not backward.body.statements[-1].arguments


@models
def test_a_primal_that_is_replaced_is_not_read_again(name: str):
    """Its old value is gone when the backward runs."""
    step = captured(name)
    program = step.program(periodic(len(step.line.stages), 2))
    assert step.joint.mutated.isdisjoint(program.saved)


@models
def test_each_gradient_is_given_once(name: str):
    step = captured(name)
    count = len(step.line.stages)
    wanted = {
        i: gradient
        for i, gradient in enumerate(step.joint.backward_outputs)
        if isinstance(gradient, fx.Node)
    }
    for schedule in (keep_all(count), periodic(count, 2)):
        program = step.program(schedule)
        _, backward = rewrite(program, step.sweep(program).peaks_bytes, BlockModules())
        calls = [s for s in backward.body.statements if s.target == GIVE]
        given = [pair for call in calls for pair in call.arguments[1].items()]
        assert sorted(i for i, _ in given) == sorted(wanted)
        for primal, gradient in given:
            assert gradient.name.endswith(wanted[primal].name)


class Spoiling(Made):
    """Writes into each primal as soon as its gradient is there, as an optimizer does."""

    def __init__(self, primals: list[Tensor]) -> None:
        super().__init__([None] * len(primals))
        self.primals = primals

    def give(self, made: dict[int, Tensor]) -> None:
        super().give(made)
        for primal in made:
            self.primals[primal].fill_(math.nan)


@pytest.mark.parametrize("name", [*OWN, "gpt", "siamese", "gru"])
def test_a_primal_may_change_once_its_gradient_is_given(name: str):
    step = step_of(name)
    expected = run_traced(step).gradients
    for seed in range(12 if name in OWN else 3):
        codes, _ = random_decision(step, seed)
        program = step.evaluator().program(step.evaluator().candidate(codes))
        forward, backward = rewrite(program, step.sweep(program).peaks_bytes, BlockModules())
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(SEED)
            primals = [p.clone() for p in step.primals]
            made = Spoiling(primals)
            saved = forward([*primals])[step.output_count :]
            backward([*saved, *step.tangents, made])
        assert_bitwise_equal(made.gradients, expected)
        spoilt = [p.isnan().all() for p, g in zip(primals, expected, strict=True) if g is not None]
        assert all(spoilt)


def test_stages_that_are_alike_share_a_module():
    step = captured("hf_llama")
    program = step.program(periodic(len(step.line.stages), 3))
    modules = BlockModules()
    forward, backward = rewrite(program, step.sweep(program).peaks_bytes, modules)
    distinct = {block_key(call.block, step.joint.storages) for call in program.calls}
    assert len(modules.modules) == len(distinct) < 0.6 * len(program.calls)
    seen: dict[object, set[int]] = {}
    calls = [
        graph.body.stages[statement.target]
        for graph in (forward, backward)
        for statement in graph.body.statements
        if statement.calls_stage
    ]
    for call, module in zip(program.calls, calls, strict=True):
        seen.setdefault(block_key(call.block, step.joint.storages), set()).add(id(module))
    assert all(len(ids) == 1 for ids in seen.values())


def test_modules_are_called_for_their_stage_and_what_they_do():
    step = captured("gpt")
    program = step.program(random_schedule(len(step.line.stages), 3))
    names = [
        statement.target
        for graph in rewrite(program, step.sweep(program).peaks_bytes, BlockModules())
        for statement in graph.body.statements
        if statement.calls_stage
    ]
    pattern = re.compile(r"stage(\d+)_(forward(_nosave)?(_again)?|rebuild|backward)(_\d+)?")
    for call, name in zip(program.calls, names, strict=True):
        match = pattern.fullmatch(name)
        assert match, name
        assert int(match[1]) == call.op.stage
        assert name.endswith("_again") <= (call.block.mode is Mode.AGAIN)
        assert ("_backward" in name) == isinstance(call.op, Backward)
        assert ("_rebuild" in name) == call.rebuilds


def test_one_stage_called_in_two_ways_has_two_names():
    """Asked for different results, it is different code."""
    step = captured("gpt")
    for seed in range(8):
        program = step.program(random_schedule(len(step.line.stages), seed))
        forward, backward = rewrite(program, step.sweep(program).peaks_bytes, BlockModules())
        for graph, calls in (
            (forward, program.calls[: program.loss_point]),
            (backward, program.calls[program.loss_point :]),
        ):
            targets = [s.target for s in graph.body.statements if s.calls_stage]
            keys = [block_key(call.block, step.joint.storages) for call in calls]
            for target in set(targets):
                assert len({k for k, t in zip(keys, targets, strict=True) if t == target}) == 1


def test_values_are_called_for_the_stage_that_made_them():
    step = captured("gpt")
    program = step.program(keep_all(len(step.line.stages)))
    forward, _ = rewrite(program, step.sweep(program).peaks_bytes, BlockModules())
    values = [v.name for statement in forward.body.statements for v in statement.makes]
    assert any(re.match(r"x\d+_", n) for n in values)
    assert any(re.match(r"kept\d+_", n) for n in values)


def test_comments_tell_bytes_and_peak():
    step = captured("gpt")
    program = step.program(periodic(len(step.line.stages), 2))
    forward, backward = rewrite(program, step.sweep(program).peaks_bytes, BlockModules())
    assert re.search(r"# F_all \d+, again, keeps [\d.]+ KiB, peak [\d.]+ \wiB", backward.code)
    assert re.search(r"# rebuild \d+, keeps", backward.code)
    assert re.search(r"# F_ck 0, peak", forward.code)
    assert isinstance(program.calls[0].op, Forward)


class Weighted(nn.Module):
    """Every layer reads a constant of the code."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.tensor([0.5, 1.0, 2.0])
        for layer in self.layers:
            x = (layer(x) * weights).tanh() * weights
        return x


def test_constants_are_carried_by_both_graphs():
    step = capture(Weighted(), (torch.randn(4, 3),))
    assert step.joint.constants
    program = step.program(periodic(len(step.line.stages), 2))
    assert set(step.joint.constants).isdisjoint(program.saved)
    truth = run_traced(step)
    for graph in rewrite(program, step.sweep(program).peaks_bytes, BlockModules()):
        (constant,) = graph.body.constants.values()
        assert torch.equal(constant, torch.tensor([0.5, 1.0, 2.0]))
    assert_bitwise_equal(run_emitted(step, program), truth)


def test_an_output_that_no_backward_reads_is_not_handed_over():
    """Autograd would hold it until the backward, though the caller may have dropped it."""
    step = captured("buffers")
    program = step.program(keep_all(len(step.line.stages)))
    read = {n for call in program.calls[program.loss_point :] for n in call.block.inputs}
    returned = {n for n in step.joint.backward_outputs if isinstance(n, fx.Node)}
    assert set(step.joint.forward_outputs) - read
    assert read | returned >= set(program.saved)
