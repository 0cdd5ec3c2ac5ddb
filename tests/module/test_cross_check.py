"""Plans held against CP-SAT: what it finds for their chain and budget is the optimum."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import fxremat
from fxremat.ir import Infeasible, Problem, Solved
from fxremat.module.verify import MOST_STAGES, cross_checked
from fxremat.report.facts import CrossCheck
from fxremat.report.plan import Plan
from fxremat.units import format_bytes
from tests.plans import everything_kept, plan_of, schedule_of
from tests.reference import brute

SLOW = schedule_of(
    "F_ck 0, F_none 1, F_none 2, F_all 3, B 3, "
    "F_ck 0, F_none 1, F_all 2, B 2, F_ck 0, F_all 1, B 1, F_all 0, B 0"
)
"""Recomputes as much as there is to recompute."""


def found_in(plan: Plan) -> CrossCheck:
    found = cross_checked(plan).cross_check
    assert found is not None
    return found


@pytest.mark.parametrize("more_bytes", [0, 1 << 20, 3 << 20, 1 << 30])
def test_the_optimum_is_that_of_an_exhaustive_search(more_bytes: int):
    peak_bytes = plan_of(SLOW, stages=4).predicted_peak_bytes
    plan = plan_of(SLOW, stages=4, budget_bytes=peak_bytes + more_bytes)
    best = brute.solve(Problem(plan.chain, plan.costs, plan.budget_bytes))
    assert isinstance(best, Solved)
    found = found_in(plan)
    assert found.proven
    assert found.seconds is not None
    assert round(found.seconds * 1e3, 9) == round(best.makespan_s * 1e3, 9)  # whole milliseconds
    assert found.plan_s == plan.predicted_s
    assert found.gap == plan.predicted_s / found.seconds - 1 > 0.03


def test_a_plan_that_is_optimal_has_no_gap():
    assert found_in(plan_of(everything_kept(4), stages=4)).gap == 0


def test_only_what_is_small_enough_is_tried():
    joined = replace(plan_of(everything_kept(4), stages=4), branch_ends=(1, 2))
    large = plan_of(everything_kept(MOST_STAGES + 1), stages=MOST_STAGES + 1)
    for plan, why in ((large, f"more than {MOST_STAGES}"), (joined, "joins of branches")):
        found = found_in(plan)
        assert (found.seconds, found.gap, found.proven) == (None, None, False)
        assert why in found.why_not
        assert found.why_not in "".join(f"{s} " for s in cross_checked(plan).explain().split())
    whole = found_in(plan_of(everything_kept(MOST_STAGES), stages=MOST_STAGES))
    assert whole.proven


def test_a_budget_that_no_schedule_of_whole_stages_keeps_to_says_what_they_take():
    plan = plan_of(SLOW, stages=4, budget_bytes=1)
    expected = brute.solve(Problem(plan.chain, plan.costs, plan.budget_bytes))
    assert isinstance(expected, Infeasible)
    found = found_in(plan)
    assert (found.seconds, found.proven) == (None, True)
    assert format_bytes(expected.least_budget_bytes) in found.why_not


def model_and_sample() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    parts = [m for _ in range(2) for m in (nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))]
    return nn.Sequential(*parts), torch.randn(64, 32)


def test_users_ask_for_it(tmp_path):
    model, x = model_and_sample()
    plan = fxremat.plan(model, x, "min", check=True)
    assert plan.cross_check is not None
    assert plan.cross_check.plan_s == plan.predicted_s
    assert plan.cross_check.seconds or plan.cross_check.why_not
    assert "cross-check" in plan.explain()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").cross_check == plan.cross_check
    without = replace(plan, cross_check=None)
    assert without == plan
    assert "cross-check" not in without.explain()


def test_nothing_is_checked_unasked():
    assert fxremat.plan(*model_and_sample(), 1.0).cross_check is None


@pytest.mark.parametrize(
    ("options", "argument"),
    [({"offload": "auto"}, "offload"), ({"offload": "only"}, "offload"), ({"check": 1}, "check")],
)
def test_what_it_cannot_check_is_refused_at_once(options: dict[str, object], argument: str):
    model, x = model_and_sample()
    with pytest.raises(fxremat.ArgumentError) as caught:
        fxremat.plan(model, x, "min", **{"check": True, **options})
    assert caught.value.argument == argument


def test_without_ortools_it_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fxremat.module.verify.find", lambda _: None)
    with pytest.raises(fxremat.ArgumentError, match="pip install ortools"):
        fxremat.plan(*model_and_sample(), "min", check=True)
