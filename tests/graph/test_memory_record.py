"""The record of a step's memory is what the evaluation says, and says where tensors come from."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxremat
from fxremat.graph.pools import pools
from fxremat.ir import Backward, Copy
from fxremat.report.memory import Kind
from fxremat.report.plan import Plan
from tests.golden import TORCH, plans_of
from tests.models import ZOO
from tests.trials import plan_of_model

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def assert_recorded(plan: Plan) -> None:
    """At each call the same peak, and the same after it; no tensor's life is empty."""
    memory, held = plan.memory, plan.memory.held_bytes()
    events = [e for e in plan.timeline.events if not isinstance(e.op, Copy)]
    spans = list(memory.spans())
    assert [max(held[i] for i in span) for span in spans] == [e.peak_bytes for e in events]
    assert [held[span[-1]] for span in spans] == [e.held_bytes for e in events]
    assert memory.peak_bytes == max(held) == plan.predicted_held_bytes
    assert all(0 <= life.begin < life.end <= memory.count for life in memory.lives)
    assert memory.count == len(held)
    before = [e.op for e, span in zip(events, spans, strict=True) if span.stop <= memory.loss_point]
    after = [e.op for e, span in zip(events, spans, strict=True) if span.start > memory.loss_point]
    assert [*before, *after] == [e.op for e in events]
    assert not any(isinstance(op, Backward) for op in before)
    assert {op.stage for op in after if not isinstance(op, Backward)} <= {op.stage for op in before}
    times = memory.times(plan.timeline)
    assert list(times) == sorted(times)
    assert 0 <= times[0] <= times[-1] <= plan.timeline.makespan_s


@pytest.mark.parametrize("name", ["gpt", "unet", "lora", "outputs", "siamese"])
def test_a_record_is_what_is_evaluated(name: str):
    assert_recorded(plan_of_model(name))


@pytest.mark.skipif(
    torch.__version__.split("+")[0] != TORCH, reason=f"costs are recorded with {TORCH}"
)
def test_what_travels_is_away_meanwhile():
    plan = plans_of("transfers-only")["plan"]  # of recorded costs: what travels depends on them
    assert_recorded(plan)
    names = {e.op.name for e in plan.timeline.events if isinstance(e.op, Copy)}
    lives = [plan.memory.tensors[life.tensor].name for life in plan.memory.lives]
    assert names
    assert all(lives.count(name) >= 2 for name in names)


def test_tensors_say_what_they_are_and_where_they_come_from():
    plan = plan_of_model("gpt")
    found = {tensor.kind for tensor in plan.memory.tensors}
    assert {Kind.PARAMETERS, Kind.INPUTS, Kind.GRADIENTS, Kind.ACTIVATIONS, Kind.PASSING} <= found
    attention = [t for t in plan.memory.tensors if t.module == "blocks.2.attention.qkv"]
    assert {"addmm", "mm"} <= {tensor.operation for tensor in attention}
    assert len(plan.memory.modules) == len(plan.chain)
    for tensor in attention:
        assert plan.memory.modules[tensor.stage].startswith("blocks.2")


def test_modules_are_named_as_in_the_model_where_outputs_are_detached():
    entry = ZOO["hf_llama"]
    args, kwargs = entry.sample(0)
    sample = fxremat.Sample(args, kwargs)
    call = fxremat.compile(entry.build(), sample, 1.0, loss=lambda outputs: outputs.loss)
    named = {name for name, _ in call.named_modules()}
    told = {tensor.module for tensor in call.plan.memory.tensors} - {""}
    assert "model.layers.2.mlp.up_proj" in told
    assert told <= named


@pytest.mark.parametrize(("budget", "cleared_late"), [("1 MiB", False), (1.0, True)])
def test_gradients_that_exist_are_told(budget: str | float, cleared_late: bool):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)))
    call = fxremat.compile(model, torch.randn(32, 64), budget, loss=torch.sum)
    parameter_bytes = sum(4 * p.numel() for p in model.parameters())
    for _ in range(3):
        loss = call(torch.randn(32, 64)).sum()
        if cleared_late:
            model.zero_grad()
        loss.backward()
        assert_recorded(call.plan)
    memory = call.plan.memory
    first = [memory.tensors[life.tensor] for life in memory.lives if life.begin == 0]
    assert [t.nbytes for t in first if t.kind is Kind.PARAMETERS] == [parameter_bytes]
    existing = [t.nbytes for t in first if t.kind is Kind.GRADIENTS]
    assert existing == [parameter_bytes]
    ends = {life.end for life in memory.lives if memory.tensors[life.tensor] in first}
    assert cleared_late == (ends != {memory.count})


def test_an_error_tells_what_the_least_needs_where_gradients_are_cleared_late():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)))
    call = fxremat.compile(model, torch.randn(32, 64), 1.0, loss=torch.sum)
    for _ in range(3):
        loss = call(torch.randn(32, 64)).sum()
        model.zero_grad()
        loss.backward()
    (graph,) = call._training.graphs
    cleared = [context for context in graph.calls.plans if context.cleared]
    assert cleared
    for context in cleared:
        (pool,) = pools(graph, context, None)
        assert "module" in pool.describe_least() or "backward" in pool.describe_least()


def test_a_record_at_another_size_is_that_of_its_plan():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)))
    call = fxremat.compile(model, torch.randn(32, 64), "1 MiB", loss=torch.sum)
    for size in (24, 16):
        call(torch.randn(size, 64)).sum().backward()
        assert_recorded(call.plan)
