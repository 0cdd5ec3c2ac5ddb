"""A policy, and tags of selective checkpointing, decide what plans do with single operations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fxremat
from fxremat.graph.compiled_plan import CompiledPlan
from fxremat.passes.emit.code import Emitted
from fxremat.report.plan import Plan
from tests.efforts import PARTS, ROUNDED_PARTS, WHOLE
from tests.models import ZOO
from tests.models.bits import assert_bitwise_equal
from tests.models.reference import run_step
from tests.trials import attempt, compiled, reference

GELU, PRODUCT = torch.ops.aten.gelu.default, torch.ops.aten.addmm.default
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def answering(answer: str, *targets: Any) -> Callable[[fxremat.Operation], Any]:
    def policy(operation: fxremat.Operation) -> Any:
        return answer if operation.target in targets else None

    return policy


def planned(policy: Any, budget: Any = "min", **options: Any) -> Plan:
    entry = ZOO["gpt"]
    sample = fxremat.Sample(*entry.sample(0))
    loss = None if entry.loss_inside else entry.loss
    return fxremat.plan(
        entry.build(), sample, budget, loss=loss, effort=WHOLE, policy=policy, **options
    )


def gelus_of(emitted: Emitted) -> int:
    """How often an emitted function computes a GELU."""
    stages = [own for own in emitted.body.stages.values() if isinstance(own, fx.GraphModule)]
    return sum(node.target == GELU for stage in stages for node in stage.graph.nodes)


def trained(policy: Any, budget: Any, **options: Any) -> CompiledPlan:
    """A plan that was followed for one step, which has the bits of an unplanned one."""
    model, call = compiled(
        ZOO["gpt"], budget, input_gradients=True, effort=WHOLE, policy=policy, **options
    )
    result = run_step(ZOO["gpt"], model, call, input_gradients=True)
    assert_bitwise_equal(result, reference("gpt"))
    _, plan = call._training.latest
    return plan


def test_what_is_kept_is_computed_once():
    free = trained(None, "min")
    assert gelus_of(free.backward) > 0
    torch._dynamo.reset()
    kept = trained(answering("keep", GELU), "min")
    assert gelus_of(kept.backward) == 0
    assert kept.record.least_budget_bytes >= free.record.least_budget_bytes


def test_what_is_recomputed_is_computed_again_where_all_would_fit():
    full = trained(None, 1.0)
    assert gelus_of(full.backward) == 0
    torch._dynamo.reset()
    again = trained(answering("recompute", GELU), 1.0)
    assert gelus_of(again.backward) == gelus_of(full.forward) > 0
    assert again.record.predicted_peak_bytes <= again.record.budget_bytes


def pointwise_again(operation: fxremat.Operation) -> str | None:
    """Recompute all pointwise operations; save options may then beat keeping the rest."""
    return "recompute" if torch.Tag.pointwise in operation.target.tags else None


def in_turns(operation: fxremat.Operation) -> str | None:
    """Keep some operations, recompute others, and leave the rest to the planner."""
    return ("keep", "recompute", None)[sum(map(ord, operation.name)) % 3]


@pytest.mark.parametrize("policy", [pointwise_again, in_turns])
@pytest.mark.parametrize(
    "name",
    [
        "gpt",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("siamese", "unet", "tied", "gru")
        ),
    ],
)
def test_answers_that_are_mixed_keep_bits_and_budgets(name: str, policy: Any):
    attempt(ZOO[name], "min", reference(name), policy=policy, effort=WHOLE)


@pytest.mark.parametrize("options", [ROUNDED_PARTS, {"effort": PARTS}], ids=["rounding", "exact"])
def test_what_is_kept_is_in_no_run_that_runs_again(options: dict[str, Any]):
    def gelus(answer: str, budget: Any) -> tuple[int, int]:
        torch._dynamo.reset()
        model, call = compiled(
            ZOO["gpt"], budget, assume="strict", policy=answering(answer, GELU), **options
        )
        run_step(ZOO["gpt"], model, call)
        _, plan = call._training.latest
        assert plan.record.form.has_parts == (budget == "min")
        return gelus_of(plan.forward), gelus_of(plan.backward)

    count, again = gelus("recompute", 1.0)
    assert again == count
    assert gelus("keep", "min") == (count, 0)


ERF = torch.ops.aten.erf.default
"""What Inductor decomposes a GELU into, among others."""


@pytest.mark.parametrize("answer", ["keep", "recompute"])
def test_fused_kernels_keep_to_a_policy_with_the_bits_of_everything_kept(answer: str):
    asked: dict[str, Any] = {"executor": "inductor", "effort": WHOLE}
    asked["policy"] = answering(answer, ERF)
    model, call = compiled(ZOO["gpt"], 1.0, input_gradients=True, **asked)
    expected = run_step(ZOO["gpt"], model, call, input_gradients=True)
    torch._dynamo.reset()
    attempt(ZOO["gpt"], "min", expected, **asked)


def test_what_is_offloaded_travels_where_all_would_fit():
    plan = trained(answering("offload", GELU), 1.0, offload="auto")
    assert plan.record.host_bytes > 0
    torch._dynamo.reset()
    with pytest.raises(fxremat.ArgumentError, match="offload"):
        planned(answering("offload", GELU), 1.0)


def test_a_policy_without_an_answer_changes_nothing():
    free, asked = planned(None), planned(lambda _: None)
    assert (asked.forward_code, asked.backward_code) == (free.forward_code, free.backward_code)
    assert asked.decision == free.decision and not asked.decided


def test_a_policy_is_asked_once_an_operation_and_knows_its_module():
    asked: list[fxremat.Operation] = []
    planned(asked.append, 1.0)
    assert len({operation.name for operation in asked}) == len(asked) > 10
    products = [operation for operation in asked if operation.target is PRODUCT]
    assert products and all(operation.module for operation in products)
    assert all(operation.nbytes > 0 for operation in asked)


def test_an_answer_that_is_none_names_the_operation():
    with pytest.raises(fxremat.ArgumentError, match="'save' for addmm"):
        planned(answering("save", PRODUCT))


def test_a_budget_that_constraints_do_not_fit_says_what_they_cost():
    least = planned(None).least_budget_bytes
    with pytest.raises(fxremat.BudgetError, match="Without the constraints") as caught:
        planned(answering("keep", GELU, PRODUCT), least)
    assert caught.value.least_budget_bytes is not None
    assert caught.value.least_budget_bytes > least


class Broken(nn.Module):
    """Two regions, the second of which keeps what a policy decides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(64, 64), nn.GELU())))

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.layers(x).sum()


