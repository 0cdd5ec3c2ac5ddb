"""The numbers that solvers work on: the line's storages, and costs near the exact sweep."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import fx

from fxremat.ir import Backward, Chain, Costs, Forward, Keep, Problem, Schedule
from fxremat.passes.emit.program import keep_all
from fxremat.planner.search.generators import build_chain, build_costs
from tests.harness import Captured, captured, periodic, random_schedule
from tests.models import ZOO
from tests.reference.plain_sweep import sweep
from tests.reference.simulate import simulate

every_model = pytest.mark.parametrize("name", ZOO)


def chain_of(step: Captured) -> Chain:
    return build_chain(step.measured.line, step.blocks)


def costs_of(step: Captured, chain: Chain) -> Costs:
    return build_costs(step.measured, chain, step.evaluator(step.context_bytes), options=False)


@every_model
def test_a_chain_is_a_valid_problem(name: str):
    step = captured(name)
    chain = chain_of(step)
    Problem(chain, costs_of(step, chain), 1 << 30)
    assert len(chain) == len(step.line.stages)


@every_model
def test_boundaries_and_saved_sets_are_the_lines(name: str):
    step = captured(name)
    line, chain = step.measured.line, chain_of(step)
    table = line.joint.storages
    fixed = table.of((*line.joint.given, *line.pinned))

    def sizes(nodes: tuple[fx.Node, ...]) -> list[int]:
        return sorted(table.nbytes[s] for s in table.of(nodes) - fixed)

    for index, stage in enumerate(line.stages):
        boundary, saved = chain.boundaries[index], chain.stages[index].saved
        assert sorted(chain.storages[s].nbytes for s in boundary) == sizes(stage.boundary)
        assert sorted(chain.storages[s].nbytes for s in saved) == sizes(stage.saved)
    assert chain.boundaries[len(chain)] == ()


@every_model
def test_the_solvers_model_is_near_the_exact_sweep(name: str):
    """Too low and its schedules do not fit; too high and memory stays unused."""
    step = captured(name)
    chain = chain_of(step)
    costs = costs_of(step, chain)
    count = len(chain)
    schedules: list[Schedule] = [keep_all(count), periodic(count, 1), periodic(count, 3)]
    schedules += [random_schedule(count, seed) for seed in range(4)]
    for schedule in schedules:
        modelled = simulate(chain, costs, schedule).peak_bytes
        exact = sweep(step.program(schedule), step.footprints, step.context_bytes).peak_bytes
        assert 0.95 * exact <= modelled <= 1.5 * exact


def test_seconds_are_the_measured_ones():
    step = captured("gpt")
    costs = costs_of(step, chain_of(step))
    for stage, seconds in zip(costs.stages, step.measured.stages, strict=True):
        assert (stage.forward_s, stage.rebuild_s, stage.backward_s) == (
            seconds.forward_s,
            seconds.rebuild_s,
            seconds.backward_s,
        )


def test_what_is_given_and_pinned_is_fixed():
    step = captured("gpt")
    line = step.measured.line
    table = line.joint.storages
    pinned = table.of(line.pinned) - table.of(line.joint.given)
    costs = costs_of(step, chain_of(step))
    assert costs.fixed_bytes == step.context_bytes.given_bytes + table.total(pinned)


def test_parameter_gradients_pile_up_towards_the_first_stage():
    step = captured("hf_llama")
    costs = costs_of(step, chain_of(step))
    gradients = [stage.gradient_bytes for stage in costs.stages[:-1]]
    parameters = sum(p.nbytes for p in step.primals if p.requires_grad)
    assert gradients[0] > 0.5 * parameters
    assert gradients[0] > gradients[len(gradients) // 2] > gradients[-1]
    assert costs.stages[-1].gradient_bytes == 0


def test_the_turn_is_charged_with_the_loss_and_nothing_else():
    step = captured("lora")
    chain = chain_of(step)
    around = replace(step.context_bytes, loss_point_bytes=3 * step.context_bytes.tangent_bytes)
    costs = build_costs(step.measured, chain, step.evaluator(around), options=False)
    *_, last, loss_point = costs.stages
    assert chain.stages[-1].name == "loss point"
    assert chain.saved_set(len(chain) - 1) == frozenset()
    assert (loss_point.forward_s, loss_point.rebuild_s, loss_point.backward_s) == (0.0, 0.0, 0.0)
    assert loss_point.backward_extra_bytes == loss_point.rebuild_bytes == around.loss_point_bytes
    assert loss_point.gradient_bytes == 0
    assert last.gradient_bytes == around.tangent_bytes > 0
    count = len(chain)
    forwards = [Forward(0, Keep.INPUT), *(Forward(i, Keep.NONE) for i in range(1, count - 1))]
    for keep in ([], [Forward(count - 1, Keep.INPUT)]):  # by either way to the loss point
        turned = (*forwards, *keep, Forward(count - 1, Keep.ALL), Backward(count - 1))
        timeline = simulate(chain, costs, Schedule((*turned, *keep_all(count - 1))))
        peak_bytes = max(e.peak_bytes for e in timeline.events if e.op == Backward(count - 1))
        inputs_bytes = chain.nbytes(chain.boundaries[0])
        assert peak_bytes == costs.fixed_bytes + inputs_bytes + around.loss_point_bytes
