"""What docs/extending.md shows works as it stands there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from fxremat.passes import pipeline
from fxremat.passes.contract import PassConfig
from fxremat.passes.pipeline import PASSES, run_passes
from fxremat.passes.step_graph import StepGraph
from fxremat.planner.search.search import GENERATORS_BY_NAME
from tests.harness import capture
from tests.models.bits import bitwise_equal
from tests.test_docs import ROOT, python_of

CODE = [text for text in python_of(ROOT / "docs" / "extending.md") if "import" in text]


@pytest.fixture(scope="module")
def shown() -> Any:
    """All names that the page's blocks define."""
    names: dict[str, Any] = {}
    passes = [*PASSES]
    for text in CODE:
        exec(compile(text, "extending.md", "exec"), names)
    yield names
    GENERATORS_BY_NAME.pop("every_other", None)  # type: ignore[attr-defined]
    PASSES[:] = passes


class Alike(nn.Module):
    """How alike rows are, by the page's operation."""

    def __init__(self, gram: Any, width: int = 64, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.gram = gram

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.gram(x).square().mean()


def test_the_formula_of_an_own_operation_is_read(shown: dict[str, Any]) -> None:
    """Where products take long beside bytes, it is as slow as the product that it is."""
    with torch.device("meta"):
        own, product = Alike(shown["gram"], 2048, 1), Alike(lambda x: x @ x.T, 2048, 1)
        bare, x = Alike(torch.tanh, 2048, 1), torch.empty(4096, 2048)
    seconds = [shown["what_it_takes"](m, x).kept.predicted_s for m in (own, product, bare)]
    assert seconds[0] - seconds[2] == pytest.approx(seconds[1] - seconds[2], rel=0.5)
    assert seconds[0] > 1.5 * seconds[2]


def test_an_own_operation_is_planned(shown: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = Alike(shown["gram"]), torch.randn(256, 64)
    compiled = fxremat.compile(model, x, "min")
    compiled(x).backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    torch.compile(model, backend="aot_eager")(x).backward()
    assert all(bitwise_equal(a, p.grad) for a, p in zip(found, model.parameters(), strict=True))


def test_an_own_pass_runs_and_keeps_all_bits(shown: dict[str, Any]) -> None:
    assert pipeline.added_passes() == ("drop transposes",)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
    step = capture(model, (x,))
    graph = StepGraph.captured(step.traced, forward_output_count=step.output_count)
    without = run_passes(graph, config=PassConfig(), before="drop transposes")
    made = run_passes(without, config=PassConfig(), first="drop transposes")
    is_twice = shown["is_twice"]
    assert any(map(is_twice, without.nodes)) and not any(map(is_twice, made.nodes))
    compiled = fxremat.compile(model, x, "min")
    compiled(x).square().mean().backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    torch.compile(model, backend="aot_eager")(x).square().mean().backward()
    assert all(bitwise_equal(a, p.grad) for a, p in zip(found, model.parameters(), strict=True))


def test_a_plan_without_an_own_pass_is_refused(shown: dict[str, Any]) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
    plan = fxremat.plan(model, x, "min")
    assert ("passes", "'drop transposes'") in plan.origin.settings
    fxremat.compile(model, x, plan=plan)
    added = [own for own in PASSES if own.name == "drop transposes"]
    PASSES.remove(added[0])
    try:
        with pytest.raises(fxremat.PlanError, match="setting passes"):
            fxremat.compile(model, x, plan=plan)
    finally:
        pipeline.add_pass(added[0], after="build")


def test_an_own_generator_is_planned_by(shown: dict[str, Any]) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))] * 6)
    x = torch.randn(512, 64)
    full = fxremat.plan(model, x, 1.0)
    plan = fxremat.plan(model, x, 0.9, effort=fxremat.Effort(generators=["every_other"]))
    assert plan.predicted_peak_bytes <= plan.budget_bytes < full.predicted_peak_bytes
    assert shown["every_other"] is GENERATORS_BY_NAME["every_other"]


def test_an_own_device_is_estimated_for(shown: dict[str, Any]) -> None:
    small = shown["small"]
    found = shown["what_it_takes"](nn.Linear(64, 64), torch.randn(8, 64))
    assert found.device == small.name


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_policy_keeps_products(shown: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6))
    model = nn.Sequential(*layers)
    plan = fxremat.plan(
        model, torch.randn(64, 32), "min", loss=torch.sum, policy=shown["save_products"]
    )
    assert plan.decided and {own.answer for own in plan.decided} == {"keep"}