def test_a_budget_that_constraints_of_a_region_do_not_fit_says_what_they_cost():
    def train(budget: Any, policy: Any) -> None:
        torch._dynamo.reset()
        call = fxremat.compile(Broken(), None, budget, policy=policy, strict=True, effort=WHOLE)
        call(torch.randn(512, 64)).backward()

    with pytest.raises(fxremat.BudgetError) as free:
        train(400_000, None)
    assert "constraints" not in str(free.value)
    least = free.value.least_budget_bytes
    assert least is not None
    with pytest.raises(fxremat.BudgetError, match=f" {least} bytes suffice") as caught:
        train(400_000, answering("keep", GELU))
    assert caught.value.least_budget_bytes is not None
    assert caught.value.least_budget_bytes > least


def test_the_plan_says_who_decided():
    plan = planned(answering("keep", GELU), 1.0)
    assert {own.by for own in plan.decided} == {"policy"}
    assert {own.answer for own in plan.decided} == {"keep"}
    assert "policy" in plan.explain()


def saving(_context: object, target: object, *_args: object, **_kwargs: object) -> Any:
    return CheckpointPolicy.MUST_SAVE if target == GELU else CheckpointPolicy.PREFER_RECOMPUTE


def recomputing(_context: object, target: object, *_args: object, **_kwargs: object) -> Any:
    return CheckpointPolicy.MUST_RECOMPUTE if target == GELU else CheckpointPolicy.PREFER_SAVE


def hinting(_context: object, target: object, *_args: object, **_kwargs: object) -> Any:
    return CheckpointPolicy.PREFER_SAVE


class Tagged(nn.Module):
    """Two layers, of which one is checkpointed with tags."""

    def __init__(self, decide: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)
        self.contexts = functools.partial(create_selective_checkpoint_contexts, decide)

    def layer(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.layer, x, use_reentrant=False, context_fn=self.contexts)
        return self.last(x).sum()


@pytest.mark.parametrize(
    ("decide", "answer"), [(saving, "keep"), (recomputing, "recompute"), (hinting, None)]
)
def test_tags_are_constraints_and_hints_are_not(decide: Any, answer: str | None):
    plan = fxremat.plan(Tagged(decide), torch.randn(64, 32), 1.0, loss="own", effort=WHOLE)
    gelus = [own for own in plan.decided if own.operation.startswith("gelu")]
    assert {(own.answer, own.by) for own in gelus} == ({(answer, "tag")} if answer else set())
